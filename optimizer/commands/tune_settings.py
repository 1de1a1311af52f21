"""What the settings of a tuning mean, before anything is read: the bench, what does not act there,
and what ``quick`` makes of them."""

from __future__ import annotations

from typing import Any, Final, TypeVar

from spectune.optimizer.commands.common import Talk, check_writable
from spectune.optimizer.deployment import check_server
from spectune.optimizer.replay.loads import loads_of, objective_of
from spectune.settings import Tune
from spectune.traces.errors import ConfigError

T = TypeVar("T", bound=Tune)
QUICK: Final[dict[str, dict[str, Any]]] = {
    "trees": {"width": 0},
    "search": {"trials": 100},
    "race": {"finalists": 2, "budget": 40.0},
    "requests": {"limit": 48},
    "sampling": {"max_new_tokens": 48},
}
"""What ``quick`` makes of settings that nobody said."""


def bench_of(s: Tune) -> str:
    """The bench that settings mean, a key of :data:`spectune.settings.WHERE`."""
    if s.url is not None or s.folder is not None:
        return "server"
    if s.engine is not None or s.serve:
        return "engine"
    # A recording says itself what engine it is of.
    recorded = s.recording is not None or s.since is not None
    return "engine" if s.load.arrivals is not None and recorded else "native"


def checked(s: T, talk: Talk) -> T:
    """The settings with those of ``quick``, after what is wrong with them was said. Raises
    ConfigError."""
    bench, recorded = bench_of(s), s.recording is not None or s.since is not None
    if s.recording is not None and s.since is not None:
        raise ConfigError("give either --recording or --since, not both")
    if bench == "server":
        check_server(s.url, s.folder)
        if not (recorded or s.workload or s.prompts):
            raise ConfigError(
                "--url sends requests to that server: say which by --workload FILE, or take what "
                "it served by --recording latest or --since 24h"
            )
    if bench == "engine" and s.load.arrivals is None:
        raise ConfigError(
            "--engine and --serve tune for a load: say --arrivals poisson:RATE, clients:N, "
            "recorded or a CSV"
        )
    if bench == "native" and (s.load.arrivals or "").partition("@")[0] == "recorded":
        raise ConfigError(
            "--arrivals recorded: name whose traffic is meant: --engine vllm, or --recording"
        )
    objective_of(s.load)
    if s.load.arrivals and not s.load.arrivals.startswith("recorded"):
        loads_of(s.load.arrivals, (), 1, unit=s.load.unit)  # what is wrong is told at once
    here = {bench} | ({"executed"} if bench != "engine" or s.serve else set())
    here |= {"since"} if s.since is not None else set()
    here |= set() if recorded or bench == "engine" else {"texts"}
    here |= {"load", "search"} if bench != "native" or s.load.arrivals is not None else set()
    talk.no_effect(s, here)
    if s.report != "none":
        check_writable(s, report=s.report)
    return _quick(s, talk) if s.quick and bench == "native" else s


def _quick(s: T, talk: Talk) -> T:
    """The settings with :data:`QUICK` where nothing was said; tells what that leaves out."""
    groups = {
        group: getattr(s, group).model_copy(
            update={k: v for k, v in values.items() if f"{group}.{k}" not in s.sources}
        )
        for group, values in QUICK.items()
    }
    s = s.model_copy(update={**groups, "quick": False})
    trees = "" if s.trees.width else "; draft trees are not tried"
    on = "what is recorded"
    if not (s.recording or s.since):
        on = f"at most {s.requests.limit} requests of at most {s.sampling.max_new_tokens} tokens"
    talk.tell(
        f"quick: {on}, {s.search.trials} trials, a race of {s.race.budget:g}s{trees} (`tune` "
        "without --quick tries all)"
    )
    return s
