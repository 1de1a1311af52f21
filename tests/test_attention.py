"""What passes allocate at long contexts, and that a causal pass without a mask gives what the
models' own code gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pairs import tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from spectune.runtime.attention import cudnn_attention, eager_kernels, slot_attention
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


def model(kind: str) -> CausalModel:
    return CausalModel(tiny_model(kind, VOCAB, positions=LONG), "target")


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_memory_grows_with_the_context_not_with_its_square(kind: str) -> None:
    """Making room, reading a prompt, and a pass without the cache: no tensor has more than 1024
    elements a token, where a causal mask has 4096.

    At 131,072 tokens masks are 64 MiB (512 rows); a mask of all pairs would be 16 GiB.
    """
    target, ids = model(kind), torch.arange(LONG) % VOCAB
    target.taps = (FINAL,)
    with Largest() as largest:
        target.reserve(LONG)
        target.read(ids, 0)
        target.chain(ids[-1:], LONG - 1, logits=1)
        target.features(ids.tolist())
    assert largest.elements <= 1024 * LONG


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_pass_without_a_mask_is_causal(kind: str) -> None:
    """Logits after a text read at once, and after a prompt read in parts, against the forward pass
    of transformers with its own attention."""
    target, ids = model(kind), torch.arange(700).square() % VOCAB
    own = tiny_model(kind, VOCAB, positions=LONG)
    with torch.no_grad():
        expected = own(ids[None]).logits[0]
    target.reserve(len(ids))
    target.read(ids[:-3], 0)
    read, _ = target.chain(ids[-3:], len(ids) - 3, logits=3)
    assert (read - expected[-3:]).abs().max() < 2e-4
    target.taps = (FINAL,)
    at_once = target.head(target.features(ids.tolist()))
    assert (at_once - expected).abs().max() < 2e-4


def test_wide_masks_are_taken_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention by blocks of queries is attention; without a mask there may be no cache."""
    q, k = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 20, 8)
    mask = torch.rand(1, 1, 9, 20) < 0.7
    mask[..., 0] = True
    whole = slot_attention(torch.nn.Module(), q, k, k, mask)[0]
    monkeypatch.setattr("spectune.runtime.attention.MASK_ENTRIES", 100)
    torch.testing.assert_close(slot_attention(torch.nn.Module(), q, k, k, mask)[0], whole)
    with pytest.raises(ValueError, match="explicit mask"):
        slot_attention(torch.nn.Module(), q, k, k, None)


def test_a_kernel_may_lay_its_output_out_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As CUDA's memory-efficient one does."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, n, 8, generator=generator) for heads, n in ((4, 3), (2, 12)))
    mask = torch.rand(1, 1, 3, 12, generator=generator) > 0.3
    by_heads = slot_attention(torch.nn.Module(), q, k, k, mask)[0]
    plain = F.scaled_dot_product_attention

    def by_rows(*args: Any, **kwargs: Any) -> torch.Tensor:
        return plain(*args, **kwargs).transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(F, "scaled_dot_product_attention", by_rows)
    torch.testing.assert_close(slot_attention(torch.nn.Module(), q, k, k, mask)[0], by_heads)


@pytest.mark.parametrize("before", [True, False])
def test_eager_passes_do_without_cudnn_and_captured_ones_with_it(before: bool) -> None:
    """Also where one thread captures while another decodes; then the process has its own choice
    again."""
    flag = torch.backends.cuda
    was = flag.cudnn_sdp_enabled()
    flag.enable_cudnn_sdp(before)
    try:
        eager, captured = eager_kernels(torch.device("cuda")), cudnn_attention(True)
        with eager:
            assert not flag.cudnn_sdp_enabled()
            captured.__enter__()
            assert flag.cudnn_sdp_enabled()
        captured.__exit__(None, None, None)
        assert flag.cudnn_sdp_enabled() == before
        with eager_kernels(torch.device("cpu")):
            assert flag.cudnn_sdp_enabled() == before
    finally:
        flag.enable_cudnn_sdp(was)
