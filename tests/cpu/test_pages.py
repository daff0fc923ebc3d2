"""Pages of the KV cache: what is written is what is read, and what is not allowed is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ridgeline.errors import UnsupportedError
from ridgeline.kernels.gated_activation import plain_gated_activation
from ridgeline.kernels.pages import gather_tokens, make_pages, write_tokens
from ridgeline.kernels.rms_norm import rms_norm
from ridgeline.kernels.rotary import plain_rotate, rotate
from ridgeline.kernels.rotary_pages import QKNorm, rotary_pages, traced_rotary_pages

# The worst error of one value, as a share of its row's largest.
ERROR = {
    torch.float32: 0.0,
    torch.bfloat16: 2.0**-8,
    torch.int8: 0.51 / 127,
    torch.float8_e4m3fn: 2.0**-4,
    torch.float8_e4m3fnuz: 2.0**-4,
}


def slots_of(page_table: Tensor, length: int, page_size: int) -> Tensor:
    tokens = torch.arange(length)
    return page_table[tokens // page_size] * page_size + tokens % page_size


@pytest.mark.parametrize("dtype", ERROR)
def test_what_is_written_is_read(dtype: torch.dtype) -> None:
    values = torch.randn(40, 3, 8, generator=torch.Generator().manual_seed(0))
    page_table = torch.tensor([4, 0, 2])
    k_pages, _, k_scale, _ = make_pages(6, 16, 3, 8, dtype, "cpu")
    slots = slots_of(page_table, 40, 16)
    slots[5] = -1
    write_tokens(k_pages, slots, values, k_scale)
    read = gather_tokens(k_pages, page_table, 40, k_scale)
    values[5] = 0
    allowed = ERROR[dtype] * values.abs().amax(-1, keepdim=True)
    assert ((read - values).abs() <= allowed + 1e-12).all()
    assert k_pages[[1, 3, 5]].float().abs().max() == 0


def test_the_layout_is_page_head_place() -> None:
    pages = make_pages(3, 16, 2, 4, torch.float32, "cpu").k_pages
    assert pages.shape == (3, 2, 16, 4)
    assert pages.is_contiguous()
    values = torch.arange(8.0).view(1, 2, 4)
    write_tokens(pages, torch.tensor([2 * 16 + 5]), values)
    assert torch.equal(pages[2, :, 5], values[0])


@pytest.mark.parametrize("page_size", [0, 8, 48, 512])
def test_other_page_sizes_are_refused(page_size: int) -> None:
    with pytest.raises(UnsupportedError, match=f"page_size={page_size} "):
        make_pages(1, page_size, 1, 64, torch.bfloat16, "cpu")


def test_codes_without_scales_are_refused() -> None:
    pages = make_pages(1, 16, 1, 8, torch.int8, "cpu")
    with pytest.raises(ValueError, match="need scales"):
        gather_tokens(pages.k_pages, torch.zeros(1, dtype=torch.int64), 1)


def test_one_step_equals_the_model_s_own_ops() -> None:
    generator = torch.Generator().manual_seed(0)
    num_tokens, num_heads, num_kv_heads, head_dim = 20, 4, 2, 64
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, generator=generator)
    angles = torch.randn(num_tokens, 24, generator=generator)
    cos, sin = angles.cos(), angles.sin()
    q_norm, k_norm = torch.randn(2, head_dim, generator=generator)
    pages = make_pages(4, 16, num_kv_heads, head_dim, torch.float32, "cpu")
    page_table = torch.tensor([3, 1])
    norm = QKNorm(q_norm, k_norm, 1e-5, 1.0)
    found = rotary_pages(qkv, (cos, sin), slots_of(page_table, num_tokens, 16), pages, norm)
    parts = qkv.unflatten(-1, (-1, head_dim)).split((num_heads, num_kv_heads, num_kv_heads), 1)
    q = rotate(rms_norm(parts[0], q_norm, 1e-5, 1.0), cos, sin)
    k = rotate(rms_norm(parts[1], k_norm, 1e-5, 1.0), cos, sin)
    assert torch.equal(found, q)
    assert torch.equal(gather_tokens(pages.k_pages, page_table, num_tokens), k)
    assert torch.equal(gather_tokens(pages.v_pages, page_table, num_tokens), parts[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_ops_hold_to_their_schemas(dtype: torch.dtype) -> None:
    """Fake implementations, what is changed in place, and autograd, as torch checks them."""
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    angles = torch.randn(3, 32)
    x = torch.randn(3, 4, 64, requires_grad=True)
    torch.library.opcheck(plain_rotate, (x, angles.cos(), angles.sin(), False), test_utils=checks)
    gate_up = torch.randn(3, 64, requires_grad=True)
    torch.library.opcheck(plain_gated_activation, (gate_up, "silu"), test_utils=checks)
    pages = make_pages(2, 16, 1, 64, dtype, "cpu")
    inputs = (torch.randn(3, 4 * 64), angles.cos(), angles.sin(), torch.tensor([3, -1, 17]))
    torch.library.opcheck(
        traced_rotary_pages, (*inputs, *pages, None, None, 1e-6, 0.0), test_utils=checks[:2]
    )
