"""This rank's part of a model: its modules, and where each of its parameters lies in the whole.

local = local_model(config, mesh, torch.bfloat16)
fill_from(local.tensors(), local.parts, whole_tensors)      # in any order
local.parameters["layers.0.attn.qkv.weight"], local.parts[...]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ridgeline.models import ModelConfig, Transformer
from ridgeline.models.families.names import Index
from ridgeline.models.transformer import ExpertMLP
from ridgeline.parallel.degrees import check_experts, rank_config
from ridgeline.parallel.holdings import Holdings, Part, Region
from ridgeline.parallel.mesh import Mesh
from ridgeline.parallel.shards import whole_shapes
from ridgeline.training.ranks.pipelines.stages import StageModel, stage_models
from ridgeline.training.ranks.weights.fully_sharded import (
    needs_sharding,
    shard_block,
    shard_root,
    shard_stage,
    weights_mesh,
)
from ridgeline.training.stepping.gradients import local_tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class LocalModel:
    model: Transformer  # with a pipeline the first of the stages
    parameters: Mapping[str, nn.Parameter]  # by the whole model's names, and in its order
    parts: Mapping[str, Part]
    shapes: Mapping[str, tuple[int, ...]]  # of the whole parameters
    stages: tuple[StageModel, ...] = ()  # of a pipeline

    def tensors(self) -> dict[str, Tensor]:
        """What lies on this rank of each: the memory itself."""
        return {name: local_tensor(each) for name, each in self.parameters.items()}


def local_config(config: ModelConfig, mesh: Mesh) -> ModelConfig:
    """Of the part that a rank computes with."""
    return rank_config(config, mesh.layout.tensor)


def local_model(
    config: ModelConfig, mesh: Mesh, dtype: torch.dtype, holdings: Holdings | None = None
) -> LocalModel:
    """Allocated and not yet written. `holdings` are those of the layout, if no others are given."""
    check_experts(config, mesh.layout)
    holdings = holdings or Holdings(config, mesh.layout)
    own = local_config(config, mesh)
    stages: tuple[StageModel, ...] = ()
    with torch.device("meta"):
        if mesh.layout.pipeline == 1:
            model = Transformer(own)
        else:
            stages = tuple(stage_models(own, holdings, mesh.rank))
            model = stages[0]
    devices = weights_mesh(mesh) if needs_sharding(mesh) else None
    parameters: dict[str, nn.Parameter] = {}
    for each in stages or (model,):
        keep_experts(each, mesh.layout.expert)
        _place(each, dtype, mesh, devices)
        each.config = replace(each.config, vocab_size=config.vocab_size)
        parameters |= each.named_parameters()
    shapes = {name: shape for name, shape in whole_shapes(config).items() if name in parameters}
    parts = {}
    for name, shape in shapes.items():
        part = holdings.of(name, shape, mesh.rank)
        assert part is not None, name
        assert part.local_shape == tuple(local_tensor(parameters[name]).shape), (name, part)
        parts[name] = part
    return LocalModel(model, {name: parameters[name] for name in shapes}, parts, shapes, stages)


def _place(model: Transformer, dtype: torch.dtype, mesh: Mesh, devices: DeviceMesh | None) -> None:
    """Give it memory, and cut it over the ranks that share weights."""
    is_stage = isinstance(model, StageModel)
    for block in model.layers.children():
        allocate(block, dtype, mesh.device)
        if devices is not None:
            whole = own_experts(block) if mesh.layout.expert > 1 else ()
            shard_block(block, devices, whole, stays_whole=is_stage)
    allocate_root(model, dtype, mesh.device)
    if devices is not None and is_stage:
        shard_stage(model, devices)
    elif devices is not None:
        shard_root(model, devices)


def keep_experts(model: Transformer, num_ranks: int) -> None:
    """**In the model**, without memory yet: the experts of one of so many ranks."""
    for block in model.layers.children() if num_ranks > 1 else ():
        for weight in own_experts(block):
            weight.data = weight.data[: len(weight) // num_ranks].clone()


def own_experts(block: Any) -> tuple[nn.Parameter, ...]:
    """Weights that lie whole on a rank of an expert group."""
    mlp = block.mlp
    return (mlp.gate_up, mlp.down) if isinstance(mlp, ExpertMLP) else ()


def allocate(module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    for each in module.modules():
        for name, parameter in list(each.named_parameters(recurse=False)):
            memory = torch.empty(parameter.shape, dtype=dtype, device=device)
            each.register_parameter(name, nn.Parameter(memory))


def allocate_root(model: Transformer, dtype: torch.dtype, device: torch.device) -> None:
    """What lies outside of the blocks; a tied head stays the embedding."""
    for name, module in model.named_children():
        if name != "layers":
            allocate(module, dtype, device)
    if model.config.tied_embeddings and hasattr(model, "head"):
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
