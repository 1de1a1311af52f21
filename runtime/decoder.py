"""Decoding with models: the loop's backend, and the decoder that serves requests with it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from spectune.runtime.cuda.graphs import prepare_graphs
from spectune.runtime.drafts.eagle import EagleDraft, Features
from spectune.runtime.drafts.language_model import LanguageModelDraft
from spectune.runtime.drafts.ngram import NgramDraft
from spectune.runtime.drafts.protocol import Draft, DraftContext, Drafted
from spectune.runtime.loading import LoadedPair
from spectune.runtime.loop import DecodeRequest, PolicySource, Round, Verified, decode_rounds
from spectune.runtime.models import ids_tensor
from spectune.runtime.perplexity import log_perplexity
from spectune.runtime.policies.artifacts import Artifacts
from spectune.runtime.policies.document import EXPANDED_LIMIT, Policy
from spectune.runtime.policies.plan import Plan, prepare
from spectune.runtime.sampling import Noise, sample
from spectune.runtime.session import Sessions
from spectune.runtime.shortlists import Shortlists
from spectune.runtime.trees.draft import GrownTree, ancestors
from spectune.runtime.verification import accept, accept_chain, verify_rejection
from spectune.traces.errors import PolicyError, WorkloadError, naming
from spectune.traces.schema import Finish, Request, Sampling, Step, Tokens, Verifier, request_seed
from spectune.traces.tables import LatencyProfile, Trajectory


class ModelBackend:
    """The loop's backend over a loaded pair. One request at a time; its caches are reused from
    request to request."""

    def __init__(self, pair: LoadedPair) -> None:
        self.pair = pair
        self._features = Features(pair.target)
        models = {name: LanguageModelDraft(model) for name, model in pair.drafts.items()}
        heads = {name: EagleDraft(head, self._features) for name, head in pair.heads.items()}
        self._drafts: dict[str, Draft] = {**models, **heads, "ngram": NgramDraft()}
        self._awake: set[str] = set()
        """Drafts that follow the text of the request in hand."""
        self._text: list[int] = []
        self._path: list[int] = []
        """Which drafted nodes the last verdict accepted."""
        self._drafting: Draft | None = None
        self._rounds = 0
        self._request: DecodeRequest | None = None
        self._noise: Noise | None = None
        self._fitting: frozenset[str] = frozenset()
        """Drafts whose context holds the request in hand: a policy may be swapped for one whose
        draft holds less, and then nothing is drafted until the request ends."""
        self._capacity = 0
        self._prefilled: DecodeRequest | None = None
        """The request whose prompt was the last that the target read."""

    def log_perplexity(self, request: DecodeRequest) -> float:
        """The logarithm of a prompt's perplexity under the target, by its prefill, which
        :meth:`begin` does not repeat."""
        self.pair.reserve(len(request.prompt_ids) + request.max_new_tokens + 1)
        self._prefilled = request
        return log_perplexity(self.pair.target, request.prompt_ids)

    def begin(self, request: DecodeRequest, prepared: Plan) -> None:
        """Prefills the target, and the policy's draft where it speculates, with the prompt but for
        its last token."""
        target, name = self.pair.target, prepared.policy.draft
        self._request, self._rounds = request, 0
        self._text = list(request.prompt_ids)
        self._capacity = len(self._text) + request.max_new_tokens + 1
        self._fitting = frozenset(
            name
            for name in self._drafts
            if self._capacity - 1 <= self.pair.context([name]).positions
        )
        sampled = not request.sampling.greedy
        self._noise = Noise(request.seed, target.vocab_size, target.device) if sampled else None
        self._awake = set()
        self.pair.reserve(self._capacity)
        prepare_graphs(self.pair, prepared, sampling=request.sampling, rejects=request.rejects)
        if len(self._text) > 1 and self._prefilled is not request:
            target.read(torch.tensor(self._text[:-1], device=target.device), 0)
        self._prefilled = None
        self._features.kept = False
        if name in self._fitting:
            if self._drafts[name].reads_features:
                self._features.begin(self._capacity, len(self._text) - 1)
            self._wake(name)

    def _wake(self, name: str) -> Draft:
        """The draft behind a name, after it has read the text but for its last token where it did
        not follow it."""
        draft = self._drafts[name]
        if name not in self._awake:
            draft.begin(self._text, self._capacity + EXPANDED_LIMIT)
            self._awake.add(name)
        return draft

    def draft(self, prepared: Plan, gamma: int, limit: int) -> Drafted | None:
        request = self._request
        assert request is not None
        if prepared.policy.draft not in self._fitting:
            return None
        assert prepared.shortlist is None or prepared.shortlists is not None
        self._drafting, noise = self._wake(prepared.policy.draft), self._noise
        if request.rejects:
            target = self.pair.target
            noise = Noise(request.seed, target.vocab_size, target.device, "draft", self._rounds)
        context = DraftContext(
            prepared, request.sampling, noise, prepared.shortlists, request.rejects
        )
        return self._drafting.propose(self._text, gamma, limit, context)

    def verify(self, drafted: Drafted | None) -> Verified:
        request, target, length = self._request, self.pair.target, len(self._text)
        assert request is not None
        sampling, noise, greedy = request.sampling, self._noise, request.sampling.greedy
        if drafted is not None and drafted.tree is not None:
            # A CPU draws along the path alone; elsewhere all at once, to wait once.
            at_once = target.device.type != "cpu" or target.graphs is not None
            logits = self._read_tree(drafted.tree, greedy=greedy and at_once)
            positions = [length + depth for depth in (0, *drafted.tree.depths)]

            def drawn(row: int) -> int:
                one = slice(row, row + 1)
                return int(sample(logits[one], sampling, noise, positions[one]))

            token_after: Callable[[int], int] = drawn
            if at_once:
                token_after = sample(logits, sampling, noise, positions).tolist().__getitem__
            verdict = accept(drafted.tree, token_after)
            self._path = verdict.path
            assert self._drafting is not None
            return replace(verdict, read=0) if self._drafting.reads_features else verdict
        tokens, log_q = (drafted.tokens, drafted.log_q) if drafted else ([], [])
        ids = ids_tensor([self._text[-1], *tokens], target.device)
        logits, _ = target.chain(ids, length - 1, logits=len(ids), greedy=greedy)
        if request.rejects:
            verdict = verify_rejection(
                logits, length, tokens, log_q, sampling, request.seed, self._rounds
            )
        else:
            positions = [*range(length, length + len(ids))]
            verdict = accept_chain(tokens, sample(logits, sampling, noise, positions).tolist())
        self._path = list(range(verdict.accepted))
        return verdict

    def _read_tree(self, tree: GrownTree, *, greedy: bool) -> Tensor:
        """Float32 logits [1 + nodes, vocab] of the root and of a tree's nodes, which see the text
        and their ancestors; with ``greedy`` the ids of the largest."""
        target, root, n = self.pair.target, len(self._text) - 1, len(tree.tokens)
        rows = [[self._text[-1], *tree.tokens], [0, *tree.depths], [*range(n + 1)]]
        ids, depths, places = torch.tensor(rows, device=target.device)
        mask = torch.ones(n + 1, root + n + 1, dtype=torch.bool, device=target.device)
        mask[:, root:] = torch.from_numpy(ancestors(tree)).to(target.device)
        return target.run(ids, root + depths, root + places, mask, greedy=greedy)[0]

    def commit(self, emitted: list[int], accepted: int, drafted: Drafted | None) -> None:
        length, path = len(self._text), self._path[:accepted]
        self._features.put(length - 1, path)
        if drafted is not None and self._drafting is not None:
            self.pair.target.cache.move([length + node for node in path], length)
            self._drafting.commit(length, drafted, path)
        self._text.extend(emitted)
        self._rounds += 1


@dataclass(frozen=True)
class Decoded:
    """One request as executed: its trajectory, its rounds, and the seconds it took, prefill
    included. ``plans``: what the source had, each with the number of rounds before it."""

    trajectory: Trajectory
    steps: tuple[Step, ...]
    seconds: float
    plans: tuple[tuple[int, Plan], ...]


@dataclass
class Decoder:
    """Serves requests one after another under a policy source.

    Windows that carry their state (Q-learning, transformers' heuristic) carry it from request to
    request of one decoder. Where the source has a policy that a request's verifier cannot use, the
    last one that it could stays in force, and a warning is logged."""

    pair: LoadedPair
    source: PolicySource
    verifier: Verifier = "coupled"
    clock: Callable[[], float] = time.perf_counter
    backend: ModelBackend = field(init=False)
    sessions: Sessions = field(init=False, default_factory=Sessions)
    _lossless: Plan | None = field(init=False, default=None)
    """The last plan that the rejection verifier can use."""
    _refused: Plan | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.backend = ModelBackend(self.pair)

    def request(
        self,
        item: Request,
        prompt_ids: list[int],
        sampling: Sampling,
        max_new_tokens: int,
        stop_strings: tuple[str, ...] = (),
        *,
        drafts: Collection[str] | None = None,
    ) -> DecodeRequest:
        """Builds a request. Raises WorkloadError when prompt and budget exceed the context of the
        target or of the ``drafts`` (default: those of the policy in force), the prompt is empty, or
        the budget is below 0."""
        if not prompt_ids:
            raise WorkloadError(f"request {item.id}: the prompt has no tokens")
        if max_new_tokens < 0:
            raise WorkloadError(f"request {item.id}: {max_new_tokens} new tokens; give 0 or more")
        used = drafts_of(self.source.current().policy) if drafts is None else drafts
        context = self.pair.context(used)
        if len(prompt_ids) + max_new_tokens > context.positions:
            raise WorkloadError(
                f"request {item.id}: {len(prompt_ids)} prompt tokens + {max_new_tokens} new ones "
                f"exceed {context}; shorten the prompt or lower --max-new-tokens"
            )
        return DecodeRequest(
            id=item.id,
            prompt_ids=prompt_ids,
            sampling=sampling,
            seed=request_seed(sampling.seed, item.id),
            max_new_tokens=max_new_tokens,
            eos_ids=self.pair.eos_ids,
            verifier=self.verifier,
            ends_at=self.pair.stopper(stop_strings) if stop_strings else None,
            stop_strings=stop_strings,
        )

    def rounds(
        self, request: DecodeRequest, source: _RequestSource | None = None
    ) -> Iterator[Round]:
        """Streams the rounds of one request. Raises PolicyError where its verifier can use neither
        the source's policy nor one before it."""
        source = source or _RequestSource(self, request)
        self.usable(self.source.current(), request)
        return decode_rounds(self.backend, request, source, self.clock, self.sessions)

    def usable(self, plan: Plan, request: DecodeRequest) -> Plan:
        """Returns ``plan``, or where the request's verifier cannot use it the last that it could.
        Raises PolicyError where there was none."""
        try:
            # Noted of every request's plan, since those that follow may be sampled.
            check_lossless(
                self.pair, plan.policy.candidates, "rejection", Sampling(temperature=1.0)
            )
            self._lossless = plan
        except PolicyError as problem:
            if request.rejects:
                if (before := self._lossless) is None:
                    raise
                if plan is not self._refused:
                    self._refused, line = plan, "refused policy %s: %s; %s stays in force"
                    logger = logging.getLogger(__name__)
                    logger.warning(line, plan.label, problem, before.label)
                return before
        return plan

    def decode(self, request: DecodeRequest, category: str = "") -> Decoded:
        """Decodes a request to its end."""
        with naming(f"request {request.id}"):
            return self._decode(request, category)

    def _decode(self, request: DecodeRequest, category: str) -> Decoded:
        began = self.clock()
        steps: list[Step] = []
        plans: list[tuple[int, Plan]] = []
        source = _RequestSource(self, request)
        output: list[int] = []
        finish: Finish = "length"
        for item in self.rounds(request, source):
            if source.looked_at is not None and (not plans or plans[-1][1] is not source.looked_at):
                plans.append((len(steps), source.looked_at))
            steps.append(item.step)
            output.extend(item.tokens)
            finish = item.finish or finish
        seconds = self.clock() - began
        if source.looked_at is not None and not plans:  # of a text without rounds
            plans.append((0, source.looked_at))
        trajectory = Trajectory(
            request_id=request.id,
            category=category,
            tokens=Tokens(np.asarray(request.prompt_ids, np.int32), np.asarray(output, np.int32)),
            sampling=request.sampling,
            max_new_tokens=request.max_new_tokens,
            finish=finish,
            verifier=request.verifier,
            stop_strings=request.stop_strings,
        )
        return Decoded(trajectory, tuple(steps), seconds, tuple(plans))


class _RequestSource:
    """A source's policies for one request: of a choice by prompt, the plan that it chooses.

    A choice that is published meanwhile begins with the next request: it would read the prompt
    again, which takes longer than a round and writes over what the cache holds."""

    def __init__(self, decoder: Decoder, request: DecodeRequest) -> None:
        self._decoder, self._request = decoder, request
        self._plan: Plan
        self._newest: Plan | None = None
        self.looked_at: Plan | None = None
        """What the source had last that is in force for the request."""

    def current(self) -> Plan:
        newest = self._decoder.source.current()
        if newest is self._newest:
            return self._plan
        self._newest, request, backend = newest, self._request, self._decoder.backend
        plan = self._decoder.usable(newest, request)
        if plan is not self.looked_at and (self.looked_at is None or plan.chooser is None):
            self.looked_at = plan
            self._plan = plan.for_prompt(
                request.prompt_ids, lambda: backend.log_perplexity(request)
            )
        return self._plan


def drafts_of(policy: Policy) -> frozenset[str]:
    """The drafts that may decode under a policy."""
    return frozenset(each.draft for each in policy.candidates if each.speculates)


def check_lossless(
    pair: LoadedPair, policies: Iterable[Policy], verifier: Verifier, sampling: Sampling
) -> None:
    """Raises PolicyError where a verifier cannot be used with one of the policies on a pair: it
    would bias the text, or is not built for heads."""
    if verifier != "rejection" or sampling.greedy:
        return
    for policy in policies:
        problem = ""
        if policy.is_tree:
            problem = f"growth {policy.growth.kind}: the rejection verifier is for chains"
        elif not getattr(policy.stop, "keep_last", True):
            problem = (
                "stop.keep_last false discards a sampled token because of its probability, which "
                "the rejection verifier cannot make lossless"
            )
        elif policy.draft in pair.heads:
            name = policy.draft
            problem = f"draft {name!r} is a head, which the rejection verifier is not built for"
        if problem:
            raise PolicyError(f"{problem}; use the coupled verifier")


def prepare_for(
    pair: LoadedPair,
    policy: Policy,
    *,
    profile: LatencyProfile | None = None,
    version: int = 0,
    artifacts: Artifacts | None = None,
) -> Plan:
    """:func:`runtime.policies.plan.prepare` for a loaded pair, with all that its first rounds would
    wait for: a shortlist's weights are cut out, and CUDA graphs captured. It may run in another
    thread than decoding does. Raises PolicyError as ``prepare``, and for a router of another head.
    """
    plan = prepare(policy, pair.draft_names, profile=profile, version=version, artifacts=artifacts)
    if plan.chooser is None:
        return _aside(pair, plan)
    return replace(plan, candidates=tuple(_aside(pair, each) for each in plan.candidates))


def _aside(pair: LoadedPair, prepared: Plan) -> Plan:
    prepare_graphs(pair, prepared)
    if prepared.shortlist is None:
        return prepared
    rule, steps = prepared.shortlist, prepared.policy.depth_max
    return replace(prepared, shortlists=Shortlists(rule, pair.models[rule.draft], steps))
