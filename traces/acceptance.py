"""How long drafts survive: acceptance by position, from panoramas (every start) and from executed
rounds.

The ``coupled`` verifier keeps the proposals of a start as far as they are the text. For
``rejection`` and acceptance probabilities k[i], proposals 0..j of start s all survive with
probability k[s] k[s+1] ... k[s+j]. Sums over starts add up over trajectories, so they are stored
per chunk and any grouping is a sum of rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from spectune.traces.schema import PROB_SCALE, Step, Verifier
from spectune.traces.tables import Panorama


@dataclass(frozen=True)
class Survival:
    """Sums over ``starts``: ``at_risk[j]`` kept proposals 0..j-1 and had a j-th to judge;
    ``survived[j]`` kept that too. ``drafted[j]``: executed rounds that drafted a j-th; empty for
    panoramas, which draft one from every start."""

    starts: int = 0
    at_risk: tuple[float, ...] = ()
    survived: tuple[float, ...] = ()
    drafted: tuple[float, ...] = ()

    @property
    def conditional(self) -> tuple[float, ...]:
        """P(proposal j is kept | proposals 0..j-1 were, and there is a j-th): 1 - hazard. 0 where
        nobody was at risk."""
        return tuple(
            s / r if r > 0 else 0.0 for s, r in zip(self.survived, self.at_risk, strict=True)
        )

    @property
    def marginal(self) -> tuple[float, ...]:
        """P(proposals 0..j are all kept | a j-th is drafted)."""
        of = self.drafted or (self.starts,) * len(self.survived)
        return tuple(s / n if n else 0.0 for s, n in zip(self.survived, of, strict=True))

    @property
    def mean_accepted_length(self) -> float:
        """tau of drafting as far as the columns go: 1 + the mean number of proposals kept."""
        return 1.0 + sum(self.survived) / self.starts if self.starts else 0.0

    @property
    def histogram(self) -> tuple[float, ...]:
        """(Expected) number of starts whose accepted run is exactly 0, 1, ... proposals long; sums
        to ``starts``."""
        runs = (float(self.starts), *self.survived, 0.0)
        return tuple(a - b for a, b in pairwise(runs))

    def to_json(self) -> dict[str, Any]:
        return {
            "starts": self.starts,
            "mean_accepted_length": self.mean_accepted_length,
            "marginal": list(self.marginal),
            "conditional": list(self.conditional),
            "histogram": list(self.histogram),
        }


def keep_probability(panorama: Panorama, verifier: Verifier) -> npt.NDArray[np.float64]:
    """float64 [L] in [0, 1]: the chance that the first proposal from each start is kept; 0 where
    there is none."""
    trie = panorama.trie
    if verifier == "rejection" and len(trie.accept):
        return np.asarray(trie.accept / PROB_SCALE)
    return np.asarray(trie.text_slot[: panorama.positions] == 0, dtype=np.float64)


def survival(panorama: Panorama, verifier: Verifier) -> Survival:
    """The sums over the chains from every start of one trajectory, ``gamma_max`` positions long."""
    n, best = panorama.positions, panorama.children[:, 0]
    drawn = verifier == "rejection" and len(panorama.trie.accept) > 0
    chance = keep_probability(panorama, verifier) if drawn else None
    alive, node = np.ones(n), np.arange(n)
    at_risk: list[float] = []
    survived: list[float] = []
    for j in range(panorama.gamma_max):
        alive, node = alive[: max(0, n - j)], node[: max(0, n - j)]
        at_risk.append(float(alive.sum()))
        on_text = (node >= 0) & (panorama.trie.text_slot[node] == 0)
        alive = alive * (on_text if chance is None else chance[j:])
        node = np.where(on_text, best[node], -1)
        survived.append(float(alive.sum()))
    return Survival(n, tuple(at_risk), tuple(survived))


def step_survival(steps: Sequence[Step]) -> Survival:
    """The same from executed rounds, without steps that read a prompt: position j is at risk in
    rounds that drafted more than j levels and kept at least j."""
    steps = [s for s in steps if not s.reads_prompt]
    drafted = np.array([s.depth or s.drafted for s in steps], dtype=np.int64)
    accepted = np.array([s.accepted for s in steps], dtype=np.int64)
    depth = range(int(drafted.max(initial=0)))
    at_risk = tuple(float(((drafted > j) & (accepted >= j)).sum()) for j in depth)
    survived = tuple(float((accepted > j).sum()) for j in depth)
    tried = tuple(float((drafted > j).sum()) for j in depth)
    return Survival(len(steps), at_risk, survived, tried)


def compact(sums: Sequence[float]) -> list[int | float]:
    """Sums as stored in JSON: whole numbers without a point, others to six digits after it."""
    return [int(v) if v == int(v) else round(v, 6) for v in sums]


HARDLY = 0.05
"""Acceptance of the first drafted token below which something is wrong with a draft: a published
EAGLE-3 head that is fed other states than its own reaches 0.036, with its own 0.75."""
ENOUGH = 300
"""Positions on which that is seen."""
ENOUGH_OF_NONE = 90
"""Positions on which it is seen where none is accepted: at :data:`HARDLY`, all of so many are
rejected one time in a hundred."""


@dataclass(frozen=True)
class FirstPosition:
    """How many of a draft's first tokens were accepted, out of how many ``positions``."""

    acceptance: float
    positions: int

    def to_json(self) -> dict[str, Any]:
        return {"acceptance": self.acceptance, "positions": self.positions}


def executed_first(steps: Iterable[Step]) -> dict[str, FirstPosition]:
    """By draft, how many of the rounds that drafted accepted their first token."""
    rounds: dict[str, list[bool]] = {}
    for step in steps:
        if step.drafted:
            rounds.setdefault(step.draft, []).append(step.accepted > 0)
    return {d: FirstPosition(sum(kept) / len(kept), len(kept)) for d, kept in rounds.items()}


def hardly_accepted(first: Mapping[str, FirstPosition], heads: Collection[str] = ()) -> list[str]:
    """A warning for each draft that is a model (an EAGLE head where it is among ``heads``) and next
    to never right."""
    lines = []
    for draft, found in first.items():
        enough = ENOUGH if found.acceptance else ENOUGH_OF_NONE
        if draft == "ngram" or found.positions < enough or found.acceptance >= HARDLY:
            continue
        why = (
            "it reads other hidden states than it was trained on "
            "(eagle_aux_hidden_state_layer_ids in its config.json), its tokens are not those of "
            "its d2t, or it was trained for another target"
            if draft in heads
            else "it is no smaller model of the target's family, or its weights are damaged"
        )
        lines.append(
            f"warning: draft {draft!r} is next to never right: of {found.positions} first tokens "
            f"{found.acceptance:.1%} are accepted; likely {why}"
        )
    return lines
