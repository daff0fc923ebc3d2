"""Vision models with random weights, small, written the usual way: a ViT, a residual conv net, one
with parallel branches, and an encoder like Segment Anything's (windowed attention with decomposed
relative positions, a convolutional neck). Nothing comes from a library of models.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class ViTBlock(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, num_heads, batch_first=True)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + self.attention(h, h, h)[0]
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class SmallViT(nn.Module):
    def __init__(
        self, width: int = 64, depth: int = 2, size: int = 32, patch: int = 8, classes: int = 10
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2 + 1, width))
        self.blocks = nn.ModuleList(ViTBlock(width, width // 32) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, image: Tensor) -> Tensor:
        x = self.embed(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        h = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(x + self.norm2(self.conv2(h)))


class SmallConvNet(nn.Module):
    def __init__(self, width: int = 16, depth: int = 2, classes: int = 10) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, width, 7, 2, 3)
        self.blocks = nn.Sequential(*(Residual(width) for _ in range(depth)))
        self.head = nn.Linear(width, classes)

    def forward(self, image: Tensor) -> Tensor:
        x = self.blocks(functional.max_pool2d(functional.relu(self.stem(image)), 2))
        return self.head(x.mean((2, 3)))


class Branches(nn.Module):
    """Three ways through the same input, joined: 1×1, 3×3 and 5×5."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.three = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 3, padding=1)
        self.before, self.five = nn.Conv2d(width, 8, 1), nn.Conv2d(8, width, 5, padding=2)
        self.join = nn.Conv2d(3 * width, width, 1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        branches = [self.one(x), self.three(x), self.five(functional.relu(self.before(x)))]
        joined = x + self.join(torch.cat(branches, 1))
        return joined if mask is None else joined * mask


class WindowAttention(nn.Module):
    """Within squares of `side` × `side`; scores have a part for each relative row and column."""

    def __init__(self, width: int, num_heads: int, side: int) -> None:
        super().__init__()
        self.num_heads, self.side = num_heads, side
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        size = width // num_heads
        self.rows, self.columns = (
            nn.Parameter(0.1 * torch.randn(2 * side - 1, size)) for _ in range(2)
        )
        steps = torch.arange(side)
        self.register_buffer("apart", steps[:, None] - steps[None, :] + side - 1, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        windows, side = x.shape[0], self.side
        heads = (windows, side * side, 3, self.num_heads, -1)
        q, k, v = self.qkv(x.reshape(windows, side * side, -1)).view(heads).permute(2, 0, 3, 1, 4)
        bias = self._relative(q)
        weights = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5 + bias).softmax(-1)
        y = (weights @ v).transpose(1, 2).reshape(x.shape)
        return self.out(y)

    def _relative(self, q: Tensor) -> Tensor:
        side = self.side
        grid = q.reshape(*q.shape[:2], side, side, -1)
        by_row = torch.einsum("bnhwc,hkc->bnhwk", grid, self.rows[self.apart])
        by_column = torch.einsum("bnhwc,wkc->bnhwk", grid, self.columns[self.apart])
        both = by_row[..., :, None] + by_column[..., None, :]
        return both.reshape(*q.shape[:2], side * side, side * side)


class WindowBlock(nn.Module):
    def __init__(self, width: int, num_heads: int, side: int) -> None:
        super().__init__()
        self.side = side
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = WindowAttention(width, num_heads, side)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, size = x.shape
        side = self.side
        grid = (batch, height // side, side, width // side, side, size)
        windows = self.norm1(x).view(grid).transpose(2, 3).reshape(-1, side, side, size)
        grid = (batch, height // side, width // side, side, side, size)
        x = x + self.attention(windows).view(grid).transpose(2, 3).reshape(x.shape)
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class ChannelNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)
        spread = (x - mean).square().mean(1, keepdim=True)
        y = (x - mean) * torch.rsqrt(spread + 1e-6)
        return y * self.weight[:, None, None] + self.bias[:, None, None]


class WindowedEncoder(nn.Module):
    """The last block attends over the whole picture, as every third or so does in the large one."""

    def __init__(
        self, width: int = 64, depth: int = 2, size: int = 64, patch: int = 8, side: int = 4
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        cells = size // patch
        self.embed = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Parameter(0.02 * torch.randn(1, cells, cells, width))
        sides = [side] * (depth - 1) + [cells]
        self.blocks = nn.ModuleList(WindowBlock(width, width // 32, each) for each in sides)
        self.neck = nn.Sequential(
            nn.Conv2d(width, 32, 1, bias=False),
            ChannelNorm(32),
            nn.Conv2d(32, 32, 3, padding=1, bias=False),
            ChannelNorm(32),
        )

    def forward(self, image: Tensor) -> Tensor:
        x = self.embed(image).permute(0, 2, 3, 1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.neck(x.permute(0, 3, 1, 2))
