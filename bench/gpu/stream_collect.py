"""What :mod:`gpu.stream` brought back, read on a CPU: tables, predictions of the policies that took
turns by replay of their texts at the tuning's costs, and verdicts.

Drafts are read along the texts here, in float32. In bfloat16 ties fall differently, so that a few
rounds are others than on the device: they are a part of what is off.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy.stats

from bench.gpu.rows import Figures, Rows, judged, shown, unfinished
from bench.gpu.stream import OTHERS, profile_from
from bench.lab import demo, interval_of, stored
from bench.served.live import ratio, temporary_folder
from bench.verdicts import NOT_SHOWN, at_least, at_most, exactly
from spectune.optimizer.recording.record import PanoramaSpec, record_panoramas
from spectune.optimizer.replay.trace import simulate
from spectune.runtime.policies.document import Policy, parse_policy
from spectune.traces.errors import SpectuneError
from spectune.traces.recording import Asked
from spectune.traces.schema import Sampling, Tokens
from spectune.traces.tables import LatencyProfile, Trajectory

SHARE, STEP_MS, LEVEL_MS, FASTER, ERROR = 0.85, 0.20, 0.18, 1.2, 0.04
"""Targets: a pass as a share of the copy bandwidth, a draft step, a level of the head's tree, the
best tree beside the code before, and how far a head's policies are predicted off."""


def means(by_side: Mapping[str, Sequence[float]]) -> Figures:
    """Of each side the mean over turns with its 95% interval (Student's t)."""
    found = {}
    for name, each in by_side.items():
        mean, half = float(np.mean(each)), 0.0
        if len(each) > 1:
            half = float(scipy.stats.t.ppf(0.975, len(each) - 1) * scipy.stats.sem(each))
        found[name] = [mean, mean - half, mean + half]
    return found


def speeds(by_side: Mapping[str, Sequence[float]]) -> Figures:
    """The same, and the code now over the code before."""
    if "before" not in by_side:
        return means(by_side)
    return {**means(by_side), "now over before": ratio(by_side["now"], by_side["before"])}


def turns(rows: Mapping[str, Figures], profile: LatencyProfile | None) -> list[Figures]:
    """Of each policy that took turns: tokens/s, beside what replay predicts, and over no draft by
    prompt; how many texts are not as without a draft."""
    prompts = [row for part, row in rows.items() if part.startswith("prompt ") and "texts" in row]
    if not prompts:
        return []
    policies = {"published": parse_policy(rows["tune"]["winner"]["policy"])}
    policies |= {name: parse_policy(document) for name, document in OTHERS.items()}
    predicted = predictions(prompts, policies, profile)
    found = []
    for name, policy in policies.items():
        speeds = np.array([len(row["texts"][name]) / row["policy_s"][name] for row in prompts])
        plain = np.array([len(row["texts"]["none"]) / row["policy_s"]["none"] for row in prompts])
        tokens = sum(len(row["texts"][name]) for row in prompts)
        measured = tokens / sum(row["policy_s"][name] for row in prompts)
        told = predicted.get(name)
        found.append({
            "policy": name if name != "published" else f"published: {policy.label()}",
            "draft": policy.draft,
            "prompts": len(prompts),
            "tokens/s": measured,
            "predicted": told,
            "off": told and told / measured - 1,
            "over none": interval_of(np.log(speeds / plain)),
            "texts differ": sum(row["texts"][name] != row["texts"]["none"] for row in prompts),
        })  # fmt: skip
    return found


