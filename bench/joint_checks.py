"""The check of the joint space behind ``bench/acceptance.py``: what each paper adds, alone, with another, and with all."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from checks import Pacer, typical_s
from numpy.typing import NDArray
from tree_checks import CATEGORIES, stored

from optimizer.artifacts import fitted, q_tables
from optimizer.chooser_fits import ChooserSource, fit_source, keep_chooser
from optimizer.execute import DROP_LEVEL, Comparison, DecodeOptions, Encoded, Timings, compare, encode
from optimizer.fits.chooser import read_prompts
from optimizer.inputs import load_workload
from optimizer.record import RecordRequest, record, split, whole_texts
from optimizer.replay import ReplayTrace, run_replay
from optimizer.search import TIE, Study, Trial, finalists, search
from optimizer.shortlist_tuning import fit_shortlists, ranks_for
from optimizer.spaces import Kinds
from optimizer.tree_tuning import fit_trees
from optimizer.tune import TuneOptions, finite, profile_for, weighed
from runtime.decoder import Decoded
from runtime.loading import LoadedPair, load_pair
from runtime.loop import StaticSource
from runtime.pair import read_pair
from runtime.policies.document import AUTOREGRESSIVE, Policy, parse_policy
from runtime.policies.prepared import prepare
from traces.errors import TraceError
from traces.schema import LatencyProfile, Sampling, Workload
from traces.store import TraceStore

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
REQUESTS, EXECUTED, TOKENS = 40, 28, 64
"""Requests recorded, of which three fifths are searched on; others that are executed: the rest of the recording, then more of them."""
WIDTH, DEPTH, GAMMA = 8, 8, 12
TRIALS, TRIALS_EACH = 300, 60
FINALISTS = 3
PASSES, FOLDS = 2, 7
"""Executions of every policy on every request; parts that the requests are cut into."""
CONFIRMED = 48
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
    wins, as in ``tune`` by what was executed and what was predicted together. That flatters those that have more finalists, so there is a
    second figure, which can fail: each seventh of the requests is timed under the winner chosen on the other six. :func:`joint` executes
    the winners on requests that none of this has seen.
    """
    return _ablation(state, CATEGORIES, REQUESTS, EXECUTED, TOKENS, TRIALS, TRIALS_EACH)


def _ablation(
    state: Path, workloads: Sequence[str], requests: int, executed: int, tokens: int, trials: int, each: int
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
        workload = load_workload(["demo"], categories=[category])
        recorded = replace(workload, requests=workload.requests[:requests])
        chosen, part, profile = _searched(store, pair, recorded, tokens, trials, each)
        checked[category] = dict(profile.check)
        others = [r for r in workload.requests if r.id not in part]
        encoded = encode(pair, replace(workload, requests=tuple(others[:executed])), DecodeOptions(Sampling(), tokens))
        winners, found, executions[category] = _executed(store, pair, profile, category, chosen, encoded)
        rows += found
        seen = sorted(part | {item.id for item, _ in encoded.items})
        kept[category] = {"seen": seen, "winners": {name: w.policy.spelled_out() for name, w in winners.items()}}
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
    measured = profile_for(store, pair, DRAFTS, TuneOptions(gamma_max=GAMMA, fresh=True), whole_texts(texts))
    profile, stored_profile = measured.profile, measured.id
    limits = fit_trees(store, recording, DRAFTS, profile=stored_profile)
    shortlists = fit_shortlists(store, pair, recording, DRAFTS)
    trace = ReplayTrace(
        texts,
        {d: loaded.panoramas(d) for d in DRAFTS if d not in pair.heads},
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
    encoded: Encoded,
) -> tuple[dict[str, Winner], list[dict[str, Any]], list[dict[str, Any]]]:
    """Executes what was chosen, interleaved; of each subspace the fastest of its finalists is compared with autoregression and with all
    papers together: the winners, rows of figures, and what every policy took."""
    policies = {w.policy.id: w.policy for found in chosen.values() for w in found}
    print(f"  {category}: {len(policies)} policies on {len(encoded.items)} requests", flush=True)
    how = {"profile": profile, "q_tables": q_tables(store), "artifacts": fitted(store)}
    compared = paced(pair, list(policies.values()), encoded, PASSES, how)
    assert compared.timings is not None
    timings = compared.timings
    names = [*(" + ".join(papers) for papers in SUBSPACES if " + ".join(papers) in chosen), *BASELINES, "autoregressive"]
    executed = {name: _finalists(name, chosen) for name in names}
    winners = {name: _fastest(found, timings) for name, found in executed.items()}
    apart = {name: _apart(found, timings) for name, found in executed.items()}
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
                "predicted_best": chosen[name][0].policy.label(),
                "predicted_tokens_per_s": winner.value,
                "speedup": speedup[0],
                "speedup_interval": finite(speedup[1:]),
                "speedup_apart": float(apart["autoregressive"].sum() / apart[name].sum()),
                "tau": total.mean_accepted_length,
                "verified_tokens": total.verified_tokens,
                "rounds": total.rounds,
                "requests": total.requests,
                "texts_differ": compared.texts_differ,
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
            "seconds": [round(float(s), 5) for s in np.nanmedian(timings.seconds[name], axis=1)],
        }
        for name, policy in policies.items()
    ]
    return winners, rows, executions


