"""This rank's part of a model: its modules, and where each of its parameters lies in the whole.

local = local_model(config, mesh, torch.bfloat16)
local.fill(full_tensors)                    # (name, whole tensor) in any order
local.parameters["layers.0.attn.qkv.weight"], local.parts[...]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.models import ModelConfig, Transformer
from ridgeline.models.families.names import Index
from ridgeline.models.transformer import ExpertMLP
from ridgeline.parallel.degrees import check_experts, rank_config
from ridgeline.parallel.holdings import Holdings, Part, Region
from ridgeline.parallel.mesh import Mesh
from ridgeline.parallel.shards import whole_shapes
from ridgeline.training.ranks.fully_sharded import (
    needs_sharding,
    shard_block,
    shard_root,
    weights_mesh,
)
from ridgeline.training.stepping.forward import loss_of
from ridgeline.training.stepping.gradients import local_tensor


@dataclass(frozen=True)
class LocalModel:
    model: Transformer
    parameters: Mapping[str, nn.Parameter]  # by the whole model's names
    parts: Mapping[str, Part]
    shapes: Mapping[str, tuple[int, ...]]  # of the whole parameters

    def tensors(self) -> dict[str, Tensor]:
        """What lies on this rank of each: the memory itself."""
        return {name: local_tensor(each) for name, each in self.parameters.items()}


def local_config(config: ModelConfig, mesh: Mesh) -> ModelConfig:
    """Of the part that a rank computes with."""
    return rank_config(config, mesh.layout.tensor)


def local_model(config: ModelConfig, mesh: Mesh, dtype: torch.dtype) -> LocalModel:
    """Allocated and not yet written."""
    check_experts(config, mesh.layout)
    holdings = Holdings(config, mesh.layout)
    with torch.device("meta"):
        model = Transformer(local_config(config, mesh))
    keep_experts(model, mesh.layout.expert)
    if needs_sharding(mesh):
        devices = weights_mesh(mesh)
        for block in model.layers:
            _allocate(block, dtype, mesh.device)
            shard_block(block, devices, own_experts(block) if mesh.layout.expert > 1 else ())
        _allocate_root(model, dtype, mesh.device)
        shard_root(model, devices, loss_of)
    else:
        for block in model.layers:
            _allocate(block, dtype, mesh.device)
        _allocate_root(model, dtype, mesh.device)
    model.config = replace(model.config, vocab_size=config.vocab_size)
    shapes = whole_shapes(config)
    parameters = dict(model.named_parameters())
    parts = {}
    for name in parameters:
        part = holdings.of(name, shapes[name], mesh.rank)
        assert part is not None, name
        assert part.local_shape == tuple(local_tensor(parameters[name]).shape), (name, part)
        parts[name] = part
    return LocalModel(model, parameters, parts, {name: shapes[name] for name in parts})


def keep_experts(model: Transformer, num_ranks: int) -> None:
    """**In the model**, without memory yet: the experts of one of so many ranks."""
    for block in model.layers if num_ranks > 1 else ():
        for weight in own_experts(block):
            weight.data = weight.data[: len(weight) // num_ranks].clone()


def own_experts(block: Any) -> tuple[nn.Parameter, ...]:
    """Weights that lie whole on a rank of an expert group."""
    mlp = block.mlp
    return (mlp.gate_up, mlp.down) if isinstance(mlp, ExpertMLP) else ()


def _allocate(module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    for each in module.modules():
        for name, parameter in list(each.named_parameters(recurse=False)):
            memory = torch.empty(parameter.shape, dtype=dtype, device=device)
            each.register_parameter(name, nn.Parameter(memory))


def _allocate_root(model: Transformer, dtype: torch.dtype, device: torch.device) -> None:
    """What lies outside of the blocks; a tied head stays the embedding."""
    root: Any = model
    for module in (root.embed, root.norm, root.head):
        _allocate(module, dtype, device)
    if model.config.tied_embeddings:
        model.head.weight = model.embed.weight


def write_region(target: Tensor, region: Region, tensor: Tensor, index: Index = ()) -> None:
    """Copy into a rank's part of a parameter what it holds of `tensor`, which is the part `index`
    of the whole one.
    """
    starts: list[tuple[int, int | None]] = []
    source_dim = 0
    for dim in range(len(region.dims)):
        where = index[dim] if dim < len(index) else slice(None)
        if isinstance(where, int):
            starts.append((where, None))
            continue
        starts.append((where.start or 0, source_dim))
        source_dim += 1
    _write(target, region, tensor, starts, 0)


def _write(
    target: Tensor,
    region: Region,
    source: Tensor,
    starts: list[tuple[int, int | None]],
    dim: int,
) -> None:
    if dim == len(region.dims):
        target.copy_(source.reshape(target.shape))
        return
    first, source_dim = starts[dim]
    length = 1 if source_dim is None else source.shape[source_dim]
    offset = 0
    for wanted in region.dims[dim]:
        begin, end = max(wanted.start, first), min(wanted.stop, first + length)
        if begin < end:
            part = source
            if source_dim is not None:
                part = source.narrow(source_dim, begin - first, end - begin)
            own = target.narrow(dim, offset + begin - wanted.start, end - begin)
            _write(own, region, part, starts, dim + 1)
        offset += len(wanted)


def read_region(tensor: Tensor, region: Region) -> Tensor:
    """What a region has of a whole tensor."""
    out = tensor.new_empty(region.shape)
    write_region(out, region, tensor)
    return out


def fill_from(
    targets: Mapping[str, Tensor],
    parts: Mapping[str, Part],
    tensors: Iterable[tuple[str, Index, Tensor]],
) -> None:
    """Rows that fill a vocabulary up become zero."""
    for name, target in targets.items():
        target[parts[name].region.shape[0] :].zero_()
    for name, index, tensor in tensors:
        if name in targets:
            part = parts[name]
            write_region(targets[name][: part.region.shape[0]], part.region, tensor, index)
