"""What training calls, on a GPU: the public functions, with gradients, captured, and within memory.
The kernels themselves are in test_gpu_kernels.py, with all ops.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from ridgeline.kernels.adamw import (
    AdamWFormat,
    AdamWState,
    AdamWStep,
    AdamWUpdate,
    joined,
    new_state,
)
from ridgeline.kernels.adamw import reference as defined_adamw
from ridgeline.kernels.attention.reference import AttentionSpec
from ridgeline.kernels.document_attention import AttentionPath, Documents, document_attention
from ridgeline.kernels.document_attention import reference as defined_attention
from ridgeline.kernels.document_attention.op import compared
from ridgeline.kernels.launch import target_of
from ridgeline.kernels.linear_cross_entropy import linear_cross_entropy
from ridgeline.kernels.linear_cross_entropy import reference as defined_loss
from ridgeline.kernels.prefill_attention.sdpa import has_windows
from ridgeline.kernels.rms_norm import reference as defined_norm
from ridgeline.kernels.rms_norm import rms_norm
from ridgeline.kernels.rows_to_fp8 import rows_to_fp8
from ridgeline.kernels.tolerance import check

CUDA = torch.device("cuda")
BF16 = torch.bfloat16


def drawn(*shape: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator(device=CUDA).manual_seed(seed)
    return (torch.randn(shape, device=CUDA, generator=generator) * scale).to(BF16)


@pytest.mark.parametrize("logits_dtype", [None, torch.float32])
def test_the_loss_holds_no_logits_and_its_gradients_are_the_references(
    logits_dtype: torch.dtype | None,
) -> None:
    rows, size, vocab_size = 4096, 512, 64000
    taken = []
    for function in (linear_cross_entropy, defined_loss.linear_cross_entropy):
        x = drawn(rows, size).requires_grad_()
        weight = drawn(vocab_size, size, scale=size**-0.5, seed=1).requires_grad_()
        targets = torch.arange(rows, device=CUDA) * 15
        targets[::7] = -100
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        own = function is linear_cross_entropy
        options = {"logits_dtype": logits_dtype, "chunk_rows": 512} if own else {}
        loss, count = function(x, weight, targets, **options)  # type: ignore[operator]
        (loss / count).backward()
        if own:
            peak = torch.cuda.max_memory_allocated() - before
            assert peak < rows * vocab_size * 2
        taken.append((loss.detach(), x.grad, weight.grad))
    for result, expected in zip(*taken, strict=True):
        check(result, expected, BF16, size * rows, roundings=4)


def test_a_norm_with_its_residual_has_gradients_in_the_same_pass() -> None:
    taken = []
    for function in (rms_norm, defined_norm.rms_norm):
        tensors = [drawn(1000, 2048, seed=seed).requires_grad_() for seed in (0, 1)]
        weight = drawn(2048, seed=2).requires_grad_()
        out, hidden = function(tensors[0], weight, 1e-6, 1.0, residual_TD=tensors[1])
        torch.autograd.backward(
            [out, hidden], [drawn(1000, 2048, seed=3), drawn(1000, 2048, seed=4)]
        )
        taken.append([tensor.grad for tensor in (*tensors, weight)])
    for result, expected in zip(*taken, strict=True):
        assert result is not None
        assert expected is not None
        check(result, expected, BF16, 3048, roundings=3)


def states(format: AdamWFormat, device: torch.device) -> list[AdamWState]:
    generator = torch.Generator().manual_seed(1)
    result = []
    for salt, size in enumerate((100_003, 512, 4096)):
        master = torch.randn(size, generator=generator).to(device)
        weight = torch.empty(size, dtype=BF16, device=device)
        result.append(new_state(weight, format, master, salt))
    return result


def stepped(format: AdamWFormat, device: torch.device, defined: bool) -> dict[str, Tensor]:
    """What five steps leave, by the kernel or by its definition, on the CPU."""
    own, lost = states(format, device), 0
    optimizer = AdamWUpdate(own)
    for step in range(1, 6):
        generator = torch.Generator().manual_seed(step)
        grads = [
            torch.randn(state.weight.numel(), generator=generator).to(BF16).to(device)
            for state in own
        ]
        clip = torch.tensor(0.5, device=device)
        numbers = AdamWStep(lr=1e-5, step=step, weight_decay=0.1, seed=3)
        take = partial(defined_adamw.adamw_, own) if defined else optimizer.step
        lost += int(take(grads, numbers, clip))
    result = {"lost": torch.tensor([lost])}
    for index, state in enumerate(own):
        assert state.remainder is not None
        result[f"weight {index}"] = joined(state.weight, state.remainder).cpu()
        result[f"first {index}"], result[f"second {index}"] = state.first.cpu(), state.second.cpu()
    return result


@pytest.mark.parametrize("moments", ["fp32", "bf16", "8-bit"])
def test_a_gpu_gives_the_bits_of_a_cpu_over_steps(moments: str) -> None:
    format = AdamWFormat("exact", moments)  # type: ignore[arg-type]
    expected = stepped(format, torch.device("cpu"), defined=True)
    differences = []
    for name, defined in (("the kernel's", False), ("the definition's on this GPU", True)):
        for part, result in stepped(format, CUDA, defined).items():
            other = result != expected[part]
            if other.any():
                index = int(other.nonzero()[0])
                differences.append(
                    f"{name} {part}: {int(other.sum())} of {other.numel()}, the first at {index}: "
                    f"{result[index].item()!r}, not {expected[part][index].item()!r}"
                )
    assert not differences, "; ".join(differences)


def test_a_step_is_captured_and_takes_its_numbers_from_the_device() -> None:
    format = AdamWFormat("exact", "bf16")
    plain, captured = states(format, CUDA), states(format, CUDA)
    grads = [torch.ones_like(state.weight) for state in plain]
    clip = torch.ones((), device=CUDA)
    optimizer = AdamWUpdate(captured)
    numbers = AdamWStep(lr=0.0, step=1).numbers().to(CUDA)
    optimizer.step(grads, numbers, torch.full_like(clip, float("nan")))  # compiles; changes nothing
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step(grads, numbers, clip)
    for step in range(1, 4):
        now = AdamWStep(lr=1e-3, step=step, weight_decay=0.1)
        AdamWUpdate(plain).step(grads, now, clip)
        numbers.copy_(now.numbers())
        graph.replay()
    for one, two in zip(plain, captured, strict=True):
        assert torch.equal(one.weight, two.weight)
        assert torch.equal(one.first, two.first)


@pytest.mark.parametrize(
    ("path", "lengths", "window"),
    [
        ("cudnn", (512, 512, 512), None),
        ("flash", (512, 512, 512), None),
        ("varlen", (100, 1, 700, 735), None),
        ("varlen", (100, 1, 700, 735), 128),
        ("each", (100, 1, 700), 64),
        ("triton", (100, 1, 700, 735), None),
        ("triton", (100, 1, 700, 735), 128),
    ],
)
def test_attention_of_documents_on_each_path(
    path: AttentionPath, lengths: tuple[int, ...], window: int | None
) -> None:
    if path == "varlen" and window is not None and not has_windows():
        pytest.skip("this torch's varlen_attn has no windows")
    total, spec = sum(lengths), AttentionSpec(64**-0.5, window=window)
    documents = Documents.of(lengths, CUDA)
    taken = []
    for own in (True, False):
        q = drawn(total, 8, 64).requires_grad_()
        k, v = (drawn(total, 2, 64, seed=seed).requires_grad_() for seed in (1, 2))
        if own:
            out = document_attention(q, k, v, documents, spec, path)
        else:
            out = defined_attention.document_attention(q, k, v, documents, spec)
        out.backward(drawn(total, 8, 64, seed=3))
        grads = [grad for grad in (q.grad, k.grad, v.grad) if grad is not None]
        taken.append(compared(out.detach(), *grads))
    for result, expected in zip(*taken, strict=True):
        check(result, expected, BF16, max(lengths), roundings=6)


@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_products_in_fp8_take_the_codes_both_ways(scaling: str) -> None:
    """The forward product and the weight's gradient, each with the copy that it wants."""
    dtype = target_of(torch.empty(0, device=CUDA)).fp8
    if dtype is None:
        pytest.skip("no fp8 on this GPU")
    x, weight, grad = drawn(256, 128), drawn(64, 128, seed=1), drawn(256, 64, seed=2)
    a, w, g = (rows_to_fp8(each, dtype, scaling) for each in (x, weight, grad))  # type: ignore[arg-type]

    def product(left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor) -> Tensor:
        if scaling == "row":
            left_scale, right_scale = left_scale[:, None], right_scale[None, :]
        return torch._scaled_mm(left, right.t(), left_scale, right_scale, out_dtype=BF16)

    out = product(a.codes_TD, a.scale, w.codes_TD, w.scale)
    grad_weight = product(g.transposed_DT, g.transposed_scale, a.transposed_DT, a.transposed_scale)
    for result, expected in (
        (out, x.float() @ weight.float().t()),
        (grad_weight, grad.float().t() @ x.float()),
    ):
        error = (result.float() - expected).norm() / expected.norm()
        assert error < 0.06, f"{error:.3f}"
