"""Vocabulary shortlists: drafting with a part of the output head (FR-Spec; DynaSpec, sections 4.2
and 4.3 and appendix A.3).

At draft step t (0 for the first token drafted in a round; of a tree, the level) the draft's
distribution after a node is the softmax over the node's shortlist alone, and every reading of it
(proposals, stops, codes, the rejection verifier's ratio and residual) is of that: q is renormalised
over the shortlist and 0 outside. The target verifies with its whole vocabulary, so no text changes.
One pass evaluates the union of its nodes' shortlists, as DynaSpec does; here each node then
proposes from its own, so that its distribution is a function of step and prefix, which a recording
holds. :class:`Shortlists` is a policy's rule for one draft."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from spectune.runtime.cuda.gathered import gathered_logits, kernel_runs
from spectune.runtime.policies.dynaspec import FloatArray
from spectune.runtime.policies.rules import ShortlistRule
from spectune.traces.errors import PolicyError

if TYPE_CHECKING:
    from spectune.runtime.models import SlotModel

STATES_KEPT: Final = 160
"""Positions of the text whose hidden states a draft remembers; more than any round looks back."""


@dataclass(frozen=True, eq=False)
class Support:
    """What one pass evaluates: ``rows`` of the draft's output head and the target's ``ids`` of
    these tokens, both int64 [size], by ascending id. ``inside`` bool [n, size]: each node's
    shortlist; None: all of it. ``trimmed``: weights [size, d] and biases of these rows alone, where
    every context has this shortlist."""

    rows: Tensor
    ids: Tensor
    inside: Tensor | None = None
    trimmed: tuple[Tensor, Tensor | None] | None = None


class OutputHead:
    """A draft's output matrix, to be evaluated over some of its rows.

    ``token_ids`` int64 [rows] are the target's ids of the rows (EAGLE-3's d2t map); None: row i is
    token i."""

    def __init__(self, linear: nn.Module, token_ids: Tensor | None = None) -> None:
        weight, bias = linear.weight, getattr(linear, "bias", None)
        assert isinstance(weight, Tensor)
        self.weight = weight.detach().contiguous()
        self.bias: Tensor | None = bias.detach() if isinstance(bias, Tensor) else None
        self.rows = int(weight.shape[0])
        self.ids: npt.NDArray[np.int64] = np.arange(self.rows)
        """The target's id of every row, int64 [rows]."""
        if token_ids is not None:
            self.ids = token_ids.cpu().numpy()
        self.fused = kernel_runs(self.weight)

    @cached_property
    def hash(self) -> str:
        """:func:`head_hash` of the weights."""
        return head_hash(self.weight)

    def support(self, rows: npt.NDArray[np.int64]) -> Support:
        """The shortlist of these ``rows`` (each once, any order), its weights cut out."""
        rows = rows[self.ids[rows].argsort()]
        ids, by_id = (torch.tensor(x, device=self.weight.device) for x in (self.ids[rows], rows))
        if torch.equal(by_id, torch.arange(self.rows, device=by_id.device)):
            return Support(by_id, ids, trimmed=(self.weight, self.bias))  # not a second copy
        bias = None if self.bias is None else self.bias.index_select(0, by_id)
        return Support(by_id, ids, trimmed=(self.weight.index_select(0, by_id), bias))

    def logits(self, states: Tensor, rows: Tensor) -> Tensor:
        """Float32 logits [n, size] of some ``rows`` (int64 [size]) for ``states`` [n, d]: the
        gathered head of section 4.3, O(size d) instead of O(vocab d)."""
        if self.fused:
            return gathered_logits(states.contiguous(), self.weight, rows, bias=self.bias)
        bias = None if self.bias is None else self.bias.index_select(0, rows)
        return nn.functional.linear(states, self.weight.index_select(0, rows), bias).float()


class Router(NamedTuple):
    """The router r of section 4.2: scores clusters by the current token's embedding and the draft's
    previous hidden state.

    s = w2 relu(w1 [E(x_t), H_{t-1}] + b1) + b2 with ``w1`` [hidden, d_r], ``b1`` [hidden], ``w2``
    [M, hidden] and ``b2`` [M]; d_r = d_e + d. A score is the log-odds that a cluster holds a
    plausible next token."""

    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor

    @classmethod
    def of(cls, weights: Sequence[FloatArray], model: SlotModel) -> Router:
        """Stored weights on a model's device, in float64 for a model in float64."""
        dtype = torch.promote_types(model.dtype, torch.float32)
        return cls(*(torch.tensor(w, device=model.device, dtype=dtype) for w in weights))

    def scores(self, embedding: Tensor, previous: Tensor) -> Tensor:
        """Scores of all clusters [n, M] for the embeddings [n, d_e] of n current tokens and the
        draft's hidden states [n, d] of the tokens before them."""
        linear, x = nn.functional.linear, torch.cat((embedding, previous), -1).to(self.w1.dtype)
        return linear(linear(x, self.w1, self.b1).relu_(), self.w2, self.b2)


