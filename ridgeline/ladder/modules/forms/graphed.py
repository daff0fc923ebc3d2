"""A call replayed from a captured graph, for inputs like those it was captured with; others run as
they would without it.

    fast = Graphed(call, (x,), {})
    fast(y)                 # y of x's shape and dtype: copied in, replayed, the result copied out
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ridgeline.capture import capture
from ridgeline.profiling.modules.devices import converted, leaves, mapped, tensors

WARM_UPS = 3  # whatever is compiled, tuned or allocated when first used must be there
log = logging.getLogger(__name__)


class Graphed:
    def __init__(
        self, call: Callable[..., Any], args: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> None:
        self.call = call
        self._inputs = mapped((args, dict(keywords)), lambda tensor: tensor.detach().clone())
        self._kept = dict(leaves(self._inputs))
        self._told = False
        on_gpu = [tensor for tensor in tensors(self._inputs) if tensor.is_cuda]
        self._device = on_gpu[0].device if on_gpu else torch.device("cuda:0")
        with torch.cuda.device(self._device):
            self._capture()

    def _capture(self) -> None:
        own_args, own_keywords = self._inputs
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self.call(*own_args, **own_keywords)
        torch.cuda.current_stream().wait_stream(side)
        self._graph, self._output = capture(lambda: self.call(*own_args, **own_keywords))
        reached: list[Tensor] = []
        converted(self._output, lambda tensor: reached.append(tensor) or tensor)  # type: ignore[func-returns-value]
        # Objects of other kinds, such as a cache, are copied as a whole, which takes longer.
        self._copied = converted if len(reached) == len(tensors(self._output)) else mapped

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        given = dict(leaves((args, keywords)))
        if not self._fits(given):
            if not self._told:
                log.warning("inputs unlike those of the graph: this call runs without it")
                self._told = True
            return self.call(*args, **keywords)
        with torch.no_grad(), torch.cuda.device(self._device):
            for path, kept in self._kept.items():
                if isinstance(kept, Tensor):
                    kept.copy_(given[path])
            self._graph.replay()
            return self._copied(self._output, Tensor.clone)

    def _fits(self, given: Mapping[str, Any]) -> bool:
        if given.keys() != self._kept.keys():
            return False
        return all(_alike(kept, given[path]) for path, kept in self._kept.items())


def _alike(kept: Any, given: Any) -> bool:
    if isinstance(kept, Tensor):
        if not isinstance(given, Tensor):
            return False
        return (given.shape, given.dtype, given.device) == (kept.shape, kept.dtype, kept.device)
    return type(kept) is type(given) and bool(kept == given)
