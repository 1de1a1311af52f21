"""What a pair needs to read prompts and write texts: tokenizer, ends, context."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from spectune.runtime.checkpoints import (
    checkpoint,
    has_tokenizer,
    is_head,
    read_config,
    scaled_positions,
    translated,
)
from spectune.runtime.pair import PairSpec
from spectune.runtime.text_ends import end_tokens
from spectune.traces.errors import PairError, WorkloadError
from spectune.traces.schema import Request, message_texts

POSITIONS = ("max_position_embeddings", "n_positions")
"""What configurations call the longest sequence of a model."""
PARTIAL: Final = "\ufffd"
"""What a tokenizer writes for bytes that are no character, or not yet."""
CHARACTER_BYTES: Final = 4
"""Most bytes of a character."""


@dataclass(frozen=True)
class Context:
    """The longest sequence, in tokens, that some models hold, and which of them holds no more."""

    positions: int
    model: str

    def __str__(self) -> str:
        return f"the context of {self.positions} of {self.model}"


@dataclass
class TextCodec:
    """Reads prompts and writes texts: a target's tokenizer, the tokens that end its texts, the
    longest sequence of the target and of its drafts, by name, and the number of tokens that the
    target's embedding has rows for, which may be fewer than the tokenizer's."""

    tokenizer: Any
    eos_ids: frozenset[int]
    positions: tuple[int, Mapping[str, int]]
    num_embeddings: int

    def context(self, drafts: Collection[str] | None = None) -> Context:
        """The longest sequence that the target and these drafts hold; without ``drafts``, all of
        the pair's. Prompt lookup, heads and no draft hold what the target does."""
        target, by_draft = self.positions
        names = [name for name in by_draft if drafts is None or name in drafts]
        contexts = [Context(by_draft[name], f"draft {name!r}") for name in names]
        return min([Context(target, "the target"), *contexts], key=lambda one: one.positions)

    @property
    def max_positions(self) -> int:
        """Longest sequence that every model of the pair can hold."""
        return self.context().positions

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return _templated(self.tokenizer)

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt as the target sees it (with the tokenizer's own special tokens)."""
        return list(self.tokenizer(text)["input_ids"])

    def encode_request(self, request: Request, *, chat: bool) -> list[int]:
        """Token ids of a request: its own, or those of its conversation, in the tokenizer's chat
        template where there is one and ``chat`` is set, else with a blank line between messages.
        Raises WorkloadError, naming the request, for a conversation without the template that
        ``chat`` asks for, for whatever template or tokenizer raises, for a prompt without tokens,
        and for a token that the target's embedding has no row for."""
        ids = list(request.ids) or self._encoded(request, chat=chat and not request.is_plain)
        if not ids:
            raise WorkloadError(f"request {request.id}: the prompt has no tokens")
        if (most := max(ids)) >= self.num_embeddings:
            name = f" ({self.tokenizer.convert_ids_to_tokens(most)!r})" if not request.ids else ""
            raise WorkloadError(
                f"request {request.id}: token {most}{name} of its prompt is none of the target's "
                f"{self.num_embeddings}"
            )
        return ids

    def _encoded(self, request: Request, *, chat: bool) -> list[int]:
        if chat and _templated(self.tokenizer):
            leave = "--set sampling.chat=false leaves it out"
            place = f"request {request.id}: the target's chat template ({leave})"
            with translated(place, WorkloadError):
                out = self.tokenizer.apply_chat_template(
                    _messages(request, self.tokenizer),
                    **{"add_generation_prompt": True, **request.template},
                    return_dict=True,
                )
                return list(out["input_ids"])
        if chat and _needs_template(request):
            raise _no_template(request)
        with translated(f"request {request.id}: the target's tokenizer", WorkloadError):
            return self.encode("\n\n".join("\n".join(message_texts(m)) for m in request.chat()))

    def text(self, ids: Collection[int]) -> str:
        """Decoded text, special tokens left out."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def stopper(self, strings: tuple[str, ...]) -> Callable[[list[int], list[int]], int | None]:
        """Finds the first new token at which one of ``strings`` has appeared in the decoded
        output; those that hold a special token, in the output with its special tokens. What is
        found depends on the tokens up to there alone, not on how many are new at once: each is
        looked at, as bytes that follow may undo a character."""
        window = max(len(s.encode()) for s in strings) + 8  # a token holds a byte at least
        added = self.tokenizer.added_tokens_decoder.values()
        special = [str(token) for token in added if token.special]
        marked = [s for s in strings if any(token in s for token in special)]
        plain = [s for s in strings if s not in marked]

        def appears(ids: list[int]) -> bool:
            # Bytes that begin within a character make nothing of those that follow.
            for size in range(window, window + CHARACTER_BYTES):
                part = ids[-size:]
                text = self.text(part) if plain else ""
                with_special = str(self.tokenizer.decode(part)) if marked else ""
                if any(s in text for s in plain) or any(s in with_special for s in marked):
                    return True
                if size >= len(ids) or not (text or with_special).startswith(PARTIAL):
                    break
            return False

        def ends_at(output: list[int], new: list[int]) -> int | None:
            ids = output[-(window + CHARACTER_BYTES) :]
            return next((i for i in range(1, len(new) + 1) if appears(ids + new[:i])), None)

        return ends_at


def check_conversations(target: str, requests: Iterable[Request], *, chat: bool) -> None:
    """Raises WorkloadError for the conversation that :meth:`TextCodec.encode_request` refuses.
    Reads the target's tokenizer, and that only where there are conversations and a template."""
    first = next((r for r in requests if chat and _needs_template(r)), None)
    if first is None or not has_tokenizer(checkpoint(target)):  # told where it is loaded
        return
    tokenizer = None if lacks_template(target) else tokenizer_of(target)
    if not _templated(tokenizer):
        raise _no_template(first)


def lacks_template(target: str) -> bool:
    """Whether no file of a checkpoint holds a chat template; reads no tokenizer."""
    folder = checkpoint(target)
    files = ("chat_template.jinja", "additional_chat_templates")
    named = ("tokenizer_config.json", *_OF_PROCESSORS)
    return not any((folder / name).exists() for name in files) and not any(
        read_config(folder, name).get("chat_template") for name in named
    )


_OF_PROCESSORS = ("chat_template.json", "processor_config.json")
"""Files of a processor that may hold a template."""


def _templated(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def _needs_template(request: Request) -> bool:
    is_talk = len(request.messages) > 1
    return not (request.is_plain or request.ids) and (is_talk or bool(request.template))


def _no_template(request: Request) -> WorkloadError:
    count = len(request.messages)
    needs, instead = f"a conversation of {count} messages", "puts blank lines between"
    if count < 2:
        keys = ", ".join(request.template)
        needs, instead = f"what it says to a chat template ({keys})", "leaves that out"
    return WorkloadError(
        f"request {request.id}: {needs} needs a chat template, and the target's tokenizer has "
        f"none; --set sampling.chat=false {instead}"
    )


_THROUGH_PARTS = re.compile(r"""\bfor\s+\w+\s+in\s+(\w+\.|\w+\[['"])?content\b""")
"""Where a template goes through the parts of a message's content."""
_OF_A_TEXT = re.compile(r"\bis\s+(not\s+)?string\b")
"""Where such a template takes a text, too."""


def _messages(request: Request, tokenizer: Any) -> list[dict[str, Any]]:
    """A request as its template reads it. A message of several texts is handed over in parts where
    the template goes through parts, and else as vLLM writes it, a line break between them."""
    template = str(tokenizer.chat_template)
    takes_parts = _THROUGH_PARTS.search(template) is not None
    takes_text = not takes_parts or _OF_A_TEXT.search(template) is not None
    messages = []
    for message in request.chat():
        texts = message_texts(message)
        content: Any = "\n".join(texts)
        if takes_parts and (len(texts) > 1 or not takes_text):
            content = [{"type": "text", "text": text} for text in texts]
        messages.append({**message, "content": content})
    return messages


def load_codec(spec: PairSpec) -> TextCodec:
    """The codec of a pair, no model of which is loaded. Raises PairError."""
    spec.check()
    tokenizer = target_tokenizer(spec)
    positions = {}
    for name, path in spec.drafts.items():
        if (draft_tokenizer := tokenizer_of(path)) is not None:
            shared_tokens(name, draft_tokenizer, tokenizer)
        if not is_head(path) and (longest := positions_of(path)) is not None:
            positions[name] = longest
    longest = positions_of(spec.target)
    if longest is None and not positions:
        raise PairError(f"target: the config.json of {spec.target} says no max_position_embeddings")
    most = min(positions.values()) if longest is None else longest
    with translated(f"config.json of {spec.target}"):
        rows = int(text_config(spec.target).get("vocab_size") or len(tokenizer))
    return TextCodec(tokenizer, end_tokens(spec.target, tokenizer), (most, positions), rows)


def text_config(path: str) -> dict[str, Any]:
    """The configuration of a checkpoint's language model."""
    config = read_config(checkpoint(path))
    with translated(f"config.json of {path}"):
        return config | (config.get("text_config") or {})


def positions_of(path: str) -> int | None:
    """The longest sequence that servers (vLLM 0.32) accept for a model, as its configuration says;
    None where it says none."""
    config = text_config(path)
    with translated(f"config.json of {path}"):
        lengths = [int(config[key]) for key in POSITIONS if config.get(key) is not None]
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        # Gemma 3 says the length that its scaling leads to.
        if lengths and "gemma3" not in str(config.get("model_type")):
            return scaled_positions(min(lengths), rope)
    return min(lengths, default=None)


def tokenizer_of(path: str) -> Any:
    """A checkpoint's own tokenizer, None where it has none. Raises PairError."""
    from transformers import AutoTokenizer

    folder = checkpoint(path)
    if not has_tokenizer(folder):
        return None
    with translated(f"tokenizer of {path}"):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        if not _templated(tokenizer):
            tokenizer.chat_template = _processor_template(folder)
    return tokenizer


def _processor_template(folder: Path) -> Any:
    """The chat template in the files of a checkpoint's processor, which no tokenizer reads; None
    where they have none."""
    for name in _OF_PROCESSORS:
        template = read_config(folder, name).get("chat_template")
        if isinstance(template, list):  # several, by name
            return {each["name"]: each["template"] for each in template}
        if template:
            return template
    return None


def target_tokenizer(spec: PairSpec) -> Any:
    """The tokenizer of a pair. Raises PairError where the target has none."""
    tokenizer = tokenizer_of(spec.target)
    if tokenizer is None:
        raise PairError(
            f"target: no tokenizer at {spec.target} (tokenizer.json or the like is expected beside "
            "the weights)"
        )
    return tokenizer


def ordinary_tokens(tokenizer: Any) -> int:
    """The tokens of a vocabulary without those that were added behind it (reserved, special)."""
    added = tokenizer.added_tokens_decoder
    return 1 + max((n for n in tokenizer.get_vocab().values() if n not in added), default=-1)


def shared_tokens(name: str, draft: Any, target: Any) -> tuple[frozenset[int] | None, str]:
    """Ids that are the same token to a draft's tokenizer and the target's (None: all are), and a
    line on the others, empty where there are none: tokens that were added to a vocabulary
    (reserved, special) may differ or be missing. Raises PairError where an ordinary token
    differs."""
    here, there = ({n: token for token, n in t.get_vocab().items()} for t in (draft, target))
    different = [n for n in sorted({*here, *there}) if here.get(n) != there.get(n)]
    if not different:
        return None, ""

    def tokens(n: int) -> str:
        both = [repr(vocab[n]) if n in vocab else "no token" for vocab in (here, there)]
        return f"{both[0]} there and {both[1]} in the target's"

    added, added_there = draft.added_tokens_decoder, target.added_tokens_decoder
    for n in different:
        if (n in here and n not in added) or (n in there and n not in added_there):
            raise PairError(
                f"draft {name!r} has another vocabulary than the target: token {n} is {tokens(n)}; "
                "a draft must share the target's tokenizer (added tokens may differ)"
            )
    return frozenset({*here} - {*different}), (
        f"{name} never proposes {len(different)} added tokens that it does not share with the "
        f"target (first: {different[0]}, {tokens(different[0])})"
    )
