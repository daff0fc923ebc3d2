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
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

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
from ridgeline.quantization.scheme import Scheme, parse_scheme
from ridgeline.quantization.sizes import MatrixSize, model_matrices
from ridgeline.timing import Timing, time_graph, time_host
from ridgeline.version import __version__

log = logging.getLogger(__name__)

TARGET_S, CPU_TARGET_S, WARMUP_S = 0.06, 0.02, 0.01
ON_GPU, ON_CPU = (1, 16), (1,)  # requests at once; a CPU serves mostly one


def as_run(fn: Callable[..., object], device: str, *, inputs: Sequence[tuple[Any, ...]]) -> Timing:
    """Seconds of a call, as the engine makes it: in a graph on a GPU."""
    if torch.device(device).type == "cpu":
        return time_host(fn, inputs=inputs, target_s=CPU_TARGET_S, warmup_s=WARMUP_S)
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
    choices = []
    for done, shape in enumerate(shapes):
        key = f"{scheme.name} {dtype_name(dtype)} {kernels} {_how(on_cpu)} {tuple(shape)}"
        if missing := [size for size in sizes if kept.get(key, size) is None]:
            if progress is not None:
                progress(f"timing {scheme.name}", done, len(shapes))
            with torch.random.fork_rng([] if on_cpu else [torch.device(device)]):
                choice = measure_shape(
                    shape,
                    scheme,
                    missing,
                    dtype,
                    device,
                    ready=ready,
                    timer=timer,
                    confirm=True,
                )
            kept.put(key, missing, choice)
        known = [times for size in sizes if (times := kept.get(key, size))]
        choices.append(LayerChoice(*shape, scheme.name, tuple(known)))
    kept.save()
    return choices


def known_times(
    hardware: Hardware,
    scheme: Scheme | None,
    dtype: torch.dtype,
    kernels: str,
    shape: MatrixSize,
    rows: float,
) -> ProductTimes | None:
    """Of a product of these rows by codes and plain, where that was measured here for about as many
    (within four times); nothing is measured now. On a CPU a scheme is as fast as another with
    weights of the same bits, where only that one was measured: the codes are what its kernels wait
    for. Without a scheme, with the least time that a plain one took.
    """
    how = _how(hardware.device_type == "cpu")
    wanted = f"{dtype_name(dtype)} {kernels} {how} {tuple(shape)}"
    known, kin = list[ProductTimes](), list[ProductTimes]()
    for key, by_rows in _times_of(hardware).items():
        name, _, rest = key.partition(" ")
        if rest != wanted or not isinstance(by_rows, dict):
            continue
        times = [times for each in by_rows.values() if (times := _times_in(each))]
        near = [one for one in times if one.rows / 4 <= rows <= one.rows * 4]
        if scheme is None or name == scheme.name:
            known += near
        elif hardware.device_type == "cpu" and parse_scheme(name).weight == scheme.weight:
            kin += near
    return min(known or kin, key=lambda one: (abs(one.rows - rows), one.plain_s), default=None)


def _times_in(document: object) -> ProductTimes | None:
    """None where the scheme does not fit, or the file was edited."""
    try:
        return ProductTimes(**document)  # type: ignore[arg-type]
    except TypeError:
        return None


def _how(on_cpu: bool) -> str:
    """Times of another kind are not comparable."""
    return "by the clock, at best" if on_cpu else "in graphs"


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

    def get(self, key: str, rows: int) -> ProductTimes | Literal[False] | None:
        """False: the scheme does not fit. None: not measured."""
        try:
            document = self.values[key][str(rows)]
        except (KeyError, TypeError):
            return None
        return _times_in(document) if document else False

    def put(self, key: str, sizes: Sequence[int], choice: LayerChoice) -> None:
        times = {times.rows: asdict(times) for times in choice.times}
        earlier = self.values.get(key)
        by_rows = dict(earlier) if isinstance(earlier, dict) else {}
        self.values[key] = by_rows | {str(rows): times.get(rows, False) for rows in sizes}
        self.is_new = True

    def save(self) -> None:
        if not self.is_new:
            return
        try:
            with atomic_write(self.file) as file:
                json.dump({"version": times_version(), "times": self.values}, file, indent=1)
        except OutputError as error:
            log.warning("%s; times of layers are measured again next time", error)
