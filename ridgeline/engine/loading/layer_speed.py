"""Which matrices stay plain because their quantized product is slower on this machine.

quantization/choose.py measures; here it does so with the kernels that the engine runs, for the
batch sizes that its recipe allows. What was measured is kept in a file for each device, so that
only the first start with a scheme takes these seconds. On a GPU products are timed in a captured
graph, as the engine runs them: one of several kernels, launched one by one, may take the host more
than the device, and is then timed as launches. What seems slower is measured once more, and the
better times count: on a busy machine one bad moment decides nothing.

    choices = measured_choices(config, parse_scheme("int8"), (1, 16), torch.bfloat16, "cuda:0")
    plain = slower_shapes(choices)
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ridgeline.engine.loading.host_model import on_host
from ridgeline.errors import OutputError, UsageError
from ridgeline.formats.dtypes import dtype_name
from ridgeline.formats.files import atomic_write
from ridgeline.hardware import Hardware, detect
from ridgeline.hardware.ceilings import cache_path
from ridgeline.kernels import quantized_linear, skinny_linear
from ridgeline.kernels.autotune import is_tuned
from ridgeline.models import ModelConfig
from ridgeline.progress import Progress
from ridgeline.quantization.choose import LayerChoice, ProductTimes, Timer, measure_shape
from ridgeline.quantization.scheme import Scheme
from ridgeline.quantization.sizes import MatrixSize, model_matrices
from ridgeline.timing import Timing, time_graph, time_host
from ridgeline.version import __version__

log = logging.getLogger(__name__)

TARGET_S, WARMUP_S = 0.06, 0.01
ON_GPU, ON_CPU = (1, 16), (1,)  # requests at once; a CPU serves mostly one


def as_run(fn: Callable[..., object], device: str, *, inputs: Sequence[tuple[Any, ...]]) -> Timing:
    """Seconds of a call, as the engine makes it: in a graph on a GPU."""
    if torch.device(device).type == "cpu":
        return time_host(fn, inputs=inputs, target_s=TARGET_S, warmup_s=WARMUP_S)
    return time_graph(
        fn,
        device=device,
        num_calls=max(len(inputs), 8),
        inputs=inputs,
        target_s=TARGET_S,
        warmup_s=WARMUP_S,
    )


def usual_batches(device: str, max_batch: int | None = None) -> tuple[int, ...]:
    sizes = ON_CPU if torch.device(device).type == "cpu" else ON_GPU
    return tuple(size for size in sizes if max_batch is None or size <= max_batch)


def measured_choices(
    model: ModelConfig | Sequence[MatrixSize],
    scheme: Scheme,
    batch_sizes: Sequence[int],
    dtype: torch.dtype,
    device: str,
    *,
    host_kernels: bool = True,
    timer: Timer = as_run,
    progress: Progress | None = None,
) -> list[LayerChoice]:
    """A choice for each shape of a model's projections, or for each of these. `host_kernels`:
    whether a CPU runs its own kernels, which are built by now, or the references.
    """
    matrices = model_matrices(model) if isinstance(model, ModelConfig) else model
    shapes = list(dict.fromkeys(matrices))
    if not batch_sizes or min(batch_sizes) < 1:
        raise UsageError(f"batch sizes are {list(batch_sizes)}; give numbers of at least 1")
    sizes = sorted(set(batch_sizes))
    kept = _Kept(device)
    on_cpu = torch.device(device).type == "cpu"
    ready: Callable[[Any], nn.Module] = on_host if on_cpu and host_kernels else _as_it_is
    kernels = "fused" if not on_cpu or host_kernels else "reference"
    kernels += "" if on_cpu or is_tuned() else " untuned"
    how = "by the clock" if on_cpu else "in graphs"  # other times are not comparable
    choices = []
    for done, shape in enumerate(shapes):
        key = f"{scheme.name} {dtype_name(dtype)} {kernels} {how} {tuple(shape)} {sizes}"
        choice = kept.get(key, shape, scheme)
        if choice is None:
            if progress is not None:
                progress(f"timing {scheme.name}", done, len(shapes))
            with torch.random.fork_rng([] if on_cpu else [torch.device(device)]):
                measured = partial(
                    measure_shape, shape, scheme, sizes, dtype, device, ready=ready, timer=timer
                )
                choice = _confirmed(measured)
            kept.put(key, choice)
        choices.append(choice)
    kept.save()
    return choices


def known_speedup(
    hardware: Hardware,
    scheme: Scheme,
    dtype: torch.dtype,
    kernels: str,
    shape: MatrixSize,
    rows: float,
) -> float | None:
    """How many times faster a product of these rows is by codes, where that was measured here for
    about as many (within four times); nothing is measured now.
    """
    how = "by the clock" if hardware.device_type == "cpu" else "in graphs"
    prefix = f"{scheme.name} {dtype_name(dtype)} {kernels} {how} {tuple(shape)} "
    times: list[dict[str, Any]] = []
    for key, values in _times_of(hardware).items():
        times += values if key.startswith(prefix) else []
    try:
        near = [one for one in (ProductTimes(**each) for each in times) if _is_near(one.rows, rows)]
        return min(near, key=lambda one: abs(one.rows - rows)).speedup if near else None
    except (TypeError, ZeroDivisionError):
        return None


def _is_near(measured: int, rows: float) -> bool:
    return measured / 4 <= rows <= measured * 4


def _times_of(hardware: Hardware) -> dict[str, Any]:
    file = layers_file(hardware)
    try:
        return _read_times(file, file.stat().st_mtime_ns)
    except OSError:
        return {}


@lru_cache(maxsize=4)
def _read_times(file: Path, changed: int) -> dict[str, Any]:
    """`changed` is when: another time is read anew."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        return dict(document["times"]) if document["version"] == times_version() else {}
    except (OSError, ValueError, TypeError, KeyError):
        return {}


