"""One HTTP request: the texts that it asks for, from the queue to characters."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from spectune.runtime.decoder import Decoder
from spectune.runtime.loop import DecodeRequest
from spectune.runtime.policies.document import EXPANDED_LIMIT
from spectune.service.decode_thread import Burst, DecodeThread, QueueFullError, TextJob
from spectune.service.requests import Generation
from spectune.service.text_stream import TextStream, TokenText
from spectune.traces.schema import Request, Sampling, request_seed

CLIENT_LEFT = 499
"""The status of a response that nobody read to its end."""


class RefusedError(Exception):
    """A request that gets OpenAI's error object instead of a text."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        *,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.code = status, kind, param, code


class ClientLeftError(Exception):
    """Nobody reads the answer."""


@dataclass(frozen=True)
class PromptIds:
    """Token ids, and the text that ``echo`` repeats; None: that of the ids."""

    ids: list[int]
    text: str | None = None


@dataclass(frozen=True)
class Delta:
    """What a choice got: text, its tokens, and how it ended, if it did."""

    index: int
    text: str
    tokens: list[TokenText]
    finish: str | None


class Call:
    """The texts of one HTTP request, queued as it is made, of ``chat_tokens`` at most where it says
    no number. Choice ``p * n + i`` is the i-th of prompt p. ``status`` is the response's in the
    end. Raises RefusedError where the texts do not fit, or too many wait."""

    def __init__(
        self,
        thread: DecodeThread,
        asked: Generation,
        prompts: Sequence[PromptIds],
        chat_tokens: int,
        timeout_s: float,
    ) -> None:
        self.id = f"{asked.id_prefix}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self.seed = secrets.randbits(32) if asked.seed is None else asked.seed
        self._thread, self._timeout_s = thread, timeout_s
        self._began_s, self._deadline = time.monotonic(), time.monotonic() + timeout_s
        self.first_token_s: float | None = None
        self.status = CLIENT_LEFT
        self._bursts: asyncio.Queue[tuple[int, Burst]] = asyncio.Queue()
        self._scores = asked.best_tokens is not None
        self.prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
        self._leads: dict[int, PromptIds] = {}
        self.jobs: list[TextJob] = []
        self._streams: list[TextStream] = []
        codec, xargs = thread.decoder.pair, asked.vllm_xargs
        for prompt in prompts:
            room = _room(thread.decoder, len(prompt.ids), asked.most_tokens or 1)
            most = asked.most_tokens or min(chat_tokens, room)
            request = _request(thread.decoder, asked, self.seed, prompt.ids, most)
            for i in range(asked.n or 1):
                index = len(self.jobs)
                one = replace(
                    request,
                    # A text depends on prompt, sampling, seed and this number, and on no other.
                    **_named(request.sampling, prompt.ids, i),
                    top_logprobs=asked.best_tokens,
                )
                self.jobs.append(
                    TextJob(
                        one,
                        partial(self._receive, index),
                        name=f"{self.id}-{index}",
                        label=(xargs and xargs.spectune_label) or "",
                        echoes_logprobs=asked.echoes and self._scores,
                        is_recorded=not (xargs and xargs.spectune == "off"),
                    )
                )
                self._streams.append(TextStream(codec, asked.stops))
                if asked.echoes:
                    self._leads[index] = prompt
        try:
            thread.submit(self.jobs)
        except QueueFullError:
            raise RefusedError(
                429, "too many requests wait; send it again later", "rate_limit_error",
                code="queue_full",
            ) from None  # fmt: skip

    def _receive(self, index: int, burst: Burst) -> None:
        self._bursts.put_nowait((index, burst))

    def cancel(self) -> None:
        """Frees what its texts hold at the next step."""
        for job in self.jobs:
            job.is_cancelled = True

    def leave(self) -> None:
        """Says that nobody reads the answer: :meth:`deltas` raises ClientLeftError."""
        self.cancel()
        self._bursts.put_nowait((0, Burst(error=ClientLeftError())))

    def usage(self) -> dict[str, Any]:
        """Its tokens, as OpenAI counts them."""
        text = sum(len(job.output) for job in self.jobs)
        steps = [step for job in self.jobs for step in job.steps]
        accepted = sum(step.accepted for step in steps)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": text,
            "total_tokens": self.prompt_tokens + text,
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": sum(step.drafted for step in steps) - accepted,
            },
        }

    async def deltas(self) -> AsyncIterator[Delta]:
        """What the choices get, as they get it, to the end of all. Raises RefusedError after the
        time that a request has, and for what the decoder raised; what remains is cancelled."""
        open_choices = set(range(len(self.jobs)))
        try:
            while open_choices:
                index, burst = await self._next()
                if index in open_choices:
                    delta = self._delta(index, burst)
                    if delta.finish is not None:
                        open_choices.remove(index)
                    if delta.text or delta.tokens or delta.finish:
                        yield delta
            self.status = 200
        except RefusedError as refused:
            self.status = refused.status
            raise
        finally:
            self.cancel()

    async def _next(self) -> tuple[int, Burst]:
        remaining_s = self._deadline - time.monotonic()
        try:
            index, burst = await asyncio.wait_for(self._bursts.get(), remaining_s)
        except TimeoutError:
            message = f"the text did not end within {self._timeout_s:g} s"
            raise RefusedError(504, message, "timeout", code="timeout") from None
        if isinstance(burst.error, ClientLeftError):
            raise burst.error
        if burst.error is not None:
            raise RefusedError(500, "the decoder failed; its log says why", "server_error")
        if self.first_token_s is None:
            self.first_token_s = time.monotonic() - self._began_s
        return index, burst

    def _delta(self, index: int, burst: Burst) -> Delta:
        stream, job = self._streams[index], self.jobs[index]
        lead, lead_tokens = "", list[TokenText]()
        if index in self._leads:
            lead, lead_tokens = self._lead(index, self._leads.pop(index))
        stream.feed(burst.tokens, burst.logprobs)
        finish: str | None = burst.finish
        if finish is not None:
            stream.end()
        if stream.is_stopped and finish is None:  # the decoder has not seen it
            job.is_cancelled, finish = True, "stop"
        text, tokens = stream.take(is_ended=finish is not None)
        reason = "stop" if stream.is_stopped or finish == "eos" else finish
        return Delta(index, lead + text, lead_tokens + tokens if self._scores else [], reason)

    def _lead(self, index: int, prompt: PromptIds) -> tuple[str, list[TokenText]]:
        """The prompt as ``echo`` repeats it; tokens of the text follow it."""
        repeated = TextStream(self._thread.decoder.pair)
        repeated.feed(prompt.ids, [None, *self.jobs[index].prompt_logprobs])
        repeated.end()
        text, tokens = repeated.take(is_ended=True)
        lead = text if prompt.text is None else prompt.text
        self._streams[index].first = len(lead)
        return lead, tokens


