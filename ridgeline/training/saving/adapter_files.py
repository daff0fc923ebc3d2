"""Adapters on disk, as PEFT lays them out, so that it and every engine that follows it load them:
`adapter_config.json`, and `adapter_model.safetensors` with two tensors for each projection, under
the checkpoint's own names.

    write_adapter(folder, adapter_tensors(model), options, base="demo")
    read_adapter(model, folder)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from ridgeline.errors import CheckpointError
from ridgeline.models import Transformer
from ridgeline.models.checkpoint.safetensors import open_shard
from ridgeline.models.checkpoint.save import METADATA, as_json, own_memory, sync, write_file
from ridgeline.training.methods.adapters import adapters_of
from ridgeline.training.methods.options import LoraOptions

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
Weights = Iterable[tuple[str, Tensor]]  # by stored name
PREFIX = "base_model.model."  # what PEFT wraps a model in


@dataclass(frozen=True)
class AdapterExporter:
    """Makes a checkpoint's folder of a model's adapters."""

    options: LoraOptions
    base: str  # the model's name or folder
    extra_files: Mapping[str, bytes | Path]

    def weights(self, model: Transformer) -> Iterator[tuple[str, Tensor]]:
        yield from adapter_tensors(model)

    def write(self, folder: Path, weights: Weights, model: Transformer) -> None:
        write_adapter(folder, weights, self.options, self.base)
        for name, content in self.extra_files.items():
            data = content.read_bytes() if isinstance(content, Path) else content
            write_file(folder / name, data)


def adapter_tensors(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    """By stored name: the parameters themselves, or parts of them."""
    for layer in adapters_of(model).values():
        for piece, down_RD, up_OR in layer.pairs():
            yield f"{PREFIX}{piece.name}.lora_A.weight", down_RD
            yield f"{PREFIX}{piece.name}.lora_B.weight", up_OR


def write_adapter(folder: Path, weights: Weights, options: LoraOptions, base: str) -> None:
    """Into a folder that is there."""
    storages: set[int] = set()
    tensors = {name: own_memory(tensor, storages) for name, tensor in weights}
    names = {name.split(".")[-3] for name in tensors}
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": options.rank,
        "lora_alpha": options.whole_alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(names),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
    }
    write_file(folder / CONFIG_NAME, as_json(values))
    save_file(tensors, folder / WEIGHTS_NAME, metadata=METADATA)
    sync(folder / WEIGHTS_NAME)


@torch.no_grad()
def read_adapter(model: Transformer, folder: Path) -> None:
    """Fill the model's adapters with those of a folder."""
    path = folder / WEIGHTS_NAME
    wanted = dict(adapter_tensors(model))
    with open_shard(path) as file:
        differing = set(file.keys()) ^ wanted.keys()
        if differing:
            some = ", ".join(sorted(differing)[:3])
            raise CheckpointError(f"{path} does not fit this model: {some} are on one side only")
        for name, tensor in wanted.items():
            stored = file.get_tensor(name)
            if stored.shape != tensor.shape:
                raise CheckpointError(
                    f"{path}: {name} has the shape {list(stored.shape)} instead of "
                    f"{list(tensor.shape)}"
                )
            tensor.copy_(stored)
