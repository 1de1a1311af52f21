"""What a schedule tells its runs: the keyword arguments of a tuning, as a JSON document that is
checked when it is added and again before it is run. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from spectune.optimizer.deployment import check_deployment
from spectune.optimizer.inputs import load_workload
from spectune.optimizer.schedule.times import ScheduleError, parse_duration
from spectune.traces.schema import Verifier, Workload
from spectune.traces.store.publications import DEFAULT_DEPLOYMENT

SEARCHED = ("trials", "gamma_max", "tree_width", "tree_depth", "finalists")
SAMPLED = ("temperature", "top_k", "top_p", "seed")
DECODED = ("max_new_tokens", "verifier", "stop_strings", "chat")


class TuneSettings(BaseModel):
    """The pair's document, the texts, and how they are decoded and searched. With ``recorded``, a
    duration, texts are sampled from what was recorded within it, and no workload is decoded. With
    ``engine`` and ``arrivals`` what that engine recorded last is tuned for a load; ``ttft`` and
    ``tpot`` in seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pair: dict[str, Any]
    device: str = "auto"
    dtype: str = "auto"
    threads: int | None = None
    recorded: str | None = None
    sample: int = 200
    engine: Literal["vllm", "openvino"] | None = None
    arrivals: str | None = None
    objective: Literal["throughput", "tpot", "goodput"] = "throughput"
    ttft: float | None = None
    tpot: float | None = None
    workload: tuple[str, ...] = ("demo",)
    column: str | None = None
    categories: tuple[str, ...] = ()
    limit: int | None = None
    limit_seed: int = 0
    turns: Literal["first", "all"] | None = None
    bad_rows: Literal["few", "error", "skip"] = "few"
    overlong: Literal["error", "skip", "truncate"] = "error"
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    max_new_tokens: int = 128
    verifier: Verifier = "coupled"
    stop_strings: tuple[str, ...] = ()
    chat: bool = True
    trials: int = 400
    gamma_max: int = 16
    tree_width: int = 8
    tree_depth: int = 8
    finalists: int = 4
    budget: str = "80s"
    fresh: bool = False
    deployment: str = DEFAULT_DEPLOYMENT

    _durations = field_validator("recorded", "budget")(lambda text: text and _duration(text))

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> TuneSettings:
        """Raises ScheduleError for settings that no run could use, PolicyError for a deployment
        that has no name."""
        try:
            settings = cls.model_validate(dict(document))
        except ValidationError as error:
            where, problem = error.errors()[0]["loc"], error.errors()[0]["msg"]
            problem = problem.removeprefix("Value error, ")
            raise ScheduleError(f"settings: {'.'.join(map(str, where))}: {problem}") from None
        check_deployment(settings.deployment)
        return settings

    def load_workload(self) -> Workload:
        """Reads the workload. Raises WorkloadError."""
        names = ("limit", "categories", "column", "limit_seed", "bad_rows", "turns")
        return load_workload(list(self.workload), **{name: getattr(self, name) for name in names})


def _duration(text: str) -> str:
    try:
        parse_duration(text)
    except ScheduleError as error:
        raise ValueError(str(error)) from None
    return text
