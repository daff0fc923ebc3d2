"""Every op, in the order of the documents. Tests, benchmark, compiler and docs walk this list."""

from __future__ import annotations

from importlib import import_module

from ridgeline.errors import UsageError, near_matches
from ridgeline.kernels.op import Op

# Whose op.py also has BACKWARD, the Op of the backward pass.
WITH_BACKWARD = ("rms_norm", "gated_activation")
NAMES = (
    "move_rows",
    "step_start",
    "rms_norm",
    "rotary",
    "rotary_pages",
    "gated_activation",
    "decode_attention",
    "projected_attention",
    "prefill_attention",
    "deterministic_attention",
    "skinny_linear",
    "fixed_linear",
    "quantize_rows",
    "quantized_linear",
    "dequantize",
    "sampling",
    "keep_tokens",
    "prompt_lookup",
    "moe",
    "linear_cross_entropy",
    "adamw",
    "rows_to_fp8",
    "document_attention",
    "minhash",
    *(f"{name}_backward" for name in WITH_BACKWARD),
)


def all_ops() -> list[Op]:
    return [get_op(name) for name in NAMES]


def get_op(name: str) -> Op:
    if name not in NAMES:
        hint = near_matches(name, NAMES)
        raise UsageError(f"no op is called {name!r}; known ops: {', '.join(NAMES)}{hint}")
    folder = name.removesuffix("_backward")
    module = import_module(f"ridgeline.kernels.{folder}.op")
    op = module.OP if name == folder else module.BACKWARD
    assert isinstance(op, Op), f"{folder}/op.py names its Op something else"
    return op
