"""The control: a fixed computation that is timed beside rounds, so that a busy machine can be told
from a slower recipe.

    control = Control("cpu")
    control.time(); control.time()
    control.rates                     # [171.2, 169.8]: passes a second

Vectors times small matrices, one after another, together larger than a cache: on a CPU as many
short parallel stretches over memory as a decode step has, so that other programs on its cores slow
both alike. It depends on torch and the machine alone, and on nothing of a recipe.

A sample is the mean over half a second, not a median of short ones: a process that has slept is
let in first for a moment, and a median leaves out the passes in which another program had the core.
Medians over 0.15 s said 0.94 of the speed where a workload ran at 0.48 (two cores, 2026-11-18).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ridgeline.timing import time_host, time_loop

NUM_MATRICES = 16
SIZES = {"cpu": (1024, torch.float32), "cuda": (2048, torch.float16)}  # side and dtype
SAMPLE_S = 0.5


class Control:
    def __init__(self, device: str) -> None:
        """Takes no memory before it is timed."""
        self.device = torch.device(device)
        self.rates: list[float] = []
        self._matrices: list[Tensor] = []
        self._num_passes = 0  # in a sample

    def time(self, count: int = 1) -> None:
        """Adds so many samples to `rates`. Without memory for it, or a second process's context on
        a GPU, none.
        """
        try:
            self.rates += [self.sample() for _ in range(count)]
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            self.rates, self._matrices, self._num_passes = [], [], 0

    def sample(self) -> float:
        """Passes a second."""
        if not self._num_passes:
            self._prepare()
        timing = time_loop(self._run, 1, device=self.device)
        return self._num_passes / timing.median_s

    def _prepare(self) -> None:
        side, dtype = SIZES[self.device.type]
        drawn = (torch.randn(side, side, device=self.device) for _ in range(NUM_MATRICES))
        self._matrices = [matrix.to(dtype) for matrix in drawn]
        self._num_passes = 1
        timing = time_host(self._run, device=self.device, target_s=SAMPLE_S / 4)
        self._num_passes = math.ceil(SAMPLE_S / timing.median_s)

    def _run(self) -> None:
        vector = self._matrices[0][0]
        for _ in range(self._num_passes):
            for matrix in self._matrices:
                torch.mv(matrix, vector)
