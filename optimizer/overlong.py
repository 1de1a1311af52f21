"""Prompts that leave no room in the pair's context for the tokens asked for."""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Literal

from spectune.optimizer.execute import DecodeOptions
from spectune.runtime.text_codec import TextCodec
from spectune.traces.errors import WorkloadError
from spectune.traces.schema import Request, Workload, message_texts

Overlong = Literal["error", "skip", "truncate"]


def made_to_fit(
    pair: TextCodec,
    workload: Workload,
    options: DecodeOptions,
    overlong: Overlong,
    drafts: Collection[str] | None = None,
) -> tuple[Workload, str]:
    """(the workload, its overlong prompts left out or cut; what was done, in a line, or nothing).
    What limits is the context of the target and of the ``drafts`` that are used (None: all).

    What is cut is a prompt's beginning, as what is continued stands at the end; of a conversation
    first whole messages after the system's. Raises WorkloadError for ``error``, where nothing is
    left, and where no prompt has room.
    """
    context = pair.context(drafts)
    room = context.positions - options.max_new_tokens
    rooms = {r.id: context.positions - options.most_tokens(r) for r in workload.requests}
    sizes = {r.id: len(pair.encode_request(r, chat=options.chat)) for r in workload.requests}
    beyond = [name for name, size in sizes.items() if size > rooms[name]]
    more = sum((r.max_new_tokens or 0) > options.max_new_tokens for r in workload.requests)
    said = (
        f"{more} of {len(sizes)} requests ask for more than --max-new-tokens "
        f"{options.max_new_tokens}, and end there"
        if more
        else ""
    )
    if not beyond:
        return workload, said
    counted = f"{len(beyond)} of {len(sizes)} prompts"
    if overlong == "error" or room < 1:
        new = context.positions - rooms[beyond[0]]
        raise WorkloadError(
            f"request {beyond[0]}: {sizes[beyond[0]]} prompt tokens + {new} new "
            f"ones exceed {context}, as in {counted}; lower "
            "--max-new-tokens, or leave them out or cut them by --overlong skip or --overlong "
            "truncate"
        )
    if overlong == "skip":
        kept = tuple(r for r in workload.requests if sizes[r.id] <= rooms[r.id])
        if not kept:
            raise WorkloadError(
                f"--overlong skip: nothing is left, {counted} are longer than {room} tokens"
            )
        done = "left out"
    else:
        kept = tuple(
            r if sizes[r.id] <= rooms[r.id] else _cut(pair, r, options.chat, rooms[r.id])
            for r in workload.requests
        )
        done = "cut at their beginning"
    cut = f"{counted} were longer than {room} tokens ({context}) and were {done}"
    return replace(workload, requests=kept), f"{cut}; {said}" if said else cut


def _cut(pair: TextCodec, request: Request, chat: bool, room: int) -> Request:
    def fits(shorter: Request) -> bool:
        return 0 < len(pair.encode_request(shorter, chat=chat)) <= room

    if request.ids:
        return replace(request, ids=request.ids[-room:])
    last = request
    for last in _fewer_messages(request):
        if fits(last):
            return last
    *before, message = last.chat()
    text = "\n".join(message_texts(message))

    def ending(start: int) -> Request:
        if not last.messages:
            return replace(last, prompt=text[start:])
        return replace(last, messages=(*before, {**message, "content": text[start:]}))

    start = bisect.bisect_left(range(len(text)), True, key=lambda start: fits(ending(start)))
    if not text[start:].strip():
        raise WorkloadError(
            f"request {request.id}: its prompt cannot be cut to {room} tokens; --overlong skip "
            "leaves it out"
        )
    return ending(start)


def _fewer_messages(request: Request) -> Iterator[Request]:
    """The conversation without what came before each later message of the user's; the system's
    first one stays."""
    messages = request.messages
    kept = 1 if messages and messages[0]["role"] == "system" else 0
    for n, message in enumerate(messages):
        if message["role"] == "user" and n > kept:
            yield replace(request, messages=(*messages[:kept], *messages[n:]))
