"""What engines' settings for speculation may say, after their documentation, and what they mean.

vLLM 0.32 (``--speculative-config``), SGLang 0.5.23 (``--speculative-*`` and its adaptive
configuration), TensorRT-LLM 1.2 (``speculative_config``) and llama.cpp b11549 (``--spec-*``).
They are checked when they are made and when they are read; what breaks a rule raises ValueError
(pydantic's ValidationError is one).
"""

from __future__ import annotations

import json
import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from spectune.engines.vllm.prompt_lookup import LEAST, MOST
from spectune.runtime.pair import head_algorithm, is_head
from spectune.runtime.policies.blocks import BATCH_LIMIT, ByBatchWindow, FixedWindow

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Size = Annotated[str, Field(pattern="^[1-9][0-9]*$")]
Range = tuple[Positive, Positive, Count]
Window = FixedWindow | ByBatchWindow
Algorithm = Literal["", "eagle", "eagle3"]
ALGORITHMS: dict[str, Algorithm] = {"eagle": "eagle", "eagle3": "eagle3"}

HEADS_ALONE = "SGLang takes steps by batch size with a chain of an EAGLE head alone"
UPPER_BOUNDS = "1.3.0rc8"
"""From this version on ``draft_len_schedule`` has largest batch sizes, before it least ones."""


class VersionError(ValueError):
    """An engine's version is missing where settings depend on it, or is not known."""


@dataclass(frozen=True)
class Drafting:
    """What engines can say of a policy. ``model``: a draft's path, None for prompt lookup.
    ``algorithm``: of an EAGLE head. ``width`` and ``top_n``: EAGLE-2's tree, None for a chain."""

    model: str | None
    algorithm: Algorithm
    window: Window
    width: int | None = None
    top_n: int | None = None

    @property
    def gamma_max(self) -> int:
        return self.window.gamma if isinstance(self.window, FixedWindow) else self.window.gamma_max


def algorithm_of(path: str | None) -> Algorithm:
    """Of the head there; empty for a language model, and for none."""
    return ALGORITHMS[head_algorithm(path)] if path is not None and is_head(path) else ""


def by_batch(gammas: Mapping[int, int]) -> ByBatchWindow:
    """A window of tokens by least batch size."""
    by_size = {str(size): gamma for size, gamma in gammas.items()}
    return ByBatchWindow.model_validate({"kind": "by_batch", "gamma": by_size})


def windowed(gammas: Mapping[int, int] | None, otherwise: int) -> Window:
    """A window by batch size, or of one number."""
    return FixedWindow(gamma=otherwise) if gammas is None else by_batch(gammas)


def schedule_of(window: ByBatchWindow) -> list[list[int]]:
    """A window as ``num_speculative_tokens_per_batch_size``: ``[first size, last size, tokens]``,
    the last of them without an end."""
    sizes = [size for size, _ in window.gamma]
    ends = [*(size - 1 for size in sizes[1:]), max(BATCH_LIMIT, sizes[-1])]
    return [[size, end, gamma] for (size, gamma), end in zip(window.gamma, ends, strict=True)]


