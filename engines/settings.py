"""What engines' settings for speculation may say, after their documentation, and what they mean.

vLLM 0.32 (``--speculative-config``), SGLang 0.5.23 (``--speculative-*`` and its adaptive
configuration) and llama.cpp b11549 (``--spec-*``). They are checked when they are made and when
they are read; what breaks a rule raises ValueError (pydantic's ValidationError is one).
"""

from __future__ import annotations

import json
import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal, Self

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
    :meth:`line` serves with them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    @abstractmethod
    def of(cls, drafting: Drafting) -> Self: ...

    @abstractmethod
    def drafting(self) -> Drafting: ...

    @classmethod
    @abstractmethod
    def line(cls, settings: Self | None, target: str) -> str: ...

    def document(self) -> dict[str, object]:
        """As JSON has it; what is not set is left out."""
        return self.model_dump(mode="json", exclude_none=True)


class VllmSettings(Settings):
    """vLLM's ``--speculative-config``."""

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
    def of(cls, drafting: Drafting) -> Self:
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

    def drafting(self) -> Drafting:
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
    def of(cls, drafting: Drafting) -> Self:
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

    def drafting(self) -> Drafting:
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


def _flags(said: Mapping[str, object]) -> list[str]:
    return [f"--{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in said.items()]


class LlamaCppSettings(Settings):
    """llama.cpp's ``--spec-*`` arguments. Models are GGUF files."""

    spec_type: Literal["draft-simple", "draft-eagle3"]
    spec_draft_model: str
    spec_draft_n_max: Positive
    spec_draft_n_min: Literal[0] = 0
    spec_draft_p_min: Literal[0] = 0

    @classmethod
    def of(cls, drafting: Drafting) -> Self:
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

    def drafting(self) -> Drafting:
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
    "llamacpp": LlamaCppSettings,
}
