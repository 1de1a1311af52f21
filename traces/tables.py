"""Every table but the scheduler's, as SQLAlchemy mapped dataclasses: a row is the value that the
rest of the program works with.

Ids, moments and sums are None until a value is stored. Values outlive their session, and large
columns are read where they are asked for (``undefer``) and nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, field, fields
from datetime import datetime
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from sqlalchemy import JSON, BigInteger, ForeignKey, ForeignKeyConstraint, Index, String, text
from sqlalchemy.orm import Mapped, MappedAsDataclass, declared_attr, mapped_column, relationship

from spectune.db.base import Base, Document, Str16, Str32, Str64, Str200
from spectune.traces import blobs
from spectune.traces.blobs import Content, JsonOf
from spectune.traces.cost_table import CostTable, terms_from_json, terms_to_json
from spectune.traces.latency import Costs
from spectune.traces.schema import (
    Extent,
    Finish,
    Int32Array,
    Outcome,
    Sampling,
    Step,
    Tokens,
    Trie,
    Verifier,
    device_name,
    devices_of,
)

LAST = 1
"""The place of blobs among the columns: SQLite reads all that stands before what is asked for."""
DESIGNED = "profile"
"""The source of what ``profile --engine`` served: steps whose costs were sought."""
SAMPLE = "sample"
"""The source of a recording that lists requests of others, which a tuning takes of traffic."""
NO_TRAFFIC = (DESIGNED, SAMPLE)
"""Sources of recordings that are no traffic of their own."""
AckStatus = Literal["applied", "refused", "withdrawn"]
HARM = "reverted"
"""The verdict of a rollout that did harm."""
_SAMPLING = JsonOf(asdict, lambda document: Sampling(**document))
_STRINGS = JsonOf(list, tuple)
_TEXT = ("recording_id", "ordinal")


class Value(MappedAsDataclass, Base):
    """Rows that are values: of ``LatencyProfile`` the table ``latency_profile``."""

    __abstract__ = True

    @declared_attr.directive
    def __tablename__(cls) -> str:
        return re.sub(r"\B([A-Z])", r"_\1", cls.__name__.removeprefix("Stored")).lower()


class Pair(Value):
    """A target and its drafts; ``id`` is the fingerprint of their content, ``models`` that of each
    (:attr:`runtime.pair.PairSpec.models`), empty where nobody said it."""

    id: Mapped[Str64] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(index=True)
    document: Mapped[Document]
    models: Mapped[Document]
    created_at: Mapped[datetime] = mapped_column(init=False, compare=False)


class StoredWorkload(Value):
    """Prompts (:class:`traces.schema.Workload`); ``id`` is the digest of the requests."""

    id: Mapped[Str64] = mapped_column(primary_key=True)
    name: Mapped[str]
    n_requests: Mapped[int]
    content: Mapped[list[Any]]
    created_at: Mapped[datetime] = mapped_column(init=False, compare=False)


class Recording(Value):
    """A workload decoded by a pair (``source`` record), served traffic (``serve``), or what
    :data:`SAMPLE` and :data:`DESIGNED` say; ``recording`` until it is ``complete``.

    ``n_requests`` to ``drafts`` count what is stored now, but for drafts under shortlists;
    :mod:`traces.store` fills them in. ``n_texts`` of the requests have a text.
    """

    id: Mapped[Str32] = mapped_column(primary_key=True)
    pair_id: Mapped[str] = mapped_column(ForeignKey("pair.id"), index=True)
    workload_id: Mapped[str | None] = mapped_column(ForeignKey("workload.id"), index=True)
    source: Mapped[Str16]
    state: Mapped[Str16]
    sampling: Mapped[Sampling] = mapped_column(_SAMPLING)
    max_new_tokens: Mapped[int]
    verifier: Mapped[Verifier] = mapped_column(String(16))
    options: Mapped[Document]
    asked_sha256: Mapped[Str64] = mapped_column(index=True, repr=False, compare=False)
    created_at: Mapped[datetime] = mapped_column(index=True)
    finished_at: Mapped[datetime | None] = mapped_column(default=None)
    n_requests: int = 0
    n_texts: int = 0
    n_output_tokens: int = 0
    drafts: dict[str, Extent] = field(default_factory=dict)

    @property
    def with_trees(self) -> tuple[str, ...]:
        """The drafts whose panoramas hold trees."""
        return tuple(draft for draft, extent in self.drafts.items() if extent.has_trees)

    @property
    def engine(self) -> str:
        """What decoded it, ``native`` where it does not say."""
        return str(self.options.get("engine", "native"))

    @property
    def device_name(self) -> str:
        """What policies are published for that suit where it was decoded; empty where it does not
        say."""
        return device_name(str(self.options.get("device", "")), self.options.get("hardware"))

    @property
    def start(self) -> str:
        """What it has in common with the recordings of other samplings that are of the same start
        of a server, which is followed; of others their id."""
        return str(self.options.get("boot", self.id)) if self.source == "serve" else self.id

    def shown(self) -> str:
        """Each draft, what its panoramas hold, and of how many requests if not of all."""
        parts = []
        for draft, e in self.drafts.items():
            trees = f" and trees {e.width}x{e.depth}" if e.has_trees else ""
            of = "" if e.count == self.n_texts else f" ({e.count} of {self.n_texts})"
            parts.append(f"{draft} {e.gamma_max}{trees}{of}")
        return ", ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready."""
        values = {k: v for k, v in asdict(self).items() if k != "asked_sha256"}
        return {k: v.isoformat() if isinstance(v, datetime) else v for k, v in values.items()}


