"""Replay of a recording that is spread over the processes of a Dask cluster: a shard a worker,
which reads it once and keeps it.

The driver knows of the requests only their ids and categories. It sends a policy (kilobytes) to
every shard, and puts together what each came to by request, in the recording's order: counts and
seconds are those of one process, to the last bit. A window that carries its state from request to
request goes on in a shard from where it was left in the one before; others are replayed in all
shards at once. The shards of a worker that dies are read again by others.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from spectune.db.database import open_database
from spectune.db.errors import DatabaseError
from spectune.optimizer.artifacts import fitted
from spectune.optimizer.simulate.chain_tables import Index
from spectune.optimizer.simulate.replay import run_replay
from spectune.optimizer.simulate.replay_trace import Replay, ReplayTrace, together
from spectune.optimizer.simulate.trace import (
    NoRequestsError,
    Opened,
    Simulated,
    check_ranked,
    open_trace,
    why_approximate,
)
from spectune.runtime.policies.artifacts import Fitted
from spectune.runtime.policies.document import (
    AUTOREGRESSIVE,
    HeuristicWindow,
    Policy,
    PromptPolicy,
    QLearningWindow,
)
from spectune.traces.errors import PolicyError, SpectuneError
from spectune.traces.recording import Skipped
from spectune.traces.store import TraceStore
from spectune.traces.tables import LatencyProfile, Recording

if TYPE_CHECKING:
    from distributed import Client, Future

PATIENCE_S: Final = 10
"""How long a scheduler is waited for, and its first worker."""


@contextmanager
def connected(workers: str) -> Iterator[Client]:
    """A client of so many new processes of this machine (``"4"``), or of the scheduler at an
    address (``"tcp://HOST:8786"``), for as long as the block lasts. Raises SpectuneError where Dask
    is not installed or nobody answers."""
    try:
        from distributed import Client, LocalCluster
    except ImportError:
        raise SpectuneError("--workers needs Dask: `pip install distributed`") from None
    with ExitStack() as stack:
        if workers.isdecimal():
            cluster = LocalCluster(
                n_workers=int(workers),
                threads_per_worker=1,
                memory_limit=0,
                dashboard_address="127.0.0.1:0",
                silence_logs="CRITICAL",
            )
            client = stack.enter_context(Client(stack.enter_context(cluster)))
        else:
            try:
                client = stack.enter_context(Client(workers, timeout=PATIENCE_S))
            except (OSError, ValueError) as error:
                raise SpectuneError(
                    f"--workers {workers}: no Dask scheduler answers there ({error}); `dask "
                    "scheduler` starts one, --workers 4 needs none"
                ) from None
            _check_workers(client, workers)
        stack.enter_context(_said())
        yield client


def _check_workers(client: Client, address: str) -> None:
    """Raises SpectuneError where a scheduler has no workers, or they cannot run this code."""
    try:
        client.wait_for_workers(1, timeout=PATIENCE_S)
        client.run(_carries, AUTOREGRESSIVE)
    except TimeoutError:
        raise SpectuneError(
            f"--workers {address}: the scheduler has no workers; `dask worker {address}` starts one"
        ) from None
    except Exception as error:  # a worker that lacks a module answers with this type
        raise SpectuneError(
            f"--workers {address}: a worker cannot work for us ({error}); install the same "
            "spectune there"
        ) from None


@contextmanager
def _said() -> Iterator[None]:
    """What a cluster fails by, in one line."""
    from distributed import KilledWorker
    from distributed.client import FutureCancelledError
    from distributed.comm import CommClosedError

    try:
        yield
    except KilledWorker:
        raise SpectuneError(
            "workers were killed again and again by the same work (is memory short?)"
        ) from None
    except (FutureCancelledError, CommClosedError):
        raise SpectuneError("the Dask scheduler is gone; run the command again") from None


@dataclass(frozen=True)
class StoredShard:
    """Requests of a stored recording, and where a worker reads them: a value of kilobytes, which
    travels. ``url`` may hold a password, and is kept out of Dask's logs."""

    url: str = field(repr=False)
    recording: str
    ordinals: Collection[int]
    policies: tuple[Policy, ...]
    skip_corrupted: bool = False

    @contextmanager
    def _store(self) -> Iterator[TraceStore]:
        try:
            database = open_database(self.url, create=False)
        except DatabaseError as error:
            raise type(error)(f"workers read the recording themselves: {error}") from None
        with database:
            yield TraceStore(database)

    def open(self) -> Opened:
        """Reads the shard. Raises NoRequestsError where nothing is left of it."""
        with self._store() as store:
            return open_trace(
                store,
                self.recording,
                self.policies,
                ordinals=self.ordinals,
                skip_corrupted=self.skip_corrupted,
            )

    def artifact(self, name: str) -> Fitted:
        with self._store() as store:
            return fitted(store, store.get_recording(self.recording).pair_id)(name)


