"""Convolutions that Winograd's products can replace: squares of 3 × 3 with stride 1. Of an output
square of 4 × 4 they multiply 36 times for each pair of channels, instead of 144; what they cost
beside it is two small products that carry inputs there and outputs back.

    layers = winograd_layers(module.named_modules())
    work_share(*layers["blocks.0.conv1"])       # 0.45 of the FLOPs, with 64 channels on both sides
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

SQUARE = 4  # of outputs, on a side
SOURCE = SQUARE + 2  # of the inputs that they need
LEAST_CHANNELS = 16  # with fewer, what is saved goes into carrying


def winograd_layers(parts: Iterable[tuple[str, nn.Module]]) -> dict[str, tuple[int, int]]:
    """Channels in and out, by path."""
    return {
        path: (part.in_channels, part.out_channels)
        for path, part in parts
        if isinstance(part, nn.Conv2d) and is_square(part)
    }


def is_square(part: nn.Conv2d) -> bool:
    """Of exactly this class, as others may do something else."""
    return (
        type(part) is nn.Conv2d
        and part.kernel_size == (3, 3)
        and part.stride == part.dilation == (1, 1)
        and part.groups == 1
        and part.padding_mode == "zeros"
        and min(part.in_channels, part.out_channels) >= LEAST_CHANNELS
    )


def work_share(num_in: int, num_out: int) -> float:
    """Of a convolution's FLOPs."""
    area, source = SQUARE**2, SOURCE**2
    products = source * num_in * num_out
    carrying = source * (source * num_in + area * num_out)
    return (products + carrying) / (9 * area * num_in * num_out)


def carried_bytes(num_bytes: float) -> float:
    """Of activations of `num_bytes`: written as squares that overlap, carried, and read again."""
    return 4.0 * num_bytes * SOURCE**2 / SQUARE**2
