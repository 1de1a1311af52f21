"""The gathered head of DynaSpec (section 4.3): logits over a union of tokens only, out[:, j] = hidden . W[ids[j]] (+ bias[ids[j]]).

Of the head's work only what the shortlist needs is done, O(B d) instead of O(V d) for B tokens. Ways to do it:

- ``compiled`` (CPU, float32): compiled sums that read the rows where they lie, four at a time, so that no sub-matrix is written;
- ``gather``: the rows are copied into a buffer, then one product;
- ``full``: the product with all rows, of which the columns wanted are kept; pays for unions that are most of the vocabulary;
- ``products``: one product per cluster of a matrix that was permuted once so that each cluster's rows lie together;
- ``kernel`` (CUDA): a Triton kernel that selects and multiplies at once (:mod:`runtime.gathered_kernel`).

Which is fastest depends on the machine, the sizes and the union, so a head measures them (:meth:`GatheredHead.fastest`). Ways differ in
the last bits, as batch shapes do; products made by a library are rounded to the weights' dtype, the others only to float32.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final, cast

import numba
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.gathered_kernel import gathered_logits, kernel_runs, power_of_two
from traces.errors import PairError, PolicyError

Sums = Callable[[npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.int64], npt.NDArray[np.float32]], int]

DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
MEASURED_SECONDS: Final = 0.02
"""Time that the fastest way is measured for, about; every way is called three times at least and :data:`MEASURED_CALLS` times at most,
beside a first call that does not count."""
MEASURED_CALLS: Final = 15
HOPELESS: Final = 2.0
"""Ways this many times slower than the best after three calls are not measured further."""


class GatheredHead:
    """An output matrix of which shortlists are multiplied: ``weight`` [vocab, d] float32, bfloat16 or float16, ``bias`` [vocab].

    With ``members`` (int64, token ids, cluster after cluster) and ``offsets`` (int64 [M + 1]: cluster m holds ``members[offsets[m] :
    offsets[m + 1]]``, possibly none) a permuted copy of the matrix is made for :meth:`blocks`; no token may be in two clusters.
    ``way`` forces one of the ways above for :meth:`over` and :meth:`blocks`; by default the fastest is taken. The weights are shared with
    the model, not copied, unless their rows are not contiguous.

    Hidden states are [n, d] of any float dtype, cast to the weights'; logits are float32. A head is for one thread at a time. Raises
    PairError for weights, biases, hidden states and ways that do not fit, PolicyError for ids, clusters and partitions that do not.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        members: Tensor | None = None,
        offsets: Tensor | None = None,
        way: str | None = None,
    ) -> None:
        self._every = _Matrix(weight, bias)
        self.vocab_size, self.hidden_size = self._every.weight.shape
        self.device, self.dtype = weight.device, weight.dtype
        self._way = way
        self._trimmed: dict[Hashable, tuple[Tensor, _Matrix]] = {}
        self._permuted: _Matrix | None = None
        self._shape = 0
        if members is not None or offsets is not None:
            self._partition(members, offsets)
        ways = (*self._every.ways, *(("products",) if self._permuted else ()))
        if way is not None and way not in ways:
            raise PairError(f"a gathered head on {self.device} in {self.dtype} has no way {way!r}; it has {', '.join(ways)}")

    def _partition(self, members: Tensor | None, offsets: Tensor | None) -> None:
        if members is None or offsets is None:
            raise PolicyError("clusters of the vocabulary need both their members and their offsets")
        bounds = offsets.tolist()
        if members.ndim != 1 or members.dtype != torch.int64 or offsets.ndim != 1 or offsets.dtype != torch.int64:
            raise PolicyError("members and offsets of clusters must be one-dimensional int64; fit the clusters again")
        if not bounds or bounds[0] != 0 or bounds[-1] != len(members) or bounds != sorted(bounds):
            raise PolicyError(f"offsets of clusters must ascend from 0 to the {len(members)} members; fit the clusters again")
        if len(members) and not 0 <= int(members.min()) <= int(members.max()) < self.vocab_size:
            raise PolicyError(
                f"a cluster holds a token outside the vocabulary of {self.vocab_size}; fit the clusters for this draft"
            )
        if len(torch.unique(members)) != len(members):
            raise PolicyError("a token is in two clusters; fit the clusters again")
        self._members = members.to(self.device)
        self._permuted = self._every.part(self._members)
        self._bounds: list[int] = bounds
        self._shape = hash(tuple(bounds))
        self._sizes = [b - a for a, b in itertools.pairwise(bounds)]
        places = torch.arange(len(members), device=self.device)
        self._places = [places[a:b] for a, b in itertools.pairwise(bounds)]
        self._numpy_places = [part.numpy() for part in self._places] if self.device.type == "cpu" else None

    def full(self, hidden: Tensor) -> Tensor:
        """Logits [n, vocab] of the whole vocabulary."""
        hidden = self._every.fitted(hidden)
        return self._every.all(hidden, self._fastest("all", self._every, len(hidden), self.vocab_size))

    def over(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Logits [n, len(ids)] of tokens ``ids`` (int64, on the head's device; ascending reads memory in order, any order is right).

        On CUDA ids are not checked, which would wait for the device.
        """
        hidden = self._every.fitted(hidden)
        self._check(ids)
        way = self._way if self._way not in (None, "products") else None
        return self._every.over(hidden, ids, way or self._fastest("over", self._every, len(hidden), len(ids)))

    def padded(self, hidden: Tensor, ids: Tensor, count: Tensor) -> Tensor:
        """Logits [n, capacity] of the first ``count`` (int32 or int64 tensor of one element, on the head's device) of ``ids`` (int64
        [capacity]); -inf behind them. What ``ids`` holds there is not looked at. On CUDA nothing waits for the device and all shapes are
        fixed, so that a CUDA graph can capture it; call it once with these shapes before, since Triton compiles at a first launch.
        """
        hidden = self._every.fitted(hidden)
        self._check(ids)
        if count.numel() != 1 or count.dtype not in (torch.int32, torch.int64) or count.device != ids.device:
            raise PolicyError("the count of a padded shortlist must be one int32 or int64 element beside its ids")
        if "kernel" in self._every.ways and self._way in (None, "kernel"):
            return gathered_logits(hidden, self._every.weight, ids, bias=self._every.bias, count=count)
        if self.device.type == "cpu":
            used = min(max(int(count), 0), len(ids))
            out = hidden.new_full((len(hidden), len(ids)), -torch.inf, dtype=torch.float32)
            out[:, :used] = self.over(hidden, ids[:used])
            return out
        return self._every.padded(hidden, ids, count)

    def trimmed(self, hidden: Tensor, key: Hashable, ids: Tensor) -> Tensor:
        """Logits [n, len(ids)] of a shortlist that never changes (frequency kinds): its rows are copied once and kept under ``key``, say
        the shortlist's size; column j belongs to ``ids[j]``. Make the copy before a CUDA graph is captured, by calling this once. Raises
        PolicyError where ``key`` was used for other ids (on CUDA: for another number of ids)."""
        hidden = self._every.fitted(hidden)
        known = self._trimmed.get(key)
        if known is None:
            self._check(ids)
            self._trimmed[key] = known = (ids.clone(), self._every.part(ids))
        kept, matrix = known
        if len(kept) != len(ids) or (self.device.type == "cpu" and not torch.equal(kept, ids)):
            raise PolicyError(f"the fixed shortlist {key!r} was trimmed to other ids before; use another key for these")
        return matrix.all(hidden, self._fastest("all", matrix, len(hidden), len(ids)))

    def blocks(self, hidden: Tensor, clusters: Sequence[int]) -> Tensor:
        """Logits of the tokens of ``clusters``, [n, tokens], in the order of :meth:`block_ids`. Raises PolicyError for a head built without
        clusters, and for clusters that are repeated or not there."""
        matrix = self._clustered(clusters)
        hidden = matrix.fitted(hidden)
        count = sum(self._sizes[c] for c in clusters)
        way = self._way or self._fastest("blocks", matrix, len(hidden), count)
        if way == "products":
            return matrix.products(hidden, [(self._bounds[c], self._bounds[c + 1]) for c in clusters])
        return matrix.over(hidden, self._at(clusters), way)

    def block_ids(self, clusters: Sequence[int]) -> Tensor:
        """Token ids int64 of :meth:`blocks`' columns: cluster after cluster, as in ``members``."""
        self._clustered(clusters)
        return self._members[self._at(clusters)]

    def fastest(self, rows: int, count: int, what: str = "over") -> str:
        """The way that is fastest for ``rows`` hidden states and ``count`` tokens; ``what`` is ``over``, ``blocks`` or ``all`` (the ways of
        :meth:`full`: ``linear``, ``compiled``).

        Measured on random numbers, at the next powers of two, when first asked for, and remembered for all heads of the same shape, dtype
        and device in this process. That takes tens of milliseconds, so ask for what will be needed before it is. Random number streams of
        torch are left alone. While a CUDA graph is captured nothing is measured, and what was not measured is the kernel (else ``gather``).
        """
        matrix = self._permuted if what == "blocks" else self._every
        if what not in ("over", "blocks", "all") or matrix is None:
            raise PolicyError(f"no ways to compare for {what!r} in this head; say 'over', 'all', or 'blocks' with clusters")
        return self._fastest(what, matrix, rows, count)

    def warm(self, rows: int, counts: tuple[int, int], what: str = "over") -> None:
        """Measures every case that calls with up to ``rows`` hidden states and ``counts`` (least, most) tokens can meet, and launches what
        is compiled at a first launch, so that no such call is slow. ``what`` as in :meth:`fastest`, ``over`` or ``all``."""
        least, most = (min(self.vocab_size, power_of_two(count)) for count in counts)
        for n in (1 << bits for bits in range(power_of_two(rows).bit_length())):
            count = least
            while True:
                if self.fastest(n, count, what) == "kernel":
                    for m, size in itertools.product(
                        {n, max(1, n - 1)}, {count, max(1, count - 1)}
                    ):  # Triton tells multiples of 16
                        ids = torch.arange(size, device=self.device)
                        self.over(torch.zeros(m, self.hidden_size, dtype=self.dtype, device=self.device), ids)
                if count >= most:
                    break
                count = min(self.vocab_size, 2 * count)

    def _fastest(self, what: str, matrix: _Matrix, rows: int, count: int) -> str:
        rows, count = power_of_two(rows), min(len(matrix.weight), power_of_two(count))
        known = matrix.fastest.get((what, rows, count))
        if known is not None:
            return known
        vocab, hidden_size = matrix.weight.shape
        ways = matrix.all_ways if what == "all" else matrix.ways
        if what == "blocks":
            ways = (*ways, "products")
        if len(ways) == 1:
            return ways[0]
        shape = (vocab, hidden_size, self._shape if what == "blocks" else 0)
        key = (what, self.device, self.dtype, shape, torch.get_num_threads(), ways, rows, count)
        found = _measured.get(key)
        if found is None:
            if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return "kernel" if "kernel" in ways else "gather" if "gather" in ways else ways[0]
            found = _measured[key] = quickest(self._trials(what, matrix, ways, rows, count), self.device)
        matrix.fastest[what, rows, count] = found
        return found

    def _trials(
        self, what: str, matrix: _Matrix, ways: tuple[str, ...], rows: int, count: int
    ) -> dict[str, Callable[[], object]]:
        """Calls of each way on ``rows`` random hidden states and ``count`` random rows of ``matrix``."""
        generator = torch.Generator().manual_seed(0)
        vocab, hidden_size = matrix.weight.shape
        hidden = torch.randn(rows, hidden_size, generator=generator).to(self.device, self.dtype)
        if what == "all":
            return {way: functools.partial(matrix.all, hidden, way) for way in ways}
        if what == "over":
            ids = torch.randperm(vocab, generator=generator)[:count].sort().values.to(self.device)
            return {way: functools.partial(matrix.over, hidden, ids, way) for way in ways}
        clusters: list[int] = []
        total = 0
        for c in torch.randperm(len(self._sizes), generator=generator).tolist():
            if total < count:
                clusters.append(c)
                total += self._sizes[c]
        spans = [(self._bounds[c], self._bounds[c + 1]) for c in clusters]
        return {
            way: (lambda: matrix.products(hidden, spans))
            if way == "products"
            else functools.partial(lambda way: matrix.over(hidden, self._at(clusters), way), way)
            for way in ways
        }

    def _clustered(self, clusters: Sequence[int]) -> _Matrix:
        if self._permuted is None:
            raise PolicyError("this head was built without clusters; give it members and offsets")
        there = len(self._sizes)
        if len(set(clusters)) != len(clusters) or (clusters and not 0 <= min(clusters) <= max(clusters) < there):
            raise PolicyError(f"clusters to multiply must be different ones of the {there} there are, not {list(clusters)}")
        return self._permuted

    def _at(self, clusters: Sequence[int]) -> Tensor:
        """Rows of the permuted matrix that ``clusters`` are."""
        if not clusters:
            return self._members[:0]
        if self._numpy_places is not None:  # half the time of torch's for many small parts
            return torch.from_numpy(np.concatenate([self._numpy_places[c] for c in clusters]))
        return torch.cat([self._places[c] for c in clusters])

    def _check(self, ids: Tensor) -> None:
        if ids.ndim != 1 or ids.dtype != torch.int64 or ids.device != self.device:
            raise PolicyError(
                f"a shortlist must be one-dimensional int64 on {self.device}, not {ids.dtype} {list(ids.shape)} on {ids.device}"
            )


class _Matrix:
    """A matrix of rows [vocab, d], a bias, and every way to multiply hidden states with some rows or all."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        if weight.ndim != 2 or weight.dtype not in DTYPES:
            raise PairError(
                f"an output matrix must be [vocab, d] in float32, bfloat16 or float16, not {list(weight.shape)} {weight.dtype}"
            )
        if bias is not None and (bias.shape != weight.shape[:1] or bias.device != weight.device):
            raise PairError(f"the bias of an output matrix must be [{weight.shape[0]}] on {weight.device}, as its rows are")
        self.weight = weight.detach().contiguous()
        self.bias = None if bias is None else bias.detach().contiguous()
        self._float_bias = None if self.bias is None else self.bias.float()
        self.fastest: dict[tuple[str, int, int], str] = {}
        self._buffer: Tensor | None = None
        self._order = torch.zeros(0, dtype=torch.int64)
        sums = weight.device.type == "cpu" and weight.dtype == torch.float32
        self._rows = self.weight.numpy() if sums else None
        compiled = ("compiled",) if sums else ()
        self.ways: tuple[str, ...] = (*compiled, *(("kernel",) if kernel_runs(weight.device) else ()), "gather", "full")
        self.all_ways: tuple[str, ...] = (*compiled, "linear")

    def part(self, ids: Tensor) -> _Matrix:
        """The rows ``ids``, copied."""
        try:
            return _Matrix(self.weight.index_select(0, ids), None if self.bias is None else self.bias.index_select(0, ids))
        except (IndexError, RuntimeError) as error:
            raise self._outside() from error

    def fitted(self, hidden: Tensor) -> Tensor:
        """``hidden`` [n, d], contiguous, in the weights' dtype."""
        if hidden.ndim != 2 or hidden.shape[1] != self.weight.shape[1] or hidden.device != self.weight.device:
            raise PairError(
                f"hidden states {list(hidden.shape)} on {hidden.device} do not fit an output matrix of width {self.weight.shape[1]} "
                f"on {self.weight.device}"
            )
        if hidden.requires_grad or hidden.dtype != self.weight.dtype or not hidden.is_contiguous():
            return hidden.detach().to(self.weight.dtype).contiguous()
        return hidden

    def over(self, hidden: Tensor, ids: Tensor, way: str) -> Tensor:
        """Float32 [n, len(ids)]."""
        if way == "compiled":
            return self._biased(self._sums(hidden, ids), ids)
        if way == "kernel":
            return gathered_logits(hidden, self.weight, ids, bias=self.bias)
        if self.weight.device.type == "cpu" and len(ids):
            low, high = torch.aminmax(ids)
            if int(low) < 0 or int(high) >= self.weight.shape[0]:
                raise self._outside()
        if way == "full":
            return self._biased(F.linear(hidden, self.weight).index_select(1, ids).float(), ids)
        return self._biased(F.linear(hidden, self._gathered(ids)).float(), ids)

    def all(self, hidden: Tensor, way: str) -> Tensor:
        """Float32 [n, vocab]."""
        if way == "compiled":
            if len(self._order) != self.weight.shape[0]:
                self._order = torch.arange(self.weight.shape[0])
            return self._biased(self._sums(hidden, self._order), None)
        return self._biased(F.linear(hidden, self.weight).float(), None)

    def padded(self, hidden: Tensor, ids: Tensor, count: Tensor) -> Tensor:
        """Float32 [n, len(ids)], -inf from ``count`` on, without the kernel and without waiting for the device."""
        beyond = torch.arange(len(ids), device=ids.device) >= count
        return self.over(hidden, ids.masked_fill(beyond, 0), "gather").masked_fill(beyond, -torch.inf)

    def products(self, hidden: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
        """Float32 [n, sum of lengths] of the rows in ``spans`` (begin, end), a product each."""
        out = hidden.new_empty(len(hidden), sum(b - a for a, b in spans))
        at = 0
        for a, b in spans:
            if b > a:
                torch.mm(hidden, self.weight[a:b].T, out=out[:, at : at + b - a])
                at += b - a
        out = out.float()
        if self._float_bias is not None and spans:
            out += torch.cat([self._float_bias[a:b] for a, b in spans])
        return out

    def _gathered(self, ids: Tensor) -> Tensor:
        """Rows ``ids``. On the CPU into a buffer that grows; elsewhere torch's allocator is such a buffer, and safe to capture."""
        if self.weight.device.type != "cpu":
            return self.weight.index_select(0, ids)
        if self._buffer is None or len(self._buffer) < len(ids):
            self._buffer = self.weight.new_empty(len(ids), self.weight.shape[1])
        rows = self._buffer[: len(ids)]
        torch.index_select(self.weight, 0, ids, out=rows)
        return rows

    def _sums(self, hidden: Tensor, ids: Tensor) -> Tensor:
        assert self._rows is not None
        out = torch.empty(len(hidden), len(ids))
        if _sums(self._rows, hidden.numpy(), ids.contiguous().numpy(), out.numpy()) >= 0:
            raise self._outside()
        return out

    def _biased(self, out: Tensor, ids: Tensor | None) -> Tensor:
        """``out``, to which the biases of ``ids`` (None: of all rows) are added in place."""
        if self._float_bias is not None:
            out += self._float_bias if ids is None else self._float_bias[ids]
        return out

    def _outside(self) -> PolicyError:
        return PolicyError(
            f"a shortlist holds a token outside 0 .. {self.weight.shape[0] - 1}; fit it for this draft's vocabulary"
        )


# -- choosing a way ------------------------------------------------------------------------------------------------------------------

_measured: dict[tuple[Any, ...], str] = {}


def quickest(ways: Mapping[str, Callable[[], object]], device: torch.device) -> str:
    """The name whose call takes least time on ``device``: the shortest of several, taken in turns (:data:`MEASURED_SECONDS`,
    :data:`HOPELESS`), which a busy machine disturbs less than a mean."""

    def timed(way: str) -> float:
        began = time.perf_counter()
        ways[way]()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    for way in ways:
        timed(way)
    times = dict.fromkeys(ways, math.inf)

    def turns(running: Sequence[str], calls: int) -> float:
        for _ in range(calls):
            for way in running:
                times[way] = min(times[way], timed(way))
        return min(times.values())

    best = turns(list(ways), 3)
    hopeful = [way for way in ways if times[way] <= HOPELESS * best]
    turns(hopeful, min(MEASURED_CALLS, int(MEASURED_SECONDS / max(1e-9, best))) - 3)
    return min(ways, key=lambda way: times[way])


# -- sums on the CPU -----------------------------------------------------------------------------------------------------------------


def _reassociated(function: Callable[..., int]) -> Sums:
    """Compiled with leave to add in any order, without which sums are not vectorized; NaN and infinities stay what they are.

    Uses no other module's code, so numba's own disk cache never goes stale (:mod:`runtime.policies.jit`).
    """
    options = {"nogil": True, "error_model": "numpy", "fastmath": {"reassoc", "contract", "nsz"}}
    try:
        return cast(Sums, numba.njit(cache=True, _nrt=False, **options)(function))
    except RuntimeError:  # no folder to keep the machine code in
        return cast(Sums, numba.njit(**options)(function))


@_reassociated
def _sums(
    weight: npt.NDArray[np.float32], hidden: npt.NDArray[np.float32], ids: npt.NDArray[np.int64], out: npt.NDArray[np.float32]
) -> int:
    """out[i, j] = hidden[i] . weight[ids[j]]; the first j whose id is no row, before anything is written, or -1.

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