def predictions(
    prompts: Sequence[Figures], policies: Mapping[str, Policy], profile: LatencyProfile | None
) -> dict[str, float]:
    """Tokens/s by replay of the texts without a draft; of policies that need what is not here, as a
    fitted classifier, nothing."""
    if profile is None:
        return {}
    drafts = {p.draft for policy in policies.values() for p in policy.candidates if p.speculates}
    pair = demo(tuple(drafts - {"ngram"}))
    with temporary_folder() as folder:
        store = stored(folder / "x.db")
        store.put_pair(pair.id, pair.spec.name, pair.spec.to_json(), pair.spec.models)
        longest = max(len(row["texts"]["none"]) for row in prompts)
        asked = Asked(pair.id, None, Sampling(), longest, options=OPTIONS)
        info = store.create_recording(asked)
        items = [(n, _trajectory(n, row), ()) for n, row in enumerate(prompts)]
        store.append_trajectories(info.id, items)
        record_panoramas(store, pair, info.id, PanoramaSpec(tuple(drafts), 12, 10, 7))
        store.finish_recording(info.id)
        found = {}
        for name, policy in policies.items():
            try:
                total = simulate(store, info.id, policy, profile).replay.total
            except SpectuneError:
                continue
            found[name] = total.emitted_tokens / total.seconds
    return found


OPTIONS = {"stop_strings": [], "chat": False}


def _trajectory(number: int, row: Figures) -> Trajectory:
    tokens = Tokens(*(np.array(ids, np.int32) for ids in (row["prompt"], row["texts"]["none"])))
    length = len(row["texts"]["none"])
    return Trajectory(f"{number}", "demo", tokens, Sampling(), length, "length", "coupled")


def verdicts(figures: Figures) -> dict[str, str]:
    passes, drafting, policies = (figures[name] for name in ("passes", "drafting", "policies"))

    def of(kind: str, side: Mapping[str, Any], target: float) -> str:
        judge = at_most if kind == "most" else at_least
        return judge(side["now"][1:], target) if "now" in side else NOT_SHOWN

    heads = [abs(row["off"]) for row in policies if row["draft"] == "head" and row["off"]]
    one: Figures = next((row["share"] for row in passes if row["tokens"] == 1), {})
    faster = figures["tree"].get("now over before")
    return {
        "every part ran": exactly(not figures["failed"] and not figures["not_run"]),
        f"a captured pass at {100 * SHARE:.0f}% of the copy bandwidth": of("least", one, SHARE),
        f"a draft step in {STEP_MS:.2f} ms": of("most", drafting.get("draft step ms", {}), STEP_MS),
        f"a head's level in {LEVEL_MS:.2f} ms": of(
            "most", drafting.get("head level ms", {}), LEVEL_MS
        ),
        f"a wide tree {FASTER} times the code before": (
            at_least(faster[1:], FASTER) if faster else NOT_SHOWN
        ),
        f"policies of the head are predicted within {100 * ERROR:.0f}%": (
            exactly(max(heads) <= ERROR) if heads else NOT_SHOWN
        ),
    }


def collect(folder: Path, results: Path | None) -> int:
    """Prints what is in a folder and writes it into the results, or into the folder itself where it
    was measured at the tiny size. 1 where a verdict is not met."""
    rows = {row["part"]: row for row in Rows(folder).read()}
    last = rows["plan"]
    done = {part: row for part, row in rows.items() if "failed" not in row}
    tuned, costs = done.get("tune", {}), done.get("costs", {})
    profile = profile_from(tuned["profile"]) if tuned else None
    passes, drafting = done.get("passes", {}), done.get("drafting", {})
    figures: Figures = {
        **{name: last[name] for name in last if name not in ("plan", "part")},
        **{name: each for name, each in passes.items() if isinstance(each, float)},
        "passes": [
            {
                "tokens": row["tokens"],
                **{f"{name} ms": statistics.median(ms) for name, ms in row["ms"].items()},
                "share": row["share"],
            }
            for row in passes.get("rows", [])
        ],
        "drafting": {what: means(ms) for what, ms in drafting.items() if what.endswith("ms")},
        "tree": speeds(done["tree"]["tokens_per_s"]) if "tree" in done else {},
        "tuned": {name: each for name, each in tuned.items() if name != "profile"},
        "policies": turns(done, profile),
        "costs": costs,
        **unfinished(rows),
    }  # fmt: skip
    figures["verdicts"] = verdicts(figures)
    for what, each in {**figures["drafting"], "tree tokens/s": figures["tree"]}.items():
        print(f"{what}: {shown(each)}")
    return judged("gpu-stream", folder, figures, results, ("passes", "policies"))
