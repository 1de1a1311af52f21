"""Loading a causal language model. One whose texts would not be transformers' is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
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
SAMPLE_WINDOW = 4
"""Positions that its sliding layers see meanwhile, so that the sample reaches beyond them."""
READABLE = "give a checkpoint in bfloat16, or of a quantization that transformers reads"
CACHE_SCALES = re.compile(r".+\.(([qkv]|kv|qkv|prob)_(scale|zero_point)|[kv]_proj\.output_scale)")
"""Tensors by which engines quantize a cache; a cache in floating point needs none."""
COMPUTED = re.compile(r"(.+\.)?((self_)?(attn|attention)\.(masked_)?bias|\w*inv_freq|position_ids)")
"""Causal masks, rotary frequencies and positions, which some checkpoints hold and no training
changes."""


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
    a way that nothing reads, some of them have no place in the architecture that is named, or its
    attention or its logits are not reproduced here. ``notes`` of what is returned name weights that
    are left unused."""
    folder, about = checkpoint(path), f"{name}: {path}"
    weights, options = source(path)
    with translated(f"{name}: cannot load {path}"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        caches = _drop_cache_settings(config)
        quantized = _is_quantized(config, about)
        model, report = AutoModelForCausalLM.from_pretrained(
            weights,
            config=config,
            dtype=dtype,
            trust_remote_code=False,
            output_loading_info=True,
            **options,
        )
        if missing := sorted(report["missing_keys"]):
            raise PairError(
                f"{name}: the weights of {path} lack {missing[0]}, which config.json asks for "
                f"({len(missing)} such tensors)"
            )
        unused = sorted(key for key in report["unexpected_keys"] if not COMPUTED.fullmatch(key))
        scales = [key for key in unused if CACHE_SCALES.fullmatch(key)]
        unused = [key for key in unused if key not in scales]
        if not quantized:
            _check_unquantized(folder, model, unused, about)
            _check_used(model, unused, about)
        loaded = CausalModel(model.to(device), name)
        _check_reproduced(loaded, path, sample())
    if unused:
        loaded.notes += (f"{name} leaves weights unused: {_counted(unused)}",)
    if scales or caches:
        left = f" (unused: {_counted(scales)})" if scales else ""
        kept = str(dtype).removeprefix("torch.")
        loaded.notes += (f"{name}: its cache is kept in {kept}, not quantized{left}",)
    return loaded


def _counted(keys: Sequence[str]) -> str:
    return f"{len(keys)} tensors, the first {keys[0]}"


def _drop_cache_settings(config: Any) -> bool:
    """Takes from a configuration the quantization of a cache alone, which leaves weights as they
    are; whether there was one."""
    dropped = False
    for part in (config, config.get_text_config()):
        settings = getattr(part, "quantization_config", None)
        if not isinstance(settings, dict):
            continue
        told = {key for key, value in settings.items() if value}
        if (
            settings.get("quant_method") in ("modelopt", "compressed-tensors")
            and told & {"kv_cache_quant_algo", "kv_cache_scheme"}
            and not told & {"quant_algo", "config_groups"}
        ):
            del part.quantization_config
            dropped = True
    return dropped


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


def _check_unquantized(folder: Path, model: Any, unused: Collection[str], about: str) -> None:
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
    for key in unused:
        module, _, last = key.rpartition(".")
        scales = "scale" in last or "zero_point" in last
        if scales and ("weight" in last or module in modules):
            problem = problem or f"has {key}, which nothing reads"
    if problem:
        raise PairError(
            f"{about} {problem}: its weights are quantized, and its config.json says no "
            f"quantization_config by which to read them; {READABLE}"
        )


def _check_used(model: Any, unused: Iterable[str], about: str) -> None:
    """Raises PairError where weights that the model has no place for belong to a part that it runs:
    to an embedding, a layer, a norm or the output head. Others are of layers beyond its last
    (which predict further tokens) or of parts beside it (a tower of images)."""
    modules = dict(model.named_modules())
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    around = next(name for name, module in modules.items() if module is decoder)
    containers = {"", *accumulate(around.split("."), "{}.{}".format)}
    lost = []
    for key in unused:
        named = _place(key, modules)
        # The names of a checkpoint without output head lack the model's prefix.
        place = named or _place(f"{model.base_model_prefix}.{key}", modules)
        deep = key.removeprefix(f"{place}.").count(".") > 1
        beside = place in containers and (deep or not named)
        beyond = isinstance(modules[place], nn.ModuleList) and not re.search(r"\.\d", place)
        if not (beside or beyond):
            lost.append(key)
    if lost:
        kind = type(model).__name__
        raise PairError(
            f"{about} has {lost[0]}, for which {kind} has no place ({len(lost)} such tensors): its "
            "texts would not be those of what was trained; config.json must name the architecture "
            "that these weights are of, and an adapter must be merged"
        )


def _place(key: str, modules: Collection[str]) -> str:
    """The innermost of the modules that a tensor's name lies in."""
    while key and key not in modules:
        key = key.rpartition(".")[0]
    return key


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
    with _narrowed(loaded):
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


@contextmanager
def _narrowed(loaded: CausalModel) -> Iterator[None]:
    """Narrows the sliding windows of a model, ours and transformers', to SAMPLE_WINDOW."""
    config, cache = loaded._decoder.config, loaded.cache
    theirs, ours = getattr(config, "sliding_window", None), cache.window
    if theirs is not None:
        config.sliding_window = min(theirs, SAMPLE_WINDOW)
    if ours is not None:
        cache.window = min(ours, SAMPLE_WINDOW)
    try:
        yield
    finally:
        cache.window = ours
        if theirs is not None:
            config.sliding_window = theirs
