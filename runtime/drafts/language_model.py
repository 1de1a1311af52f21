"""Drafts: what proposes a chain of tokens. A language model over its own slot cache, or prompt lookup.

A draft is a function of its prefix (and, at temperature > 0, of the noise that the target will use): that is what lets a panorama
stand for every start.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from runtime import near_ties
from runtime.drafts.ngram import NgramIndex
from runtime.models import CausalModel, ids_tensor, view_of
from runtime.near_ties import near_code
from runtime.policies.document import EXPANDED_LIMIT
from runtime.policies.draft_choice import log_perplexity
from runtime.policies.stops import STOP_ENTROPY, STOP_JOINT_PROB, STOP_MAX_PROB, STOP_NONE, CompiledStop, should_stop
from runtime.sampling import (
    Noise,
    choose,
    entropy_of,
    gumbel_row,
    log_distribution,
    nat_code,
    stream_key,
)
from runtime.shortlists import Beam, Shortlists, States, Support
from traces.schema import Sampling

TREE_SLOTS = EXPANDED_LIMIT
"""Slots that a draft keeps beyond the text for the nodes of a tree."""
LONG_LAG = 64
"""Tokens to read above which they are read apart from the first proposal's pass."""


@dataclass(frozen=True)
class ChainContext:
    """What a draft may read of the request: its sampling, its noise, and, for the rejection verifier, a stream of its own.

    ``exact`` asks that near ties be settled by the canonical pass. ``own_seed`` is set where proposals must be drawn independently of
    the target's noise; ``salt`` then counts rounds. ``shortlists``: which tokens each step evaluates; None: all.
    """

    sampling: Sampling
    noise: Noise | None
    exact: bool
    own_seed: int | None = None
    salt: int = 0
    shortlists: Shortlists | None = None


@dataclass
class Chain:
    """A drafted chain: token ids, passes made, tokens read before the first proposal, and log q of each position when drawn."""

    tokens: list[int] = field(default_factory=list)
    steps: int = 0
    lag: int = 1
    log_q: list[torch.Tensor] = field(default_factory=list)


class Draft(Protocol):
    """What the runtime asks of any draft."""

    name: str

    def begin(self, prompt: list[int], capacity: int) -> None:
        """A new request: read the prompt but for its last token."""

    def propose(self, text: list[int], gamma: int, stop: CompiledStop, context: ChainContext) -> Chain:
        """At most ``gamma`` tokens after ``text``, ended by ``stop``."""

    def commit(self, length_before: int, accepted: int, steps: int, emitted: list[int]) -> None:
        """The text had ``length_before`` tokens; ``accepted`` drafted ones stayed; ``emitted`` were added."""

    def rewind(self, length: int) -> None:
        """Forgets what was read beyond the first ``length`` tokens of the text."""


