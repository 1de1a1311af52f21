"""Recording: decode a workload, keep every text, then look around from every start of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from optimizer.execute import DecodeOptions, encode, warm
from runtime.decoder import Decoded, Decoder
from runtime.loading import LoadedPair
from runtime.loop import PolicySource
from runtime.panorama import record_panorama
from traces.schema import Workload
from traces.store import RecordingInfo, TraceStore

Progress = Callable[[str, int, int], None]
"""Called with (phase, done, total)."""
BATCH = 8
"""Panoramas stored in one transaction."""


def recording_options(pair: LoadedPair, options: DecodeOptions) -> dict[str, Any]:
    """What else a recording's texts depend on, as stored with it."""
    return {
        "stop_strings": list(options.stop_strings),
        "chat": options.chat,
        "dtype": str(pair.target.dtype).removeprefix("torch."),
        "device": pair.device.type,
    }


@dataclass(frozen=True)
class RecordRequest:
    """What to record: a workload under given sampling, with panoramas of these drafts up to ``gamma_max``."""

    workload: Workload
    options: DecodeOptions
    drafts: tuple[str, ...]
    gamma_max: int = 16


def record(
    store: TraceStore,
    pair: LoadedPair,
    wanted: RecordRequest,
    source: PolicySource,
    *,
    fresh: bool = False,
    reuse_complete: bool = False,
    progress: Progress = lambda phase, done, total: None,
) -> RecordingInfo:
    """Decodes and stores every request, then every panorama; what is stored already is not done again.

    A recording that was begun with the same arguments and not finished is resumed, unless ``fresh``; with ``reuse_complete`` a
    finished one counts as well. The policy in ``source`` changes how fast this goes, never what is recorded. Every request is
    committed as it ends, so that a kill loses at most the one in hand.
    """
    encoded = encode(pair, wanted.workload, wanted.options)
    store.put_pair(pair.id, pair.spec.name, pair.spec.to_json())
    digest = store.put_workload(wanted.workload)
    spec: dict[str, Any] = {
        "max_new_tokens": wanted.options.max_new_tokens,
        "verifier": wanted.options.verifier,
        "options": recording_options(pair, wanted.options),
    }
    info = None
    if not fresh:
        info = store.find_recording(pair.id, digest, wanted.options.sampling, **spec, state="recording")
        if info is None and reuse_complete:
            info = store.find_recording(pair.id, digest, wanted.options.sampling, **spec, state="complete")
    if info is None:
        info = store.create_recording(pair.id, digest, wanted.options.sampling, **spec)
    have = store.recorded_ordinals(info.id)
    total = len(encoded.items)
    if len(have) < total:
        warm(pair, encoded)
        decoder = Decoder(pair, source, wanted.options.verifier)
        for ordinal, (item, request) in enumerate(encoded.items):
            if ordinal not in have:
                decoded = decoder.decode(request, item.category, wanted.options.stop_strings)
                store.append_trajectory(info.id, ordinal, decoded.trajectory, decoded.steps)
            progress("decode", ordinal + 1, total)
    retrace(store, pair, info.id, wanted.drafts, wanted.gamma_max, progress=progress)
    if info.state != "complete":
        store.finish_recording(info.id)
    return store.get_recording(info.id)


def retrace(
    store: TraceStore,
    pair: LoadedPair,
    recording: str,
    drafts: Collection[str],
    gamma_max: int,
    *,
    progress: Progress = lambda phase, done, total: None,
) -> int:
    """Records the panoramas that a recording lacks, of drafts that may be newer than it; how many were made."""
    made = 0
    for draft in drafts:
        missing = store.missing_panoramas(recording, draft, gamma_max)
        batch: list[Any] = []
        for n, request in enumerate(store.iterate(recording, drafts=(), ordinals=missing) if missing else ()):
            batch.append((request.ordinal, record_panorama(pair, request.trajectory, draft, gamma_max)))
            if len(batch) >= BATCH or n + 1 == len(missing):
                made += store.put_panoramas(recording, batch)
                batch = []
            progress(f"panorama {draft}", n + 1, len(missing))
    return made


def keep_served(store: TraceStore, pair: LoadedPair, options: DecodeOptions, decoded: Sequence[Decoded]) -> str:
    """Stores what was served as a recording (source ``serve``): tokens and rounds only; panoramas are made when it is tuned on."""
    store.put_pair(pair.id, pair.spec.name, pair.spec.to_json())
    info = store.create_recording(
        pair.id,
        None,
        options.sampling,
        max_new_tokens=options.max_new_tokens,
        verifier=options.verifier,
        options=recording_options(pair, options),
        source="serve",
    )
    store.append_trajectories(info.id, [(i, d.trajectory, d.steps) for i, d in enumerate(decoded)])
    store.finish_recording(info.id)
    return info.id


def split(ids: Sequence[str], categories: Sequence[str], *, test_share: float = 0.4) -> tuple[list[int], list[int]]:
    """Indices of the search and test parts of a recording: by category, every request in one of them, the same each time.

    Requests of a category go to the test part at an even pace, so that a prefix of the workload is split like the whole. With a
    single request, it is in both.
    """
    search: list[int] = []
    test: list[int] = []
    seen: dict[str, int] = {}
    for i, category in enumerate(categories):
        n = seen.get(category, 0)
        seen[category] = n + 1
        (test if int((n + 1) * test_share) > int(n * test_share) else search).append(i)
    if not test:
        test = list(search)
    if not search:
        search = list(test)
    return search, test
