"""Detects what a device is, in milliseconds and without measuring. Never fails on a machine without
a GPU.

    detect()            # the first GPU, else the CPU
    detect("cuda:1")    # HardwareError when it does not exist; ROCm devices are "cuda" too, as in
    torch
"""

from __future__ import annotations

import os
import platform
import re
import resource
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import torch

from ridgeline.errors import HardwareError, UsageError, near_matches
from ridgeline.hardware.clocks import query
from ridgeline.hardware.facts import Hardware
from ridgeline.hardware.specs import find_spec

CPU_VENDORS = {"GenuineIntel": "intel", "AuthenticAMD": "amd", "0x41": "arm", "0xc0": "ampere"}

# ARM's kernels report a number for what x86 gives a name (implementer, part: the core's manual).
ARM_CORES = {
    ("0x41", "0xd08"): "Cortex-A72",
    ("0x41", "0xd0b"): "Cortex-A76",
    ("0x41", "0xd0c"): "Neoverse N1",
    ("0x41", "0xd40"): "Neoverse V1",
    ("0x41", "0xd49"): "Neoverse N2",
    ("0x41", "0xd4f"): "Neoverse V2",
    ("0x41", "0xd83"): "Neoverse V3AE",
    ("0x41", "0xd84"): "Neoverse V3",
    ("0x41", "0xd8e"): "Neoverse N3",
    ("0xc0", "0xac3"): "Ampere-1",
    ("0xc0", "0xac4"): "Ampere-1a",
}
UNKNOWN = "unknown"


def detect(device: str = "auto") -> Hardware:
    """Facts and datasheet of one device: "auto", "cpu", "cuda" or "cuda:N"."""
    if device == "auto":
        return _gpu(0) if torch.cuda.is_available() else _cpu()
    if device == "cpu":
        return _cpu()
    match = re.fullmatch(r"cuda(?::(\d+))?", device)
    if match is None:
        hint = near_matches(device, ["auto", "cpu", "cuda"])
        raise UsageError(f"device {device!r} is not known; use auto, cpu, cuda or cuda:N{hint}")
    return _gpu(int(match[1] or 0))


def _gpu(index: int) -> Hardware:
    if not torch.cuda.is_available():
        raise HardwareError(
            f"torch {torch.__version__} finds no GPU; "
            "use --device cpu, or install a torch built for your GPU"
        )
    count = torch.cuda.device_count()
    if index >= count:
        raise HardwareError(
            f"device cuda:{index} does not exist; this machine has {count}: cuda:0 to "
            f"cuda:{count - 1}"
        )
    facts = torch.cuda.get_device_properties(index)
    is_rocm = torch.version.hip is not None
    l2_bytes = int(getattr(facts, "L2_cache_size", 0) or 0) or None
    spec = find_spec(facts.name, facts.multi_processor_count)
    return Hardware(
        vendor="amd" if is_rocm else "nvidia",
        device_type="rocm" if is_rocm else "cuda",
        device=f"cuda:{index}",
        name=facts.name,
        architecture=(
            facts.gcnArchName.split(":")[0] if is_rocm else f"sm_{facts.major}{facts.minor}"
        ),
        memory_bytes=facts.total_memory,
        num_units=facts.multi_processor_count,
        driver=_amd_driver() if is_rocm else _nvidia_driver(),
        l2_bytes=l2_bytes,
        cache_bytes=l2_bytes,
        versions=_versions() | _toolkit(),
        datasheet=spec.ceilings() if spec else {},
        datasheet_source=spec.source if spec else None,
    )


