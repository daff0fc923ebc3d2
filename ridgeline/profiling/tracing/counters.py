"""Hardware counters from the vendors' profilers, where one is installed: occupancy, use of DRAM and
of the tensor pipe, kernel by kernel.

The command that is profiled runs once more as a child of the tool, with one step of each kind
between two marks; its CSV is read, and kernels are found again by their names. Without a tool, or
where the machine hides its counters, one line says so, and the profile goes on without.

    counted = count(["ridgeline", "profile", "demo", …], hardware)
    counted.of("_decode_kernel")        # {"occupancy": 0.48, "dram": 0.83, "tensor": 0.1}
"""

from __future__ import annotations

import csv
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

from ridgeline.parallel.starting.child import child_environment

TIMEOUT_S = 900  # counters are read in several passes over each kernel
NCU_METRICS = {  # Nsight Compute's name -> ours; percent
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": "tensor",
}
ROCM_COUNTERS = {  # rocprofv3's name -> ours; percent
    "OccupancyPercent": "occupancy",
    "MemUnitBusy": "dram",
    "MfmaUtil": "tensor",
}
NVIDIA_TOOLS, AMD_TOOLS = ("ncu", "nsys"), ("rocprofv3",)
CounterValues = dict[str, float]


@dataclass(frozen=True)
class Counted:
    """What a tool said, by kernel."""

    tool: str
    figures: dict[str, CounterValues] = field(default_factory=dict)  # by `short`: shares of 0 to 1

    def of(self, name: str) -> CounterValues:
        return self.figures.get(short(name), {})


@dataclass(frozen=True)
class Absent:
    """Why there are none, in one line."""

    reason: str


def count(command: Sequence[str], device_type: str) -> Counted | Absent:
    """Run `command`, which steps between marks, under the best tool that is here."""
    if device_type == "cpu":
        return Absent("counters are a GPU's; the device is a CPU")
    wanted = AMD_TOOLS if device_type == "rocm" else NVIDIA_TOOLS
    tools = [name for name in wanted if shutil.which(name)]
    if not tools:
        return Absent(f"no counters: {' and '.join(wanted)} are not installed")
    reasons = []
    for name in tools:
        result = TOOLS[name](command)
        if isinstance(result, Counted):
            return result
        reasons.append(result.reason)
    return Absent("; ".join(reasons))


def _ncu(command: Sequence[str]) -> Counted | Absent:
    flags = ["--csv", "--page", "raw", "--profile-from-start", "off", "--graph-profiling", "node"]
    flags += ["--target-processes", "all", "--metrics", ",".join(NCU_METRICS)]
    done = _run(["ncu", *flags, *command])
    if isinstance(done, Absent):
        return done
    if "ERR_NVGPUCTRPERM" in done:
        return Absent("no counters: this machine does not let ncu read them (ERR_NVGPUCTRPERM)")
    return _counted("ncu", parse_ncu(done))


def _nsys(command: Sequence[str]) -> Counted | Absent:
    """Times and registers only: Nsight Systems has no counters of single kernels."""
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "trace")
        flags = ["--trace=cuda", "--cuda-graph-trace=node", "--capture-range=cudaProfilerApi"]
        done = _run(["nsys", "profile", *flags, "--force-overwrite=true", "-o", file, *command])
        if isinstance(done, Absent):
            return done
        stats = ["nsys", "stats", "--report", "cuda_gpu_trace", "--format", "csv", "--output", "-"]
        text = _run([*stats, f"{file}.nsys-rep"])
    return text if isinstance(text, Absent) else _counted("nsys", parse_nsys(text))


def _rocprof(command: Sequence[str]) -> Counted | Absent:
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--pmc", *ROCM_COUNTERS, "--output-format", "csv", "-d", folder, "-o", "found"]
        done = _run(["rocprofv3", *flags, "--", *command])
        if isinstance(done, Absent):
            return done
        files = sorted(Path(folder).rglob("*counter_collection.csv"))
        text = "".join(file.read_text(encoding="utf-8") for file in files[:1])
    return _counted("rocprofv3", parse_rocprof(text))


