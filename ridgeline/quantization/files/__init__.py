"""Quantized checkpoints: reading other tools' formats, and writing compressed-tensors."""

from ridgeline.quantization.files.fuse import kept_schemes, model_weights
from ridgeline.quantization.files.matrix import StoredMatrix, cut, decoded_matrix, join
from ridgeline.quantization.files.read import (
    decoded,
    is_quantized,
    open_quantized,
    read_quantized,
)
from ridgeline.quantization.files.save import save_quantized

__all__ = [
    "StoredMatrix",
    "cut",
    "decoded",
    "decoded_matrix",
    "is_quantized",
    "join",
    "kept_schemes",
    "model_weights",
    "open_quantized",
    "read_quantized",
    "save_quantized",
]