class Settings(BaseModel, ABC):
    """Settings of an engine: :meth:`of` says a drafting in them, :meth:`drafting` reads it back,
    :meth:`line` serves with them. ``since``: the first version whose documentation they follow."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    since: ClassVar[str]

    @classmethod
    @abstractmethod
    def of(cls, drafting: Drafting, version: str | None) -> Self: ...

    @abstractmethod
    def drafting(self, version: str | None) -> Drafting: ...

    @classmethod
    @abstractmethod
    def line(cls, settings: Self | None, target: str) -> str: ...

    @classmethod
    def check(cls, version: str | None) -> None:
        """Raises VersionError for a version from before :attr:`since`, or that is none."""
        if version is not None and _numbers(version) < _numbers(cls.since):
            known = f"settings are known from {cls.since} on, not for {version}"
            raise VersionError(f"{known}; without --engine-version they are those of {cls.since}")

    def document(self) -> dict[str, object]:
        """As JSON has it; what is not set is left out."""
        return self.model_dump(mode="json", exclude_none=True)


class VllmSettings(Settings):
    """vLLM's ``--speculative-config``."""

    since = "0.32"
    method: Literal["draft_model", "eagle", "eagle3", "ngram"]
    model: str | None = None
    num_speculative_tokens: Positive
    num_speculative_tokens_per_batch_size: tuple[Range, ...] | None = None
    prompt_lookup_max: Positive | None = None
    prompt_lookup_min: Positive | None = None

    @model_validator(mode="after")
    def _rules(self) -> Self:
        if (self.method == "ngram") != (self.model is None):
            raise ValueError('"model" names the draft, and is left out for method "ngram"')
        ranges = self.num_speculative_tokens_per_batch_size
        if ranges is not None:
            follow = all(b[0] == a[1] + 1 for a, b in pairwise(ranges))
            if not ranges or ranges[0][0] != 1 or not follow:
                raise ValueError(
                    "num_speculative_tokens_per_batch_size begins at 1 and leaves no batch size out"
                )
            most = max(k for *_, k in ranges)
            if most > self.num_speculative_tokens or any(first > last for first, last, _ in ranges):
                raise ValueError("[first, last, tokens] has at most num_speculative_tokens")
        return self

    @classmethod
    def of(cls, drafting: Drafting, version: str | None) -> Self:
        if drafting.width is not None:
            raise ValueError("vLLM has no trees")
        window, looks_up = drafting.window, drafting.model is None
        schedule = schedule_of(window) if isinstance(window, ByBatchWindow) else None
        said = {
            "method": "ngram" if looks_up else drafting.algorithm or "draft_model",
            "model": drafting.model,
            "num_speculative_tokens": drafting.gamma_max,
            "num_speculative_tokens_per_batch_size": schedule,
            "prompt_lookup_max": MOST if looks_up else None,
            "prompt_lookup_min": LEAST if looks_up else None,
        }
        return cls.model_validate(said)

    def drafting(self, version: str | None) -> Drafting:
        ranges = self.num_speculative_tokens_per_batch_size
        gammas = None if ranges is None else {first: gamma for first, _, gamma in ranges}
        window = windowed(gammas, self.num_speculative_tokens)
        return Drafting(self.model, ALGORITHMS.get(self.method, ""), window)

    @classmethod
    def line(cls, settings: Self | None, target: str) -> str:
        start = f"vllm serve {shlex.quote(target)}"
        if settings is None:
            return start
        return f"{start} --speculative-config {shlex.quote(json.dumps(settings.document()))}"