class Trajectory(Value):
    """One request as it was decoded: everything its text depends on, and the text; windows were
    clipped to ``max_new_tokens``. ``tokens``: None where its text is not to be stored, as is said
    of a share of the requests of a server that is followed.

    Of a stored one ``steps`` are its executed rounds, ``rounds`` to ``seconds`` their sums, and
    ``by_policy`` these by policy id and by position (:class:`traces.acceptance.Survival`).
    ``part`` is what a tuning uses it for (:mod:`optimizer.tuning.parts`), None until one does, and
    ``confirmations`` how often it was held out to confirm a policy.
    """

    request_id: Mapped[str]
    category: Mapped[str] = mapped_column(index=True)
    tokens: Mapped[Tokens | None] = mapped_column(blobs.TOKENS, sort_order=LAST)
    sampling: Mapped[Sampling] = mapped_column(_SAMPLING)
    max_new_tokens: Mapped[int]
    finish: Mapped[Finish] = mapped_column(String(16))
    verifier: Mapped[Verifier] = mapped_column(String(16), default="coupled")
    stop_strings: Mapped[tuple[str, ...]] = mapped_column(_STRINGS, default=())
    recording_id: Mapped[str] = mapped_column(
        ForeignKey("recording.id", ondelete="CASCADE"), primary_key=True, init=False, compare=False
    )
    ordinal: Mapped[int] = mapped_column(
        primary_key=True, autoincrement=False, init=False, compare=False
    )
    n_prompt: Mapped[int] = mapped_column(init=False, compare=False)
    n_output: Mapped[int] = mapped_column(init=False, compare=False)
    rounds: Mapped[int] = mapped_column(init=False, compare=False)
    drafted: Mapped[int] = mapped_column(init=False, compare=False)
    accepted: Mapped[int] = mapped_column(init=False, compare=False)
    seconds: Mapped[float] = mapped_column(init=False, compare=False)
    by_policy: Mapped[Document] = mapped_column(init=False, compare=False)
    steps: Mapped[tuple[Step, ...] | None] = mapped_column(
        blobs.STEPS, deferred=True, repr=False, init=False, compare=False, sort_order=LAST
    )
    part: Mapped[str | None] = mapped_column(String(1), init=False, compare=False)
    confirmations: Mapped[int] = mapped_column(insert_default=0, init=False, compare=False)
    created_at: Mapped[datetime] = mapped_column(index=True, init=False, compare=False)

    @property
    def prompt_ids(self) -> Int32Array:
        """int32 [P], of one with a text."""
        assert self.tokens is not None
        return self.tokens.prompt

    @property
    def output_ids(self) -> Int32Array:
        """int32 [L], of one with a text; ends with the EOS token where ``finish`` is ``eos``."""
        assert self.tokens is not None
        return self.tokens.output


