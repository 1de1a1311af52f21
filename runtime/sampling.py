"""How a token is chosen: ``argmax(logits / T + g)`` over the tokens that top-k and top-p keep.

The Gumbel noise g is a pure function of (request seed, absolute position, token id), so that the
choice is drawn from the distribution, yet the same whatever policy decodes. At temperature 0 there
is none. g is made in float64 and rounded to float32 (devices agree on it but for about one number
in 10 ** 8); what top-p keeps is summed up in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spectune.runtime.cuda import noise as kernels
from spectune.runtime.cuda.launch import kernels_run
from spectune.runtime.policies.jit import compiled
from spectune.runtime.policies.splitmix import MULTIPLIERS, as_int64
from spectune.traces.schema import Sampling

_MASK64 = (1 << 64) - 1
_STREAMS = {
    "target": 0,
    "draft": 0x9E3779B97F4A7C15,
    "accept": 0xC2B2AE3D27D4EB4F,
    "residual": 0x165667B19E3779F9,
}
_W1, _W2, _W3 = (np.uint64(c) for c in MULTIPLIERS)
_C1, _C2, _C3 = (as_int64(c) for c in MULTIPLIERS)


def _mix(x: int) -> int:
    first, second, third = MULTIPLIERS
    x = (x + first) & _MASK64
    x = ((x ^ (x >> 30)) * second) & _MASK64
    x = ((x ^ (x >> 27)) * third) & _MASK64
    return x ^ (x >> 31)


def uniform(key: int) -> float:
    """One uniform number in (0, 1) of a key."""
    return ((_mix(key) >> 11) + 0.5) * 2.0**-53


def stream_key(seed: int, position: int, stream: str = "target", salt: int = 0) -> int:
    """The 64-bit key of one position's noise. Streams are independent; ``salt`` separates rounds
    where rounds must be independent."""
    return _mix(_mix(_mix(seed ^ _STREAMS[stream]) ^ position) ^ salt)


@compiled()
def _uniforms(key: np.uint64, out: npt.NDArray[np.float64]) -> None:
    """Writes 1 - w of each token: w the hash's upper 32 bits and a half, in units of 2 ** -32."""
    for i in range(out.shape[0]):
        x = np.uint64(i) * _W1 + key
        x = (x ^ (x >> np.uint64(30))) * _W2
        x = (x ^ (x >> np.uint64(27))) * _W3
        out[i] = 1.0 - (np.float64(np.int64(x >> np.uint64(32))) + 0.5) * 2.0**-32


def gumbel(keys: Tensor, tokens: Tensor) -> Tensor:
    """:func:`gumbel_row` of ``keys`` int64 [n, 1] at ``tokens`` int64 [size] in torch's operations
    alone, [n, size]; on a CPU the same bits, four times slower."""
    x = tokens * _C1 + keys
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _C2
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _C3
    uniforms = 1.0 - (((x >> 32) & 0xFFFFFFFF).double() + 0.5) * 2.0**-32
    return uniforms.log_().neg_().log_().neg_().float()


def gumbel_row(key: int, vocab_size: int, device: torch.device) -> Tensor:
    """Gumbel(0, 1) noise, float32 ``[vocab_size]``, of SplitMix64 of (key, token id). 1 - w is
    exact, so that the upper tail, which decides who wins, is resolved to 2 ** -33."""
    if device.type != "cpu":
        tokens = torch.arange(vocab_size, device=device)
        return gumbel(keys_tensor([as_int64(key)], device), tokens)[0]
    uniforms = torch.empty(vocab_size, dtype=torch.float64)
    _uniforms(np.uint64(key), uniforms.numpy())
    return uniforms.log_().neg_().log_().neg_().float()


def keys_tensor(keys: Sequence[int], device: torch.device) -> Tensor:
    """Keys as int64 [n, 1], for which nothing waits."""
    return torch.tensor(keys)[:, None].to(device, non_blocking=True)


def add_noise(scores: Tensor, ids: Tensor | None, keys: Tensor) -> Tensor:
    """``scores`` [n, size] plus noise by ``keys`` int64 [n, 1] or [1, 1]. ``ids`` int64 [size]: the
    tokens of the columns; None: all."""
    if kernels_run(scores.device):
        return kernels.perturbed(scores, keys, ids)
    tokens = torch.arange(scores.shape[-1], device=scores.device) if ids is None else ids
    return scores + gumbel(keys, tokens)


