"""What the blocks of a policy document share: strictness, limits, small types, labels."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

GAMMA_LIMIT = 64
"""Largest window any policy may ask for."""
WIDTH_LIMIT = 32
"""Most children a node of a draft tree may have, and most nodes expanded per level."""
NODE_LIMIT = 256
"""Most drafted nodes a tree may have in one verification."""
POOL_LIMIT = 8192
"""Most candidates a tree may grow before selection."""
EXPANDED_LIMIT = 512
"""Most nodes that a tree may have read by the draft, beside the root: each holds a place in the
draft's cache during a round."""

WITHOUT_DISTRIBUTIONS = ("none", "ngram")
"""What proposes without a model: no probabilities to stop by, one continuation, no output head."""
BATCH_LIMIT = 65536
"""Largest batch size that a window may name."""

Gamma = Annotated[int, Field(ge=0, le=GAMMA_LIMIT)]
BatchSize = Annotated[int, Field(ge=1, le=BATCH_LIMIT)]
Context = Annotated[int, Field(ge=1, le=2**31 - 1)]
ByBatch = Annotated[dict[BatchSize, Gamma], Field(max_length=64)]
"""Tokens to draft by the batch size from which on they are drafted."""
GammaMax = Annotated[int, Field(ge=1, le=GAMMA_LIMIT)]
Probability = Annotated[float, Field(ge=0.0, le=1.0)]
Width = Annotated[int, Field(ge=1, le=WIDTH_LIMIT)]
Name = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^\P{C}*$")]
"""Of a draft: characters that can be printed."""
Artifact = Name
Budget = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class Search:
    """How a tuning searches a parameter: a number from ``low`` to ``high`` (``log``: evenly in its
    logarithm), or one of ``choices``. ``name``: the parameter's name in a study, by default the
    field's. ``only``: (field, value) of the block without which the parameter does nothing."""

    low: float = 0.0
    high: float = 0.0
    log: bool = False
    choices: tuple[Any, ...] = ()
    name: str = ""
    only: tuple[str, Any] | None = None


@dataclass(frozen=True)
class Fitted:
    """A parameter whose values are fitted (an artifact, a tree): a tuning tries the block where
    there are some."""


class Block(BaseModel):
    """A part of a document: frozen, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    shown: ClassVar[tuple[str, ...]] = ()
    """What a label shows of a block even where it is the default."""
    reads_draft: ClassVar[bool] = False
    """Whether the block acts on a draft's distributions: without any it is inert."""
    scales_growth: ClassVar[bool] = False
    """Whether the block acts on trees that grow with their probabilities: without, it is inert."""

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        keys = data if isinstance(data, Mapping) else ()
        if unknown := next((str(key) for key in keys if key not in cls.model_fields), None):
            fields = sorted(cls.model_fields)
            near = difflib.get_close_matches(unknown, fields, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(fields)}"
            raise ValueError(f"unknown key {unknown!r}; {hint}")
        return data

    @classmethod
    def inert(cls, draft: str, growth: type[Block]) -> bool:
        """Whether the block does nothing with a draft and a growth."""
        without = cls.reads_draft and draft in WITHOUT_DISTRIBUTIONS
        return without or (cls.scales_growth and not issubclass(growth, TreeGrowth))

    @classmethod
    def nearest(cls, values: dict[str, Any]) -> dict[str, Any]:
        """The values nearest to searched ones that the block allows together."""
        return values

    def label(self) -> str:
        """``kind(key=value, ...)`` for tables, of what is always shown and what is no default."""
        differs = {*self.shown, *self.model_dump(exclude_defaults=True)} - {"kind", "artifact"}
        items = ((key, getattr(self, key)) for key in type(self).model_fields if key in differs)
        values = (f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in items)
        return f"{getattr(self, 'kind', type(self).__name__.lower())}({', '.join(values)})"


class FixedWindow(Block):
    """A constant window: ``gamma`` tokens are drafted every round (0: none)."""

    shown = ("gamma",)
    kind: Literal["fixed"] = "fixed"
    gamma: Annotated[Gamma, Search(1, 16)] = 4

    @property
    def gamma_max(self) -> int:
        """The longest window of any round."""
        return self.gamma