class Shard:
    """A part of a recording in a worker's memory. Sent to another, it is read there again."""

    def __init__(self, source: StoredShard, profile: LatencyProfile | None) -> None:
        self._source, self._profile = source, profile
        self._find = cache(source.artifact)
        self._turn = threading.Lock()  # what a trace remembers is not made for two threads
        self._trace: ReplayTrace | None = None
        self._skipped: tuple[Skipped, ...] = ()
        with suppress(NoRequestsError):
            self._trace, _, self._skipped, _ = source.open()

    def __reduce__(self) -> tuple[type[Shard], tuple[StoredShard, LatencyProfile | None]]:
        return Shard, (self._source, self._profile)

    def __sizeof__(self) -> int:
        """Its bytes, about: Dask then moves the work to the shard, and not the shard."""
        if self._trace is None:
            return 0
        panoramas = (vars(p).values() for of in self._trace.panoramas.values() for p in of)
        tables = [*self._trace.chains.values(), *panoramas]
        return sum(a.nbytes for table in tables for a in table if isinstance(a, np.ndarray))

    def about(self) -> About:
        if self._trace is None:
            return About((), self._skipped)
        trace, chains = self._trace, frozenset(self._trace.chains)
        return About(trace.names, self._skipped, chains, trace.filtered)

    def replay(self, policy: Policy, before: Replay | None, take: int, **how: bool) -> Replay:
        """Replays the first ``take`` requests, which the driver knows the names of; a window goes
        on from where ``before`` left it."""
        assert self._trace is not None
        state = None if before is None else before.state
        with self._turn:
            part = self._trace.select(range(take))
            ran = run_replay(part, policy, self._profile, state=state, artifacts=self._find, **how)
        return replace(ran, names=())


class About(NamedTuple):
    """Ids and categories of a shard's requests, the damaged chunks left out of it, and its trace's
    ``chains`` and ``filtered``."""

    names: tuple[tuple[str, str], ...]
    skipped: tuple[Skipped, ...]
    chains: frozenset[str] = frozenset()
    filtered: bool = False


