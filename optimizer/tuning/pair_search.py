"""The search of a pair: what is replayed first, which trees are worth recording, what is fitted,
and who is executed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from spectune.optimizer.fit.by_prompt import MOST, fit_chooser
from spectune.optimizer.fit.for_tuning import fit_drafts
from spectune.optimizer.in_force import earlier_winners
from spectune.optimizer.recording.record import PanoramaSpec
from spectune.optimizer.replay.fast_replay import could_reach, run_replay
from spectune.optimizer.search import SearchStudy, finalists, is_fixed, rivals, search
from spectune.optimizer.spaces import (
    DraftLimits,
    Space,
    plain_trees,
    transformers_heuristic,
)
from spectune.optimizer.tuning.bench import Proposals
from spectune.optimizer.tuning.parts import mixed
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy, parse_policy
from spectune.traces.errors import PolicyError, TraceError
from spectune.traces.tables import LatencyProfile

if TYPE_CHECKING:
    from spectune.optimizer.tuning.native import PairBench

FEW_REQUESTS = 6
"""Requests of the search part on which every draft's trees are recorded."""
TREES_COULD_GAIN = 0.1
"""How far, relative to the fastest policy, the best plain tree of a draft may lie behind on those
and its trees be recorded on all requests: bins, classifiers and a finer search may gain as much."""


