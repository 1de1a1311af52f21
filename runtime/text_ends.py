"""The tokens that end a target's texts, by each of the files that name them."""

from __future__ import annotations

from typing import Any

from spectune.runtime.checkpoints import CONFIG, GENERATION, checkpoint, read_config, translated


def end_tokens(path: str, tokenizer: Any = None) -> frozenset[int]:
    """The tokens that end a target's texts, as in vLLM: those of its generation_config (else of its
    config), and its ``tokenizer``'s. Ids that are no tokens are left out. Raises PairError for what
    is no id."""
    return frozenset(n for ids in _ends(path, tokenizer)[0].values() for n in ids)


def end_notes(path: str, tokenizer: Any) -> list[str]:
    """Lines on :func:`end_tokens`: where the tokenizer's end is not among the others, on ids that
    are no tokens, and where nothing ends a text."""
    ends, ignored = _ends(path, tokenizer)
    lines = [f"ignored: eos_token_id {n} of the target's {at} is no token" for at, n in ignored]
    sources = [(at, ids) for at, ids in ends.items() if ids]
    if len(sources) > 1 and not sources[1][1] <= sources[0][1]:
        told = (
            f"at {n} ({tokenizer.convert_ids_to_tokens(n)!r}) by its {at}"
            for at, ids in sources
            for n in sorted(ids)
        )
        lines.append(f"the target's texts end {', and '.join(told)}: each of these ends a text")
    if not sources:
        lines.append(
            "the target says no eos_token_id: its texts end at max_new_tokens or a stop alone"
        )
    return lines


def _ends(path: str, tokenizer: Any) -> tuple[dict[str, frozenset[int]], list[tuple[str, int]]]:
    """The tokens that end texts, by what says so; and, with the same, ids that are no tokens."""
    configs = {name: read_config(checkpoint(path), name) for name in (GENERATION, CONFIG)}
    configs[CONFIG] = configs[CONFIG] | (configs[CONFIG].get("text_config") or {})
    named = {name: config.get("eos_token_id") for name, config in configs.items()}
    said = [(name, ids) for name, ids in named.items() if ids is not None][:1]
    if (own := getattr(tokenizer, "eos_token_id", None)) is not None:
        said.append(("tokenizer", own))
    with translated(f"target: eos_token_id of {path}"):
        rows = int(configs[CONFIG].get("vocab_size") or 0)
        vocab = max(rows, 0 if tokenizer is None else len(tokenizer))
        ends: dict[str, frozenset[int]] = {}
        ignored = []
        for name, eos in said:
            ids = {int(token) for token in (eos if isinstance(eos, list) else [eos])}
            ends[name] = frozenset(n for n in ids if n >= 0 and (n < vocab or not vocab))
            ignored += [(name, n) for n in sorted(ids - ends[name])]
    return ends, ignored
