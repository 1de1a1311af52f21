"""What in recorded texts makes figures say less than they seem to: texts that repeat, prompts that
repeat, categories of few."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from spectune.traces.schema import Int32Array
from spectune.traces.tables import Trajectory

LONGEST_CYCLE = 32
"""Tokens of the longest cycle looked for."""
SHORTEST_TEXT = 16
"""Tokens of the shortest text in which a cycle is no accident."""
LEAST = 5
"""Requests of a category below which its own figures say little."""
MANY = 0.1
"""Share of repetitive texts that is said: a few are found in any workload."""


@dataclass(frozen=True)
class Sanity:
    """Counts of one workload. ``repetitive``: texts whose last half is a cycle; ``duplicates``:
    requests whose prompt an earlier one has; ``few``: the categories with fewer than ``LEAST``
    requests, and how many they have."""

    requests: int = 0
    repetitive: int = 0
    duplicates: int = 0
    few: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """What is to be said, a line each; nothing of a workload without such."""
        said = []
        if self.repetitive > MANY * self.requests:
            said.append(
                f"{self.repetitive} of {self.requests} texts end in a cycle that repeats itself, "
                "which any draft guesses: speeds will be higher than on texts that do not (another "
                "target, or a chat template that is missing?)"
            )
        if self.duplicates:
            said.append(
                f"{self.duplicates} of {self.requests} prompts are the same as an earlier one; "
                "they count each time"
            )
        if self.few:
            shown = ", ".join(f"{name} {count}" for name, count in list(self.few.items())[:8])
            more = f" and {len(self.few) - 8} more categories" if len(self.few) > 8 else ""
            said.append(
                f"fewer than {LEAST} requests in {shown}{more}: their own figures say little"
            )
        return said


def checked(texts: Sequence[Trajectory]) -> Sanity:
    """What is to be known of texts before their figures are believed."""
    prompts = {t.prompt_ids.tobytes() for t in texts}
    counts = Counter(t.category for t in texts)
    return Sanity(
        requests=len(texts),
        repetitive=sum(repeats(t.output_ids) for t in texts),
        duplicates=len(texts) - len(prompts),
        few={name: count for name, count in sorted(counts.items()) if count < LEAST},
    )


def repeats(tokens: Int32Array) -> bool:
    """Whether the last half of a text goes through one cycle of tokens three times or more."""
    if len(tokens) < SHORTEST_TEXT:
        return False
    half = tokens[len(tokens) // 2 :]
    longest = min(LONGEST_CYCLE, len(half) // 3)
    return any(bool((half[period:] == half[:-period]).all()) for period in range(1, longest + 1))
