"""The pair of small models that ships, the script that trained it, and prompts to run it on."""

from pathlib import Path

from spectune.demo.prompts import demo_workload

PAIR_PATH = Path(__file__).parent / "pair" / "pair.json"

__all__ = ["PAIR_PATH", "demo_workload"]
