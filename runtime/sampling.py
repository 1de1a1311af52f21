"""How a token is chosen: the processed distribution and the noise.

Every choice is ``argmax(logits / T + g)`` over the tokens that top-k and top-p keep, with Gumbel
noise g a pure function of (request seed, absolute position, token id): drawing from the
distribution, yet the same whatever policy decodes. At temperature 0 the noise is left out.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from spectune.runtime.policies.jit import compiled
from spectune.traces.schema import NAT_CODE_MAX, NAT_SCALE, Sampling

_MASK64 = (1 << 64) - 1
_STREAMS = {
    "target": 0,
    "draft": 0x9E3779B97F4A7C15,
    "accept": 0xC2B2AE3D27D4EB4F,
    "residual": 0x165667B19E3779F9,
}


_MULTIPLIERS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""SplitMix64's: the Weyl constant, and those of its two rounds."""


def _mix(x: int) -> int:
    first, second, third = _MULTIPLIERS
    x = (x + first) & _MASK64
    x = ((x ^ (x >> 30)) * second) & _MASK64
    x = ((x ^ (x >> 27)) * third) & _MASK64
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


_C1, _C2, _C3 = (_signed(c) for c in _MULTIPLIERS)


@lru_cache(maxsize=8)
def _weyl(vocab_size: int, device: torch.device) -> torch.Tensor:
    """Token ids times the Weyl constant, int64 ``[vocab_size]``."""
    return torch.arange(vocab_size, dtype=torch.int64, device=device) * _C1


_W1, _W2, _W3 = (np.uint64(c) for c in _MULTIPLIERS)
_S30, _S27, _S32 = np.uint64(30), np.uint64(27), np.uint64(32)
_HALF, _UNIT, _BELOW_ONE = np.float32(0.5), np.float32(2.0**-32), np.float32(1.0 - 2.0**-24)


@compiled()
def _minus_uniforms(key: np.uint64, out: npt.NDArray[np.float32]) -> None:
    """Writes -w of :func:`gumbel_row`: the same whole numbers and the same three float32 roundings,
    in one loop."""
    for i in range(out.shape[0]):
        x = np.uint64(i) * _W1 + key
        x = (x ^ (x >> _S30)) * _W2
        x = (x ^ (x >> _S27)) * _W3
        w = (np.float32(np.int64(x >> _S32)) + _HALF) * _UNIT
        out[i] = -min(w, _BELOW_ONE)


def gumbel_row(key: int, vocab_size: int, device: torch.device) -> torch.Tensor:
    """Gumbel(0, 1) noise, float32 ``[vocab_size]``: SplitMix64 of (key, token id); equal arguments
    give equal bits on one device.

    The uniform is taken from the small side, where float32 is fine: -log(-log1p(-w)) resolves the
    upper tail, which decides who wins, to 2 ** -33.
    """
    if device.type == "cpu":
        row = torch.empty(vocab_size)
        _minus_uniforms(np.uint64(key), row.numpy())
        return row.log1p_().neg_().log_().neg_()
    return _gumbel_anywhere(key, vocab_size, device)


def _gumbel_anywhere(key: int, vocab_size: int, device: torch.device) -> torch.Tensor:
    """:func:`gumbel_row` in torch's operations alone, for devices without compiled loops: on a CPU
    the same bits, four times slower."""
    x = _weyl(vocab_size, device) + _signed(key)
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _C2
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _C3
    w = ((x >> 32) & 0xFFFFFFFF).float().add_(0.5).mul_(2.0**-32)
    # The largest 32-bit values round to 1 in float32; the largest number below 1 stands for them.
    return w.clamp_max_(1.0 - 2.0**-24).neg_().log1p_().neg_().log_().neg_()


def uniform(key: int) -> float:
    """One uniform number in (0, 1) of a key."""
    return ((_mix(key) >> 11) + 0.5) * 2.0**-53


