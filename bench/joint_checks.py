"""The check of the joint space behind ``bench/acceptance.py``: what each paper adds, alone, with another, and with all."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from interleaved import compare
from numpy.typing import NDArray
from spectune.demo.prompts import demo_workload
from spectune.optimizer.artifacts import fitted
from spectune.optimizer.execute import DROP_LEVEL, Comparison, DecodeOptions, Encoded, Timings, encode
from spectune.optimizer.fit.chooser_fits import ChooserSource, fit_source, keep_chooser
from spectune.optimizer.fit.on_the_fly import read_prompts
from spectune.optimizer.fit.tuning import fit_shortlists, fit_trees, ranks_for
from spectune.optimizer.profiles import profile_for
from spectune.optimizer.record import RecordRequest, record, split
from spectune.optimizer.search import TIE, Study, Trial, finalists, search
from spectune.optimizer.simulate.replay import ReplayTrace, run_replay
from spectune.optimizer.spaces import Kinds
from spectune.optimizer.verdict import finite, weighed
from spectune.runtime.loading import LoadedPair, load_pair
from spectune.runtime.loop import StaticSource
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy, parse_policy
from spectune.runtime.policies.plan import prepare
from spectune.traces.errors import TraceError
from spectune.traces.schema import LatencyProfile, Sampling, Workload
from spectune.traces.store import TraceStore
from spectune.traces.workloads import make_workload
from tree_checks import CATEGORIES, stored

ADAPTIVE = ("fsm", "cache_fsm", "analytic", "q_learning")
PAPERS = ("on-the-fly", "HeteroSpec", "C2T", "DynaSpec")
SUBSPACES = (*((p,) for p in PAPERS), *itertools.combinations(PAPERS, 2), PAPERS)
"""Each paper alone, each pair, all together."""
SPACES = frozenset(" + ".join(papers) for papers in SUBSPACES)
FloatArray = NDArray[np.float64]
BASELINES: dict[str, Callable[[Policy], bool]] = {
    "best fixed gamma": lambda p: not used(p) and p.growth.kind == "chain",
    "EAGLE-2": lambda p: not used(p) and p.growth.kind == "top_k",
}
DRAFTS = ("medium", "head")
REQUESTS, EXECUTED, CONTENDED, TOKENS = 40, 28, 52, 64
"""Requests recorded, of which three fifths are searched on; others on which all finalists are executed (the rest of the recording, then
more of them); still others on which contenders are."""
WIDTH, DEPTH, GAMMA = 8, 8, 12
TRIALS, TRIALS_EACH = 300, 60
FINALISTS = 3
CONTENDERS, FOLDS = 6, 8
"""How many finalists are executed on more requests at most; parts that the requests are cut into."""
CONFIRMED = 80
"""Requests on which winners are confirmed."""
KEPT = "ablation-winners.json"
SEARCHED_SPREAD = 0.04
"""Standard deviation of a predicted ratio of two policies' speeds on other requests, where both are the best of hundreds by prediction."""


def used(policy: Policy) -> frozenset[str]:
    """The papers whose mechanisms a policy uses: adaptive windows; entropy bins; a classifier's growth; a shortlist."""
    flags = (
        policy.window.kind in ADAPTIVE,
        policy.stratify is not None,
        policy.growth.kind == "classifier",
        policy.shortlisted,
    )
    return frozenset(paper for paper, there in zip(PAPERS, flags, strict=True) if there)


def kinds_of(papers: Sequence[str]) -> Kinds:
    """What policies of these papers may be made of, beside chains and EAGLE-2's trees of fixed windows."""
    return Kinds(
        windows=("fixed", *(ADAPTIVE if "on-the-fly" in papers else ())),
        stops=("none",),
        growths=("chain", "top_k", *(("classifier",) if "C2T" in papers else ())),
        bins="HeteroSpec" in papers,
        shortlists=("full", "frequency", "position_frequency", "clusters") if "DynaSpec" in papers else ("full",),
    )


