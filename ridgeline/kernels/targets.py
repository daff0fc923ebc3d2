"""The chips kernels are compiled for, with or without one in the machine: limits, fp8 format,
resource use.

    python -m ridgeline kernels compile --target sm_90,gfx942
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch


@dataclass(frozen=True)
class Target:
    name: str  # "sm_90", "gfx942", "interpreter"
    backend: Literal["cuda", "hip", "interpreter"]
    warp_size: int  # threads that run in step: 32, or 64 on AMD's data-center chips
    shared_bytes: int  # shared memory (LDS) a program may use
    num_units: int  # SMs or CUs of the largest part, for grids when no device is there
    fp8: torch.dtype | None  # the 8-bit float its matrix units take

    @staticmethod
    def like(name: str) -> Target:
        """A chip not in the table: the nearest older one of its vendor, under its own name."""
        if name.startswith("gfx"):
            return replace(TARGETS["gfx942"], name=name, fp8=None)
        number = int(name.removeprefix("sm_"))
        older = [t for t in TARGETS.values() if t.backend == "cuda" and _number(t) <= number]
        return replace(max(older, key=_number, default=TARGETS["sm_80"]), name=name)


def _number(target: Target) -> int:
    return int(target.name.removeprefix("sm_"))


def can_wait(target: Target) -> bool:
    """Programmatic dependent launch (`gdc_wait`): NVIDIA from Hopper on."""
    return target.backend == "cuda" and _number(target) >= 90


def roomy(target: Target) -> dict[str, int]:
    """Options for a kernel that holds much: Blackwell's assembler gives it 64 or 72 registers and
    spills a few bytes, unless told that it may have 128 (Triton 3.6 and 3.9).
    """
    return {"maxnreg": 128} if target.backend == "cuda" and _number(target) >= 100 else {}


E4M3 = torch.float8_e4m3fn
# Shared memory a block can opt into: CUDA C++ Programming Guide, table of compute capabilities;
# LDS: the CDNA 3 and CDNA 4 architecture papers. e4m3fn on gfx942 would compile silently into the
# wrong thing: its matrix units take the fnuz kind.
TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("sm_80", "cuda", 32, 163 * 1024, 108, None),
        Target("sm_89", "cuda", 32, 99 * 1024, 142, E4M3),
        Target("sm_90", "cuda", 32, 227 * 1024, 132, E4M3),
        Target("sm_100", "cuda", 32, 227 * 1024, 148, E4M3),
        Target("sm_120", "cuda", 32, 99 * 1024, 170, E4M3),
        Target("gfx942", "hip", 64, 64 * 1024, 304, torch.float8_e4m3fnuz),
        Target("gfx950", "hip", 64, 160 * 1024, 256, E4M3),
        Target("interpreter", "interpreter", 32, 1 << 30, 2, E4M3),
    )
}
COMPILED = tuple(name for name in TARGETS if name != "interpreter")