class SampledRequest(Value):
    """A request that a sample lists, by its ``number`` there: where it is stored, whether its text
    is one of the sample (``is_text``), and whether its rounds are of the load that is replayed
    (``is_load``). What becomes of a request, its part and its panoramas, is stored with itself."""

    __table_args__ = (
        ForeignKeyConstraint(_TEXT, [f"trajectory.{name}" for name in _TEXT], ondelete="CASCADE"),
        Index("ix_sampled_request_of", *_TEXT),
    )

    sample_id: Mapped[str] = mapped_column(
        ForeignKey("recording.id", ondelete="CASCADE"), primary_key=True
    )
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    recording_id: Mapped[Str32]
    ordinal: Mapped[int]
    is_text: Mapped[bool]
    is_load: Mapped[bool]


class Panorama(Value):
    """What one draft would propose from *every* start of one trajectory, as a trie of up to
    ``width`` children a node: chains (from best child to best child) of ``gamma_max`` tokens, and
    trees of ``depth`` levels.

    ``shared``: the child of node i on the text is node i + 1; a head's distributions depend on
    where its round began, and have nodes of their own. What a tree reads beyond is added when a
    replay lacks it.

    Stored: ``n`` positions, the mean ``acceptance`` of a first proposal, and the sums of
    :class:`traces.acceptance.Survival`.
    """

    __table_args__ = (
        ForeignKeyConstraint(_TEXT, [f"trajectory.{name}" for name in _TEXT], ondelete="CASCADE"),
    )

    recording_id: Mapped[Str32] = mapped_column(primary_key=True, init=False, compare=False)
    ordinal: Mapped[int] = mapped_column(primary_key=True, init=False, compare=False)
    draft: Mapped[str] = mapped_column(String(128), primary_key=True)
    gamma_max: Mapped[int]
    width: Mapped[int]
    depth: Mapped[int]
    shared: Mapped[bool]
    trie: Mapped[Trie] = mapped_column(blobs.TRIE, repr=False, sort_order=LAST)
    n: Mapped[int] = mapped_column(init=False, compare=False)
    acceptance: Mapped[float] = mapped_column(init=False, compare=False)
    at_risk: Mapped[list[Any]] = mapped_column(init=False, compare=False)
    survived: Mapped[list[Any]] = mapped_column(init=False, compare=False)

    @property
    def positions(self) -> int:
        """Output tokens of the trajectory."""
        return len(self.trie.text_slot) - len(self.trie.parent) - 1

    @property
    def children(self) -> npt.NDArray[np.int32]:
        """The number of each child's node, int32 [N, width]; -1: not recorded."""
        trie, length, nodes = self.trie, self.positions, len(self.trie.text_slot)
        children = np.full((nodes, self.width), -1, np.int32)
        children[trie.parent, trie.slot] = np.arange(length + 1, nodes, dtype=np.int32)
        if self.shared:
            on_text = np.flatnonzero(trie.text_slot[:length] < self.width)
            children[on_text, trie.text_slot[on_text]] = on_text + 1
        return children


class StoredPolicy(Value):
    """A policy document; ``id`` is the hash of its content."""

    id: Mapped[Str64] = mapped_column(primary_key=True)
    label: Mapped[str]
    document: Mapped[Document]
    created_at: Mapped[datetime] = mapped_column(init=False, compare=False)


class LatencyProfile(Costs, Value):
    """What the terms of a round cost on one device (:class:`traces.latency.Costs`), where that was
    measured, and a check: predicted against executed rounds of policies the fit has not seen."""

    __table_args__ = (Index("ix_latency_profile_of", "pair_id", "device", "dtype", "created_at"),)

    pair_id: Mapped[str] = mapped_column(ForeignKey("pair.id"))
    device: Mapped[str]
    dtype: Mapped[Str16]
    terms: Mapped[dict[str, CostTable]] = mapped_column(JsonOf(terms_to_json, terms_from_json))
    environment: Mapped[Document] = mapped_column(default_factory=dict)
    check: Mapped[Document] = mapped_column(default_factory=dict)
    id: Mapped[Str32] = mapped_column(primary_key=True, init=False, compare=False)
    created_at: Mapped[datetime] = mapped_column(init=False, compare=False)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready, without id and moment."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        return {**values, "terms": terms_to_json(self.terms)}


