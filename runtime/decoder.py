"""Decoding with real models: the backend behind the loop, and the session that serves requests with it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from runtime.drafts import Chain, ChainContext, Draft, LanguageModelDraft, NgramDraft
from runtime.loading import LoadedPair
from runtime.loop import DecodeRequest, Drafted, PolicySource, Round, Verified, decode_rounds
from runtime.policies.prepared import PreparedPolicy, check_verifier
from runtime.sampling import Noise
from runtime.verification import verify_coupled, verify_rejection
from traces.errors import WorkloadError
from traces.schema import Finish, Request, Sampling, Step, Trajectory, Verifier, request_seed


class ModelBackend:
    """The loop's backend over a loaded pair. One request at a time; its caches are reused from request to request."""

    def __init__(self, pair: LoadedPair) -> None:
        self.pair = pair
        self.exact = pair.exact
        self._drafts: dict[str, Draft] = {"ngram": NgramDraft()}
        for name, model in pair.drafts.items():
            self._drafts[name] = LanguageModelDraft(model)
        self._awake: set[str] = set()
        self._text: list[int] = []
        self._chain: Chain | None = None
        self._active: Draft | None = None
        self._rounds = 0
        self._request: DecodeRequest | None = None
        self._noise: Noise | None = None
        self._capacity = 0

    def begin(self, request: DecodeRequest, prepared: PreparedPolicy) -> None:
        """Prefills the target, and the policy's draft where it speculates, with the prompt but for its last token."""
        target = self.pair.target
        self._request, self._rounds = request, 0
        self._text = list(request.prompt_ids)
        self._capacity = len(self._text) + request.max_new_tokens + 1
        sampled = not request.sampling.greedy
        self._noise = Noise(request.seed, target.vocab_size, target.device) if sampled else None
        self._awake.clear()
        target.reserve(self._capacity)
        if len(self._text) > 1:
            target.read(torch.tensor(self._text[:-1], device=target.device), 0)
        if prepared.policy.speculates:
            self._wake(prepared.policy.draft, self._text)

    def draft_named(self, name: str) -> Draft:
        """The draft behind a name (KeyError if there is none)."""
        return self._drafts[name]

    def set_text(self, text: list[int]) -> None:
        """Replaces the text of the request in hand, and lets every draft forget what it read (the profiler's)."""
        self._text = text
        self._awake.clear()

    def _wake(self, name: str, text: list[int]) -> Draft:
        draft = self._drafts[name]
        if name not in self._awake:
            draft.begin(text, self._capacity)
            self._awake.add(name)
        return draft

    def draft(self, prepared: PreparedPolicy, gamma: int) -> Drafted:
        request = self._request
        assert request is not None
        self._active = self._wake(prepared.policy.draft, self._text)
        independent = request.verifier == "rejection" and not request.sampling.greedy
        context = ChainContext(
            sampling=request.sampling,
            noise=self._noise,
            exact=self.exact,
            own_seed=request.seed if independent else None,
            salt=self._rounds,
        )
        self._chain = self._active.propose(self._text, gamma, prepared.stop, context)
        return Drafted(len(self._chain.tokens), self._chain.steps, self._chain.lag, self._chain.tokens)

    def verify(self, drafted: Drafted | None) -> Verified:
        request, target = self._request, self.pair.target
        assert request is not None
        tokens = drafted.tokens if drafted else []
        length = len(self._text)
        ids = torch.tensor([self._text[-1], *tokens], device=target.device)
        logits = target.chain(ids, length - 1, logits=len(tokens) + 1)
        if request.verifier == "rejection" and not request.sampling.greedy:
            log_q = self._chain.log_q if drafted and self._chain else []
            return verify_rejection(logits, length, tokens, log_q, request.sampling, request.seed, self._rounds)
        return verify_coupled(target, logits, self._text, tokens, request.sampling, self._noise, self.exact)

    def commit(self, emitted: list[int], accepted: int, drafted: Drafted | None) -> None:
        if drafted is not None and self._active is not None:
            self._active.commit(len(self._text), accepted, drafted.steps, emitted)
        self._text.extend(emitted)
        self._rounds += 1
        if self._noise is not None:
            self._noise.forget_before(len(self._text))


@dataclass(frozen=True)
class Decoded:
    """One request as executed: its trajectory, its rounds, and the seconds it took (prefill included in ``seconds``)."""

    trajectory: Trajectory
    steps: tuple[Step, ...]
    seconds: float
    prefill_s: float


@dataclass
class Decoder:
    """Serves requests one after another under a policy source.

    Windows that carry their state (Q-learning, transformers' heuristic) carry it from request to request of one decoder.
    """

    pair: LoadedPair
    source: PolicySource
    verifier: Verifier = "coupled"
    clock: Callable[[], float] = time.perf_counter
    backend: ModelBackend = field(init=False)

    def __post_init__(self) -> None:
        self.backend = ModelBackend(self.pair)

    def request(
        self, item: Request, prompt_ids: list[int], sampling: Sampling, max_new_tokens: int, stop_strings: tuple[str, ...] = ()
    ) -> DecodeRequest:
        """Builds a request. Raises WorkloadError when prompt and budget exceed the models' context, or the prompt is empty."""
        check_length(self.pair, item.id, len(prompt_ids), max_new_tokens)
        return DecodeRequest(
            id=item.id,
            prompt_ids=prompt_ids,
            sampling=sampling,
            seed=request_seed(sampling.seed, item.id),
            max_new_tokens=max_new_tokens,
            eos_ids=self.pair.eos_ids,
            verifier=self.verifier,
            ends_at=self.pair.stopper(stop_strings) if stop_strings else None,
        )

    def rounds(self, request: DecodeRequest) -> Iterator[Round]:
        """Streams the rounds of one request."""
        check_verifier(self.source.current().policy, request.verifier, request.sampling)
        return decode_rounds(self.backend, request, self.source, self.clock)

    def decode(self, request: DecodeRequest, category: str = "", stop_strings: tuple[str, ...] = ()) -> Decoded:
        """Decodes a request to its end."""
        began = self.clock()
        steps: list[Step] = []
        output: list[int] = []
        finish: Finish | None = None
        in_rounds = 0.0
        for item in self.rounds(request):
            steps.append(item.step)
            output.extend(item.tokens)
            finish = item.finish
            in_rounds += item.step.round_s
        seconds = self.clock() - began
        assert finish is not None
        return Decoded(
            Trajectory(
                request_id=request.id,
                category=category,
                prompt_ids=np.asarray(request.prompt_ids, dtype=np.int32),
                output_ids=np.asarray(output, dtype=np.int32),
                sampling=request.sampling,
                max_new_tokens=request.max_new_tokens,
                finish=finish,
                verifier=request.verifier,
                stop_strings=stop_strings,
            ),
            tuple(steps),
            seconds,
            max(0.0, seconds - in_rounds),
        )


def check_length(pair: LoadedPair, request_id: str, prompt_tokens: int, max_new_tokens: int) -> None:
    """Raises WorkloadError when a request has no tokens or does not fit the shortest context of the pair."""
    if prompt_tokens == 0:
        raise WorkloadError(f"request {request_id}: the prompt has no tokens")
    limit = pair.max_positions
    if prompt_tokens + max_new_tokens > limit:
        raise WorkloadError(
            f"request {request_id}: {prompt_tokens} prompt tokens + {max_new_tokens} new ones exceed the context of {limit}; "
            "shorten the prompt or lower --max-new-tokens"
        )
