"""Where shortlists' orders put what was recorded of a draft: all that replays under any of their
budgets ask.

A frequency order ranks tokens: :class:`FrequencyRanks`. A router ranks clusters, by hidden states
that recordings do not hold: :class:`ClusterRanks`. What a shortlist leaves of a distribution also
depends on tokens that are not among the recorded children. Both are read from whole distributions
once (:mod:`optimizer.fit.ranks`) and kept as
artifacts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self, cast

import numpy as np
import numpy.typing as npt

from spectune.db.errors import CorruptedChunkError
from spectune.runtime.policies.artifacts import FREQUENCIES, ROUTER
from spectune.traces.errors import TraceError
from spectune.traces.recording import how_to_record_trees
from spectune.traces.schema import NAT_SCALE, Proposals, Trajectory, TreePanorama

if TYPE_CHECKING:
    from spectune.traces.store import TraceStore

Index = npt.NDArray[np.int64]

CLUSTER_RANKS: Final = "cluster_ranks"
"""Kind of the artifact that holds :class:`ClusterRanks`."""
FREQUENCY_RANKS: Final = "frequency_ranks"
"""Kind of the artifact that holds :class:`FrequencyRanks`."""
UNKNOWN_CODE: Final = 65535
"""-log q of a token that has none."""


@dataclass(frozen=True, eq=False, kw_only=True)
class TextRanks:
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
    KEY: ClassVar[str]
    """What names the order in documents and commands."""
    NUMBER: ClassVar[str]
    """What the ranks that stand for none are called."""
    ARRAYS: ClassVar[tuple[str, ...]] = (
        "text_offsets",
        "own",
        "better",
        "text_code",
        "mass_code",
        "entropy_code",
    )

    draft: str
    fitted: str
    proposals: Proposals
    budgets: tuple[int, ...]
    digests: tuple[str, ...]
    text_offsets: Index
    own: npt.NDArray[Any]
    better: npt.NDArray[Any]
    text_code: npt.NDArray[np.uint16]
    mass_code: npt.NDArray[np.uint16]
    entropy_code: npt.NDArray[np.uint16]
    artifact: str = field(default="", compare=False)

    def kept(self, budgets: Sequence[int]) -> list[dict[str, float]]:
        """For budgets of :attr:`budgets`: the share of true tokens that are in and the mass of the
        draft's distribution kept, means over the texts."""
        some = self._followed
        return [
            {
                "true_tokens": float((self.own[some] < k).mean()),
                "mass": float(np.exp(self.mass_code[some, c] / -NAT_SCALE).mean()),
            }
            for k, c in zip(budgets, [self.budgets.index(k) for k in budgets], strict=True)
            if some.any()
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
            "proposals": self.proposals,
            self.NUMBER: getattr(self, self.NUMBER),
        }
        document |= {"budgets": list(self.budgets), "requests": list(self.digests)}
        return document, {name: getattr(self, name) for name in self.ARRAYS}

    @classmethod
    def from_document(
        cls, document: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]], artifact: str = ""
    ) -> Self:
        """The ranks of :meth:`to_document`. Raises ValueError for anything else."""
        what = cls.KIND.replace("_", " ")
        missing = [
            n
            for n in ("draft", cls.KEY, "proposals", cls.NUMBER, "budgets", "requests")
            if n not in document
        ]
        missing += [n for n in cls.ARRAYS if n not in arrays]
        if missing:
            raise ValueError(f"not {what}: {missing[0]} is missing")
        made = cls(
            draft=document["draft"],
            fitted=document[cls.KEY],
            proposals=cast(Proposals, document["proposals"]),
            budgets=tuple(document["budgets"]),
            digests=tuple(document["requests"]),
            **{cls.NUMBER: document[cls.NUMBER]},
            **{name: arrays[name] for name in cls.ARRAYS},
            artifact=artifact,
        )
        for name, wanted in made._rows().items():
            if len(getattr(made, name)) != wanted:
                raise ValueError(
                    f"not {what}: {name} has {len(getattr(made, name))} rows, not {wanted}"
                )
        return made

    def rows_of(self, request: int) -> dict[str, npt.NDArray[Any]]:
        """What is held of a request, by its place: columns by name."""
        rows = slice(*self.text_offsets[request : request + 2])
        return {
            name: getattr(self, name)[rows] for name in self._rows() if not name.endswith("offsets")
        }

    def _rows(self) -> dict[str, int]:
        """How many rows arrays must have."""
        texts = int(self.text_offsets[-1])
        rows = dict.fromkeys(("own", "better", "text_code", "mass_code", "entropy_code"), texts)
        return {"text_offsets": len(self.digests) + 1, **rows}


