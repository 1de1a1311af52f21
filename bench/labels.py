"""Short forms of policies' labels, for tables, legends and sentences: `ngram K=7`, `head tree 8x4
N=60`. The whole document of a policy is in bench/results."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

ARGUMENTS = r"\(((?:[^()]|\([^()]*\))*)\)"
LABEL = re.compile(rf"\b\w+(?: \w+{ARGUMENTS})+(?: N=\d+)?")
"""A draft, its blocks with their arguments, and in older results the nodes of its tree."""
OF_GPU: Final[Mapping[str, str]] = {
    "autoregression": "autoregressive",
    "draft, gamma 4": "small K=4",
    "head, gamma 4": "head K=4",
    "prompt lookup, 8": "ngram K=8",
    "head, tree 8 wide, 4 levels, N 60": "head tree 8x4 N=60",
    "draft, the same tree": "small tree 8x4 N=60",
}
"""How results of GPUs name the policies that bench/gpu/native.py executes."""
WINDOWS: Final[Mapping[str, int]] = {"fsm": 0, "cache_fsm": 0, "analytic": 0, "q_learning": 1}
"""Windows with a range, and its lower end where none is given."""
STOPS: Final = ("max_prob", "joint_prob", "entropy")


def short(text: str) -> str:
    """A text with every label of a policy in it in its short form, e.g. of
    ``small fixed(gamma=4) top_k(width=8) select(top_n=60)`` ``small tree 8x4 N=60``."""
    return LABEL.sub(lambda found: _short(found[0]), OF_GPU.get(text, text))


def _short(label: str) -> str:
    draft = label.split(" ", 1)[0]
    blocks = {name: _arguments(of) for name, of in re.findall(rf"(\w+){ARGUMENTS}", label)}
    depth = blocks.get("fixed", {}).get("gamma")
    words = [draft, *_window(blocks)]
    words += [f"{stop.replace('_', ' ')} {_digits(_only(blocks[stop], 'threshold'))}"
              for stop in STOPS if stop in blocks]  # fmt: skip
    tree = _tree(blocks, depth)
    if depth is not None and not any(word.endswith(f"x{depth}") for word in tree):
        words.insert(1, f"K={depth}")
    nodes = re.search(r" N=(\d+)$", label)
    count = blocks["select"]["top_n"] if "select" in blocks else nodes and nodes[1]
    words += [*tree, *([f"N={count}"] if count else [])]
    for name in ("stratify", "bins"):
        if name in blocks:
            words += ["bins", *([blocks[name]["alpha"]] if "alpha" in blocks[name] else [])]
    shortlists = {"frequency": "size", "position_frequency": "k_max", "clusters": "k0"}
    words += [f"{name.replace('_', ' ')} {_only(blocks[name], key)}"
              for name, key in shortlists.items() if name in blocks]  # fmt: skip
    return " ".join(words)


def _window(blocks: Mapping[str, Mapping[str, str]]) -> list[str]:
    """A window that is not `fixed`."""
    for name, least in WINDOWS.items():
        if name in blocks:
            of, title = blocks[name], name.replace("q_learning", "q-learning").replace("_", " ")
            return [f"{title} {of.get('gamma_min', least)}-{of['gamma_max']}"]
    if "heuristic" in blocks:
        return [f"heuristic {blocks['heuristic']['gamma_max']}"]
    if "by_load" in blocks:
        sizes = blocks["by_load"].items()
        return ["by load", *(f"{size}:{tokens}" for size, tokens in sizes)]
    return []


def _tree(blocks: Mapping[str, Mapping[str, str]], depth: str | None) -> list[str]:
    """How a tree grows; a classifier of width 1 grows a chain."""
    by = "" if depth is None else f"x{depth}"
    if "static" in blocks:
        return [f"static tree {_only(blocks['static'], 'nodes').removesuffix(' nodes')}"]
    if "classifier" in blocks:
        of = blocks["classifier"]
        chain = of["width"] == "1"
        coupled = ["coupled"] * (of.get("score") == "coupled")
        return ["C2T chain" if chain else f"C2T {of['width']}{by}", f"beta {_digits(of['beta'])}",
                *coupled]  # fmt: skip
    if "top_k" in blocks:
        of = blocks["top_k"]
        coupled = ["coupled"] * (of.get("score") == "coupled" or "coupled" in of)
        return [f"tree {of.get('width', of.get('k'))}{by}", *coupled]
    return []


def _arguments(text: str) -> dict[str, str]:
    """Arguments by name; one without a name by itself."""
    parts = re.split(r", (?![^()]*\))", text) if text else []
    return dict(re.split("=|: ", part, maxsplit=1) if re.search("=|: ", part) else (part, part)
                for part in parts)  # fmt: skip


def _only(of: Mapping[str, str], key: str) -> str:
    """An argument by its name, or the only one, without a name."""
    return of[key] if key in of else next(iter(of.values()))


def _digits(number: str) -> str:
    return f"{float(number):.2g}"
