"""The Triton kernels that grow EAGLE-2's trees: a program for each tree makes a level, another
chooses the nodes. :mod:`runtime.drafts.tree_program` launches them."""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def growth_kernels(in_interpreter: bool) -> tuple[Any, Any]:
    """The kernels of a level and of the choice; ``in_interpreter`` keeps the interpreter apart."""
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

    # fmt: off
    def level(  # type: ignore[no-untyped-def]
        tokens, scores, there, numbers, weights, logs, log_sums, pool, front, depth, begin, read,
        rows, width, nodes, given, most, slots, positions, told, candidates, levels,
        ROWS: tl.constexpr, WIDE: tl.constexpr,
        NODES: tl.constexpr, SCALE: tl.constexpr, MOST: tl.constexpr, COUPLED: tl.constexpr,
        SHIFT: tl.constexpr, INFINITE: tl.constexpr,
    ):
        # fmt: on
        tree = tl.program_id(0)
        tokens += tree * rows * given
        scores += tree * rows * given
        there += tree * rows
        numbers += tree * told
        pool += tree * 5 * candidates
        front += tree * 6 * most * levels
        row, rank = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDE)[None, :]
        place = tl.load(front + (depth - 1) * 6 * most + row, mask=row < rows, other=-2)
        exists = (rank < tl.load(there + row, mask=row < rows, other=0)) & (place >= -1)
        score = tl.load(scores + row * given + rank, mask=exists, other=0.0)
        cost = tl.minimum(tl.maximum(score * SCALE, 0.0), MOST).to(tl.int64)
        if COUPLED:
            total = tl.sum(tl.load(weights + cost, mask=exists, other=0), 1)[:, None]
            share = tl.load(log_sums + (total >> SHIFT)) - tl.load(logs + cost)
            cost = tl.floor(share * SCALE + 0.5).to(tl.int64)
        cost += tl.load(pool + 5 * place + 1, mask=place >= 0, other=0)
        cost = tl.where(exists, cost, INFINITE)
        at, listed = row * width + rank, (row < rows) & (rank < width)
        end: tl.constexpr = INFINITE * ROWS * WIDE
        key = tl.where(listed, cost * (ROWS * WIDE) + at, 2 * end)
        chosen, place_read = tl.full((NODES,), end, tl.int64), tl.full((ROWS, WIDE), -1, tl.int64)
        node = tl.arange(0, NODES)
        for j in range(nodes):
            lowest = tl.min(tl.min(key, 1), 0)
            chosen = tl.where(node == j, lowest, chosen)
            place_read = tl.where(key == lowest, read + j, place_read)
            key = tl.where(key == lowest, 2 * end, key)
        token = tl.load(tokens + row * given + rank, mask=exists, other=0)
        of_pool = pool + 5 * (begin + at)  # token, cost, parent, place among those read, level
        tl.store(of_pool, token, mask=listed)
        tl.store(of_pool + 1, cost, mask=listed)
        tl.store(of_pool + 2, place + 0 * at, mask=listed)
        tl.store(of_pool + 3, place_read, mask=listed)
        tl.store(of_pool + 4, depth + 0 * at, mask=listed)
        found, index = chosen < end, chosen % (ROWS * WIDE)
        above = tl.where(found, index // width, 0)
        token = tl.load(tokens + above * given + index % width, mask=found, other=0)
        slot, length = tl.load(numbers) + read + node, tl.load(numbers) + read + nodes
        position = tl.minimum(tl.load(numbers + 1) + depth - 1, positions - 1)
        of_front, real = front + depth * 6 * most + node, node < nodes
        tl.store(of_front, tl.where(found, begin + index, -2), mask=real)
        tl.store(of_front + most, above, mask=real)
        tl.store(of_front + 2 * most, token, mask=real)
        tl.store(of_front + 3 * most, tl.minimum(slot, slots), mask=real)
        tl.store(of_front + 4 * most, position + 0 * node, mask=real)
        tl.store(of_front + 5 * most, tl.minimum(length, slots) + 0 * node, mask=real)

    # fmt: off
    def choose(  # type: ignore[no-untyped-def]
        pool, numbers, out, candidates, most, last, told, SIZE: tl.constexpr, BITS: tl.constexpr,
        INFINITE: tl.constexpr,
    ):
        # fmt: on
        tree = tl.program_id(0)
        numbers += tree * told
        pool += tree * 5 * candidates
        out += tree * (6 + 4 * most)
        goal, at = tl.load(numbers + 2), tl.arange(0, SIZE)
        levels, node = tl.minimum(goal, last), pool + 5 * at
        level = tl.load(node + 4, mask=at < candidates, other=0)
        grown = (level > 0) & (level <= levels)
        cost = tl.load(node + 1, mask=grown, other=INFINITE)
        key, bound = cost * SIZE + at, goal * 0
        for bit in range(BITS):  # up to the last key with fewer than `most` below it
            more = bound + (tl.full((), 1, tl.int64) << (BITS - 1 - bit))
            bound = tl.where(tl.sum((key < more).to(tl.int32), 0) < most, more, bound)
        chosen = (key <= bound) & (cost < INFINITE)
        number = tl.cumsum(chosen.to(tl.int32), 0) - 1
        parent = tl.load(node + 2, mask=chosen, other=-1)
        above = tl.gather(number, tl.maximum(parent, 0).to(tl.int32), 0)
        read = tl.load(node + 3, mask=chosen & (level < levels), other=-1)
        of_node = out + 6 + number
        tl.store(of_node, tl.load(node, mask=chosen, other=0), mask=chosen)
        tl.store(of_node + most, tl.where(parent < 0, parent, above), mask=chosen)
        tl.store(of_node + 2 * most, level, mask=chosen)
        tl.store(of_node + 3 * most, read, mask=chosen)
        tl.store(out, tl.where(goal > last, goal, 0))
        tl.store(out + 1 + tl.arange(0, 2), levels + tl.zeros((2,), tl.int64))
        tl.store(out + 5, tl.sum(chosen.to(tl.int32), 0))

    sizes = ["depth", "begin", "read", "rows", "width", "nodes", "given", "most", "slots"]
    shape = ["told", "candidates"]
    sizes += ["positions", "levels", *shape]  # compiled once for all
    made = triton.jit(level, do_not_specialize=sizes)
    return made, triton.jit(choose, do_not_specialize=["most", "last", *shape])