@dataclass
class PairSearch:
    """The search of a pair, beside the ``incumbent``. Trees are recorded only where they could win,
    and of ``grown`` drafts replayed; ``limits`` by draft: what was fitted to it."""

    bench: PairBench
    incumbent: Policy
    grown: tuple[str, ...] = ()
    limits: dict[str, DraftLimits] = field(default_factory=dict)
    study: SearchStudy | None = None

    def __post_init__(self) -> None:
        bench = self.bench
        self.recording, self.options = bench.recording, bench.options
        self.store, self.pair = bench.recording.store, bench.pair
        self.drafts = self.options.drafts_of(self.pair)
        self.chains = self.pair.chain_drafts
        # Their chains are recorded as trees of width 1.
        self.heads = tuple(d for d in self.drafts if d not in self.chains)

    def searched(self) -> SearchStudy:
        """Replays chains; records trees where they could win; fits what policies need; searches the
        joint space."""
        timed = self.bench.timed
        with timed("search"):
            self.search(0)
        with timed("record"):
            self.record_trees()
        with timed("fit"):
            self.fit()
        with timed("search"):
            return self.search(self.options.trials)

    def run(self) -> Proposals:
        """The best of the joint space, and a choice by prompt where that is asked for."""
        timed, study = self.bench.timed, self.searched()
        choice, why = None, ""
        if self.options.by_prompt:
            with timed("chooser"):
                choice, why = self.choose(study)
        name = self.put(study, why)
        return Proposals(*self.roles(study, choice), name, len(study.trials))

    def search(self, trials: int) -> SearchStudy:
        """Replays policies on the search part; those of an earlier search are not replayed
        again."""
        bench, options = self.bench, self.options
        first = bench.trace.trajectories[0]
        earlier = earlier_winners(self.store, self.pair, first.verifier, first.sampling)
        self.study = search(
            bench.trace.select(bench.parts.search),
            bench.profile,
            Space(
                tuple(d for d in self.drafts if d in self.chains or d in self.grown),
                options.gamma_max,
                self.limits,
            ),
            trials=trials,
            seed=options.seed,
            incumbents=[
                *self.incumbent.candidates,
                *(p for p in earlier if p.draft in (*self.drafts, "none")),
            ],
            artifacts=bench.artifacts,
            earlier=self.study,
            progress=lambda done, total, best: self.recording.progress(
                f"search, best {best:.0f} tokens/s", done, total
            ),
        )
        return self.study

    def record_trees(self) -> None:
        """Chains of heads; and trees, on a few requests, then on all of them where they could win
        or are in force."""
        options, recording, heads = self.options, self.recording, self.heads
        gamma_max, size = options.gamma_max, options.tree_size
        if heads:
            recording.add(PanoramaSpec(heads, gamma_max))
        trees = [d for d in self.drafts if d != "ngram" and size[0]]
        bench = self.bench
        categories = [t.category for t in bench.trace.trajectories]
        few = [bench.ordinals[i] for i in mixed(bench.parts.search, categories)[:FEW_REQUESTS]]
        could_win = {p.draft for p in self.incumbent.candidates if p.is_tree} & set(trees)
        for draft in (d for d in trees if d not in could_win):
            recording.add(PanoramaSpec([draft], gamma_max, *size), few)
            share = self.best_tree(draft, few)
            if share > 1 - TREES_COULD_GAIN:
                could_win.add(draft)
            else:
                options.tell(
                    f"Trees of {draft} are left out: on {len(few)} requests their best is "
                    f"{100 * (1 - share):.0f}% slower than the fastest policy."
                )
        grown = [d for d in trees if d in could_win]
        if grown:
            recording.add(PanoramaSpec(grown, gamma_max, *size))
        self.grown = tuple(d for d in self.drafts if d in {*heads, *grown})
        if self.grown:
            bench.take(recording.open({*self.chains, *self.grown}))
            recording.tell_hardly_accepted(d for d in self.grown if d not in self.chains)

    def best_tree(self, draft: str, ordinals: Sequence[int]) -> float:
        """The speed of a draft's best plain tree on a few requests, as a share of the best policy
        so far (of a tree's own chain, where nothing else was tried)."""
        bench = self.bench
        trace = self.recording.open({*self.chains, draft}, ordinals).trace
        best = self.study and self.study.best()

        def speed(policy: Policy) -> float:
            how: Any = {"artifacts": bench.artifacts, "approximate": True}
            return could_reach(run_replay(trace, policy, bench.profile, **how))

        trees = max(map(speed, plain_trees(draft, *self.options.tree_size)))
        return trees / (speed(best.policy) if best else trees)

    def fit(self) -> None:
        """Bins, classifiers and static trees; frequencies and routers of the drafts whose passes
        are faster over fewer tokens."""
        profile = self.bench.profile
        faster = {d: _faster_passes(profile, d) for d in self.drafts if d in self.pair.models}
        self.limits = fit_drafts(
            self.store,
            self.pair,
            self.recording.id,
            self.drafts,
            fixed=[draft for draft, passes in faster.items() if passes],
            routed=[draft for draft, passes in faster.items() if "routed" in passes],
            seed=self.options.seed,
            progress=self.recording.progress,
        )
        slow = [draft for draft, passes in faster.items() if not passes]
        if slow:
            self.options.tell(
                f"Shortlists of {', '.join(slow)}: not tried; passes over fewer tokens are not "
                "faster."
            )

    def choose(self, study: SearchStudy) -> tuple[Policy | None, str]:
        """A choice by prompt between the best policies of the drafts, where it is predicted to gain
        beyond noise; and what it is predicted to gain, or why nothing can be told."""
        bench = self.bench
        try:
            made = fit_chooser(
                self.store,
                self.pair,
                bench.trace,
                bench.parts,
                study.best_of_drafts()[:MOST],
                bench.profile,
                {"recording": self.recording.id, "profile": bench.profile_id},
                artifacts=bench.artifacts,
                approximate=True,
                progress=self.recording.progress,
            )
        except (PolicyError, TraceError) as error:
            return None, str(error)
        policy = parse_policy(made.policy) if made.document["chooses"] else None
        return policy, str(made.document["reason"])

    def put(self, study: SearchStudy, by_prompt: str) -> str:
        """Stores the study; its id. ``by_prompt``: what :meth:`choose` said."""
        document = {
            "recording": self.recording.id,
            "profile": self.bench.profile_id,
            "requests": list(study.requests),
            "trials": len(study.trials),
        }
        return self.store.put_study(
            self.pair.id,
            sampler=study.sampler,
            seed=study.seed,
            document=document | ({"by_prompt": by_prompt} if by_prompt else {}),
            trials=[t.to_json() for t in study.trials],
            recording_id=self.recording.id,
        )

    def roles(
        self, study: SearchStudy, choice: Policy | None
    ) -> tuple[Sequence[Policy], Mapping[str, Policy]]:
        """The finalists, and the baselines by role."""
        best = finalists(study, self.options.finalists)
        best += rivals(study, [trial.policy for trial in best])
        incumbent = self.incumbent
        chosen = [incumbent if study.same(t.policy, incumbent) else t.policy for t in best]
        baselines = {"autoregressive": AUTOREGRESSIVE}
        fixed = study.best(lambda policy: is_fixed(policy) and not policy.is_tree)
        if fixed is not None:
            plain = transformers_heuristic(fixed.policy.draft, self.options.gamma_max)
            baselines |= {"best fixed gamma": fixed.policy, "transformers heuristic": plain}
        return chosen + ([choice] if choice is not None else []), baselines


def _faster_passes(profile: LatencyProfile, draft: str) -> list[str]:
    """Which passes of a draft, ``fixed`` over a shortlist or ``routed``, are faster than over its
    whole output head, at the smallest size that was measured."""
    faster = []
    for kind in ("fixed", "routed"):
        routed = kind == "routed"
        for size in profile.shortlist_sizes(draft, routed=routed)[:1]:
            if float(profile.shortlist_seconds(draft, size, routed=routed)) < 0:
                faster.append(kind)
    return faster