class Artifact(Value):
    """Something fitted that a policy needs: a JSON document and arrays. ``id`` is the hash of kind
    and content."""

    id: Mapped[Str32] = mapped_column(primary_key=True)
    kind: Mapped[Str64] = mapped_column(index=True)
    pair_id: Mapped[str | None] = mapped_column(ForeignKey("pair.id"))
    content: Mapped[Content] = mapped_column(blobs.CONTENT, deferred=True, repr=False)
    provenance: Mapped[Document]
    created_at: Mapped[datetime] = mapped_column(init=False, compare=False)

    @property
    def document(self) -> Any:
        return self.content.document

    @property
    def arrays(self) -> Mapping[str, npt.NDArray[Any]]:
        return self.content.arrays


class Study(Value):
    """A finished search and its trials."""

    id: Mapped[Str32] = mapped_column(primary_key=True)
    pair_id: Mapped[str] = mapped_column(ForeignKey("pair.id"), index=True)
    recording_id: Mapped[Str32 | None]
    sampler: Mapped[str]
    seed: Mapped[int] = mapped_column(BigInteger)
    n_trials: Mapped[int]
    document: Mapped[Document]
    trials: Mapped[list[Any]] = mapped_column(blobs.DOCUMENT, deferred=True, repr=False)
    created_at: Mapped[datetime] = mapped_column(init=False, compare=False)


class Run(Value):
    """A policy executed (or replayed), and what came of it."""

    id: Mapped[Str32] = mapped_column(primary_key=True)
    kind: Mapped[Str16]
    pair_id: Mapped[str] = mapped_column(ForeignKey("pair.id"), index=True)
    policy_id: Mapped[str] = mapped_column(ForeignKey("policy.id"), index=True)
    workload_id: Mapped[Str64 | None]
    device: Mapped[str]
    dtype: Mapped[Str16]
    purpose: Mapped[str]
    options: Mapped[Document]
    outcome: Mapped[Outcome] = mapped_column(JsonOf(Outcome.stored, Outcome.from_stored))
    created_at: Mapped[datetime] = mapped_column(index=True, init=False, compare=False)


class Publication(Value):
    """A policy put in force in a deployment, for a pair on a device. Rows are only ever added; the
    largest ``version`` is in force. ``sampling``: what it was tuned for (``temperature``,
    ``top_k``, ``top_p``, ``verifier``), None where nobody knows."""

    # Without AUTOINCREMENT SQLite may hand out a deleted row's number again, and a watcher would
    # miss the newer one.
    __table_args__ = (
        Index("ix_publication_of", "deployment", "pair_id", "device", "version"),
        {"sqlite_autoincrement": True},
    )

    version: Mapped[int] = mapped_column(primary_key=True, init=False, compare=False)
    deployment: Mapped[str] = mapped_column(String(100))
    pair_id: Mapped[str] = mapped_column(ForeignKey("pair.id"))
    device: Mapped[str]
    policy_id: Mapped[str] = mapped_column(ForeignKey("policy.id"))
    sampling: Mapped[Document | None] = mapped_column(JSON(none_as_null=True))
    supersedes: Mapped[int | None] = mapped_column(ForeignKey("publication.version"))
    evidence: Mapped[Document]
    actor: Mapped[str]
    reason: Mapped[str]
    idempotency_key: Mapped[Str200 | None] = mapped_column(unique=True)
    created_at: Mapped[datetime]
    policy: Mapped[StoredPolicy] = relationship(lazy="joined", innerjoin=True, init=False)

    @property
    def label(self) -> str:
        return self.policy.label

    @property
    def document(self) -> Mapping[str, Any]:
        return self.policy.document

    def told(self) -> dict[str, Any]:
        """What is said of one just made. JSON-ready."""
        return {"version": self.version, "policy": self.policy_id, "deployment": self.deployment}


class Acknowledgement(Value):
    """What one node did with a publication: ``applied``, ``refused`` with the reason, or
    ``withdrawn``: it runs another one although this is in force."""

    id: Mapped[int] = mapped_column(primary_key=True, init=False)
    version: Mapped[int] = mapped_column(
        ForeignKey("publication.version", ondelete="CASCADE"), index=True
    )
    node: Mapped[str]
    status: Mapped[AckStatus] = mapped_column(String(16))
    reason: Mapped[str]
    at: Mapped[datetime]