class LanguageModelDraft:
    """A causal language model as draft: one pass for the tokens it has not read, then one pass a token."""

    def __init__(self, model: CausalModel) -> None:
        self.model = model
        self.name = model.name
        self._read = 0
        self._states = States()
        self._nodes: list[torch.Tensor] = []

    def begin(self, prompt: list[int], capacity: int) -> None:
        self.model.reserve(capacity)
        self._read = 0
        self._states.clear()
        if len(prompt) > 1:
            last = self.model.read_last(torch.tensor(prompt[:-1], device=self.model.device), 0)
            self._read = len(prompt) - 1
            self._states.put(self._read - 1, last)

    def begin_reading(self, prompt: list[int], capacity: int) -> float:
        """:meth:`begin`, which does not keep the last state; the logarithm of the prompt's perplexity from the same pass."""
        self.model.reserve(capacity)
        self._states.clear()
        self._read = max(0, len(prompt) - 1)
        return log_perplexity(self.model, prompt)

    def reader(self, text: list[int], shortlists: Shortlists | None = None) -> LanguageModelReader:
        """Passes over a tree that grows from the end of ``text``; with ``shortlists`` their logits are of shortlisted tokens alone."""
        if shortlists is not None and shortlists.routed:
            self._see_previous(len(text))
        return LanguageModelReader(self, text, shortlists)

    def _see_previous(self, length: int) -> None:
        """Before a routed round: where the state of the token before the last is not known, since rounds without a router do not keep
        theirs, that token is read again."""
        if length > 1 and self._read == length - 1 and self._states.at(length - 2) is None:
            self._read = length - 2

    def pending(self, text: list[int]) -> tuple[torch.Tensor, int]:
        """Token ids int64 that the pass for the first proposal reads, and where they begin; a long lag is read apart first."""
        model = self.model
        if len(text) - self._read > LONG_LAG:
            last = model.read_last(torch.tensor(text[self._read : -1], device=model.device), self._read)
            self._read = len(text) - 1
            self._states.put(self._read - 1, last)
        return ids_tensor(text[self._read :], model.device), self._read

    def lag(self, text: list[int]) -> int:
        """Tokens of ``text`` not read yet."""
        return len(text) - self._read

    def commit_tree(self, length_before: int, places: list[int], emitted: list[int]) -> int:
        """``places`` of the accepted nodes among those read for the tree (-1: not read), from the root. Keeps what was read, moved to
        where the text continues; how many that are."""
        kept = 0
        while kept < len(places) and places[kept] >= 0:
            kept += 1
        self.model.cache.move([length_before + p for p in places[:kept]], length_before)
        self._read = length_before + kept
        self._states.forget_from(length_before)
        if self._nodes and kept:
            self._states.put(length_before, torch.cat(self._nodes)[places[:kept]])
        return kept

    def rewind(self, length: int) -> None:
        """Forgets what was read beyond the first ``length`` tokens of the text."""
        self._read = min(self._read, length)
        self._states.forget_from(length)

    def _shortlisted(
        self, pending: torch.Tensor, at: int, step: int, prefix: list[int], shortlists: Shortlists
    ) -> tuple[torch.Tensor, Support, torch.Tensor]:
        """One pass of draft step ``step`` over ``pending``, the end of ``prefix``: float32 logits [1, size] after it, the shortlist, and
        the hidden state of the last token [1, hidden_size]."""
        if not shortlists.routed:
            last = self.model.chain_states(pending, at)[-1:]
            support = shortlists.fixed(step)
        else:

            def read() -> torch.Tensor:
                states = self.model.chain_states(pending, at)
                self._states.put(at, states)
                return states[-1:]

            def canonical(_: int) -> torch.Tensor | None:
                return self._previous(prefix)

            if at < len(prefix) - 1:  # the token before the last is read in this very pass, which the router must wait for
                last = read()
                support = shortlists.of(step, pending[-1:], self._states.at(len(prefix) - 2), canonical)
            else:
                before = self._states.at(len(prefix) - 2)
                assert before is not None or len(prefix) == 1
                last, support = shortlists.beside(read, step, pending[-1:], before, canonical)
        return shortlists.logits(last, support), support, last

    def _previous(self, prefix: list[int]) -> torch.Tensor | None:
        """The state of the token before the last of ``prefix`` by a canonical pass, [1, hidden_size]; None where there is none."""
        return self.model.canonical_state(prefix[:-1]) if len(prefix) > 1 else None

    def propose(self, text: list[int], gamma: int, stop: CompiledStop, context: ChainContext) -> Chain:
        model, sampling, shortlists = self.model, context.sampling, context.shortlists
        if shortlists is not None and shortlists.routed:
            self._see_previous(len(text))
        chain = Chain(lag=len(text) - self._read)
        pending, at = self.pending(text)
        reads = stop.kind != STOP_NONE or context.own_seed is not None
        if not reads and not context.exact and (shortlists is None or not shortlists.routed):
            return self._propose_blind(pending, at, len(text), gamma, context, chain)
        joint = 0
        ids: torch.Tensor | None = None
        for j in range(gamma):
            position, prefix = len(text) + j, text + chain.tokens
            if shortlists is None:
                logits = model.chain(pending, at, logits=1)
            else:
                logits, support, _ = self._shortlisted(pending, at, j, prefix, shortlists)
                ids = support.ids
            at += pending.shape[0]
            chain.steps += 1
            log_q = log_distribution(logits, sampling)[0] if reads else None
            place = self._place(logits, log_q, position, prefix, context, ids)
            pending = place if ids is None else ids[place]
            token = int(pending.item())
            ended = False
            if stop.kind != STOP_NONE:
                assert log_q is not None
                column = token if ids is None else int(place)
                logp_code, entropy_code = self._codes(log_q, column, stop, prefix, context, ids)
                joint += logp_code
                ended = should_stop(
                    stop.kind, stop.max_logp_code, stop.max_joint_code, stop.max_entropy_code, logp_code, joint, entropy_code
                )
                if ended and not stop.keep_last:
                    break
            chain.tokens.append(token)
            if context.own_seed is not None and log_q is not None:
                # Outside a shortlist q is 0: ratio and residual of the rejection verifier are of the law that was drawn from.
                whole = log_q if ids is None else log_q.new_full((model.vocab_size,), -torch.inf).index_copy_(0, ids, log_q)
                chain.log_q.append(whole)
            if ended:
                break
        return chain

    def _propose_blind(
        self, pending: torch.Tensor, at: int, length: int, gamma: int, context: ChainContext, chain: Chain
    ) -> Chain:
        """A full window without looking at any token on the host: no device sync until the end."""
        drafted: list[torch.Tensor] = []
        shortlists = context.shortlists
        for j in range(gamma):
            noise = None if context.noise is None else context.noise.row(length + j)[None]
            if shortlists is None:
                logits = self.model.chain(pending, at, logits=1)
                at += pending.shape[0]
                pending = choose(logits, context.sampling, noise)
            else:
                support = shortlists.fixed(j)
                logits = shortlists.logits(self.model.chain_states(pending, at)[-1:], support)
                at += pending.shape[0]
                noise = None if noise is None else noise.index_select(1, support.ids)
                pending = support.ids[choose(logits, context.sampling, noise)]
            drafted.append(pending)
        chain.steps = gamma
        chain.tokens = torch.cat(drafted).tolist()
        return chain

    def _place(
        self,
        logits: torch.Tensor,
        log_q: torch.Tensor | None,
        position: int,
        prefix: list[int],
        context: ChainContext,
        ids: torch.Tensor | None,
    ) -> torch.Tensor:
        """The column of ``logits`` [1, size] that is proposed at ``position``, int64 [1]: coupled with the target's noise, or drawn from q
        by a stream of its own. ``ids`` int64 [size] are the tokens of a shortlist; None: columns are tokens."""
        model, sampling = self.model, context.sampling
        if ids is not None and ids.shape[0] == 1:
            return torch.zeros_like(ids)
        if context.own_seed is not None:
            assert log_q is not None
            key = stream_key(context.own_seed, position, "draft", context.salt)
            own = gumbel_row(key, model.vocab_size, model.device)
            return (log_q + (own if ids is None else own.index_select(0, ids))).argmax(-1, keepdim=True)
        noise = None if context.noise is None else context.noise.row(position)
        if noise is not None and ids is not None:
            noise = noise.index_select(0, ids)
        canonical = (lambda _: _canonical(model, prefix, ids)) if context.exact else None
        return near_ties.choose(logits, sampling, None if noise is None else noise[None], canonical)

    def _codes(
        self,
        log_q: torch.Tensor,
        column: int,
        stop: CompiledStop,
        prefix: list[int],
        context: ChainContext,
        ids: torch.Tensor | None,
    ) -> tuple[int, int]:
        """Codes of -log q of a column and of the entropy. Those near a border that the stop looks at come from the canonical pass."""
        nats = -log_q[column]
        entropy = entropy_of(log_q) if stop.kind == STOP_ENTROPY else torch.zeros_like(nats)
        codes = nat_code(float(nats)), nat_code(float(entropy))
        if not context.exact or log_q.shape[0] == 1:
            return codes
        near = (
            (stop.kind == STOP_JOINT_PROB and bool(near_code(nats, context.sampling)))
            or (
                stop.kind == STOP_MAX_PROB and abs(codes[0] - stop.max_logp_code) <= 1 and bool(near_code(nats, context.sampling))
            )
            or (
                stop.kind == STOP_ENTROPY
                and abs(codes[1] - stop.max_entropy_code) <= 1
                and bool(near_code(entropy, context.sampling))
            )
        )
        return canonical_codes(self.model, prefix, column, context.sampling, ids) if near else codes

    def commit(self, length_before: int, accepted: int, steps: int, emitted: list[int]) -> None:
        if steps:
            self._read = length_before + min(accepted, steps - 1)
            self._states.forget_from(self._read)