JOINT = " + ".join(PAPERS)


@dataclass(frozen=True)
class Winner:
    """The best policy of a subspace: its predicted tokens/s, and the papers whose mechanisms it uses."""

    policy: Policy
    value: float
    uses: frozenset[str]

    @classmethod
    def of(cls, trial: Trial) -> Winner:
        return cls(trial.policy, trial.value, used(trial.policy))


def best_of(study: Study, papers: Sequence[str]) -> list[Winner]:
    """The fastest trials that use some of these papers and no other, of different families."""
    own = tuple(t for t in study.trials if used(t.policy) and used(t.policy) <= set(papers))
    return [Winner.of(t) for t in finalists(replace(study, trials=own), FINALISTS)]


def ablation(state: Path) -> dict[str, Any]:
    """Each paper alone, each pair and all together, every subspace searched by replay and decided by execution on other requests, as
    ``tune`` does.

    A subspace holds the policies that use one of its papers at least and no other, so a pair's winner may use one alone
    (``combines`` says whether it uses all). Every one may use any draft, chains and EAGLE-2's trees. On-the-fly adaptation is its windows
    and, where its fit predicts a gain beyond noise, its choice of a draft for each prompt. Finalists are the replay's three best of the
    subspace (of different families) and of those within it, for all papers together the plain baselines as well; the fastest when executed
    wins, as in ``tune`` by what was executed and what was predicted together. Those that are not behind beyond noise (:func:`_contenders`)
    are executed on more requests before that is decided: two policies differ by 12% from request to request, so that it is requests, not
    repetitions, that tell near ones apart. That flatters those that have more finalists, so there is a
    second figure, which can fail: each eighth of the requests is timed under the winner chosen on the other seven. :func:`joint` executes
    the winners on requests that none of this has seen.
    """
    return _ablation(state, CATEGORIES, REQUESTS, (EXECUTED, CONTENDED), TOKENS, TRIALS, TRIALS_EACH)


def _workload(category: str) -> Workload:
    """The demo's requests of a category, as many as all of this takes."""
    lines = ((f"demo:{i}", line) for i, line in enumerate(demo_workload(REQUESTS + EXECUTED + CONTENDED + CONFIRMED)))
    workload = make_workload("demo", lines)
    return replace(workload, requests=tuple(r for r in workload.requests if r.category == category))


def _ablation(
    state: Path, workloads: Sequence[str], requests: int, executed: tuple[int, int], tokens: int, trials: int, each: int
) -> dict[str, Any]:
    pair = load_pair(read_pair("demo"), device="cpu", drafts=DRAFTS)
    path = state / "ablation.db"
    path.unlink(missing_ok=True)
    store = stored(path)
    rows: list[dict[str, Any]] = []
    checked: dict[str, Any] = {}
    executions: dict[str, Any] = {}
    kept: dict[str, Any] = {}
    for category in workloads:
        workload = _workload(category)
        recorded = replace(workload, requests=workload.requests[:requests])
        chosen, part, profile = _searched(store, pair, recorded, tokens, trials, each)
        checked[category] = dict(profile.check)
        others = [r for r in workload.requests if r.id not in part]
        stages = [
            encode(pair, replace(workload, requests=tuple(taken)), DecodeOptions(Sampling(), tokens))
            for taken in (others[: executed[0]], others[executed[0] : sum(executed)])
        ]
        winners, found, executions[category] = _executed(store, pair, profile, category, chosen, stages)
        rows += found
        seen = sorted(part | {item.id for encoded in stages for item, _ in encoded.items})
        # Against all papers' winner: the most that any single paper's has of its speed.
        best = min((r for r in found if r["space"] in PAPERS), key=lambda r: r["joint_over_it"][0])["space"]
        kept[category] = {"seen": seen, "best": best, "winners": {name: w.policy.spelled_out() for name, w in winners.items()}}
    (state / KEPT).write_text(json.dumps(kept))
    joint = [r for r in rows if r["space"] == JOINT]
    behind = [r for r in rows if r["joint_ahead"] == "no"]
    compared = sum(r["space"] != j["space"] and r["workload"] == j["workload"] for r in rows for j in joint)
    speeds = ", ".join(f"{r['workload']} {r['speedup']:.2f}" for r in joint)
    least, apart = (min(r[name][0] for r in rows if r["space"] in PAPERS) for name in ("joint_over_it", "joint_over_it_apart"))
    return {
        # The joint's finalists hold everyone else's: on the requests they are chosen by it hardly loses. On the others it can.
        "holds": all(r["joint_over_it_apart"][2] >= 1.0 for r in rows if r["space"] in PAPERS) and not behind,
        "summary": f"all papers together over autoregression: {speeds}; {least:.3f} times the best single paper or more (timed on other "
        f"requests than chosen on: {apart:.3f}); {len(behind)} of {compared} subspaces and baselines are faster beyond "
        "noise",
        "least_over_single_paper": least,
        "least_over_single_paper_apart": apart,
        "profile_check": checked,
        "rows": rows,
        "executions": executions,
    }


