"""Weights between a checkpoint and a model: each stored tensor is copied straight into its part,
and back.

Loading allocates the model once on its device and streams shard by shard, so the host holds little
beyond the shard being read. Whatever does not fit (missing, unknown or wrong-shaped tensors) is one
error that lists it all, raised before a byte is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from ridgeline.errors import CheckpointError
from ridgeline.models.checkpoint import Checkpoint
from ridgeline.models.checkpoint.base import shorten
from ridgeline.models.families import Description, WeightPart, parts
from ridgeline.models.families.gguf import ROPE_TENSORS
from ridgeline.models.transformer import Transformer
from ridgeline.progress import Progress


@torch.no_grad()
def load_weights(
    model: Transformer,
    checkpoint: Checkpoint,
    description: Description,
    progress: Progress | None = None,
) -> None:
    """Fill `model` (from `build_model`) with the checkpoint's tensors."""
    parameters = dict(model.named_parameters())
    for part, tensor in stream_weights(model, checkpoint, description, progress):
        parameters[part.parameter][part.index].copy_(tensor)
        del tensor  # the last view of a shard keeps it mapped, and the next one is mapped meanwhile


def stream_weights(
    model: Transformer,
    checkpoint: Checkpoint,
    description: Description,
    progress: Progress | None = None,
) -> Iterator[tuple[WeightPart, Tensor]]:
    """Each part of the model's parameters with the tensor to copy there, one at a time. `model`
    says what fits; it may have no memory allocated.
    """
    part_of = stored_parts(model, checkpoint, description)
    for name, tensor in checkpoint.read(part_of.keys(), progress=progress):
        part = part_of[name]
        yield part, part.change(tensor) if part.change else tensor
        del tensor


def stored_parts(
    model: Transformer, checkpoint: Checkpoint, description: Description
) -> dict[str, WeightPart]:
    """The part that each tensor is, by its stored name; an error that lists everything that does
    not fit the model.
    """
    parameters = dict(model.named_parameters())
    wanted = {part.name: part for part in parts(description.config, description.names)}
    stored = canonical_names(checkpoint.tensors, description)
    _check_fit(parameters, wanted, stored, checkpoint, description)
    return {stored[name]: part for name, part in wanted.items()}


def checkpoint_tensors(
    model: Transformer, description: Description
) -> Iterator[tuple[str, Tensor]]:
    """The model's weights under Hugging Face names, fused tensors cut into their pieces: what a
    save writes.
    """
    parameters = dict(model.named_parameters())
    for part in parts(description.config, description.family.hf_names):
        yield part.name, parameters[part.parameter][part.index].contiguous()


def canonical_names(names: Iterable[str], description: Description) -> dict[str, str]:
    """The family's own name of each tensor, and the one it is stored under."""
    return {_canonical(name, description): name for name in names}


def _canonical(name: str, description: Description) -> str:
    for prefix, ours in description.family.renamed:
        if name.startswith(prefix):
            return ours + name.removeprefix(prefix)
    return name


def _check_fit(
    parameters: dict[str, torch.nn.Parameter],
    wanted: dict[str, WeightPart],
    stored: dict[str, str],
    checkpoint: Checkpoint,
    description: Description,
) -> None:
    missing = [name for name in wanted if name not in stored]
    extra = [
        name
        for name in stored
        if name not in wanted and not _may_be_ignored(name, stored[name], description)
    ]
    wrong = []
    for name, part in wanted.items():
        if name in stored:
            shape = checkpoint.tensors[stored[name]].shape
            expected = tuple(parameters[part.parameter][part.index].shape)
            if shape != expected:
                wrong.append(f"{name} {list(shape)} instead of {list(expected)}")
    kinds = [("missing", missing), ("unknown", extra), ("wrong shape", wrong)]
    problems = [f"{len(names)} {kind}: {shorten(names)}" for kind, names in kinds if names]
    if problems:
        raise CheckpointError(
            f"{checkpoint.path} does not fit {description.family.name}: {'; '.join(problems)}"
        )


def _may_be_ignored(name: str, stored_name: str, description: Description) -> bool:
    """Tensors that add nothing to the config: rotary tables, a tied head stored twice, other
    modalities.
    """
    if name.endswith("rotary_emb.inv_freq") or name in ROPE_TENSORS:
        return True
    if description.config.tied_embeddings and name == description.names.head:
        return True
    return stored_name.startswith(description.family.ignored)
