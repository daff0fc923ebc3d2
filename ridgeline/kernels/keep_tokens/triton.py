"""Keeping a step's tokens in Triton: a thread a row, which reads its token and that token's logit.

Both tensors' rows may lie apart; each is contiguous along its last dim. It is small work at the end
of a graph, where torch's own gather, comparison, casts and copies cost a launch each.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.launch import launch, target_of
from ridgeline.kernels.targets import can_wait

BLOCK = 128  # rows a program


@triton.jit
def keep_tokens_kernel(
    logits_ptr,
    tokens_ptr,
    results_ptr,
    last_ptr,
    logits_stride,
    results_stride,
    num_rows,
    HAS_LAST: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()  # before any load: the kernel before has just chosen the tokens
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = rows < num_rows
    tokens = tl.load(tokens_ptr + rows, mask=keep, other=0)  # [BLOCK]
    place = rows.to(tl.int64) * logits_stride + tokens  # int64: offsets pass 2^31
    chosen = tl.load(logits_ptr + place, mask=keep, other=0.0).to(tl.float32)
    tl.store(results_ptr + rows, tokens.to(tl.int32), mask=keep)
    tl.store(results_ptr + results_stride + rows, (chosen != chosen).to(tl.int32), mask=keep)
    if HAS_LAST:
        tl.store(last_ptr + rows, tokens.to(tl.int32), mask=keep)


def keep_tokens(
    logits_RV: Tensor, tokens_R: Tensor, results_2N: Tensor, last_N: Tensor | None = None
) -> None:
    """The launcher; arguments are reference.py's."""
    num_rows = min(len(tokens_R), results_2N.shape[1])
    for name, tensor in (("logits", logits_RV), ("tokens", tokens_R), ("results", results_2N)):
        assert tensor.stride(-1) == 1, f"{name} lie side by side along their last dim"
    assert last_N is None or (last_N.is_contiguous() and len(last_N) >= num_rows)
    if not num_rows:
        return
    waits = can_wait(target_of(logits_RV))
    launch(
        keep_tokens_kernel,
        (triton.cdiv(num_rows, BLOCK),),
        (
            logits_RV,
            tokens_R,
            results_2N,
            results_2N if last_N is None else last_N,
            logits_RV.stride(0),
            results_2N.stride(0),
            num_rows,
        ),
        HAS_LAST=last_N is not None,
        BLOCK=BLOCK,
        PDL=waits,
        num_warps=BLOCK // target_of(logits_RV).warp_size,
        options={"launch_pdl": True} if waits else {},
    )
