"""Vocabulary shortlists: drafting with a part of the output head (FR-Spec; DynaSpec, section 4.2
and appendix A.3).

At draft step t (0 for the first token drafted in a round; of a tree, the level) the draft's
distribution is the softmax over a shortlist S_t alone, and every reading of it (proposals, stops,
codes, the rejection verifier's ratio and residual) is of that: q is renormalised over S_t and 0
outside. The target verifies with its whole vocabulary, so no text changes. :class:`Shortlists` is a
policy's rule for one draft; docs/shortlists.md says what is exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from spectune.runtime.gathered_head import GatheredHead
from spectune.runtime.policies.fr_spec import Frequencies
from spectune.runtime.policies.router import Routing, head_hash, top_clusters
from spectune.runtime.policies.shortlist_rule import ShortlistRule
from spectune.traces.errors import PolicyError

if TYPE_CHECKING:
    from spectune.runtime.models import SlotModel

STATES_KEPT: Final = 160
"""Positions of the text whose hidden states a draft remembers; more than any round looks back."""


@dataclass(frozen=True, eq=False)
class Support:
    """One shortlist: ``rows`` of the draft's output head and the target's ``ids`` of these tokens,
    both int64 [size], by ascending id.

    ``trimmed``: weights [size, d] and biases of these rows alone, cut out once where every context
    has this shortlist. ``whole``: it holds all tokens of the head.
    """

    rows: Tensor
    ids: Tensor
    trimmed: tuple[Tensor, Tensor | None] | None = None
    whole: bool = False


class OutputHead:
    """A draft's output matrix, to be evaluated over some of its rows.

    ``token_ids`` int64 [rows] are the target's ids of the rows (EAGLE-3's d2t map); None: row i is
    token i.
    """

    def __init__(self, linear: nn.Module, token_ids: Tensor | None = None) -> None:
        weight, bias = linear.weight, getattr(linear, "bias", None)
        assert isinstance(weight, Tensor)
        self.weight = weight.detach()
        self.bias: Tensor | None = bias.detach() if isinstance(bias, Tensor) else None
        self.rows = int(self.weight.shape[0])
        self.token_ids = token_ids

    @cached_property
    def gathered(self) -> GatheredHead:
        """The head by the rows that a step needs."""
        return GatheredHead(self.weight, self.bias)

    @cached_property
    def hash(self) -> str:
        """:func:`runtime.policies.router.head_hash` of the weights."""
        return head_hash(self.weight)

    @cached_property
    def ids(self) -> npt.NDArray[np.int64]:
        """The target's id of every row, int64 [rows]."""
        if self.token_ids is None:
            return np.arange(self.rows)
        found: npt.NDArray[np.int64] = self.token_ids.cpu().numpy().astype(np.int64)
        return found

    def support(self, rows: npt.NDArray[np.int64], *, fixed: bool = False) -> Support:
        """The shortlist of these ``rows`` (each once, any order). ``fixed``: every context has it,
        so its weights are cut out once."""
        ids = self.ids[rows]
        if fixed or self.token_ids is not None:  # clusters come in ascending order of rows
            order = ids.argsort()
            rows, ids = rows[order], ids[order]
        where, whole = self.weight.device, len(rows) == self.rows
        known = torch.from_numpy(ids).to(where)
        at = known if self.token_ids is None else torch.from_numpy(rows).to(where)
        if not fixed or whole:
            return Support(at, known, whole=whole)
        bias = None if self.bias is None else self.bias.index_select(0, at)
        return Support(at, known, (self.weight.index_select(0, at), bias))


