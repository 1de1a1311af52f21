"""The plain loop over a recorded trace: slow, obvious, and what the fast replay must agree with
round by round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from spectune.optimizer.replay.chain_tables import AGREE_NO, AGREE_NONE, AGREE_YES
from spectune.optimizer.replay.forest import Forest
from spectune.runtime.drafts.protocol import Drafted
from spectune.runtime.loop import (
    DecodeRequest,
    Round,
    StaticSource,
    Turn,
    Verified,
    decode_rounds,
)
from spectune.runtime.policies.plan import Plan
from spectune.runtime.policies.stops import should_stop
from spectune.runtime.session import Sessions
from spectune.runtime.trees.draft import GrownTree, grow
from spectune.runtime.trees.grow import Codes, Growing
from spectune.runtime.verification import accept
from spectune.traces.errors import TraceError
from spectune.traces.schema import request_seed
from spectune.traces.tables import Panorama, Trajectory


class RecordedTrees(NamedTuple):
    """The trees of one text: a draft's ``forest``, and the ``first`` of the text's positions in
    it."""

    forest: Forest
    first: int


class _RecordedTree:
    """The distributions of one start, looked up node by node. Raises TraceError for one that was
    not recorded."""

    def __init__(self, trees: RecordedTrees, start: int) -> None:
        self.forest = trees.forest
        self.nodes = [int(trees.forest.root[trees.first + start])]

    def root(self) -> Codes:
        return self._rows()

    def expand(self, growing: Growing, width: int) -> Codes:
        tree, forest, nodes = growing.tree, self.forest, []
        columns = (x[growing.depth, :width].tolist() for x in (tree.place, tree.above, tree.rank))
        for place, above, rank in zip(*columns, strict=True):
            node = -1
            if place >= 0:
                node = int(forest.child[self.nodes[above], rank])
                if node < 0:
                    raise TraceError(
                        f"the recording does not hold all distributions of draft {forest.draft!r}"
                    )
            nodes.append(node)
        self.nodes = nodes
        return self._rows()

    def _rows(self) -> Codes:
        f = self.forest
        codes = np.zeros((3, len(self.nodes), f.width), dtype=np.int64)
        of_nodes = np.zeros((3, len(self.nodes)), dtype=np.int64)
        for row, node in enumerate(self.nodes):
            if node >= 0:
                codes[:, row] = f.tokens[node], f.logp[node], f.gap[node]
                of_nodes[:, row] = f.entropy[node], f.top_entropy[node], f.count[node]
        return Codes.of(*codes, *of_nodes)


class TraceBackend:
    """A backend over one trajectory and one draft's panorama: proposals and verdicts are
    looked up, not computed.

    Chains are read from ``panorama``, trees (a head's chains are trees too) from ``trees``. Raises
    TraceError when a stop would read beyond the window that was recorded, a tree beyond what was.
    """

    def __init__(
        self,
        trajectory: Trajectory,
        panorama: Panorama | None,
        trees: RecordedTrees | None = None,
    ) -> None:
        self.output, self.trees = trajectory.output_ids.tolist(), trees
        self.panorama = panorama
        self._at = 0
        self._lag = 1
        self._accepted = 0
        if panorama is not None:
            self._best = panorama.children[:, 0].tolist()

    def begin(self, request: DecodeRequest, prepared: Plan) -> None:
        self._sampling = request.sampling
        # A head reads from the second token on.
        reads = self.trees is None or self.trees.forest.shared or len(request.prompt_ids) > 1
        self._at, self._lag = 0, int(reads)

    def _codes(self, start: int, j: int, reads: bool) -> tuple[int, int, int]:
        """(agreement, -log q code, entropy code) of the j-th proposal of the chain from ``start``;
        agreement counts along the chain."""
        view, node = self.panorama, start
        assert view is not None
        for _ in range(j):
            node = self._best[node] if node >= 0 else -1
        if node < 0:
            if reads or view.draft == "ngram":
                raise TraceError(
                    f"the panorama of draft {view.draft!r} holds windows up to {view.gamma_max}; "
                    f"record with --gamma-max {j + 1}"
                )
            return AGREE_NO, 0, 0
        trie = view.trie
        if not trie.count[node]:
            return AGREE_NONE, 0, 0
        agree = AGREE_YES if trie.text_slot[node] == 0 else AGREE_NO
        return agree, int(trie.logp[node, 0]), int(trie.entropy[node])

    def draft(self, prepared: Plan, gamma: int, limit: int) -> Drafted:
        if not self._lag:
            return Drafted(0, 0, 0, [], GrownTree())
        if self.trees is not None:
            source = _RecordedTree(self.trees, self._at)
            tree = grow(prepared.rule(self._sampling), gamma, limit, source)
            return Drafted(len(tree.tokens), tree.steps, self._lag, tree.tokens, tree)
        if self.panorama is None or self.panorama.draft != prepared.policy.draft:
            raise TraceError(f"this recording has no panorama of draft {prepared.policy.draft!r}")
        stop = prepared.stop
        count = steps = joint = accepted = 0
        for j in range(gamma):
            steps += 1
            agree, logp, entropy = self._codes(self._at, j, stop.active)
            if agree == AGREE_NONE:
                break
            joint += logp
            ended = should_stop(stop, logp, joint, entropy)
            if ended and not stop.keep_last:
                break
            count += 1
            accepted += int(agree == AGREE_YES and accepted == j)
            if ended:
                break
        self._accepted = accepted
        return Drafted(count, steps, self._lag)

    def verify(self, drafted: Drafted | None) -> Verified:
        if drafted is not None and drafted.tree is not None:
            assert self.trees is not None
            tree, end = drafted.tree, len(self.output)
            positions = [min(self._at + depth, end) for depth in (0, *tree.depths)]
            verdict = accept(tree, lambda row: [*self.output, -1][positions[row]])
            # A head reads all emitted tokens again.
            self._read = (verdict.read or 0) if self.trees.forest.shared else 0
            return replace(verdict, read=self._read)
        accepted = self._accepted if drafted else 0
        return Verified(accepted, self.output[self._at : self._at + accepted + 1])

    def commit(self, emitted: list[int], accepted: int, drafted: Drafted | None) -> None:
        if drafted is None or not drafted.steps:
            self._lag += len(emitted)
        else:
            chain = drafted.tree is None
            self._lag = len(emitted) - (min(accepted, drafted.steps - 1) if chain else self._read)
        self._at += len(emitted)


class EachAlone:
    """The loop's backend over one of each request's own, which draft and verify for it alone."""

    def __init__(self, backend_of: Callable[[DecodeRequest], Any]) -> None:
        self._backend_of = backend_of
        self._of: dict[Turn, Any] = {}

    def admit(self, turn: Turn, plan: Plan) -> bool:
        self._of[turn] = self._backend_of(turn.request)
        self._of[turn].begin(turn.request, plan)
        return True

    def read_prompt(self, turn: Turn, count: int) -> None:
        pass

    def draft(self, turns: Sequence[Turn]) -> list[Drafted | None]:
        return [
            self._of[turn].draft(turn.plan, turn.gamma, turn.limit) if turn.gamma > 0 else None
            for turn in turns
        ]

    def verify(self, turns: Sequence[Turn]) -> list[Verified]:
        return [self._of[turn].verify(turn.drafted) for turn in turns]

    def commit(self, turns: Sequence[Turn]) -> None:
        for turn in turns:
            self._of[turn].commit(turn.tokens, turn.accepted, turn.drafted)

    def release(self, turn: Turn) -> None:
        del self._of[turn]


RoundSeconds = Callable[..., tuple[float, float, float]]
"""(drafting, verification, the whole round) in seconds of a context, the tokens that the draft has
to read, its passes, drafted and emitted tokens."""


class Instant(Fraction):
    """A time without rounding: two are exactly as far apart as what passed between them took."""

    def __sub__(self, other: Any) -> Any:
        return float(super().__sub__(other))


class Timed:
    """A backend whose rounds take the seconds of a cost model, by its own ``clock``."""

    def __init__(self, backend: TraceBackend, seconds: RoundSeconds) -> None:
        self.backend, self.seconds = backend, seconds
        self.began = self.now = Instant()

    def clock(self) -> Any:
        return self.now

    def begin(self, request: DecodeRequest, prepared: Plan) -> None:
        self.context = len(request.prompt_ids) - 1
        self.backend.begin(request, prepared)

    def draft(self, prepared: Plan, gamma: int, limit: int) -> Drafted:
        drafted = self.backend.draft(prepared, gamma, limit)
        self.now = self._after(self._seconds(drafted, 0)[0])
        return drafted

    def verify(self, drafted: Drafted | None) -> Verified:
        verdict = self.backend.verify(drafted)
        self.now = self._after(*self._seconds(drafted, len(verdict.tokens))[:2])
        return verdict

    def commit(self, emitted: list[int], accepted: int, drafted: Drafted | None) -> None:
        self.backend.commit(emitted, accepted, drafted)
        self.began = self.now = self._after(self._seconds(drafted, len(emitted))[2])
        self.context += len(emitted)

    def _seconds(self, drafted: Drafted | None, emitted: int) -> tuple[float, float, float]:
        made = drafted or Drafted(count=0, steps=0, lag=0)
        return self.seconds(self.context, made.lag, made.steps, made.count, emitted)

    def _after(self, *seconds: float) -> Instant:
        return Instant(self.began + sum(map(Fraction, seconds)))


def replay_rounds(
    trajectory: Trajectory,
    panorama: Panorama | None,
    prepared: Plan,
    sessions: Sessions | None = None,
    trees: RecordedTrees | None = None,
    seconds: RoundSeconds | None = None,
) -> list[Round]:
    """Every round of one request under one plan, by the plain loop. ``sessions`` hold what windows
    carry on; ``seconds`` is what rounds take."""
    length = len(trajectory.output_ids)

    def ends_at(output: list[int], new: list[int]) -> int | None:
        return length - len(output) if len(output) + len(new) >= length else None

    request = DecodeRequest(
        id=trajectory.request_id,
        prompt_ids=trajectory.prompt_ids.tolist(),
        sampling=trajectory.sampling,
        seed=request_seed(trajectory.sampling.seed, trajectory.request_id),
        max_new_tokens=trajectory.max_new_tokens,
        ends_at=ends_at,
    )
    speculates = prepared.policy.speculates
    backend = TraceBackend(trajectory, panorama if speculates else None, trees)
    source, kept = StaticSource(prepared), {"sessions": sessions}
    if seconds is None:
        return list(decode_rounds(EachAlone(lambda _: backend), request, source, **kept))
    timed = Timed(backend, seconds)
    return list(decode_rounds(EachAlone(lambda _: timed), request, source, timed.clock, **kept))