def stream_key(seed: int, position: int, stream: str = "target", salt: int = 0) -> int:
    """The 64-bit key of one position's noise. Streams are independent; ``salt`` separates rounds
    where rounds must be independent."""
    return _mix(_mix(_mix(seed ^ _STREAMS[stream]) ^ position) ^ salt)


ROWS_KEPT: Final = 256
NOISE_KEPT: Final = 1 << 26
"""Rows of noise that are kept, more where they are short: so many numbers in all."""


class Noise:
    """The target's noise of one request, row by row, kept for the positions of the current round.

    The draft reads the same rows: proposing by ``log q + g`` is what couples it with the target.
    """

    def __init__(self, seed: int, vocab_size: int, device: torch.device) -> None:
        self._seed, self._vocab, self._device = seed, vocab_size, device
        self._rows: dict[int, torch.Tensor] = {}

    def row(self, position: int) -> torch.Tensor:
        """Float32 ``[vocab]`` at an absolute position."""
        if position not in self._rows:
            key = stream_key(self._seed, position)
            self._rows[position] = gumbel_row(key, self._vocab, self._device)
            if len(self._rows) > max(ROWS_KEPT, NOISE_KEPT // self._vocab):
                del self._rows[next(iter(self._rows))]
        return self._rows[position]

    def forget_before(self, position: int) -> None:
        """Drops rows that no later round needs."""
        self._rows = {p: row for p, row in self._rows.items() if p >= position}


def scaled(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Logits after temperature (unchanged when greedy or at temperature 1), float32."""
    plain = sampling.greedy or sampling.temperature == 1.0
    return logits if plain else logits / sampling.temperature


def kept(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor | None:
    """Which tokens top-k, then top-p keep: bool ``[..., vocab]``, or None when both are off."""
    if not filters(sampling, logits.shape[-1]):
        return None
    mask = torch.ones_like(logits, dtype=torch.bool)
    if 0 < sampling.top_k < logits.shape[-1]:
        mask = logits >= logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(~mask, -math.inf)
    if sampling.top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        probabilities = ordered.softmax(-1)
        keep = probabilities.cumsum(-1) - probabilities < sampling.top_p
        keep[..., 0] = True
        mask = mask & torch.zeros_like(keep).scatter_(-1, order, keep)
    return mask


def filters(sampling: Sampling, vocab_size: int) -> bool:
    """Whether top-k or top-p leaves anything out."""
    return not sampling.greedy and (sampling.top_p < 1.0 or 0 < sampling.top_k < vocab_size)


def log_distribution(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Log-probabilities of the distribution that tokens are drawn from, float32, -inf where
    filtered.

    At temperature 0 it is that at temperature 1 without filters: what a stop reads of a greedy
    draft.
    """
    if sampling.greedy:
        return logits.log_softmax(-1)
    x = scaled(logits, sampling)
    mask = kept(x, sampling)
    return (x if mask is None else x.masked_fill(~mask, -math.inf)).log_softmax(-1)


def choose(logits: torch.Tensor, sampling: Sampling, noise: torch.Tensor | None) -> torch.Tensor:
    """argmax(logits / T + g) over the kept tokens, row by row, int64 [n]; ties go to the lowest id.

    ``logits`` float32 [n, vocab]; ``noise`` float32 [n, vocab], None when greedy.
    """
    x = scaled(logits, sampling)
    mask = kept(x, sampling)
    x = x if noise is None else x + noise
    return (x if mask is None else x.masked_fill(~mask, -math.inf)).argmax(-1)


def nat_code(nats: float) -> int:
    """Nats as a whole number of 1/256 nat, rounded down, saturating."""
    return min(NAT_CODE_MAX, max(0, int(nats * NAT_SCALE)))


def entropy_of(log_probabilities: torch.Tensor) -> torch.Tensor:
    """Entropy in nats over the last axis; filtered tokens (-inf) contribute nothing."""
    p = log_probabilities.exp()
    return -(p * log_probabilities.masked_fill(p == 0, 0.0)).sum(-1)
