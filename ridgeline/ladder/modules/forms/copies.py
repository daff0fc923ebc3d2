"""Copies of a module that leave the original as it is: weights are shared or converted, everything
else is the copy's own, by the rules of the module's own classes.

    changed = copied(module, torch.bfloat16)
"""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)


def copied(module: Module, dtype: torch.dtype | None = None) -> Module:
    """With weights in `dtype`, or shared where none is given; what is tied stays tied. Buffers that
    are no part of a checkpoint (tables of angles, masks) keep their dtype, as where it is loaded.
    """
    made: dict[int, object] = {}
    for parameter in module.parameters():
        made[id(parameter)] = _converted(parameter, dtype)
    if dtype is not None:
        for buffer in _stored_buffers(module):
            if buffer.is_floating_point():
                made[id(buffer)] = buffer.to(dtype)
    return copy.deepcopy(module, made)


def _converted(parameter: nn.Parameter, dtype: torch.dtype | None) -> Tensor:
    if dtype is None or not parameter.is_floating_point() or parameter.dtype == dtype:
        return parameter
    return nn.Parameter(parameter.detach().to(dtype), requires_grad=parameter.requires_grad)


def _stored_buffers(module: nn.Module) -> list[Tensor]:
    return [
        buffer
        for part in module.modules()
        for name, buffer in part.named_buffers(recurse=False)
        if name not in part._non_persistent_buffers_set
    ]


def weight_bytes(module: nn.Module) -> int:
    """Of parameters and buffers, what is shared once."""
    sizes = {id(tensor): tensor.nbytes for tensor in (*module.parameters(), *module.buffers())}
    return sum(sizes.values())
