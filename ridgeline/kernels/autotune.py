"""Tuned once: which configuration of a kernel is fastest for a shape, remembered by device and
compiler.

An op that has a choice gives its search space for a case's inputs, best guess first (`Op.configs`),
and the key under which a choice holds (`Op.tune_key`: dtype and shape range). `tune` times them
with the one timer and keeps every time it measured, so that a new configuration is tried without
measuring the old ones again. `chosen` is what a launcher asks: a dictionary lookup, and None on a
machine where nothing was measured, where the launcher's own heuristic serves at once.

Choices shipped for known GPUs are in kernels/choices/; those of a user's machine in the cache, and
win. Inside `untuned` none of them counts.

A time is a kernel's own, back to back with itself. Where it stands among others the ranking may
differ: times under the op's name "in place" (bench/kernels/tune_layer.py) are of all that a kernel
stands among, and are asked first.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from ridgeline.errors import RidgelineError, UsageError
from ridgeline.formats.files import atomic_write
from ridgeline.hardware.paths import cache_dir

KernelConfig = Mapping[str, Any]
ConfigTimes = dict[str, float]  # configuration as JSON, or a peer's name -> seconds
TimesTable = dict[str, dict[str, ConfigTimes]]  # op -> key -> times
TuningQuestion = tuple[str, str]  # op and key
IN_PLACE = " in place"
_forced: dict[TuningQuestion, dict[str, Any]] = {}
_asked: list[dict[TuningQuestion, list[dict[str, Any]]]] = []
_untuned = 0  # blocks of `untuned` that are open
_places: list[Mapping[str, int]] = []  # by op, of the blocks of `at_places` that are open
log = logging.getLogger(__name__)


def chosen(
    op: str,
    key: str,
    device: torch.device,
    usable: Callable[[KernelConfig], bool] = lambda config: True,
) -> dict[str, Any] | None:
    """The fastest configuration measured for this op and key on this kind of device, of those that
    can be used here.
    """
    if device.type == "cpu" or _untuned:
        return None
    name, question = _device_name(device.index or 0), (op, key)
    ranked = (*_ranked(name, op + IN_PLACE, key), *_ranked(name, op, key))
    if _asked:
        _asked[-1][question] = [config for config in _ranked(name, op, key) if usable(config)]
    if question in _forced and usable(_forced[question]):
        return _forced[question]
    place = _places[-1].get(op, 0) if _places else 0
    if place:
        others = [config for config in _ranked(name, op, key) if usable(config)]
        return others[min(place, len(others) - 1)] if others else None
    return next((config for config in ranked if usable(config)), None)


@contextmanager
def asking() -> Iterator[dict[TuningQuestion, list[dict[str, Any]]]]:
    """What is asked for inside, with the configurations that could have been the answer, fastest
    first.
    """
    _asked.append({})
    try:
        yield _asked[-1]
    finally:
        _asked.pop()


@contextmanager
def untuned() -> Iterator[None]:
    """Inside, nothing was measured and nothing was built: rules of thumb choose."""
    global _untuned
    _untuned += 1
    try:
        yield
    finally:
        _untuned -= 1


def is_tuned() -> bool:
    return not _untuned


@contextmanager
def at_places(places: Mapping[str, int]) -> Iterator[None]:
    """Inside, an op that is named takes the configuration that was measured to be so many places
    behind the fastest one; where fewer were measured, the last.
    """
    _places.append(places)
    try:
        yield
    finally:
        _places.pop()


def parse_places(text: str) -> dict[str, int]:
    """`skinny_linear=2,rms_norm=1`, by op."""
    places = {}
    for word in text.split(","):
        op, _, place = word.partition("=")
        if not re.fullmatch(r"[a-z0-9_]+", op) or not re.fullmatch(r"[0-9]{1,3}", place):
            raise UsageError(f"tiles is {text!r}; give OP=PLACE, e.g. skinny_linear=2")
        places[op] = int(place)
    return places


@contextmanager
def forced(op: str, key: str, config: KernelConfig) -> Iterator[None]:
    """Inside, this is the answer, whatever was measured."""
    _forced[op, key] = dict(config)
    try:
        yield
    finally:
        del _forced[op, key]


def beaten_by(op: str, key: str, device: torch.device) -> str | None:
    """The peer ("cublas") that was measured to be faster than every configuration, if one was."""
    if device.type == "cpu" or _untuned:
        return None
    return _beaten_by(_device_name(device.index or 0), op, key)


@lru_cache(maxsize=4096)
def _ranked(device_name: str, op: str, key: str) -> list[dict[str, Any]]:
    """Every configuration that ran, the fastest first."""
    times = load(device_name).get(op, {}).get(key, {})
    own = {
        name: seconds
        for name, seconds in times.items()
        if _is_config(name) and seconds != float("inf")
    }
    return [json.loads(name) for name in sorted(own, key=own.__getitem__)]


@lru_cache(maxsize=4096)
def _beaten_by(device_name: str, op: str, key: str) -> str | None:
    times = load(device_name).get(op, {}).get(key)
    fastest = min(times, key=times.__getitem__) if times else "{}"
    return None if _is_config(fastest) else fastest


def _is_config(name: str) -> bool:
    """Configurations are named by their JSON; anything else is a peer's name."""
    return name.startswith("{")