def _searched(
    store: TraceStore,
    pair: LoadedPair,
    workload: Workload,
    tokens: int,
    trials: int,
    each: int,
) -> tuple[dict[str, list[Winner]], frozenset[str], LatencyProfile]:
    """The best policies of every subspace and baseline by replay of a workload's search part, best first, that part's requests, and the
    profile, measured on the recorded texts as ``tune`` does it."""
    plain = StaticSource(prepare(AUTOREGRESSIVE, pair.draft_names))
    wanted = RecordRequest(workload, DecodeOptions(Sampling(), tokens), DRAFTS, GAMMA, WIDTH, DEPTH)
    recording = record(store, pair, wanted, plain).id
    loaded = store.load(recording, DRAFTS, trees=True)
    texts = loaded.trajectories
    measured = profile_for(store, pair, DRAFTS, gamma_max=GAMMA, fresh=True, trajectories=texts)
    profile, stored_profile = measured.profile, measured.id
    limits = fit_trees(store, recording, DRAFTS, profile=stored_profile)
    shortlists = fit_shortlists(store, pair, recording, DRAFTS)
    trace = ReplayTrace(
        texts,
        {d: loaded.panoramas(d) for d in DRAFTS if d in pair.chain_drafts},
        trees={(d, "coupled"): loaded.trees(d) for d in DRAFTS},
        ranks=ranks_for(store, pair, recording, shortlists),
    )
    part, _ = split([t.request_id for t in texts], [t.category for t in texts])
    seen, find = trace.select(part), fitted(store)
    source = ChooserSource(trace, read_prompts(pair, texts), {"recording": recording, "profile": stored_profile})

    def within(papers: Sequence[str], trials: int, known: Sequence[Trial] = ()) -> Study:
        kinds = kinds_of(papers)
        return search(
            seen,
            profile,
            DRAFTS,
            gamma_max=GAMMA,
            trials=trials,
            trees=limits,
            shortlists=shortlists,
            artifacts=find,
            known=[t for t in known if kinds.hold(t.policy)],
            kinds=kinds,
            bounded=False,
        )

    shared = within(PAPERS, trials)
    # Who may use more has also seen what those who may use less have found.
    found: list[Trial] = list(shared.trials)
    chosen: dict[str, list[Winner]] = {}
    for papers in SUBSPACES:
        study = within(papers, each, found)
        found = list({t.policy.id: t for t in (*found, *study.trials)}.values())
        best = best_of(study, papers)
        if "on-the-fly" in papers:
            choosing = _choosing(store, pair, source, study, profile, part)
            best = sorted([*best, *([choosing] if choosing else [])], key=lambda w: -w.value)
        if best:
            chosen[" + ".join(papers)] = best
        print(f"  {' + '.join(papers)}: {best[0].policy.label() if best else 'nothing'}", flush=True)
    for name, match in BASELINES.items():
        fitting = [t for t in found if t.policy.speculates and match(t.policy)]
        chosen[name] = [Winner.of(max(fitting, key=lambda t: t.value))]
    chosen["autoregressive"] = [next(Winner.of(t) for t in found if not t.policy.speculates)]
    return chosen, frozenset(texts[i].request_id for i in part), profile