class LanguageModelReader:
    """A language model's passes over one tree: each level in one pass, nodes apart under a mask (:class:`runtime.tree_drafts.Reader`)."""

    def __init__(self, draft: LanguageModelDraft, text: list[int], shortlists: Shortlists | None = None) -> None:
        self.draft, self.model, self.text = draft, draft.model, text
        self.device, self.length = draft.model.device, len(text)
        self.ids: torch.Tensor | None = None
        self._shortlists = shortlists
        self._placed = 0
        self._mask: torch.Tensor | None = None
        self._beam = Beam()
        draft._nodes = []

    def root(self) -> torch.Tensor:
        pending, at = self.draft.pending(self.text)
        if self._shortlists is None:
            return self.model.chain(pending, at, logits=1)
        logits, support, states = self.draft._shortlisted(pending, at, 0, self.text, self._shortlists)
        self.ids = support.ids
        self._beam.begin(states)
        return logits

    def level(
        self, tokens: torch.Tensor, parents: torch.Tensor | None, depth: int, exists: torch.Tensor | None = None
    ) -> torch.Tensor:
        n, first = tokens.shape[0], self.length + self._placed
        slots = torch.arange(first, first + n, device=self.device)
        view = min(self.model.cache.capacity, view_of(first + n))
        mask = torch.zeros(n, view, dtype=torch.bool, device=self.device)
        if parents is None or self._mask is None:
            mask[:, : self.length] = True
        else:
            mask[:, : self._mask.shape[1]] = self._mask[parents]
        mask[torch.arange(n, device=self.device), slots] = True
        self._mask = mask
        self._placed += n
        positions = torch.full((n,), self.length + depth - 1, dtype=torch.int64, device=self.device)
        if self._shortlists is None:
            return self.model.scattered(tokens, positions, slots, mask)
        states, support = self._shortlists.beside(
            lambda: self.model.scattered_states(tokens, positions, slots, mask),
            depth,
            tokens,
            self._beam.add(tokens, parents),
            lambda i: self.draft._previous(self.text + self._beam.path(i)),
            exists,
        )
        self._beam.read(states)
        if self._shortlists.routed:
            self.draft._nodes.append(states)
        self.ids = support.ids
        return self._shortlists.logits(states, support)

    def canonical(self, path: list[int]) -> torch.Tensor:
        return _canonical(self.model, self.text + path, self.ids)


