"""Vendors' profilers: what they write is read, and that they are absent is said in a line. The
samples are written by hand, in the form of each tool.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ridgeline.profiling.tracing import counters
from ridgeline.profiling.tracing.counters import (
    Absent,
    Counted,
    count,
    parse_ncu,
    parse_nsys,
    parse_rocprof,
    short,
)

NCU = """\
==PROF== Connected to process 4711 (/usr/bin/python3.12)
==PROF== Profiling "_decode_kernel" - 0: 0%....50%....100% - 8 passes
==PROF== Disconnected from process 4711
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid \
Size","Device","CC","dram__throughput.avg.pct_of_peak_sustained_elapsed",\
"sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",\
"sm__warps_active.avg.pct_of_peak_sustained_active"
"","","","","","","","","","","","%","%","%"
"0","4711","python3.12","127.0.0.1","_decode_kernel","1","7","(128, 1, 1)","(264, 1, 1)","0",\
"9.0","80.5","2.25","25.00"
"1","4711","python3.12","127.0.0.1","_decode_kernel","1","7","(128, 1, 1)","(264, 1, 1)","0",\
"9.0","84.5","1.75","35.00"
"2","4711","python3.12","127.0.0.1","void cublasLt::gemm<float, 3>(float const*, int)","1","7",\
"(384, 1, 1)","(132, 1, 1)","0","9.0","31.0","1,0.0","n/a"
"""
NSYS = """\
Processing [trace.sqlite] with [cuda_gpu_trace.py]...
Start (ns),Duration (ns),CorrId,GrdX,GrdY,GrdZ,BlkX,BlkY,BlkZ,Reg/Trd,StcSMem (MB),DymSMem (MB),\
Bytes (MB),Throughput (MB/s),SrcMemKd,DstMemKd,Device,Ctx,GreenCtx,Strm,Name
1200,31000,88,264,1,1,128,1,1,168,0.000,0.049,,,,,NVIDIA H200 (0),1,,7,_decode_kernel
45000,1100,91,,,,,,,,,,0.004,3723.6,Pinned,Device,NVIDIA H200 (0),1,,7,[CUDA memcpy HtoD]
50000,33000,92,264,1,1,128,1,1,168,0.000,0.049,,,,,NVIDIA H200 (0),1,,7,_decode_kernel
"""
ROCPROF = """\
"Correlation_Id","Dispatch_Id","Agent_Id","Queue_Id","Process_Id","Thread_Id","Grid_Size",\
"Kernel_Id","Kernel_Name","Workgroup_Size","LDS_Block_Size","Scratch_Size","VGPR_Count",\
"SGPR_Count","Counter_Name","Counter_Value","Start_Timestamp","End_Timestamp"
1,1,"Agent 4",1,99,99,33792,12,"_decode_kernel.kd",256,0,0,64,32,"OccupancyPercent",41.0,10,20
1,1,"Agent 4",1,99,99,33792,12,"_decode_kernel.kd",256,0,0,64,32,"MfmaUtil",12.5,10,20
2,2,"Agent 4",1,99,99,33792,13,"Cijk_Ailk(float)",256,0,0,64,32,"MemUnitBusy",77.0,30,40
2,2,"Agent 4",1,99,99,33792,13,"Cijk_Ailk(float)",256,0,0,64,32,"GRBM_COUNT",1e6,30,40
"""


def test_ncu() -> None:
    rows = parse_ncu(NCU)
    assert rows[0] == ("_decode_kernel", {"dram": 0.805, "tensor": 0.0225, "occupancy": 0.25})
    assert rows[2][1] == {"dram": 0.31, "tensor": 0.1}  # 1,0.0 is ten, n/a is nothing
    assert len(rows) == 3  # units are no kernel
    assert parse_ncu("==ERROR== no kernels were profiled") == []


def test_nsys() -> None:
    rows = parse_nsys(NSYS)
    assert [name for name, _ in rows] == ["_decode_kernel"] * 2
    assert rows[0][1] == {"seconds": 31e-6, "registers": 168.0}


def test_rocprof() -> None:
    rows = dict(parse_rocprof(ROCPROF))
    assert rows["_decode_kernel.kd"] == {"occupancy": 0.41, "tensor": 0.125}
    assert rows["Cijk_Ailk(float)"] == {"dram": 0.77}
    assert parse_rocprof("") == []


def test_names_meet_whatever_a_tool_writes_around_them() -> None:
    assert short("void cublasLt::gemm<float, 3>(float const*, int)") == "cublasLt::gemm"
    assert short("_decode_kernel") == "_decode_kernel"


class Tools:
    """Stands for what is installed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **said: tuple[int, str, str]) -> None:
        self.said, self.ran = said, []  # type: ignore[var-annotated]
        monkeypatch.setattr(counters.shutil, "which", lambda name: name if name in said else None)
        monkeypatch.setattr(counters, "_finished", self.run)

    def run(self, command: Sequence[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.ran.append(list(command))
        code, out, err = self.said[command[0]]
        if "-d" in command and not code:
            (Path(command[command.index("-d") + 1]) / "found_counter_collection.csv").write_text(
                out
            )
        return subprocess.CompletedProcess(list(command), code, out, err)


def test_the_best_tool_is_run_and_kernels_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    tools = Tools(monkeypatch, ncu=(0, NCU, ""), nsys=(0, NSYS, ""))
    found = count(["ridgeline", "profile", "demo"], "cuda")
    assert isinstance(found, Counted)
    assert found.tool == "ncu"
    assert found.of("_decode_kernel")["dram"] == pytest.approx(0.825)  # of two launches
    assert found.of("_decode_kernel")["occupancy"] == pytest.approx(0.3)
    assert found.of("void cublasLt::gemm<float, 9>(int)")["tensor"] == pytest.approx(0.1)
    assert found.of("unheard of") == {}
    assert tools.ran[0][-3:] == ["ridgeline", "profile", "demo"]
    assert "--graph-profiling" in tools.ran[0]


def test_the_next_tool_helps_where_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    Tools(monkeypatch, ncu=(1, "", "==ERROR== no driver"), nsys=(0, NSYS, ""))
    found = count(["x"], "cuda")
    assert isinstance(found, Counted)
    assert found.tool == "nsys"
    assert found.of("_decode_kernel") == {"seconds": pytest.approx(32e-6), "registers": 168.0}


def test_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    Tools(monkeypatch, rocprofv3=(0, ROCPROF, ""))
    found = count(["x"], "rocm")
    assert isinstance(found, Counted)
    assert found.of("_decode_kernel.kd")["occupancy"] == 0.41


@pytest.mark.parametrize(
    ("said", "device", "reason"),
    [
        ({}, "cpu", "the device is a CPU"),
        ({}, "cuda", "ncu and nsys are not installed"),
        ({}, "rocm", "rocprofv3 are not installed"),
        ({"ncu": (1, "==ERROR== ERR_NVGPUCTRPERM - The user", "")}, "cuda", "ERR_NVGPUCTRPERM"),
        ({"ncu": (1, "", "first\nout of cheese")}, "cuda", "ncu failed: out of cheese"),
        ({"ncu": (0, "nothing", "")}, "cuda", "named no kernel"),
    ],
)
def test_without_counters_one_line_says_why(
    monkeypatch: pytest.MonkeyPatch, said: Any, device: str, reason: str
) -> None:
    Tools(monkeypatch, **said)
    found = count(["x"], device)
    assert isinstance(found, Absent)
    assert reason in found.reason
    assert "\n" not in found.reason


def test_a_tool_that_hangs_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    Tools(monkeypatch, ncu=(0, "", ""))

    def hang(command: Sequence[str], **_: Any) -> None:
        raise subprocess.TimeoutExpired(list(command), 1)

    monkeypatch.setattr(counters, "_finished", hang)
    found = count(["x"], "cuda")
    assert isinstance(found, Absent)
    assert "longer than" in found.reason


def test_a_tool_that_takes_too_long_ends_with_all_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counters, "TIMEOUT_S", 0.5)
    number = tmp_path / "pid"
    found = counters._run(["sh", "-c", f"sleep 60 & echo $! > {number}; wait"])
    assert isinstance(found, Absent)
    assert "longer than 0.5 s" in found.reason
    state = Path(f"/proc/{number.read_text().strip()}/stat")
    for _ in range(100):  # it is gone, or waits for somebody to count it
        if not state.exists() or state.read_text().split()[2] == "Z":
            return
        time.sleep(0.02)
    pytest.fail("what the tool started goes on")
