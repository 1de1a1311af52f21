"""Requests that a pair cannot read, or whose prompts leave no room in its context for the tokens
asked for."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Literal

from spectune.optimizer.execute import DecodeOptions
from spectune.runtime.text_codec import TextCodec
from spectune.traces.errors import WorkloadError
from spectune.traces.schema import Workload
from spectune.traces.workloads import BadRows, left_out

Overlong = Literal["error", "skip", "truncate"]


def made_to_fit(
    pair: TextCodec,
    workload: Workload,
    options: DecodeOptions,
    overlong: Overlong,
    bad_rows: BadRows,
    drafts: Collection[str] | None = None,
) -> tuple[Workload, list[str]]:
    """(the workload without requests that cannot be read, its overlong prompts left out or cut;
    lines on that). What limits is the context of the target and of the ``drafts`` that are used
    (None: all).

    What is cut is a prompt's beginning, as what is continued stands at the end. Raises
    WorkloadError for ``error``, where nothing is left, and where no prompt has room.
    """
    sizes: dict[str, int] = {}
    problems = []
    for r in workload.requests:
        try:
            sizes[r.id] = len(pair.encode_request(r, chat=options.chat))
        except WorkloadError as problem:
            if bad_rows == "error":
                raise
            problems.append(str(problem))
    lines = left_out(problems, len(workload.requests), "requests", bad_rows)
    readable = tuple(r for r in workload.requests if r.id in sizes)
    workload = replace(workload, requests=readable)
    context = pair.context(drafts)
    room = context.positions - options.max_new_tokens
    rooms = {r.id: context.positions - options.most_tokens(r) for r in workload.requests}
    beyond = [name for name, size in sizes.items() if size > rooms[name]]
    more = sum((r.max_new_tokens or 0) > options.max_new_tokens for r in workload.requests)
    if more:
        lines.append(
            f"{more} of {len(sizes)} requests ask for more than --max-new-tokens "
            f"{options.max_new_tokens}, and end there"
        )
    if not beyond:
        return workload, lines
    counted = f"{len(beyond)} of {len(sizes)} prompts"
    if overlong == "error" or room < 1:
        new = context.positions - rooms[beyond[0]]
        raise WorkloadError(
            f"request {beyond[0]}: {sizes[beyond[0]]} prompt tokens + {new} new ones exceed "
            f"{context}, as in {counted}; lower --max-new-tokens, or leave them out or cut them by "
            "--set requests.overlong=skip or =truncate"
        )
    requests = []
    for request in workload.requests:
        if sizes[request.id] <= rooms[request.id]:
            requests.append(request)
        elif overlong == "truncate":
            ids = pair.encode_request(request, chat=options.chat)[-rooms[request.id] :]
            requests.append(replace(request, prompt="", messages=(), ids=tuple(ids)))
    if not requests:
        raise WorkloadError(
            f"requests.overlong skip: nothing is left, {counted} are longer than {room} tokens"
        )
    how = "left out" if overlong == "skip" else "cut at their beginning"
    lines.append(f"{counted} were longer than {room} tokens ({context}) and were {how}")
    return replace(workload, requests=tuple(requests)), lines
