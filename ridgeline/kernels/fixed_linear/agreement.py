"""Whether tiles of the fixed product give the same bits on this very chip, tried once.

tiles.py takes it from the instruction: on sm_90 an output is a chain of m64nNk16, whatever N. Here
products of one tile for each N are compared, on numbers whose sums need every bit, with the device
and the compiler that will be used; the answer is kept in the cache. Where tiles differ, one serves
any number of rows: slower, and still deterministic.

    one_tile = not tiles_agree(torch.device("cuda"), torch.bfloat16)
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ridgeline.formats.dtypes import dtype_name
from ridgeline.formats.files import atomic_write
from ridgeline.hardware.paths import cache_dir
from ridgeline.kernels.autotune import file_name
from ridgeline.kernels.fixed_linear.tile import Tile
from ridgeline.kernels.fixed_linear.tiles import HOPPER, HOPPER_FEW

ROWS, OUTPUTS, DEPTH = 200, 320, 2048
ProductFunction = Callable[[Tensor, Tensor, Tile], Tensor]
log = logging.getLogger(__name__)


def tiles_agree(device: torch.device, dtype: torch.dtype) -> bool:
    """From the cache, or by trying; where there is only one tile there is nothing to try."""
    from ridgeline.kernels.launch import target_of

    if target_of(torch.empty(0, device=device)).name != "sm_90" or dtype == torch.float32:
        return True
    name = torch.cuda.get_device_properties(device).name
    path = cache_dir() / "kernels" / f"{file_name(name)}-fixed-{dtype_name(dtype)}.json"
    known = _read(path)
    if known is None:
        differing = [str(tile) for tile in differing_tiles(device, dtype, _launched)]
        known = {"tiles": [_digest()], "differing": differing}
        with atomic_write(path) as file:
            file.write(json.dumps(known))
    if known["differing"]:
        log.warning(
            "deterministic: tile sizes give different bits on %s (%d of them, see %s); using one "
            "tile for any number of rows, which is slower", name, len(known["differing"]), path,
        )  # fmt: skip
    return not known["differing"]


def differing_tiles(
    device: torch.device, dtype: torch.dtype, product: ProductFunction
) -> list[Tile]:
    """Tiles whose results are not, bit for bit, those of the first."""
    generator = torch.Generator(device=device).manual_seed(0)
    x_MD, weight_OD = (_numbers(rows, dtype, device, generator) for rows in (ROWS, OUTPUTS))
    first, *others = tried()
    expected = product(x_MD, weight_OD, first)
    return [tile for tile in others if not torch.equal(product(x_MD, weight_OD, tile), expected)]


def tried() -> list[Tile]:
    """One of each N and number of rows: what they have in common is the same instruction."""
    kinds = {(tile.block_m, tile.block_o): tile for tile in reversed((*HOPPER_FEW, *HOPPER))}
    wanted = ((64, 16), (64, 32), (64, 128), (128, 32), (128, 64), (128, 128), (256, 128))
    return [kinds[kind] for kind in wanted]


def _numbers(
    num_rows: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Tensor:
    """Of very different size, so that each sum rounds and another order would show."""
    shape = (num_rows, DEPTH)
    size = torch.randint(-5, 6, shape, device=device, generator=generator)
    return torch.randn(shape, device=device, generator=generator).ldexp(size).to(dtype)


def _launched(x_MD: Tensor, weight_OD: Tensor, tile: Tile) -> Tensor:
    from ridgeline.kernels.fixed_linear import triton

    return triton.fixed_linear(x_MD, weight_OD, tile=tile)


def _digest() -> str:
    return hashlib.sha256(str((tried(), ROWS, OUTPUTS, DEPTH)).encode()).hexdigest()[:16]


def _read(path: Path) -> dict[str, list[str]] | None:
    """What was found before, for today's tiles; None: to be tried."""
    try:
        known = json.loads(path.read_text())
        return known if known["tiles"] == [_digest()] and "differing" in known else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
