"""Executed texts beside others of the same requests: how many differ, and how many of
autoregression's own do when it is repeated."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ComparedTexts:
    """``differ`` of ``compared`` texts differ, computed in ``dtype``; of the texts of
    autoregression that were executed again at the same ``batch`` (what that is, in words),
    ``repeats_differ`` of ``repeats`` differ from its first."""

    differ: int
    compared: int
    dtype: str
    repeats_differ: int = 0
    repeats: int = 0
    batch: str = "at the same batch"

    def __add__(self, other: ComparedTexts) -> ComparedTexts:
        return replace(
            self,
            differ=self.differ + other.differ,
            compared=self.compared + other.compared,
            repeats_differ=self.repeats_differ + other.repeats_differ,
            repeats=self.repeats + other.repeats,
        )

    def __str__(self) -> str:
        if not self.compared:
            return "no texts were compared"
        again = "autoregression was not repeated"
        if self.repeats:
            again = f"autoregression repeated {self.batch}: {self.repeats_differ} of {self.repeats}"
        return f"{self.differ} of {self.compared} texts differ ({self.dtype}; {again})"
