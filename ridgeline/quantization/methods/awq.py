"""AWQ (Lin et al., arXiv 2306.00978): columns with large inputs matter most, so they are scaled up
before rounding, by a power of their inputs' mean magnitude that is searched for each channel site
of each block. The scales are folded into what writes the channels (folding.py). Then ranges are
clipped and weights rounded; `then=Gptq()` rounds with GPTQ instead.

    quantize_model(model, batches, parse_scheme("int4-g128"), Awq())
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ridgeline.errors import UsageError
from ridgeline.quantization.methods.base import Calibrated, Method
from ridgeline.quantization.methods.folding import ChannelSite, fold_best
from ridgeline.quantization.methods.rtn import Rtn
from ridgeline.quantization.scheme import Codes, Scheme
from ridgeline.quantization.statistics import Statistics

SMALLEST_MEAN = 1e-4  # of a channel, against the mean of all


@dataclass(frozen=True)
class Awq(Method):
    name: ClassVar[str] = "awq"
    points: int = 20  # exponents tried between 0 and 1
    then: Method = field(default_factory=lambda: Rtn(clip=True))  # how the weights are rounded

    def __post_init__(self) -> None:
        if self.points < 1:
            raise UsageError(f"points is {self.points}; try at least 1 exponent")

    def fold(self, calibrated: Calibrated) -> None:
        fold_best(calibrated, self._candidates)

    def _candidates(self, calibrated: Calibrated, site: ChannelSite) -> Iterator[Tensor]:
        """A channel's scale is a power of its inputs' mean, normalized so that the middle scale is
        one.
        """
        sums_D = sum(calibrated.statistics[name].sum_D for name in site.readers)
        assert isinstance(sums_D, Tensor)
        mean_C = site.shared(sums_D)
        mean_C = mean_C.clamp(min=float(mean_C.mean()) * SMALLEST_MEAN + 1e-30)
        for exponent in torch.linspace(0, 1, self.points + 1).tolist()[1:]:
            scale_C = mean_C**exponent
            yield scale_C / (scale_C.max() * scale_C.min()).sqrt()

    def apply(
        self, weight_OD: Tensor, statistics: Statistics, scheme: Scheme | None
    ) -> Codes | Tensor:
        return self.then.apply(weight_OD, statistics, scheme)
