"""Short sequences of kernels that belong together, timed and checked as single ops are.

A sequence is an `Op` whose `launch` starts several kernels, so that the timer, the cold inputs, the
table and the record of bench/kernels/ops.py serve it too.

    rows = bench_ops(all_sequences(), hardware)
"""

from __future__ import annotations

from ridgeline.bench.kernels import decode_layer, fp8_linear
from ridgeline.errors import UsageError, near_matches
from ridgeline.kernels.op import Op

SEQUENCES = {op.name: op for op in (fp8_linear.OP, decode_layer.OP)}


def all_sequences() -> list[Op]:
    return list(SEQUENCES.values())


def get_sequence(name: str) -> Op:
    if name not in SEQUENCES:
        hint = near_matches(name, SEQUENCES)
        raise UsageError(f"no sequence is called {name!r}; there are {', '.join(SEQUENCES)}{hint}")
    return SEQUENCES[name]
