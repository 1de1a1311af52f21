"""The native decoder under a load as what is tuned: policies are searched for one request at a
time, tables of them by the number of running requests for the loads, in replay; race and
confirmation serve the loads in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from spectune.engines.engine import Load, Running
from spectune.optimizer.decoder_engine import DecoderEngine
from spectune.optimizer.replay.batches import Seating, serve_decoder
from spectune.optimizer.replay.loads import Objective
from spectune.optimizer.replay.replay_trace import ReplayTrace
from spectune.optimizer.replay.serving import Simulated
from spectune.optimizer.search import SearchStudy
from spectune.optimizer.tuning.bench import Proposals
from spectune.optimizer.tuning.load_bench import by_load as executed_by_load
from spectune.optimizer.tuning.load_search import LoadTrial, PolicyStudy
from spectune.optimizer.tuning.native import PairBench
from spectune.optimizer.tuning.pair_search import PairSearch
from spectune.optimizer.tuning.pipeline import Raced
from spectune.optimizer.tuning.tuned import Candidate, RoundsOfOne
from spectune.optimizer.tuning.under_load import LoadRun, UnderLoad, run_of
from spectune.runtime.decoder import check_together
from spectune.runtime.policies.document import AUTOREGRESSIVE, FixedWindow, Policy
from spectune.runtime.policies.plan import Plan, prepare
from spectune.runtime.progress import Progress
from spectune.traces.errors import PolicyError
from spectune.traces.schema import Sampling
from spectune.traces.tables import Trajectory

SMALL_TREES: Final = (4, 8, 16, 32)
"""Nodes to which trees that are best for one request are also cut: each further request costs rows
of the same pass."""
OF_EACH: Final = 2
"""Policies of each draft and growth that are tried under a load, the best for one request."""
LEAST_SPREAD: Final = 0.03
"""A predicted ratio of two policies under a load is taken to be no surer than this."""


class PairLoadBench(UnderLoad, PairBench):
    """The native decoder with ``seats`` as what is tuned for ``loads``, each of ``count`` requests,
    or as many as arrive."""

    def __init__(
        self,
        *bench: Any,
        loads: Mapping[str, Load],
        objective: Objective,
        count: int,
        seats: int,
        **how: Any,
    ) -> None:
        self.loads, self.objective, self.count = loads, objective, count
        self.seats = seats
        self.study: PolicyStudy | None = None
        self.proposed: LoadTrial | None = None
        super().__init__(*bench, **how)

    @property
    def max_num_seqs(self) -> int:
        return self.seats

    @property
    def sampling(self) -> Sampling:
        return self.options.options.sampling

    @property
    def recorded(self) -> Sequence[Trajectory]:
        return self.trace.trajectories

    @property
    def typical(self) -> Policy:
        return AUTOREGRESSIVE

    @property
    def spread(self) -> float:
        return max(LEAST_SPREAD, super().spread)

    def group(self, policy: Policy) -> str:
        """One decoder executes all."""
        return ""

    def start_for(self, policies: Sequence[Policy], longest: int) -> Running:
        verifier = self.options.options.verifier
        how: dict[str, Any] = {"profile": self.profile, "artifacts": self.artifacts}
        return DecoderEngine(self.pair, self.seats, verifier=verifier, clock=self.clock, **how)

    def check(self, policy: Policy) -> None:
        super().check(policy)
        check_together(self._plan(policy))

    def _plan(self, policy: Policy) -> Plan:
        how: dict[str, Any] = {"profile": self.profile, "artifacts": self.artifacts}
        return prepare(policy, self.pair.draft_names, **how)

    def simulate(
        self,
        policy: Policy,
        load: Load,
        trace: ReplayTrace | None = None,
        count: int | None = None,
    ) -> Simulated:
        return serve_decoder(
            self.trace if trace is None else trace,
            self._plan(policy),
            load,
            Seating(self.seats),
            self.profile,
            count=self.count if count is None else count,
        )

    def run_of(self, load: str, simulated: Simulated) -> LoadRun:
        return run_of(load, simulated, reads_prompts=False)

    def propose(self, incumbent: Policy) -> Proposals:
        """The best table or policy for all loads, and the best constant policy of each load."""
        search = PairSearch(self, incumbent)
        alone = search.searched()
        pool = [*self._pool(alone), *incumbent.candidates]
        usable = list({policy.id: policy for policy in pool if self._usable(policy)}.values())
        with self.timed("search"):
            self.study = PolicyStudy(
                self, self.options.trials, self.options.seed, self.recording.progress, pool=usable
            )
            self.proposed = self.study.run()
        best = [self.study.best_constant(name).policy for name in self.loads]
        finalists = list({p.id: p for p in (self.proposed.policy, *best)}.values())
        name = self._put(self.study)
        baselines = {"autoregressive": AUTOREGRESSIVE}
        return Proposals(finalists, baselines, name, len(self.study.trials))

    def _pool(self, alone: SearchStudy) -> Iterator[Policy]:
        """Chains of every length; of each draft and growth the best policies for one request, and
        its trees cut to fewer nodes."""
        for draft in self.pair.chain_drafts:
            for gamma in range(1, self.options.gamma_max + 1):
                yield Policy(draft=draft, window=FixedWindow(gamma=gamma))
        kinds: dict[tuple[str, str], int] = {}
        for trial in sorted(alone.trials, key=lambda trial: -trial.value):
            policy = trial.policy
            kind = policy.draft, policy.growth.kind
            if not policy.speculates or kinds.get(kind, 0) == OF_EACH or not self._usable(policy):
                continue
            kinds[kind] = kinds.get(kind, 0) + 1
            yield policy
            most = policy.select.top_n
            for nodes in SMALL_TREES:
                if most is not None and nodes < most and policy.stratify is None:
                    select = policy.select.model_copy(update={"top_n": nodes})
                    yield policy.model_copy(update={"select": select})

    def _usable(self, policy: Policy) -> bool:
        """Whether several requests can be decoded by it, and it can be replayed."""
        if self.trace.lacks_shortlist(policy):
            return False
        try:
            check_together(self._plan(policy))
        except PolicyError:
            return False
        return True

    def _put(self, study: PolicyStudy) -> str:
        ranked = sorted(study.trials.values(), key=lambda one: -one.value)
        document = {
            "recording": self.recording.id,
            "profile": self.profile_id,
            "load": list(self.loads),
            "objective": self.objective.kind,
            "seats": self.seats,
            "requests": list(self.parts.search),
            "trials": len(ranked),
        }
        return self.recording.store.put_study(
            self.pair.id,
            sampler="TPE",
            seed=self.options.seed,
            document=document,
            trials=[one.to_json() for one in ranked],
            recording_id=self.recording.id,
        )

    def beside(self, raced: Raced, budget_s: float, progress: Progress) -> Mapping[str, Any]:
        """What was predicted and measured by load."""
        return {"executed": executed_by_load(self, raced)}

    def rounds(self, winner: Candidate) -> RoundsOfOne:
        """None: a request's rounds depend on what runs beside it."""
        return RoundsOfOne()

    def head(self) -> dict[str, Any]:
        about = {"load": ", ".join(self.loads), "objective": self.objective.kind}
        return {**super().head(), **about}

    @property
    def by_load(self) -> list[dict[str, Any]]:
        """By load what is proposed, the best constant policy and none, as simulated."""
        study, proposed, rows = self.study, self.proposed, []
        assert study is not None
        assert proposed is not None
        assert study.off is not None
        for name in self.loads:
            best = study.best_constant(name)
            shown = {"table": proposed, "best_constant": best, "off": study.off}
            figures = {key: one.served[name].to_json(self.objective) for key, one in shown.items()}
            relative = proposed.worth[name] / best.worth[name]
            constant = {"policy_id": best.policy.id, "label": best.policy.label()}
            rows.append({"load": name, "best": constant, "relative": relative, **figures})
        return rows
