"""An engine under a load as what is tuned: search in simulation; race and confirmation are executed
on servers that are started for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Self

from spectune.engines.engine import Running, Wanted
from spectune.engines.start import start
from spectune.optimizer.deployment import Place
from spectune.optimizer.tuning.bench import Proposals, RecordedTexts, Tunable
from spectune.optimizer.tuning.engine_bench import EngineBench
from spectune.optimizer.tuning.load_search import TRIALS, LoadTrial, TokenStudy
from spectune.optimizer.tuning.pipeline import Raced
from spectune.optimizer.tuning.under_load import LoadOutcome, UnderLoad
from spectune.runtime.hardware import sees_cuda
from spectune.runtime.pair import PairSpec
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy
from spectune.runtime.progress import Progress, silent
from spectune.traces.store import TraceStore
from spectune.traces.tables import Recording


@dataclass(frozen=True)
class LoadBench(EngineBench, Tunable):
    """An engine's recording as what is tuned. :attr:`search` is made once, when it is first asked
    for."""

    store: TraceStore = field(kw_only=True)
    seed: int = 0
    trials: int = TRIALS
    progress: Progress = silent

    @classmethod
    def of(cls, bench: EngineBench, store: TraceStore, **about: Any) -> Self:
        """A bench, with its store, and further fields."""
        fields_of = {one.name: getattr(bench, one.name) for one in fields(bench)}
        return cls(**{**fields_of, "store": store, **about})

    @cached_property
    def texts(self) -> RecordedTexts:
        conversations = self.trace.conversations
        return RecordedTexts(self.info, self.recorded, self.ordinals, conversations, self.parts)

    @cached_property
    def search(self) -> LoadSearch:
        """Draft tokens by batch size, searched and stored. Raises PolicyError where no step that
        drafts was recorded."""
        with self.timed("search"):
            study = TokenStudy(self, self.trials, self.seed, self.progress)
            trial = study.run()
        ranked = sorted(study.trials.values(), key=lambda one: -one.value)
        document = {
            "recording": self.info.id,
            "engine": self.engine.name,
            "load": list(self.loads),
            "objective": self.objective.kind,
            "requests": list(self.parts.search),
            "trials": len(ranked),
            "proposed": trial.policy.label(),
        }
        name = self.store.put_study(
            self.info.pair_id,
            sampler="TPE",
            seed=self.seed,
            document=document,
            trials=[one.to_json() for one in ranked],
            recording_id=self.info.id,
        )
        return LoadSearch(self, study, trial, name)

    def propose(self, incumbent: Policy) -> Proposals:
        return self.search.proposals

    def beside(self, raced: Raced, budget_s: float, progress: Progress) -> Mapping[str, Any]:
        """What was predicted and measured by load."""
        return {"executed": by_load(self, raced)}

    def head(self) -> dict[str, Any]:
        info = self.info
        return {
            "pair": f"{self.store.get_pair(info.pair_id).name} ({info.pair_id})",
            "dtype": str(info.options.get("dtype", "")),
            "engine": f"{self.engine.title} {info.options.get('engine_version', '')}".strip(),
            "load": ", ".join(self.loads),
            "objective": self.objective.kind,
        }


@dataclass(frozen=True)
class LoadSearch:
    """What a search under load proposes (``trial``), its ``study`` and the id that it is stored
    under."""

    bench: LoadBench
    study: TokenStudy
    trial: LoadTrial
    study_id: str

    @property
    def proposals(self) -> Proposals:
        """What is proposed and the best constant of each load, beside a server without a draft and
        one that has the draft loaded and drafts 0 tokens. On a server that runs these two are
        one."""
        best = [self.study.best_constant(name).policy for name in self.bench.loads]
        proposed = [self.trial.policy, *best]
        idle = self.study.idle(self.trial.policy.draft)
        if self.bench.loaded is not None:
            proposed = [policy if policy.speculates else AUTOREGRESSIVE for policy in proposed]
            idle = None
        baselines = {"autoregressive": AUTOREGRESSIVE}
        baselines |= {"draft loaded, 0 tokens": idle.policy} if idle else {}
        policies = {policy.id: policy for policy in proposed}
        return Proposals([*policies.values()], baselines, self.study_id, len(self.study.trials))

    @property
    def contexts(self) -> dict[str, Any] | None:
        """The contexts of steps (percentiles 10, 50 and 90 of their requests' mean), from which
        length on other tables were tried (None: none were, as contexts vary little), and what the
        best of these is worth, as a part of the best by batch size alone. None where the engine has
        no tables."""
        study = self.study
        if study.contexts is None:
            return None
        about = {"tokens": study.contexts, "tried_from": study.context or None}
        return {**about, "relative": study.gain_by_context}

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


def by_load(bench: UnderLoad, raced: Raced) -> list[dict[str, Any]]:
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


def device_of(info: Recording) -> str:
    """The device that was recorded, else this machine's."""
    return info.device_name or ("cuda" if sees_cuda() else "cpu")


def place_of(
    store: TraceStore, info: Recording, deployment: str, serves: Policy | None = None
) -> Place:
    """Where a policy for the engine of a recording is put in force. ``serves``: what a server that
    runs drafts now; None: not known."""
    device = device_of(info)
    over = store.active_publication(info.pair_id, device, deployment)
    return Place(device, deployment, over, serves, info.engine)


def starting(engine: str, spec: PairSpec, threads: int | None) -> Callable[[Wanted], Running]:
    """A function that starts servers of a pair."""

    def started(server: Wanted) -> Running:
        return start(engine, spec, replace(server, threads=threads))

    return started