class Rollout(Value):
    """A policy that takes turns with the incumbent on the servers of a deployment, until a
    ``verdict``: ``promoted``, :data:`HARM`, ``refused``, ``inconclusive``, ``silent``,
    ``overtaken`` or ``aborted``. Rows are only ever added; one that has ended never changes, but
    that a thaw sets ``is_forgiven``. ``incumbent``: the version in force, None for what servers
    draft by themselves.

    Who conducts it holds a lease (``claims`` is the fencing token), and says in ``standing`` what
    it has seen, and which ``servers`` are to take turns (boots; None: all). Where nobody conducts
    it servers try it no longer.
    """

    # One open at most, whoever begins it.
    __table_args__ = (
        Index(
            "uq_rollout_open", "deployment", "pair_id", "device", unique=True,
            sqlite_where=text("verdict IS NULL"), postgresql_where=text("verdict IS NULL"),
        ),
        {"sqlite_autoincrement": True},
    )  # fmt: skip

    id: Mapped[int] = mapped_column(primary_key=True, init=False, compare=False)
    deployment: Mapped[str] = mapped_column(String(100))
    pair_id: Mapped[str] = mapped_column(ForeignKey("pair.id"))
    device: Mapped[str]
    policy_id: Mapped[str] = mapped_column(ForeignKey("policy.id"))
    seed: Mapped[int]
    block_s: Mapped[float]
    actor: Mapped[str]
    reason: Mapped[str] = mapped_column(default="")
    first_token_limit_s: Mapped[float | None] = mapped_column(default=None)
    sampling: Mapped[Document | None] = mapped_column(JSON(none_as_null=True), default=None)
    evidence: Mapped[Document] = mapped_column(default_factory=dict)
    idempotency_key: Mapped[Str200 | None] = mapped_column(unique=True, default=None)
    incumbent: Mapped[int | None] = mapped_column(
        ForeignKey("publication.version"), init=False, default=None
    )
    created_at: Mapped[datetime] = mapped_column(init=False)
    claims: Mapped[int] = mapped_column(default=0)
    lease_owner: Mapped[Str200 | None] = mapped_column(default=None)
    lease_until: Mapped[datetime | None] = mapped_column(default=None)
    standing: Mapped[Document] = mapped_column(default_factory=dict)
    verdict: Mapped[Str16 | None] = mapped_column(default=None)
    why: Mapped[str] = mapped_column(default="")
    ended_at: Mapped[datetime | None] = mapped_column(default=None)
    is_forgiven: Mapped[bool] = mapped_column(default=False)
    policy: Mapped[StoredPolicy] = relationship(lazy="joined", innerjoin=True, init=False)

    @property
    def trial_version(self) -> int:
        """How agents and their rounds name it; publications are above 0."""
        return -self.id

    def is_tried_by(self, boot: str, device: str, version: int) -> bool:
        """Whether a server on a device, by its boot and the version in force there (0: none), takes
        turns in it now."""
        servers = self.standing.get("servers", ())  # before the first look none
        return (
            self.device in devices_of(device)
            and version == (self.incumbent or 0)
            and (servers is None or boot in servers)
        )

    def to_json(self) -> dict[str, Any]:
        """JSON-ready, as it is told."""
        named = ("id", "deployment", "pair_id", "device", "incumbent", "actor", "reason")
        names = (*named, "verdict", "why", "standing")
        ended = self.ended_at and self.ended_at.isoformat()
        moments = {"created_at": self.created_at.isoformat(), "ended_at": ended}
        about = {"policy": self.policy_id, "label": self.policy.label, "worker": self.lease_owner}
        return {**{name: getattr(self, name) for name in names}, **about, **moments}


class RolloutTurn(Value):
    """Since when a ``boot`` of a server takes turns in a rollout, by the clock that stamps its
    rounds; or why it does not (``problem``), and since when."""

    rollout_id: Mapped[int] = mapped_column(
        ForeignKey("rollout.id", ondelete="CASCADE"), primary_key=True
    )
    boot: Mapped[Str64] = mapped_column(primary_key=True)
    since: Mapped[float] = mapped_column(primary_key=True)
    problem: Mapped[str] = mapped_column(default="")


