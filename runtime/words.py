"""What a pair needs to read prompts and write texts, where another engine runs its models:
tokenizer, ends, context. Loads no weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from spectune.runtime.pair import (
    PairSpec,
    checkpoint,
    expanded,
    is_head,
    is_local,
    model_config,
    translated,
)
from spectune.traces.errors import PairError, WorkloadError
from spectune.traces.files import read_json
from spectune.traces.schema import Request

POSITIONS = ("max_position_embeddings", "n_positions")
"""What configurations call the longest sequence of a model."""


class Texts:
    """What a pair's ``tokenizer`` reads and writes."""

    tokenizer: Any

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt as the target sees it (with the tokenizer's own special tokens)."""
        return list(self.tokenizer(text)["input_ids"])

    def encode_request(self, request: Request, *, chat: bool) -> list[int]:
        """Token ids of a request's first turn or conversation, in the chat template when the
        tokenizer has one and ``chat`` is set.

        Without ``chat`` a conversation's texts stand one after the other, a blank line between
        them. Raises WorkloadError for one where ``chat`` is set and there is no template.
        """
        texts = request.turns if request.roles else request.turns[:1]
        if chat and _templated(self.tokenizer):
            said = zip(request.roles or ("user",), texts, strict=True)
            messages = [{"role": role, "content": text} for role, text in said]
            what = f"request {request.id}: the target's chat template (--no-chat leaves it out)"
            with translated(what):
                out = self.tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, return_dict=True
                )
            return list(out["input_ids"])
        if chat and len(texts) > 1:
            raise _no_template(request)
        return self.encode("\n\n".join(texts))

    def text(self, ids: Collection[int]) -> str:
        """Decoded text, special tokens left out."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def stopper(self, strings: tuple[str, ...]) -> Callable[[list[int], list[int]], int | None]:
        """Finds the first new token at which one of ``strings`` has appeared in the decoded
        output."""
        longest = max(len(s.encode()) for s in strings)  # a token holds a byte at least

        def ends_at(output: list[int], new: list[int]) -> int | None:
            tail = output[-(longest + 8) :]
            for i in range(1, len(new) + 1):
                text = self.text(tail + new[:i])
                if any(s in text for s in strings):
                    return i
            return None

        return ends_at


@dataclass(frozen=True)
class Words(Texts):
    """A target's tokenizer, the tokens that end its texts, and the longest sequence that every
    model of its pair holds."""

    tokenizer: Any
    eos_ids: frozenset[int]
    max_positions: int


def check_conversations(target: str, requests: Iterable[Request], *, chat: bool) -> None:
    """Raises WorkloadError for the conversation that :meth:`Texts.encode_request` refuses. Reads
    the target's tokenizer, and that only where there are conversations."""
    first = next((r for r in requests if chat and r.roles and len(r.turns) > 1), None)
    if first is not None and (found := tokenizer_of(target)) is not None and not _templated(found):
        raise _no_template(first)


def _templated(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def _no_template(request: Request) -> WorkloadError:
    return WorkloadError(
        f"request {request.id}: a conversation of {len(request.turns)} messages needs a chat "
        "template, and the target's tokenizer "
        "has none; --no-chat puts a blank line between its messages instead"
    )


def load_words(spec: PairSpec) -> Words:
    """The words of a pair whose models lie in folders. Raises PairError."""
    spec.check()
    found = target_tokenizer(spec)
    for name, path in spec.drafts:
        check_tokenizer(name, path, found)
    eos = eos_of(spec.target) or ends_of(found.eos_token_id)
    models = (spec.target, *(path for _, path in spec.drafts if not is_head(path)))
    configs = [model_config(folder) for folder in map(checkpoint, models) if folder is not None]
    configs = [c | (c.get("text_config") or {}) for c in configs]
    sizes = [c[name] for c in configs for name in POSITIONS if c.get(name) is not None]
    if not sizes:
        raise PairError(
            f"target: {spec.target} says no max_position_embeddings, or is no folder; give a folder"
        )
    return Words(found, eos, int(min(sizes)))


def eos_of(path: str) -> frozenset[int]:
    """The tokens that end a target's texts, as its generation_config says, else its config; none
    where they say none."""
    folder = checkpoint(path)
    if folder is not None:
        for name in ("generation_config.json", "config.json"):
            found = model_config(folder, name) if os.path.isfile(folder / name) else {}
            if found.get("eos_token_id") is not None:
                return ends_of(found["eos_token_id"])
    return frozenset()


def ends_of(eos: Any) -> frozenset[int]:
    """A configuration's ``eos_token_id``, one, several or none, as a set."""
    several = eos if isinstance(eos, list) else [] if eos is None else [eos]
    return frozenset(int(token) for token in several)


def tokenizer_of(path: str) -> Any:
    """A checkpoint's own tokenizer, None where it has none. Raises PairError."""
    from transformers import AutoTokenizer

    folder = expanded(path)
    if is_local(path) and not any(folder.glob("tokenizer*")) and not any(folder.glob("vocab*")):
        return None
    with translated(f"tokenizer of {path}"):
        where = folder if is_local(path) else path
        found = AutoTokenizer.from_pretrained(where, trust_remote_code=False)
        if not _templated(found):
            found.chat_template = _processors_template(str(where))
    return found


def _processors_template(path: str) -> Any:
    """The chat template in the files of a checkpoint's processor, which no tokenizer reads; None
    where they have none."""
    from transformers.utils import cached_file

    for name in ("chat_template.json", "processor_config.json"):
        with suppress(OSError):  # as transformers says that there is none
            file = cached_file(path, name)
            template = read_json(file, file, PairError).get("chat_template")
            if isinstance(template, list):  # several, by name
                return {each["name"]: each["template"] for each in template}
            if template:
                return template
    return None


def target_tokenizer(spec: PairSpec) -> Any:
    """The tokenizer of a pair. Raises PairError where the target has none."""
    found = tokenizer_of(spec.target)
    if found is None:
        raise PairError(
            f"target: no tokenizer at {spec.target} (tokenizer.json or the like is expected beside "
            "the weights)"
        )
    return found


def check_tokenizer(name: str, path: str, target: Any) -> None:
    """Raises PairError where the draft at ``path`` has another vocabulary than the target."""
    own = tokenizer_of(path)
    if own is None:
        return
    mine, theirs = own.get_vocab(), target.get_vocab()
    if mine != theirs:
        token = next(t for t in {**theirs, **mine} if mine.get(t) != theirs.get(t))
        raise PairError(
            f"draft {name!r} has another vocabulary than the target: {token!r} is "
            f"{mine.get(token)} there and {theirs.get(token)} "
            "in the target's; a draft must share the target's tokenizer"
        )