class SglangSlot(BaseModel):
    """What SGLang may draft from a batch size on; a single candidate is what it drafts."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    candidate_steps: Annotated[tuple[Count, ...], Field(min_length=1)]


class SglangSettings(Settings):
    """SGLang's ``--speculative-*`` arguments; ``speculative_adaptive_config`` is what the
    file holds that is named there.

    SGLang looks a batch up by the size of the CUDA graph that it is padded to.
    """

    since = "0.5.23"
    speculative_algorithm: Literal["STANDALONE", "EAGLE", "EAGLE3", "NGRAM"]
    speculative_draft_model_path: str | None = None
    speculative_num_steps: Positive | None = None
    speculative_eagle_topk: Positive | None = None
    speculative_num_draft_tokens: Annotated[int, Field(ge=2)]
    speculative_ngram_max_bfs_breadth: Positive | None = None
    speculative_adaptive: Literal[True] | None = None
    speculative_adaptive_config: dict[Size, SglangSlot] | None = None

    @model_validator(mode="after")
    def _rules(self) -> Self:
        steps, width = self.speculative_num_steps, self.speculative_eagle_topk
        path, slots = self.speculative_draft_model_path, self.speculative_adaptive_config
        if self.speculative_algorithm == "NGRAM":
            if path or steps or width or slots:
                raise ValueError("NGRAM has a number of draft tokens and a breadth alone")
            return self
        if not (path and steps and width) or self.speculative_ngram_max_bfs_breadth:
            raise ValueError("a draft has a path, steps and a top-k")
        most = steps if width == 1 else width + (steps - 1) * width * width
        if not steps <= self.speculative_num_draft_tokens - 1 <= most:
            raise ValueError(f"{steps} steps with top-k {width} draft {steps} to {most} tokens")
        if (slots is None) != (self.speculative_adaptive is None):
            raise ValueError("speculative_adaptive stands with its configuration")
        if slots is not None:
            if self.speculative_algorithm == "STANDALONE" or width != 1:
                raise ValueError(HEADS_ALONE)
            if steps not in {step for slot in slots.values() for step in slot.candidate_steps}:
                raise ValueError("speculative_num_steps is one of the candidate steps")
        return self

    @classmethod
    def of(cls, drafting: Drafting, version: str | None) -> Self:
        steps, window = drafting.gamma_max, drafting.window
        if drafting.model is None:
            if isinstance(window, ByBatchWindow):
                raise ValueError(HEADS_ALONE)
            lookup = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": steps + 1}
            return cls.model_validate({**lookup, "speculative_ngram_max_bfs_breadth": 1})
        said: dict[str, object] = {
            "speculative_algorithm": (drafting.algorithm or "standalone").upper(),
            "speculative_draft_model_path": drafting.model,
            "speculative_num_steps": steps,
            "speculative_eagle_topk": drafting.width or 1,
            "speculative_num_draft_tokens": (drafting.top_n or steps) + 1,
        }
        if isinstance(window, ByBatchWindow):
            slots = {str(size): {"candidate_steps": [gamma]} for size, gamma in window.gamma}
            said |= {"speculative_adaptive": True, "speculative_adaptive_config": slots}
        return cls.model_validate(said)

    def drafting(self, version: str | None) -> Drafting:
        path, width = self.speculative_draft_model_path, self.speculative_eagle_topk
        tokens, slots = self.speculative_num_draft_tokens - 1, self.speculative_adaptive_config
        if self.speculative_algorithm == "NGRAM":
            if self.speculative_ngram_max_bfs_breadth != 1:
                raise ValueError("NGRAM drafts trees; set speculative_ngram_max_bfs_breadth to 1")
            return Drafting(None, "", FixedWindow(gamma=tokens))
        algorithm = ALGORITHMS.get(self.speculative_algorithm.lower(), "")
        gammas = None
        if slots is not None:
            if any(len(slot.candidate_steps) > 1 for slot in slots.values()):
                raise ValueError("with several candidate_steps it adapts by its own rule; give one")
            gammas = {int(size): slot.candidate_steps[0] for size, slot in slots.items()}
        window = windowed(gammas, self.speculative_num_steps or 0)
        if width == 1:
            return Drafting(path, algorithm, window)
        return Drafting(path, algorithm, window, width, tokens)

    @classmethod
    def line(cls, settings: Self | None, target: str) -> str:
        start = f"python -m sglang.launch_server --model-path {shlex.quote(target)}"
        if settings is None:
            return start
        said, first, flags = settings.document(), "", []
        slots = said.pop("speculative_adaptive_config", None)
        if said.pop("speculative_adaptive", None):
            first = f"echo {shlex.quote(json.dumps(slots))} > adaptive.json && "
            flags = ["--speculative-adaptive", "--speculative-adaptive-config adaptive.json"]
        return first + " ".join([start, *_flags(said), *flags])


class TensorRTSettings(Settings):
    """TensorRT-LLM's ``speculative_config``. What ``draft_len_schedule`` means changed in
    :data:`UPPER_BOUNDS`."""

    since = "1.2"
    decoding_type: Literal["DraftTarget", "Eagle", "Eagle3", "NGram"]
    speculative_model: str | None = None
    max_draft_len: Positive
    draft_len_schedule: dict[Positive, Count] | None = None
    max_matching_ngram_size: Positive | None = None
    use_dynamic_tree: Literal[True] | None = None
    dynamic_tree_max_topK: Positive | None = None
    max_total_draft_tokens: Positive | None = None

    @model_validator(mode="after")
    def _rules(self) -> Self:
        if (self.decoding_type == "NGram") != (self.speculative_model is None):
            raise ValueError('"speculative_model" names the draft, and is left out for NGram')
        schedule, width = self.draft_len_schedule, self.dynamic_tree_max_topK
        nodes = self.max_total_draft_tokens
        if schedule is not None and (not schedule or schedule[min(schedule)] != self.max_draft_len):
            raise ValueError("draft_len_schedule begins with max_draft_len")
        if schedule is not None and max(schedule.values()) > self.max_draft_len:
            raise ValueError("draft_len_schedule drafts at most max_draft_len")
        if not (self.use_dynamic_tree is None) == (width is None) == (nodes is None):
            raise ValueError("a dynamic tree has a top-K and a number of tokens")
        if width is not None and nodes is not None:
            least, most = self.max_draft_len, width * self.max_draft_len
            if not least <= nodes <= most:
                raise ValueError(
                    f"depth {least} and top-K {width} have {least} to {most} tokens, not {nodes}"
                )
        return self

    @classmethod
    def of(cls, drafting: Drafting, version: str | None) -> Self:
        said: dict[str, object] = {"decoding_type": "NGram", "max_matching_ngram_size": 3}
        if drafting.model is not None:
            kind = drafting.algorithm.title() or "DraftTarget"
            said = {"decoding_type": kind, "speculative_model": drafting.model}
        said["max_draft_len"] = drafting.gamma_max
        if isinstance(drafting.window, ByBatchWindow):
            said["draft_len_schedule"] = _schedule(drafting.window, cls._by_largest(version))
        if drafting.width is not None:
            said |= {
                "use_dynamic_tree": True,
                "dynamic_tree_max_topK": drafting.width,
                "max_total_draft_tokens": drafting.top_n,
            }
        return cls.model_validate(said)

    def drafting(self, version: str | None) -> Drafting:
        gammas = self.draft_len_schedule
        if gammas is not None and self._by_largest(version):
            lasts = sorted(gammas)
            ends = zip([0, *lasts], [*(gammas[last] for last in lasts), 0], strict=True)
            gammas = {last + 1: gamma for last, gamma in ends if last < BATCH_LIMIT}
        algorithm = ALGORITHMS.get(self.decoding_type.lower(), "")
        return Drafting(
            self.speculative_model,
            algorithm,
            windowed(gammas, self.max_draft_len),
            self.dynamic_tree_max_topK,
            self.max_total_draft_tokens,
        )

    @classmethod
    def _by_largest(cls, version: str | None) -> bool:
        """Whether its schedules have largest batch sizes. Raises VersionError for None."""
        if version is None:
            raise VersionError(
                "TensorRT-LLM reads draft_len_schedule by least batch sizes before "
                f"{UPPER_BOUNDS}, by largest ones from it on; say --engine-version"
            )
        return _numbers(version) >= _numbers(UPPER_BOUNDS)

    @classmethod
    def line(cls, settings: Self | None, target: str) -> str:
        if settings is None:
            return f"trtllm-serve {shlex.quote(target)}"
        said = {"speculative_config": settings.document()}
        written = shlex.quote(json.dumps(said))  # JSON is YAML
        serve = f"trtllm-serve {shlex.quote(target)} --extra_llm_api_options speculative.yaml"
        return f"echo {written} > speculative.yaml && {serve}"


def _flags(said: Mapping[str, object]) -> list[str]:
    return [f"--{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in said.items()]


def _schedule(window: ByBatchWindow, by_largest: bool) -> dict[int, int]:
    """A ``draft_len_schedule``; by largest sizes nothing is drafted beyond the last."""
    if not by_largest:
        return dict(window.gamma)
    lasts = [*(size - 1 for size, _ in window.gamma[1:]), BATCH_LIMIT]
    found = {last: gamma for last, (_, gamma) in zip(lasts, window.gamma, strict=True)}
    if window.gamma[-1][1] == 0:
        del found[BATCH_LIMIT]
    return found


def _numbers(version: str) -> tuple[int, ...]:
    """A version to compare: a release candidate comes before its release. Raises VersionError."""
    found = re.fullmatch(r"[vb]?(\d+)(?:\.(\d+))?(?:\.(\d+))?(?:rc(\d+))?(?:\.post\d+)?", version)
    if found is None:
        raise VersionError(f"{version!r} is no version; write it as {UPPER_BOUNDS}")
    *parts, candidate = found.groups()
    return *(int(part or 0) for part in parts), 1 << 30 if candidate is None else int(candidate)


class LlamaCppSettings(Settings):
    """llama.cpp's ``--spec-*`` arguments. Models are GGUF files."""

    since = "b11549"
    spec_type: Literal["draft-simple", "draft-eagle3"]
    spec_draft_model: str
    spec_draft_n_max: Positive
    spec_draft_n_min: Literal[0] = 0
    spec_draft_p_min: Literal[0] = 0

    @classmethod
    def of(cls, drafting: Drafting, version: str | None) -> Self:
        if drafting.width is not None:
            raise ValueError("llama.cpp has no trees")
        if isinstance(drafting.window, ByBatchWindow):
            raise ValueError("llama.cpp drafts as many tokens at every batch size")
        if drafting.model is None:
            raise ValueError("llama.cpp looks prompts up by rules of its own")
        if drafting.algorithm == "eagle":
            raise ValueError("of EAGLE's heads llama.cpp has EAGLE-3's alone")
        said = {
            "spec_type": "draft-eagle3" if drafting.algorithm else "draft-simple",
            "spec_draft_model": gguf_of(drafting.model),
        }
        return cls.model_validate({**said, "spec_draft_n_max": drafting.gamma_max})

    def drafting(self, version: str | None) -> Drafting:
        algorithm: Algorithm = "eagle3" if self.spec_type == "draft-eagle3" else ""
        window = FixedWindow(gamma=self.spec_draft_n_max)
        return Drafting(self.spec_draft_model.removesuffix(".gguf"), algorithm, window)

    @classmethod
    def line(cls, settings: Self | None, target: str) -> str:
        said = {} if settings is None else settings.document()
        return " ".join([f"llama-server --model {shlex.quote(gguf_of(target))}", *_flags(said)])


def gguf_of(path: str) -> str:
    """The GGUF file of a checkpoint folder, as llama.cpp's own converter is told to name it."""
    return path if path.endswith(".gguf") else f"{path.rstrip('/')}.gguf"


ENGINE_SETTINGS: dict[str, type[Settings]] = {
    "vllm": VllmSettings,
    "sglang": SglangSettings,
    "tensorrt-llm": TensorRTSettings,
    "llamacpp": LlamaCppSettings,
}
