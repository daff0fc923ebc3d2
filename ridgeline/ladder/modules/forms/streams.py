"""A module that runs its independent branches on CUDA streams of their own, by the plan of
branches.py.

Side streams begin where the caller's stream is, and the caller's stream waits for them at the end.
Values live until then, and outputs are marked as the caller's stream's: no memory is used again
while another stream may still read it. A call whose arguments are others than the traced ones (a
mask where there was none) runs the module as it is.

    fast = StreamedModule(copy, args, keywords)
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn

from ridgeline.ladder.modules.forms.branches import StreamStep, bound, stream_plan, traced
from ridgeline.profiling.modules.devices import tensors


class StreamedModule(nn.Module):
    def __init__(self, module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        super().__init__()
        self.module = module
        known = traced(module, args, keywords)
        self._fixed = known.fixed
        self.plan = stream_plan(known.graph)
        self._running = fx.Interpreter(known.graph, garbage_collect_values=False)
        first = next((p.device for p in module.parameters()), torch.device("cpu"))
        self._device = first
        count = self.plan.num_streams - 1 if first.type == "cuda" else 0
        self._sides = [torch.cuda.Stream(first) for _ in range(count)]
        self._awaited = [step.node for step in self.plan.steps if step.is_awaited]
        self._events = {node: torch.cuda.Event() for node in self._awaited} if count else {}

    def forward(self, *args: Any, **keywords: Any) -> Any:
        given = bound(self.module, args, keywords)
        if not self._is_traced(given):
            return self.module(*args, **keywords)
        current = torch.cuda.current_stream(self._device) if self._sides else None
        for side in self._sides:
            side.wait_stream(current)  # type: ignore[arg-type]
        env: dict[fx.Node, Any] = {}
        result = None
        for step in self.plan.steps:
            if step.node.op == "placeholder":
                env[step.node] = self._argument(step.node, given)
                self._record(step, current)
            elif step.node.op == "output":
                self._join(current)
                result = fx.node.map_arg(step.node.args[0], lambda node: env[node])
                self._hand_over(result, current)
            else:
                env[step.node] = self._run(step, env, current)
        return result

    def _is_traced(self, given: dict[str, Any]) -> bool:
        return all(
            type(given[name]) is type(value) and given[name] == value
            for name, value in self._fixed.items()
        ) and all(isinstance(given[name], Tensor) for name in given.keys() - self._fixed.keys())

    def _argument(self, node: fx.Node, given: dict[str, Any]) -> Any:
        """Names of arguments that were fixed have a number after them in the graph."""
        name = str(node.target)
        return given[name] if name in given else given[name.rpartition("_")[0]]

    def _run(self, step: StreamStep, env: dict[fx.Node, Any], current: Any) -> Any:
        node, running = step.node, self._running
        args = fx.node.map_arg(node.args, lambda each: env[each])
        keywords = fx.node.map_arg(node.kwargs, lambda each: env[each])
        call = getattr(running, node.op)
        if not self._sides:
            return call(node.target, args, keywords)
        stream = current if step.stream == 0 else self._sides[step.stream - 1]
        for each in step.waits_for:
            stream.wait_event(self._events[each])
        # Entering a stream takes the host longer than many an op.
        entered: AbstractContextManager[Any] = (
            torch.cuda.stream(stream) if step.stream else nullcontext()
        )
        with entered:
            value = call(node.target, args, keywords)
        self._record(step, stream)
        return value

    def _record(self, step: StreamStep, stream: Any) -> None:
        if self._sides and step.is_awaited:
            self._events[step.node].record(stream)

    def _join(self, current: Any) -> None:
        for side in self._sides:
            current.wait_stream(side)

    def _hand_over(self, result: Any, current: Any) -> None:
        """Memory of a side stream would otherwise be used again there as soon as the caller drops
        it, while the caller's stream still reads it.
        """
        if self._sides:
            for tensor in tensors(result):
                tensor.record_stream(current)
