"""cuda.cu of skinny_linear and of quantized_linear without a GPU: the sources themselves, run
thread for thread on the CPU by tests/cuda_on_cpu.h, against the references.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from emulated import built, poison_results, still_written
from torch import Tensor

from ridgeline.errors import UnsupportedError
from ridgeline.kernels.agreement import compare
from ridgeline.kernels.op import Case, Op, OpInputs
from ridgeline.kernels.quantized_linear import op as quantized
from ridgeline.kernels.skinny_linear import cuda
from ridgeline.kernels.skinny_linear import op as plain
from ridgeline.kernels.skinny_linear.cuda_space import (
    ONE_ROW_KINDS,
    OneRow,
    WorkSplit,
    default_cuda_config,
    fits_one_row,
    one_row_configs,
)
from ridgeline.kernels.targets import TARGETS

CPU = torch.device("cpu")
BF16, FP16 = torch.bfloat16, torch.float16
BUILDS = {"matrix units": ("__CUDA_ARCH__=900",), "portable": ("RIDGELINE_PORTABLE",)}
OPS = ("skinny_linear", "quantized_linear")
ONE_SM = replace(TARGETS["sm_90"], num_units=1)  # so that a team makes several tiles

PLAIN = None
FORMS: dict[str, quantized.QuantizedForm | None] = {
    "plain": PLAIN,
    "int8 words": quantized.W8A16,
    "int8 rows": quantized.W8A16_ROWS,
    "int4 g128": quantized.W4A16,
    "int4 g128 zeros": replace(quantized.W4A16, zeros=True),
    "int4 g64": replace(quantized.W4A16_64, zeros=False),
    "int4 g64 zeros": quantized.W4A16_64,
    "int4 g32": replace(quantized.W4A16_32, zeros=False),
    "int4 g32 zeros": quantized.W4A16_32,
    "fp8 rows": quantized.FP8_ROW,
    "fp8 tensor": quantized.FP8_TENSOR,
    "fp8 blocks": quantized.FP8_BLOCK,
    "int8 codes": quantized.W8A8,
    "fp8 with 16 bits": quantized.FP8A16,
}
# Depths that end within a step of 256 bytes a row, and their halves within one of 128 bytes.
DEPTH = {"plain": 1008, "int8": 1056, "int4 g128": 1280, "int4 g64": 1152, "int4 g32": 1088}
FEW_ROWS = [
    (1, WorkSplit(1, 2, 2, blocks=1)),
    (3, WorkSplit(2, 4, 3, teams=2, blocks=1)),
    (4, WorkSplit(1, 4, 4, teams=4, blocks=2)),
]
MANY_ROWS = [
    (5, WorkSplit(warps=4, stages=2, splits=3)),
    (16, WorkSplit(warps=8, stages=3, splits=1)),
    (17, WorkSplit(warps=4, stages=4, splits=8)),
    (33, WorkSplit(warps=4, stages=2, splits=2)),
]


ONE_ROW = [
    form for form in FORMS if form.startswith(("int8 words", "int8 rows", "int4", "fp8 with"))
]
# int4 needs a multiple of four outputs a block, as its scales are copied.
ONE_ROW_WAYS = [OneRow(2, 4, 1), OneRow(2, 4, 2, 4), OneRow(4, 6, 1), OneRow(4, 2, 2, 4)]


def in_turns(forms: Iterable[str]) -> list[Any]:
    """Each form in both dtypes; in the first tier in one of them, the next form in the other."""
    return [
        pytest.param(form, dtype, marks=pytest.mark.slow if (number + turn) % 2 else ())
        for number, form in enumerate(forms)
        for turn, dtype in enumerate((BF16, FP16))
    ]


def depth_of(form: str) -> int:
    return next((depth for start, depth in DEPTH.items() if form.startswith(start)), 1120)


def case_of(form: str, shape: tuple[int, int, int], *rest: Any) -> tuple[Op, Case]:
    chosen = FORMS[form]
    if chosen is None:
        return plain.OP, plain.case(shape, *rest)
    return quantized.OP, quantized.case(chosen, shape, *rest)


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, ctypes.CDLL]]:
    return {op: built(op, BUILDS, tmp_path_factory.mktemp(op)) for op in OPS}


@pytest.fixture(autouse=True)
def on_cpu(builds: dict[str, dict[str, ctypes.CDLL]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A chip with one SM, and results that hold NaN until they are written."""

    def chosen(op: str, defines: tuple[str, ...] = ()) -> ctypes.CDLL:
        return builds[op]["portable" if defines else "matrix units"]

    monkeypatch.setattr(cuda, "library", chosen)
    monkeypatch.setattr(cuda, "target_of", lambda _: ONE_SM)
    poison_results(monkeypatch)


def inputs_of(case: Case) -> OpInputs:
    return case.make(CPU, torch.Generator().manual_seed(0))


def check(op: Op, case: Case, way: WorkSplit | OneRow | None, variant: str = "cuda") -> Tensor:
    inputs = inputs_of(case) | {"config": way}
    found = op.variants[variant](**inputs)
    compare(found, op.reference(**inputs), case)
    assert isinstance(found, Tensor)
    return found


