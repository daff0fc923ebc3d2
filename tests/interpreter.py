"""Mends Triton's CPU interpreter where it computes on raw bits: bf16 arithmetic, and casts to bf16
and fp8; and where it does the same again at every call: looks for names, makes a table of types,
checks sums for an overflow that it then does not tell of.

Numbers go through torch, which rounds as the hardware does. Reductions, negation and int-to-bf16
casts on bf16 stay wrong there, so kernels do these in fp32 (they should anyway).
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_TORCH = {
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e4b8: torch.float8_e4m3fnuz,
    tl.float8e5: torch.float8_e5m2,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
}
_LARGEST = {tl.float8e4nv: 448.0, tl.float8e4b8: 240.0, tl.float8e5: 57344.0}


def to_torch(data: np.ndarray, dtype: Any) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(data)).view(_TORCH[dtype])


def to_bits(tensor: torch.Tensor, dtype: Any) -> np.ndarray:
    """The values in `dtype`; fp8 saturates, as the hardware's conversions do."""
    if dtype in _LARGEST:
        tensor = tensor.float().clamp(-_LARGEST[dtype], _LARGEST[dtype])
    bits = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}
    converted = tensor.to(_TORCH[dtype]).contiguous()
    return converted.view(bits[dtype.primitive_bitwidth]).numpy()


def install() -> None:
    builder = interpreter.InterpreterBuilder
    if getattr(builder, "mended", False):
        return
    builder.mended = True
    plain_binary, plain_dot = builder.binary_op, builder.create_dot

    def convert(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        return to_bits(to_torch(data, source), target)

    def as_fp32(handle: Any) -> Any:
        values = to_torch(handle.data, handle.dtype.scalar).float().numpy()
        return interpreter.TensorHandle(values, tl.float32)

    def binary(self: Any, left: Any, right: Any, op: Any) -> Any:
        if left.dtype.scalar != tl.bfloat16:
            return plain_binary(self, left, right, op)
        result = op(as_fp32(left).data, as_fp32(right).data)
        if result.dtype == np.bool_:
            return interpreter.TensorHandle(result, tl.int1)
        bits = to_bits(torch.from_numpy(np.ascontiguousarray(result)), tl.bfloat16)
        return interpreter.TensorHandle(bits.view(np.uint16), tl.bfloat16)

    def dot(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
        narrow = {tl.bfloat16, tl.float8e4nv, tl.float8e4b8, tl.float8e5}
        if a.dtype.scalar in narrow or b.dtype.scalar in narrow:
            a, b = as_fp32(a), as_fp32(b)
        return plain_dot(self, a, b, d, precision, imprecise)

    plain_patch = interpreter._patch_lang_core

    def patch_lang_core(lang: Any, scope: Any) -> None:
        """Triton 3.7 has the type of e4m3fnuz and forgets it in one list."""
        plain_patch(lang, scope)
        plain_to_ir = lang.dtype.to_ir

        def to_ir(self: Any, builder: Any) -> Any:
            return (
                builder.get_fp8e4b8_ty() if self.name == "fp8e4b8" else plain_to_ir(self, builder)
            )

        scope.set_attr(lang.dtype, "to_ir", to_ir)

    found: dict[int, list[str]] = {}

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        """What Triton has, but for its search through all members, a third of a kernel's time."""
        if id(package) not in found:
            members = inspect.getmembers(package)
            found[id(package)] = [name for name, each in members if tl.core.is_builtin(each)]
        names = found[id(package)]
        if names and not tl.core.is_builtin(getattr(package, names[0])):
            return  # a kernel calls another: all of them are patched
        for name in names:
            interpreter._patch_attr(package, name, getattr(package, name), builder, scope)

    dtypes: dict[Any, np.dtype] = {}
    plain_dtype = interpreter._get_np_dtype

    def np_dtype(kind: Any) -> np.dtype:
        """What Triton has, without a table of all types made for each question."""
        kind = kind.scalar
        if isinstance(kind, tl.pointer_type):
            return plain_dtype(kind)
        if kind not in dtypes:
            dtypes[kind] = plain_dtype(kind)
        return dtypes[kind]

    plain_unwrap = tl.core._unwrap_if_constexpr

    def unwrap(value: Any) -> Any:
        """Most of what is asked about is a number already."""
        return value if type(value) is int else plain_unwrap(value)

    # An overflow is worked out in 64 bits for each sum of integers, a quarter of a kernel's time,
    # and asserted only with the option `debug`, which the interpreter does not have.
    options = interpreter.interpreter_builder.options
    assert not options.debug
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
    interpreter._get_np_dtype = np_dtype
    tl.core._unwrap_if_constexpr = unwrap
    interpreter._patch_builtin = patch_builtin
    interpreter._patch_lang_core = patch_lang_core
    interpreter._convert_float = convert
    builder.binary_op = binary
    builder.create_dot = dot
