"""GGUF's tensor types: how many bytes a tensor takes, and the numbers its blocks stand for.

Block layouts come from the `gguf` package, imported only when a quantized tensor is met; F32, F16
and BF16 need no package and no copy. The container is read by `models/checkpoint/gguf.py`.

    dequantize(raw, "Q4_K", (4096, 4096))  # fp32
    dequantize(raw, "BF16", (4096, 4096))  # a bf16 view of the same bytes
"""

from __future__ import annotations

import math
from types import ModuleType

import numpy as np
import torch

from ridgeline.errors import CheckpointError, MissingPackageError, UnsupportedError

PLAIN_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

# The ids are ggml's, as they stand in a file's tensor table.
SUPPORTED_TYPES = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "Q2_K": 10,
    "Q3_K": 11,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "BF16": 30,
}
_NAMES = {type_id: name for name, type_id in SUPPORTED_TYPES.items()}

# Elements dequantized at a time. From 2^16 to 2^20 all are equally fast (100 to 300 M elements/s on
# one x86 core, 2026-11); at 2^22 the temporaries leave the caches and the rate halves.
CHUNK_ELEMENTS = 1 << 18


def type_name(type_id: int) -> str:
    """The name of a type id from a file; UnsupportedError for one that we do not dequantize."""
    if type_id in _NAMES:
        return _NAMES[type_id]
    try:
        name = _gguf().GGMLQuantizationType(type_id).name
    except ValueError:
        name = f"number {type_id}"
    raise _unsupported(name)


def block_size(type_name: str) -> tuple[int, int]:
    """Elements and bytes of one block."""
    if type_name in PLAIN_TYPES:
        return 1, PLAIN_TYPES[type_name].itemsize
    if type_name not in SUPPORTED_TYPES:
        raise _unsupported(type_name)
    elements, num_bytes = _gguf().GGML_QUANT_SIZES[SUPPORTED_TYPES[type_name]]
    return elements, num_bytes


def block_bytes(type_name: str, num_elements: int) -> int:
    """Bytes that `num_elements` take; they must fill whole blocks."""
    elements, num_bytes = block_size(type_name)
    if num_elements % elements:
        raise CheckpointError(
            f"{num_elements} elements do not fill whole {type_name} blocks of {elements}"
        )
    return num_elements // elements * num_bytes


def dequantize(
    raw: np.ndarray | memoryview, type_name: str, shape: tuple[int, ...]
) -> torch.Tensor:
    """The tensor that `raw` stands for: fp32 for block types, a view as stored for plain ones."""
    num_elements = math.prod(shape)
    expected = block_bytes(type_name, num_elements)
    if raw.nbytes != expected:
        raise CheckpointError(
            f"{type_name} tensor of shape {shape} takes {expected} bytes, got {raw.nbytes}"
        )
    data = np.frombuffer(raw, dtype=np.uint8)
    if type_name in PLAIN_TYPES:
        return torch.from_numpy(data).view(PLAIN_TYPES[type_name]).reshape(shape)
    return torch.from_numpy(_dequantize_blocks(data, type_name, num_elements)).reshape(shape)


def _dequantize_blocks(data: np.ndarray, type_name: str, num_elements: int) -> np.ndarray:
    gguf = _gguf()
    elements, num_bytes = block_size(type_name)
    quantization_type = gguf.GGMLQuantizationType[type_name]
    values = np.empty(num_elements, dtype=np.float32)
    blocks_per_chunk = CHUNK_ELEMENTS // elements
    # A damaged file's scales may hold any bits: inf and NaN pass through without a warning.
    with np.errstate(all="ignore"):
        for first in range(0, num_elements // elements, blocks_per_chunk):
            # As one row: the package works on 16 rows at a time, however short they are.
            row = data[first * num_bytes : (first + blocks_per_chunk) * num_bytes].reshape(1, -1)
            chunk = gguf.dequantize(row, quantization_type)
            values[first * elements : first * elements + chunk.size] = chunk[0]
    return values


def _unsupported(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"GGUF type {name} is not supported; choose one of {', '.join(SUPPORTED_TYPES)}"
    )


def _gguf() -> ModuleType:
    try:
        import gguf
    except ImportError as error:
        raise MissingPackageError(
            "reading quantized GGUF tensors needs the package gguf; try: pip install gguf"
        ) from error
    return gguf
