"""What passes allocate at long contexts, and that a causal pass without a mask gives what the
models' own code gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pairs import tiny_model
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from spectune.runtime.attention import attend
from spectune.runtime.models import FINAL, CausalModel

VOCAB, LONG = 60, 4096


class Largest(TorchDispatchMode):
    """Remembers the most elements that a tensor had which an operation gave."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return out


def model(kind: str, dtype: torch.dtype = torch.float32) -> CausalModel:
    return CausalModel(tiny_model(kind, VOCAB, positions=LONG).to(dtype), "target")


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3"])
def test_memory_grows_with_the_context_not_with_its_square(kind: str) -> None:
    """Making room, and reading a prompt: no tensor has more than 1024 elements a token, where a
    causal mask has 4096.

    At 131,072 tokens masks are 64 MiB (512 rows); a mask of all pairs would be 16 GiB.
    """
    target, ids = model(kind), torch.arange(LONG) % VOCAB
    target.taps = (FINAL,)
    with Largest() as largest:
        target.reserve(LONG)
        target.read(ids, 0)
        target.chain(ids[-1:], LONG - 1, logits=1)
    assert largest.elements <= 1024 * LONG


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3", "mistral"])
def test_a_pass_without_a_mask_is_causal(kind: str) -> None:
    """Logits after a text read at once, and after a prompt read in parts, against the forward pass
    of transformers with its own attention."""
    target, ids = model(kind, torch.float64), torch.arange(700).square() % VOCAB
    own = tiny_model(kind, VOCAB, positions=LONG).double()
    with torch.no_grad():
        expected = own(ids[None]).logits[0]
    target.reserve(len(ids))
    for start, stop in ((0, 150), (150, 151), (151, 250), (250, 697)):
        target.read(ids[start:stop], start)
    read, _ = target.chain(ids[-3:], len(ids) - 3, logits=3)
    torch.testing.assert_close(read.double(), expected[-3:], rtol=0, atol=1e-6)
    target.taps = (FINAL,)
    target.read(ids, 0)
    at_once = target.head(target.tapped)
    torch.testing.assert_close(at_once.double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("heads", [2, 4], ids=["alone", "grouped"])
@pytest.mark.parametrize("width", [1, 5, 20])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_is_softmax_of_scores(heads: int, width: int, masked: bool) -> None:
    generator = torch.Generator().manual_seed(width)
    query, keys, values = (
        torch.randn(1, h, n, 8, generator=generator, dtype=torch.float64)
        for h, n in ((heads, width), (2, 20), (2, 20))
    )
    seen = torch.ones(width, 20, dtype=torch.bool).tril(20 - width)
    if masked:
        seen &= torch.rand(width, 20, generator=generator) > 0.3
        seen[:, 0] = True
    out = attend(query, keys, values, seen if masked else None)
    keys, values = (x.repeat_interleave(heads // 2, 1) for x in (keys, values))
    scores = query @ keys.transpose(2, 3) / 8**0.5
    expected = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


def test_a_kernel_may_lay_its_output_out_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As CUDA's memory-efficient one does."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, n, 8, generator=generator) for heads, n in ((4, 3), (2, 12)))
    mask = torch.rand(3, 12, generator=generator) > 0.3
    by_heads = attend(q, k, k, mask)
    plain = F.scaled_dot_product_attention

    def by_rows(*args: Any, **kwargs: Any) -> torch.Tensor:
        return plain(*args, **kwargs).transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(F, "scaled_dot_product_attention", by_rows)
    torch.testing.assert_close(attend(q, k, k, mask), by_heads)


@pytest.mark.parametrize("before", [True, False])
def test_passes_do_without_cudnn(before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA, where each of its plans takes longer than a pass; then the process has its own
    choice again."""
    flag, seen = torch.backends.cuda, list[bool]()

    def noting(query: torch.Tensor, *_: Any, **options: Any) -> torch.Tensor:
        seen.append(flag.cudnn_sdp_enabled())
        return query

    monkeypatch.setattr(F, "scaled_dot_product_attention", noting)
    was = flag.cudnn_sdp_enabled()
    flag.enable_cudnn_sdp(before)
    try:
        for device in ("cuda", "cpu"):
            with FakeTensorMode():
                states = torch.empty(1, 2, 3, 8, device=device)
                attend(states, states, states)
            assert flag.cudnn_sdp_enabled() == before
    finally:
        flag.enable_cudnn_sdp(was)
    assert seen == [False, before]
