"""`load_model`: the one way from a name on the command line to a model on a device.

model = load_model("demo", dtype="fp32", device="cpu")
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from ridgeline.errors import OutOfMemoryError, UnsupportedError
from ridgeline.formats.dtypes import dtype_name, parse_dtype
from ridgeline.hardware import Hardware, detect
from ridgeline.hardware.detection import available_memory
from ridgeline.models import ModelConfig, Transformer, build_model
from ridgeline.models.checkpoint import Checkpoint, open_checkpoint, resolve_model
from ridgeline.models.families import Description, describe
from ridgeline.models.weights import load_weights
from ridgeline.progress import Progress
from ridgeline.quantization.devices import check_runs
from ridgeline.quantization.files.fuse import fused_matrices
from ridgeline.quantization.files.read import decoded, is_quantized
from ridgeline.quantization.linear import QuantizedLinear, place, quantizable
from ridgeline.quantization.scheme import Scheme
from ridgeline.quantization.sizes import weight_bytes
from ridgeline.quantization.work import codes_on

log = logging.getLogger(__name__)

COMPUTE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_GIB = 2**30


def load_model(
    model: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    keep_codes: bool = False,
    progress: Progress | None = None,
) -> Transformer:
    """A Hugging Face folder or hub name, a GGUF file, or `demo`, ready to run. A `Path` is taken as
    it is: `Path("demo")` is a folder of that name.

    `dtype="auto"` is bf16 on a GPU; on a CPU fp32, which is the faster one there at batch 1 (KV and
    activations included), unless only bf16 fits into memory. A checkpoint that is quantized comes
    with plain weights, or with `keep_codes` as it is where this device can run that.
    """
    hardware = detect(device)
    path = model if isinstance(model, Path) else resolve_model(model, progress=progress)
    checkpoint = open_checkpoint(path)
    description = describe(checkpoint)
    chosen = choose_dtype(dtype, description.config, hardware)
    loaded = build_model(description.config, chosen, hardware.device)
    load_weights(loaded, decoded(checkpoint), description, progress)
    if keep_codes and is_quantized(checkpoint):
        place_codes(loaded, checkpoint, description)
    return loaded


def place_codes(model: Transformer, checkpoint: Checkpoint, description: Description) -> None:
    """The checkpoint's own codes instead of what they stand for, **in place**."""
    layers, weight = quantizable(model), model.embed.weight
    for parameter, matrix in fused_matrices(checkpoint, description):
        name = parameter.removesuffix(".weight")
        if name not in layers:
            continue
        try:
            check_runs(matrix.scheme, dtype_name(weight.dtype), str(weight.device))
        except UnsupportedError as error:
            log.warning("%s: codes are expanded: %s", checkpoint.path.name, error)
            return
        codes = codes_on(matrix.codes, weight.device)
        place(model, name, QuantizedLinear(codes, matrix.scheme, weight.dtype, layers[name].bias))


def choose_dtype(
    name: str, config: ModelConfig, hardware: Hardware, scheme: Scheme | None = None
) -> torch.dtype:
    """The dtype to load in; an error before anything is allocated when the weights cannot fit, as
    they will be if a scheme quantizes them on the way in.
    """
    free = available_memory(hardware.device)
    if name == "auto":
        fits_fp32 = weight_bytes(config, torch.float32, scheme) <= 0.8 * free
        chosen = torch.float32 if hardware.device == "cpu" and fits_fp32 else torch.bfloat16
    else:
        chosen = parse_dtype(name)
        if chosen not in COMPUTE_DTYPES:
            allowed = ", ".join(dtype_name(dtype) for dtype in COMPUTE_DTYPES)
            raise UnsupportedError(f"a model cannot be run in {name}; use one of {allowed}")
    needed = weight_bytes(config, chosen, scheme)
    if needed > free:
        stored = dtype_name(chosen) if scheme is None else f"{scheme.name} and {dtype_name(chosen)}"
        raise OutOfMemoryError(
            f"the weights need {needed / _GIB:.1f} GiB in {stored}; "
            f"{free / _GIB:.1f} GiB are free on {hardware.device}; try a smaller model"
        )
    return chosen
