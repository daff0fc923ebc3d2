"""Products where torch has none worth the name: through fp32, in pieces, in memory that is kept."""

from __future__ import annotations

import pytest
import torch
from allocations import allocations
from torch.nn import functional

from ridgeline import products
from ridgeline.products import linear, product_dtype

BF16 = torch.bfloat16
CPU = torch.device("cpu")


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without products in bf16, and small pieces."""
    monkeypatch.setattr(products, "_slow_on_cpu", lambda dtype: dtype == BF16)
    monkeypatch.setattr(products, "_converts_bf16", lambda: False)
    monkeypatch.setattr(products, "PIECE", 4096)


@pytest.mark.parametrize("num_rows", [1, 70, 300])
@pytest.mark.parametrize(("num_outputs", "depth"), [(48, 64), (500, 33), (3, 5000)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_pieces_make_the_whole(
    slow: None, num_rows: int, num_outputs: int, depth: int, has_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, depth + 3, generator=generator).to(BF16)[:, :depth]
    weight = (torch.randn(num_outputs, depth, generator=generator) * depth**-0.5).to(BF16)
    bias = torch.randn(num_outputs, generator=generator).to(BF16) if has_bias else None
    expected = functional.linear(x.float(), weight.float()).to(BF16)
    if bias is not None:
        expected += bias
    assert torch.equal(linear(x, weight, bias), expected)
    assert torch.equal(linear(x[None], weight, bias)[0], expected)
    if bias is None:
        out = torch.full((num_rows, num_outputs), float("nan"), dtype=BF16)
        assert linear(x, weight, out=out) is out
        assert torch.equal(out, expected)


def test_a_row_is_torchs_where_torch_converts(slow: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is bound by reading the weight, which would be copied first."""
    monkeypatch.setattr(products, "_converts_bf16", lambda: True)
    x, weight = torch.randn(2, 64).to(BF16), torch.randn(48, 64).to(BF16)
    asked = []
    monkeypatch.setattr(products, "_in_pieces", lambda x, *_: asked.append(len(x)))
    assert torch.equal(linear(x[:1], weight), functional.linear(x[:1], weight))
    assert not asked
    linear(x, weight)
    assert asked == [2]


def test_nothing_but_the_result_is_allocated(slow: None) -> None:
    x, weight = torch.randn(64, 256).to(BF16), torch.randn(512, 256).to(BF16)
    linear(x, weight)
    found = allocations(lambda: linear(x, weight))
    assert found.peak_bytes == found.kept_bytes == 64 * 512 * 2


def test_scratch_from_inference_serves_what_is_not(slow: None) -> None:
    x, weight = torch.randn(4, 64).to(BF16), torch.randn(8, 64).to(BF16)
    products._own.__dict__.clear()
    with torch.inference_mode():
        first = linear(x, weight).clone()
    assert torch.equal(linear(x, weight), first)


def test_gradients_pass(slow: None) -> None:
    x = torch.randn(4, 64, dtype=BF16, requires_grad=True)
    weight = torch.randn(8, 64, dtype=BF16, requires_grad=True)
    y = linear(x, weight)
    assert y.dtype == BF16
    y.float().sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert weight.grad is not None
    assert torch.equal(x.grad, weight.detach().float().sum(0).to(BF16).expand(4, 64))


def test_what_is_multiplied_in(slow: None) -> None:
    assert product_dtype(BF16, CPU) == torch.float32
    assert product_dtype(torch.float32, CPU) == torch.float32
    assert product_dtype(BF16, torch.device("cuda")) == BF16


def test_the_switch_of_onednn_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "IS_ARM", True)
    before = torch._C._get_mkldnn_enabled()
    linear(torch.randn(3, 8), torch.randn(5, 8))
    with pytest.raises(RuntimeError):
        linear(torch.randn(3, 8), torch.randn(5, 9))
    assert torch._C._get_mkldnn_enabled() == before
