"""The datasheet: names find exactly their row, figures are dense, gaps are gaps and not zeros."""

import math

import pytest

from ridgeline.hardware.facts import DATASHEET_ONLY, MEASURED
from ridgeline.hardware.specs import SPECS, DeviceSpec, find_spec

pytestmark = pytest.mark.smoke


@pytest.mark.parametrize(
    ("device_name", "row"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA A100-SXM4-40GB", "A100 SXM 40GB"),
        ("A100-SXM4-40GB", "A100 SXM 40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM 80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 PCIe 40GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80GB"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA GB300", "GB300"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA A10", "A10"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 3090", "RTX 3090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 5090", "RTX 5090"),
        ("AMD Instinct MI210", "MI210"),
        ("AMD Instinct MI250X", "MI250X die"),
        ("AMD Instinct MI300X", "MI300X"),
        ("AMD Instinct MI300X OAM", "MI300X"),
        ("AMD Instinct MI325X", "MI325X"),
        ("AMD Instinct MI355X", "MI355X"),
    ],
)
def test_device_names_find_their_row(device_name: str, row: str) -> None:
    spec = find_spec(device_name)
    assert spec is not None
    assert spec.name == row


@pytest.mark.parametrize(
    "device_name",
    [
        "Foo 9000",
        "",
        "NVIDIA",
        "NVIDIA A10G",
        "NVIDIA A100-SXM-64GB",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA H200 NVL",
        "NVIDIA GH200 480GB",
        "NVIDIA L40",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "AMD Instinct MI250",
        "AMD Instinct MI300A",
        "AMD Instinct MI308X",
    ],
)
def test_other_devices_are_unknown(device_name: str) -> None:
    assert find_spec(device_name) is None


def test_a_part_of_a_device_is_not_the_device() -> None:
    assert find_spec("AMD Instinct MI300X", 304) is not None
    assert find_spec("AMD Instinct MI300X", 38) is None  # one of eight partitions
    assert find_spec("AMD Instinct MI250X/MI250", 110) is not None
    assert find_spec("AMD Instinct MI250X/MI250", 104) is None  # that is an MI250


def row(name: str) -> DeviceSpec:
    return next(spec for spec in SPECS if spec.name == name)


def test_every_promised_device_has_a_row() -> None:
    promised = {"A100 SXM 40GB", "A100 PCIe 40GB", "A100 SXM 80GB", "A100 PCIe 80GB"}
    promised |= {"H100 SXM", "H100 PCIe", "H100 NVL", "H200", "B200", "GB200", "B300", "GB300"}
    promised |= {"L4", "L40S", "A10", "T4", "RTX 3090", "RTX 4090", "RTX 5090"}
    promised |= {"MI210", "MI250X die", "MI300X", "MI325X", "MI355X"}
    assert {spec.name for spec in SPECS} == promised
    assert len({spec.name for spec in SPECS}) == len(SPECS)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_rows_are_physical_and_have_a_source(spec: DeviceSpec) -> None:
    assert "https://www." in spec.source or "https://images.nvidia.com" in spec.source
    for key, ceiling in spec.ceilings().items():
        assert ceiling.source == "datasheet"
        assert ceiling.unit == (MEASURED | DATASHEET_ONLY)[key][1]
        assert 0 < ceiling.value < math.inf
    # A sparse figure in one column breaks the factor of two between neighbouring precisions.
    if spec.bf16 is not None:
        assert spec.bf16 == spec.fp16
        if spec.tf32 is not None:
            assert spec.bf16 / spec.tf32 == pytest.approx(2, rel=0.03)
        if spec.fp8 is not None:
            assert spec.fp8 / spec.bf16 == pytest.approx(2, rel=0.02)


# Dense fp16 multiply-adds per SM or CU and clock with fp32 accumulation, by architecture.
FP16_FMAS = {"A100": 1024, "H": 2048, "B": 4096, "GB": 4096, "RTX": 256, "MI2": 512}
FP16_FMAS |= {"L": 512, "A10": 512, "T4": 512, "MI3": 1024, "MI355X": 2048}


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_peaks_imply_a_clock_that_exists(spec: DeviceSpec) -> None:
    """Peak = units x multiply-adds x 2 x clock: a sparse or misread figure gives no real clock."""
    family = max((name for name in FP16_FMAS if spec.name.startswith(name)), key=len)
    assert spec.fp16 is not None
    assert 1.3 < spec.fp16 * 1e3 / (spec.num_units * 2 * FP16_FMAS[family]) < 2.6  # GHz
    fp32_fmas = 64 if family in ("A100", "T4") else 128
    assert 1.3 < spec.fp32 * 1e3 / (spec.num_units * 2 * fp32_fmas) < 2.6


@pytest.mark.parametrize(
    ("name", "bf16", "fp8"),
    [
        ("H100 SXM", 989.4, 1978.9),
        ("H200", 989.4, 1978.9),
        ("B200", 2250, 4500),
        ("GB200", 2500, 5000),
        ("L4", 121, 242.5),
        ("RTX 4090", 165.2, 330.3),
        ("MI300X", 1307.4, 2614.9),
    ],
)
def test_peaks_are_dense(name: str, bf16: float, fp8: float) -> None:
    assert (row(name).bf16, row(name).fp8) == (bf16, fp8)


def test_what_hardware_lacks_is_missing_not_zero() -> None:
    assert row("T4").bf16 is None
    assert "matrix_bf16" not in row("T4").ceilings()
    assert "matrix_fp8" not in row("A100 SXM 80GB").ceilings()
    assert "link_bandwidth" not in row("L40S").ceilings()


def test_host_link_is_half_of_both_directions() -> None:
    promised = row("H200").ceilings()
    assert promised["h2d_pinned"].value * 2 == promised["pcie_bandwidth"].value == 128e9
