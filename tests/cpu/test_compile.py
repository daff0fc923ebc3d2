"""Every op compiles for NVIDIA and AMD chips that are not here, without spills and within their
memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.hipify import hipify_python

import ridgeline
from ridgeline.kernels.compile import Compiled, argument_type
from ridgeline.kernels.extension import (
    compile_source,
    find_nvcc,
    parse_resources,
    source,
    sources,
)
from ridgeline.kernels.launch import recording, target_of
from ridgeline.kernels.registry import NAMES
from ridgeline.kernels.targets import TARGETS, Target

PROMISED = ("sm_80", "sm_90", "sm_100", "gfx942", "gfx950")


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """One configuration of each op for each target, in a process without the interpreter."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "ridgeline", "kernels", "compile", "--one", "--json"],
        cwd=Path(ridgeline.__file__).parent.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    return found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("target", PROMISED)
def test_it_compiles_and_fits(name: str, target: str, rows: list[dict[str, Any]]) -> None:
    own = [row for row in rows if row["op"] == name and row["target"] == target]
    assert own
    assert [row["problem"] for row in own if row["problem"]] == []


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("name", sources())
def test_cuda_source_compiles_without_spills(name: str, target: str) -> None:
    if find_nvcc() is None:
        pytest.skip("no nvcc here")
    found = compile_source(name, TARGETS[target])
    assert len(found) >= 4
    assert {kernel.kernel: kernel.problem for kernel in found if kernel.problem} == {}


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
    copy = tmp_path / "cuda.cu"
    copy.write_text(source(name).read_text())
    hipify_python.hipify(
        project_directory=str(tmp_path),
        output_directory=str(tmp_path),
        includes=[f"{tmp_path}/*"],
        extra_files=[str(copy)],
        is_pytorch_extension=True,
    )
    (translated,) = tmp_path.glob("*.hip")
    text = translated.read_text()
    assert "hip/hip_runtime.h" in text
    assert "hipStream_t" in text
    assert "cudaStream_t" not in text


def test_spills_and_too_much_memory_are_problems() -> None:
    assert Compiled("k", 255, 904, 0, 1000).problem == "904 bytes spilled"
    assert "1001 bytes of shared memory" in str(Compiled("k", 32, 0, 1001, 1000).problem)
    assert Compiled("k", 32, 0, 1000, 1000).problem is None


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
