"""The datasheet: what vendors promise for the GPUs Ridgeline knows, with the document each row
comes from.

Peaks are dense: where a vendor prints the figure "with sparsity", the row holds half of it. fp16
and fp8 are the rates with fp32 accumulation, which is what a matrix product in torch does; on
GeForce cards that is half of the figure with fp16 accumulation. fp32 is full fp32 (on AMD the
matrix cores do it, on NVIDIA the ordinary ones). Links are totals of both directions, as printed. A
device is matched by its exact name and, so that a MIG slice or an AMD partition does not pass for
the whole, by its number of units: anything else is unknown, never a near guess.

    find_spec("NVIDIA H200").bf16       # 989.4 TFLOP/s
    find_spec("NVIDIA A10G")            # None
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ridgeline.hardware.facts import DATASHEET_ONLY, MEASURED, Ceiling

GIGA, TERA = 1e9, 1e12


@dataclass(frozen=True)
class DeviceSpec:
    """One row, in the units vendors print; `ceilings` gives base units."""

    name: str
    device_names: tuple[str, ...]  # as torch reports them, without a leading "NVIDIA"
    num_units: int  # SMs or CUs of the whole device
    memory_gb: float
    bandwidth_gb_s: float
    power_w: float
    source: str
    fp32: float  # dense TFLOP/s, this and the next ones; None: not supported in hardware
    tf32: float | None
    bf16: float | None
    fp16: float | None
    fp8: float | None
    int8: float | None  # dense TOP/s
    link_gb_s: float | None  # NVLink or Infinity Fabric (xGMI), both directions; None: has none
    pcie_gb_s: float | None  # both directions; None: not connected by PCIe
    fp4: float | None = None  # dense TFLOP/s; for plans, no ceiling is measured

    def ceilings(self) -> dict[str, Ceiling]:
        """Every known figure under the key it is measured as, in base units."""
        one_way = None if self.pcie_gb_s is None else self.pcie_gb_s / 2
        gigabytes = {
            "copy_bandwidth": self.bandwidth_gb_s,
            "read_bandwidth": self.bandwidth_gb_s,
            "memory_bandwidth": self.bandwidth_gb_s,
            "h2d_pinned": one_way,
            "h2d_pageable": one_way,
            "link_bandwidth": self.link_gb_s,
            "pcie_bandwidth": self.pcie_gb_s,
        }
        rates = {f"matrix_{dtype}": getattr(self, dtype) for dtype in DTYPES}
        return _known(gigabytes, GIGA) | _known(rates, TERA)


DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8", "int8")


def _known(figures: Mapping[str, float | None], factor: float) -> dict[str, Ceiling]:
    units = MEASURED | DATASHEET_ONLY
    return {
        key: Ceiling(value * factor, units[key][1], "datasheet")
        for key, value in figures.items()
        if value is not None
    }


_NVIDIA = "https://www.nvidia.com/en-us/data-center"
_AMD = "https://www.amd.com/en/products/accelerators/instinct"
A100 = f"NVIDIA A100 Tensor Core GPU datasheet, {_NVIDIA}/a100/"
H100 = f"NVIDIA H100 Tensor Core GPU datasheet and architecture whitepaper, {_NVIDIA}/h100/"
H200 = f"NVIDIA H200 Tensor Core GPU datasheet, {_NVIDIA}/h200/"
B300 = f"NVIDIA DGX B300 datasheet and HGX platform specifications, {_NVIDIA}/dgx-b300/"
GB300 = f"NVIDIA GB300 NVL72 specifications, {_NVIDIA}/gb300-nvl72/"
B200 = f"NVIDIA DGX B200 datasheet and Blackwell architecture brief, {_NVIDIA}/dgx-b200/"
GB200 = f"NVIDIA GB200 NVL72 specifications, {_NVIDIA}/gb200-nvl72/"
L4 = f"NVIDIA L4 Tensor Core GPU datasheet, {_NVIDIA}/l4/"
L40S = f"NVIDIA L40S datasheet, {_NVIDIA}/l40s/"
A10 = f"NVIDIA A10 Tensor Core GPU datasheet, {_NVIDIA}/products/a10-gpu/"
T4 = f"NVIDIA T4 Tensor Core GPU datasheet, {_NVIDIA}/tesla-t4/"
GA102 = (
    "NVIDIA Ampere GA102 GPU architecture whitepaper, "
    "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"
)
ADA = (
    "NVIDIA Ada GPU architecture whitepaper, "
    "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
)
RTX_BLACKWELL = (
    "NVIDIA RTX Blackwell GPU architecture whitepaper, "
    "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/"
    "nvidia-rtx-blackwell-gpu-architecture.pdf"
)
MI210 = f"AMD Instinct MI210 specifications, {_AMD}/mi200/mi210.html"
MI250X = (
    f"AMD Instinct MI250X specifications, halved for one of its two dies, {_AMD}/mi200/mi250x.html"
)
MI300X = f"AMD Instinct MI300X specifications, {_AMD}/mi300/mi300x.html"
MI325X = f"AMD Instinct MI325X specifications, {_AMD}/mi300/mi325x.html"
MI355X = f"AMD Instinct MI355X specifications, {_AMD}/mi350/mi355x.html"


def _amd(model: str) -> tuple[str, ...]:
    return (f"AMD Instinct {model}", f"AMD Instinct {model} OAM", f"AMD Instinct {model} VF")


# torch sees each die of an MI250X as one device, so its row is per die; MI250 shares the name
# "MI250X/MI250" but has 104 units a die. GB200 reaches its host over NVLink-C2C rather than PCIe.
# CDNA 4 dropped tf32.
# fmt: off
SPECS = (
    #    name, device names, units, GB, GB/s, W, source
    #    fp32   tf32   bf16    fp16    fp8     int8    link   PCIe
    DeviceSpec("A100 SXM 40GB", ("A100-SXM4-40GB",), 108, 40, 1555, 400, A100,
         19.5,  156,   312,    312,    None,   624,    600,   64),
    DeviceSpec("A100 PCIe 40GB", ("A100-PCIE-40GB",), 108, 40, 1555, 250, A100,
         19.5,  156,   312,    312,    None,   624,    600,   64),
    DeviceSpec("A100 SXM 80GB", ("A100-SXM4-80GB",), 108, 80, 2039, 400, A100,
         19.5,  156,   312,    312,    None,   624,    600,   64),
    DeviceSpec("A100 PCIe 80GB", ("A100 80GB PCIe",), 108, 80, 1935, 300, A100,
         19.5,  156,   312,    312,    None,   624,    600,   64),
    DeviceSpec("H100 SXM", ("H100 80GB HBM3",), 132, 80, 3350, 700, H100,
         66.9,  494.7, 989.4,  989.4,  1978.9, 1978.9, 900,   128),
    DeviceSpec("H100 PCIe", ("H100 PCIe",), 114, 80, 2000, 350, H100,
         51.2,  378,   756,    756,    1513,   1513,   600,   128),
    DeviceSpec("H100 NVL", ("H100 NVL",), 132, 94, 3900, 400, H100,
         60,    417.5, 835.5,  835.5,  1670.5, 1670.5, 600,   128),
    DeviceSpec("H200", ("H200",), 132, 141, 4800, 700, H200,
         66.9,  494.7, 989.4,  989.4,  1978.9, 1978.9, 900,   128),
    DeviceSpec("B200", ("B200",), 148, 180, 8000, 1000, B200,
         75,    1100,  2250,   2250,   4500,   4500,   1800,  128, 9000),
    DeviceSpec("GB200", ("GB200",), 152, 186, 8000, 1200, GB200,
         80,    1250,  2500,   2500,   5000,   5000,   1800,  None, 10000),
    DeviceSpec("B300", ("B300 SXM6 AC",), 148, 270, 8000, 1400, B300,
         75,    1125,  2250,   2250,   4500,   125,    1800,  256, 13500),
    DeviceSpec("GB300", ("GB300",), 152, 279, 8000, 1400, GB300,
         80,    1250,  2500,   2500,   5000,   165,    1800,  None, 15000),
    DeviceSpec("L4", ("L4",), 58, 24, 300, 72, L4,
         30.3,  60,    121,    121,    242.5,  242.5,  None,  64),
    DeviceSpec("L40S", ("L40S",), 142, 48, 864, 350, L40S,
         91.6,  183,   362.05, 362.05, 733,    733,    None,  64),
    DeviceSpec("A10", ("A10",), 72, 24, 600, 150, A10,
         31.2,  62.5,  125,    125,    None,   250,    None,  64),
    DeviceSpec("T4", ("Tesla T4", "T4"), 40, 16, 320, 70, T4,
         8.1,   None,  None,   65,     None,   130,    None,  32),
    DeviceSpec("RTX 3090", ("GeForce RTX 3090",), 82, 24, 936, 350, GA102,
         35.6,  35.6,  71.2,   71.2,   None,   284,    112.5, 64),
    DeviceSpec("RTX 4090", ("GeForce RTX 4090",), 128, 24, 1008, 450, ADA,
         82.6,  82.6,  165.2,  165.2,  330.3,  660.6,  None,  64),
    DeviceSpec("RTX 5090", ("GeForce RTX 5090",), 170, 32, 1792, 575, RTX_BLACKWELL,
         104.8, 104.8, 209.5,  209.5,  419,    838,    None,  128),
    DeviceSpec("MI210", _amd("MI210"), 104, 64, 1638.4, 300, MI210,
         45.3,  None,  181,    181,    None,   181,    300,   64),
    DeviceSpec("MI250X die", (*_amd("MI250X"), "AMD Instinct MI250X/MI250"), 110, 64, 1638.4, 280,
    MI250X,
         47.85, None,  191.5,  191.5,  None,   191.5,  400,   64),
    DeviceSpec("MI300X", _amd("MI300X"), 304, 192, 5300, 750, MI300X,
         163.4, 653.7, 1307.4, 1307.4, 2614.9, 2614.9, 896,   128),
    DeviceSpec("MI325X", _amd("MI325X"), 304, 256, 6000, 1000, MI325X,
         163.4, 653.7, 1307.4, 1307.4, 2614.9, 2614.9, 896,   128),
    DeviceSpec("MI355X", _amd("MI355X"), 256, 288, 8000, 1400, MI355X,
         157.3, None,  2516.6, 2516.6, 5033.2, 5033.2, 1075,  128, 10066.3),
)
# fmt: on

_BY_NAME = {device_name.lower(): spec for spec in SPECS for device_name in spec.device_names}


def find_spec(device_name: str, num_units: int | None = None) -> DeviceSpec | None:
    """The row for a device as torch names it, or None: unknown is not guessed."""
    words = device_name.lower().split()
    spec = _BY_NAME.get(" ".join(words[1:] if words[:1] == ["nvidia"] else words))
    if spec is None or (num_units is not None and num_units < spec.num_units):
        return None
    return spec
