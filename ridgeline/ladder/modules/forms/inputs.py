"""Inputs that lie in the host's memory, brought to the module's device before each call: as anybody
would (`x.to(device)`, which waits), or by pinned memory on a stream of their own.

With pinned memory the host goes on while the device copies, and the copy for a call runs beside the
computing of the one before. Two sets of pinned memory take turns; one is written again only when
the copy from it has ended.

    bring = PinnedInputs(torch.device("cuda:0"))
    args, keywords = bring((args, keywords))
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.profiling.modules.devices import converted, tensors

NUM_SETS = 2


def host_tensors(tree: Any, device: torch.device) -> list[Tensor]:
    """Those that a call on `device` has to bring there; a number in a tensor may stay."""
    if device.type == "cpu":
        return []
    return [each for each in tensors(tree) if each.device.type == "cpu" and each.dim() > 0]


def plainly(tree: Any, device: torch.device) -> Any:
    """The same nesting with tensors on `device`, when they are there."""
    return converted(tree, lambda each: each.to(device) if _is_elsewhere(each, device) else each)


def _is_elsewhere(tensor: Tensor, device: torch.device) -> bool:
    return tensor.device.type == "cpu" and device.type != "cpu" and tensor.dim() > 0


class PinnedInputs:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._sets: list[dict[int, Tensor]] = [{} for _ in range(NUM_SETS)]
        self._copied = [torch.cuda.Event() for _ in range(NUM_SETS)]
        self._turn = 0

    def __call__(self, tree: Any) -> Any:
        turn = self._turn
        self._turn = (turn + 1) % NUM_SETS
        self._copied[turn].synchronize()  # the copy of two calls ago
        count = 0

        def bring(tensor: Tensor) -> Tensor:
            nonlocal count
            if not _is_elsewhere(tensor, self.device):
                return tensor
            count += 1
            return self._brought(tensor, count, self._sets[turn])

        current = torch.cuda.current_stream(self.device)
        with torch.no_grad(), torch.cuda.stream(self._stream):
            result = converted(tree, bring)
            self._copied[turn].record(self._stream)
        current.wait_event(self._copied[turn])
        for tensor in tensors(result):
            if tensor.is_cuda:
                tensor.record_stream(current)  # its memory is the copying stream's
        return result

    def _brought(self, tensor: Tensor, number: int, pinned: dict[int, Tensor]) -> Tensor:
        """By memory of our own even where the caller's is pinned: it may be written again when the
        call returns, which is before the copy ends.
        """
        known = pinned.get(number)
        if known is None or (known.shape, known.dtype) != (tensor.shape, tensor.dtype):
            pinned[number] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return pinned[number].copy_(tensor).to(self.device, non_blocking=True)
