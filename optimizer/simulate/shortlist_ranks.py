"""Where shortlists' orders put what was recorded of a draft: all that replays under any of their
budgets ask.

A frequency order ranks tokens: :class:`FrequencyRanks`. A router ranks clusters, by hidden states
that recordings do not hold: :class:`ClusterRanks`. What a shortlist leaves of a distribution also
depends on tokens that are not among the recorded children. Both are read from whole distributions
once (:mod:`optimizer.fit.ranks`) and kept as artifacts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

import numpy as np
import numpy.typing as npt

from spectune.db.errors import CorruptedChunkError
from spectune.runtime.policies.artifacts import FREQUENCIES, ROUTER, lacking
from spectune.runtime.policies.document import MALFORMED
from spectune.traces.schema import NAT_SCALE
from spectune.traces.tables import Panorama, Trajectory

if TYPE_CHECKING:
    from spectune.traces.store import TraceStore

Index = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
Columns = Mapping[str, npt.NDArray[Any]]
"""What ranks hold of some requests: their columns by name."""

UNKNOWN_CODE: Final = 65535
"""-log q of a token that has none."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Ranks:
    """Where an order of tokens, or of clusters, puts what recorded texts go on with, and what one
    draft says there: all that a replay of the draft's chains under any budget asks.

    Of each of T text prefixes (R requests after one another; a text of L tokens has L + 1, the last
    with nothing after it):

    - ``own`` [T], the rank of the true next token (or of its cluster), and ``better`` [T], the
      least rank of a token better than it in the draft's order: it is proposed at budget k iff own
      < k <= better. Ranks count from 0; the number of tokens (clusters) stands for none, and for a
      token that the draft's head lacks.
    - ``text_code`` uint16 [T]: -log q of the true token in 1/256 nat, q the draft's whole
      distribution. ``mass_code`` and ``entropy_code`` uint16 [T, B]: -log of the mass of q that the
      first k tokens (clusters) keep, and the entropy of q over them, for the k of ``budgets``.

    ``fitted`` is the order's artifact. ``digests`` names what each request's rows were computed
    from (:func:`digest`), ``text_offsets`` int64 [R + 1] delimits them.
    """

    KIND: ClassVar[str]
    """The kind of the artifact that holds them."""
    KEY: ClassVar[str]
    """What names the order in documents and commands."""
    NUMBER: ClassVar[str]
    """What the number of ranks is called, and :attr:`UNIT` what one is of."""
    UNIT: ClassVar[str]
    TEXTS: ClassVar[tuple[str, ...]] = ("own", "better", "text_code", "mass_code", "entropy_code")
    """The columns over text prefixes, and :attr:`NODES` those over all nodes."""
    NODES: ClassVar[tuple[str, ...]] = ()
    ARRAYS: ClassVar[tuple[str, ...]]

    draft: str
    fitted: str
    budgets: tuple[int, ...]
    digests: tuple[str, ...]
    text_offsets: Index
    own: npt.NDArray[Any]
    better: npt.NDArray[Any]
    text_code: npt.NDArray[np.uint16]
    mass_code: npt.NDArray[np.uint16]
    entropy_code: npt.NDArray[np.uint16]
    artifact: str = field(default="", compare=False)

    @classmethod
    def of_requests(cls, parts: Sequence[Columns], **about: Any) -> Self:
        """The columns of requests after one another; ``about``: all other fields."""
        for name in cls.TEXTS + cls.NODES:
            about[name] = _stacked([p[name] for p in parts], about[cls.NUMBER])
        about["text_offsets"] = np.cumsum([0, *(len(p["own"]) for p in parts)])
        if cls.NODES:
            about["node_offsets"] = np.cumsum([0, *(len(p[cls.NODES[0]]) for p in parts)])
        return cls(**about)

    def rows_of(self, request: int) -> Columns:
        """The columns of a request, by its place."""
        return {
            name: getattr(self, name)[slice(*offsets[request : request + 2])]
            for name, offsets in self._offsets.items()
        }

    @property
    def _offsets(self) -> dict[str, Index]:
        """Where the requests' rows begin and the last one's end, [R + 1], by column."""
        return dict.fromkeys(self.TEXTS, self.text_offsets)

    def at_budget(self, codes: npt.NDArray[np.uint16], budget: int) -> FloatArray:
        """Codes [T, B] at a budget, float64 [T]: as kept, between the budgets kept linear in their
        logarithm."""
        return _between(np.log(self.budgets), codes, np.log(budget))

    def kept(self, budgets: Sequence[int]) -> list[dict[str, float]]:
        """For budgets of :attr:`budgets`: the tokens or clusters taken, the share of true tokens
        that are in and the mass of the draft's distribution kept, means over the texts."""
        some = self._followed
        if not some.any():
            return []
        mass = np.exp(self.mass_code[some] / -NAT_SCALE)
        return [
            {
                self.UNIT: k,
                "true_tokens": float((self.own[some] < k).mean()),
                "mass": float(mass[:, self.budgets.index(k)].mean()),
            }
            for k in budgets
        ]

    @property
    def _followed(self) -> npt.NDArray[np.bool_]:
        """The prefixes that a token follows."""
        some = np.ones(len(self.own), np.bool_)
        some[self.text_offsets[1:] - 1] = False
        return some

    def to_document(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        """(JSON-ready document, arrays) for an artifact of kind :attr:`KIND`; :meth:`from_document`
        reads them."""
        document = {
            "draft": self.draft,
            self.KEY: self.fitted,
            self.NUMBER: getattr(self, self.NUMBER),
            "budgets": list(self.budgets),
            "requests": list(self.digests),
        }
        return document, {name: getattr(self, name) for name in self.ARRAYS}

    @classmethod
    def from_document(
        cls, document: Mapping[str, Any], arrays: Columns, artifact: str = ""
    ) -> Self:
        """The ranks of :meth:`to_document`. Raises one of :data:`document.MALFORMED` for anything
        else."""
        fields: dict[str, Any] = {n: document[n] for n in ("draft", cls.NUMBER)}
        fields |= {"fitted": document[cls.KEY], "artifact": artifact}
        fields |= {"budgets": tuple(document["budgets"]), "digests": tuple(document["requests"])}
        made = cls(**(fields | {name: arrays[name] for name in cls.ARRAYS}))
        for name, offsets in made._offsets.items():
            if len(offsets) != len(made.digests) + 1 or len(arrays[name]) != offsets[-1]:
                raise ValueError(f"{name} has {len(arrays[name])} rows, not those of its requests")
        return made


@dataclass(frozen=True, eq=False, kw_only=True)
class ClusterRanks(Ranks):
    """Where a router puts the clusters of what was recorded of one draft.

    There are N nodes in all (those of the requests' tree panoramas, in order, delimited by
    ``node_offsets`` int64 [R + 1]). A *rank* is a cluster's place in the router's order at a node;
    M = ``clusters`` stands for none.

    - ``of`` [vocab]: the cluster of every token of the target's vocabulary, M where the draft's
      head lacks it.
    - ``ranks`` [N, K]: the rank of each recorded child's cluster (M beyond the children that
      exist); ``order`` [N, C]: the first clusters.
    - ``sizes`` [T, B]: tokens of the first k clusters at each text prefix.

    Arrays of ranks and sizes are unsigned integers of the smallest fitting size.
    """

    KIND, KEY, NUMBER, UNIT = "cluster_ranks", "router", "clusters", "clusters"
    TEXTS = (*Ranks.TEXTS, "sizes")
    NODES = ("ranks", "order")
    ARRAYS = ("text_offsets", *TEXTS, "node_offsets", "of", *NODES)

    clusters: int
    node_offsets: Index
    of: npt.NDArray[Any]
    ranks: npt.NDArray[Any]
    order: npt.NDArray[Any]
    sizes: npt.NDArray[Any]

    def tokens(self, budget: int) -> FloatArray:
        """Tokens of the first ``budget`` clusters at every text prefix, float64 [T]: exact at the
        budgets kept, linear between them."""
        return _between(np.array(self.budgets), self.sizes, budget)

    def kept(self, budgets: Sequence[int]) -> list[dict[str, float]]:
        """The same, with the clusters' tokens."""
        sizes = self.sizes[self._followed]
        return [
            {**row, "tokens": float(sizes[:, self.budgets.index(k)].mean())}
            for k, row in zip(budgets, super().kept(budgets), strict=False)
        ]

    @property
    def _offsets(self) -> dict[str, Index]:
        return super()._offsets | dict.fromkeys(self.NODES, self.node_offsets)


@dataclass(frozen=True, eq=False, kw_only=True)
class FrequencyRanks(Ranks):
    """Where a frequency order of ``vocab`` tokens puts what recorded texts go on with. Where
    ``open`` bool [T], the draft's order is not known beyond the recorded children (filters hide
    it), and ``better`` is theirs."""

    KIND, KEY, NUMBER, UNIT = "frequency_ranks", "frequencies", "vocab", "tokens"
    TEXTS = (*Ranks.TEXTS, "open")
    ARRAYS = ("text_offsets", *TEXTS)

    vocab: int
    open: npt.NDArray[np.bool_]


RANKS_OF: Final[Mapping[str, type[Ranks]]] = {ROUTER: ClusterRanks, FREQUENCIES: FrequencyRanks}
"""The ranks of each kind of artifact that orders."""


def _between(budgets: npt.NDArray[Any], columns: npt.NDArray[Any], budget: float) -> FloatArray:
    """Columns [T, B] kept at ``budgets`` [B], ascending, at another one, float64 [T]: linear
    between its neighbours, the last one's beyond it."""
    above = min(int(np.searchsorted(budgets, budget)), len(budgets) - 1)
    found = columns[:, above].astype(np.float64)
    if budget < budgets[above]:
        share = (budgets[above] - budget) / (budgets[above] - budgets[above - 1])
        found += share * (columns[:, above - 1] - found)
    return found


def _stacked(parts: Sequence[npt.NDArray[Any]], none: int) -> npt.NDArray[Any]:
    """Requests' rows after one another; where trees are of different widths, ``none`` fills up."""
    if parts[0].ndim == 1:
        return np.concatenate(parts)
    widest = max(p.shape[1] for p in parts)
    return np.concatenate(
        [np.pad(p, ((0, 0), (0, widest - p.shape[1])), constant_values=none) for p in parts]
    )


def budget_grid(most: int) -> tuple[int, ...]:
    """The budgets, out of so many clusters or tokens, at which mass and entropy are kept: 1 to 8,
    then by steps of sqrt(2), and all."""
    found = {*range(1, 9), *(round(2 ** (i / 2)) for i in range(6, 64))}
    return (*sorted(k for k in found if k < most), most)


def digest(trajectory: Trajectory, panorama: Panorama) -> str:
    """16 hexadecimal digits of all that a request's rows of ranks depend on beside the draft and
    the order."""
    t, p, trie = trajectory, panorama, panorama.trie
    h = hashlib.sha256(f"{t.request_id}\0{t.sampling}\0{p.shared}".encode())
    for array in (t.prompt_ids, t.output_ids, trie.parent, trie.slot, trie.tokens, trie.count):
        h.update(f"{array.shape}".encode())
        h.update(np.ascontiguousarray(array).tobytes())
    return h.hexdigest()[:16]


def stored_ranks(store: TraceStore, recording: str, draft: str, fitted: str) -> Ranks | None:
    """The newest stored ranks of a recording under the router or the frequency order ``fitted``,
    None where there are none. Ids may be abbreviated.

    They may lack requests that were recorded since, which a
    :class:`optimizer.simulate.replay_trace.ReplayTrace` refuses. Raises CorruptedChunkError when
    all that are there are damaged, NotFoundError for an unknown recording or artifact.
    """
    info, order = store.get_recording(recording), store.get_artifact(fitted)
    ranks = RANKS_OF.get(order.kind, ClusterRanks)
    kind, wanted = ranks.KIND, {"recording": info.id, "draft": draft}
    wanted[ranks.KEY] = order.id
    damaged: CorruptedChunkError | None = None
    for artifact in store.list_artifacts(kind, info.pair_id):
        if wanted.items() <= artifact.provenance.items():
            try:
                found = store.get_artifact(artifact.id)
                return ranks.from_document(found.document, found.arrays, found.id)
            except CorruptedChunkError as error:
                damaged = error
            except MALFORMED as error:
                damaged = CorruptedChunkError(
                    f"artifact {artifact.id} ({kind}) cannot be used ({lacking(error)})"
                )
    if damaged is not None:
        remedy = how_to_rank(info.id, order.id, draft, ranks.KEY)
        raise CorruptedChunkError(f"{damaged}; {remedy}") from damaged
    return None


def how_to_rank(recording: str, fitted: str, draft: str, key: str = "router") -> str:
    """The command that makes ranks, for messages."""
    return f"`fit ranks --recording {recording} --{key} {fitted} --draft {draft}` makes them"