def tune(
    op: str,
    key: str,
    configs: Sequence[KernelConfig | str],
    seconds: Callable[[Any], float],
    device_name: str,
    again: bool = False,
) -> dict[str, float]:
    """Time each configuration, and each peer given by name, that was not timed before; return all
    times, known and new. `again`: those that were timed before too, also when not asked for.

    One that does not compile or fit is remembered as infinitely slow.
    """
    known = load(device_name).get(op, {}).get(key, {})
    asked = {
        config if isinstance(config, str) else json.dumps(config, sort_keys=True): config
        for config in configs
    }
    if again:
        before = [name for name, time in known.items() if time < float("inf") and name[0] == "{"]
        asked = {name: json.loads(name) for name in before} | asked
    times: ConfigTimes = {}
    for name, config in asked.items():
        if name in known and not again:
            continue
        try:
            times[name] = seconds(config)
        except (RuntimeError, ValueError, RidgelineError) as error:  # Triton's errors are these too
            log.info("%s %s %s: %s", op, key, name, error)
            times[name] = float("inf")
        except Exception as error:
            if (
                "OutOfResources" not in type(error).__name__
                and "Compil" not in type(error).__name__
            ):
                raise
            times[name] = float("inf")
    if times:
        remember(device_name, {op: {key: times}})
    return {**known, **times}


@lru_cache(maxsize=8)
def load(device_name: str) -> TimesTable:
    """Shipped choices with the user's own over them."""
    table: TimesTable = {}
    for text in (_shipped(device_name), _read(user_file(device_name))):
        if text:
            _merge(table, _parsed(text))
    return table


def remember(device_name: str, new: TimesTable) -> None:
    """Add times to the user's file; what others wrote in the meantime stays."""
    path = user_file(device_name)
    table = _parsed(_read(path) or "{}")
    _merge(table, new)
    with atomic_write(path) as file:
        file.write(as_text(table))
    for cached in (load, _ranked, _beaten_by):
        cached.cache_clear()


def user_file(device_name: str) -> Path:
    return cache_dir() / "kernels" / f"{file_name(device_name)}.json"


def file_name(device_name: str) -> str:
    """`nvidia-h200-triton-3.6`: choices hold for one device and one compiler."""
    import triton

    version = ".".join(triton.__version__.split(".")[:2])
    slug = "-".join(device_name.lower().replace("/", " ").split())
    return f"{slug}-triton-{version}"


def as_text(table: TimesTable) -> str:
    """JSON in a stable order; a configuration that failed is null."""
    plain = {
        op: {
            key: {name: None if s == float("inf") else s for name, s in sorted(times.items())}
            for key, times in sorted(keys.items())
        }
        for op, keys in sorted(table.items())
    }
    return json.dumps(plain, indent=1) + "\n"


def _parsed(text: str) -> TimesTable:
    try:
        raw = json.loads(text)
        return {
            op: {
                key: {name: float("inf") if s is None else float(s) for name, s in times.items()}
                for key, times in keys.items()
            }
            for op, keys in raw.items()
        }
    except (ValueError, AttributeError, TypeError):
        log.warning("the file of tuned choices cannot be read; measuring again")
        return {}


def _merge(table: TimesTable, new: TimesTable) -> None:
    for op, keys in new.items():
        for key, times in keys.items():
            table.setdefault(op, {}).setdefault(key, {}).update(times)


def _shipped(device_name: str) -> str | None:
    file = resources.files("ridgeline.kernels") / "choices" / f"{file_name(device_name)}.json"
    return file.read_text() if file.is_file() else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


@lru_cache
def _device_name(index: int) -> str:
    return torch.cuda.get_device_properties(index).name
