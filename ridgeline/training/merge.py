"""Adapters merged into the weights they stand beside: `W + scale · B A`, as a folder that every
engine loads. Refused where the merged model's logits differ from those of base and adapter by more
than the rounding of its weights explains.

    merged = merge_run(Path("run"), Path("merged"))
    merged.difference, merged.rounding
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ridgeline.data.judged_text import judged_text
from ridgeline.errors import QualityError, UsageError
from ridgeline.formats.dtypes import dtype_name
from ridgeline.hardware import detect
from ridgeline.models import Transformer
from ridgeline.models.checkpoint import open_checkpoint
from ridgeline.models.transformer import Linear
from ridgeline.progress import Progress
from ridgeline.quantization import load_model, save_model
from ridgeline.quantization.files.plain import dtype_of, most_common_type
from ridgeline.training.config import TrainConfig
from ridgeline.training.config_file import FILE_NAME, load_config
from ridgeline.training.documents import PackedDocuments
from ridgeline.training.methods.adapters import adapters_of, add_adapters
from ridgeline.training.saving.adapter_files import CONFIG_NAME, read_adapter
from ridgeline.training.saving.checkpoint import FOLDER, saved_checkpoints
from ridgeline.training.starting_model import model_source

PROBE_TOKENS = 256
FP32_ERROR = 1e-5  # of sums in another order, as a share of the logits


@dataclass(frozen=True)
class MergedRun:
    checkpoint: Path  # whose adapter it was
    out: Path
    dtype: str  # that the weights are saved in
    effect: float  # root mean square of what the adapter changes in logits
    difference: float  # the same between the merged model, and base and adapter
    rounding: float  # what changes of one in the last digit of the merged weights make


def adapter_folder(path: Path) -> tuple[TrainConfig, Path]:
    """The config of a run with adapters, and the last checkpoint: of the run, or that is named."""
    is_checkpoint = (path / CONFIG_NAME).is_file() and path.resolve().parent.name == FOLDER
    run = path.resolve().parents[1] if is_checkpoint else path
    if not (run / FILE_NAME).is_file():
        raise UsageError(f"--merge {path} is no training run, nor one of its checkpoints")
    config = load_config(run)
    if config.lora.rank is None:
        raise UsageError(
            f"--merge {path}: the run has no adapters; its checkpoints are whole models"
        )
    checkpoints = [path] if is_checkpoint else saved_checkpoints(run)
    if not checkpoints:
        raise UsageError(f"--merge {path} has no checkpoint yet")
    return config, checkpoints[-1]


@torch.no_grad()
def merge_run(
    path: Path, out: Path, *, device: str = "auto", progress: Progress | None = None
) -> MergedRun:
    """Write `out`, new or empty."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"--out {out} already exists and is not empty; give a new folder")
    config, checkpoint = adapter_folder(path)
    source = model_source(config, progress)
    assert source.path is not None, "adapters have a base"
    assert source.tokenizer is not None, "model_source"
    device = detect(device).device
    model = load_model(
        source.path, dtype="fp32", device=device, keep_codes=False, progress=progress
    )
    dtype = saved_dtype(source.path)
    assert source.tokenizer is not None, "model_source"
    ids = source.tokenizer.encode(judged_text())[:PROBE_TOKENS]
    tokens_T = torch.tensor(ids, device=device)
    base_TV = _logits(model, tokens_T)
    add_adapters(model, source.description, config.lora, config.seed)
    read_adapter(model, checkpoint)
    wanted_TV = _logits(model, tokens_T)
    merge(model)
    rounding = _distance(_logits(nudged(model, dtype), tokens_T), _logits(model, tokens_T))
    change_weights(model, lambda weight: weight.to(dtype).float())
    difference = _distance(_logits(model, tokens_T), wanted_TV)
    effect = _distance(base_TV, wanted_TV)
    limit = rounding + FP32_ERROR * wanted_TV.square().mean().sqrt().item()
    if not difference <= limit:
        raise QualityError(
            f"the merged model's logits differ from those of base and adapter by {difference:.3g}, "
            f"and rounding to {dtype_name(dtype)} explains {limit:.3g} (the adapter changes them "
            f"by {effect:.3g}); nothing was written"
        )
    save_model(
        model.to(dtype), out, source=source.description, extra_files=source.tokenizer.files()
    )
    return MergedRun(checkpoint, out, dtype_name(dtype), effect, difference, rounding)


def saved_dtype(base: Path) -> torch.dtype:
    """As the base has its weights, where that is no quantized form; else bf16."""
    stored = dtype_of(most_common_type(open_checkpoint(base).tensors.values()))
    return stored if stored in (torch.float32, torch.float16) else torch.bfloat16


@torch.no_grad()
def merge(model: Transformer) -> None:
    """Put plain projections in place of the adapted ones, **in place**."""
    for name, layer in adapters_of(model).items():
        base = layer.base
        assert isinstance(base, Linear), "codes are decoded before"
        for piece, down_RD, up_OR in layer.pairs():
            base.weight[piece.rows] += layer.scale * (up_OR @ down_RD)
        parent_name, _, own_name = name.rpartition(".")
        setattr(model.get_submodule(parent_name), own_name, base)


def nudged(model: Transformer, dtype: torch.dtype) -> Transformer:
    """A copy whose weights are moved by chance by up to one in the last digit of a dtype: as
    rounding moves them, and a little more.
    """
    copy = deepcopy(model)
    generator = torch.Generator(device=model.embed.weight.device).manual_seed(0)
    size = torch.finfo(dtype).eps

    def nudge(weight: Tensor) -> Tensor:
        shares = torch.empty_like(weight).uniform_(-size, size, generator=generator)
        return weight * (1 + shares)

    change_weights(copy, nudge)
    return copy


def change_weights(model: Transformer, change: Callable[[Tensor], Tensor]) -> None:
    for parameter in model.parameters():
        parameter.copy_(change(parameter))


def _logits(model: Transformer, tokens_T: Tensor) -> Tensor:
    positions_T = torch.arange(len(tokens_T), device=tokens_T.device)
    starts = torch.tensor([0, len(tokens_T)])
    return model.logits(model(tokens_T, PackedDocuments(positions_T, starts)))


def _distance(one: Tensor, other: Tensor) -> float:
    return (one - other).square().mean().sqrt().item()