TOOLS: dict[str, Callable[[Sequence[str]], Counted | Absent]] = {
    "ncu": _ncu,
    "nsys": _nsys,
    "rocprofv3": _rocprof,
}


def _counted(tool: str, rows: Iterable[tuple[str, CounterValues]]) -> Counted | Absent:
    """Means over the launches of each kernel."""
    by_name: dict[str, list[CounterValues]] = {}
    for name, figures in rows:
        by_name.setdefault(short(name), []).append(figures)
    if not by_name:
        return Absent(f"no counters: {tool} ran and named no kernel")
    result = {
        name: {key: mean(each[key] for each in rows if key in each) for key in set().union(*rows)}
        for name, rows in by_name.items()
    }
    return Counted(tool, result)


def parse_ncu(text: str) -> list[tuple[str, CounterValues]]:
    """`--csv --page raw`: lines of the tool's own, a header, a row of units, a row a launch."""
    rows = _table(text, "Kernel Name")
    result = []
    for row in rows:
        values = {ours: _number(row.get(theirs)) for theirs, ours in NCU_METRICS.items()}
        known = {name: value / 100 for name, value in values.items() if value is not None}
        if row.get("ID") and known:
            result.append((str(row["Kernel Name"]), known))
    return result


def parse_nsys(text: str) -> list[tuple[str, CounterValues]]:
    """`cuda_gpu_trace`: a row for each kernel and copy."""
    result = []
    for row in _table(text, "Duration (ns)"):
        duration, registers = _number(row.get("Duration (ns)")), _number(row.get("Reg/Trd"))
        if duration is not None and registers is not None:  # copies have none
            result.append((str(row["Name"]), {"seconds": duration * 1e-9, "registers": registers}))
    return result


def parse_rocprof(text: str) -> list[tuple[str, CounterValues]]:
    """`counter_collection.csv`: a row for each counter of each dispatch."""
    dispatches: dict[str, tuple[str, CounterValues]] = {}
    for row in _table(text, "Counter_Name"):
        ours, value = ROCM_COUNTERS.get(str(row["Counter_Name"])), _number(row["Counter_Value"])
        if ours is None or value is None:
            continue
        key = str(row.get("Dispatch_Id", len(dispatches)))
        dispatches.setdefault(key, (str(row["Kernel_Name"]), {}))[1][ours] = value / 100
    return list(dispatches.values())


def short(name: str) -> str:
    """A kernel's name without its template and its arguments, which tools write differently."""
    plain = re.sub(r"^void\s+", "", name.strip())
    return re.split(r"[<(]", plain, maxsplit=1)[0].strip()


def _table(text: str, column: str) -> list[dict[str, str]]:
    """The CSV behind whatever a tool wrote before it; its header has this column."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if column in line and "," in line), None)
    return [] if start is None else list(csv.DictReader(lines[start:]))


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text.replace(",", ""))
    except ValueError:
        return None


def _run(command: Sequence[str]) -> str | Absent:
    """What a tool wrote, or why it wrote nothing."""
    try:
        done = _finished(command)
    except subprocess.TimeoutExpired:
        return Absent(f"no counters: {command[0]} took longer than {TIMEOUT_S} s")
    except OSError as error:
        return Absent(f"no counters: {command[0]} does not start ({error.strerror})")
    if done.returncode and "ERR_NVGPUCTRPERM" not in done.stdout + done.stderr:
        text = (done.stderr or done.stdout).strip().splitlines()
        return Absent(
            f"no counters: {command[0]} failed: {text[-1] if text else 'no reason given'}"
        )
    return done.stdout + ("\n" + done.stderr if "ERR_NVGPUCTRPERM" in done.stderr else "")


def _finished(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a tool; if it takes too long, it ends with all that it started."""
    tool = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=child_environment(),
    )
    try:
        written, errors = tool.communicate(timeout=TIMEOUT_S)
    finally:
        if tool.poll() is None:
            os.killpg(tool.pid, signal.SIGKILL)
            tool.wait()
    return subprocess.CompletedProcess(tool.args, tool.returncode, written, errors)
