"""What methods of training add to a memory plan: adapters beside a frozen model, plain or as codes,
weights that are rounded or pruned, and teachers. From shapes and headers; nothing is loaded.

    method = TrainingMethod(adapters=adapter_size(description, LoraOptions(rank=16)))
    plan_training(description.config, config, device, free_bytes, method)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ridgeline.hardware.memory_items import MemoryItem
from ridgeline.models import ModelConfig, build_model
from ridgeline.models.cost import num_parameters
from ridgeline.models.families import Description
from ridgeline.quantization.scheme import Scheme, parse_scheme
from ridgeline.quantization.sizes import MatrixSize, named_matrices, stored_matrices, weight_bytes
from ridgeline.training.memory.step import FP32, AdapterSize
from ridgeline.training.methods.adapters import adapted_pieces
from ridgeline.training.methods.options import LoraOptions, QatOptions

# Bytes of each weight of a matrix that is rounded to a scheme, its rounded form included.
ROUNDING_BYTES = {"symmetric": 13.1, "asymmetric": 17.1}
MASK_BYTES = 1


@dataclass(frozen=True)
class TrainingMethod:
    """What is learned, and from what; by default all weights, from text."""

    adapters: AdapterSize | None = None
    codes: Mapping[str, Scheme] = field(default_factory=dict)  # of frozen projections, by name
    teacher: ModelConfig | None = None


def adapter_size(description: Description, options: LoraOptions) -> AdapterSize:
    assert options.rank is not None, "adapters have a rank"
    model = build_model(description.config, torch.float32, "meta")
    count, kept = 0, {}
    for name, pieces in adapted_pieces(model, description, options).items():
        linear: Any = model.get_submodule(name)
        outputs = sum(len(range(linear.out_features)[piece.rows]) for piece in pieces)
        count += options.rank * (len(pieces) * linear.in_features + outputs)
        kept[name.rpartition(".")[2]] = options.rank * len(pieces)
    return AdapterSize(count, kept)


def frozen_items(
    model: ModelConfig,
    dtype: torch.dtype,
    codes: Mapping[str, Scheme],
    on_gpu: bool,
    shards: int = 1,
) -> Iterator[MemoryItem]:
    """The weights beside which adapters are learned, or one of so many parts of them."""
    form = f"in {str(dtype).removeprefix('torch.')}"
    if codes:
        form = f"{', '.join(sorted({scheme.name for scheme in codes.values()}))}, the rest {form}"
    num_bytes = -(-weight_bytes(model, dtype, kept=codes) // shards)
    yield MemoryItem("weights", num_bytes, f"frozen, {form}")
    copied = 0 if on_gpu else _num_elements(_coded(model, codes, has_copy=True))
    yield MemoryItem("copies", copied * dtype.itemsize, "codes as weights, for products on a CPU")


def decoding_bytes(
    model: ModelConfig, dtype: torch.dtype, codes: Mapping[str, Scheme], on_gpu: bool
) -> int:
    """Of the largest matrix of codes, for one product. A CPU has copies of those whose inputs are
    not rounded.
    """
    matrices = _coded(model, codes, has_copy=None if on_gpu else False)
    return max((_decoded(scheme, matrix, dtype) for scheme, matrix in matrices), default=0)


def _decoded(scheme: Scheme, matrix: MatrixSize, dtype: torch.dtype) -> int:
    """Packed codes in one pass, others by way of fp32, times their scales."""
    each = dtype.itemsize if scheme.bits == 4 else 2 * FP32
    return each * matrix.num_outputs * matrix.depth


def _coded(
    model: ModelConfig, codes: Mapping[str, Scheme], has_copy: bool | None
) -> list[tuple[Scheme, MatrixSize]]:
    """Those of which a CPU has copies, or has none; with None all."""
    return [
        (scheme, matrix)
        for scheme, matrix in stored_matrices(model, None, codes)
        if has_copy in (None, scheme.inputs == "16-bit")
    ]


def _num_elements(matrices: list[tuple[Scheme, MatrixSize]]) -> int:
    return sum(matrix.num_outputs * matrix.depth for _, matrix in matrices)


def num_plain(model: ModelConfig, codes: Mapping[str, Scheme]) -> int:
    """Weights of layers' projections that are not codes."""
    return sum(
        matrix.num_outputs * matrix.depth
        for name, matrix in named_matrices(model)
        if name not in codes
    )


def _rounded(model: ModelConfig, qat: QatOptions) -> list[int]:
    """Weights of each matrix that is computed with in rounded or pruned form."""
    scheme = None if qat.scheme is None else parse_scheme(qat.scheme)
    return [
        matrix.num_outputs * matrix.depth
        for _, matrix in named_matrices(model)
        if qat.sparsity is not None or (scheme is not None and scheme.fits(*matrix))
    ]


def rounded_items(
    model: ModelConfig, dtype: torch.dtype, qat: QatOptions, shards: int = 1
) -> Iterator[MemoryItem]:
    """Where weights are gathered for a pass, they are rounded for each product anew."""
    own = _rounded(model, qat)
    count = sum(own) if shards == 1 else max(own, default=0)
    form = qat.scheme or "pruned"
    yield MemoryItem("rounded weights", count * dtype.itemsize, f"{form}, for a step's products")
    if qat.sparsity is not None:
        yield MemoryItem("masks", count * MASK_BYTES, "which weights are not pruned")


def rounding_bytes(model: ModelConfig, dtype: torch.dtype, qat: QatOptions) -> int:
    """Of the largest matrix on its way to its rounded form, beyond that."""
    if qat.scheme is None:
        return 0
    kind = "symmetric" if parse_scheme(qat.scheme).symmetric else "asymmetric"
    largest = max(_rounded(model, qat), default=0)
    return int((ROUNDING_BYTES[kind] - dtype.itemsize) * largest)


def teacher_items(teacher: ModelConfig | None, dtype: torch.dtype) -> Iterator[MemoryItem]:
    if teacher is not None:
        num_bytes = num_parameters(teacher) * dtype.itemsize
        yield MemoryItem("teacher", num_bytes, "its weights, frozen")
