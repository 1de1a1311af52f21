"""Tuning under a load: search in simulation, race, confirm on texts held out, publish. All but the
search is as the native decoder's tuning does it (:mod:`optimizer.tuning.pipeline`), on an
:class:`optimizer.tuning.engine.EngineBench`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from spectune.engines.protocol import Running, Wanted
from spectune.engines.start import start
from spectune.optimizer.deployment import Place, tuned_for
from spectune.optimizer.inputs import in_force
from spectune.optimizer.report.evidence import put_evidence
from spectune.optimizer.report.words import sampling_in_words
from spectune.optimizer.tuning.confirm import check_sample_size
from spectune.optimizer.tuning.engine import EngineBench, LoadOutcome
from spectune.optimizer.tuning.load_search import LoadStudy, Trial
from spectune.optimizer.tuning.pipeline import (
    ProveOptions,
    Raced,
    conclude,
    confirm_winner,
    run_race,
)
from spectune.optimizer.tuning.tuned import Tuned
from spectune.runtime.hardware import sees_cuda
from spectune.runtime.pair import PairSpec
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy
from spectune.runtime.progress import Progress, silent
from spectune.traces.errors import TraceError
from spectune.traces.sanity import checked
from spectune.traces.store import TraceStore
from spectune.traces.store.confirmations import count_confirmation
from spectune.traces.tables import DESIGNED, Recording


@dataclass(frozen=True)
class LoadSearch:
    """What a search under load proposes (``trial``), its ``study`` and the id that it is stored
    under."""

    bench: EngineBench
    study: LoadStudy
    trial: Trial
    study_id: str

    @property
    def contexts(self) -> dict[str, Any] | None:
        """The contexts of steps (percentiles 10, 50 and 90 of their requests' mean), from which
        length on other tables were tried (None: none were, as contexts vary little), and what the
        best of all is worth then, as a part of the best by batch size alone. None where the engine
        has no tables."""
        study = self.study
        if study.contexts is None:
            return None
        about = {"tokens": study.contexts, "tried_from": study.context or None}
        worth = max(trial.value for trial in study.trials.values()) / study.best_by_batch.value
        return {**about, "relative": worth if study.context else None}

    def to_json(self) -> dict[str, Any]:
        bench, study, objective = self.bench, self.study, self.bench.objective
        policy, loads = self.trial.policy, []
        shown = {"table": self.trial, "off": study.off, "loaded_0_tokens": study.idle(policy.draft)}
        for name in bench.loads:
            best = study.best_constant(name)
            figures = {
                key: trial and trial.served[name].to_json(objective)
                for key, trial in {"best_constant": best, **shown}.items()
            }
            constant = {"draft": best.policy.draft, "gamma": best.policy.gamma_max}
            relative = self.trial.worth[name] / best.worth[name]
            loads.append({"load": name, "best": constant, "relative": relative, **figures})
        return {
            **about_bench(bench),
            "objective": objective.kind,
            "policy": policy.spelled_out(),
            "policy_id": policy.id,
            "label": policy.label(),
            "study": self.study_id,
            "simulated": len(study.trials),
            "search_requests": len(bench.parts.search),
            "contexts": self.contexts,
            "no_speculation_from": study.no_speculation_from,
            "steps_beyond_the_recorded_batches": {k: v for k, v in study.extrapolated.items() if v},
            "drafts_not_served": list(bench.unserved),
            "loads": loads,
        }


def about_bench(bench: EngineBench) -> dict[str, Any]:
    return {
        "recording": bench.info.id,
        "engine": bench.engine.name,
        "kind": "simulated",
        "max_num_seqs": bench.rules.max_num_seqs,
        "costs": dict(bench.costs.check),
    }


def search_load(
    store: TraceStore, bench: EngineBench, *, seed: int = 0, progress: Progress = silent
) -> LoadSearch:
    """Searches draft tokens by batch size, and stores the study. Raises PolicyError where no step
    that drafts was recorded."""
    study = LoadStudy(bench, seed=seed, progress=progress)
    trial = study.run()
    ranked = sorted(study.trials.values(), key=lambda one: -one.value)
    document = {
        "recording": bench.info.id,
        "engine": bench.engine.name,
        "load": list(bench.loads),
        "objective": bench.objective.kind,
        "requests": list(bench.parts.search),
        "trials": len(ranked),
        "proposed": trial.policy.label(),
    }
    study_id = store.put_study(
        bench.info.pair_id,
        sampler="TPE",
        seed=seed,
        document=document,
        trials=[one.to_json() for one in ranked],
        recording_id=bench.info.id,
    )
    return LoadSearch(bench, study, trial, study_id)


def roles_of(search: LoadSearch, incumbent: Policy) -> dict[str, Policy]:
    """Who is executed, by role: what the search proposes, the best constant of each load, a server
    without a draft, one that has the draft loaded and drafts 0 tokens, and what is in force. On a
    server that runs these two are one."""
    best = [search.study.best_constant(name).policy for name in search.bench.loads]
    proposals = [search.trial.policy, *best]
    idle = search.study.idle(search.trial.policy.draft)
    if search.bench.loaded is not None:
        proposals = [policy if policy.speculates else AUTOREGRESSIVE for policy in proposals]
        idle = None
    policies = {policy.id: policy for policy in proposals}
    roles = {f"finalist {n}": policy for n, policy in enumerate(policies.values(), 1)}
    roles |= {"draft loaded, 0 tokens": idle.policy} if idle else {}
    return {"incumbent": incumbent, "autoregressive": AUTOREGRESSIVE, **roles}


def prove_load(
    store: TraceStore,
    search: LoadSearch,
    place: Place,
    options: ProveOptions,
    *,
    progress: Progress = silent,
) -> tuple[Tuned, dict[str, Any]]:
    """Executes what a search proposes beside the best constants, no speculation and what is in
    force, within about the budget, and publishes what is confirmed to be better than that on texts
    that neither search nor race has used. Also returns the figures by load of each candidate.

    Raises TraceError where there are too few texts, PairError or EngineError where the engine
    cannot start, EngineError where it fails."""
    bench, info = search.bench, search.bench.info
    categories = [text.category for text in bench.trace.trajectories]
    of = bench.trace.conversations
    check_sample_size(categories, publish=options.publish, parts=bench.parts, of=of)
    workload = checked(bench.recorded)
    for line in workload.lines():
        options.tell(line)
    otherwise = "what the server drafts is the incumbent"
    if place.serves is None:
        otherwise = "no speculation is the incumbent"
    incumbent, unusable = in_force(place.over, bench.check, otherwise)
    if place.serves is not None and (place.over is None or unusable):
        incumbent = place.serves
    raced = run_race(bench, roles_of(search, incumbent), incumbent, options, progress=progress)
    confirmed, texts = confirm_winner(bench, raced, options, progress=progress)
    earlier = 0
    if confirmed is not None:
        held = [bench.ordinals[text] for text in bench.parts.confirm]
        earlier = count_confirmation(store, info.id, held)
    figures = by_load(bench, raced)
    tuned = conclude(
        store,
        info.pair_id,
        raced,
        confirmed,
        place,
        options,
        sampling=tuned_for(info.sampling, bench.trace.trajectories[0].verifier),
        unusable=unusable,
        evidence={"loads": figures},
        recording=info.id,
        study=search.study_id,
        texts=texts,
        search_requests=len(bench.parts.search),
        trials=len(search.study.trials),
        earlier_confirmations=earlier,
        workload=workload,
    )
    _store_runs(store, bench, raced, place, tuned)
    return tuned, {"executed": figures}


def by_load(bench: EngineBench, raced: Raced) -> list[dict[str, Any]]:
    """Of each candidate what was predicted and measured of each load in the race."""
    rows = []
    for candidate in {c.policy.id: c for c in raced.candidates}.values():
        executed, predicted = candidate.executed, candidate.predicted
        assert isinstance(executed, LoadOutcome)
        predictions = predicted.loads(bench.objective) if isinstance(predicted, LoadOutcome) else {}
        loads = [
            {"load": name, "predicted": predictions.get(name), "measured": measured}
            for name, measured in executed.loads(bench.objective).items()
        ]
        policy = candidate.policy
        rows.append({"policy_id": policy.id, "label": policy.label(), "loads": loads})
    return rows


def _store_runs(
    store: TraceStore, bench: EngineBench, raced: Raced, place: Place, tuned: Tuned
) -> None:
    """Stores each candidate's runs, and what the page of the study draws."""
    info, text = bench.info, bench.trace.trajectories[0]
    dtype, load = str(info.options.get("dtype", "")), ", ".join(bench.loads)
    for candidate in {c.policy.id: c for c in raced.candidates}.values():
        policy = candidate.policy
        store.put_policy(policy.id, policy.spelled_out(), policy.label())
        store.put_run(
            info.pair_id,
            policy.id,
            candidate.executed,
            device=place.device,
            dtype=dtype,
            purpose=f"tune {tuned.study} under {load}",
        )
    about = {
        "pair": f"{store.get_pair(info.pair_id).name} ({info.pair_id})",
        "device": place.device,
        "dtype": dtype,
        "engine": f"{bench.engine.title} {info.options.get('engine_version', '')}".strip(),
        "load": load,
        "objective": bench.objective.kind,
        "deployment": place.deployment,
        "sampling": sampling_in_words(text.sampling),
    }
    put_evidence(store, info.pair_id, tuned, {"rounds": []}, about)


def latest_traffic(store: TraceStore, engine: str, pair_id: str | None = None) -> Recording:
    """The latest recording of what an engine served. Raises TraceError where it has none."""
    traffic = (i for i in store.list_recordings(pair_id) if i.source != DESIGNED)
    latest = next((i for i in traffic if i.engine == engine and i.n_requests), None)
    if latest is None:
        raise TraceError(
            f"--engine {engine}: nothing that it served was recorded yet; docs/engines.md says how"
        )
    return latest


def place_of(store: TraceStore, info: Recording, deployment: str) -> Place:
    """Where a policy for the engine of a recording is put in force: on the device that was
    recorded, else on this machine's."""
    device = info.device_name or ("cuda" if sees_cuda() else "cpu")
    over = store.active_publication(info.pair_id, device, deployment)
    return Place(device, deployment, over, engine=info.engine)


def with_servers(search: LoadSearch, spec: PairSpec, threads: int | None) -> LoadSearch:
    """A search whose bench starts servers of a pair."""
    name = search.bench.engine.name

    def started(server: Wanted) -> Running:
        return start(name, spec, replace(server, threads=threads))

    return replace(search, bench=replace(search.bench, start=started))