def paced(
    pair: LoadedPair, policies: Sequence[Policy], encoded: Encoded, passes: int, how: Mapping[str, Any]
) -> Comparison:
    """A comparison whose timings are each request's seconds at the machine's usual pace (:class:`checks.Pacer`), [requests, 1]: policies in
    random order, as often as there are ``passes``. ``how``: further arguments of :func:`optimizer.execute.compare`."""
    pacer = Pacer(pair)
    executed: dict[tuple[str, str], list[Decoded]] = {}
    pace: dict[tuple[str, str], list[FloatArray]] = {}

    def keep(policy: Policy, decoded: Decoded) -> None:
        key = policy.id, decoded.trajectory.request_id
        executed.setdefault(key, []).append(decoded)
        pace.setdefault(key, []).append(pacer.taken())

    runs = [compare(pair, policies, encoded, seed=run, each=keep, after_round=pacer, **how) for run in range(passes)]
    slower = Pacer.slower(pace)
    keys = {p.id: [(p.id, item.id) for item, _ in encoded.items] for p in policies}
    seconds = {p: np.array([[typical_s(executed[k], slower[k])] for k in own]) for p, own in keys.items()}
    return replace(runs[0], timings=Timings(seconds), texts_differ=max(run.texts_differ for run in runs))


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
    """Seconds of each request under the finalist that wins on the other folds of the requests, [requests]."""
    fold = np.arange(len(timings.seconds[finalists[0].policy.id])) % FOLDS
    found = np.empty(len(fold))
    for n in range(FOLDS):
        winner = _fastest(finalists, timings, fold != n)
        found[fold == n] = np.nanmedian(timings.seconds[winner.policy.id][fold == n], axis=1)
    return found


def _ratio(one: FloatArray, other: FloatArray) -> list[float | None]:
    """How much faster the second is, with the 95% interval over requests."""
    return finite(Timings({"one": one[:, None], "other": other[:, None]}).ratio("other", "one"))


def _ahead(compared: Comparison, joint: Policy, other: Policy) -> str:
    """Whether the joint winner is faster: ``yes`` or ``no`` beyond noise (the level at which a race drops a policy), ``same`` policy, or
    ``open``."""
    if joint.id == other.id:
        return "same"
    assert compared.timings is not None
    _, low, high = compared.timings.ratio(joint.id, other.id, level=DROP_LEVEL)
    return "yes" if low > 1.0 else "no" if high < 1.0 else "open"


def joint(state: Path) -> dict[str, Any]:
    """The winner of all papers together and those of single papers, as the ablation chose them, once more on requests that neither search
    nor choice have seen.

    Executions are interleaved in random order and brought to one pace (:class:`checks.Pacer`), as where fidelity is measured: without, two
    policies alike differ by 15% from request to request. It holds where the joint one is at least as fast as every single paper's, within
    the 1% that count as a tie, and nowhere slower beyond noise. Raises TraceError where the ablation has left no winners.
    """
    if not (state / KEPT).exists():
        raise TraceError(f"{state / KEPT}: there are no winners to confirm; run `make acceptance ARGS='--only ablation'` first")
    pair = load_pair(read_pair("demo"), device="cpu", drafts=DRAFTS)
    store = stored(state / "ablation.db")
    found = store.latest_profile(pair.id, "cpu")
    rows: list[dict[str, Any]] = []
    for category, kept in json.loads((state / KEPT).read_text()).items():
        winners = {name: parse_policy(kept["winners"][name]) for name in (*PAPERS, JOINT, "autoregressive")}
        workload = load_workload(["demo"], categories=[category])
        others = tuple(r for r in workload.requests if r.id not in kept["seen"])[:CONFIRMED]
        policies = {p.id: p for p in winners.values()}
        encoded = encode(pair, replace(workload, requests=others), DecodeOptions(Sampling(), TOKENS))
        how = {"profile": found.profile if found else None, "q_tables": q_tables(store), "artifacts": fitted(store)}
        compared = paced(pair, list(policies.values()), encoded, PASSES, how)
        for name, policy in winners.items():
            rows.append(
                {
                    "workload": category,
                    "space": name,
                    "policy": policy.label(),
                    "requests": len(others),
                    "speedup": finite(compared.ratio(policy.id, AUTOREGRESSIVE.id)),
                    "joint_over_it": finite(compared.ratio(winners[JOINT].id, policy.id)),
                    "tau": compared.outcomes[policy.id].total.mean_accepted_length,
                    "texts_differ": compared.texts_differ,
                }
            )
            ratio, low, high = rows[-1]["joint_over_it"]
            print(f"  {category}: joint over {name} {ratio:.3f} ({low:.3f}-{high:.3f}), {policy.label()}", flush=True)
    papers = [r for r in rows if r["space"] in PAPERS]
    workloads = dict.fromkeys(r["workload"] for r in papers)
    by_workload = {w: min((r for r in papers if r["workload"] == w), key=lambda r: r["joint_over_it"][0]) for w in workloads}
    over = {c: r["joint_over_it"] for c, r in by_workload.items()}
    shown = ", ".join(f"{c} {x[0]:.3f} ({x[1]:.3f}-{x[2]:.3f}) of {by_workload[c]['space']}'s" for c, x in over.items())
    return {
        "holds": all(r["joint_over_it"][0] >= 1 - TIE and r["joint_over_it"][2] >= 1.0 for r in papers),
        "summary": f"all papers together over the best single paper, on requests that neither search nor choice have seen: {shown}",
        "rows": rows,
    }


CHECKS = {"ablation": ablation, "joint": joint}
