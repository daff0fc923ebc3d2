"""Which ops of a module may run beside each other: its graph, as torch.fx traces it, divided among
streams, with the waits that every value needs which goes from one stream to another.

Plain decisions over nodes, without a GPU. A module that cannot be traced, that changes tensors in
place (no edge of the graph tells who must wait) or that keeps state has no plan, and says why.

    plan = stream_plan(traced(copied(module), args, keywords).graph)
    plan.num_streams, plan.steps[0].waits_for
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from ridgeline.errors import UnsupportedError

MAX_STREAMS = 4
PRODUCTS = (
    *(torch.matmul, torch.bmm, torch.einsum, operator.matmul, nn.functional.linear),
    *(nn.functional.conv1d, nn.functional.conv2d, nn.functional.scaled_dot_product_attention),
)
RECURRENT = (nn.RNNBase, nn.RNNCellBase)
# `a += b` and its like: a proxy without them would be traced as if `a` were another tensor then.
AUGMENTED = ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor")
IN_PLACE = {getattr(operator, name) for name in (*AUGMENTED, "setitem")}


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


class _StrictProxy(fx.Proxy):
    """Refuses what writes into the tensor it stands for."""


def _refused(name: str) -> Callable[[fx.Proxy, object], None]:
    def refuse(self: fx.Proxy, other: object) -> None:
        raise UnsupportedError(f"an operator ({name}) changes a tensor in place")

    return refuse


for _name in AUGMENTED:
    setattr(_StrictProxy, f"__{_name}__", _refused(_name))


def _is_ours(part: nn.Module) -> bool:
    """Padded layers, and those with codes."""
    return type(part).__module__.startswith("ridgeline.")


class _StrictTracer(fx.Tracer):
    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _StrictProxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return _is_ours(m) or super().is_leaf_module(m, module_qualified_name)


def traced(module: nn.Module, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> TracedModule:
    """UnsupportedError where the graph would not say the same as the module. Its `forward` runs
    here and may leave constants in it: give a copy.
    """
    given = bound(module, args, keywords)
    fixed = {name: value for name, value in given.items() if not isinstance(value, Tensor)}
    for name, value in fixed.items():
        if value is not None and not isinstance(value, bool | int | float | str):
            raise UnsupportedError(f"the argument {name} is a {type(value).__name__}, no tensor")
    if any(part.training for part in module.modules()):
        raise UnsupportedError("it is in training mode: call .eval() first")
    tracer, attributes = _StrictTracer(), _attributes(module)
    try:
        recorded = tracer.trace(module, fixed or None)
        graph = fx.GraphModule(tracer.root, recorded)
    except UnsupportedError:
        raise
    except Exception as error:  # forward itself runs here, and raises what it likes
        line = str(error).strip().split("\n")[0]
        raise UnsupportedError(f"torch.fx cannot trace it: {line}") from error
    _check_stateless(module, attributes)
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


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {
        f"{path}.{name}".lstrip("."): value
        for path, part in module.named_modules()
        for name, value in vars(part).items()
    }


def _check_stateless(module: nn.Module, before: Mapping[str, Any]) -> None:
    """A graph does not keep in the module what `forward` keeps there."""
    for name, value in _attributes(module).items():
        is_new = name not in before and not name.rpartition(".")[2].startswith("_tensor_constant")
        held = value if isinstance(value, list | tuple | dict) else (value,)
        values = held.values() if isinstance(held, dict) else held
        if is_new or before.get(name, value) is not value or _has_proxy(values):
            raise UnsupportedError(f"its forward sets the attribute {name}")


def _has_proxy(values: Iterable[Any]) -> bool:
    return any(isinstance(value, fx.Proxy) for value in values)


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
    lines = [_line(graph, each) for each in made]
    free = [line for line in lines if not continued.intersection(line)]
    if free:
        continued.update(free[-1])
        return stream_of[free[-1][0]]
    return loads.index(min(loads))


def _line(graph: fx.GraphModule, node: fx.Node) -> list[fx.Node]:
    """The value, and what it is a view or a small change of, back to the product that made it."""
    result = [node]
    while len(result[-1].all_input_nodes) == 1 and not is_product(graph, result[-1]):
        result.append(result[-1].all_input_nodes[0])
    return result


def _step(node: fx.Node, stream_of: Mapping[fx.Node, int]) -> StreamStep:
    own = stream_of[node]
    waits = tuple(each for each in node.all_input_nodes if stream_of[each] != own)
    return StreamStep(node, own, waits, any(stream_of[user] != own for user in node.users))


def critical_share(graph: fx.GraphModule, seconds: Mapping[str, float], total_s: float) -> float:
    """Of `total_s`, that is left when branches run beside each other on streams enough: the longest
    path, by the seconds of modules; what they do not name is taken to run alone.
    """
    called = [str(node.target) for node in graph.graph.nodes if node.op == "call_module"]
    ends: dict[fx.Node, float] = {}
    for node in graph.graph.nodes:
        began_s = max((ends[each] for each in node.all_input_nodes), default=0.0)
        path = str(node.target) if node.op == "call_module" else ""
        ends[node] = began_s + (seconds.get(path, 0.0) / called.count(path) if path else 0.0)
    counted_s = sum(seconds.get(path, 0.0) for path in set(called))
    longest_s = max(max(ends.values()), counted_s / MAX_STREAMS)
    return min(1.0, (total_s - counted_s + longest_s) / total_s) if total_s > 0 else 1.0


def is_product(graph: fx.GraphModule, node: fx.Node) -> bool:
    """Worth a stream: a module with matrices, or a product of two tensors."""
    if node.op == "call_module":
        part = graph.get_submodule(str(node.target))
        return _is_ours(part) or any(weight.dim() > 1 for weight in part.parameters())
    return node.op == "call_function" and node.target in PRODUCTS
