"""Loading a causal language model. One whose texts would not be transformers' is refused."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.quantizers.auto import AutoHfQuantizer

from spectune.runtime import attention
from spectune.runtime.checkpoints import checkpoint, source, translated
from spectune.runtime.models import CausalModel
from spectune.traces.errors import PairError

LEAST_TOLERANCE = 1e-3
"""Part of the logits' spread by which ours may differ from the model's own where rounding is
finer."""
SAMPLE_TOKENS = 16
"""Tokens on which a loaded model is compared with its own code."""
READABLE = "give a checkpoint in bfloat16, or of a quantization that transformers reads"


def pick_device(device: str) -> torch.device:
    """``auto`` is CUDA where there is one. Raises PairError when CUDA is asked for and absent."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise PairError("--device cuda: this torch sees no CUDA device; use --device cpu or auto")
    return torch.device(device)


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """``auto`` is float32 on a CPU and bfloat16 on CUDA. In float64 rounding changes no text: it is
    for tests of exactness."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    kind: torch.dtype = getattr(torch, dtype)
    return kind


def load_model(
    path: str,
    *,
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    sample: Callable[[], Sequence[int]] = tuple,
) -> CausalModel:
    """Loads a checkpoint folder or hub name, and compares it with its own code on the tokens that
    ``sample`` gives, a text (by default tokens from all over the vocabulary).

    Raises PairError, in one line, when there is none, it is not a causal LM that runs, its
    configuration is not that of its weights, it needs code of its own, its weights are quantized in
    a way that nothing reads, or its attention or its logits are not reproduced here."""
    folder, about = checkpoint(path), f"{name}: {path}"
    weights, options = source(path)
    with translated(f"{name}: cannot load {path}"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        quantized = _is_quantized(config, about)
        model, report = AutoModelForCausalLM.from_pretrained(
            weights, dtype=dtype, trust_remote_code=False, output_loading_info=True, **options
        )
        if missing := sorted(report["missing_keys"]):
            raise PairError(
                f"{name}: the weights of {path} lack {missing[0]}, which config.json asks for "
                f"({len(missing)} such tensors)"
            )
        if not quantized:
            _check_unquantized(folder, model, report["unexpected_keys"], about)
        loaded = CausalModel(model.to(device), name)
        _check_reproduced(loaded, path, sample())
    return loaded


def _is_quantized(config: Any, about: str) -> bool:
    """Whether transformers quantizes or dequantizes the weights of a configuration. Raises
    PairError for a quantization that it leaves out, with a warning at most."""
    for part in (config, config.get_text_config()):
        settings = getattr(part, "quantization_config", None)
        if not settings:
            continue
        settings = settings if isinstance(settings, dict) else settings.to_dict()
        if part is not config or not AutoHfQuantizer.supports_quant_method(settings):
            method = settings.get("quant_method")
            raise PairError(
                f"{about} is quantized by {method}, which transformers does not read; {READABLE}"
            )
        return True
    return False


def _check_unquantized(folder: Path, model: Any, unexpected: Collection[str], about: str) -> None:
    """Raises PairError where a checkpoint's configuration says of no quantization, and its weights
    are numbers that only scales make weights of, or there are scales for which the model has no
    place. (Pickles do not say how numbers are stored.)"""
    problem = ""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118  (it is no mapping)
                kind = str(tensors.get_slice(key).get_dtype())
                packed = kind in ("I8", "U8") and key.endswith("weight")
                if packed or kind.startswith(("F8", "F6", "F4")):
                    problem = problem or f"stores {key} as {kind}"
    modules = {name for name, _ in model.named_modules()} - {""}
    for key in sorted(unexpected):
        module, _, last = key.rpartition(".")
        scales = "scale" in last or "zero_point" in last
        if scales and ("weight" in last or module in modules):
            problem = problem or f"has {key}, which nothing reads"
    if problem:
        raise PairError(
            f"{about} {problem}: its weights are quantized, and its config.json says no "
            f"quantization_config by which to read them; {READABLE}"
        )


@torch.no_grad()
def _check_reproduced(loaded: CausalModel, path: str, sample: Sequence[int]) -> None:
    """Raises PairError where the logits after each of a few tokens are not those of the model's
    forward pass with transformers' eager attention, up to rounding. Shapes that do not fit each
    other are told here."""
    model, vocab = loaded.model, loaded.vocab_size
    length = min(SAMPLE_TOKENS, loaded.max_positions)
    spread = [vocab * i // length for i in range(1, length)]
    ids = torch.tensor([*sample, *spread, 0][:length], device=loaded.device) % vocab
    loaded.reserve(length)
    half = length // 2
    parts = [(ids[:half], 0), (ids[half:], half)]
    ours = torch.cat([loaded.chain(x, at, logits=len(x))[0] for x, at in parts if len(x)])
    model.set_attn_implementation("eager")
    try:
        states = loaded._decoder(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        theirs = model(input_ids=ids[None], use_cache=False).logits[0].float()
        shorter = model(input_ids=ids[None, : half or 1], use_cache=False).logits[0].float()
    finally:
        model.set_attn_implementation(attention.NAME)

    def away(logits: Tensor) -> float:
        """A part of the logits' spread, as at half of the tokens: a router of experts may round to
        other experts at some."""
        same = theirs[: len(logits)]
        spread = (same - same.mean(-1, keepdim=True)).norm(dim=-1).clamp_min(1e-6)
        return float(((logits - same).norm(dim=-1) / spread).median())

    rounding = torch.finfo(loaded.dtype).eps
    if not (off := away(loaded.head(states))) < max(LEAST_TOLERANCE, 2 * rounding):
        raise PairError(
            f"{loaded.name}: {path} makes its logits in a way that is not supported yet: they "
            f"are scaled or capped (off by {off:.1%} of their spread)"
        )
    # What a model itself makes of other shapes of the same pass tells how it carries rounding on.
    if not (off := away(ours)) < max(LEAST_TOLERANCE, 16 * rounding, 4 * away(shorter)):
        raise PairError(
            f"{loaded.name}: the attention of {path} is not reproduced here (its logits are off by "
            f"{off:.1%} of their spread from those of transformers' eager attention)"
        )
