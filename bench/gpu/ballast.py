"""The demo pair with *ballast*: its texts and its acceptance at the cost of large models.

Every model is set into one of another shape: its hidden states, heads and neurons are the first of
many, its layers stand among others. What the others compute is added to nothing, so logits are the
demo's but for rounding, while every pass reads weights of the whole shape. The vocabulary stays.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import pad

from spectune.runtime.pair import read_pair

Tensors = dict[str, torch.Tensor]


class Shape(NamedTuple):
    """Sizes of a Llama, or of an EAGLE-3 head of one layer, whose attention heads are as wide as
    the demo's."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int


LARGE = {
    "target": Shape(4096, 32, 14336, 128, 32),
    "small": Shape(1024, 8, 4096, 32, 8),
    "head": Shape(4096, 1, 14336, 128, 32),
}
"""The layers of Llama 3.1 8B, a draft of 0.1 billion weights, and an EAGLE-3 head."""
POSITIONS = 1 << 14
"""Tokens of a text, at most: costs are measured further than the demo pair's texts go."""
TINY = {
    "target": Shape(320, 9, 768, 10, 5),
    "small": Shape(128, 5, 320, 8, 4),
    "head": Shape(320, 1, 768, 10, 5),
}


def weighed(
    tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], shape: Shape, fill: torch.Tensor
) -> Tensors:
    """A model's tensors in ``shape``, of the dtype and on the device of ``fill``, the random
    numbers that weights are filled up with.

    The RMS norm of a hidden state [d] whose further coordinates are 0 divides by what is
    sqrt(d / hidden) times as large: its weights and eps are scaled.
    """
    d, (hidden, layers, intermediate, heads, kv_heads) = int(config["hidden_size"]), shape
    own, dim = int(config["num_key_value_heads"]), int(config["head_dim"])
    groups = heads // kv_heads

    def filled(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        out = fill[: rows * columns].view(rows, columns).clone()
        out[: x.shape[0], : x.shape[1]] = x
        return out

    def by_heads(x: torch.Tensor, total: int, each: int) -> torch.Tensor:
        """Rows of attention heads, [heads of a key * keys * dim, n], among those of more."""
        split = x.view(own, -1, dim, x.shape[1])
        more = (0, 0, 0, 0, 0, each - split.shape[1], 0, total - own)
        return pad(split, more).flatten(0, 2)

    out: Tensors = {}
    for name, tensor in tensors.items():
        x, kind = tensor.to(fill), name.split(".")[-2]
        if kind.endswith("norm"):
            x = pad(x.float() * math.sqrt(d / hidden), (0, hidden - d), value=1.0).to(fill)
        elif kind == "embed_tokens":
            x = pad(x, (0, hidden - d))
        elif kind in ("o_proj", "down_proj"):  # writes hidden states, of which the others stay 0
            x = by_heads(x.T, kv_heads, groups).T if kind == "o_proj" else x
            wide = heads * dim if kind == "o_proj" else intermediate
            x = pad(x, (0, wide - x.shape[1], 0, hidden - d))
        else:  # reads one hidden state or several
            x = pad(x.unflatten(1, (-1, d)), (0, hidden - d)).flatten(1)
            if kind == "fc":
                x = pad(x, (0, 0, 0, hidden - d))
            elif kind in ("q_proj", "k_proj", "v_proj"):
                x = by_heads(x, kv_heads, groups if kind == "q_proj" else 1)
            else:
                x = filled(x, intermediate, x.shape[1])
        out[name] = x.contiguous()
    return _among(out, int(config["num_hidden_layers"]), layers, filled)


def _among(
    made: Tensors, own: int, layers: int, filled: Callable[[torch.Tensor, int, int], torch.Tensor]
) -> Tensors:
    """A model's layers among others that add nothing; its middle and its last three, before which
    EAGLE-3 reads, are those of the new one. ``filled`` sets weights among random ones, by rows and
    columns."""
    if own == layers:
        return made
    first = {n: x for n, x in made.items() if n.startswith("model.layers.0.")}
    out = {n: x for n, x in made.items() if not n.startswith("model.layers.")}
    places = {}
    for i in range(own):
        middle = i - own // 2 + layers // 2
        places[i if i < own // 2 else middle if i < own - 3 else i - own + layers] = i
    for place in range(layers):
        for name, x in first.items():
            end = name.removeprefix("model.layers.0.")
            if place in places:
                new = made[f"model.layers.{places[place]}.{end}"]
            elif x.dim() == 1:
                new = x.clone()
            elif end.split(".")[-2] in ("o_proj", "down_proj"):
                new = torch.zeros_like(x)
            else:
                new = filled(x[:0], *x.shape)
            out[f"model.layers.{place}.{end}"] = new
    return out


def build(folder: Path, shapes: Mapping[str, Shape], device: str, dtype: torch.dtype) -> Path:
    """Writes the pair, with the drafts that ``shapes`` names, and its pair file; returns the
    file."""
    spec = read_pair("demo")
    generator = torch.Generator(device).manual_seed(0)
    for name, path in (("target", spec.target), *spec.drafts.items()):
        if (shape := shapes.get(name)) is None:
            continue
        shutil.copytree(path, folder / name, dirs_exist_ok=True)
        config = json.loads((folder / name / "config.json").read_text())
        tensors = load_file(folder / name / "model.safetensors")
        most = 2 * shape.hidden * max(shape.intermediate, shape.heads * int(config["head_dim"]))
        fill = torch.randn(most, generator=generator, device=device, dtype=dtype) * 0.02
        made = {n: x.cpu() for n, x in weighed(tensors, config, shape, fill).items()}
        save_file(made, folder / name / "model.safetensors", metadata={"format": "pt"})
        d = int(config["hidden_size"])
        sizes: dict[str, Any] = {
            "hidden_size": shape.hidden,
            "num_hidden_layers": shape.layers,
            "intermediate_size": shape.intermediate,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "rms_norm_eps": config["rms_norm_eps"] * d / shape.hidden,
            "max_position_embeddings": POSITIONS,
            "dtype": str(dtype).removeprefix("torch."),
        }
        if "target_hidden_size" in config:
            sizes["target_hidden_size"] = shapes["target"].hidden
            layers = shapes["target"].layers
            states = [2, layers // 2, layers - 3]  # EAGLE-3's rule
            sizes["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": states}
        (folder / name / "config.json").write_text(json.dumps({**config, **sizes}))
    drafts = {name: name for name in shapes if name != "target"}
    file = folder / "pair.json"
    file.write_text(json.dumps({"name": "ballast", "target": "target", "drafts": drafts}))
    return file
