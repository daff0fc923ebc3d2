"""Checkpoints as raw tensors in and out: safetensors folders and GGUF files, local or fetched."""

from ridgeline.models.checkpoint.base import Checkpoint, TensorInfo
from ridgeline.models.checkpoint.open import open_checkpoint
from ridgeline.models.checkpoint.save import save_safetensors
from ridgeline.models.checkpoint.source import resolve_model

__all__ = [
    "Checkpoint",
    "TensorInfo",
    "open_checkpoint",
    "resolve_model",
    "save_safetensors",
]
