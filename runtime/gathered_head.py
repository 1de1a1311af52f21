"""The gathered head of DynaSpec (section 4.3): logits over a union of tokens only, out[:, j] =
hidden . W[ids[j]] (+ bias[ids[j]]).

Of the head's work only what the shortlist needs is done, O(B d) instead of O(V d) for B tokens.
Ways to do it:

- ``kernel`` (CUDA, not in float64): a Triton kernel that selects and multiplies at once
  (:mod:`runtime.cuda.kernel`);
- ``compiled`` (CPU, float32): compiled sums that read the rows where they lie, four at a time, so
  that no sub-matrix is written; faster than the two below at every size measured (docs/log.md);
- ``gather``: the rows are copied into a buffer, then one product;
- ``full``: the product with all rows, of which the columns wanted are kept; for unions that are
  most of the vocabulary.

Ways differ in the last bits, as batch shapes do; products made by a library are rounded to the
weights' dtype, the others only to float32."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Literal, cast

import numba
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from spectune.runtime.cuda.kernel import gathered_logits, kernel_runs, power_of_two
from spectune.traces.errors import PolicyError

FloatArray = npt.NDArray[np.float32]
Sums = Callable[[FloatArray, FloatArray, npt.NDArray[np.int64], FloatArray], int]
Way = Literal["kernel", "compiled", "gather", "full"]


class GatheredHead:
    """An output matrix of which shortlists are multiplied: ``weight`` [vocab, d], ``bias`` [vocab].

    Hidden states are [n, d] of any float dtype, cast to the weights'; logits are float32. The
    weights are shared with the model, not copied, unless their rows are not contiguous."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight.detach().contiguous()
        self.bias = None if bias is None else bias.detach().contiguous()
        self.vocab_size, self.hidden_size = self.weight.shape
        self.device, self.dtype = weight.device, weight.dtype
        self._float_bias = None if self.bias is None else self.bias.float()
        sums = self.device.type == "cpu" and self.dtype == torch.float32
        self._rows = self.weight.numpy() if sums else None
        # The kernel sums in float32.
        fine = self.dtype == torch.float64
        self._has_kernel = not fine and kernel_runs(self.device, self.hidden_size)

    def way(self, count: int) -> Way:
        """How logits of ``count`` tokens are made."""
        if self._rows is not None:
            return "compiled"
        if 2 * count > self.vocab_size:
            return "full"
        return "kernel" if self._has_kernel else "gather"

    def over(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Logits [n, len(ids)] of tokens ``ids`` (int64, on the head's device; ascending reads
        memory in order, any order is right).

        Raises PolicyError, or what torch raises, for ids beyond the matrix; on CUDA ids are not
        checked, which would wait for it."""
        way = self.way(len(ids))
        if hidden.requires_grad or hidden.dtype != self.dtype or not hidden.is_contiguous():
            hidden = hidden.detach().to(self.dtype).contiguous()
        if way == "kernel":
            return gathered_logits(hidden, self.weight, ids, bias=self.bias)
        if way == "compiled":
            out = self._sums(hidden, ids)
        elif way == "gather":
            out = F.linear(hidden, self.weight.index_select(0, ids)).float()
        else:
            out = F.linear(hidden, self.weight).index_select(1, ids).float()
        return out if self._float_bias is None else out.add_(self._float_bias[ids])

    def warm(self, rows: int, least: int, most: int) -> None:
        """Launches what is compiled at a first launch for up to ``rows`` hidden states and
        ``least`` to ``most`` tokens, so that no round waits for it."""
        if not self._has_kernel:
            return
        for n, count in itertools.product(_powers(1, rows), _powers(least, most)):
            size = min(self.vocab_size, count)
            # Triton tells multiples of 16.
            for m, k in itertools.product({n, max(1, n - 1)}, {size, max(1, size - 1)}):
                hidden = torch.zeros(m, self.hidden_size, dtype=self.dtype, device=self.device)
                self.over(hidden, torch.arange(k, device=self.device))

    def _sums(self, hidden: Tensor, ids: Tensor) -> Tensor:
        assert self._rows is not None
        out = torch.empty(len(hidden), len(ids))
        if _sums(self._rows, hidden.numpy(), ids.contiguous().numpy(), out.numpy()) >= 0:
            raise PolicyError(
                f"a shortlist holds a token outside 0 .. {self.vocab_size - 1}; fit it for this "
                "draft's vocabulary"
            )
        return out


def _powers(least: int, most: int) -> list[int]:
    """What :func:`power_of_two` makes of the numbers from ``least`` to ``most``."""
    first, last = (power_of_two(n).bit_length() for n in (least, most))
    return [1 << bits for bits in range(first - 1, last)]


def _reassociated(function: Callable[..., int]) -> Sums:
    """Compiled with leave to add in any order, without which sums are not vectorized; NaN and
    infinities stay what they are.

    Uses no other module's code, so numba's own disk cache never goes stale
    (:mod:`runtime.policies.jit`)."""
    options = {"nogil": True, "error_model": "numpy", "fastmath": {"reassoc", "contract", "nsz"}}
    try:
        return cast(Sums, numba.njit(cache=True, _nrt=False, **options)(function))
    except RuntimeError:  # no folder to keep the machine code in
        return cast(Sums, numba.njit(**options)(function))


@_reassociated
def _sums(
    weight: FloatArray, hidden: FloatArray, ids: npt.NDArray[np.int64], out: FloatArray
) -> int:
    """out[i, j] = hidden[i] . weight[ids[j]]; the first j whose id is no row, before anything is
    written, or -1.

    Four rows at a time keep the memory busy, two hidden states at a time use each value twice.
    """
    vocab, d = weight.shape
    n, count = hidden.shape[0], ids.shape[0]
    for j in range(count):
        if ids[j] < 0 or ids[j] >= vocab:
            return j
    zero = np.float32(0.0)
    fours, twos = count - count % 4, n - n % 2
    for j in range(0, fours, 4):
        a, b, c, e = ids[j], ids[j + 1], ids[j + 2], ids[j + 3]
        for i in range(0, twos, 2):
            s0, s1, s2, s3 = zero, zero, zero, zero
            t0, t1, t2, t3 = zero, zero, zero, zero
            for k in range(d):
                x, y = hidden[i, k], hidden[i + 1, k]
                s0 += weight[a, k] * x
                s1 += weight[b, k] * x
                s2 += weight[c, k] * x
                s3 += weight[e, k] * x
                t0 += weight[a, k] * y
                t1 += weight[b, k] * y
                t2 += weight[c, k] * y
                t3 += weight[e, k] * y
            out[i, j], out[i, j + 1], out[i, j + 2], out[i, j + 3] = s0, s1, s2, s3
            out[i + 1, j], out[i + 1, j + 1], out[i + 1, j + 2], out[i + 1, j + 3] = t0, t1, t2, t3
        for i in range(twos, n):
            s0, s1, s2, s3 = zero, zero, zero, zero
            for k in range(d):
                x = hidden[i, k]
                s0 += weight[a, k] * x
                s1 += weight[b, k] * x
                s2 += weight[c, k] * x
                s3 += weight[e, k] * x
            out[i, j], out[i, j + 1], out[i, j + 2], out[i, j + 3] = s0, s1, s2, s3
    for j in range(fours, count):
        for i in range(n):
            s0 = zero
            for k in range(d):
                s0 += weight[ids[j], k] * hidden[i, k]
            out[i, j] = s0
    return -1
