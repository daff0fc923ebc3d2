"""Which ops of a module may run beside each other: its graph, as torch.fx traces it, divided among
streams, with the waits that every value needs which goes from one stream to another.

Plain decisions over nodes, without a GPU. A module that cannot be traced, that changes tensors in
place (no edge of the graph tells who must wait) or that keeps state has no plan, and says why.

    plan = stream_plan(traced(module, example))
    plan.num_streams, plan.steps[0].waits_for
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from ridgeline.errors import UnsupportedError

MAX_STREAMS = 4
PRODUCTS = (torch.matmul, torch.bmm, torch.einsum, nn.functional.linear, operator.matmul)
RECURRENT = (nn.RNNBase, nn.RNNCellBase)
IN_PLACE = {
    getattr(operator, name)
    for name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "ipow", "iand", "ior", "setitem")
}


class TracedModule(NamedTuple):
    graph: fx.GraphModule
    fixed: Mapping[str, Any]  # arguments that are no tensors: the graph holds for these values only


class StreamStep(NamedTuple):
    node: fx.Node
    stream: int  # 0 is the caller's
    waits_for: tuple[fx.Node, ...]  # values of other streams that it reads
    is_awaited: bool  # by a step of another stream


@dataclass(frozen=True)
class StreamPlan:
    steps: tuple[StreamStep, ...]  # in the graph's own order
    num_streams: int
    num_branches: int  # streams with products of their own

    @property
    def streams(self) -> dict[fx.Node, int]:
        return {step.node: step.stream for step in self.steps}


def traced(module: nn.Module, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> TracedModule:
    """UnsupportedError where the graph would not say the same as the module."""
    given = bound(module, args, keywords)
    fixed = {name: value for name, value in given.items() if not isinstance(value, Tensor)}
    for name, value in fixed.items():
        if value is not None and not isinstance(value, bool | int | float | str):
            raise UnsupportedError(f"the argument {name} is a {type(value).__name__}, no tensor")
    if module.training:
        raise UnsupportedError("it is in training mode: call .eval() first")
    try:
        graph = fx.symbolic_trace(module, concrete_args=fixed or None)
    except Exception as error:  # forward itself runs here, and raises what it likes
        line = str(error).strip().split("\n")[0]
        raise UnsupportedError(f"torch.fx cannot trace it: {line}") from error
    _check_pure(graph)
    return TracedModule(graph, fixed)


def bound(module: nn.Module, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by the names of `forward`, its defaults among them."""
    signature = inspect.signature(module.forward)
    kinds = {each.kind for each in signature.parameters.values()}
    if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
        raise UnsupportedError("its forward takes any number of arguments")
    values = signature.bind(*args, **keywords)
    values.apply_defaults()
    return dict(values.arguments)


def _check_pure(graph: fx.GraphModule) -> None:
    """Edges tell the whole order only where nothing is written in place."""
    for node in graph.graph.nodes:
        name = str(node.target)
        if node.op == "call_method" and name.endswith("_") and not name.endswith("__"):
            raise UnsupportedError(f"{name} changes a tensor in place")
        if node.op == "call_function" and _writes(node):
            raise UnsupportedError(f"{node.name} changes a tensor in place")
        if node.op == "call_module":
            part = graph.get_submodule(name)
            if getattr(part, "inplace", False):
                raise UnsupportedError(f"{name} changes its input in place (inplace=True)")
            if isinstance(part, RECURRENT):
                raise UnsupportedError(f"{name} is a {type(part).__name__}")


def _writes(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return node.target in IN_PLACE or in_place or bool(node.kwargs.get("inplace"))


def stream_plan(graph: fx.GraphModule) -> StreamPlan:
    """A node goes on where its latest input was made, if nothing else did so before; else it begins
    a branch, on the stream that has had the least to do. Only products are worth a branch.
    """
    stream_of: dict[fx.Node, int] = {}
    continued: set[fx.Node] = set()
    loads = [0] * MAX_STREAMS
    for node in graph.graph.nodes:
        stream = _stream(graph, node, stream_of, continued, loads)
        stream_of[node] = stream
        if is_product(graph, node):
            loads[stream] += 1
    steps = tuple(_step(node, stream_of) for node in graph.graph.nodes)
    return StreamPlan(steps, max(stream_of.values()) + 1, sum(load > 0 for load in loads))


def _stream(
    graph: fx.GraphModule,
    node: fx.Node,
    stream_of: Mapping[fx.Node, int],
    continued: set[fx.Node],
    loads: list[int],
) -> int:
    made = [each for each in node.all_input_nodes if each.op != "get_attr"]
    if node.op in ("placeholder", "get_attr", "output") or not made:
        return 0
    if not is_product(graph, node):
        return stream_of[made[-1]]
    free = [each for each in made if not _is_continued(each, continued)]
    if free:
        continued.update(_line(free[-1]))
        return stream_of[free[-1]]
    return loads.index(min(loads))


def _line(node: fx.Node) -> list[fx.Node]:
    """The value, and what it is a view or a small change of."""
    result = [node]
    while len(result[-1].all_input_nodes) == 1 and result[-1].op in ("call_method",):
        result.append(result[-1].all_input_nodes[0])
    return result


def _is_continued(node: fx.Node, continued: set[fx.Node]) -> bool:
    return any(each in continued for each in _line(node))


def _step(node: fx.Node, stream_of: Mapping[fx.Node, int]) -> StreamStep:
    own = stream_of[node]
    waits = tuple(each for each in node.all_input_nodes if stream_of[each] != own)
    return StreamStep(node, own, waits, any(stream_of[user] != own for user in node.users))


def is_product(graph: fx.GraphModule, node: fx.Node) -> bool:
    """Worth a stream: a module with matrices, or a product of two tensors."""
    if node.op == "call_module":
        part = graph.get_submodule(str(node.target))
        return any(parameter.dim() > 1 for parameter in part.parameters())
    return node.op == "call_function" and node.target in PRODUCTS
