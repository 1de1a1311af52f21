"""Short names of policies for tables, charts and sentences; the document has the rest."""

from __future__ import annotations

from typing import Any, Final

from spectune.runtime.policies.document import Policy

SIZES: Final = {"frequency": "size", "position_frequency": "k_max", "clusters": "k0"}
"""What says how long a shortlist is, by its kind."""


SPELLED: Final = 4
"""Batch sizes of a table that are spelled out; of more the first and the last."""


def short_name(policy: Policy) -> str:
    """A policy in a few words, e.g. ``small K=4``, ``head tree 8x4 N=60`` (width, levels, nodes) or
    ``small by load 1:5 3:2``; not all that it says."""
    if policy.draft == "none" or getattr(policy, "by_prompt", None) is not None:
        return policy.label()
    # Read by kind: no type holds the blocks of all.
    window, growth, stop, shortlist = _blocks(policy)
    words = [policy.draft, *_window(window, is_chain=growth.kind == "chain")]
    if stop.kind != "none":
        words.append(f"{stop.kind.replace('_', ' ')} {stop.threshold:.2g}")
    if growth.kind == "static":
        words += ["static tree", *([f"{len(growth.paths)}"] if growth.paths else [])]
    elif growth.kind != "chain":
        depth = f"x{window.gamma}" if window.kind == "fixed" else ""
        title = "tree" if growth.kind == "top_k" else "C2T"
        words.append(f"{title} {growth.width}{depth}")
        words += [f"beta {growth.beta:.2g}"] if growth.kind == "classifier" else []
        words += ["coupled"] * (growth.score == "coupled")
    if policy.select.top_n is not None:
        words.append(f"N={policy.select.top_n}")
    if policy.stratify is not None:
        words.append(f"bins {policy.stratify.alpha}")
    if shortlist.kind != "full":
        size = getattr(shortlist, SIZES[shortlist.kind])
        words.append(f"{shortlist.kind.replace('_', ' ')} {size}")
    return " ".join(words)


def _blocks(policy: Policy) -> tuple[Any, Any, Any, Any]:
    return policy.window, policy.growth, policy.stop, policy.shortlist


def _window(window: Any, *, is_chain: bool) -> list[str]:
    if window.kind == "fixed":
        return [f"K={window.gamma}"] if is_chain else []
    title = window.kind.replace("q_learning", "q-learning").replace("_", " ")
    if window.kind == "by_load":
        sizes, tokens = [*window.gamma], [*window.gamma.values()]
        table = [f"{size}:{gamma}" for size, gamma in window.gamma.items()]
        if len(sizes) > SPELLED:
            table = [f"1:{tokens[0]} .. {sizes[-1]}:{tokens[-1]}"]
        return [title, *table, *["by context"] * bool(window.contexts)]
    least = getattr(window, "gamma_min", None)
    return [title, f"{window.gamma_max}" if least is None else f"{least}-{window.gamma_max}"]