def _cpu() -> Hardware:
    cpuinfo = _cpuinfo()
    caches = _cpu_caches()
    vendor = cpuinfo.get("vendor_id") or cpuinfo.get("CPU implementer", "")
    return Hardware(
        vendor="apple" if platform.system() == "Darwin" else CPU_VENDORS.get(vendor, UNKNOWN),
        device_type="cpu",
        device="cpu",
        name=_cpu_name(cpuinfo),
        architecture=_cpu_architecture(),
        memory_bytes=_host_memory(),
        num_units=num_cores(),
        driver=platform.release(),
        l2_bytes=caches.get(2),
        cache_bytes=max(caches.values(), default=None),
        num_threads=torch.get_num_threads(),
        versions=_versions(),
    )


def _cpu_name(cpuinfo: Mapping[str, str]) -> str:
    core = ARM_CORES.get((cpuinfo.get("CPU implementer", ""), cpuinfo.get("CPU part", "")))
    names = (cpuinfo.get("model name"), core, platform.processor(), platform.machine())
    return next(filter(None, names), UNKNOWN)


def num_cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_memory(device: str) -> int:
    """Bytes that could be allocated on "cpu" or "cuda:N" now."""
    if device != "cpu":
        return int(torch.cuda.mem_get_info(device)[0])
    match = re.search(r"MemAvailable:\s+(\d+) kB", _read("/proc/meminfo"))
    available = int(match[1]) * 1024 if match else _host_memory() // 2
    limit, used = _read("/sys/fs/cgroup/memory.max"), _read("/sys/fs/cgroup/memory.current")
    if limit.isdigit() and used.isdigit():
        available = min(available, max(0, int(limit) - int(used)))
    return available


def peak_device_bytes(device: str) -> int | None:
    """The most memory that this process has held of a GPU for its tensors."""
    return None if device == "cpu" else torch.cuda.max_memory_reserved(device)


def peak_bytes(device: str) -> int:
    """The most memory that this process has held: of a GPU for its tensors, else of the host."""
    on_device = peak_device_bytes(device)
    if on_device is not None:
        return on_device
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _versions() -> dict[str, str]:
    versions: dict[str, str] = {"torch": str(torch.__version__)}
    try:
        versions["triton"] = metadata.version("triton")
    except metadata.PackageNotFoundError:
        versions["triton"] = "none"
    return versions


def _toolkit() -> dict[str, str]:
    if torch.version.hip is not None:
        return {"hip": torch.version.hip}
    return {"cuda": torch.version.cuda or UNKNOWN}


def _nvidia_driver() -> str:
    version = r"\b\d{3,}\.\d+(?:\.\d+)?\b"
    text = _read("/proc/driver/nvidia/version")
    if not re.search(version, text):  # some sandboxes hide the file; the tool takes 0.1 s longer
        text = query(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]) or ""
    match = re.search(version, text)
    return match[0] if match else UNKNOWN


def _amd_driver() -> str:
    return (
        _read("/sys/module/amdgpu/version") or platform.release()
    )  # the in-tree driver has no own version


def _cpuinfo() -> dict[str, str]:
    """The first processor's fields of /proc/cpuinfo; empty where there is none."""
    first = _read("/proc/cpuinfo").split("\n\n")[0]
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def _cpu_architecture() -> str:
    capability = torch.backends.cpu.get_cpu_capability().lower()
    words = [platform.machine(), "" if capability == "default" else capability]
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    return " ".join(word for word in [*words, "amx" if has_amx() else ""] if word)


def _cpu_caches() -> dict[int, int]:
    """Level to bytes for one core's data caches, from Linux's sysfs; empty elsewhere."""
    sizes: dict[int, int] = {}
    for folder in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        match = re.fullmatch(r"(\d+)([KM]?)", _read(folder / "size"))
        level = _read(folder / "level")
        if match and level.isdigit() and _read(folder / "type") != "Instruction":
            sizes[int(level)] = int(match[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20}[match[2]]
    return sizes


def _host_memory() -> int:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _read("/sys/fs/cgroup/memory.max")
    return min(total, int(limit)) if limit.isdigit() else total


def _read(path: str | Path) -> str:
    """A system file's text, or nothing where it does not exist."""
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""
