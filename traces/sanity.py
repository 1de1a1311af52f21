"""Warns of texts that repeat themselves, and of prompts that come twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from spectune.traces.schema import Int32Array
from spectune.traces.tables import Trajectory


@dataclass(frozen=True)
class Sanity:
    """Counts of one workload. ``repetitive``: texts whose last half is a cycle; ``duplicates``:
    requests whose prompt an earlier one has."""

    requests: int = 0
    repetitive: int = 0
    duplicates: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """The warnings, a line each. A tenth of repetitive texts is found in any workload."""
        lines = []
        if self.repetitive > 0.1 * self.requests:
            lines.append(
                f"{self.repetitive} of {self.requests} texts end in a cycle that repeats itself, "
                "as those of small targets do, and of others without their chat template: any "
                "draft guesses that, so speeds will be higher than on texts that do not"
            )
        if self.duplicates:
            lines.append(
                f"{self.duplicates} of {self.requests} prompts are the same as an earlier one, "
                "and tell nothing new"
            )
        return lines


def checked(texts: Sequence[Trajectory]) -> Sanity:
    """The counts of recorded texts."""
    prompts = {text.prompt_ids.tobytes() for text in texts}
    repetitive = sum(repeats(text.output_ids) for text in texts)
    return Sanity(len(texts), repetitive, len(texts) - len(prompts))


def repeats(tokens: Int32Array, *, shortest: int = 16, longest: int = 32) -> bool:
    """Whether the last half of a text goes through one cycle of up to ``longest`` tokens three
    times or more. In a text below ``shortest`` tokens that may be chance."""
    half = tokens[len(tokens) // 2 :]
    cycles = range(1, min(longest, len(half) // 3) + 1) if len(tokens) >= shortest else ()
    return any(bool((half[cycle:] == half[:-cycle]).all()) for cycle in cycles)
