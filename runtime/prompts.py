"""What a chooser of drafts reads of a prompt, by a model of the pair
(:mod:`runtime.policies.draft_choice` says what it does with it)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from spectune.runtime.models import CHUNK, CausalModel, ids_tensor
from spectune.runtime.policies.draft_choice import TARGET
from spectune.runtime.policies.prompt_features import Prompt
from spectune.traces.schema import NAT_SCALE

if TYPE_CHECKING:
    from spectune.runtime.loading import LoadedPair


def log_perplexity(model: CausalModel, ids: Sequence[int]) -> float:
    """Mean of -log q(token | tokens before) over a prompt's tokens after the first, in nats,
    rounded to 1/256 so that the last bits of other devices and shapes decide nothing; NaN for fewer
    than two tokens. The logarithm of the paper's prompt perplexity.

    One pass over ``ids[:-1]`` at the model's slots 0 .., which leaves in its cache what a prefill
    would.
    """
    if len(ids) < 2:
        return math.nan
    model.reserve(len(ids))
    tokens, last, total = ids_tensor(list(ids), model.device), len(ids) - 1, 0.0
    for at in range(0, last, CHUNK):
        end = min(at + CHUNK, last)
        distribution = model.chain(tokens[at:end], at, logits=end - at)[0].log_softmax(-1)
        total -= float(distribution.gather(-1, tokens[at + 1 : end + 1, None]).double().sum())
    return round(total / last * NAT_SCALE) / NAT_SCALE


def prompt_reader(pair: LoadedPair) -> str:
    """The model that perplexities are taken under: the language model among the drafts with the
    fewest parameters, else ``target``."""
    return min(pair.drafts, key=lambda name: pair.drafts[name].num_parameters, default=TARGET)


def read_prompt(pair: LoadedPair, ids: Sequence[int], reader: str) -> Prompt:
    """A prompt as a chooser reads it; its text is decoded from ``ids``, so that a recording's
    prompts and served ones read alike."""
    model = pair.target if reader == TARGET else pair.drafts[reader]
    return Prompt(pair.text(list(ids)), len(ids), log_perplexity(model, ids))