@dataclass(frozen=True, eq=False, kw_only=True)
class ClusterRanks(TextRanks):
    """Where a router puts the clusters of what was recorded of one draft: all that a replay under
    any of its budgets asks.

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

    KIND = CLUSTER_RANKS
    KEY = "router"
    NUMBER = "clusters"
    ARRAYS = (*TextRanks.ARRAYS, "node_offsets", "of", "ranks", "order", "sizes")

    clusters: int
    node_offsets: Index
    of: npt.NDArray[Any]
    ranks: npt.NDArray[Any]
    order: npt.NDArray[Any]
    sizes: npt.NDArray[Any]

    @property
    def router(self) -> str:
        """The router's artifact."""
        return self.fitted

    def kept(self, budgets: Sequence[int]) -> list[dict[str, float]]:
        """The same, with the clusters taken and their tokens."""
        columns = [self.budgets.index(k) for k in budgets]
        return [
            {"clusters": k, **row, "tokens": float(self.sizes[self._followed, c].mean())}
            for k, c, row in zip(budgets, columns, super().kept(budgets), strict=False)
        ]

    def rows_of(self, request: int) -> dict[str, npt.NDArray[Any]]:
        """The same."""
        nodes = slice(*self.node_offsets[request : request + 2])
        return {**super().rows_of(request), "ranks": self.ranks[nodes], "order": self.order[nodes]}

    def _rows(self) -> dict[str, int]:
        nodes = int(self.node_offsets[-1])
        more = {
            "node_offsets": len(self.digests) + 1,
            "ranks": nodes,
            "order": nodes,
            "sizes": int(self.text_offsets[-1]),
        }
        return {**super()._rows(), **more}


@dataclass(frozen=True, eq=False, kw_only=True)
class FrequencyRanks(TextRanks):
    """Where a frequency order of ``vocab`` tokens puts what recorded texts go on with. Where
    ``open`` bool [T], the draft's order is not known beyond the recorded children (filters hide
    it), and ``better`` is theirs."""

    KIND = FREQUENCY_RANKS
    KEY = "frequencies"
    NUMBER = "vocab"
    ARRAYS = (*TextRanks.ARRAYS, "open")

    vocab: int
    open: npt.NDArray[np.bool_]

    def kept(self, budgets: Sequence[int]) -> list[dict[str, float]]:
        """The same, with the tokens taken."""
        return [
            {"tokens": k, **row} for k, row in zip(budgets, super().kept(budgets), strict=False)
        ]

    def _rows(self) -> dict[str, int]:
        return {**super()._rows(), "open": int(self.text_offsets[-1])}


Ranks = ClusterRanks | FrequencyRanks
RanksByPolicy = Mapping[tuple[str, str], Ranks]
"""What shortlists are replayed from, by draft and the shortlist's artifact
(:class:`optimizer.simulate.replay_trace.ReplayTrace`)."""


def budget_grid(most: int) -> tuple[int, ...]:
    """The budgets, out of so many clusters or tokens, at which mass and entropy are kept: 1 to 8,
    then by steps of sqrt(2), and all."""
    found = {*range(1, 9), *(round(2 ** (i / 2)) for i in range(6, 64))}
    return (*sorted(k for k in found if k < most), most)


def digest(trajectory: Trajectory, panorama: TreePanorama) -> str:
    """16 hexadecimal digits of all that a request's rows of ranks depend on beside the draft and
    the order."""
    h = hashlib.sha256(
        f"{trajectory.request_id}\0{trajectory.sampling}\0{panorama.proposals}\0{panorama.shared}".encode()
    )
    for array in (
        trajectory.prompt_ids,
        trajectory.output_ids,
        panorama.parent,
        panorama.slot,
        panorama.tokens,
        panorama.count,
    ):
        h.update(f"{array.shape}".encode())
        h.update(np.ascontiguousarray(array).tobytes())
    return h.hexdigest()[:16]