class Shortlists:
    """A rule for one draft: which tokens each draft step evaluates, and their logits.

    ``chosen`` holds the shortlists of the current round, step by step. Raises PolicyError when the
    artifact does not fit the draft's output head.
    """

    def __init__(self, rule: ShortlistRule, model: SlotModel) -> None:
        self.rule, self.model, self.output = rule, model, model.output
        self.chosen: list[Support] = []
        self._supports: dict[int, Support] = {}
        self._order = np.zeros(0, dtype=np.int64)
        self._always = 0
        self._empty: Tensor | None = None
        if rule.routing is not None:
            self._check_routing(rule.routing)
            self.router = rule.routing.router.to(model.device)
            self.clusters = rule.routing.clusters
            if (self.clusters.sizes == 0).any():
                self._empty = torch.from_numpy(self.clusters.sizes == 0).to(model.device)
        else:
            assert rule.frequencies is not None
            self._order_rows(rule.frequencies)

    def _check_routing(self, routing: Routing) -> None:
        rule, model = self.rule, self.model
        rule.check_head(self.output.hash)
        one = torch.zeros(1, dtype=torch.int64, device=model.device)
        wide = int(model.embedded(one).shape[-1]) + model.hidden_size
        if routing.clusters.vocab != self.output.rows or routing.router.inputs != wide:
            raise PolicyError(
                f"shortlist.artifact: {rule.block.artifact} has clusters of "
                f"{routing.clusters.vocab} tokens and a router of {routing.router.inputs} inputs, "
                f"draft {rule.draft!r} an output head of {self.output.rows} rows and {wide} "
                f"inputs; `fit router --recording ID --draft {rule.draft}` makes one"
            )

    def _order_rows(self, frequencies: Frequencies) -> None:
        """The head's rows by the frequency of their tokens; a head without some tokens leaves these
        out of the order."""
        if frequencies.vocab != self.model.vocab_size:
            raise PolicyError(
                f"shortlist.artifact: {self.rule.block.artifact} orders a vocabulary of "
                f"{frequencies.vocab} tokens, draft {self.rule.draft!r} has one of "
                f"{self.model.vocab_size}; `fit frequencies` on a recording of this pair makes one"
            )
        rank = frequencies.rank[self.output.ids]
        self._order = rank.argsort(kind="stable")
        self._always = int((rank < frequencies.always).sum())

    @property
    def routed(self) -> bool:
        """Whether the shortlist depends on the context."""
        return self.rule.routed

    def _size(self, step: int) -> int:
        return min(max(self.rule.budget(step), self._always, 1), self.output.rows)

    def _frequent(self, step: int) -> Support:
        """The shortlist of a draft step where it does not depend on the context; the frequent
        tokens that the head has."""
        size = self._size(step)
        if size not in self._supports:
            self._supports[size] = self.output.support(self._order[:size], fixed=True)
        return self._supports[size]

    def warm(self, widths: Sequence[int]) -> None:
        """Does before the first round what the rounds would otherwise wait for: cuts out the
        weights of shortlists that never change, and launches the kernel for whatever numbers of
        rows and tokens draft steps can ask for. ``widths``: the most nodes that each draft step
        reads. Safe in another thread than the one that decodes.
        """
        if not self.routed:
            for step in range(len(widths)):
                self._frequent(step)
            return
        sizes = np.sort(self.clusters.sizes[self.clusters.sizes > 0])
        for step, width in enumerate(widths):
            count = min(self.rule.budget(step), len(sizes))
            most = min(width * count, len(sizes))
            least = int(sizes[:count].sum())
            self.output.gathered.warm(width, least, int(sizes[-most:].sum()))

    def select(
        self,
        step: int,
        tokens: Tensor,
        previous: Tensor | None,
        exists: Tensor | None = None,
    ) -> Support:
        """The shortlist of a draft step: the union of the clusters that the router selects for each
        of the beam's n nodes (algorithm 1, lines 3 to 12), at which the host looks.

        ``tokens`` int64 [n]: the nodes'; ``previous`` [n, d]: the hidden states of the tokens
        before them, None where there are none (zeros stand for them). ``exists`` bool [n]: the
        nodes that count, None: all; if none does, all do, since nothing reads their distributions.
        """
        if not self.routed:
            return self._note(step, self._frequent(step))
        count = min(self.rule.budget(step), self.clusters.count)
        picked = top_clusters(self.scores(self.model.embedded(tokens), previous), count)
        if exists is not None and bool(exists.any()):
            picked = picked[exists]
        return self._note(step, self.output.support(self.clusters.ids(picked.cpu().numpy())))

    def scores(self, embedded: Tensor, previous: Tensor | None) -> Tensor:
        """The router's scores float32 [n, M] for embeddings [n, d_e] and the states before them [n,
        d] (None: zeros); those of clusters without tokens are -inf, so that they are never selected
        before others."""
        if previous is None:
            previous = embedded.new_zeros(len(embedded), self.model.hidden_size)
        scores = self.router.scores(embedded, previous)
        return scores if self._empty is None else scores.masked_fill(self._empty, -math.inf)

    def _note(self, step: int, support: Support) -> Support:
        if step == 0:
            self.chosen.clear()
        self.chosen.append(support)
        return support

    def logits(self, states: Tensor, support: Support) -> Tensor:
        """Float32 logits [n, size] of a shortlist's tokens alone, for what the output head reads,
        [n, d]."""
        output, linear = self.output, nn.functional.linear
        if support.whole:
            logits = linear(states, output.weight, output.bias).float()
            return logits if output.token_ids is None else logits.index_select(1, support.rows)
        if support.trimmed is not None:
            return linear(states, *support.trimmed).float()
        return output.gathered.over(states, support.rows)


class States:
    """A draft's last hidden states at recent positions of the text, which the router reads.

    Row p is a function of the text up to token p (of an EAGLE head: fed with the target's
    features), whatever pass made it.
    """

    def __init__(self) -> None:
        self._rows: dict[int, Tensor] = {}

    def clear(self) -> None:
        self._rows.clear()

    def put(self, start: int, states: Tensor) -> None:
        """States [n, d] of positions ``start ..``; of a long run the last two are kept, which is
        what a round looks at."""
        n = len(states)
        for i in range(max(0, n - 2), n):
            self._rows[start + i] = states[i : i + 1].clone()
        while len(self._rows) > STATES_KEPT:
            del self._rows[next(iter(self._rows))]

    def at(self, position: int) -> Tensor | None:
        """The state [1, d] at a position, None where it is not known."""
        return self._rows.get(position)

    def forget_from(self, position: int) -> None:
        """Forgets what was not, or is no longer, text."""
        for p in [p for p in self._rows if p >= position]:
            del self._rows[p]