class Alarm(Value):
    """Traffic of a deployment that is no longer what it was when ``version`` came into force:
    ``what`` changed (``acceptance`` of a category, ``seconds`` of rounds over those predicted, the
    ``mix``: the share of a category), from ``before`` to ``after``; ``since``: what was served from
    then on is of the changed traffic. ``evidence``: how many requests
    each of the two is the mean of, and of acceptance at how many ``drafted`` tokens.

    ``outcome``: ``pending`` until the simulator was asked, then what came of it, in words, ``why``.
    ``gain``: how many times as fast the best policy was that was simulated on the latest traffic,
    None where that is not known. ``schedule``: the one whose tuning was made due, at ``due_at``."""

    __table_args__ = (
        Index("ix_alarm_of", "deployment", "pair_id", "device", "version"),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(primary_key=True, init=False, compare=False)
    deployment: Mapped[str] = mapped_column(String(100))
    pair_id: Mapped[str] = mapped_column(ForeignKey("pair.id"))
    device: Mapped[str]
    version: Mapped[int] = mapped_column(ForeignKey("publication.version"))
    what: Mapped[Str16]
    category: Mapped[str | None]
    at: Mapped[datetime]
    since: Mapped[datetime]
    before: Mapped[float]
    after: Mapped[float]
    evidence: Mapped[Document]
    outcome: Mapped[Str32] = mapped_column(default="pending")
    why: Mapped[str] = mapped_column(default="")
    gain: Mapped[float | None] = mapped_column(default=None)
    schedule: Mapped[Str200 | None] = mapped_column(default=None)
    due_at: Mapped[datetime | None] = mapped_column(default=None)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready."""
        values = asdict(self)
        return {k: v.isoformat() if isinstance(v, datetime) else v for k, v in values.items()}


class WatchedDeployment(Value):
    """What was seen of the traffic of a deployment since ``version`` came into force, for a pair on
    a device: ``figures`` for people, and the ``state`` of what looks for changes
    (:class:`optimizer.drift.detect.Detector`), stored with the alarms that it gave. Who looks holds
    a lease; ``claims`` is its token."""

    deployment: Mapped[str] = mapped_column(String(100), primary_key=True)
    pair_id: Mapped[str] = mapped_column(ForeignKey("pair.id"), primary_key=True)
    device: Mapped[str] = mapped_column(primary_key=True)
    version: Mapped[int] = mapped_column(default=0)
    claims: Mapped[int] = mapped_column(default=0)
    lease_owner: Mapped[Str200 | None] = mapped_column(default=None)
    lease_until: Mapped[datetime | None] = mapped_column(default=None)
    looked_at: Mapped[datetime | None] = mapped_column(default=None)
    figures: Mapped[Document] = mapped_column(default_factory=dict)
    state: Mapped[Document] = mapped_column(
        blobs.DOCUMENT, deferred=True, default_factory=dict, repr=False, sort_order=LAST
    )


class FollowedServer(Value):
    """One ``boot`` of an engine whose folder `follow` reads: up to where its files are in
    (``bytes`` of the file of that number), and what came of them; or of `serve`, which says itself
    how it is. ``engine``: how it serves. ``requests`` are in ``recordings`` (ids, by the digest of
    what each is of); ``skipped`` lines were broken.

    ``place``: its host and folder, where a later boot takes the place of an earlier one; ``node``:
    its name in acknowledgements; ``models``: what it has loaded
    (:class:`engines.vllm.servers.Models`; of `serve` :attr:`runtime.pair.PairSpec.models`).
    ``heard_at``: when its agent, or `serve`, said something last, None of one that has ended;
    ``looked_at``: when `follow` looked last. ``dropped``: requests that it lost; ``fault``: why
    that failed, empty where it did not."""

    boot: Mapped[Str64] = mapped_column(primary_key=True)
    pair_id: Mapped[str] = mapped_column(ForeignKey("pair.id"), index=True)
    engine: Mapped[Document]
    deployment: Mapped[str] = mapped_column(String(100), index=True)
    node: Mapped[str]
    place: Mapped[str]
    models: Mapped[Document]
    heard_at: Mapped[datetime | None]
    looked_at: Mapped[datetime | None]
    file: Mapped[int]
    bytes: Mapped[int] = mapped_column(BigInteger)
    requests: Mapped[int]
    skipped: Mapped[int]
    recordings: Mapped[Document]
    dropped: Mapped[int]
    fault: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(init=False, compare=False)
