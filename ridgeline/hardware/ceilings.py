"""Measures ceilings that are not known yet and caches them: one file per device, driver, torch and
Triton.

    hardware = measure(detect(), only={"read_bandwidth", "matrix_fp32"})

A ceiling is the best rate of all that reach for it: torch's (probes.py), those of `own` probes that
a caller brings (kernels/ceilings.py, whom everybody above calls), and on a CPU, for products in 8
or 16 bits, fp32's, since such numbers can be converted. Each is kept by itself, so that what was
not timed yet is timed later.

A measurement that fails is noted in `hardware.absent` with its reason and never stops the rest. A
GPU's samples that lie far apart were taken beside other work: they are taken again, and where that
does not help they count this once and are not kept. A cache that cannot be read is measured again;
one that cannot be written causes a warning.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ridgeline.errors import OutputError, UsageError, near_matches
from ridgeline.formats.files import atomic_write
from ridgeline.hardware.facts import MEASURED, Ceiling, Hardware
from ridgeline.hardware.paths import cache_dir
from ridgeline.hardware.probes import PROBES, NotSupportedHere
from ridgeline.progress import Progress

SCHEMA = 3  # raise it when a probe changes its meaning: older files are then measured again
OWN = "own_"  # before a key: what our kernels reach there
# Spread of a GPU's samples: 0.01 to 0.1 where it is alone, 0.2 to 1.1 beside other processes; with
# 0.43 a matrix rate was 465 TFLOP/s where 790 are right (H200, 2026-11-18).
UNSTEADY = 0.25
NARROW = ("matrix_bf16", "matrix_fp16", "matrix_int8")  # a CPU may multiply these through fp32
Probe = Callable[[Hardware], Ceiling]
NO_PROBES: Mapping[str, Probe] = {}
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Known:
    """What a cache file holds: ceilings, and the reasons why others can never be measured here."""

    ceilings: Mapping[str, Ceiling] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)


def measure(
    hardware: Hardware,
    only: Collection[str] | None = None,
    progress: Progress | None = None,
    refresh: bool = False,
    own: Mapping[str, Probe] = NO_PROBES,
) -> Hardware:
    """Fill `ceilings` for the keys of `only` (default: all) from the cache, else by measuring.
    `own` are further probes by key: the best rate counts.
    """
    probes = _wanted(hardware, only, own)
    known = _Known() if refresh else _read(hardware)
    missing = [key for key in probes if key not in known.ceilings and key not in known.absent]
    ceilings: dict[str, Ceiling] = {}
    unsteady: dict[str, Ceiling] = {}
    unsupported: dict[str, str] = {}
    failed: dict[str, str] = {}
    for done, key in enumerate(missing):
        if progress is not None:
            progress("measuring ceilings", done, len(missing))
        try:
            ceiling = _steady(probes[key], hardware)
            (unsteady if _is_unsteady(ceiling, hardware) else ceilings)[key] = ceiling
        except NotSupportedHere as reason:
            unsupported[key] = str(reason)
        except (RuntimeError, ValueError, TypeError, AttributeError, MemoryError) as error:
            # torch raises any of these; not cached, since "out of memory" passes
            failed[key] = (str(error).strip().splitlines() or [type(error).__name__])[0]
        _release(hardware)
    if progress is not None and missing:
        progress("measuring ceilings", len(missing), len(missing))
    if ceilings or unsupported:
        known = _remember(hardware, _Known(ceilings, unsupported))
    if unsteady:
        log.warning("other work runs on %s: %s are not kept", hardware.name, ", ".join(unsteady))
    known = replace(
        known, ceilings={**known.ceilings, **unsteady}, absent={**known.absent, **failed}
    )
    return _with(hardware, known)


def _steady(probe: Probe, hardware: Hardware) -> Ceiling:
    """What it measures; the steadier of two tries where the first was disturbed."""
    first = probe(hardware)
    if not _is_unsteady(first, hardware):
        return first
    return min(first, probe(hardware), key=lambda ceiling: ceiling.spread or 0.0)


def _is_unsteady(ceiling: Ceiling, hardware: Hardware) -> bool:
    """Of rates: a CPU's best sample counts, however slow the others were, and launches vary."""
    is_rate = ceiling.unit != "s" and hardware.device_type != "cpu"
    return is_rate and (ceiling.spread or 0.0) > UNSTEADY


def load_cached(hardware: Hardware) -> Hardware:
    """The same hardware with every ceiling that was measured before; nothing is measured."""
    return _with(hardware, _read(hardware))


