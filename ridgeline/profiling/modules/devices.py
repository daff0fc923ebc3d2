"""The device of a callable and its inputs, and moving them to another; inputs nest in any way."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.errors import HardwareError, UsageError
from ridgeline.profiling.modules.paths import names_of

PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Tensors and plain values of any nesting, with where they are: tuples, mappings, dataclasses
    (which the outputs of transformers are) and objects with attributes.
    """
    yield from _leaves(tree, path, set())


def _leaves(tree: Any, path: str, visited: set[int]) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, (Tensor, *PLAIN)):
        yield path, tree
        return
    if id(tree) in visited or callable(tree):
        return
    visited.add(id(tree))
    for key, value in _children(tree):
        yield from _leaves(value, f"{path}.{key}" if path else str(key), visited)


def _children(tree: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(tree, Mapping):
        yield from tree.items()
    elif isinstance(tree, list | tuple):
        yield from enumerate(tree)
    elif is_dataclass(tree):
        yield from ((field.name, getattr(tree, field.name, None)) for field in fields(tree))
    else:
        yield from getattr(tree, "__dict__", {}).items()


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for _, leaf in leaves(tree) if isinstance(leaf, Tensor)]


def mapped(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same nesting with other tensors; what holds none is shared."""
    if isinstance(tree, Tensor):
        return change(tree)
    result = tensors(tree)
    if not result:
        return tree
    # Objects of any kind are copied by the rules of their own classes, which find the tensors made.
    return copy.deepcopy(tree, {id(tensor): change(tensor) for tensor in result})


def converted(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Containers and dataclasses with other tensors; objects of other kinds stay as they are."""
    if isinstance(tree, Tensor):
        return change(tree)
    if is_dataclass(tree) and not isinstance(tree, type):
        values = {f.name: getattr(tree, f.name, None) for f in fields(tree) if f.init}
        return replace(tree, **{name: converted(value, change) for name, value in values.items()})
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(converted(each, change) for each in tree))
    if type(tree) in (list, tuple):
        return type(tree)(converted(each, change) for each in tree)
    if type(tree) is dict:
        return {key: converted(each, change) for key, each in tree.items()}
    return tree


def device_of(work: Callable[..., Any], inputs: Any) -> torch.device:
    """Of the module's weights, or of the first tensor that goes in; a CPU without either."""
    parameters = (tensor for module in names_of(work) for tensor in module.parameters())
    first = next(chain(parameters, tensors(inputs)), torch.empty(0))
    device = first.device
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"the module is on {device}; move it to a CPU or a GPU first")
    return device


def move(
    work: Callable[..., Any], inputs: Any, device: torch.device
) -> tuple[Callable[..., Any], Any]:
    """The inputs on `device`, and a copy of the module where it is elsewhere; functions are taken
    to run where their inputs are.
    """
    if device.type == "cuda" and not torch.cuda.is_available():
        raise HardwareError(f"device {device} is missing: torch sees no GPU; use device='cpu'")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if isinstance(work, nn.Module) and device_of(work, inputs) != device:
        work = copy.deepcopy(work).to(device)
    return work, mapped(inputs, lambda tensor: tensor.to(device))
