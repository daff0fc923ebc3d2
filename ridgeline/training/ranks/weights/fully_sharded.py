"""Weights, gradients and optimizer state cut over ranks by torch's `fully_shard`, block by block:
a block's weights are gathered when its pass begins, and its gradients are summed and shared out
when its backward pass ends, while the next block computes.

Where there are copies besides (`replicate`, `context`), the sums go over these too. Without `shard`
there is nothing to gather, and nothing of this is used: copies.py sums.

    for block in model.layers:
        shard_block(block, devices)
    shard_root(model, devices)
    model.training_loss(loss_of, batch, plan)

Gradients are sums, not means: who knows the count of the whole batch divides, once. torch's part
takes seconds to import, and is imported where it is called: a run on one device never does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ridgeline.models import Transformer
from ridgeline.parallel.holdings import shard_dim
from ridgeline.parallel.mesh import Mesh
from ridgeline.training.stepping.forward import block_pass

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def needs_sharding(mesh: Mesh) -> bool:
    return mesh.layout.shard > 1


def weights_mesh(mesh: Mesh) -> DeviceMesh:
    """Of ranks with copies of the weights, times those that share them. It is made once."""
    assert needs_sharding(mesh), "a rank that holds the whole gathers nothing"
    if mesh.weights is None:
        mesh.weights = _weights_mesh(mesh)
    devices: DeviceMesh = mesh.weights
    return devices


def _weights_mesh(mesh: Mesh) -> DeviceMesh:
    from torch.distributed.device_mesh import DeviceMesh

    outer, shard = mesh.axis("outer"), mesh.axis("shard")
    kind = mesh.device.type
    if outer.size == 1:
        return DeviceMesh.from_group(shard.group, kind, mesh_dim_names=("shard",))
    ranks = torch.tensor(_same_weights(mesh))
    return DeviceMesh.from_group(
        [outer.group, shard.group], kind, mesh=ranks, mesh_dim_names=("outer", "shard")
    )


def _same_weights(mesh: Mesh) -> list[list[int]]:
    """[outer, shard] ranks that have the same stage and the same part of each matrix."""
    layout, own = mesh.layout, mesh.place
    return [
        [
            layout.rank_of(own._replace(replicate=replicate, context=context, shard=shard))
            for shard in range(layout.shard)
        ]
        for replicate in range(layout.replicate)
        for context in range(layout.context)
    ]


def shard_block(
    block: nn.Module,
    devices: DeviceMesh,
    keep_whole: Iterable[nn.Parameter] = (),
    *,
    stays_whole: bool = False,
) -> None:
    """One that has memory; what it had is let go of. With `stays_whole` its weights are gathered
    once for all passes of a step.
    """
    owner: Any = block
    owner.training_pass = MethodType(block_pass, block)
    _shard(block, devices, keep_whole, stays_whole, method="training_pass")


def shard_root(
    model: Transformer, devices: DeviceMesh, keep_whole: Iterable[nn.Parameter] = ()
) -> None:
    """What is left: embedding, last norm, head. They are whole for all of a pass, whatever that
    makes of them.
    """
    owner: Any = model
    owner.training_loss = MethodType(run_pass, model)
    _shard(model, devices, keep_whole, method="training_loss")


def run_pass(model: Transformer, run: Callable[..., Tensor], *inputs: Any) -> Tensor:
    return run(model, *inputs)


def shard_stage(
    stage: nn.Module, devices: DeviceMesh, keep_whole: Iterable[nn.Parameter] = ()
) -> None:
    """What a pipeline's stage has besides its blocks, which are sharded and stay whole."""
    _shard(stage, devices, keep_whole, stays_whole=True)


def _shard(
    module: nn.Module,
    devices: DeviceMesh,
    keep_whole: Iterable[nn.Parameter],
    stays_whole: bool = False,
    method: str | None = None,  # which runs the module's pass, in place of `forward`
) -> None:
    from torch.distributed.fsdp import (
        MixedPrecisionPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )
    from torch.distributed.tensor import Shard

    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    when: dict[str, Any] = {"reshard_after_forward": False} if stays_whole else {}
    num_ranks = devices.size(devices.ndim - 1)
    sharded: Any = fully_shard(
        module,
        mesh=devices,
        mp_policy=policy,
        shard_placement_fn=lambda parameter: Shard(shard_dim(parameter.shape, num_ranks)),
        ignored_params=set(keep_whole),
        **when,
    )
    sharded.set_gradient_divide_factor(1.0)
    # Alone, the factor makes a reduction that gloo does not have.
    sharded.set_force_sum_reduction_for_comms(True)
    if method is not None:
        register_fsdp_forward_method(module, method)
