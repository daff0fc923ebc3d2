"""Every op compiles for NVIDIA and AMD chips that are not here, without spills and within their
memory.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated import translated
from rich.console import Console

import ridgeline
from ridgeline.cli.kernels import compile_rows, exit_code, finished, render
from ridgeline.kernels.compile import (
    CompiledKernel,
    argument_type,
    handles_bytes,
    recorded_calls,
    undefined_reads,
)
from ridgeline.kernels.extension import (
    compile_source,
    find_nvcc,
    parse_resources,
    sources,
)
from ridgeline.kernels.launch import recording, target_of
from ridgeline.kernels.registry import NAMES, get_op
from ridgeline.kernels.targets import TARGETS, Target
from ridgeline.lessons import LESSONS

PROMISED = ("sm_80", "sm_90", "sm_100", "gfx942", "gfx950")
CUDA_SOURCES_FOR = ("sm_80", "sm_90")
FIRST_TIER = ("sm_90", "gfx942")


def in_first_tier(names: tuple[str, ...]) -> list[Any]:
    """One chip of each vendor; the others in `make test-all`."""
    return [
        name if name in FIRST_TIER else pytest.param(name, marks=pytest.mark.slow) for name in names
    ]


def collected(request: pytest.FixtureRequest, test: str) -> list[tuple[str, str]]:
    """Name and target of each such test that this run has collected."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    parameters = [item.callspec.params for item in items if item.originalname == test]
    return [(each["name"], each["target"]) for each in parameters]


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """One configuration of each op for each target, of those that this run has collected, in
    processes without the interpreter: one for NVIDIA's chips, one for AMD's.
    """
    pairs = collected(request, "test_it_compiles_and_fits")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    running = []
    for vendor in ("sm", "gfx"):
        own = [(name, target) for name, target in pairs if target.startswith(vendor)]
        if own:
            names, targets = ({pair[part]: None for pair in own} for part in (0, 1))
            command = [sys.executable, "-m", "ridgeline", "kernels", "compile", "--one", "--json"]
            command += [*(f"--op={name}" for name in names), "--target", ",".join(targets)]
            running.append(
                subprocess.Popen(
                    command,
                    cwd=Path(ridgeline.__file__).parent.parent,
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
    result: list[dict[str, Any]] = []
    for process in running:
        output, errors = process.communicate()
        assert output, errors
        result += json.loads(output)["rows"]
    assert {row["op"] for row in result} == {name for name, _ in pairs}, "no more than is asked for"
    return result


@pytest.mark.parametrize("name", [*NAMES, *LESSONS])
@pytest.mark.parametrize("target", in_first_tier(PROMISED))
def test_it_compiles_and_fits(name: str, target: str, rows: list[dict[str, Any]]) -> None:
    own = [row for row in rows if row["op"] == name and row["target"] == target]
    assert own
    assert [row["problem"] for row in own if row["problem"]] == []


@pytest.fixture(scope="module")
def by_nvcc(
    request: pytest.FixtureRequest,
) -> Iterator[dict[tuple[str, str], Future[list[CompiledKernel]]]]:
    """Each source for each of its targets, two at a time: one takes half a minute."""
    if find_nvcc() is None:
        pytest.skip("no nvcc here")
    pool = ThreadPoolExecutor(2)
    yield {
        (name, target): pool.submit(compile_source, name, TARGETS[target])
        for name, target in collected(request, "test_cuda_source_compiles_without_spills")
    }
    pool.shutdown(cancel_futures=True)


@pytest.mark.slow  # nvcc takes half a minute for each source and target
@pytest.mark.parametrize("target", CUDA_SOURCES_FOR)
@pytest.mark.parametrize("name", sources())
def test_cuda_source_compiles_without_spills(
    name: str, target: str, by_nvcc: dict[tuple[str, str], Future[list[CompiledKernel]]]
) -> None:
    kernels = by_nvcc[name, target].result()
    assert kernels
    assert {kernel.kernel: kernel.problem for kernel in kernels if kernel.problem} == {}


def test_what_a_target_does_not_have_is_not_called_ok() -> None:
    op = replace(get_op("rms_norm"), supports=lambda *_: False)
    document = finished("compile", list(compile_rows(op, TARGETS["gfx942"], only_one=True)))
    console = Console(file=StringIO(), width=80)
    render(document, console)
    text = console.file.getvalue()
    assert re.search(r"rms_norm +gfx942 +not supported", text)
    assert "ok" not in text
    assert "0 done, 0 failed, 1 skipped" in text
    assert exit_code(document) == 0


def test_what_ptxas_reports_is_read() -> None:
    report = """\
ptxas info    : Compiling entry function '_Z1kPf' for 'sm_90'
ptxas info    : Function properties for _Z1kPf
    8 bytes stack frame, 4 bytes spill stores, 2 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 8 bytes cumulative stack size, 256 bytes smem
ptxas info    : Compiling entry function '_Z1mPf' for 'sm_90'
ptxas info    : Function properties for _Z1mPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, used 0 barriers
"""
    first, second = parse_resources(report, TARGETS["sm_90"])
    assert (first.registers, first.spilled_bytes, first.shared_bytes) == (40, 14, 256)
    assert (second.kernel, second.registers, second.problem) == ("_Z1mPf", 12, None)


@pytest.mark.parametrize("name", sources())
def test_cuda_source_goes_through_hipify(name: str, tmp_path: Path) -> None:
    """ROCm builds translate the source; what is left of CUDA's names would not compile there."""
    text = translated(name, tmp_path)
    assert "hip/hip_runtime.h" in text
    assert "hipStream_t" in text
    assert "cudaStream_t" not in text


def test_spills_and_too_much_memory_are_problems() -> None:
    assert CompiledKernel("k", 255, 904, 0, 1000).problem == "904 bytes spilled"
    assert "1001 bytes of shared memory" in str(CompiledKernel("k", 32, 0, 1001, 1000).problem)
    assert CompiledKernel("k", 32, 0, 1000, 1000).problem is None


def test_a_value_that_the_assembler_lost_is_a_problem() -> None:
    """R1 is the stack's pointer; as the last operand of PRMT it only fills bytes."""
    lost = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;          /* 0x00000a00ff017b82 */
        /*1770*/                   LOP3.LUT R36, R1, 0xffff, RZ, 0xc0, !PT ;
        /*1880*/              @!P0 PRMT R15, R1, 0x7604, R1 ;
        /*1930*/                   STS.U16 [R14+UR4], R15 ;
        /*21e0*/                   PRMT R46, R22, 0x3340, R1 ;
"""
    assert undefined_reads(lost) == 2
    problem = CompiledKernel("k", 32, 0, 0, 1000, undefined_reads=2).problem
    assert problem == "2 instructions read what nothing has written"


@pytest.mark.parametrize("name", NAMES)
def test_no_constant_is_smaller_than_fp32s_normal_numbers(name: str) -> None:
    """Triton 3.6 takes such a constant for fp64, and what is computed with it."""
    op = get_op(name)
    for case in op.compile_cases[:8]:
        for call in recorded_calls(op, case, TARGETS["sm_90"]):
            numbers = [each for each in call.constants.values() if isinstance(each, float)]
            assert all(abs(each) >= 2.0**-126 for each in numbers if each), call.kernel.__name__


@pytest.mark.parametrize(
    ("line", "so"),
    [
        ("prmt.b32 %r12, %r9, %r10, 0x5410U;", True),
        ("cvt.rn.f16x2.e4m3x2 %r4, %rs1;", True),
        ("ld.global.v4.b8 { %rs1, %rs2, %rs3, %rs4 }, [ %rd1 + 0 ];", True),
        ("cvt.s16.s8 %rs5, %rs4;", True),
        ("ld.global.v2.b32 { %r1, %r2 }, [ %rd1 + 0 ];", False),
        ("cvt.rn.bf16x2.f32 %r7, %r5, %r6;", False),
        (".extern .shared .align 16 .b8 global_smem[];\n.b8 101", False),
    ],
)
def test_kernels_that_handle_bytes_are_disassembled(line: str, so: bool) -> None:
    assert handles_bytes(line) is so


def test_arguments_get_the_types_a_launch_gives_them() -> None:
    assert argument_type(torch.empty(1, dtype=torch.bfloat16)) == "*bf16"
    assert argument_type(7) == "i32"
    assert argument_type(2**31) == "i64"
    assert argument_type(1) == argument_type(None) == "constexpr"
    assert argument_type(0.5) == "fp32"


def test_a_recorded_launcher_sees_the_target() -> None:
    with recording(TARGETS["gfx942"]):
        assert target_of(torch.empty(0)).fp8 == torch.float8_e4m3fnuz
    assert target_of(torch.empty(0)).name == "interpreter"


def test_an_unknown_chip_is_taken_for_the_nearest_older_one() -> None:
    assert Target.like("sm_103").shared_bytes == TARGETS["sm_100"].shared_bytes
    assert Target.like("sm_86").fp8 is None
    assert Target.like("gfx1100").fp8 is None
