"""`tune`: the whole circle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from spectune.optimizer.commands.decoding import fit_to, load, read_workload
from spectune.optimizer.commands.load import tune_load
from spectune.optimizer.commands.outcomes import tuning_result
from spectune.optimizer.commands.report import page_of
from spectune.optimizer.commands.results import Result
from spectune.optimizer.commands.server import tune_url
from spectune.optimizer.commands.session import (
    DECODED,
    OF_TEXTS,
    Talk,
    check_writable,
    next_command,
    open_store,
    pair_of,
)
from spectune.optimizer.inputs import recording_of
from spectune.optimizer.processes import dask_workers
from spectune.optimizer.report.words import closing
from spectune.optimizer.tuning.confirm import check_workload_size
from spectune.optimizer.tuning.native import TuneOptions, tune_recording
from spectune.optimizer.tuning.native import tune as tune_workload
from spectune.optimizer.tuning.sources import gather
from spectune.runtime.pair import PairSpec
from spectune.settings import Tune
from spectune.traces.errors import ConfigError
from spectune.traces.store import TraceStore
from spectune.traces.tables import Recording

QUICK: Final[dict[str, dict[str, Any]]] = {
    "trees": {"width": 0},
    "search": {"trials": 100},
    "race": {"finalists": 2, "budget": 40.0},
    "requests": {"limit": 48},
    "sampling": {"max_new_tokens": 48},
}
"""What ``quick`` makes of settings that nobody said."""


def tune(s: Tune, talk: Talk) -> Result:
    if s.url is not None or s.folder is not None:
        return tune_url(s, talk)
    if s.engine is not None or s.load.arrivals is not None or s.serve:
        return tune_load(s, talk)
    talk.no_effect(s, "without --arrivals", "load.")
    if s.recording and s.since:
        raise ConfigError("give either --recording or --set since=AGE, not both")
    recorded = s.recording is not None or s.since is not None
    if recorded:
        keys = DECODED if s.since is None else OF_TEXTS
        talk.no_effect(s, "on a recording, whose texts are there", *keys)
    if s.report != "none":
        check_writable(s, report=s.report)
    quick = ""
    if s.quick:
        s, quick = _be_quick(s)
    with open_store(s, create=True) as store:
        spec = pair_of(s, store, s.recording)
        workload = None if recorded else read_workload(s, spec, talk)
        if workload is not None:  # before the pair is loaded
            check_workload_size(workload, publish=s.publish)
        options = TuneOptions.of(s, fresh=s.fresh, publish=s.publish, tell=talk.tell)
        pair = load(s, spec, talk)
        info = None
        if workload is not None:
            workload = fit_to(pair, workload, options.options, s, talk)
        else:
            info = _recording(store, spec, s, talk)
        if quick:
            talk.tell(quick)
        with dask_workers(s.workers), pair.torch_threads():
            if info is not None:
                tuned = tune_recording(store, pair, info.id, options, progress=talk.progress)
            else:
                assert workload is not None
                tuned = tune_workload(store, pair, workload, options, progress=talk.progress)
        page, failed = page_of(store, tuned.study, s.db, s.report, talk.tell)
    result = tuning_result(tuned)
    data = {**result.data, "heads": pair.hidden_states, "report": page}
    where = f"in deployment {s.deployment}, for pair {pair.spec.name} on {pair.device_name}"
    text = f"{result.text}\n{closing(data, where, _next(data, s))}"
    return replace(result, text=text, data=data, failed=failed)


def _recording(store: TraceStore, spec: PairSpec, s: Tune, talk: Talk) -> Recording:
    """The recording to tune on. Raises TraceError for another pair's."""
    name = s.recording or ""
    if s.since is not None:
        key = f"tune since {s.since.isoformat()}"
        name = gather(
            store, spec.id, store.clock() - s.since, s.requests.limit, key=key, tell=talk.tell
        )
    info = recording_of(store, name, spec)
    if info.state != "complete" and info.workload_id is not None:
        talk.tell(
            f"recording {info.id} was never finished: tuning on the {info.n_requests} requests it "
            "holds (the `record` that began it makes the others)"
        )
    return info


def _be_quick(s: Tune) -> tuple[Tune, str]:
    """The settings with :data:`QUICK` where nothing was said; a line on what that leaves out."""
    groups = {
        group: getattr(s, group).model_copy(
            update={k: v for k, v in values.items() if f"{group}.{k}" not in s.sources}
        )
        for group, values in QUICK.items()
    }
    s = s.model_copy(update=groups)
    trees = ""
    if not s.trees.width:
        trees = "; draft trees are not tried"
    on = "what is recorded"
    if not (s.recording or s.since):
        on = f"at most {s.requests.limit} requests of at most {s.sampling.max_new_tokens} tokens"
    return s, (
        f"quick: {on}, {s.search.trials} trials, a race of {s.race.budget:g}s{trees} (`tune` "
        "without --quick tries all)"
    )


def _next(data: dict[str, Any], s: Tune) -> list[tuple[str, str]]:
    """What to type after a tuning, with the options that name the same place, and what it is
    for."""
    winner, page = data["winner"]["id"], data["report"]
    hints = [(f"policies show {winner}", "the policy, key by key")]
    if data["published"]:
        hints = [
            ("policies show active", "the published policy, and its evidence"),
            ("run --policy active", "decodes with what is published"),
        ]
    elif winner != data["baselines"]["incumbent"]["id"] and not data["blocked"]:
        hints.append((f"policies activate {winner}", "publishes the winner"))
    hints = [(next_command(s, words, "pair", "deployment"), why) for words, why in hints]
    if page is not None:
        hints.append(
            (page, "predicted against measured, the race, latency, what was tried: open it")
        )
    return hints
