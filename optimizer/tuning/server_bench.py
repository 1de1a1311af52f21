"""Tuning a vLLM server that somebody else runs: its costs are noted while policies take turns, and
the race and its confirmation switch policies on it. What was in force is put back after each, also
after an error."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from spectune.engines.engine import Prompt
from spectune.engines.vllm.folder import read_policy
from spectune.engines.vllm.follow_policy import PolicyWriter, file_of
from spectune.engines.vllm.locks import database_of
from spectune.engines.vllm.retrace import Retracer
from spectune.engines.vllm.running import IN_FORCE_S, RunningServer
from spectune.optimizer.recording.engine_profile import TOKENS, Design, serve_design
from spectune.optimizer.recording.record import PanoramaSpec, record_panoramas
from spectune.optimizer.replay.loads import Objective, loads_of
from spectune.optimizer.replay.served_costs import costs_of_engine
from spectune.optimizer.tuning.engine_bench import engine_bench
from spectune.optimizer.tuning.load_bench import LoadBench
from spectune.optimizer.tuning.load_search import TRIALS
from spectune.runtime.loading import LoadedPair
from spectune.runtime.pair import PairSpec
from spectune.runtime.progress import Progress, silent
from spectune.traces.errors import EngineError, TraceError
from spectune.traces.store import TraceStore
from spectune.traces.tables import Publication, Recording

DESIGN_PROMPTS: Final = 64
DESIGN_CLIENTS: Final = 8
"""Most clients that costs are noted with, where the loads do not say how many there are."""


@contextmanager
def connect(
    store: TraceStore, url: str, folder: str, pair: PairSpec | None
) -> Iterator[RunningServer]:
    """The server to tune, which nobody else tunes until the block ends. Raises EngineError where
    it drafts nothing, TraceError where it is tuned, or followed into another database than
    ``store``, whose `follow` would take out what is published here, and as :class:`RunningServer`
    does."""
    server = RunningServer(url, Path(folder), pair)
    if server.draft == "none":
        raise EngineError(
            f"{server.url} drafts nothing; start it with --speculative-config (`engines vllm` "
            "prints the command)"
        )
    how, database = database_of(server.folder, "follow")
    if database not in ("", store.database.id):
        here = file_of(store.database)
        raise TraceError(f"{folder} is {how}; tune into that database (--db), not {here}")
    with server.reserved():
        yield server


@dataclass(frozen=True)
class ServerBench(LoadBench):
    """A server that runs as what is tuned: what it drafts by itself is put back after race and
    confirmation, and what is published put in force."""

    server: RunningServer = field(kw_only=True)

    def put_in_force(self, published: Publication, tell: Callable[[str], None]) -> None:
        put_published(self.store, self.server, published.deployment, tell)


def server_bench(
    store: TraceStore,
    server: RunningServer,
    info: Recording,
    arrivals: str,
    objective: Objective,
    *,
    fresh: bool = False,
    seed: int = 0,
    trials: int = TRIALS,
    progress: Progress = silent,
    **how: Any,
) -> ServerBench:
    """The bench of a server by what it recorded (``info``), under the loads of ``arrivals``. What
    steps cost is noted where it is not known, with ``fresh`` anew. Raises as :func:`engine_bench`
    does."""
    if fresh or not _costs_are_known(store, server, info):
        try:
            _note_costs(store, server, info, _clients(arrivals, server), progress)
        finally:
            server.close()  # it drafts as before while policies are searched
    bench = engine_bench(store, info, [], arrivals, objective, **how)
    costs = replace(bench.costs, passes={server.draft: bench.costs.passes[server.draft]})
    bench = replace(bench, costs=costs, start=lambda wanted: server, loaded=server.draft)
    of_search = {"seed": seed, "trials": trials, "progress": progress}
    return ServerBench.of(bench, store, server=server, **of_search)


def record_draft(
    store: TraceStore,
    server: RunningServer,
    info: Recording,
    load: Callable[[], LoadedPair],
    *,
    progress: Progress = silent,
) -> None:
    """Makes what the server's draft proposes at every position of a recording: by the pair, which
    is loaded, where that has the draft as a checkpoint, else by the server itself."""
    if server.draft in server.spec.methods:
        Retracer(store, info, server, progress=progress).run()
    if server.draft in server.spec.drafts:
        read_by_pair(store, info.id, server.draft, server.wanted.most, load, progress=progress)


def read_by_pair(
    store: TraceStore,
    recording: str,
    draft: str,
    most: int,
    load: Callable[[], LoadedPair],
    *,
    progress: Progress = silent,
) -> None:
    """Makes what a draft of a pair, which is loaded, proposes at every position of a recording, up
    to so many tokens."""
    pair = load()
    with pair.torch_threads():
        panoramas = PanoramaSpec((draft,), max(2, most))
        record_panoramas(store, pair, recording, panoramas, progress=progress)


def put_published(
    store: TraceStore, server: RunningServer, deployment: str, tell: Callable[[str], None]
) -> None:
    """Ends the trials, puts what is published in force, as `follow` does where it runs, and waits
    for the answer."""
    server.close()
    texts = read_policy(server.folder).get("texts")  # as before
    writer = PolicyWriter(store, server.folder, deployment, tell, pair=server.spec, texts=texts)
    writer.look()
    deadline = time.monotonic() + IN_FORCE_S
    while not writer.is_in_force:
        refused = writer.status and writer.status.refused
        if refused and refused.version == writer.version:
            tell(f"publication {writer.version} is refused by {server.url}: {refused.reason}")
            return
        if time.monotonic() > deadline:
            tell(f"publication {writer.version} is not in force yet on {server.url}")
            return
        time.sleep(0.05)
        writer.look()


def _costs_are_known(store: TraceStore, server: RunningServer, info: Recording) -> bool:
    """Whether steps with every number of draft tokens were noted."""
    try:
        passes = costs_of_engine(store, info).passes
    except TraceError:
        return False
    return passes.get(server.draft) == (0, server.wanted.most)


def _note_costs(
    store: TraceStore, server: RunningServer, info: Recording, clients: int, progress: Progress
) -> None:
    """Serves prompts of a recording under every doubled number of draft tokens in turns, from one
    client to ``clients``. No request is for more tokens than one of the recording has."""
    texts = store.load(info.id, ()).trajectories
    tokens = min(TOKENS, max(len(text.output_ids) for text in texts))
    spread = np.unique(np.linspace(0, len(texts) - 1, DESIGN_PROMPTS).astype(int))
    prompts = [Prompt("", texts[n].category, tuple(texts[n].prompt_ids.tolist())) for n in spread]
    design = Design(prompts, server.wanted.most, clients, tokens)
    serve_design(store, server.spec, server, server.draft, design, progress)


def _clients(arrivals: str, server: RunningServer) -> int:
    """The most clients of the loads, as far as the server has seats for them."""
    most = DESIGN_CLIENTS
    if arrivals.startswith("clients:"):
        most = max(load.clients for load in loads_of(arrivals, (), 1).values())
    return min(most, server.wanted.max_num_seqs)
