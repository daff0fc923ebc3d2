"""Which heads the attention kernels of a GPU take. Plain Python, so that an engine can refuse a
model before it loads it, and on a machine without Triton.
"""

from __future__ import annotations

from ridgeline.errors import UnsupportedError

MIN_HEAD_DIM, MAX_HEAD_DIM = 2, 256


def check_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    if not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM:
        raise UnsupportedError(
            f"heads of {head_dim} dims; attention on a GPU takes {MIN_HEAD_DIM} to {MAX_HEAD_DIM}; "
            "use --device cpu"
        )
    if num_heads % num_kv_heads:
        raise UnsupportedError(f"{num_heads} query heads do not divide into {num_kv_heads} groups")
