"""What a checkpoint's generation_config asks of its texts beside temperature, top-k and top-p,
which are options of the user here.

Settings that change logits by the prefix alone are applied to the target's, by transformers' own
processors, each row with its own prefix: texts are token for token those of ``generate``, and as
independent of the policy as without. What else would change a text is refused by name. Drafts
propose without any of it. A pair that has settings has another id than one that ignores them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from spectune.traces.errors import PairError
from spectune.traces.schema import Verifier

if TYPE_CHECKING:
    import torch

NOT_BY_REJECTION: Final = (
    "the rejection verifier does not apply; use the coupled one, or a pair file with "
    '"generation_config": false, which ignores it'
)
Settings = Mapping[str, Any]
Process = Callable[["torch.Tensor", list[int]], "torch.Tensor"]
"""Float32 logits [vocab] after a prefix, as the settings change them."""

APPLIED: Final = (
    *("sequence_bias", "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids"),
    *("min_length", "min_new_tokens", "suppress_tokens", "begin_suppress_tokens"),
)
"""In the order in which ``generate`` applies them."""
REFUSED: Final = (
    *("constraints", "diversity_penalty", "dola_layers", "encoder_no_repeat_ngram_size"),
    *("encoder_repetition_penalty", "exponential_decay_length_penalty", "force_words_ids"),
    *("forced_bos_token_id", "forced_eos_token_id", "guidance_scale", "num_beam_groups"),
    *("num_beams", "penalty_alpha", "stop_strings", "token_healing", "watermarking_config"),
)
REFUSED_SAMPLED: Final = ("epsilon_cutoff", "eta_cutoff", "min_p", "top_h", "typical_p")
"""Refused above temperature 0; greedy texts do not depend on them."""
_ONES: Final = (
    *("encoder_repetition_penalty", "guidance_scale", "num_beam_groups", "num_beams"),
    *("repetition_penalty", "typical_p"),
)
"""Settings that ask for nothing at 1; the others do at 0."""


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """What of a generation_config would change a text, by name."""
    known = {name: config.get(name) for name in (*APPLIED, *REFUSED, *REFUSED_SAMPLED)}
    return {
        name: value
        for name, value in known.items()
        if (value is not None if name.startswith("forced_") else value)  # 0 is a token
        and not (name in _ONES and value == 1)
    }


def check(settings: Settings, *, greedy: bool, verifier: Verifier = "coupled") -> None:
    """Raises PairError for the first setting that would change a text and is not applied."""
    if settings and verifier == "rejection" and not greedy:
        raise PairError(
            f"target: its generation_config asks for {min(settings)}, which {NOT_BY_REJECTION}"
        )
    for name in (*REFUSED, *(() if greedy else REFUSED_SAMPLED)):
        if name in settings:
            raise PairError(
                f"target: its generation_config asks for {name}, which is not "
                f"applied{'' if name in REFUSED else ' above temperature 0'}; "
                'a pair file with "generation_config": false ignores what it asks for'
            )


def processor(
    settings: Settings, prompt_tokens: int, eos_ids: frozenset[int], device: torch.device
) -> Process | None:
    """The settings that are applied, for a request whose prompt has ``prompt_tokens`` tokens; None
    where there are none.

    Raises ValueError or TypeError for values that transformers does not take.
    """
    import torch
    from transformers.generation import logits_process as made

    eos = torch.tensor(sorted(eos_ids), dtype=torch.int64, device=device)
    where: Any = device
    build: dict[str, Callable[[Any], Any]] = {
        "sequence_bias": made.SequenceBiasLogitsProcessor,
        "repetition_penalty": lambda v: made.RepetitionPenaltyLogitsProcessor(float(v)),
        "no_repeat_ngram_size": made.NoRepeatNGramLogitsProcessor,
        "bad_words_ids": lambda v: made.NoBadWordsLogitsProcessor(v, eos),
        "min_length": lambda v: made.MinLengthLogitsProcessor(v, eos, device=where),
        "min_new_tokens": lambda v: made.MinNewTokensLengthLogitsProcessor(
            prompt_tokens, v, eos, device=where
        ),
        "suppress_tokens": lambda v: made.SuppressTokensLogitsProcessor(v, device=where),
        "begin_suppress_tokens": lambda v: made.SuppressTokensAtBeginLogitsProcessor(
            v, prompt_tokens, device=where
        ),
    }
    if not eos_ids:
        del build["min_length"], build["min_new_tokens"]
    steps = [build[n](settings[n]) for n in APPLIED if n in settings and n in build]
    if not steps:
        return None

    def process(logits: torch.Tensor, prefix: list[int]) -> torch.Tensor:
        ids = torch.tensor([prefix], device=device)
        scores = logits[None]
        for step in steps:
            scores = step(ids, scores)
        return scores[0]

    return process
