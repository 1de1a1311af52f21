"""What the runtime asks of any draft: begin, propose, commit, for all requests of a step.

A draft is a function of its prefix (and, at temperature > 0, of the noise that the target will
use): that is what lets a panorama stand for every start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch import Tensor

from spectune.runtime.sampling import log_distribution

if TYPE_CHECKING:
    from spectune.runtime.drafts.eagle import Features
    from spectune.runtime.policies.plan import Plan
    from spectune.runtime.sampling import Noise
    from spectune.runtime.shortlists import Shortlists
    from spectune.runtime.trees.draft import GrownTree
    from spectune.traces.schema import Sampling

LONG_LAG: Final = 64
"""Tokens to read above which they are read apart from the first proposal's pass."""


@dataclass(frozen=True)
class DraftContext:
    """What a draft may read of the request and the policy in force.

    ``shortlists``: which tokens each step evaluates; None: all. ``noise`` is the target's; a stream
    of its own where the rejection verifier decides (``rejects``)."""

    plan: Plan
    sampling: Sampling
    noise: Noise | None
    shortlists: Shortlists | None = None
    rejects: bool = False

    def log_q(self, logits: Tensor, ids: Tensor | None) -> Tensor:
        """log q of all tokens, [vocab], of ``logits`` [1, vocab], or [1, size] of a shortlist's
        tokens ``ids``: outside it q is 0, since the rejection verifier's ratio and residual are of
        what was drawn from."""
        assert self.noise is not None
        log = log_distribution(logits, self.sampling, draft=True)[0]
        if ids is None:
            return log
        return log.new_full((self.noise.vocab_size,), -torch.inf).index_copy_(0, ids, log)


@dataclass(frozen=True)
class Drafted:
    """What one draft phase did: ``count`` tokens for verification, the passes (``steps``) and the
    tokens read before the first (``lag``).

    ``tokens`` are their ids (a trace knows only those on the text, so there it is empty). ``tree``
    is set where they form one; else each follows the one before. ``log_q``: float32 [vocab] for
    each token of a chain that was drawn independently of the target."""

    count: int
    steps: int
    lag: int
    tokens: list[int] = field(default_factory=list)
    tree: GrownTree | None = None
    log_q: list[Tensor] = field(default_factory=list, compare=False)

    @property
    def depth(self) -> int:
        """Levels drafted: what a window counts as drafted."""
        return self.count if self.tree is None else self.tree.levels


@dataclass(frozen=True)
class DraftRequest:
    """What a draft is asked for one request: at most ``depth`` >= 1 levels after ``text`` (token
    ids, prompt included); HeteroSpec may go on up to ``limit``, a stop may end it earlier.
    ``reading`` is what :meth:`Draft.begin` gave."""

    reading: Any
    text: list[int]
    depth: int
    limit: int
    context: DraftContext


class Draft(Protocol):
    """Proposes tokens for the target to verify. What it has read of a request is a reading, which
    its owner keeps."""

    reads_features: bool
    """Whether it reads the target's hidden states. Then it reads what it drafted again, once that
    is accepted."""

    def begin(self, base: int, features: Features) -> Any:
        """Returns a reading of nothing, of a request whose extent begins at slot ``base``."""

    def catch_up(self, reading: Any, text: list[int]) -> None:
        """Reads a text but for its last token, from where the reading ends."""

    def propose(self, asked: Sequence[DraftRequest]) -> list[Drafted]:
        """What it drafts for each request, in passes over all of them."""

    def commit(self, reading: Any, length: int, drafted: Drafted, path: list[int]) -> None:
        """Of what :meth:`propose` drafted after a text of ``length`` tokens, the nodes ``path``
        were accepted, from the root."""
