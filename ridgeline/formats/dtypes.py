"""The one table of element types: the short names users type, torch's dtypes, safetensors' codes.

Owns names and sizes of plain elements only; GGUF's block types live in `gguf_blocks`.

    parse_dtype("bf16")             # torch.bfloat16; "bfloat16" and "torch.bfloat16" mean the same
    dtype_name(torch.float8_e4m3fn) # "fp8_e4m3"
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ridgeline.errors import UsageError, near_matches


@dataclass(frozen=True)
class ElementType:
    """One row of the table."""

    name: str  # the short name, in flags, records and messages
    torch_dtype: torch.dtype
    safetensors: str  # the code in a safetensors header
    aliases: tuple[str, ...] = ()  # other words for it, beside torch's own


ELEMENT_TYPES = (
    ElementType("fp64", torch.float64, "F64", ("f64", "double")),
    ElementType("fp32", torch.float32, "F32", ("f32", "float")),
    ElementType("fp16", torch.float16, "F16", ("f16", "half")),
    ElementType("bf16", torch.bfloat16, "BF16"),
    ElementType("fp8_e4m3", torch.float8_e4m3fn, "F8_E4M3", ("fp8", "e4m3", "float8_e4m3")),
    ElementType("fp8_e5m2", torch.float8_e5m2, "F8_E5M2", ("e5m2",)),
    ElementType("fp8_e4m3fnuz", torch.float8_e4m3fnuz, "F8_E4M3FNUZ"),  # AMD MI300's own fp8
    ElementType("fp8_e5m2fnuz", torch.float8_e5m2fnuz, "F8_E5M2FNUZ"),
    ElementType("fp8_e8m0", torch.float8_e8m0fnu, "F8_E8M0", ("e8m0",)),  # microscaling exponents
    ElementType("int64", torch.int64, "I64", ("i64", "long")),
    ElementType("int32", torch.int32, "I32", ("i32", "int")),
    ElementType("int16", torch.int16, "I16", ("i16",)),
    ElementType("int8", torch.int8, "I8", ("i8",)),
    ElementType("uint64", torch.uint64, "U64", ("u64",)),
    ElementType("uint32", torch.uint32, "U32", ("u32",)),
    ElementType("uint16", torch.uint16, "U16", ("u16",)),
    ElementType("uint8", torch.uint8, "U8", ("u8",)),
    ElementType("bool", torch.bool, "BOOL"),
)


def torch_word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_BY_WORD = {
    word: row.torch_dtype
    for row in ELEMENT_TYPES
    for word in (row.name, torch_word(row.torch_dtype), *row.aliases)
}
_NAMES = {row.torch_dtype: row.name for row in ELEMENT_TYPES}
_BY_SAFETENSORS = {row.safetensors: row.torch_dtype for row in ELEMENT_TYPES}


def parse_dtype(name: str) -> torch.dtype:
    """The torch dtype a user's word means: `fp16`, `half` and `torch.float16` are one."""
    dtype = _BY_WORD.get(name.strip().lower().removeprefix("torch."))
    if dtype is None:
        hint = near_matches(name.lower(), _BY_WORD)
        raise UsageError(
            f"dtype {name!r} is not known; use one of {', '.join(_NAMES.values())}{hint}"
        )
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """The short name; a dtype outside the table keeps torch's own word."""
    return _NAMES.get(dtype, torch_word(dtype))


def dtype_bytes(dtype: torch.dtype) -> int:
    """Bytes of one element."""
    return dtype.itemsize


def from_safetensors(code: str) -> torch.dtype | None:
    """The torch dtype behind a safetensors code, or None where we do not read it (F4, F6)."""
    return _BY_SAFETENSORS.get(code)
