"""Answers as OpenAI has them: whole, or as the chunks of a stream."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar

from spectune.runtime.text_codec import PARTIAL, TextCodec
from spectune.service.calls import Call, Delta, RefusedError
from spectune.service.text_stream import TokenText

LEAST_LOGPROB = -9999.0
"""Stands for the logarithm of 0, which JSON has not."""


def error_object(refused: RefusedError) -> dict[str, Any]:
    """OpenAI's error object."""
    about = {"param": refused.param, "code": refused.code}
    return {"error": {"message": str(refused), "type": refused.kind, **about}}


class Answer(ABC):
    """How a call's texts are told. ``name`` is the model's."""

    whole: ClassVar[str]
    chunk: ClassVar[str]

    def __init__(self, call: Call, codec: TextCodec, name: str, fingerprint: str) -> None:
        self.call, self.codec = call, codec
        self._common = {
            "id": call.id,
            "created": call.created,
            "model": name,
            "system_fingerprint": fingerprint,
            "seed": call.seed,
        }

    @abstractmethod
    def choice(self, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """A whole choice."""

    @abstractmethod
    def parts(self, delta: Delta, *, is_first: bool) -> list[dict[str, Any]]:
        """What chunks say of a delta, each without its index."""

    @abstractmethod
    def logprobs(self, tokens: Sequence[TokenText]) -> dict[str, Any] | None:
        """How probable tokens were; None where that is not asked for."""

    async def to_json(self) -> dict[str, Any]:
        """The whole answer."""
        count = len(self.call.jobs)
        texts, finishes = [""] * count, [""] * count
        tokens: list[list[TokenText]] = [[] for _ in range(count)]
        async for delta in self.call.deltas():
            texts[delta.index] += delta.text
            tokens[delta.index] += delta.tokens
            finishes[delta.index] = delta.finish or ""
        choices = [
            {
                "index": n,
                **self.choice(texts[n], self.logprobs(tokens[n])),
                "finish_reason": finishes[n],
            }
            for n in range(count)
        ]
        usage = self.call.usage()
        return {**self._common, "object": self.whole, "choices": choices, "usage": usage}

    async def events(self, *, usage: bool) -> AsyncIterator[str]:
        """The answer as server-sent events; with ``usage`` the last one says it."""
        begun = set[int]()
        more: dict[str, Any] = {"usage": None} if usage else {}
        head = {**self._common, "object": self.chunk}
        try:
            async for delta in self.call.deltas():
                for part in self.parts(delta, is_first=delta.index not in begun):
                    yield _event({**head, "choices": [{"index": delta.index, **part}], **more})
                begun.add(delta.index)
            if usage:
                yield _event({**head, "choices": [], "usage": self.call.usage()})
        except RefusedError as refused:  # the answer has begun
            yield _event(error_object(refused))
        yield "data: [DONE]\n\n"

    def token(self, token: int) -> str:
        """A token by itself, special ones too."""
        return str(self.codec.tokenizer.decode([token]))


class CompletionAnswer(Answer):
    """Of ``/v1/completions``."""

    whole = chunk = "text_completion"

    def choice(self, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {"text": text, "logprobs": logprobs}

    def parts(self, delta: Delta, *, is_first: bool) -> list[dict[str, Any]]:
        logprobs = self.logprobs(delta.tokens)
        return [{"text": delta.text, "logprobs": logprobs, "finish_reason": delta.finish}]

    def logprobs(self, tokens: Sequence[TokenText]) -> dict[str, Any] | None:
        if not tokens:
            return None
        own = [t.logprobs and max(t.logprobs.logprob, LEAST_LOGPROB) for t in tokens]
        return {
            "tokens": [self.token(t.token) for t in tokens],
            "token_logprobs": own,
            "top_logprobs": [self._top(t) for t in tokens],
            "text_offset": [t.offset for t in tokens],
        }

    def _top(self, of: TokenText) -> dict[str, float] | None:
        """By token, the likeliest first; of several that are written alike the likeliest."""
        if of.logprobs is None:
            return None
        found: dict[str, float] = {}
        for token, logprob in (*of.logprobs.top, (of.token, of.logprobs.logprob)):
            found.setdefault(self.token(token), max(logprob, LEAST_LOGPROB))
        return found


class ChatAnswer(Answer):
    """Of ``/v1/chat/completions``."""

    whole, chunk = "chat.completion", "chat.completion.chunk"

    def choice(self, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text,
            "refusal": None,
            "annotations": [],
        }
        return {"message": message, "logprobs": logprobs}

    def parts(self, delta: Delta, *, is_first: bool) -> list[dict[str, Any]]:
        parts: list[tuple[dict[str, Any], Any, str | None]] = []
        if is_first:
            parts.append(({"role": "assistant", "content": ""}, None, None))
        if delta.text or delta.tokens:
            parts.append(({"content": delta.text}, self.logprobs(delta.tokens), None))
        if delta.finish is not None:
            parts.append(({}, None, delta.finish))
        names = "delta", "logprobs", "finish_reason"
        return [dict(zip(names, part, strict=True)) for part in parts]

    def logprobs(self, tokens: Sequence[TokenText]) -> dict[str, Any] | None:
        if not tokens:
            return None
        content = []
        for t in tokens:
            assert t.logprobs is not None
            top = [self._entry(token, logprob) for token, logprob in t.logprobs.top]
            entry = self._entry(t.token, t.logprobs.logprob)
            content.append({**entry, "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.token(token)
        held = None if PARTIAL in text else list(text.encode())
        return {"token": text, "logprob": max(logprob, LEAST_LOGPROB), "bytes": held}


def _event(document: dict[str, Any]) -> str:
    return f"data: {json.dumps(document, ensure_ascii=False)}\n\n"
