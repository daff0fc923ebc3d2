"""Convolutions of 3 × 3 with stride 1 by Winograd's products, in plain torch: F(4 × 4, 3 × 3) of
Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks" (2015). A quarter of the
multiplications, as 36 matrix products; outputs are the same but for rounding (about 2e-6 in fp32).

Only layers of exactly nn.Conv2d without hooks. Letters: N batch, C channels in, O out, H and W of
the picture, h and w squares of 4 × 4 down and across.

    replaceable_convolutions(module)      # {"blocks.0.conv1": nn.Conv2d(64, 64, …), …}
    to_winograd(copy)                     # in place
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ridgeline.profiling.modules.convolutions import SOURCE, SQUARE, is_square

# Of one dimension: of inputs, of the weight, and back.
INPUTS = ((4, 0, -5, 0, 1, 0), (0, -4, -4, 1, 1, 0), (0, 4, -4, -1, 1, 0),
          (0, -2, -1, 2, 1, 0), (0, 2, -1, -2, 1, 0), (0, 4, 0, -5, 0, 1))  # fmt: skip
WEIGHTS = ((1 / 4, 0, 0), (-1 / 6, -1 / 6, -1 / 6), (-1 / 6, 1 / 6, -1 / 6),
           (1 / 24, 1 / 12, 1 / 6), (1 / 24, -1 / 12, 1 / 6), (0, 0, 1))  # fmt: skip
OUTPUTS = ((1, 1, 1, 1, 1, 0), (0, 1, -1, 2, -2, 0), (0, 1, 1, 4, 4, 0), (0, 1, -1, 8, -8, 1))


class WinogradConv(nn.Module):
    """What stands where an nn.Conv2d was."""

    carried: Tensor  # the weight, [36, C, O]
    into: Tensor  # inputs of a square, [36, 36]
    back: Tensor  # outputs of a square, [16, 36]

    def __init__(self, part: nn.Conv2d) -> None:
        super().__init__()
        weight = part.weight.detach()
        self.margins = _margins(part)
        self.num_out = part.out_channels
        self.bias = part.bias
        self.register_buffer("carried", _carried(weight), persistent=False)
        self.register_buffer("into", _both(INPUTS, weight), persistent=False)
        self.register_buffer("back", _both(OUTPUTS, weight), persistent=False)
        self.train(part.training)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        left, right, top, bottom = self.margins
        height = x_NCHW.shape[-2] + top + bottom - 2
        width = x_NCHW.shape[-1] + left + right - 2
        x_NHWC = functional.pad(
            x_NCHW.movedim(-3, -1),
            (0, 0, left, right + -width % SQUARE, top, bottom + -height % SQUARE),
        )
        squares = x_NHWC.unfold(-3, SOURCE, SQUARE).unfold(-3, SOURCE, SQUARE)  # [N, h, w, C, 6, 6]
        lead, channels = squares.shape[:-3], squares.shape[-3]
        rows = squares.movedim((-2, -1), (0, 1)).reshape(SOURCE**2, -1)
        products = torch.bmm((self.into @ rows).view(SOURCE**2, -1, channels), self.carried)
        y = (self.back @ products.view(SOURCE**2, -1)).view(SQUARE, SQUARE, *lead, self.num_out)
        y = y.movedim((0, 1), (-4, -2)).flatten(-5, -4).flatten(-3, -2)  # [*N, 4h, 4w, O]
        y = y[..., :height, :width, :]
        return (y if self.bias is None else y + self.bias).movedim(-1, -3)


def _margins(part: nn.Conv2d) -> tuple[int, int, int, int]:
    """Zeros to the left, right, above and below."""
    if isinstance(part.padding, str):
        side = 1 if part.padding == "same" else 0
        return side, side, side, side
    down, across = part.padding
    return across, across, down, down


def _carried(weight_OCHW: Tensor) -> Tensor:
    """[36, C, O]; in fp64, rounded once."""
    carry = torch.tensor(WEIGHTS, dtype=torch.float64, device=weight_OCHW.device)
    made = torch.einsum("ij,ocjk,lk->ilco", carry, weight_OCHW.double(), carry)
    return made.flatten(0, 1).to(weight_OCHW.dtype).contiguous()


def _both(one: tuple[tuple[float, ...], ...], weight: Tensor) -> Tensor:
    """Of both dimensions at once, rows first."""
    matrix = torch.tensor(one, dtype=torch.float64)
    return torch.kron(matrix, matrix).to(weight.device, weight.dtype)


def replaceable_convolutions(module: nn.Module) -> dict[str, nn.Conv2d]:
    return {
        path: part
        for path, part in module.named_modules()
        if isinstance(part, nn.Conv2d)
        and is_square(part)
        and not (part._forward_hooks or part._forward_pre_hooks)
    }


def to_winograd(module: nn.Module) -> nn.Module:
    """The copy that is given, **in place**; another where it is itself such a layer."""
    for path, part in replaceable_convolutions(module).items():
        if not path:
            return WinogradConv(part)
        parent_path, _, own_name = path.rpartition(".")
        setattr(module.get_submodule(parent_path), own_name, WinogradConv(part))
    return module
