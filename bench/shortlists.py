"""Vocabulary shortlists: tau recovered at equal sizes, and speed on a wide vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import wide_vocabulary
from shortlist_fits import fit, over_full

CASES = (("small", "chain"), ("medium", "tree"), ("head", "tree"))
WIDE = (("medium", "chain"), ("head", "tree"))
BUDGET, WIDE_BUDGET = (15, 10, 1), (9, 6, 1)


def check(state: Path, quick: bool = False) -> dict[str, Any]:
    """Tau recovered by shortlists of equal mean size, and speed on 32768 tokens; texts do not
    differ."""
    cases, wide_cases = (CASES[:1], CASES[:1]) if quick else (CASES, WIDE)
    fits = fit(state, [draft for draft, _ in cases], quick)
    recovered = over_full(fits, cases, BUDGET, quick)
    wide = wide_vocabulary.fit(state, fits, 8192 if quick else 32768, wide_cases)
    widened = over_full(wide, wide_cases, WIDE_BUDGET, quick)
    differ = recovered["differ"] + widened["differ"]
    return {
        "holds": not differ,
        "summary": f"{differ} texts differ; {recovered['summary']} (papers: DynaSpec 98.4%, "
        f"FR-Spec 93.6%); {widened['summary']} (papers: 1.17 and 1.10 x the speed)",
        "recovered": recovered,
        "wide": widened,
    }
