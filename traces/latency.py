"""What the parts of a round cost on one device: a profile of named terms, each a piecewise-linear
table."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from spectune.traces.cost_table import CostTable, FloatArray
from spectune.traces.errors import PolicyError


class Costs:
    """What the terms of a round cost on one device: the questions that
    :class:`traces.tables.LatencyProfile` answers.

    ``terms`` by name; a term that is not there costs nothing. :mod:`runtime.costs` says which of
    them a round consists of, :mod:`optimizer.replay.step_costs` which a step of an engine.

    - The target: ``target`` (rows, context), ``tree target`` and ``sampled target`` (rows): what
      its pass takes more for a tree, and at temperature > 0; ``noise``: per emitted token at
      temperature > 0.
    - A draft D: ``pass/D`` (rows, context); ``phase/D`` (passes): once a round, not of a head;
      ``after/D``: what the target's pass takes more after it; ``sampled pass/D`` (rows). ``stop
      KIND`` per pass of a chain.
    - Its trees: ``tree phase/D`` (passes), and per pass (rows) that grows by ``top_k/D``,
      ``static/D`` or ``classifier/D``, with ``stratify/D`` and ``tree stop/D``.
    - Its output head (rows: tokens evaluated): ``head/D`` whole or trimmed, ``gathered/D`` by a
      router.
    - ``round`` and ``tree round/D`` per round; ``prefill/target`` and ``prefill/D`` (rows): a
      prompt's pass, and what begins a request.
    - Several requests at once, by those beyond one (batch): ``further target`` and ``further
      round``, and of a draft's pass ``further pass/D``. The other terms are charged at the sum of
      their rows and contexts.
    - Of an engine that serves many requests at once: ``step`` (batch), ``step target`` (rows
      verified, tokens in all caches) and ``step prompts`` (rows); with a loaded draft ``step
      draft/D`` (passes, batch), also at 0 passes, and ``step draft prompts/D`` (rows).
    """

    if TYPE_CHECKING:
        terms: dict[str, CostTable]
        environment: dict[str, Any]
        check: dict[str, Any]

    def seconds(self, term: str, **places: npt.ArrayLike) -> FloatArray:
        """Seconds of a term at places, 0 where the profile does not have it."""
        if term not in self.terms:
            return np.zeros(np.broadcast_shapes(*map(np.shape, places.values())))
        return self.terms[term].at(**places)

    @property
    def drafts(self) -> tuple[str, ...]:
        """The drafts whose rounds it has costs of."""
        return self._drafts_of("pass/")

    @property
    def chain_drafts(self) -> tuple[str, ...]:
        """The drafts whose chains it has costs of; a head's are trees of width 1."""
        return self._drafts_of("phase/")

    @property
    def tree_drafts(self) -> tuple[str, ...]:
        """The drafts whose trees it has costs of."""
        return self._drafts_of("top_k/")

    def _drafts_of(self, term: str) -> tuple[str, ...]:
        return tuple(name.removeprefix(term) for name in self.terms if name.startswith(term))

    @property
    def usual_context(self) -> float:
        """The context at which a window that wants one number per gamma reads costs: the middle one
        of those that were measured."""
        contexts = self.environment.get("contexts") or self.terms["target"].knots[-1]
        return float(contexts[len(contexts) // 2])

    def checks(self, *, trees: bool) -> list[Mapping[str, Any]]:
        """The check of chains, and with ``trees`` theirs."""
        return [self.check, *([self.check["trees"]] if trees and "trees" in self.check else [])]

    def accepted(self, *, trees: bool) -> bool:
        """Whether predicted policies were close enough to executed ones; with ``trees`` theirs
        too."""
        return all(check.get("accepted", False) for check in self.checks(trees=trees))

    def prefill_seconds(self, draft: str | None, prompt_tokens: npt.ArrayLike) -> FloatArray:
        """Seconds in which a draft (None: the target) reads prompts but for their last tokens, in
        their shape."""
        read = np.asarray(prompt_tokens) - 1
        return np.where(read > 0, self.seconds(f"prefill/{draft or 'target'}", rows=read), 0.0)

    def request_seconds(self, draft: str | None, prompt_tokens: npt.ArrayLike) -> FloatArray:
        """Seconds before the first round of requests with these prompts, in their shape; ``draft``
        None: nothing is drafted."""
        seconds = self.prefill_seconds(None, prompt_tokens)
        return seconds if draft is None else seconds + self.prefill_seconds(draft, prompt_tokens)

    def shortlist_sizes(self, draft: str, *, routed: bool) -> tuple[float, ...]:
        """The sizes of a draft's shortlists that were measured, ascending; none where none was."""
        table = self.terms.get(f"{'gathered' if routed else 'head'}/{draft}")
        return () if table is None else table.knots[0]

    def shortlist_seconds(self, draft: str, size: npt.ArrayLike, *, routed: bool) -> FloatArray:
        """What a pass over a shortlist of ``size`` tokens takes more than one over the whole head,
        usually less: negative. Raises PolicyError where the profile has no costs of the draft's
        shortlists."""
        check_draft(draft, self._drafts_of("gathered/"), " of shortlists")
        vocab = self.shortlist_sizes(draft, routed=False)[-1]
        term = f"{'gathered' if routed else 'head'}/{draft}"
        seconds = self.seconds(term, rows=np.minimum(size, vocab))
        return np.asarray(seconds - self.seconds(f"head/{draft}", rows=vocab))


def check_draft(draft: str, drafts: Collection[str], parts: str = "") -> None:
    """Raises PolicyError unless a draft is one of ``drafts``, those that a profile has costs of."""
    if draft not in drafts:
        raise PolicyError(
            f"the latency profile has no costs{parts} for draft {draft!r} (it has: "
            f"{', '.join(sorted(drafts)) or 'none'}); run `profile` again"
        )
