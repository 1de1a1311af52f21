"""Vocabulary shortlists: tau recovered at equal sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shortlist_fits import fit, over_full

CASES = (("small", "chain"), ("medium", "tree"), ("head", "tree"))
BUDGET = (15, 10, 1)


def check(state: Path, quick: bool = False) -> dict[str, Any]:
    """Tau recovered by shortlists of equal mean size; texts do not differ."""
    cases = CASES[:1] if quick else CASES
    fits = fit(state, [draft for draft, _ in cases], quick)
    recovered = over_full(fits, cases, BUDGET, quick)
    differ = recovered["differ"]
    return {
        "holds": not differ,
        "summary": f"{differ} texts differ; {recovered['summary']} (papers: DynaSpec 98.4%, "
        "FR-Spec 93.6%)",
        "recovered": recovered,
    }
