"""GGUF blocks kept as codes. Q4_0 is exactly int4-g32: 32 values of 4 bits and one fp16 scale, with
8 standing for zero. No other block type matches one of our schemes:

| type | why not |
|---|---|
| Q4_1, Q4_K, Q5_1, Q5_K, Q2_K | a float is added to each group; our zero points are whole numbers of steps |
| Q5_0, Q6_K, Q3_K | 5, 6 or 3 bits; in the K types, scales of groups are scaled again |
| Q8_0 | 8 bits in groups of 32; our 8-bit schemes have a scale a row |

Those are dequantized as they are read (formats/gguf_blocks.py).
"""  # noqa: E501

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ridgeline.errors import CheckpointError
from ridgeline.models.checkpoint.base import Checkpoint, TensorInfo
from ridgeline.models.checkpoint.gguf_header import map_file
from ridgeline.quantization.files.matrix import StoredMatrix
from ridgeline.quantization.scheme import Codes, Grid, parse_scheme

GROUP = 32
SCHEME = f"int4-g{GROUP}"
BLOCK_BYTES = 2 + GROUP // 2  # the scale; low halves hold codes 0 … 15, high halves 16 … 31


def keeps_codes(info: TensorInfo) -> bool:
    """Whether a tensor of a GGUF file is a matrix of one of our schemes."""
    return info.dtype == "Q4_0" and len(info.shape) == 2


def read_matrix(checkpoint: Checkpoint, name: str) -> StoredMatrix:
    """A Q4_0 tensor's own codes and scales."""
    info = checkpoint.tensors[name]
    data = map_file(info.file)
    if info.offset + info.stored_bytes > len(data):
        raise CheckpointError(f"{info.file} was truncated while it was being read")
    raw = np.frombuffer(data, np.uint8, info.stored_bytes, info.offset)
    matrix = q4_0_matrix(torch.from_numpy(raw.copy()), info.shape[0])
    if not bool(matrix.codes.grid.scale.isfinite().all()):
        raise CheckpointError(f"{info.file}: tensor {name!r} has scales that are NaN or infinite")
    return matrix


def q4_0_matrix(raw: Tensor, num_outputs: int) -> StoredMatrix:
    blocks = raw.view(num_outputs, -1, BLOCK_BYTES)
    scale_OG = blocks[..., :2].contiguous().view(torch.float16).squeeze(-1).float()
    halves = blocks[..., 2:]
    codes_OD = torch.cat((halves & 0xF, halves >> 4), -1).flatten(1)
    return StoredMatrix(Codes(codes_OD, Grid(scale_OG)), parse_scheme(SCHEME))