def _choosing(
    store: TraceStore, pair: LoadedPair, source: ChooserSource, study: Study, profile: LatencyProfile, part: Sequence[int]
) -> Winner | None:
    """A chooser over the best policy of each draft of a study; None where it is not predicted to gain beyond noise."""
    best: dict[str, Policy] = {}
    for trial in study.trials:
        best.setdefault(trial.policy.draft, trial.policy)
    try:
        chooser = fit_source(store, pair, source, best, profile)
    except TraceError:
        return None
    if not chooser.chooses:
        return None
    policy = parse_policy(keep_chooser(store, pair, source, chooser, profile).policy)
    seen, find = source.trace.select(part), fitted(store)
    chosen, *single = (
        run_replay(seen, p, profile, artifacts=find, approximate=True).total.tokens_per_s for p in (policy, *best.values())
    )
    # What the study says of its best, which was judged apart from its fits, times what choosing adds to that on the same texts.
    value = study.trials[0].value * chosen / max(single)
    return Winner(policy, value, frozenset({"on-the-fly"}).union(*(used(p) for p in best.values())))


def _executed(
    store: TraceStore,
    pair: LoadedPair,
    profile: LatencyProfile,
    category: str,
    chosen: Mapping[str, Sequence[Winner]],
    stages: Sequence[Encoded],
) -> tuple[dict[str, Winner], list[dict[str, Any]], list[dict[str, Any]]]:
    """Executes what was chosen, interleaved, contenders on the second stage's requests too; of each subspace the fastest of its finalists
    is compared with autoregression and with all papers together: the winners, rows of figures, and what every policy took."""
    policies = {w.policy.id: w.policy for found in chosen.values() for w in found}
    how = {"profile": profile, "artifacts": fitted(store)}
    first, second = stages
    print(f"  {category}: {len(policies)} policies on {len(first.items)} requests", flush=True)
    compared = compare(pair, list(policies.values()), first, **how)
    contenders = _contenders(_finalists(JOINT, chosen), compared.timings)
    print(f"  {category}: {len(contenders)} of them on {len(second.items)} more", flush=True)
    further = compare(pair, [policies[c] for c in contenders], second, **how)
    nowhere = np.full((len(second.items), 1), np.nan)
    timings = Timings({p: np.concatenate([s, further.timings.seconds.get(p, nowhere)]) for p, s in compared.timings.seconds.items()})
    differ = compared.texts_differ + further.texts_differ
    # The second stage has tokens and rounds of contenders only; those of the first are of the same requests for all.
    compared = replace(compared, timings=timings, texts_differ=differ)
    names = [*(" + ".join(papers) for papers in SUBSPACES if " + ".join(papers) in chosen), *BASELINES, "autoregressive"]
    executed = {name: _finalists(name, chosen) for name in names}
    decided = {name: [w for w in found if w.policy.id in contenders] or found for name, found in executed.items()}
    winners = {name: _fastest(found, timings) for name, found in decided.items()}
    apart = {name: _apart(found, timings) for name, found in decided.items()}
    joint, rows = winners[JOINT].policy, []
    for name, winner in winners.items():
        policy, total = winner.policy, compared.outcomes[winner.policy.id].total
        speedup = compared.ratio(policy.id, AUTOREGRESSIVE.id)
        rows.append(
            {
                "workload": category,
                "space": name,
                "uses": sorted(winner.uses),
                "combines": winner.uses == set(name.split(" + ")),
                "policy": policy.label(),
                "finalists": len(executed[name]),
                "contenders": sum(w.policy.id in contenders for w in executed[name]),
                "predicted_best": chosen[name][0].policy.label(),
                "predicted_tokens_per_s": winner.value,
                "speedup": speedup[0],
                "speedup_interval": finite(speedup[1:]),
                "speedup_apart": _ratio(apart["autoregressive"], apart[name])[0],
                "tau": total.mean_accepted_length,
                "verified_tokens": total.verified_tokens,
                "rounds": total.rounds,
                "requests": total.requests,
                "texts_differ": differ,
                "joint_over_it": finite(compared.ratio(joint.id, policy.id)),
                "joint_over_it_apart": _ratio(apart[name], apart[JOINT]),
                "joint_ahead": _ahead(compared, joint, policy),
            }
        )
        print(f"  {category} {name}: {speedup[0]:.3f} x autoregression, tau {total.mean_accepted_length:.2f}, {policy.label()}", flush=True)
    values = {w.policy.id: w.value for found in chosen.values() for w in found}
    executions = [
        {
            "policy": policy.label(),
            "predicted_tokens_per_s": values[name],
            "seconds": [round(float(s), 5) for s in timings.seconds[name][:, 0] if not np.isnan(s)],
        }
        for name, policy in policies.items()
    ]
    return winners, rows, executions


