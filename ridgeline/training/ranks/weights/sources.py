"""Where the weights of a run over ranks come from, tensor by tensor, so that no rank ever holds a
whole model: a checkpoint of any kind, or the initial weights of a shape.

    tensors = stored_tensors(path)                              # or initial_weights(config, seed)
    trainer = rank_trainer(config, train, mesh, tensors)
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from ridgeline.models import ModelConfig, Transformer
from ridgeline.models.checkpoint import open_checkpoint
from ridgeline.models.families import describe
from ridgeline.models.families.names import Index
from ridgeline.models.weights import stream_weights
from ridgeline.progress import Progress
from ridgeline.quantization.files.read import decoded
from ridgeline.training.initial import initial_tensors


def stored_tensors(
    path: Path, progress: Progress | None = None
) -> Iterator[tuple[str, Index, Tensor]]:
    """Parts of parameters, by our names: views of files, of which no more is read than is copied.
    Codes are expanded, one matrix at a time.
    """
    checkpoint = open_checkpoint(path)
    description = describe(checkpoint)
    with torch.device("meta"):
        model = Transformer(description.config)
    for part, tensor in stream_weights(model, decoded(checkpoint), description, progress):
        yield part.parameter, part.index, tensor
        del tensor  # or the file it views stays mapped with the next one


def initial_weights(
    config: ModelConfig, seed: int, device: str | torch.device
) -> Iterator[tuple[str, Index, Tensor]]:
    """The same as on one device of this kind."""
    for name, tensor in initial_tensors(config, seed, device):
        yield name, (), tensor
        del tensor
