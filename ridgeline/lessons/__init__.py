"""Kernels to learn from: each is written several times, from naive to fast, in named steps.

A lesson is a folder like an op's (reference.py, triton.py, op.py), but nothing serves it: it is not
in the registry that `ridgeline kernels` walks. `--op` names one all the same.
docs/kernels-from-zero.md walks through them.

    ridgeline bench kernels --op vector_add --op softmax
"""

from __future__ import annotations

from importlib import import_module

from ridgeline.kernels.op import Op
from ridgeline.kernels.registry import get_op

__all__ = ["LESSONS", "all_lessons", "get_op_or_lesson"]

LESSONS = ("vector_add", "softmax")


def all_lessons() -> list[Op]:
    return [get_op_or_lesson(name) for name in LESSONS]


def get_op_or_lesson(name: str) -> Op:
    if name not in LESSONS:
        return get_op(name)
    op = import_module(f"ridgeline.lessons.{name}.op").OP
    assert isinstance(op, Op), f"{name}/op.py names its Op something else"
    return op
