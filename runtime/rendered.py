"""Prompts that went through a chat template before they were written down."""

from __future__ import annotations

from collections.abc import Sequence

from spectune.runtime.text_codec import TextCodec
from spectune.traces.errors import SpectuneError
from spectune.traces.schema import Request, message_texts


def rendered_before(codec: TextCodec, requests: Sequence[Request], *, chat: bool) -> list[str]:
    """Lines on prompts that seem to have gone through a chat template before, which are read as
    they are: how many go through it again, how many begin with BOS twice, and what to do."""
    lines, bos, of = [], codec.tokenizer.bos_token, f"of {len(requests)} prompts"
    chat = chat and codec.has_template
    if chat and (again := [r for r in requests if not (r.is_plain or r.ids)]):
        marks = _special_tokens(codec)
        found = [{m for m in marks if any(m in text for text in _texts(r))} for r in again]
        for held, request in zip(found, again, strict=True):
            if bos and _texts(request)[0].startswith(bos):
                held.add(bos)
        if count := sum(map(bool, found)):
            strip = f", and strip {bos} from their beginning" if _is_added(codec) else ""
            lines.append(
                f"{count} {of} hold special tokens of the target's chat template "
                f"({', '.join(sorted(set().union(*found)))}) and go through it all the same; if "
                f"they went through it before, say --set sampling.chat=false{strip}"
            )
    twice = [codec.tokenizer.bos_token_id] * 2
    if bos and (count := sum(_begins(codec, r, twice, chat=chat) for r in requests)):
        lines.append(
            f"{count} {of} begin with {bos} twice, as servers that are sent them read them; strip "
            "it unless that is meant"
        )
    return lines


def _special_tokens(codec: TextCodec) -> frozenset[str]:
    """The special tokens that the chat template writes; none where it takes no plain message."""
    try:
        ids = codec.encode_request(Request("probe", "", "a text of ours"), chat=True)
    except SpectuneError:
        return frozenset()
    added = codec.tokenizer.added_tokens_decoder
    return frozenset(str(added[n]) for n in {*ids} if n in added and added[n].special)


def _is_added(codec: TextCodec) -> bool:
    """Whether the tokenizer puts BOS before what it reads."""
    return bool(codec.encode("a")[:1] == [codec.tokenizer.bos_token_id])


def _begins(codec: TextCodec, request: Request, ids: list[int], *, chat: bool) -> bool:
    """Whether a prompt that goes through no template begins with these tokens."""
    if request.ids or (chat and not request.is_plain):
        return [*request.ids[: len(ids)]] == ids
    start = _texts(request)[0][:100]
    return start.startswith(codec.tokenizer.bos_token) and codec.encode(start)[: len(ids)] == ids


def _texts(request: Request) -> list[str]:
    return [text for message in request.chat() for text in message_texts(message)]