def _canonical(model: CausalModel, prefix: list[int], ids: torch.Tensor | None) -> torch.Tensor:
    """Float32 canonical logits after ``prefix``: of tokens ``ids`` int64 [size], None: of all."""
    logits = model.canonical(prefix)
    return logits if ids is None else logits.index_select(0, ids)


def canonical_codes(
    model: CausalModel, prefix: list[int], column: int, sampling: Sampling, ids: torch.Tensor | None = None
) -> tuple[int, int]:
    """Codes of -log q(token | prefix) and of q's entropy from the canonical pass: one answer for one prefix. ``ids`` int64 [size]
    restrict q to a shortlist, whose token ``column`` is then meant; None: columns are tokens."""
    log_q = log_distribution(_canonical(model, prefix, ids)[None], sampling)[0]
    return nat_code(float(-log_q[column])), nat_code(float(entropy_of(log_q)))


class NgramDraft:
    """Prompt lookup as draft (suffixes of 3 tokens down to 1). A proposal counts as certain: q = 1, entropy 0."""

    name = "ngram"

    def __init__(self) -> None:
        self._index = NgramIndex()
        self._read = 0

    def begin(self, prompt: list[int], capacity: int) -> None:
        self._index = NgramIndex()
        self._index.extend(prompt)
        self._read = len(prompt) - 1

    def rewind(self, length: int) -> None:
        """Forgets what was read beyond the first ``length`` tokens of the text."""
        self._index.truncate(length)
        self._read = min(self._read, length)

    def propose(self, text: list[int], gamma: int, stop: CompiledStop, context: ChainContext) -> Chain:
        index = self._index
        index.extend(text[len(index.tokens) :])
        chain = Chain(lag=len(text) - self._read)
        for _ in range(gamma):
            chain.steps += 1
            token = index.propose()
            if token is None:
                break
            chain.tokens.append(token)
            index.extend([token])
        index.truncate(len(text))
        return chain

    def commit(self, length_before: int, accepted: int, steps: int, emitted: list[int]) -> None:
        # Reading costs nothing here; the lag is counted as for a model so that every draft's rounds look alike.
        self._read = length_before + min(accepted, steps - 1)
