"""GGUF blocks kept as codes. Q4_0 is exactly int4-g32: 32 values of 4 bits and one fp16 scale, with
8 standing for zero. No other block type matches one of our schemes:

| type | why not |
|---|---|
| Q4_1, Q4_K, Q5_1, Q5_K, Q2_K | a float is added to each group; our zero points are whole numbers of steps |
| Q5_0, Q6_K, Q3_K | 5, 6 or 3 bits; in the K types, scales of groups are scaled again |
| Q8_0 | 8 bits in groups of 32; our 8-bit schemes have a scale a row |

Those are dequantized as they are read (formats/gguf_blocks.py). On a CPU all of them but Q2_K and
Q3_K can stay as they are, Q4_0 included: block_scheme.py.
"""  # noqa: E501

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ridgeline.errors import CheckpointError
from ridgeline.formats.gguf_blocks import block_size
from ridgeline.models.checkpoint.base import Checkpoint, TensorInfo
from ridgeline.models.checkpoint.gguf_header import map_file
from ridgeline.quantization.block_scheme import block_scheme
from ridgeline.quantization.files.matrix import StoredMatrix
from ridgeline.quantization.scheme import Codes, Grid, parse_scheme

GROUP = 32
SCHEME = f"int4-g{GROUP}"
BLOCK_BYTES = 2 + GROUP // 2  # the scale; low halves hold codes 0 … 15, high halves 16 … 31
# Where a block's fp16 numbers stand, in bytes; at its start if nothing is said.
SCALES_AT = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def keeps_codes(info: TensorInfo) -> bool:
    """Whether a tensor of a GGUF file is a matrix of one of our schemes."""
    return info.dtype == "Q4_0" and len(info.shape) == 2


def read_matrix(checkpoint: Checkpoint, name: str) -> StoredMatrix:
    """A Q4_0 tensor's own codes and scales."""
    info = checkpoint.tensors[name]
    matrix = q4_0_matrix(_stored_bytes(info), info.shape[0])
    _check_finite(matrix.codes.grid.scale, info)
    return matrix


def read_blocks(checkpoint: Checkpoint, name: str) -> StoredMatrix:
    """A tensor's own bytes [O, bytes of a row]."""
    info = checkpoint.tensors[name]
    scheme = block_scheme([(info.dtype, info.shape[0])])
    assert scheme is not None, "one part fits"
    values = _stored_bytes(info).view(info.shape[0], -1)
    blocks = values.view(-1, block_size(info.dtype)[1])
    for offset in SCALES_AT.get(info.dtype, (0,)):
        _check_finite(blocks[:, offset : offset + 2].contiguous().view(torch.float16), info)
    return StoredMatrix(Codes(values, Grid(torch.empty(0))), scheme)


def _check_finite(scale: Tensor, info: TensorInfo) -> None:
    if not bool(scale.isfinite().all()):
        raise CheckpointError(
            f"{info.file}: tensor {info.name!r} has scales that are NaN or infinite"
        )


def _stored_bytes(info: TensorInfo) -> Tensor:
    data = map_file(info.file)
    if info.offset + info.stored_bytes > len(data):
        raise CheckpointError(f"{info.file} was truncated while it was being read")
    raw = np.frombuffer(data, np.uint8, info.stored_bytes, info.offset)
    return torch.from_numpy(raw.copy())


def q4_0_matrix(raw: Tensor, num_outputs: int) -> StoredMatrix:
    blocks = raw.view(num_outputs, -1, BLOCK_BYTES)
    scale_OG = blocks[..., :2].contiguous().view(torch.float16).squeeze(-1).float()
    halves = blocks[..., 2:]
    codes_OD = torch.cat((halves & 0xF, halves >> 4), -1).flatten(1)
    return StoredMatrix(Codes(codes_OD, Grid(scale_OG)), parse_scheme(SCHEME))
