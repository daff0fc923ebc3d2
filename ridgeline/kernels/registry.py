"""Every op, in the order of the documents. Tests, benchmark, compiler and docs walk this list."""

from __future__ import annotations

from importlib import import_module

from ridgeline.errors import UsageError, near_matches
from ridgeline.kernels.op import Op

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
)


def all_ops() -> list[Op]:
    return [get_op(name) for name in NAMES]


def get_op(name: str) -> Op:
    if name not in NAMES:
        hint = near_matches(name, NAMES)
        raise UsageError(f"no op is called {name!r}; known ops: {', '.join(NAMES)}{hint}")
    op = import_module(f"ridgeline.kernels.{name}.op").OP
    assert isinstance(op, Op), f"{name}/op.py names its Op something else"
    return op