def _room(decoder: Decoder, prompt: int, most: int) -> int:
    """New tokens that there is room for after a prompt. Raises RefusedError where these are fewer
    than ``most``."""
    context = decoder.pair.context(())
    limit, held = context.positions, str(context)
    if decoder.slots is not None and decoder.slots - EXPANDED_LIMIT - 1 < limit:
        limit = decoder.slots - EXPANDED_LIMIT - 1
        held = f"the {limit} tokens that fit here"
    if prompt + most > limit:
        message = f"{prompt} prompt tokens + max_tokens {most} exceed {held}"
        param = "prompt" if prompt >= limit else "max_tokens"
        raise RefusedError(400, message, param=param, code="context_length_exceeded")
    return limit - prompt


def _request(
    decoder: Decoder, asked: Generation, seed: int, ids: list[int], most: int
) -> DecodeRequest:
    """A request to decode, without its id."""
    temperature = 1.0 if asked.temperature is None else asked.temperature
    sampling = Sampling(temperature, max(0, asked.top_k or 0), asked.top_p or 1.0, seed)
    request = decoder.request(Request("", ""), ids, sampling, most, asked.stops, drafts=())
    return replace(request, eos_ids=frozenset()) if asked.ignore_eos else request


def _named(sampling: Sampling, ids: list[int], number: int) -> dict[str, Any]:
    """The id of a request by its prompt and the number of the text, and the seed that follows: a
    text that is recorded can be decoded again."""
    digest = hashlib.sha256(np.asarray(ids, np.int32).tobytes()).hexdigest()[:16]
    name = f"{digest}-{number}"
    return {"id": name, "seed": request_seed(sampling.seed, name)}
