"""The GPU code in a CUDA shared library: what there is, and a copy with one architecture's.

    python fatbin.py list LIBRARY ...
    python fatbin.py prune LIBRARY COPY [WORD,WORD ...]

``prune`` keeps the compiled code (cubins) of compute capability 9.0; with words, of that only what
holds one of them. All other GPU code becomes zeros, which compress to nothing. Headers, offsets and
sizes stay as they are: the driver chooses an entry by its header, and never reads another's code.
The copy is checked to differ in those bytes alone.
"""

from __future__ import annotations

import mmap
import struct
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

MAGIC = 0xBA55ED50
"""The first bytes of a container of GPU code."""
PTX, CUBIN = 1, 2
ARCHITECTURE = 90
SECTIONS = (".nv_fatbin", "__nv_relfatbin")


class Entry(NamedTuple):
    """GPU code of one kind for one architecture: where it starts in the file, and its bytes."""

    kind: int
    architecture: int
    start: int
    size: int


def sections(data: mmap.mmap) -> Iterator[tuple[str, int, int]]:
    """Name, offset and size of each section of a 64-bit ELF file."""
    if data[:4] != b"\x7fELF" or data[4] != 2:
        raise ValueError("no 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, table + n * size) for n in range(count)]
    for header in headers:
        name = headers[names][4] + header[0]
        yield data[name : data.find(b"\0", name)].decode(), header[4], header[5]


def entries(data: mmap.mmap) -> Iterator[Entry]:
    """All GPU code of a library."""
    for name, place, size in sections(data):
        if name not in SECTIONS:
            continue
        end = place + size
        while place + 16 <= end:
            magic, _, header, length = struct.unpack_from("<IHHQ", data, place)
            if magic != MAGIC:  # between containers there are zeros
                if any(data[place : place + 8]):
                    raise ValueError(f"no GPU code at {place:#x}")
                place += 8
                continue
            entry, place = place + header, place + header + length
            while entry < place:
                kind, _, header, length = struct.unpack_from("<HHIQ", data, entry)
                (architecture,) = struct.unpack_from("<I", data, entry + 28)
                yield Entry(kind, architecture, entry + header, length)
                entry += header + length
            if entry != place:
                raise ValueError(f"a container does not end at {place:#x}")


def mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def show(path: Path) -> None:
    """Prints how much GPU code a library has, by kind and architecture."""
    data, sizes, counts = mapped(path), Counter[str](), Counter[str]()
    for entry in entries(data):
        name = f"{'PTX' if entry.kind == PTX else 'cubin'} {entry.architecture}"
        if not any(data[entry.start : entry.start + entry.size]):
            name += ", zeros"
        counts[name] += 1
        sizes[name] += entry.size
    for name in sorted(counts):
        print(f"{path.name}: {name}: {counts[name]} entries, {sizes[name] / 1e6:.1f} MB")


def prune(path: Path, copy: Path, words: Sequence[bytes]) -> None:
    """Writes a copy with the GPU code of one architecture alone. Raises ValueError where it would
    differ in anything else, or words are looked for in code that is compressed."""
    data, kept = mapped(path), 0
    pruned, gone = bytearray(data), list[Entry]()
    for entry in entries(data):
        code = data[entry.start : entry.start + entry.size]
        is_kept = (entry.kind, entry.architecture) == (CUBIN, ARCHITECTURE)
        if is_kept and words:
            if code[:4] != b"\x7fELF":
                raise ValueError(f"the code at {entry.start:#x} is compressed")
            is_kept = any(word in code for word in words)
        if is_kept:
            kept += entry.size
        else:
            pruned[entry.start : entry.start + entry.size] = bytes(entry.size)
            gone.append(entry)
    copy.write_bytes(pruned)
    _check(data, mapped(copy), gone)
    zeros = sum(entry.size for entry in gone)
    print(f"{path.name}: {kept / 1e6:.1f} MB of GPU code kept, {zeros / 1e6:.1f} MB zeros")


def _check(data: mmap.mmap, copy: mmap.mmap, gone: Sequence[Entry]) -> None:
    """Raises ValueError where a copy differs from a library in more than these entries."""
    last = 0
    for entry in (*gone, Entry(0, 0, len(data), 0)):
        end = entry.start + entry.size
        if data[last : entry.start] != copy[last : entry.start] or any(copy[entry.start : end]):
            raise ValueError(f"the copy differs before {end:#x}")
        last = end
    if len(data) != len(copy) or list(entries(data)) != list(entries(copy)):
        raise ValueError("the copy has other entries")


if __name__ == "__main__":
    command, *rest = sys.argv[1:]
    if command == "list":
        for library in rest:
            show(Path(library))
    else:
        looked_for = rest[2].encode().split(b",") if len(rest) > 2 else []
        prune(Path(rest[0]), Path(rest[1]), looked_for)