@pytest.mark.parametrize(
    ("form", "dtype"), in_turns(form for form in FORMS if form != "fp8 with 16 bits")
)
def test_few_rows(form: str, dtype: torch.dtype) -> None:
    for num_rows, way in FEW_ROWS:
        outputs = 80 if form.startswith("int4") else 75  # not in whole tiles, or not in whole pairs
        check(*case_of(form, (num_rows, outputs, depth_of(form)), dtype, "bias"), way)


@pytest.mark.parametrize(
    ("form", "dtype"),
    in_turns(form for form in FORMS if form not in ("fp8 blocks", "fp8 with 16 bits")),
)
def test_many_rows(form: str, dtype: torch.dtype) -> None:
    for num_rows, way in MANY_ROWS if dtype == BF16 else MANY_ROWS[1::2]:
        outputs = 144 if form.startswith("int4") else 141
        check(*case_of(form, (num_rows, outputs, depth_of(form) // 2), dtype, "residual"), way)


@pytest.mark.parametrize(("form", "dtype"), in_turns(ONE_ROW))
def test_one_row(form: str, dtype: torch.dtype) -> None:
    """Depths that end within a step of a warp, outputs within what one takes at a time."""
    for way, depth in zip(ONE_ROW_WAYS, (1, 2, 3, 5), strict=True):
        outputs = 80 if form.startswith("int4") else 75
        shape = (1, outputs, depth * depth_of(form))
        check(*case_of(form, shape, dtype, "norm bias residual"), way)
    gated = case_of(form, (1, 48, depth_of(form)), dtype, "norm", "silu")
    plain_x = case_of(form, (1, 40 if form[:4] != "int4" else 48, depth_of(form)), dtype, "")
    for way in ONE_ROW_WAYS:
        check(*gated, way)
        check(*plain_x, way)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_one_row_of_no_number_is_not_taken_for_one(value: float) -> None:
    for form in ONE_ROW:
        op, case = case_of(form, (1, 48, depth_of(form)), BF16)
        inputs = inputs_of(case) | {"config": OneRow(2, 4, 1)}
        if value == 0.0:
            inputs["x_MD"].zero_()
            assert (op.variants["cuda"](**inputs) == 0).all()
        else:
            inputs["x_MD"][0, 7] = value
            assert not op.variants["cuda"](**inputs).isfinite().any()


@pytest.mark.parametrize("form", ["int8 words", "int4 g128 zeros", "fp8 with 16 bits"])
def test_a_warp_makes_more_outputs_than_it_has_lanes(form: str) -> None:
    """They are finished 32 at a time; the last ones of a warp are not that many."""
    for way in (OneRow(2, 4, 1, 4), OneRow(4, 2, 1, 4)):
        check(*case_of(form, (1, 336, 256), BF16, "bias residual"), way)
        check(*case_of(form, (1, 336, 256), BF16, "norm", "silu"), way)


def test_one_row_takes_x_in_16_bits_as_it_is() -> None:
    op, case = case_of("int8 words", (1, 48, 256))
    with pytest.raises(UnsupportedError, match="16-bit x without a scale"):
        op.variants["cuda"](**inputs_of(case) | {"x_scale": torch.ones(1)}, config=OneRow(2, 4, 1))


def test_shared_memory_is_asked_for_in_time() -> None:
    """A ring of 32 KB and 16 of x, with a little that the kernel has by itself: more than 48 KB."""
    check(*case_of("fp8 with 16 bits", (1, 32, 4096)), OneRow(2, 8, 1, 4))


def test_one_row_has_ways_for_every_depth_it_takes() -> None:
    for depth in (512, 4096, 14336, 28672):
        for kind in ("int8 words", "int4", "fp8 weights"):
            assert len(one_row_configs(kind, depth)) >= 3
    op, case = case_of("int8 words", (2, 48, 256))
    with pytest.raises(UnsupportedError, match="does not fit the kernel for one row"):
        op.variants["cuda"](**inputs_of(case), config=OneRow())


def test_one_row_begins_with_a_way_that_has_room() -> None:
    """A 70B model's down projection in fp8: x alone takes half of the shared memory."""
    depths = [512, 4096, 14336, 16384, 28672, 29568, 32768, 53248, 65536]
    taken = [(kind, depth) for kind in ONE_ROW_KINDS for depth in depths
             if fits_one_row(kind, 1, depth)]  # fmt: skip
    assert ("fp8 weights", 28672) in taken
    for kind, depth in taken:
        assert default_cuda_config(kind, 1, 8192, depth, gated=False) in one_row_configs(
            kind, depth
        )


@pytest.mark.parametrize("form", FORMS)
def test_portable(form: str) -> None:
    rows = 1 if form == "fp8 with 16 bits" else 4
    for num_rows, dtype, extras in ((1, BF16, "bias"), (rows, FP16, "residual strided")):
        shape = (num_rows, 48, depth_of(form))
        check(*case_of(form, shape, dtype, extras), None, "portable")


@pytest.mark.parametrize("form", ["plain", "int8 words", "int8 rows", "int4 g128", "int4 g32"])
def test_norm_and_residual(form: str) -> None:
    for dtype, way in ((BF16, WorkSplit(1, 4, 2, teams=2, blocks=1)), (FP16, WorkSplit(2, 8, 2))):
        shape = (4, 48, depth_of(form))
        check(*case_of(form, shape, dtype, "norm bias residual strided"), way)
    check(*case_of(form, (2, 48, depth_of(form)), BF16, "norm"), None, "portable")


@pytest.mark.sweep(keep=8)  # each activation and each form
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize(
    "form", ["plain", "int8 words", "int4 g128 zeros", "fp8 rows", "fp8 blocks"]
)
def test_gated(form: str, activation: str) -> None:
    """Gates and ups are tiles of the same warp; 40 outputs end within a tile of each."""
    outputs = 48 if form.startswith("int4") else 40
    normed = "" if form.startswith("fp8") else "norm"
    few = case_of(form, (2, outputs, depth_of(form)), BF16, normed, activation)
    check(*few, WorkSplit(2, 2, 3, teams=2, blocks=1))
    if form != "fp8 blocks":
        many = case_of(form, (9, outputs, depth_of(form)), BF16, "bias residual", activation)
        check(*many, WorkSplit(warps=4, stages=3, splits=3))
    check(*few, None, "portable")


def test_all_64_rows() -> None:
    for form, splits, warps in (("plain", 8, 4), ("int8 words", 3, 8), ("int4 g128", 1, 4)):
        shape = (64, 64, 384 if form.startswith("int4") else 400)
        check(*case_of(form, shape, BF16, "strided bias"), WorkSplit(warps=warps, splits=splits))


def test_a_result_is_left_where_it_is_wanted() -> None:
    op, case = case_of("plain", (3, 64, 64))
    buffer = torch.full((4, 64), float("nan"), dtype=BF16)
    out = buffer[:3]
    found = op.variants["cuda"](**inputs_of(case), out_MO=out)
    assert found is out
    compare(out, op.reference(**inputs_of(case)), case)
    assert buffer[3].isnan().all()


def test_more_warps_than_steps() -> None:
    """Some then have nothing to add, and their sums must be zero."""
    check(*case_of("int4 g128", (1, 32, 128)), WorkSplit(1, 16, 2, blocks=1))
    check(*case_of("plain", (3, 33, 8)), WorkSplit(2, 8, 4, blocks=1))
    check(*case_of("plain", (8, 64, 64)), WorkSplit(warps=4, stages=3, splits=8))


@pytest.mark.parametrize("op", [plain.OP, quantized.OP], ids=lambda op: op.name)
def test_the_ops_own_cases(op: Op) -> None:
    """As they would be cut without measurement; what the kernels do not do, they refuse."""
    refused = 0
    for case in op.small_cases:
        for variant in ("cuda", "portable"):
            try:
                check(op, case, None, variant)
            except UnsupportedError:
                refused += 1
    assert refused < len(op.small_cases) * 2


@pytest.mark.parametrize(
    "form", ["plain", "int4 g128 zeros", "int4 g32", "int8 codes", "fp8 blocks"]
)
def test_a_row_is_the_same_bits_beside_any_others(form: str) -> None:
    op, case = case_of(form, (4, 48, depth_of(form)), BF16, "residual")
    inputs = inputs_of(case) | {"config": WorkSplit(1, 4, 2, blocks=1)}
    together = op.variants["cuda"](**inputs)
    of_rows = [name for name in inputs if name in ("x_MD", "x_scale", "residual_MO")]
    alone = {name: inputs[name][2:3].contiguous() for name in of_rows}
    assert torch.equal(op.variants["cuda"](**inputs | alone), together[2:3])


@pytest.mark.parametrize(
    "way", [WorkSplit(1, 4, 2, blocks=1), WorkSplit(warps=4, stages=3, splits=2), OneRow(2, 4, 1)]
)
@pytest.mark.parametrize("form", ["plain", "int4 g128", "fp8 rows"])
def test_the_kernel_before_is_waited_for(
    form: str, way: WorkSplit | OneRow, builds: dict[str, dict[str, ctypes.CDLL]]
) -> None:
    """What it writes, x and the residual, is NaN until a block waits."""
    num_rows = 3
    if isinstance(way, OneRow):
        num_rows, form = 1, {"plain": "int8 words", "fp8 rows": "fp8 with 16 bits"}.get(form, form)
    op, case = case_of(form, (num_rows, 64, depth_of(form)), BF16, "residual")
    inputs = inputs_of(case) | {"config": way}
    calm = op.variants["cuda"](**inputs)
    written = [(inputs["x_MD"], ...), (inputs["residual_MO"], ...)]
    with still_written(builds[op.name]["matrix units"], written):
        found = op.variants["cuda"](**inputs)
    assert torch.equal(found, calm)
