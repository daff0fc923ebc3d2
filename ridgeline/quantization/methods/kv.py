"""Fixed scales for 8-bit keys and values, from calibration data: one per key-value head, or the
largest of a layer's heads.

Our own pages compute a scale for every token and head as they write and do not need this; files for
engines with fixed scales do (`k_scale`, `v_scale`). Keys are measured as they are stored: normed
and rotated.

Letters: L layers, K key-value heads, T tokens, H head dim.

    scales = calibrate_kv(model, batches, torch.float8_e4m3fn)
    scales.keys, scales.per_layer()
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.errors import UsageError
from ridgeline.formats.dtypes import dtype_name
from ridgeline.formats.scaling import LARGEST, SMALLEST_AMAX
from ridgeline.models import Transformer
from ridgeline.progress import Progress
from ridgeline.quantization.blocks import BlockWalk
from ridgeline.quantization.scheme import FP8, nearest, parse_scheme
from ridgeline.quantization.statistics import SAMPLE_ROWS, SILENT_DB

ROUNDING = {torch.int8: parse_scheme("int8"), FP8: parse_scheme("fp8")}


@dataclass(frozen=True)
class KvScales:
    dtype: torch.dtype
    keys: Tensor  # [L, K], fp32: a key is its code times this
    values: Tensor  # [L, K]
    keys_db: tuple[float, ...]  # rounding error of each layer against its power, on a sample
    values_db: tuple[float, ...]

    def per_layer(self) -> tuple[Tensor, Tensor]:
        """[L] for keys and for values: room for the largest head."""
        return self.keys.amax(1), self.values.amax(1)


class _Watched:
    """Keys, or values, of one layer."""

    def __init__(self) -> None:
        self.amax_K = torch.zeros(1)
        self.samples: list[Tensor] = []

    def add(self, x_TKH: Tensor) -> None:
        amax_K = x_TKH.float().abs().amax((0, 2))
        self.amax_K = torch.maximum(self.amax_K.to(amax_K.device), amax_K)
        room = SAMPLE_ROWS - sum(len(rows) for rows in self.samples)
        if room > 0:
            self.samples.append(x_TKH[: min(room, 64)].float())

    def scale(self, dtype: torch.dtype) -> Tensor:
        return self.amax_K.clamp(min=SMALLEST_AMAX) / LARGEST[dtype]

    def error_db(self, dtype: torch.dtype) -> float:
        x_TKH = torch.cat(self.samples)
        scale_K1 = self.scale(dtype).unsqueeze(1)
        rounded_TKH = nearest(x_TKH / scale_K1, None, ROUNDING[dtype]) * scale_K1
        ratio = float((rounded_TKH - x_TKH).square().sum()) / max(
            float(x_TKH.square().sum()), 1e-30
        )
        return max(10 * math.log10(ratio), SILENT_DB) if ratio > 0 else SILENT_DB


def calibrate_kv(
    model: Transformer,
    batches: Iterable[Tensor],
    dtype: torch.dtype,
    *,
    device: str | torch.device | None = None,
    keep_on_host: bool = False,
    progress: Progress | None = None,
) -> KvScales:
    """Block by block, like `quantize_model`; give it the model whose cache the scales are for."""
    if dtype not in ROUNDING:
        allowed = ", ".join(dtype_name(known) for known in ROUNDING)
        raise UsageError(f"keys and values cannot be stored in {dtype_name(dtype)}; use {allowed}")
    walk = BlockWalk(model, batches, device, keep_on_host)
    watched = [_watch_layer(walk, index, progress) for index in range(model.config.num_layers)]
    keys, values = zip(*watched, strict=True)
    return KvScales(
        dtype,
        torch.stack([key.scale(dtype) for key in keys]).cpu(),
        torch.stack([value.scale(dtype) for value in values]).cpu(),
        tuple(key.error_db(dtype) for key in keys),
        tuple(value.error_db(dtype) for value in values),
    )


def _watch_layer(
    walk: BlockWalk, index: int, progress: Progress | None
) -> tuple[_Watched, _Watched]:
    keys, values = _Watched(), _Watched()

    def watch(k_TKH: Tensor, v_TKH: Tensor) -> None:
        keys.add(k_TKH)
        values.add(v_TKH)

    walk.advance(walk.copy_block(index), watch=watch)
    if progress is not None:
        progress("calibrating keys and values", index + 1, walk.model.config.num_layers)
    return keys, values
