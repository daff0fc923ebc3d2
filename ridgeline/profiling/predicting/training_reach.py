"""How much of a ceiling the ops of a training step reach, each with the measurement behind it.

Those of a GPU are fits: to the six settings of one step that were timed on an H200 on 2026-11-18
(Llama-3.2-1B, 8 x 4096 tokens, results/LOG.md), with its ceilings of 2026-11-15. They tell how far
the model of a step agrees with itself; another device, and another shape, are predictions.

    product_share("bf16", on_gpu=True), byte_share(step, "norms backward")
"""

from __future__ import annotations

from typing import NamedTuple

from ridgeline.kernels.document_attention import HALF_DTYPES
from ridgeline.kernels.prefill_attention.sdpa import CUDNN_MAX_HEAD_DIM
from ridgeline.profiling.predicting.training_work import PlannedStep
from ridgeline.profiling.tracing.training_trace import AGAIN, BACKWARD

# Share of the matrix rate. bf16: products took 347 ms for 243 TFLOP, 0.875 of 801 TFLOP/s, the
# power limit included; fp8: 139 ms for the layers' 191 TFLOP. fp16 and tf32 are taken to be as
# bf16, fp32 as decode steps have it (reach.py).
GPU_PRODUCTS = {"bf16": 0.875, "fp16": 0.875, "tf32": 0.875, "fp32": 0.9, "fp8": 0.94}
# On a Neoverse N1, one thread (2026-11-18), as all of a CPU's figures here.
CPU_PRODUCTS = 0.97
OF_EXPERTS = 0.5  # of that, where each token goes through other matrices; not measured
# A datasheet's rate is above what any product reaches: 0.81 on the H200 in bf16.
OF_DATASHEET = 0.81


class AttentionShare(NamedTuple):
    """Of the matrix rate, by the FLOPs of pairs that see each other: two products forward, four
    backward.
    """

    forward: float
    backward: float


# 418 and 296 TFLOP/s forward and backward by cuDNN alone (heads of 64, 4,096 tokens; 550 and 366 of
# 128), 275 and 202 by varlen_attn (316 and 227); inside a step 0.89 of that, by 92 ms for 16 layers
# of which 82 were measured alone. Of our own kernels both passes were timed together.
GPU_ATTENTION = {
    ("cudnn", 64): AttentionShare(0.457, 0.324),
    ("cudnn", 128): AttentionShare(0.61, 0.407),
    ("varlen", 64): AttentionShare(0.306, 0.225),
    ("varlen", 128): AttentionShare(0.351, 0.252),
    ("triton", 64): AttentionShare(0.167, 0.117),
    ("triton", 128): AttentionShare(0.193, 0.135),
}
GPU_WIDE_ATTENTION = AttentionShare(0.3, 0.2)  # fp32 and tf32, by torch; not measured
# torch's kernel over 512 tokens in heads of 64, and the definition, which soft caps take and which
# was not measured.
CPU_ATTENTION, CPU_DEFINED = AttentionShare(0.3, 0.25), AttentionShare(0.05, 0.04)

# Share of the read bandwidth. Kernels alone (bench-training-kernels, 2026-11-18): norms 0.93, their
# backward 0.5 to 0.66, activations 0.98, rotary 0.9, AdamW 0.85, codes by tensor 0.39, norms with
# codes 0.58, activations with codes 0.5. In the step all element-wise ops together took longer
# than by these: `OTHERS` is fitted to that.
GPU_BYTES = {
    "norms": 0.9,
    "norms" + BACKWARD: 0.6,
    "activation": 0.95,
    "activation" + BACKWARD: 0.97,
    "rotary": 0.88,
    "embedding": 0.5,
    "others": 0.5,
    "fp8 codes": 0.39,
    "decoding": 0.55,  # as prompts have it (reach.py)
    "loss": 0.84,
    "optimizer": 0.8,
}
GPU_OTHERS = 0.6
FP8_FRONTS = {"norms": 0.58, "activation": 0.45}
# A CPU's passes are several of torch's each, over tensors that caches hold in part.
CPU_BYTES = {"optimizer": 0.7, "loss": 0.045, "casts": 0.3, "divergence": 0.15}
CPU_OTHERS = 0.14
CPU_ADAMW_DEFINED = 0.014  # of formats that have no compiled pass: about 75 ns a weight


def product_share(units: str, *, on_gpu: bool) -> float:
    return GPU_PRODUCTS.get(units, GPU_PRODUCTS["bf16"]) if on_gpu else CPU_PRODUCTS


def byte_share(step: PlannedStep, name: str) -> float:
    """Of an op that is as fast as what it moves."""
    base, format = name.removesuffix(AGAIN), step.precision.format
    if not step.size.on_gpu:
        is_compiled = (format.weight, format.moments) == ("fp32", "fp32")
        if name == "optimizer" and not is_compiled:
            return CPU_ADAMW_DEFINED
        return CPU_BYTES.get(base, CPU_OTHERS)
    if step.size.fp8 and name in FP8_FRONTS:
        return FP8_FRONTS[name]
    return GPU_BYTES.get(base, GPU_OTHERS)


def attention_share(step: PlannedStep) -> AttentionShare:
    """By the kernel that the documents go through (kernels/document_attention)."""
    size, config = step.size, step.size.config
    if not size.on_gpu:
        return CPU_ATTENTION if config.attention_softcap is None else CPU_DEFINED
    if not step.deterministic and config.attention_softcap is None:
        if size.dtype not in HALF_DTYPES:
            return GPU_WIDE_ATTENTION
        kernel = "cudnn" if _are_equal(step) else "varlen"
    else:
        kernel = "triton"
    return GPU_ATTENTION[kernel, 64 if config.head_dim < 96 else 128]


def _are_equal(step: PlannedStep) -> bool:
    """Documents of one length, without windows, by cuDNN; its heads are not wider than that."""
    longest = max(step.documents, default=0)
    windows = [layer.window for layer in step.size.config.layers if layer.window is not None]
    is_windowed = any(window < longest for window in windows)
    is_equal = len(set(step.documents)) <= 1
    return is_equal and not is_windowed and step.size.config.head_dim <= CUDNN_MAX_HEAD_DIM