ROWS_KEPT: Final = 128
NOISE_KEPT: Final = 1 << 23
"""Rows of noise that are kept, more than any round looks at; more where they are short: so many
numbers in all."""


class Noise:
    """The target's noise of one request. The draft reads the same: proposing by ``log q + g`` is
    what couples it with the target.

    On CUDA one kernel makes it where it is added; elsewhere the last rows are kept."""

    def __init__(
        self,
        seed: int,
        vocab_size: int,
        device: torch.device,
        stream: str = "target",
        salt: int = 0,
    ) -> None:
        self._seed, self.vocab_size, self._device = seed, vocab_size, device
        self._stream, self._salt = stream, salt
        self._rows: dict[int, Tensor] = {}
        self.fused = kernels_run(device)

    def row(self, position: int) -> Tensor:
        """Float32 ``[vocab]`` at an absolute position."""
        if position not in self._rows:
            if len(self._rows) >= max(ROWS_KEPT, NOISE_KEPT // self.vocab_size):
                del self._rows[next(iter(self._rows))]
            key = stream_key(self._seed, position, self._stream, self._salt)
            self._rows[position] = gumbel_row(key, self.vocab_size, self._device)
        return self._rows[position]

    def keys(self, positions: Sequence[int]) -> list[int]:
        """The keys at positions, as int64 has them."""
        keys = {p: stream_key(self._seed, p, self._stream, self._salt) for p in set(positions)}
        return [as_int64(keys[position]) for position in positions]

    def add(self, scores: Tensor, ids: Tensor | None, positions: Sequence[int]) -> Tensor:
        """``scores`` [n, size] plus the noise at each row's position (one position: of all rows).
        ``ids`` int64 [size]: the tokens of the columns; None: all."""
        if self.fused:
            return add_noise(scores, ids, keys_tensor(self.keys(positions), self._device))
        rows = self.row(positions[0])
        if len(positions) > 1:
            rows = torch.stack([self.row(position) for position in positions])
        return scores + (rows if ids is None else rows.index_select(-1, ids))

    def best(self, scores: Tensor, ids: Tensor | None, positions: Sequence[int]) -> Tensor:
        """The column with the highest sum of :meth:`add`, row by row, int64 [n]; ties go to the
        first."""
        if self.fused:
            return kernels.best(scores, keys_tensor(self.keys(positions), self._device), ids)
        return self.add(scores, ids, positions).argmax(-1)


def scaled(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits times the inverse temperature (unchanged when greedy or at temperature 1)."""
    plain = sampling.greedy or sampling.temperature == 1.0
    return logits if plain else logits * (1.0 / sampling.temperature)


NUCLEUS: Final = 1024
"""Tokens that top-p keeps of a draft at most (and those as probable as the last)."""


def least_kept(scores: Tensor, sampling: Sampling, *, draft: bool = False) -> Tensor | None:
    """The least of the scaled logits [n, vocab] that top-k, then top-p keep, [n, 1]; None when both
    are off. Tokens as probable as the last are kept, too. Only the most probable tokens are sorted;
    of a ``draft`` at most :data:`NUCLEUS`, so that a device is not waited for."""
    vocab, top_p = scores.shape[-1], sampling.top_p
    if not filters(sampling, vocab):
        return None
    if 0 < sampling.top_k < vocab:
        best = scores.topk(sampling.top_k, -1).values
        if top_p >= 1.0:
            return best[..., -1:]
        scores = scores.masked_fill(scores < best[..., -1:], -math.inf)
        return _nucleus(scores, _log_total(scores), top_p, sampling.top_k, grows=False)
    first = NUCLEUS if draft or scores.device.type != "cpu" else NUCLEUS // 16
    return _nucleus(scores, _log_total(scores), top_p, first, grows=not draft)


def _log_total(scores: Tensor) -> Tensor:
    return scores.double().logsumexp(-1, keepdim=True)


def _nucleus(scores: Tensor, log_total: Tensor, top_p: float, size: int, grows: bool) -> Tensor:
    """The least score [n, 1] of the shortest prefix by falling probability whose mass reaches
    ``top_p``, of the ``size`` best; ``grows``: of as many as that takes."""
    size = min(size, scores.shape[-1])
    best = scores.topk(size, -1).values
    mass = (best.double() - log_total).exp().cumsum(-1)
    least = best.gather(-1, (mass[..., :-1] < top_p).sum(-1, keepdim=True))
    if grows and size < scores.shape[-1]:
        short = mass[..., -1] < top_p
        if bool(short.any()):
            least[short] = _nucleus(scores[short], log_total[short], top_p, 16 * size, grows)
    return least


def filters(sampling: Sampling, vocab_size: int) -> bool:
    """Whether top-k or top-p leaves out anything."""
    return not sampling.greedy and (sampling.top_p < 1.0 or 0 < sampling.top_k < vocab_size)


def processed(logits: Tensor, sampling: Sampling, *, draft: bool = False) -> Tensor:
    """Scaled logits, -inf where filtered (:func:`least_kept`)."""
    scores = scaled(logits, sampling)
    least = least_kept(scores, sampling, draft=draft)
    return scores if least is None else scores.masked_fill(scores < least, -math.inf)


def log_distribution(logits: Tensor, sampling: Sampling, *, draft: bool = False) -> Tensor:
    """Log-probabilities of the distribution that tokens are drawn from, -inf where filtered; at
    temperature 0, where a stop reads them, those at temperature 1."""
    return processed(logits, sampling, draft=draft).log_softmax(-1)


def sample(
    logits: Tensor,
    sampling: Sampling,
    noise: Noise | None,
    positions: Sequence[int],
    *,
    draft: bool = False,
    ids: Tensor | None = None,
) -> Tensor:
    """argmax(logits / T + g) over the kept columns, row by row, int64 [n]; ties go to the first.

    ``logits`` [n, size] come before the tokens at ``positions``; ``noise`` is None when greedy, and
    in place of logits there may then be the ids of the largest, int64 [n]. ``ids`` int64 [size]:
    the tokens of the columns; None: all."""
    if noise is None:
        return logits if logits.dtype == torch.int64 else logits.argmax(-1)
    return noise.best(processed(logits, sampling, draft=draft), ids, positions)


def law(sampling: Sampling) -> tuple[float, int, float]:
    """What samplings have in common whose rows are processed together: all but the seed."""
    return sampling.temperature, sampling.top_k, sampling.top_p


class NoiseRows:
    """The noise of rows that are several requests', ``(noise, position)`` each, to be added as one
    request's is (:class:`Noise`)."""

    def __init__(self, rows: Sequence[tuple[Noise, int]]) -> None:
        self._rows = rows

    def add(self, scores: Tensor, ids: Tensor | None) -> Tensor:
        """:meth:`Noise.add`."""
        if self._rows[0][0].fused:
            return add_noise(scores, ids, self._keys(scores.device))
        rows = torch.stack([noise.row(position) for noise, position in self._rows])
        return scores + (rows if ids is None else rows.index_select(-1, ids))

    def best(self, scores: Tensor, ids: Tensor | None) -> Tensor:
        """:meth:`Noise.best`."""
        if self._rows[0][0].fused:
            return kernels.best(scores, self._keys(scores.device), ids)
        return self.add(scores, ids).argmax(-1)

    def _keys(self, device: torch.device) -> Tensor:
        keys = list[int]()
        for noise, rows in groupby(self._rows, itemgetter(0)):
            keys += noise.keys([at for _, at in rows])
        return keys_tensor(keys, device)


def sample_rows(
    logits: Tensor,
    rows: Sequence[tuple[Sampling, Noise | None, int]],
    *,
    draft: bool = False,
    ids: Tensor | None = None,
) -> Tensor:
    """:func:`sample` of rows that are several requests': how each is sampled, its request's noise,
    and the position of the token that it comes before."""
    laws = [law(sampling) for sampling, _, _ in rows]
    if logits.dtype == torch.int64 or len({*laws}) == 1:
        sampling, noise, position = rows[0]
        if len(rows) == 1 or noise is None:
            return sample(logits, sampling, noise, [position], draft=draft, ids=ids)
        scores = processed(logits, sampling, draft=draft)
        joint = NoiseRows([(noise, at) for _, noise, at in rows if noise is not None])
        return joint.best(scores, ids)
    out = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    for one in dict.fromkeys(laws):
        at = [i for i, other in enumerate(laws) if other == one]
        out[at] = sample_rows(logits[at], [rows[i] for i in at], draft=draft, ids=ids)
    return out
