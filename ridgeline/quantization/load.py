"""`load_model`: the one way from a name on the command line to a model on a device.

model = load_model("demo", dtype="fp32", device="cpu")
"""

from __future__ import annotations

from pathlib import Path

import torch

from ridgeline.errors import OutOfMemoryError, UnsupportedError
from ridgeline.formats.dtypes import dtype_bytes, dtype_name, parse_dtype
from ridgeline.hardware import detect
from ridgeline.models import ModelConfig, Transformer, build_model
from ridgeline.models.checkpoint import Progress, open_checkpoint, resolve_model
from ridgeline.models.cost import num_parameters
from ridgeline.models.families import describe
from ridgeline.models.weights import load_weights

COMPUTE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_GIB = 2**30


def load_model(
    model: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    progress: Progress | None = None,
) -> Transformer:
    """A Hugging Face folder or hub name, a GGUF file, or `demo`, ready to run.

    `dtype="auto"` is bf16 on a GPU; on a CPU fp32, which is the faster one there at batch 1 (KV and
    activations included), unless only bf16 fits into memory.
    """
    device = detect(device).device
    checkpoint = open_checkpoint(resolve_model(str(model), progress=progress))
    description = describe(checkpoint)
    chosen = choose_dtype(dtype, description.config, torch.device(device))
    loaded = build_model(description.config, chosen, device)
    load_weights(loaded, checkpoint, description, progress)
    return loaded


def choose_dtype(name: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype to load in; an error before anything is allocated when the weights cannot fit."""
    free = free_bytes(device)
    if name == "auto":
        fits_fp32 = num_parameters(config) * 4 <= 0.8 * free
        chosen = torch.float32 if device.type == "cpu" and fits_fp32 else torch.bfloat16
    else:
        chosen = parse_dtype(name)
        if chosen not in COMPUTE_DTYPES:
            allowed = ", ".join(dtype_name(dtype) for dtype in COMPUTE_DTYPES)
            raise UnsupportedError(f"a model cannot be run in {name}; use one of {allowed}")
    needed = num_parameters(config) * dtype_bytes(chosen)
    if needed > free:
        raise OutOfMemoryError(
            f"the weights need {needed / _GIB:.1f} GiB in {dtype_name(chosen)}; "
            f"{free / _GIB:.1f} GiB are free on {device}"
        )
    return chosen


def free_bytes(device: torch.device) -> int:
    """Memory that can be had now: on the GPU, or what the operating system calls available."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields["MemAvailable"].split()[0]) * 1024
