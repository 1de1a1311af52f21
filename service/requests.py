"""What clients may ask for, as OpenAI has it. A value that is not served and would change the text
is refused by name; a neutral one is accepted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"], []),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"}, {}),
    "stop_token_ids": ([],),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}
"""What is not served: the values, beside null, that change no text."""
DEFAULT_MAX_TOKENS = 16
"""New tokens of a completion that says no number, as OpenAI has it."""
IDLE = (
    *("metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user"),
    "prompt_cache_retention",
)
"""Keys that change no text, whatever they say."""
CHOICES_LIMIT = 64
LABEL_CHARACTERS = 100


class Body(BaseModel):
    """A part of a request; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def _storable(text: str) -> str:
    if "\0" in text or any("\ud800" <= c <= "\udfff" for c in text):
        raise ValueError("no text (NUL, or no UTF-8)")
    return text


Text = Annotated[str, AfterValidator(_storable)]
Stop = Annotated[Text, Field(min_length=1, max_length=1000)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=2**31 - 1)]], Field(min_length=1)]
Logprobs = Annotated[int, Field(ge=0, le=20)]


def _same(value: Any, neutral: Any) -> bool:
    """Whether a value is a neutral one: to Python 1 is True, too."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


class StreamOptions(Body):
    """What a stream says beside its text."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Recorded(Body):
    """How a request is recorded, as at a vLLM server with the agent."""

    spectune: Literal["off"] | None = None
    spectune_label: Annotated[Text, Field(max_length=LABEL_CHARACTERS)] | None = None


class Generation(Body, ABC):
    """What both kinds of requests say."""

    model: Text
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    n: Annotated[int, Field(ge=1, le=CHOICES_LIMIT)] | None = None
    temperature: Annotated[float, Field(ge=0, le=10)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    vllm_xargs: Recorded | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, values: Any) -> Any:
        """Leaves out what changes no text. Raises ValueError for what would and is not served."""
        if not isinstance(values, dict):
            return values
        kept = {}
        for key, value in values.items():
            if key in NEUTRAL:
                if value is not None and not any(_same(value, of) for of in NEUTRAL[key]):
                    raise ValueError(f"{key} is not served; leave it out")
            elif key not in IDLE:
                kept[key] = value
        return kept

    @property
    @abstractmethod
    def id_prefix(self) -> str:
        """How the ids of its answers begin."""

    @property
    def most_tokens(self) -> int | None:
        """The most new tokens of a text; None where it says no number."""
        return self.max_tokens

    @property
    @abstractmethod
    def best_tokens(self) -> int | None:
        """How many of the most probable tokens come with each; None: no probabilities."""

    @property
    def echoes(self) -> bool:
        """Whether its texts begin with their prompts."""
        return False

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return tuple([self.stop] if isinstance(self.stop, str) else self.stop or [])

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @model_validator(mode="after")
    def _check(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only with stream")
        return self


class CompletionRequest(Generation):
    """Asks for what follows a prompt, or each of several."""

    prompt: Text | TokenIds | list[Text] | list[TokenIds]
    echo: bool | None = None
    logprobs: Logprobs | None = None

    @property
    def id_prefix(self) -> str:
        return "cmpl"

    @property
    def most_tokens(self) -> int:
        return self.max_tokens or DEFAULT_MAX_TOKENS

    @property
    def best_tokens(self) -> int | None:
        return self.logprobs

    @property
    def echoes(self) -> bool:
        return bool(self.echo)

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt."""
        prompt: Any = self.prompt
        is_single = isinstance(prompt, str) or isinstance(prompt[0], int)
        return [prompt] if is_single else [*prompt]

    @model_validator(mode="after")
    def _check_prompt(self) -> CompletionRequest:
        if not self.prompt:
            raise ValueError("prompt: it is empty")
        return self


class TextPart(Body):
    """A part of a message's content."""

    type: Literal["text"]
    text: Text


class Message(Body):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(min_length=1)]
    name: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, values: Any) -> Any:
        """Leaves out what a message does not say."""
        if not isinstance(values, dict):
            return values
        for key in ("tool_calls", "tool_call_id", "function_call", "audio", "refusal"):
            if values.get(key):
                raise ValueError(f"{key} is not served; leave it out")
        return {key: value for key, value in values.items() if value not in (None, [])}


class ChatRequest(Generation):
    """Asks for the next message of a conversation."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None

    @property
    def id_prefix(self) -> str:
        return "chatcmpl"

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def best_tokens(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: only with logprobs")
        return self
