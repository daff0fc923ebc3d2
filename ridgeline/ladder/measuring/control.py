"""The control: a fixed computation that is timed beside rounds, so that a busy machine can be told
from a slower recipe.

    control = Control("cpu")
    control.time(); control.time()
    control.rates                     # [171.2, 169.8]: passes a second

Vectors times small matrices, one after another, together larger than a cache: on a CPU as many
short parallel stretches over memory as a decode step has, so that other programs on its cores slow
both alike. It depends on torch and the machine alone, and on nothing of a recipe.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.timing import time_host

NUM_MATRICES = 16
SIZES = {"cpu": (1024, torch.float32, 4), "cuda": (2048, torch.float16, 64)}  # side, dtype, passes
SAMPLE_S = 0.15


class Control:
    def __init__(self, device: str) -> None:
        """Takes no memory before it is timed."""
        self.device = torch.device(device)
        self.rates: list[float] = []
        self._matrices: list[Tensor] | None = None

    def time(self, count: int = 1) -> None:
        """Adds so many samples to `rates`. Without memory for it, or a second process's context on
        a GPU, none.
        """
        try:
            self.rates += [self.sample() for _ in range(count)]
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            self.rates.clear()

    def sample(self) -> float:
        """Passes a second."""
        side, dtype, passes = SIZES[self.device.type]
        if self._matrices is None:
            self._matrices = [
                torch.randn(side, side, device=self.device).to(dtype) for _ in range(NUM_MATRICES)
            ]
        matrices, vector = self._matrices, torch.ones(side, dtype=dtype, device=self.device)

        def run() -> None:
            for _ in range(passes):
                for matrix in matrices:
                    torch.mv(matrix, vector)

        return passes / time_host(run, device=self.device, target_s=SAMPLE_S).median_s
