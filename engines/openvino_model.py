"""Checkpoints as OpenVINO models, in float32: traced with the keys and values of earlier tokens as
inputs and outputs, which are then made the model's state, as OpenVINO GenAI expects them."""

from __future__ import annotations

import inspect
import os
import shutil
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from spectune.engines.abilities import OPENVINO
from spectune.runtime.checkpoints import checkpoint, identity, is_head, is_local, translated
from spectune.traces.errors import EngineError

MODEL: Final = "openvino_model.xml"
INPUTS: Final = ("input_ids", "attention_mask", "position_ids", "beam_idx")


def model_folder(path: str, version: str) -> Path:
    """The folder of a checkpoint's OpenVINO model and tokenizer in the user's cache, made where it
    is not there yet; equal content, equal folder.

    Raises EngineError for what OpenVINO cannot load, PairError where no checkpoint is or it cannot
    be converted.
    """
    folder_of(path)
    made = _cache() / f"{identity(path)}-float32-{version}"
    if (made / MODEL).is_file():
        return made
    part = Path(tempfile.mkdtemp(prefix=made.name, suffix=".part", dir=made.parent))
    try:
        with translated(f"{OPENVINO.title}: {path} cannot be converted"):
            _convert(path, part)
        with suppress(OSError):  # another process was there first
            part.rename(made)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return made


def folder_of(path: str) -> Path:
    """The folder of a checkpoint that is to be loaded. Raises EngineError for a hub name and for an
    EAGLE head."""
    if not is_local(path):
        raise EngineError(
            f"{path}: an engine reads a checkpoint from a folder; fetch it (`hf download {path}`) "
            "and name that"
        )
    if is_head(path):
        raise EngineError(
            f"{path}: an EAGLE head has no form that this engine loads; name a draft that is a "
            "language model"
        )
    return checkpoint(path)


def _cache() -> Path:
    """The folder of converted models, ``$XDG_CACHE_HOME/spectune/openvino`` or below ``~/.cache``.
    Raises EngineError where it cannot be made."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "spectune"
    try:
        (base / "openvino").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EngineError(
            f"{base}: converted models cannot be kept there ({error.strerror}); set XDG_CACHE_HOME"
        ) from None
    return base / "openvino"


def _convert(path: str, out: Path) -> None:
    """Writes a checkpoint's model and tokenizer."""
    import openvino as ov
    import torch
    from openvino_tokenizers import convert_tokenizer

    from spectune.runtime.load_model import load_model
    from spectune.runtime.text_codec import tokenizer_of

    tokenizer = tokenizer_of(path)
    if tokenizer is None:
        raise EngineError(
            f"{path}: {OPENVINO.title} asks for a tokenizer beside the weights; copy the target's"
        )
    loaded = load_model(path, name=path, device=torch.device("cpu"), dtype=torch.float32)
    ov.save_model(_stateful(loaded.model), out / MODEL, compress_to_fp16=False)
    pair = convert_tokenizer(tokenizer, with_detokenizer=True)
    for name, converted in zip(("tokenizer", "detokenizer"), pair, strict=True):
        ov.save_model(converted, out / f"openvino_{name}.xml")


def _stateful(model: Any) -> Any:
    """A transformers model as an OpenVINO model that keeps keys and values itself; it takes
    :data:`INPUTS` and gives ``logits``."""
    import numpy as np
    import openvino as ov
    import torch
    from openvino import opset13 as ops
    from openvino._offline_transformations import apply_make_stateful_transformation
    from transformers import Cache, DynamicCache

    class Past(Cache):  # type: ignore[misc]  # transformers carries no types
        """Keys and values of each layer in turn, [batch, heads, tokens, size]."""

        def __init__(self, tensors: list[Any]) -> None:
            self.tensors, self.layers = tensors, list[Any]()

        def update(self, keys: Any, values: Any, layer: int, *args: Any, **kwargs: Any) -> Any:
            for i, new in ((2 * layer, keys), (2 * layer + 1, values)):
                self.tensors[i] = torch.cat([self.tensors[i], new], 2)
            return tuple(self.tensors[2 * layer : 2 * layer + 2])

    class Pass(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            # transformers 5.24 renames the argument, and forgets the former name in 5.40.
            decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
            known = inspect.signature(decoder.forward).parameters
            self.cache_name = "cache" if "cache" in known else "past_key_values"

        def forward(
            self, input_ids: Any, attention_mask: Any, position_ids: Any, beam_idx: Any, *past: Any
        ) -> Any:
            cache = Past([tensor.index_select(0, beam_idx) for tensor in past])
            n, total = input_ids.shape[1], attention_mask.shape[1]
            rows = torch.arange(n)[:, None] + (total - n)
            mask = (torch.arange(total)[None] <= rows) & attention_mask[:, None, None].bool()
            how = {"position_ids": position_ids, self.cache_name: cache, "use_cache": True}
            logits = self.model(input_ids=input_ids, attention_mask=mask, **how).logits
            return (logits, *cache.tensors)

    model.set_attn_implementation("sdpa")
    traced, first = Pass(), DynamicCache()
    ids, beams = torch.ones(2, 3, dtype=torch.int64), torch.arange(2, dtype=torch.int32)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of branches that the trace fixes: the mask is given
        model(input_ids=ids, use_cache=True, **{traced.cache_name: first})
        past = [tensor for layer in first.layers for tensor in (layer.keys, layer.values)]
        given = (ids, torch.ones(2, 6, dtype=torch.int64), 3 + torch.arange(3).expand(2, 3), beams)
        found = ov.convert_model(traced, example_input=(*given, *past))
    shapes = [[-1, tensor.shape[1], -1, tensor.shape[3]] for tensor in past]
    states = {f"past.{i}": f"present.{i}" for i in range(len(past))}
    for port, name in zip(found.inputs, (*INPUTS, *states), strict=True):
        port.get_tensor().set_names({name})
    for port, name in zip(found.outputs, ("logits", *states.values()), strict=True):
        port.get_tensor().set_names({name})
    dynamic: dict[str, Any] = dict(zip(INPUTS, ([-1, -1], [-1, -1], [-1, -1], [-1]), strict=True))
    dynamic |= dict(zip(states, shapes, strict=True))
    found.reshape({name: ov.PartialShape(shape) for name, shape in dynamic.items()})
    apply_make_stateful_transformation(found, states)
    # A text begins without keys and values, in as many rows as are asked for; where a state begins
    # is also what the engine knows it by.
    batch = ops.gather(ops.shape_of(found.input("input_ids")), ops.constant([0]), ops.constant(0))
    for state in (op for op in found.get_ops() if op.get_type_name() == "ReadValue"):
        _, heads, _, size = (dim.get_max_length() for dim in state.get_output_partial_shape(0))
        shape = ops.concat([batch, ops.constant(np.array([heads, 0, size]))], 0)
        state.set_arguments([ops.broadcast(ops.constant(np.float32(0)), shape).output(0)])
    found.validate_nodes_and_infer_types()
    return found
