"""Copies of a model that share its weights but have other kinds of layers: how changes to the way a
model runs are applied from outside, while the model itself stays as it is.

    copy = with_kinds(model, lambda kind: {Linear: OtherLinear}.get(kind, kind))
    there = on_device(model, "cuda")
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)


def with_kinds(module: Module, kind_of: Callable[[type[nn.Module]], type[nn.Module]]) -> Module:
    """`kind_of` maps each class to itself, or to a subclass without its own `__init__`."""
    kind: Any = kind_of(type(module))
    copy = kind.__new__(kind)
    for name, value in module.__dict__.items():  # parameters are shared, their lists are not
        copy.__dict__[name] = value.copy() if isinstance(value, dict) else value
    copy.__dict__["_modules"] = {
        name: None if child is None else with_kinds(child, kind_of)
        for name, child in module._modules.items()
    }
    made: Module = copy
    return made


def on_device(module: Module, device: str | torch.device) -> Module:
    """A copy with all weights on a device. Those already there are shared; tied ones stay tied."""
    copy = with_kinds(module, lambda kind: kind)
    moved: dict[int, Tensor] = {}
    for part in copy.modules():
        tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for held in tables:
            for name, value in held.items():
                if value is not None and id(value) not in moved:
                    moved[id(value)] = _moved(value, device)
                held[name] = None if value is None else moved[id(value)]
    return copy


def _moved(value: Tensor, device: str | torch.device) -> Tensor:
    there = value.to(device)
    if there is value or not isinstance(value, nn.Parameter):
        return there
    return nn.Parameter(there, requires_grad=value.requires_grad)
