"""What the four papers say, with their figures and places: what ours is held against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from bench.verdicts import AGREES, MET, NOT_MET, NOT_SHOWN, at_least, at_most

NOT_COMPARABLE: Final = "not comparable"
CERTAIN: Final = "certain"
"""Of a figure that no request changes: it has no interval, and is counted apart."""


class Claim(NamedTuple):
    """What a paper says: a title, its figure with its place, and the end of its range that is
    nearest to no gain, which ours is to be at least, or at most (neither: it cannot be held against
    a figure). ``null``: what ours is where nothing is gained."""

    title: str
    figure: str
    least: float | None = None
    most: float | None = None
    null: float = 1.0

    def verdict(self, ours: Sequence[float | None]) -> str:
        """Of a figure with the ends of its interval. It agrees where the interval reaches into the
        paper's range and excludes that nothing is gained."""
        low, high = ours[1:]
        if self.least is None and self.most is None:
            return NOT_COMPARABLE
        if low is not None and low == high:
            return CERTAIN
        if self.least is not None:
            told, gains = at_least((low, high), self.least), low is not None and low > self.null
        else:
            told = at_most((low, high), self.most or 0.0)
            gains = high is not None and high < self.null
        is_known = low is not None and high is not None
        return AGREES if told == NOT_SHOWN and gains and is_known else told


CLAIMS = {
    "tau": Claim("tau (target calls: the inverse)", "+3.3 to +8.4% (table 1)", 1.033),
    "tau 1": Claim("tau (target calls: the inverse)", "+3.6 to +7.7% (table 9)", 1.036),
    "saturation": Claim("EAGLE-2's tau / (depth + 1)", "about 0.67 to 0.86 (table 1)"),
    "tokens": Claim("verified tokens", "-7.7 to -16.2% (table 1)", most=0.923),
    "tokens 1": Claim("verified tokens", "-5.6 to -12.7% (table 9)", most=0.944),
    "speed": Claim("speed", "+2.3 to +9.1% (table 1)", 1.023),
    "speed 1": Claim("speed", "+2.6 to +7.5% (table 9)", 1.026),
    "tuned": Claim("speed, both tuned", "none", 1.0),
    "executed": Claim("speed, executed", "replay inside the interval"),
    "deeper": Claim("tau, deeper trees alone", "+7.6 to +18.1% (table 2, code)", 1.076),
    "pruned": Claim("verified tokens by pruning", "-13.6 to -19.3% (table 2, code)", most=0.864),
    "kept": Claim("tau kept by pruning", "97.8 to 99.1% (table 2, code)", 0.978, null=0.0),
    "ranks": Claim("accepted paths in the best quarter of N", "most (figure 1)"),
    "alpha 2": Claim("speed, alpha 3 over 2 at depth 5", "+1.2 to +2.3% (table 3)", 1.012),
    "alpha 4": Claim("speed, alpha 3 over 4 at depth 5", "+0.2 to +1.1% (table 3)", 1.002),
    "domain": Claim("speed out of domain", "+5.3 to +10.8% (table 5, 8B and 13B)", 1.053),
    "overhead": Claim("seconds with entropies", "+0.3 to +0.9% (table 6)", most=1.009),
    "adaedl": Claim("speed over AdaEDL on the tree", "+6 to +22% (table 11)", 1.06),
    "adaedl tuned": Claim("AdaEDL on the tree over EAGLE-2's", "-1 to -7% (table 11)"),
    "nodes": Claim("verified tokens at EAGLE-2's tau", "75 to 80% (section 5)", most=0.8),
    "nodes 1": Claim("verified tokens at EAGLE-2's tau", "none"),
    "three": Claim("the same, the paper's three features", "75 to 80% (section 5)", most=0.8),
    "two": Claim("the same, two features", "90% (table 1)", most=0.9),
    "hidden": Claim("the same, other hidden sizes", "12 to 48 alike (B.3)"),
    "transfer": Claim("the same, trained on another draft", "73 to 100% (table 2)", most=1.0),
    "texts": Claim("the same, trained on other texts", "below EAGLE-2's (figure 4)", most=1.0),
    "cap": Claim("the same, at most 5 a level", "below EAGLE-2's (table 5)", most=1.0),
    "stops": Claim("verified tokens of chains at a stop's tau", "90 to 92% (table 3)", most=0.92),
    "window": Claim("speed over the window gamma 5", "+0.14 to +77.5% (table 1)", 1.0014),
    "window 1": Claim("speed over the window gamma 5", "+2.4 to +9.8% (table 9)", 1.0238),
    "methods": Claim("speed over the best of methods 2 to 4", "the best overall (figure 3)", 1.0),
    "learned": Claim("speed over method 4, warmed up by 25 requests", "none"),
    "adaptive": Claim("speed over EAGLE-2 of depth 5", "+1.1 to +7.1% (table 10)", 1.0114),
    "choice": Claim("speed over the best single draft", "+0.0 to +8.8 points (table 2)", 1.0),
    "share": Claim("shortlist, of the vocabulary", "22 to 25% (table 1)"),
    "full": Claim("tau of the whole vocabulary kept", "98.4% (table 1)", 0.984, null=0.936),
    "full 1": Claim("tau of the whole vocabulary kept", "none"),
    "frequent": Claim("the same, FR-Spec, sized for it", "93.6% (table 1)"),
    "frequent 1": Claim("the same, FR-Spec", "none"),
    "routed": Claim("tau over FR-Spec's at as many tokens", "+5.2% (table 1)", 1.052),
    "routed 1": Claim("tau over FR-Spec's at as many tokens", "none"),
    "decayed": Claim("tau, fewer clusters by step over as many", "above (figure 3)", 1.0),
    "decayed 1": Claim("tau, fewer clusters by step over as many", "none"),
    "mass": Claim("p(S), DynaSpec's over FR-Spec's", "0.874 against 0.854 (table 3)", 1.023),
    "distance": Claim("TV inside S, likewise", "0.874 against 0.887 (table 3)", most=0.986),
    "bounds": Claim("contexts where theorem 5.1 and corollary 5.2 hold", "all", 1.0),
    "rare": Claim("tokens outside FR-Spec's shortlist that the router's has", "none"),
    "union": Claim("tau from the union of the beam's clusters over each node's own", "none"),
    "decayed order": Claim("tau, PA-FR over FR-Spec", "+1.9% (table 4)", 1.019),
    "decayed order 1": Claim("tau, PA-FR over FR-Spec", "none"),
    "coupled": Claim("tau of coupled chains over rejection's", "none", 1.0),
    "verified": Claim("speed of the best coupled policy over rejection's best", "none", 1.0),
    "sharp": Claim("verified tokens at EAGLE-2's tau, our coupled score", "none", most=1.0),
    "certain": Claim("first choices accepted over their mean probability", "none"),
    "together": Claim("speed over the best single mechanism", "none", 1.01),
    "regret": Claim("speed of what is chosen over the best of 120 in hindsight", "none"),
    "regret executed": Claim(
        "speed of what is chosen over the fastest of 16, executed", "none", 0.98
    ),
}


def verdict(row: dict[str, Any]) -> str:
    """Of a row: its figure against its claim's bar. What is executed is held against what replay
    says of it, which is to lie inside the executed interval."""
    if row["claim"] == "executed":
        low, high = row["ours"][1:]
        return MET if low <= row["replayed"] <= high else NOT_MET
    return CLAIMS[row["claim"]].verdict(row["ours"])
