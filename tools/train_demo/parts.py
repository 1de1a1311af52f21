"""Weights as whole numbers of 8 bits, in files small enough to send: what a stage of training
leaves.

A row of a matrix is its numbers times one power of two, so bfloat16, float16 and float32 hold the
rounded model exactly, and it is the model that later stages learn from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

FILE_BYTES = 15 << 20
"""What a file holds at most, unless one tensor is larger."""
EXPONENT = ".exponent"


def _scale(exponent: Tensor) -> Tensor:
    """Two to the power of whole numbers [n] -> float32 [n, 1], exactly: the bits of a float."""
    return ((exponent.int() + 127) << 23).view(torch.float32)[:, None]


def to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix [n, m] as whole numbers, int8 [n, m], and their exponents, int8 [n].

    The exponents are the least under which no number exceeds 127, and none is below float16's."""
    mantissa, exponent = torch.frexp(weight.abs().amax(1) / 127)
    exponent = (exponent - (mantissa == 0.5).int()).clamp_min(-24)
    return (weight / _scale(exponent)).round().to(torch.int8), exponent.to(torch.int8)


def from_int8(numbers: Tensor, exponent: Tensor) -> Tensor:
    """The float32 matrix of :func:`to_int8`'s numbers and exponents."""
    return numbers.float() * _scale(exponent)


@torch.no_grad()
def round_weights(model: nn.Module) -> None:
    """Rounds a model's matrices to what int8 holds, and its vectors to bfloat16."""
    for weight in model.parameters():
        weight.copy_(from_int8(*to_int8(weight)) if weight.ndim == 2 else weight.bfloat16())


def save_parts(
    folder: Path, stage: str, models: Mapping[str, nn.Module], record: Mapping[str, Any]
) -> None:
    """Writes rounded models as ``STAGE-1-of-N.safetensors`` and so on, with a record of the
    training."""
    files: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, model in models.items():
        for key, weight in model.named_parameters():
            tensors = {f"{name}.{key}": weight.detach().cpu().bfloat16()}
            if weight.ndim == 2:
                numbers, exponent = to_int8(weight.detach().cpu())
                tensors = {f"{name}.{key}": numbers, f"{name}.{key}{EXPONENT}": exponent}
            size += sum(tensor.nbytes for tensor in tensors.values())
            if size > FILE_BYTES and files[-1]:
                files.append({})
                size = sum(tensor.nbytes for tensor in tensors.values())
            files[-1] |= tensors
    folder.mkdir(parents=True, exist_ok=True)
    for number, tensors in enumerate(files, 1):
        path = folder / f"{stage}-{number}-of-{len(files)}.safetensors"
        save_file(tensors, path, metadata={"record": json.dumps(record)})


@torch.no_grad()
def load_parts(folder: Path, stage: str, models: Mapping[str, nn.Module]) -> dict[str, Any] | None:
    """Fills models with what a stage left in a folder and returns its record; None where the stage
    left nothing. Raises ValueError where files are missing or are of models of another shape."""
    paths = sorted(folder.glob(f"{stage}-*-of-*.safetensors"))
    if not paths:
        return None
    number = int(paths[0].stem.split("-")[-1])
    if len(paths) != number:
        raise ValueError(f"{folder}: {len(paths)} of the {number} files of the stage {stage}")
    tensors: dict[str, Tensor] = {}
    for path in paths:
        with safe_open(path, "pt") as file:
            record: dict[str, Any] = json.loads(file.metadata()["record"])
            tensors |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    for name, model in models.items():
        for key, weight in model.named_parameters():
            stored = tensors.get(f"{name}.{key}")
            if stored is None or stored.shape != weight.shape:
                raise ValueError(f"{folder}: the stage {stage} is of models of another shape")
            if (exponent := tensors.get(f"{name}.{key}{EXPONENT}")) is not None:
                stored = from_int8(stored, exponent)
            weight.copy_(stored)
    return record
