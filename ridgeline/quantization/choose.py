"""Which layers to quantize, by measurement: a matrix of each shape is timed with quantized and with
plain weights, at the user's batch sizes, on this machine. One that is slower quantized stays plain.

    choice = measure_shape(MatrixSize(4096, 4096), scheme, [1, 16], torch.bfloat16, "cuda:0")
    quantize_nearest(model, scheme, plain=slower_shapes([choice]))

On a CPU pass `ready=on_host` (engine/loading/host_model.py), so that its kernels are timed.
engine/loading/layer_speed.py does it for a whole model and keeps the times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import nn

from ridgeline.models.transformer import Linear
from ridgeline.quantization.nearest import nearest
from ridgeline.quantization.scheme import Scheme
from ridgeline.quantization.sizes import MatrixSize
from ridgeline.timing import Timing, measure

Timer = Callable[..., Timing]

MARGIN = 0.03  # of the plain time; a smaller difference is noise
COLD_BYTES = 128 << 20  # of weights used in turn, so that none is still in a cache
MAX_COPIES = 16


@dataclass(frozen=True)
class ProductTimes:
    """Median seconds of one product."""

    rows: int
    plain_s: float
    quantized_s: float

    @property
    def speedup(self) -> float:
        return self.plain_s / self.quantized_s

    @property
    def is_slower(self) -> bool:
        return self.quantized_s > (1.0 + MARGIN) * self.plain_s


@dataclass(frozen=True)
class LayerChoice:
    """What was measured for the matrices of one shape; no times where the scheme does not fit."""

    num_outputs: int
    depth: int
    scheme: str
    times: tuple[ProductTimes, ...]  # by rows
    copied_from: int | None = None  # from this many rows on, a copy in the model's dtype is used

    @property
    def quantize(self) -> bool:
        by_codes = [t for t in self.times if self.copied_from is None or t.rows < self.copied_from]
        return bool(self.times) and not any(times.is_slower for times in by_codes)

    def with_copy(self) -> LayerChoice:
        """With a copy at hand, only what is slower for the fewest rows stays plain."""
        slower = next((i for i, times in enumerate(self.times) if times.is_slower), 0)
        return replace(self, copied_from=self.times[slower - 1].rows + 1) if slower else self

    @property
    def reason(self) -> str:
        """`0.83x at 64 rows`, or why nothing was measured."""
        if not self.times:
            return f"{self.scheme} does not fit"
        worst = min(self.times, key=lambda times: times.speedup)
        return f"{worst.speedup:.2f}x at {worst.rows} row{'s' if worst.rows > 1 else ''}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"quantize": self.quantize, "reason": self.reason}


def measure_shape(
    shape: MatrixSize,
    scheme: Scheme,
    batch_sizes: Sequence[int],
    dtype: torch.dtype,
    device: str,
    *,
    ready: Callable[[Any], nn.Module] = lambda layer: layer,
    timer: Timer = measure,
) -> LayerChoice:
    """A choice for the matrices of one shape. `ready` is what the engine does to a layer before it
    runs it.
    """
    times = _times(shape, scheme, batch_sizes, dtype, device, ready, timer)
    return LayerChoice(shape.num_outputs, shape.depth, scheme.name, tuple(times))


def _times(
    shape: MatrixSize,
    scheme: Scheme,
    batch_sizes: Sequence[int],
    dtype: torch.dtype,
    device: str,
    ready: Callable[[Any], nn.Module],
    timer: Timer,
) -> Iterable[ProductTimes]:
    if not scheme.fits(shape.num_outputs, shape.depth):
        return
    plain = [_random_linear(shape, dtype, device) for _ in range(_num_copies(shape, dtype))]
    quantized = [nearest("a random layer", layer.weight, None, scheme, dtype) for layer in plain]
    with torch.inference_mode():
        for rows in sorted(set(batch_sizes)):
            x_TD = torch.randn(rows, shape.depth, device=device).to(dtype)
            plain_s, quantized_s = (
                timer(
                    partial(_call, x_TD), device, inputs=[(ready(layer),) for layer in layers]
                ).median_s
                for layers in (plain, quantized)
            )
            yield ProductTimes(rows, plain_s, quantized_s)


def _call(x_TD: torch.Tensor, layer: nn.Module) -> object:
    return layer(x_TD)


def _num_copies(shape: MatrixSize, dtype: torch.dtype) -> int:
    num_bytes = shape.num_outputs * shape.depth * dtype.itemsize
    return min(MAX_COPIES, ceil(COLD_BYTES / num_bytes))


def _random_linear(shape: MatrixSize, dtype: torch.dtype, device: str) -> Linear:
    layer = Linear(shape.depth, shape.num_outputs, bias=False, dtype=dtype, device=device)
    nn.init.normal_(layer.weight, std=shape.depth**-0.5)
    return layer.requires_grad_(False)


def slower_shapes(choices: Iterable[LayerChoice]) -> list[MatrixSize]:
    """Shapes that stay plain although the scheme fits them."""
    slower = (choice for choice in choices if choice.times and not choice.quantize)
    return [MatrixSize(choice.num_outputs, choice.depth) for choice in slower]


def in_words(choices: Iterable[LayerChoice], dtype: str) -> str | None:
    """`int8 is slower here, so these stay in bf16: 576 x 576 (0.83x at 16 rows)`, for each scheme;
    None where nothing is slower.
    """
    slower: dict[str, list[str]] = {}
    for one in choices:
        if one.times and not one.quantize:
            shape = f"{one.num_outputs} x {one.depth} ({one.reason})"
            slower.setdefault(one.scheme, []).append(shape)
    sentences = (
        f"{scheme} is slower here, so these stay in {dtype}: {', '.join(shapes)}"
        for scheme, shapes in slower.items()
    )
    return "; ".join(sentences) or None
