"""Enumeration and TPE against TPE alone, on recordings of the demo pair; the best of each search is
judged by replay on requests that neither has seen.

python bench/search_experiment.py FOLDER [--only today|new]
"""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from lab import (
    CATEGORIES,
    GREEDY,
    SAMPLED,
    Document,
    Lab,
    _cover,
    demo,
    environment,
    keep,
    measured,
    parser_of,
    recorded,
    requests,
    say,
    stored,
)

from spectune.optimizer import joint, search
from spectune.optimizer.artifacts import fitted
from spectune.optimizer.execute import DecodeOptions
from spectune.optimizer.fit.tuning import fit_trees
from spectune.optimizer.parts import split
from spectune.optimizer.simulate.replay import run_replay
from spectune.optimizer.simulate.replay_trace import ReplayTrace
from spectune.optimizer.simulate.trace import open_trace
from spectune.optimizer.space import Space, TreeLimit
from spectune.runtime.policies.artifacts import Artifacts
from spectune.traces.schema import Sampling
from spectune.traces.tables import LatencyProfile

DRAFTS = {"all": ("head", "medium", "ngram", "small"), "head": ("head",), "medium": ("medium",)}
TRIALS, SEEDS = 400, (0, 1, 2)
Case = tuple[float, str, str, int]
"""Temperature, workload, drafts, seed."""


class Setting:
    """A recording of 90 requests of 48 tokens, its fits and its costs; made unless the folder has
    them."""

    def __init__(self, folder: Path, sampling: Sampling) -> None:
        pair, store = demo(), stored(folder / f"exp-{sampling.temperature:g}.db")
        file, costs = folder / f"exp-{sampling.temperature:g}.pickle", folder / "profile.pickle"
        if not file.exists():
            workload, options = requests(90), DecodeOptions(sampling, 48)
            name = recorded(store, pair, workload, options, list(pair.draft_names), 16, 8, 8)
            if not costs.exists():
                costs.write_bytes(pickle.dumps(measured(store, pair, name)))
            trees, profile = (
                fit_trees(store, name, list(pair.models)),
                pickle.loads(costs.read_bytes()),
            )
            _cover(Lab("demo", pair, store, name, options, workload, trees, {}, profile))
            limits = {draft: dict(vars(limit)) for draft, limit in trees.items()}
            file.write_bytes(pickle.dumps({"recording": name, "trees": limits}))
        made = pickle.loads(file.read_bytes())
        self.trace: ReplayTrace = open_trace(
            store, made["recording"], drafts=set(DRAFTS["all"])
        ).trace
        self.profile: LatencyProfile = pickle.loads(costs.read_bytes())
        self.find: Artifacts = fitted(store, pair.id)
        self.trees: dict[str, Document] = made["trees"]

    def of(self, workload: str) -> tuple[ReplayTrace, ReplayTrace]:
        """The requests to search on, and those that judge."""
        texts = self.trace.trajectories
        own = [i for i, text in enumerate(texts) if text.category == workload]
        parts = split([workload] * len(own))
        seen, unseen = ([own[i] for i in part] for part in (parts.search, parts.confirm))
        return self.trace.select(seen), self.trace.select(unseen)

    def today(self, seen: ReplayTrace, drafts: Sequence[str]) -> Iterator[search.Study]:
        trees = {d: search.TreeLimit(**t) for d, t in self.trees.items() if d in drafts}
        how: Document = {"trees": trees, "artifacts": self.find}
        known = search.search(seen, self.profile, drafts, trials=0, **how)
        for seed in SEEDS:
            yield search.search(
                seen, self.profile, drafts, trials=TRIALS, seed=seed, known=known, **how
            )

    def new(self, seen: ReplayTrace, drafts: Sequence[str]) -> Iterator[search.Study]:
        names = TreeLimit.__dataclass_fields__
        trees = {
            draft: TreeLimit(**{k: v for k, v in limit.items() if k in names})
            for draft, limit in self.trees.items()
            if draft in drafts
        }
        for seed in SEEDS:
            yield joint.search(
                seen,
                self.profile,
                Space(tuple(drafts), 16, trees),
                trials=TRIALS,
                seed=seed,
                artifacts=self.find,
            )


def rows_of(setting: Setting, temperature: float, which: str) -> Iterator[Document]:
    """What a search chooses in each case, its speed on what it saw and on what it did not."""
    for workload in CATEGORIES:
        seen, unseen = setting.of(workload)
        for name, drafts in DRAFTS.items():
            began = time.perf_counter()
            for seed, study in zip(SEEDS, getattr(setting, which)(seen, drafts), strict=True):
                seconds, began = time.perf_counter() - began, time.perf_counter()
                best = study.best()
                how: Document = {"artifacts": setting.find, "approximate": True}
                judged = run_replay(unseen, best.policy, setting.profile, **how).total
                row = {"temperature": temperature, "workload": workload, "drafts": name}
                row |= {"seed": seed, "seen": best.value, "unseen": judged.tokens_per_s}
                row |= {"policies": len(study.trials), "seconds": seconds}
                say(f"{which} {row} {best.policy.label()}")
                yield {**row, "policy": best.policy.label()}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=("today", "new"))
    options = parser.parse_args()
    settings = {s.temperature: Setting(options.folder, s) for s in (GREEDY, SAMPLED)}
    for which in ("today", "new"):
        if options.only in (None, which):
            rows = [row for t, setting in settings.items() for row in rows_of(setting, t, which)]
            (options.folder / f"{which}.json").write_text(json.dumps(rows, indent=1))
    found = {w: json.loads((options.folder / f"{w}.json").read_text()) for w in ("today", "new")}
    keep("search", {"trials": TRIALS, **found, "environment": environment()})


if __name__ == "__main__":
    main()
