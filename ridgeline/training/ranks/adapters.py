"""Adapters learned on several ranks beside a frozen base: each rank has all adapters and sequences
of its own, and the adapters' gradients are summed, which is little to send. With `shard` a rank
keeps a part of the base, of which a block is whole while it runs; with `replicate` alone each has
all of it, which may be codes.

    model, learned = sharded_base(description, config.lora, mesh, dtype, tensors, seed=0)
    trainer = adapter_trainer(model, config, learned, mesh)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ridgeline.models import Transformer
from ridgeline.models.families import Description
from ridgeline.parallel.holdings import Holdings
from ridgeline.parallel.mesh import Mesh
from ridgeline.parallel.shards import whole_shapes
from ridgeline.training.config import TrainConfig
from ridgeline.training.methods.adapters import (
    draw_adapters,
    insert_adapters,
    learned_adapters,
)
from ridgeline.training.methods.options import LoraOptions
from ridgeline.training.ranks.rank_trainer import MeshTrainer, WholeTensors
from ridgeline.training.ranks.weights.fully_sharded import shard_block, shard_root, weights_mesh
from ridgeline.training.ranks.weights.local_model import allocate, allocate_root, fill_from
from ridgeline.training.ranks.weights.sums import sum_over
from ridgeline.training.stepping.gradients import local_tensor, norm_of

BASE = ".base."  # in the name of a parameter that an adapter stands beside


class AdapterSharing:
    """Every rank has the same weights, and other tokens."""

    is_alone = False

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def total_count(self, count: int) -> int:
        return self._mesh.agreed(count, "sum")

    def finish(self, gradients: Mapping[str, Tensor]) -> None:
        sum_over(self._mesh.axis("all"), list(gradients.values()))

    def totals(self, loss: Tensor, gradients: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The norm is the same on all ranks, bit for bit, as the sums are."""
        total = self._mesh.axis("all").all_reduce(loss.double().clone())
        return total.to(loss.dtype), norm_of(gradients)

    def total_loss(self, loss: float) -> float:
        own, control = torch.tensor(loss, dtype=torch.float64), self._mesh.control
        return float(own if control is None else control.all_reduce(own))

    def sum_of(self, number: Tensor) -> Tensor:
        """Of updates that all ranks make alike."""
        return number

    def num_weights(self, own: int) -> int:
        return own


def adapter_trainer(
    model: Transformer,
    config: TrainConfig,
    learned: Mapping[str, nn.Parameter],
    mesh: Mesh,
    teacher: Transformer | None = None,
) -> MeshTrainer:
    trainer = MeshTrainer(model, config, learned, teacher=teacher, sharing=AdapterSharing(mesh))
    trainer.mesh = mesh
    return trainer


def sharded_base(
    description: Description,
    options: LoraOptions,
    mesh: Mesh,
    dtype: torch.dtype,
    tensors: WholeTensors,
    seed: int,
) -> tuple[Transformer, dict[str, nn.Parameter]]:
    """A model of which this rank has a part of every frozen weight; and what is learned, in fp32.
    `tensors` are those of the whole base, in any order.
    """
    with torch.device("meta"):
        model = Transformer(description.config)
        names = insert_adapters(model, description, options)
    devices = weights_mesh(mesh)
    for block in model.layers.children():
        allocate(block, dtype, mesh.device)
        block.requires_grad_(False)
        shard_block(block, devices, thawed(block))
    allocate_root(model, dtype, mesh.device)
    for child in (model.embed, model.norm, model.head):
        child.requires_grad_(False)
    shard_root(model, devices)
    fill_base(model, description, mesh, tensors)
    draw_adapters(model, names, seed)
    return model, learned_adapters(model)


def thawed(block: nn.Module) -> list[nn.Parameter]:
    """The block's adapters, in fp32, which stay whole."""
    parameters = list(learned_adapters(block).values())
    for each in parameters:
        each.data = torch.empty(each.shape, dtype=torch.float32, device=each.device)
        each.requires_grad_(True)
    return parameters


@torch.no_grad()
def fill_base(
    model: Transformer, description: Description, mesh: Mesh, tensors: WholeTensors
) -> None:
    own = {id(each) for each in learned_adapters(model).values()}
    targets = {
        name.replace(BASE, "."): local_tensor(each)
        for name, each in model.named_parameters()
        if id(each) not in own
    }
    holdings, parts = Holdings(description.config, mesh.layout), {}
    for name, shape in whole_shapes(description.config).items():
        part = holdings.of(name, shape, mesh.rank)
        assert part is not None, name
        assert part.local_shape == tuple(targets[name].shape), (name, part)
        parts[name] = part
    assert parts.keys() == targets.keys(), "a weight of the base is nobody's"
    fill_from(targets, parts, tensors)