class ByLoadWindow(Block):
    """A constant window for each load: ``gamma`` maps least batch sizes (requests in a step) to the
    tokens then drafted, as ``{"1": 5, "4": 3, "16": 0}``: 5 up to 3 requests, none from 16 on.
    ``contexts`` has other such tables from a context length on (the mean of the running requests').
    The native decoder goes by the number of requests alone."""

    kind: Literal["by_load"]
    gamma: ByBatch
    contexts: Annotated[dict[Context, ByBatch], Field(max_length=8)] = {}

    @model_validator(mode="after")
    def _from_1(self) -> Self:
        if any(1 not in table for table in (self.gamma, *self.contexts.values())):
            raise ValueError('maps batch sizes from "1" on to windows: {"1": 5, "4": 3, "16": 0}')
        return self

    @field_validator("gamma", "contexts")
    @classmethod
    def _sorted(cls, value: dict[int, Any]) -> dict[int, Any]:
        return dict(sorted(value.items()))

    @field_validator("contexts")
    @classmethod
    def _sorted_tables(cls, contexts: dict[int, dict[int, int]]) -> dict[int, dict[int, int]]:
        return {least: dict(sorted(table.items())) for least, table in contexts.items()}

    def __hash__(self) -> int:
        return hash(self.label())

    def label(self) -> str:
        def shown(table: dict[int, int]) -> str:
            return ", ".join(f"{size}: {gamma}" for size, gamma in table.items())

        later = (f"; from {least} tokens {shown(t)}" for least, t in self.contexts.items())
        return f"by_load({shown(self.gamma)}{''.join(later)})"

    def at(self, batch: int, context: float = 0) -> int:
        """The window of a step of so many requests, at least 1, whose contexts have that mean."""
        tables = {0: self.gamma, **self.contexts}
        table = tables[max(least for least in tables if least <= context)]
        return table[max(size for size in table if size <= batch)]

    @property
    def gamma_max(self) -> int:
        """The longest window of any load."""
        return max(max(table.values()) for table in (self.gamma, *self.contexts.values()))


class AdaptiveWindow(Block):
    """What windows share that change from round to round."""

    shown = ("gamma_max",)
    gamma_max: Annotated[GammaMax, Search(1, 16, name="gamma")] = 8
    gamma_initial: Annotated[Gamma | None, Search(1, 8)] = Field(
        default=None,
        description="first window of a request; default: half of gamma_max, rounded up",
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        least = getattr(self, "gamma_min", 0)
        if least > self.gamma_max:
            raise ValueError(f"gamma_min {least} exceeds gamma_max {self.gamma_max}")
        if self.gamma_initial is not None and not least <= self.gamma_initial <= self.gamma_max:
            raise ValueError(
                f"gamma_initial {self.gamma_initial} is not between {least} and gamma_max "
                f"{self.gamma_max}"
            )
        return self

    @classmethod
    def nearest(cls, values: dict[str, Any]) -> dict[str, Any]:
        most, least = values["gamma_max"], values.get("gamma_min", 0)
        limits = {"gamma_min": min(least, most)} if "gamma_min" in values else {}
        first = min(max(values["gamma_initial"], least), most)
        return {**values, **limits, "gamma_initial": first}

    @property
    def first(self) -> int:
        """The window of a request's first round."""
        half = max((self.gamma_max + 1) // 2, getattr(self, "gamma_min", 0))
        return half if self.gamma_initial is None else self.gamma_initial


class ChainGrowth(Block):
    """One path: each drafted token follows the one before."""

    kind: Literal["chain"] = "chain"


class TreeGrowth(Block):
    """What dynamic trees share. ``score`` is the estimate of acceptance that ranks nodes:
    ``probability`` is the product of the draft's probabilities (EAGLE-2), ``coupled`` a softmax
    over the perturbed gaps of siblings, ``auto`` the first at temperature 0 and the second above.
    """

    shown: ClassVar[tuple[str, ...]] = ("width",)
    reads_draft = True
    width: Annotated[Width, Search(1, 16)] = 8
    score: Annotated[
        Literal["auto", "probability", "coupled"], Search(choices=("auto", "coupled"))
    ] = "auto"
    sharpness: Annotated[
        float, Field(gt=0.0, le=16.0), Search(0.75, 6.0, log=True, only=("score", "coupled"))
    ] = 1.5

    def is_coupled(self, *, sampled: bool) -> bool:
        """Whether nodes are ranked by the coupled score; ``sampled``: the temperature is above
        0."""
        return self.score == "coupled" or (self.score == "auto" and sampled)


class FullShortlist(Block):
    """The draft evaluates its whole output head."""

    kind: Literal["full"] = "full"