class Shortlists:
    """A rule for one draft: which tokens each draft step evaluates, and their logits. Of a
    shortlist that depends on no context the weights of the first ``steps`` draft steps are cut out
    at once. Raises PolicyError when the artifact is of another output head or vocabulary than the
    draft's."""

    def __init__(self, rule: ShortlistRule, model: SlotModel, steps: int = 0) -> None:
        self.rule, self.model, self.output = rule, model, model.output
        self._supports: dict[int, Support] = {}
        if rule.routing is not None:
            self._route(model)
            return
        frequencies = rule.frequencies
        assert frequencies is not None
        if frequencies.vocab != model.vocab_size:
            raise PolicyError(
                f"shortlist.artifact: {rule.block.artifact} orders a vocabulary of "
                f"{frequencies.vocab} tokens, draft {rule.draft!r} has one of {model.vocab_size}; "
                "`fit frequencies` on a recording of this pair makes one"
            )
        rank = frequencies.rank[self.output.ids]
        self._order = rank.argsort(kind="stable")
        self._always = int((rank < frequencies.always).sum())
        for step in range(steps):
            self._frequent(step)

    def _route(self, model: SlotModel) -> None:
        """Readies the router and the clusters of the head's rows, by ascending id of the target."""
        rule, output, routing = self.rule, self.output, self.rule.routing
        assert routing is not None
        if output.hash != routing.head:
            raise PolicyError(
                f"shortlist.artifact: {rule.block.artifact} was fitted on another output head "
                f"(hash {routing.head}) than draft {rule.draft!r} has here (hash {output.hash}); "
                f"`fit router --recording ID --draft {rule.draft}` makes one"
            )
        self.clusters, self.router = routing.clusters, Router.of(routing.weights, model)
        # A cluster without tokens is never selected before another.
        self.router.b2[torch.tensor(self.clusters.sizes == 0, device=model.device)] = -math.inf
        rows = output.ids.argsort()
        by_id = rows, output.ids[rows], self.clusters.of[rows]
        self._rows, self._ids, self._cluster_of = (
            torch.tensor(x, device=model.device) for x in by_id
        )

    @property
    def routed(self) -> bool:
        """Whether the shortlist depends on the context."""
        return self.rule.routed

    def _frequent(self, step: int) -> Support:
        """The most frequent tokens that the head has, as many as a draft step evaluates."""
        size = min(max(self.rule.budget(step), self._always, 1), self.output.rows)
        if size not in self._supports:
            self._supports[size] = self.output.support(self._order[:size])
        return self._supports[size]

    def select(self, step: int, tokens: Tensor, previous: Tensor | None) -> Support:
        """What a draft step evaluates: the union of the clusters that the router selects for each
        of the beam's n nodes (algorithm 1, lines 3 to 12), whose size the host waits for.

        ``tokens`` int64 [n]: the nodes'; ``previous`` [n, d]: the hidden states of the tokens
        before them, None where there are none (zeros stand for them).
        """
        if not self.routed:
            return self._frequent(step)
        scores = self.scores(self.model.embedded(tokens), previous)
        best = top_clusters(scores, self.rule.budget(step))
        selected = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, best, True)
        places = selected.any(0)[self._cluster_of].nonzero()[:, 0]
        inside = selected[:, self._cluster_of[places]] if len(tokens) > 1 else None
        return Support(self._rows[places], self._ids[places], inside)

    def scores(self, embedded: Tensor, previous: Tensor | None) -> Tensor:
        """The router's scores [n, M] for embeddings [n, d_e] and the states before them [n, d]
        (None: zeros); -inf for clusters without tokens."""
        if previous is None:
            previous = embedded.new_zeros(len(embedded), self.model.hidden_size)
        return self.router.scores(embedded, previous)

    def logits(self, states: Tensor, support: Support) -> Tensor:
        """Float32 logits [n, size] of a shortlist's tokens alone, for what the output head reads,
        [n, d]; -inf outside of a node's own."""
        if support.trimmed is not None:
            return nn.functional.linear(states, *support.trimmed).float()
        logits = self.output.logits(states, support.rows)
        return logits if support.inside is None else logits.where(support.inside, -math.inf)


class RecentStates(dict[int, Tensor]):
    """A draft's last hidden states [1, d] by position of the text, recent ones, which the router
    reads: functions of the text up to that token (of an EAGLE head: fed with the target's
    features), whatever pass made them."""

    def put(self, start: int, states: Tensor) -> None:
        """States [n, d] of positions ``start ..``; of a long run the last two are kept, which is
        what a round looks at."""
        n = len(states)
        self.update((start + i, states[i : i + 1].clone()) for i in range(max(0, n - 2), n))
        while len(self) > STATES_KEPT:
            del self[next(iter(self))]

    def forget_from(self, position: int) -> None:
        """Forgets what was not, or is no longer, text."""
        for p in [p for p in self if p >= position]:
            del self[p]


def top_clusters(scores: Tensor, k: int) -> Tensor:
    """The ``k`` clusters of highest score of every row of ``scores`` [n, M], best first, ties by
    lower number; int64 [n, min(k, M)]."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def head_hash(weight: Tensor) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of an output head's weights [vocab, d],
    float32 bytes in row order.

    The values are rounded to bfloat16 first, so that a checkpoint has one hash whether it is loaded
    in float32 or in bfloat16."""
    values = weight.detach().to("cpu", torch.bfloat16).float().numpy()
    return hashlib.sha256(values.astype("<f4").tobytes()).hexdigest()[:16]