def cache_path(hardware: Hardware) -> Path:
    """The file that holds this device's ceilings under this driver, torch and Triton."""
    digest = hashlib.sha256(json.dumps(_key(hardware), sort_keys=True).encode()).hexdigest()[:10]
    name = re.sub(r"[^a-z0-9]+", "-", hardware.name.lower()).strip("-") or hardware.device_type
    return cache_dir() / "hardware" / f"{name}-{digest}.json"


def _wanted(
    hardware: Hardware, only: Collection[str] | None, own: Mapping[str, Probe]
) -> dict[str, Probe]:
    """The probes to run, in the order of MEASURED, each of ours behind torch's."""
    for key in only or ():
        if key not in MEASURED:
            hint = near_matches(key, MEASURED)
            raise UsageError(f"{key!r} is not a ceiling; choose from {', '.join(MEASURED)}{hint}")
    wanted = set(MEASURED if only is None else only)
    if hardware.device_type == "cpu" and wanted & set(NARROW):
        wanted.add("matrix_fp32")
    result: dict[str, Probe] = {}
    for key in (key for key in MEASURED if key in wanted):
        result[key] = PROBES[key]
        if key in own:
            result[OWN + key] = own[key]
    return result


def _with(hardware: Hardware, known: _Known) -> Hardware:
    """Hardware with what is known added; a ceiling that is there is not also absent."""
    ceilings = {**hardware.ceilings, **known.ceilings}
    absent = {**hardware.absent, **known.absent}
    best = {key: _best(hardware, key, ceilings) for key in MEASURED}
    return replace(
        hardware,
        ceilings={key: ceiling for key, ceiling in best.items() if ceiling is not None},
        absent={key: absent[key] for key in MEASURED if key in absent and best[key] is None},
    )


def _best(hardware: Hardware, key: str, ceilings: Mapping[str, Ceiling]) -> Ceiling | None:
    """Of torch's and our own; durations have one probe alone. A CPU's rate in 8 or 16 bits is not
    below fp32's: torch's int8 products on a Neoverse N1 make 4.8 GOP/s, its fp32 ones 36 GFLOP/s.
    """
    known = [ceilings[name] for name in (key, OWN + key) if name in ceilings]
    if known and hardware.device_type == "cpu" and key in NARROW:
        wide = _best(hardware, "matrix_fp32", ceilings)
        if wide is not None:
            known.append(replace(wide, unit=MEASURED[key][1], by=wide.by or "torch, through fp32"))
    return max(known, key=lambda ceiling: ceiling.value, default=None)


def _key(hardware: Hardware) -> dict[str, Any]:
    return {
        "device": hardware.name,
        "architecture": hardware.architecture,
        "num_units": hardware.num_units,
        "num_threads": hardware.num_threads,
        "driver": hardware.driver,
        "torch": hardware.versions.get("torch"),
        "triton": hardware.versions.get("triton"),
        "schema": SCHEMA,
    }


def _read(hardware: Hardware) -> _Known:
    path = cache_path(hardware)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["key"] != _key(hardware):
            raise ValueError("another device's key")
        ceilings = {key: Ceiling.from_json(c) for key, c in document["ceilings"].items()}
        usable = {k: c for k, c in ceilings.items() if _is_known(k) and 0 < c.value < float("inf")}
        return _Known(usable, {k: str(why) for k, why in document["absent"].items()})
    except FileNotFoundError:
        return _Known()
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        log.warning("%s cannot be read (%s); measuring again", path, type(error).__name__)
        return _Known()


def _is_known(key: str) -> bool:
    return key.removeprefix(OWN) in MEASURED


def _remember(hardware: Hardware, new: _Known) -> _Known:
    """Merge into the cache file as it is now: another process may have added to it meanwhile."""
    old = _read(hardware)
    ceilings = {**old.ceilings, **new.ceilings}
    absent = {k: why for k, why in {**old.absent, **new.absent}.items() if k not in ceilings}
    document = {
        "key": _key(hardware),
        "ceilings": {key: ceiling.to_json() for key, ceiling in ceilings.items()},
        "absent": absent,
    }
    try:
        with atomic_write(cache_path(hardware)) as file:
            json.dump(document, file, indent=1)
    except OutputError as error:
        log.warning("%s; the ceilings will be measured again next time", error)
    return _Known(ceilings, absent)


def _release(hardware: Hardware) -> None:
    """Give a probe's buffers back before the next one sizes its own by what is free."""
    if hardware.device_type != "cpu":
        torch.cuda.empty_cache()