class Shards:
    """A recording on the workers of a cluster: the shards of ``sources``, in order, each opened
    when this is made.

    ``progress`` is called with (shards opened, in all). Raises what opening a shard raises, and
    SpectuneError where workers die of it.
    """

    def __init__(
        self,
        client: Client,
        sources: Sequence[StoredShard],
        profile: LatencyProfile | None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        from distributed import as_completed

        self._client = client
        self._shards = [
            client.submit(
                Shard, source, profile, pure=False, workers=[home], allow_other_workers=True
            )
            for source, home in zip(sources, cycle(homes(client)), strict=False)
        ]
        known = [client.submit(Shard.about, shard, pure=False) for shard in self._shards]
        for done, _ in enumerate(as_completed(known), 1):
            progress(done, len(known))
        # The first that failed raises.
        self._about: list[About] = [shard.result() for shard in known]
        self.names = tuple(name for about in self._about for name in about.names)
        """Ids and categories of the requests, in order."""
        self.request_ids = tuple(name for name, _ in self.names)
        self.skipped = tuple(chunk for about in self._about for chunk in about.skipped)
        """Damaged chunks that were left out."""
        self.chains = frozenset(draft for about in self._about for draft in about.chains)
        self.filtered = any(about.filtered for about in self._about)
        """Both as of :class:`optimizer.simulate.replay_trace.ReplayTrace`."""

    def replay(
        self,
        policies: Iterable[Policy],
        *,
        limit: int | None = None,
        per_round: bool = False,
        approximate: bool = False,
    ) -> Iterator[Replay]:
        """:func:`optimizer.simulate.replay.run_replay` of each policy, in order, over the first
        ``limit`` requests. Workers are at those that follow while one is taken."""
        ahead: deque[tuple[Policy, list[tuple[About, Future]]]] = deque()
        how = {"per_round": per_round, "approximate": approximate}
        for policy in policies:
            ahead.append((policy, list(self._begun(policy, limit, how))))
            if len(ahead) > 2 * len(self._shards):
                yield self._joined(*ahead.popleft())
        while ahead:
            yield self._joined(*ahead.popleft())

    def _begun(
        self, policy: Policy, limit: int | None, how: dict[str, bool]
    ) -> Iterator[tuple[About, Future]]:
        before: Future | None = None
        left = len(self.names) if limit is None else limit
        for shard, about in zip(self._shards, self._about, strict=True):
            if take := min(left, len(about.names)):
                asked = shard, policy, before, take
                begun = self._client.submit(Shard.replay, *asked, **how, pure=False)
                before = begun if _carries(policy) else None
                yield about, begun
            left -= take

    def _joined(self, policy: Policy, begun: Sequence[tuple[About, Future]]) -> Replay:
        parts: list[tuple[Index, Replay]] = []
        first = 0
        replayed = self._client.gather([future for _, future in begun])
        for (about, _), part in zip(begun, replayed, strict=True):
            count = len(part.counts)
            parts.append((first + np.arange(count), replace(part, names=about.names[:count])))
            first += count
        chosen = tuple(draft for _, part in parts for draft in part.chosen)
        return replace(together(policy, parts), chosen=chosen)


def homes(client: Client) -> list[str]:
    """The addresses of the workers, each as often as it has threads: where shards are opened."""
    return [
        address for address, threads in sorted(client.nthreads().items()) for _ in range(threads)
    ]


def _carries(policy: Policy) -> bool:
    """Whether a policy's window goes on from request to request."""
    window = policy.window
    return isinstance(window, QLearningWindow) or (
        isinstance(window, HeuristicWindow) and not window.transient
    )


def simulate_on(
    client: Client,
    store: TraceStore,
    info: Recording,
    policy: Policy,
    profile: LatencyProfile | None,
    *,
    limit: int | None = None,
    per_round: bool = False,
    skip_corrupted: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Simulated:
    """:func:`optimizer.simulate.trace.simulate` by the workers of a cluster. Raises PolicyError for
    a choice between policies whose windows go on from request to request, too."""
    if isinstance(policy, PromptPolicy) and any(map(_carries, policy.candidates)):
        raise PolicyError(
            "--workers: windows of the policies that are chosen from go on from request to "
            "request; simulate without --workers"
        )
    check_ranked(store, info, policy)
    count = len(homes(client))
    sources = stored_shards(store, info, [policy], count, skip_corrupted=skip_corrupted)
    shards = Shards(client, sources, profile, progress)
    if not shards.names:
        raise NoRequestsError(f"recording {info.id} has no usable request")
    (replayed,) = shards.replay([policy], limit=limit, per_round=per_round)
    why = why_approximate(info, replayed.missed, chains=shards.chains, filtered=shards.filtered)
    return Simulated(replayed, shards.skipped, why)


def stored_shards(
    store: TraceStore,
    info: Recording,
    policies: Sequence[Policy],
    count: int,
    *,
    ordinals: Collection[int] | None = None,
    skip_corrupted: bool = False,
) -> list[StoredShard]:
    """A recording, or some of its requests, in at most ``count`` shards of as many requests each,
    for :class:`Shards`. Raises NoRequestsError where it has none."""
    url = store.database.url
    if url.get_backend_name() == "sqlite":
        url = url.set(database=str(Path(str(url.database)).resolve()))
    chosen = sorted(store.recorded_ordinals(info.id) if ordinals is None else ordinals)
    parts = [part for part in np.array_split(np.array(chosen), count) if len(part)]
    if not parts:
        raise NoRequestsError(f"recording {info.id} has no usable request")
    address = url.render_as_string(hide_password=False)
    whole = StoredShard(address, info.id, (), tuple(policies), skip_corrupted)
    return [replace(whole, ordinals=tuple(part.tolist())) for part in parts]
