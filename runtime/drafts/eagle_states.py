"""Which of the target's hidden states an EAGLE head reads, by what its configuration says."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple

from torch import Tensor

from spectune.runtime.checkpoints import CONFIG
from spectune.runtime.drafts.eagle_head import Convention
from spectune.traces.errors import PairError

Config = Mapping[str, Any]

STATE_IDS: Final = "eagle_aux_hidden_state_layer_ids"
OUTPUT_IDS: Final = ("target_layer_ids", "aux_hidden_states_layer_ids")
"""Keys whose ids are of layers, whose outputs are read."""
STATE_KEYS: Final = (
    *(STATE_IDS, "aux_hidden_state_layer_ids", "target_hidden_layer_ids", "layer_ids"),
    *OUTPUT_IDS,
)
"""What configurations call the ids of the target's states that a head reads, on top or in their
``eagle_config``."""
STATE_COUNT: Final = "num_aux_hidden_states"
STATE_LIKE: Final = re.compile(r"(?!output_)\w*(layer_ids|hidden_states?)\w*")
"""Keys that are named where nothing here reads them."""


class TargetStates(NamedTuple):
    """The target's hidden states that a head reads, as ``CausalModel.taps`` counts them; how its
    configuration names them, and under which ``keys``."""

    taps: tuple[int, ...]
    convention: Convention
    keys: tuple[str, ...] = ()


def states_of(config: Config, layers: int) -> TargetStates:
    """What an EAGLE-3 head reads, by whichever of ``STATE_KEYS`` names it.

    Published ids follow two conventions: outputs of layers (state = id + 1; SpecForge, ModelOpt),
    and boundaries (state = id; vLLM, speculators). Where the key does not say which, ids do: heads
    read a low layer, by default the output of layer 1, which is state 2; so ids without a 1 are
    boundaries, and so are those that reach the number of layers, which is the output of no layer.
    Without ids the states are 2, L/2 and L-3, as in the engines."""
    named: dict[str, TargetStates] = {}
    for key in STATE_KEYS:
        for place, ids in _places(config, key):
            if ids:
                if not (isinstance(ids, list) and all(isinstance(i, int) for i in ids)):
                    raise PairError(f"{place} of {CONFIG} is {ids!r}; a list of ids is expected")
                outputs = key in OUTPUT_IDS or (1 in ids and layers not in ids)
                convention: Convention = "outputs" if outputs else "boundaries"
                named[f"{place} {ids}"] = TargetStates(tuple(i + outputs for i in ids), convention)
    if len({states.taps for states in named.values()}) > 1:
        raise PairError(f"{CONFIG} names other hidden states twice: {' and '.join(named)}")
    keys = tuple(name.partition(" ")[0] for name in named)
    default = TargetStates((2, layers // 2, layers - 3), "default")
    states = next(iter(named.values()), default)._replace(keys=keys)
    if not all(0 <= tap <= layers for tap in states.taps):
        raise PairError(
            f"the head reads hidden states {list(states.taps)}; the target has states 0 to "
            f"{layers} ({(*keys, STATE_IDS)[0]} names them)"
        )
    return states


def _places(config: Config, key: str) -> list[tuple[str, Any]]:
    """What a configuration says under a key, on top and in its ``eagle_config``, and where."""
    nested = config.get("eagle_config") or {}
    return [(f"eagle_config.{key}", nested.get(key)), (key, config.get(key))]


def check_count(
    config: Config, states: TargetStates, tensors: Mapping[str, Tensor], width: int
) -> None:
    """Raises PairError where a head takes another number of the target's states, which are
    ``width`` wide, than are named."""
    count = len(states.taps)
    named = f"{CONFIG} names none ({STATE_IDS}), which means the default {count}"
    if states.keys:
        named = f"{states.keys[0]} of {CONFIG} names {count}"
    for place, said in _places(config, STATE_COUNT):
        if said not in (None, count):
            raise PairError(f"the head reads {said} hidden states ({place}), and {named}")
    if (fc := tensors.get("fc.weight")) is not None and fc.shape[-1] != count * width:
        raise PairError(
            f"fc.weight takes {fc.shape[-1] / width:g} hidden states of the target's width {width},"
            f" and {named}"
        )


def unread_keys(document: Config, states: TargetStates, known: Collection[str]) -> tuple[str, ...]:
    """Keys of a head's configuration that nothing here follows: of its ``eagle_config``, and those
    that seem to say what it reads; but those that are ``known`` otherwise."""
    nested = document.get("eagle_config") or {}
    keys = {f"eagle_config.{key}" for key in nested if key not in known}
    keys |= {key for key in document if STATE_LIKE.fullmatch(key) and key not in known}
    read = {*states.keys}
    if states.convention != "last":
        read |= {place for place, _ in _places(document, STATE_COUNT)}
    empty = {place for key in STATE_KEYS for place, ids in _places(document, key) if not ids}
    return tuple(sorted(keys - read - empty))