def _contenders(finalists: Sequence[Winner], timings: Timings) -> frozenset[str]:
    """Policies that may yet turn out the fastest: not slower than the fastest so far beyond noise (95%), at most :data:`CONTENDERS`, by
    what was executed and predicted together."""
    leader = _fastest(finalists, timings)
    speed = {
        w.policy.id: (timings.ratio(w.policy.id, leader.policy.id), w.value / leader.value) for w in finalists if w is not leader
    }
    near = {p: weighed(ratio, predicted, SEARCHED_SPREAD) for p, (ratio, predicted) in speed.items() if ratio[2] >= 1.0}
    return frozenset([leader.policy.id, *sorted(near, key=lambda p: -near[p])[: CONTENDERS - 1]])


def _finalists(name: str, chosen: Mapping[str, Sequence[Winner]]) -> list[Winner]:
    """Whom a subspace executes."""
    papers = set(name.split(" + "))
    within = [
        found
        for other, found in chosen.items()
        if name in (other, JOINT) or (other in SPACES and set(other.split(" + ")) < papers)
    ]
    return list({w.policy.id: w for found in within for w in found}.values())


def _fastest(finalists: Sequence[Winner], timings: Timings, rows: NDArray[np.bool_] | slice = slice(None)) -> Winner:
    """Who wins on some of the requests, as ``tune`` decides."""
    base = finalists[0]
    part = Timings({w.policy.id: timings.seconds[w.policy.id][rows] for w in finalists})

    def speed(winner: Winner) -> float:
        if winner is base:
            return 0.0
        return weighed(part.ratio(winner.policy.id, base.policy.id), winner.value / base.value, SEARCHED_SPREAD)

    return max(finalists, key=speed)


def _apart(finalists: Sequence[Winner], timings: Timings) -> FloatArray:
    """Seconds of each request under the finalist that wins on the other folds of the requests, [requests]; NaN where none was executed."""
    fold = np.arange(len(timings.seconds[finalists[0].policy.id])) % FOLDS
    found = np.empty(len(fold))
    for n in range(FOLDS):
        winner = _fastest(finalists, timings, fold != n)
        found[fold == n] = timings.seconds[winner.policy.id][fold == n, 0]
    return found


def _ratio(one: FloatArray, other: FloatArray) -> list[float | None]:
    """How much faster the second is, with the 95% interval over requests."""
    return finite(Timings({"one": one[:, None], "other": other[:, None]}).ratio("other", "one"))


def _ahead(compared: Comparison, joint: Policy, other: Policy) -> str:
    """Whether the joint winner is faster: ``yes`` or ``no`` beyond noise (the level at which a race drops a policy), ``same`` policy, or
    ``open``."""
    if joint.id == other.id:
        return "same"
    _, low, high = compared.timings.ratio(joint.id, other.id, level=DROP_LEVEL)
    return "yes" if low > 1.0 else "no" if high < 1.0 else "open"


