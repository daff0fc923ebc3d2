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

import ridgeline
from ridgeline.kernels.compile import Compiled, argument_type
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
