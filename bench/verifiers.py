"""Distributions of the verifiers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from suites import tests


def check(state: Path, quick: bool = False) -> dict[str, Any]:
    """Both verifiers' distributions against the exact one by chi-square; a biased verifier fails the same test."""
    return tests(["tests/test_verifiers.py"])