def stored_ranks(
    store: TraceStore, recording: str, draft: str, fitted: str, proposals: Proposals = "coupled"
) -> Ranks | None:
    """The newest stored ranks of a recording under the router or the frequency order ``fitted``,
    None where there are none. Ids may be abbreviated.

    They may lack requests that were recorded since, which a
    :class:`optimizer.simulate.replay_trace.ReplayTrace` refuses. Raises CorruptedChunkError when
    all that are there are damaged, NotFoundError for an unknown recording or artifact.
    """
    info, order = store.get_recording(recording), store.get_artifact(fitted)
    made_of = RANKS_OF.get(order.kind, ClusterRanks)
    kind, wanted = (
        made_of.KIND,
        {"recording": info.id, "draft": draft, made_of.KEY: order.id, "proposals": proposals},
    )
    damaged: CorruptedChunkError | None = None
    for name, origin in store.artifact_origins(kind, info.pair_id):
        if wanted.items() <= origin.items():
            try:
                found = store.get_artifact(name)
                return made_of.from_document(found.document, found.arrays, name)
            except CorruptedChunkError as error:
                damaged = error
            except ValueError as error:
                damaged = CorruptedChunkError(f"artifact {name} ({kind}) cannot be used ({error})")
    if damaged is not None:
        raise CorruptedChunkError(
            f"{damaged}; {how_to_rank(info.id, order.id, draft, proposals, made_of.KEY)}"
        ) from damaged
    return None


@dataclass(frozen=True)
class Wanted:
    """What ranks are made of: the requests of a recording that hold trees of a draft, by
    ``digests``, and those ranks that are stored of them already, by order."""

    recording: str
    texts: Sequence[Trajectory]
    trees: Sequence[TreePanorama]
    digests: tuple[str, ...]
    there: Mapping[str, Ranks]

    def complete(self, order: str) -> bool:
        """Whether every request is in what is stored of an order."""
        return order in self.there and set(self.digests) <= set(self.there[order].digests)


def wanted_ranks(
    store: TraceStore,
    pair_id: str,
    recording: str,
    draft: str,
    orders: Sequence[str],
    proposals: Proposals = "coupled",
) -> Wanted:
    """What the ranks of a recording under routers and frequency orders are made of.
    Raises TraceError for a recording of another pair or without trees of the draft."""
    info = store.get_recording(recording)
    if info.pair_id != pair_id:
        raise TraceError(
            f"recording {info.id} is of pair {info.pair_id}, this is pair {pair_id}; name one of "
            "this pair"
        )
    loaded = store.load(info.id, [draft], trees=True, skip_corrupted=True).having(
        trees=[draft], proposals=proposals
    )
    if not loaded.requests:
        raise TraceError(
            f"recording {info.id} has no trees of draft {draft!r}, whose distributions a "
            f"shortlist's ranks are of; " + how_to_record_trees(info.id, proposals=proposals)
        )
    there: dict[str, Ranks] = {}
    for name in orders:
        with suppress(CorruptedChunkError):
            if (found := stored_ranks(store, info.id, draft, name, proposals)) is not None:
                there[name] = found
    texts, trees = loaded.trajectories, loaded.trees(draft, proposals)
    return Wanted(
        info.id, texts, trees, tuple(digest(t, p) for t, p in zip(texts, trees, strict=True)), there
    )


def keep_ranks(store: TraceStore, pair_id: str, recording: str, made: Ranks) -> Ranks:
    """Stores ranks of a recording; the same with the artifact's id."""
    document, arrays = made.to_document()
    origin = {
        "recording": recording,
        "draft": made.draft,
        made.KEY: made.fitted,
        "proposals": made.proposals,
    }
    document |= {**origin, "pair": pair_id}
    while True:
        name = store.put_artifact(made.KIND, document, arrays, pair_id=pair_id, provenance=origin)
        try:
            store.get_artifact(name)
        # this very content was there, damaged; ids are hashes of contents, so a new one needs
        # another
        except CorruptedChunkError:
            document["instead_of"] = name
        else:
            return replace(made, artifact=name)


RANKS_OF: Final[Mapping[str, type[ClusterRanks] | type[FrequencyRanks]]] = {
    ROUTER: ClusterRanks,
    FREQUENCIES: FrequencyRanks,
}
"""The ranks of each kind of artifact that orders."""


def how_to_rank(
    recording: str, fitted: str, draft: str, proposals: Proposals = "coupled", key: str = "router"
) -> str:
    """The command that makes ranks, for messages."""
    flag = "" if proposals == "coupled" else f" --proposals {proposals}"
    return f"`fit ranks --recording {recording} --{key} {fitted} --draft {draft}{flag}` makes them"