def joint(state: Path) -> dict[str, Any]:
    """The winner of all papers together and those of single papers, as the ablation chose them, once more on requests that neither search
    nor choice have seen.

    Executions are interleaved in random order, as where fidelity is measured:
    two policies alike differ by 15% from request to request. The best single paper of a workload is the one that the ablation found
    fastest: the fastest of four on these requests would be ahead by luck alone. It holds where the joint winner is not slower than that
    one's beyond noise (95%) on any workload, on all of them together at least as fast, within the 1% that count as a tie, and slower than
    no paper's on any beyond noise (at the level at which a race drops a policy, as there are twelve). Eighty requests tell apart what
    differs by 2%; three workloads together, what differs by 1%. Raises TraceError where the ablation has left no winners.
    """
    if not (state / KEPT).exists():
        raise TraceError(f"{state / KEPT}: there are no winners to confirm; run `make acceptance ARGS='--only ablation'` first")
    pair = load_pair(read_pair("demo"), device="cpu", drafts=DRAFTS)
    store = stored(state / "ablation.db")
    found = store.latest_profile(pair.id, "cpu")
    rows: list[dict[str, Any]] = []
    for category, kept in json.loads((state / KEPT).read_text()).items():
        winners = {name: parse_policy(kept["winners"][name]) for name in (*PAPERS, JOINT, "autoregressive")}
        workload = _workload(category)
        others = tuple(r for r in workload.requests if r.id not in kept["seen"])[:CONFIRMED]
        policies = {p.id: p for p in winners.values()}
        encoded = encode(pair, replace(workload, requests=others), DecodeOptions(Sampling(), TOKENS))
        how = {"profile": found.profile if found else None, "artifacts": fitted(store)}
        compared = compare(pair, list(policies.values()), encoded, **how)
        for name, policy in winners.items():
            rows.append(
                {
                    "workload": category,
                    "space": name,
                    "best": name == kept["best"],
                    "policy": policy.label(),
                    "requests": len(others),
                    "speedup": finite(compared.ratio(policy.id, AUTOREGRESSIVE.id)),
                    "joint_over_it": finite(compared.ratio(winners[JOINT].id, policy.id)),
                    "joint_ahead": _ahead(compared, winners[JOINT], policy),
                    "tau": compared.outcomes[policy.id].total.mean_accepted_length,
                    "texts_differ": compared.texts_differ,
                }
            )
            ratio, low, high = rows[-1]["joint_over_it"]
            print(f"  {category}: joint over {name} {ratio:.3f} ({low:.3f}-{high:.3f}), {policy.label()}", flush=True)
    papers = [r for r in rows if r["space"] in PAPERS]
    best = {r["workload"]: r for r in papers if r["best"]}
    together = math.exp(statistics.fmean(math.log(r["joint_over_it"][0]) for r in best.values()))
    spread = math.hypot(*(math.log(r["joint_over_it"][2] / r["joint_over_it"][0]) for r in best.values())) / len(best)
    least = min(papers, key=lambda r: r["joint_over_it"][0])
    shown = ", ".join(f"{c} {_shown(r)}" for c, r in best.items())
    return {
        "holds": all(r["joint_over_it"][2] >= 1.0 for r in best.values())
        and together >= 1 - TIE
        and not any(r["joint_ahead"] == "no" for r in papers),
        "summary": f"all papers together over the best single paper, on requests that neither search nor choice have seen: {shown}; all "
        f"workloads {together:.3f} ({together * math.exp(-spread):.3f}-{together * math.exp(spread):.3f}); the least of all "
        f"{len(papers)}: {least['workload']} {_shown(least)}",
        "together": [together, together * math.exp(-spread), together * math.exp(spread)],
        "rows": rows,
    }


def _shown(row: Mapping[str, Any]) -> str:
    ratio, low, high = row["joint_over_it"]
    return f"{ratio:.3f} ({low:.3f}-{high:.3f}) of {row['space']}'s"


CHECKS = {"ablation": ablation, "joint": joint}
