"""Which layers to quantize, by measurement: a matrix of each shape is timed with quantized and with
plain weights, at the user's batch sizes, on this machine. One that is slower quantized stays plain.

    choice = measure_shape(MatrixSize(4096, 4096), scheme, [1, 16], torch.bfloat16, "cuda:0")
    quantize_nearest(model, scheme, plain=slower_shapes([choice]))

On a CPU pass `ready=on_host` (engine/loading/host_model.py), so that its kernels are timed.
engine/loading/layer_speed.py does it for a whole model and keeps the times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
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
# Of weights used in turn, so that none is still in a cache: on a GPU, and on a CPU.
COLD_BYTES, COLD_BYTES_ON_CPU = 128 << 20, 48 << 20
MAX_COPIES = 64
MOST_WEIGHTS = 4 << 20  # of a matrix, that are timed on a CPU
OUTPUTS_OF_A_BLOCK = 128  # a multiple of those that may have a common scale
RANDOM_ROWS = 64  # of a matrix; the others repeat them, as random numbers take long to make


@dataclass(frozen=True)
class ProductTimes:
    """Seconds of one product: the median, on a CPU the least, since all else that runs there adds
    to it.
    """

    rows: int
    plain_s: float
    quantized_s: float

    @property
    def speedup(self) -> float:
        return self.plain_s / self.quantized_s

    @property
    def is_slower(self) -> bool:
        return self.quantized_s > (1.0 + MARGIN) * self.plain_s

    def or_better(self, other: ProductTimes) -> ProductTimes:
        plain_s = min(self.plain_s, other.plain_s)
        return ProductTimes(self.rows, plain_s, min(self.quantized_s, other.quantized_s))


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
    confirm: bool = False,
) -> LayerChoice:
    """A choice for the matrices of one shape. `ready` is what the engine does to a layer before it
    runs it. `confirm`: what seems slower is timed once more, and the better times count.
    """
    result = list[ProductTimes]()
    if not scheme.fits(*shape):
        return LayerChoice(*shape, scheme.name, ())
    part = _part_of(shape) if torch.device(device).type == "cpu" else shape
    for times in _times(part, scheme, batch_sizes, dtype, device, ready, timer, confirm):
        share = shape.num_outputs / part.num_outputs
        whole = ProductTimes(times.rows, times.plain_s * share, times.quantized_s * share)
        result.append(whole)
    return LayerChoice(*shape, scheme.name, tuple(result))


def _part_of(shape: MatrixSize) -> MatrixSize:
    """Of a large matrix some outputs are timed: a CPU takes them one after the other."""
    most = max(MOST_WEIGHTS // shape.depth // OUTPUTS_OF_A_BLOCK, 1) * OUTPUTS_OF_A_BLOCK
    return MatrixSize(min(shape.num_outputs, most), shape.depth)


def _times(
    shape: MatrixSize,
    scheme: Scheme,
    batch_sizes: Sequence[int],
    dtype: torch.dtype,
    device: str,
    ready: Callable[[Any], nn.Module],
    timer: Timer,
    confirm: bool,
) -> Iterable[ProductTimes]:
    plain = _random_linear(shape, dtype, device)
    quantized = nearest("a random layer", plain.weight, None, scheme, dtype)
    on_cpu = torch.device(device).type == "cpu"
    cold = COLD_BYTES_ON_CPU if on_cpu else COLD_BYTES
    count = min(MAX_COPIES, ceil(cold / (shape.num_outputs * shape.depth * dtype.itemsize)))
    sides = [[(ready(deepcopy(layer)),) for _ in range(count)] for layer in (plain, quantized)]

    def timed(x_TD: torch.Tensor) -> ProductTimes:
        timings = [timer(partial(_call, x_TD), device, inputs=layers) for layers in sides]
        plain_s, quantized_s = (each.min_s if on_cpu else each.median_s for each in timings)
        return ProductTimes(len(x_TD), plain_s, quantized_s)

    with torch.inference_mode():
        for rows in sorted(set(batch_sizes)):
            x_TD = torch.randn(rows, shape.depth, device=device).to(dtype)
            times = timed(x_TD)
            yield times.or_better(timed(x_TD)) if confirm and times.is_slower else times


def _call(x_TD: torch.Tensor, layer: nn.Module) -> object:
    return layer(x_TD)


def _random_linear(shape: MatrixSize, dtype: torch.dtype, device: str) -> Linear:
    layer = Linear(shape.depth, shape.num_outputs, bias=False, dtype=dtype, device=device)
    layer.requires_grad_(False)
    first = layer.weight[:RANDOM_ROWS]
    nn.init.normal_(first, std=shape.depth**-0.5)
    for start in range(len(first), shape.num_outputs, len(first)):
        rows = layer.weight[start : start + len(first)]
        rows.copy_(first[: len(rows)])
    return layer


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
