"""`load_model`: from a name on the command line to a model on a device.

model = load_model("demo", dtype="fp32", device="cpu")
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ridgeline.errors import OutOfMemoryError, UnsupportedError
from ridgeline.formats.dtypes import dtype_name, parse_dtype
from ridgeline.hardware import Hardware, detect
from ridgeline.hardware.detection import available_memory
from ridgeline.hardware.units import human_bytes
from ridgeline.models import ModelConfig, Transformer, build_model
from ridgeline.models.checkpoint import Checkpoint, open_checkpoint, resolve_model
from ridgeline.models.families import Description, describe
from ridgeline.models.transformer import Linear
from ridgeline.models.weights import load_weights, stored_parts
from ridgeline.progress import Progress
from ridgeline.quantization.block_linear import BlockLinear
from ridgeline.quantization.block_scheme import BlockScheme
from ridgeline.quantization.calibrating.work import codes_on
from ridgeline.quantization.devices import check_runs
from ridgeline.quantization.files.fuse import Whole, kept_schemes, model_weights, tied_head
from ridgeline.quantization.files.read import decoded
from ridgeline.quantization.filling import Filling
from ridgeline.quantization.linear import QuantizedLinear, replace_layer
from ridgeline.quantization.scheme import Codes, Scheme
from ridgeline.quantization.sizes import HEAD, weight_bytes

log = logging.getLogger(__name__)

COMPUTE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def load_model(
    model: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    keep_codes: bool = False,
    keep_blocks: bool = False,
    plain_head: bool = False,
    progress: Progress | None = None,
) -> Transformer:
    """A Hugging Face folder or hub name, a GGUF file, or `demo`, ready to run. A `Path` is taken
    literally: `Path("demo")` is a folder of that name. `dtype="auto"` is bf16 on a GPU; on a CPU
    fp32, which is faster there at batch 1 (KV and activations included), unless only bf16 fits into
    memory. A quantized checkpoint (a Q4_0 GGUF too) is expanded to plain weights, or with
    `keep_codes` kept quantized where this device supports it, without expanding on the way. With
    `keep_blocks` too, a GGUF file's matrices stay in its blocks, whatever their type
    (block_scheme.py); with `plain_head` its head does not.
    """
    hardware = detect(device)
    path = model if isinstance(model, Path) else resolve_model(model, progress=progress)
    checkpoint = open_checkpoint(path)
    description = describe(checkpoint)
    config = description.config
    kept = kept_schemes(checkpoint, description, keep_blocks) if keep_codes else {}
    if plain_head:
        kept.pop(HEAD, None)
    chosen = choose_dtype(dtype, config, hardware, kept=kept)
    kept, problem = runnable(kept, chosen, hardware.device)
    if problem:
        log.warning("%s: quantized weights are expanded: %s", checkpoint.path.name, problem)
    if kept:
        return load_codes(checkpoint, description, kept, chosen, hardware.device, progress)
    loaded = build_model(config, chosen, hardware.device)
    load_weights(loaded, decoded(checkpoint), description, progress)
    return loaded


def runnable(
    kept: Mapping[str, Scheme], dtype: torch.dtype, device: str
) -> tuple[dict[str, Scheme], str]:
    """The projections of a checkpoint that this device can multiply as codes, and why others are
    expanded.
    """
    problems: dict[Scheme, str] = {}
    for scheme in set(kept.values()):
        try:
            check_runs(scheme, dtype_name(dtype), device)
        except UnsupportedError as error:
            problems[scheme] = str(error)
    run = {name: scheme for name, scheme in kept.items() if scheme not in problems}
    return run, "; ".join(problems.values())


def load_codes(
    checkpoint: Checkpoint,
    description: Description,
    kept: Mapping[str, Scheme],
    dtype: torch.dtype,
    device: str,
    progress: Progress | None = None,
) -> Transformer:
    """A model with the checkpoint's own codes in the projections that `kept` names. They are never
    expanded: besides the model, one matrix at a time is held.
    """
    model = build_model(description.config, dtype, "meta")
    part_of = stored_parts(model, decoded(checkpoint), description)
    filling = Filling(model, description, device)
    blocks = any(isinstance(scheme, BlockScheme) for scheme in kept.values())
    for weights in model_weights(checkpoint, part_of, kept.keys(), progress, blocks):
        if isinstance(weights, Whole):
            codes = codes_on(weights.matrix.codes, device)
            plain = model.get_submodule(weights.layer)
            assert isinstance(plain, Linear), weights.layer
            bias_O = plain.bias
            layer = coded_layer(codes, weights.matrix.scheme, dtype, bias_O)
            replace_layer(model, weights.layer, layer)
            del codes
        else:
            whole = filling.put(weights.part, weights.tensor)
            if whole is not None:
                filling.set(weights.part.parameter, whole)
        del weights
    loaded = filling.finished()
    if HEAD in kept and description.config.tied_embeddings:
        codes, scheme = tied_head(checkpoint, description)
        replace_layer(loaded, HEAD, coded_layer(codes, scheme, dtype))
    return loaded


def coded_layer(
    codes: Codes, scheme: Scheme, dtype: torch.dtype, bias_O: Tensor | None = None
) -> QuantizedLinear:
    if isinstance(scheme, BlockScheme):
        return BlockLinear(codes, scheme, dtype, bias_O)
    return QuantizedLinear(codes, scheme, dtype, bias_O)


def choose_dtype(
    name: str, config: ModelConfig, hardware: Hardware, kept: Mapping[str, Scheme] | None = None
) -> torch.dtype:
    """The dtype to load in; an error before anything is allocated when the weights do not fit.
    `kept` has the schemes of layers whose codes are kept, by name.
    """
    chosen = pick_dtype(name, config, hardware, kept=kept)
    needed = _needed_bytes(config, chosen, hardware, None, kept)
    free = available_memory(hardware.device)
    if needed > free:
        stored = f"codes and {dtype_name(chosen)}" if kept else dtype_name(chosen)
        raise OutOfMemoryError(
            f"the weights need {human_bytes(needed)} in {stored}; {human_bytes(free)} are free "
            f"on {hardware.device}; try a smaller model"
        )
    return chosen


def pick_dtype(
    name: str,
    config: ModelConfig,
    hardware: Hardware,
    scheme: Scheme | None = None,
    kept: Mapping[str, Scheme] | None = None,
) -> torch.dtype:
    """The same without the check that weights fit: the engine's memory plan makes that check."""
    if name == "auto":
        needed = _needed_bytes(config, torch.float32, hardware, scheme, kept)
        fits_fp32 = needed <= 0.8 * available_memory(hardware.device)
        return torch.float32 if hardware.device == "cpu" and fits_fp32 else torch.bfloat16
    chosen = parse_dtype(name)
    if chosen not in COMPUTE_DTYPES:
        allowed = ", ".join(dtype_name(dtype) for dtype in COMPUTE_DTYPES)
        raise UnsupportedError(f"a model cannot be run in {name}; use one of {allowed}")
    return chosen


def _needed_bytes(
    config: ModelConfig,
    dtype: torch.dtype,
    hardware: Hardware,
    scheme: Scheme | None,
    kept: Mapping[str, Scheme] | None,
) -> int:
    codes = runnable(kept, dtype, hardware.device)[0] if kept else None
    return weight_bytes(config, dtype, scheme, codes)
