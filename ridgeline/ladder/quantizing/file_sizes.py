"""How large a model is in files, before and after, and what to say where the result is larger: 8
bits for each weight are more than the 5 that a Q4_1 GGUF has.

    before = files_of(open_checkpoint(path))
    warning = larger_in_words("int8", after, before, config, torch.bfloat16)
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ridgeline.hardware.units import human_bytes
from ridgeline.models import ModelConfig
from ridgeline.models.checkpoint import Checkpoint
from ridgeline.quantization.files.plain import most_common_type
from ridgeline.quantization.scheme import GROUPS, Scheme, parse_scheme
from ridgeline.quantization.sizes import FP32, stored_matrices, weight_bytes


class FileSize(NamedTuple):
    num_bytes: int  # of all files with weights
    weight_type: str  # of most weights: Q4_1, bf16
    bits: float  # per weight, on average


def files_of(checkpoint: Checkpoint) -> FileSize:
    tensors = checkpoint.tensors.values()
    num_bytes = sum(file.stat().st_size for file in {tensor.file for tensor in tensors})
    stored = sum(tensor.stored_bytes for tensor in tensors)
    num_weights = sum(tensor.num_elements for tensor in tensors)
    return FileSize(num_bytes, most_common_type(tensors), 8 * stored / max(num_weights, 1))


def expected_bytes(config: ModelConfig, dtype: torch.dtype, scheme: Scheme) -> int:
    """In files, where scales are in fp32; `dtype` is that of weights without codes."""
    total = weight_bytes(config, dtype, scheme)
    if scheme.spread != "group":
        return total
    return total + sum(
        matrix.num_outputs * (matrix.depth // scheme.group) * (FP32 - dtype.itemsize)
        for _, matrix in stored_matrices(config, scheme)
    )


def larger_in_words(
    scheme: str, after: int, before: FileSize, config: ModelConfig, dtype: torch.dtype
) -> str | None:
    """None where the result is no larger than the original."""
    if after <= before.num_bytes:
        return None
    return (
        f"in {scheme} this model is larger than the original: {human_bytes(after)} in files, not "
        f"{human_bytes(before.num_bytes)} (mostly {before.weight_type}, {before.bits:.1f} bits "
        f"per weight); {_smaller(scheme, before, config, dtype)}"
    )


def _smaller(scheme: str, before: FileSize, config: ModelConfig, dtype: torch.dtype) -> str:
    smallest = [parse_scheme(f"int4-g{group}") for group in GROUPS]
    sizes = {each.name: expected_bytes(config, dtype, each) for each in smallest}
    name = min(sizes, key=lambda each: sizes[each])
    size = f"{name} takes about {human_bytes(sizes[name])}"
    if sizes[name] < before.num_bytes:
        return size
    none = "no scheme makes it smaller than the original"
    return none if name == scheme else f"{none}: {size}"
