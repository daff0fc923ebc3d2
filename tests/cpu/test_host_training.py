"""What a training step on a CPU runs in C++, against plain torch: passes, attention, losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_checks import poisoned_memory
from torch import Tensor

from ridgeline.kernels import host_library
from ridgeline.kernels.attention.reference import AttentionSpec
from ridgeline.kernels.document_attention import Documents, cpu, document_attention
from ridgeline.kernels.document_attention import reference as defined
from ridgeline.kernels.linear_cross_entropy import IGNORED, linear_cross_entropy
from ridgeline.kernels.tolerance import check
from ridgeline.training.stepping.ops import HOST, PLAIN, Gain

pytestmark = pytest.mark.skipif(host_library.find_compiler() is None, reason="no C++ compiler")
BF16 = torch.bfloat16


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    assert host_library.prepare()


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def flat(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("size", [16, 37, 576])
def test_passes_are_the_plain_ones(size: int, dtype: torch.dtype) -> None:
    """Rows enough for several threads."""
    rows = 70
    x, residual, grad, added = drawn(*[(rows, size)] * 4, dtype=dtype)
    (wide,) = drawn((rows, 2 * size), dtype=dtype)
    (weight,) = drawn((size,), dtype=dtype)
    gain = Gain(weight, 1e-5, 1.0)
    padded = torch.cat((grad, grad), 1)[:, :size]  # rows that are further apart
    passes = {
        "norm": lambda ops: ops.norm(x, gain, None),
        "norm of a sum": lambda ops: ops.norm(x, gain, residual),
        "norm_backward": lambda ops: ops.norm_backward(x, gain, padded, None),
        "norm_backward of a sum": lambda ops: ops.norm_backward(x, gain, grad, added),
        "activation": lambda ops: ops.activation(wide, "silu"),
        "gelu": lambda ops: ops.activation(wide, "gelu_tanh"),
        "activation_backward": lambda ops: ops.activation_backward(wide, grad, "silu"),
        "gelu_backward": lambda ops: ops.activation_backward(wide, grad, "gelu_tanh"),
    }
    for name, run in passes.items():
        with poisoned_memory():
            results = flat(run(HOST))
        for result, wanted in zip(results, flat(run(PLAIN)), strict=True):
            assert result.dtype == wanted.dtype, name
            check(result, wanted, dtype, max(rows, size))


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_an_activation_is_made_again_beside_its_gradient(dtype: torch.dtype) -> None:
    wide, grad = drawn((70, 2 * 37), (70, 37), dtype=dtype)
    again, plain = grad.clone(), grad.clone()
    result = HOST.activation_backward(wide, again, "silu", remakes=True)
    check(result, PLAIN.activation_backward(wide, plain, "silu", remakes=True), dtype, 1)
    check(again, plain, dtype, 1)


@pytest.mark.parametrize("inverse", [False, True])
def test_heads_are_turned_where_they_lie(inverse: bool) -> None:
    """With dims that stay, and other heads beside them."""
    (qkv,) = drawn((70, 5 * 12))
    angles = tuple(drawn((70, 5), (70, 5)))
    part = qkv[:, 12:48].unflatten(-1, (3, 12))
    expected = PLAIN.rotate(part.clone(), angles, inverse)  # type: ignore[arg-type]
    untouched = qkv.clone()
    assert HOST.rotate(part, angles, inverse, out=part) is part  # type: ignore[arg-type]
    torch.testing.assert_close(part, expected)
    assert torch.equal(qkv[:, :12], untouched[:, :12])
    assert torch.equal(qkv[:, 48:], untouched[:, 48:])
    apart = part.transpose(0, 1).contiguous().transpose(0, 1)
    new = HOST.rotate(apart, angles, inverse)  # type: ignore[arg-type]
    torch.testing.assert_close(new, PLAIN.rotate(part, angles, inverse))  # type: ignore[arg-type]


@pytest.mark.parametrize("window", [None, 1, 70, 1000])
def test_attention_by_products(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks, heads out of one projection, documents of one token."""
    monkeypatch.setattr(cpu, "BLOCK", 32)
    documents, spec = Documents.of((150, 1, 33)), AttentionSpec(0.3, window)
    gradients, outs = [], []
    for path in ("products", None):
        (qkv,) = drawn((184, (4 + 2 + 2) * 16))
        qkv.requires_grad_()
        q, k, v = (part.unflatten(-1, (-1, 16)) for part in qkv.split([64, 32, 32], -1))
        if path is None:
            out = defined.document_attention(q, k, v, documents, spec)
        else:
            out = document_attention(q, k, v, documents, spec, "products")
        outs.append(out)
        gradients += torch.autograd.grad(out, qkv, *drawn(tuple(out.shape)))
    torch.testing.assert_close(*outs)
    torch.testing.assert_close(*gradients)


def test_products_of_a_document_change_no_bit_of_another() -> None:
    documents, spec, results = Documents.of((5, 140, 9)), AttentionSpec(0.25), []
    for value in (0.0, 100.0):
        inputs = drawn((154, 4, 16), (154, 2, 16), (154, 2, 16))
        for each in inputs:
            each[5:145] = value
            each.requires_grad_()
        out = document_attention(*inputs, documents, spec, "products")
        results.append([out, *torch.autograd.grad(out, inputs, *drawn(tuple(out.shape)))])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one[:5], other[:5])
        assert torch.equal(one[145:], other[145:])


def test_losses_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignored rows, a scale, far logits; and a target that is no token."""
    results = []
    for loaded in (host_library._loaded, {}):
        monkeypatch.setattr(host_library, "_loaded", loaded)
        x, head = drawn((70, 8), (1003, 8))
        x[3] *= 10
        leaves = [x.requires_grad_(), head.requires_grad_()]
        targets = torch.arange(70) * 14
        targets[5:9] = IGNORED
        loss, count = linear_cross_entropy(*leaves, targets, 0.5)
        results.append([loss, *torch.autograd.grad(loss, leaves)])
        assert count == 66
        with torch.no_grad():
            torch.testing.assert_close(linear_cross_entropy(*leaves, targets, 0.5)[0], loss)
    for result, wanted in zip(*results, strict=True):
        torch.testing.assert_close(result, wanted)
    monkeypatch.undo()
    loss, _ = linear_cross_entropy(*drawn((2, 8), (10, 8)), torch.tensor([3, 10]))
    assert loss.isnan()