def layers_file(hardware: Hardware) -> Path:
    """The times of one device; its name says device, driver, torch and Triton."""
    ceilings = cache_path(hardware)
    return ceilings.parent.parent / "layers" / ceilings.name


@lru_cache(maxsize=1)
def times_version() -> str:
    """What times hold for: this Ridgeline, with the products' kernels as they are now."""
    digest = hashlib.sha256()
    for op in (quantized_linear, skinny_linear):
        folder = Path(op.__path__[0])
        for file in sorted(each for each in folder.iterdir() if each.is_file()):
            digest.update(file.name.encode() + file.read_bytes())
    return f"{__version__} {digest.hexdigest()[:12]}"


def _as_it_is(layer: nn.Module) -> nn.Module:
    return layer


def _confirmed(measured: Callable[[], LayerChoice]) -> LayerChoice:
    """Measured again where it says that the shape should stay plain; the better times count."""
    first = measured()
    if first.quantize or not first.times:
        return first
    best = (
        ProductTimes(one.rows, min(one.plain_s, two.plain_s), min(one.quantized_s, two.quantized_s))
        for one, two in zip(first.times, measured().times, strict=True)
    )
    return replace(first, times=tuple(best))


class _Kept:
    """The file of times of one device."""

    def __init__(self, device: str) -> None:
        self.file = layers_file(detect(device))
        self.values: dict[str, Any] = {}
        self.is_new = False
        try:
            document = json.loads(self.file.read_text(encoding="utf-8"))
            if document["version"] == times_version():  # other kernels have other times
                self.values = dict(document["times"])
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, KeyError) as error:
            log.warning("%s is not readable (%s); measuring anew", self.file, type(error).__name__)

    def get(self, key: str, shape: MatrixSize, scheme: Scheme) -> LayerChoice | None:
        try:
            times = tuple(ProductTimes(**one) for one in self.values[key])
        except (KeyError, TypeError):
            return None
        return LayerChoice(*shape, scheme.name, times)

    def put(self, key: str, choice: LayerChoice) -> None:
        self.values[key] = [asdict(times) for times in choice.times]
        self.is_new = True

    def save(self) -> None:
        if not self.is_new:
            return
        try:
            with atomic_write(self.file) as file:
                json.dump({"version": times_version(), "times": self.values}, file, indent=1)
        except OutputError as error:
            log.warning("%s; times of layers are measured again next time", error)
