"""What a GPU of a pool sustains, for the model of a step: its measured ceilings where this machine
has measured one, otherwise the datasheet's times the share that such GPUs reach.

    sustained(parse_cluster("8xH100").pools[0]).ceiling("matrix_bf16").value    # 792e12
"""

from __future__ import annotations

from dataclasses import replace

from ridgeline.hardware import Hardware
from ridgeline.hardware.facts import Ceiling
from ridgeline.planning.clusters.cluster import GpuPool

# Shares of the datasheet. Memory: 4.38 of 4.8 TB/s read on the H200 (2026-11-15). Matrices: the
# best of bf16 that anybody has published by generation. fp8 alone reaches 1,464 of 1,979 TFLOP/s on
# the H200 (2026-11-15), 7% less in a step that also reads keys: it is at its 700 W then, at 1,620
# to 1,680 MHz (fitted to fp8-kv-fp8-throughput-3 and -4 of 2026-11-17).
BANDWIDTH, COPY = 0.91, 0.89
MATRICES = {"A100": 0.87, "H100": 0.80, "H200": 0.81, "B200": 0.78, "B300": 0.78, "GB200": 0.78,
            "GB300": 0.78, "MI300X": 0.51, "MI325X": 0.51, "MI355X": 0.68}  # fmt: skip
MATRICES_8_BIT = {"H100": 0.69, "H200": 0.69}
OTHER = 0.75


def sustained(pool: GpuPool) -> Hardware:
    hardware = pool.hardware()
    matrices = _share(MATRICES, pool.gpu.name)
    shares = {"read_bandwidth": BANDWIDTH, "copy_bandwidth": COPY, "memory_bandwidth": BANDWIDTH}
    for key in hardware.datasheet:
        if key in ("matrix_fp8", "matrix_int8"):
            shares[key] = MATRICES_8_BIT.get(_generation(pool.gpu.name), matrices)
        elif key.startswith("matrix_"):
            shares[key] = matrices
    return replace(
        hardware,
        datasheet={
            key: replace(ceiling, value=ceiling.value * shares.get(key, 1.0))
            for key, ceiling in hardware.datasheet.items()
        },
    )


def with_rate(hardware: Hardware, key: str, value: float) -> Hardware:
    """Another rate of one kind."""
    known = Ceiling(value, "FLOP/s", "datasheet")
    return replace(hardware, datasheet={**hardware.datasheet, key: known})


def _share(shares: dict[str, float], name: str) -> float:
    return shares.get(_generation(name), OTHER)


def _generation(name: str) -> str:
    return name.split()[0]
