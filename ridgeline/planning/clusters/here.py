"""`--gpus here`: a cluster of this machine's own devices, by what was measured of them. A CPU is
one rank, or with `2xhere` two that share its cores and its memory.

    this_machine(None).num_gpus
"""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from ridgeline.errors import UsageError
from ridgeline.hardware import Hardware, detect, measure
from ridgeline.hardware.fabrics import NodeFabric, usual_node
from ridgeline.hardware.specs import GIGA, TERA, DeviceSpec, find_spec
from ridgeline.planning.clusters.cluster import GpuPool

NEEDED = ("read_bandwidth", "matrix_fp32", "matrix_bf16")
CPU_LINK_GB_S = 4.0  # of two processes both ways, where `bench collectives` has measured nothing
CPU_WATTS = 250.0  # no datasheet: a server's processor


def this_machine(count: int | None) -> GpuPool:
    """All its GPUs, or one rank on its CPU, unless `count` says how many."""
    hardware = detect()
    is_cpu = hardware.device_type == "cpu"
    there = num_here(hardware)
    count = (1 if is_cpu else there) if count is None else count
    if count > there:
        kind = "cores" if is_cpu else "GPUs"
        raise UsageError(f"--gpus {count}xhere: this machine has {there} {kind}")
    spec = None if is_cpu else find_spec(hardware.name, hardware.num_units)
    if spec is None:
        spec = measured_spec(measure(hardware, set(NEEDED)), count if is_cpu else 1)
    node = replace(usual_node(spec.name), num_gpus=count)
    if is_cpu:
        node = NodeFabric("this machine", count, "pcie", count, 0, 0.0, CPU_WATTS,
                          hardware.memory_bytes / GIGA, "this machine")  # fmt: skip
    return GpuPool(spec, count, node, kind="cpu" if is_cpu else "cuda")


def num_here(hardware: Hardware) -> int:
    """Devices of that kind; of a CPU its cores, each of which can be a rank."""
    return (os.cpu_count() or 1) if hardware.device_type == "cpu" else torch.cuda.device_count()


def measured_spec(hardware: Hardware, sharers: int) -> DeviceSpec:
    """A datasheet of what was measured, each of `sharers` having an even part."""

    def rate(key: str, unit: float) -> float | None:
        ceiling = hardware.ceiling(key)
        return None if ceiling is None else ceiling.value / unit / sharers

    missing = [key for key in NEEDED if rate(key, 1.0) is None]
    if missing:
        raise UsageError(
            f"--gpus here: {', '.join(missing)} could not be measured on {hardware.name}; give a "
            "file with its figures instead"
        )
    fp32, bf16 = rate("matrix_fp32", TERA), rate("matrix_bf16", TERA)
    bandwidth = rate("read_bandwidth", GIGA)
    assert fp32 is not None, "needed"
    assert bandwidth is not None, "needed"
    return DeviceSpec(
        name=hardware.name,
        device_names=(hardware.name,),
        num_units=max(1, hardware.num_units // sharers),
        memory_gb=hardware.memory_bytes / GIGA / sharers,
        bandwidth_gb_s=bandwidth,
        power_w=CPU_WATTS / sharers,
        source="measured on this machine",
        fp32=fp32,
        tf32=rate("matrix_tf32", TERA),
        bf16=bf16,
        fp16=rate("matrix_fp16", TERA),
        fp8=rate("matrix_fp8", TERA),
        int8=rate("matrix_int8", TERA),
        link_gb_s=None,
        pcie_gb_s=CPU_LINK_GB_S,
    )
