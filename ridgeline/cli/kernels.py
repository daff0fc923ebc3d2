"""`ridgeline kernels`: the ops listed, checked, compiled for other chips, built and tuned."""

from __future__ import annotations

import argparse
import inspect
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ridgeline.bench.kernels.tune import tune_ops
from ridgeline.bench.kernels.tune_layer import tune_in_place
from ridgeline.cli.arguments.parser import group
from ridgeline.cli.terminal import Terminal
from ridgeline.errors import (
    CHECK_FAILED_EXIT_CODE,
    HardwareError,
    UnsupportedError,
    UsageError,
    near_matches,
)
from ridgeline.hardware import detect
from ridgeline.hardware.units import over_words
from ridgeline.kernels import host_library
from ridgeline.kernels.agreement import compare
from ridgeline.kernels.ceilings import measure
from ridgeline.kernels.compile import compile_call, recorded_calls
from ridgeline.kernels.extension import build, compile_source, find_nvcc, sources
from ridgeline.kernels.launch import target_of
from ridgeline.kernels.op import Case, Function, Op
from ridgeline.kernels.registry import all_ops
from ridgeline.kernels.targets import COMPILED, TARGETS, Target
from ridgeline.lessons import get_op_or_lesson

EXAMPLE = """\
ridgeline kernels list
ridgeline kernels check --op rms_norm
ridgeline kernels compile --op rms_norm --target sm_90,gfx942
ridgeline kernels tune --op skinny_linear --only gate_up"""

ACTIONS = ("list", "check", "compile", "build", "tune")
ACTIONS_HELP = """\
list: the ops; check: compare with the reference on this GPU; compile: for other chips, no GPU \
needed; build: the C++ kernels for this machine; tune: time the choices and keep the fastest"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=ACTIONS, metavar="ACTION", help=ACTIONS_HELP)
    chosen = group(parser, "what to work on")
    chosen.add_argument("--op", action="append", help="only this op (repeat for several)")
    chosen.add_argument(
        "--only", default="", metavar="TEXT", help="tune: only cases whose name contains TEXT"
    )
    compiling = group(parser, "compile")
    compiling.add_argument(
        "--target",
        default="sm_80,sm_90,sm_100,gfx942,gfx950",
        metavar="NAMES",
        help="chips to compile for (default: %(default)s)",
    )
    compiling.add_argument(
        "--one", action="store_true", help="compile one Triton configuration per op: quicker"
    )
    group(parser, "tune").add_argument(
        "--in-place",
        action="store_true",
        help="time the fastest candidates inside a whole decode layer",
    )


def run(args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    ops = [get_op_or_lesson(name) for name in args.op] if args.op else all_ops()
    if args.action == "list":
        return {"action": "list", "rows": [list_row(op) for op in ops]}
    if args.in_place and (args.op or args.action != "tune"):
        raise UsageError(
            "--in-place tunes a whole layer: use it with `kernels tune` and without --op"
        )
    if args.action == "tune":
        return {"action": "tune", "rows": tune_rows(ops, args, terminal)}
    if args.action == "build":
        return finished("build", build_rows([op.name for op in ops], bool(args.op), terminal))
    if args.action == "check":
        with terminal.progress() as progress:
            rows = []
            for done, op in enumerate(ops):
                progress("checking", done, len(ops))
                rows += list(check_rows(op))
        return finished("check", rows)
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise UsageError("TRITON_INTERPRET is set; unset it to compile")
    targets = [parse_target(name) for name in args.target.split(",")]
    with terminal.progress() as progress:
        rows = []
        for done, op in enumerate(ops):
            progress("compiling", done, len(ops))
            for target in targets:
                rows += list(compile_rows(op, target, args.one))
                rows += [] if args.one else list(source_rows(op.name, target))
    return finished("compile", rows)


def finished(action: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "action": action,
        "rows": rows,
        "failed": sum(row["problem"] is not None for row in rows),
    }


def exit_code(document: dict[str, Any]) -> int:
    return CHECK_FAILED_EXIT_CODE if document.get("failed") else 0


def list_row(op: Op) -> dict[str, Any]:
    return {
        "op": op.name,
        "summary": op.summary,
        "gradients": op.differentiable is not None,
        "cases": len(op.cases),
        "timed": len(op.bench_cases),
        "baselines": list(op.baselines),
        "sources": " ".join(written(op)),
    }


def written(op: Op) -> list[str]:
    """The files of an op's kernels beside its reference."""
    folder = Path(inspect.getfile(op.cost)).parent
    return [file for file in ("triton.py", "cuda.cu", "cpu.cpp") if (folder / file).is_file()]


def tune_rows(ops: list[Op], args: argparse.Namespace, terminal: Terminal) -> list[dict[str, Any]]:
    """Times what is not timed yet; the choices hold for this device and compiler from now on."""
    hardware = detect()
    if hardware.device_type == "cpu":
        raise HardwareError("tuning requires a GPU, and none was found")
    with terminal.progress() as progress:
        hardware = measure(hardware, {"copy_bandwidth", "read_bandwidth", "matrix_bf16"}, progress)
        if args.in_place:
            rows = tune_in_place(hardware, only=args.only, progress=progress)
        else:
            rows = tune_ops(ops, hardware, only=args.only, progress=progress)
    return [asdict(row) for row in rows]


def check_rows(op: Op) -> Iterator[dict[str, Any]]:
    """Each case on the GPU of this machine against the op's reference."""
    hardware = detect()
    if hardware.device_type == "cpu":
        raise HardwareError("checking kernels requires a GPU, and none was found")
    device = torch.device(hardware.device)
    target = target_of(torch.empty(0, device=device))
    for case in op.small_cases:
        if op.supports(target, case):
            for name, launch in {"": op.launch, **op.variants}.items():
                problem = check_problem(op, launch, case, device)
                label = f"{case.label} ({name})" if name else case.label
                yield {"op": op.name, "case": label, "problem": problem}


def check_problem(op: Op, launch: Function, case: Case, device: torch.device) -> str | None:
    made = [case.make(device, torch.Generator(device=device).manual_seed(0)) for _ in range(2)]
    try:
        compare(launch(**made[0]), op.reference(**made[1]), case)
    except AssertionError as error:
        return str(error)
    except UnsupportedError:  # a variant that does not do this, or is not built
        if launch is op.launch:
            raise
    return None


def compile_rows(op: Op, target: Target, only_one: bool) -> Iterator[dict[str, Any]]:
    cases = [case for case in op.compile_cases if op.supports(target, case)]
    if not cases:
        row = {"op": op.name, "target": target.name, "case": "", "problem": None}
        yield row | {"skipped": "not supported"}
    for case in cases[:1] if only_one else cases:
        for call in recorded_calls(op, case, target):
            row = {"op": op.name, "target": target.name, "case": case.label}
            yield row | compiled_json(call, target)


def source_rows(name: str, target: Target) -> Iterator[dict[str, Any]]:
    """The op's CUDA C++, if it has some, for one NVIDIA target: its kernels in one row."""
    if name not in sources() or target.backend != "cuda":
        return
    row: dict[str, Any] = {"op": name, "target": target.name, "case": "cuda.cu", "problem": None}
    if find_nvcc() is None:
        yield row | {"kernel": "cuda.cu", "skipped": "no nvcc"}
        return
    try:
        kernels = compile_source(name, target)
    except UnsupportedError as error:
        yield row | {"kernel": "cuda.cu", "problem": str(error)}
        return
    worst = max(kernels, key=lambda kernel: (kernel.spilled_bytes, kernel.registers))
    yield row | {
        "kernel": f"cuda.cu: {len(kernels)} kernels",
        "registers": max(kernel.registers for kernel in kernels),
        "spilled_bytes": worst.spilled_bytes,
        "shared_bytes": max(kernel.shared_bytes for kernel in kernels),
        "problem": worst.problem and f"{worst.kernel}: {worst.problem}",
    }


def build_rows(names: list[str], are_named: bool, terminal: Terminal) -> list[dict[str, Any]]:
    """Build the C++ of these ops for this machine, at the same time: for its CPU, and for its GPU
    where it has one.
    """
    builders = {"cpu.cpp": (host_library.sources(), host_library.build)}
    if detect().device_type != "cpu":
        builders["cuda.cu"] = (sources(), build)
    wanted = [(name, file) for name in names for file in builders if name in builders[file][0]]
    without = [name for name in names if name not in (op for op, _ in wanted)]
    if are_named and without:
        known = ", ".join(sorted({name for ops, _ in builders.values() for name in ops}))
        raise UsageError(f"{without[0]} has no C++ to build here; these do: {known}")

    def build_one(job: tuple[str, str]) -> dict[str, Any]:
        name, file = job
        start = time.perf_counter()
        try:
            builders[file][1](name)
        except UnsupportedError as error:
            return {"op": name, "source": file, "problem": str(error)}
        took = f"{time.perf_counter() - start:.1f} s"
        return {"op": name, "source": file, "took": took, "problem": None}

    with terminal.progress() as progress, ThreadPoolExecutor(len(wanted)) as pool:
        progress("building", 0, len(wanted))
        return list(pool.map(build_one, wanted))


def compiled_json(call: Any, target: Target) -> dict[str, Any]:
    try:
        compiled = compile_call(call, target)
    except Exception as error:  # Triton and LLVM raise many kinds
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return {"kernel": call.kernel.__name__, "problem": f"does not compile: {reason}"}
    return {
        "kernel": compiled.kernel,
        "registers": compiled.registers,
        "spilled_bytes": compiled.spilled_bytes,
        "shared_bytes": compiled.shared_bytes,
        "problem": compiled.problem,
    }


def parse_target(name: str) -> Target:
    if name not in COMPILED:
        hint = near_matches(name, COMPILED)
        known = ", ".join(COMPILED)
        raise UnsupportedError(f"target {name!r} is not known; use one of {known}{hint}")
    return TARGETS[name]


COLUMNS = {  # of each action's table: heading and key
    "list": {"op": "op", "what it does": "summary", "grad": "gradients", "cases": "cases",
             "timed": "timed", "kernels": "sources"},
    "check": {"op": "op", "case": "case", "": "problem"},
    "build": {"op": "op", "source": "source", "took": "took", "": "problem"},
    "tune": {"op": "op", "key": "key", "tried": "num_tried", "of limit": "share",
             "fastest": "best"},
    "compile": {"op": "op", "target": "target", "kernel": "kernel", "regs": "registers",
                "shared": "shared_bytes", "spilled": "spilled_bytes", "": "problem"},
}  # fmt: skip


def render(document: dict[str, Any], console: Console) -> None:
    columns = COLUMNS[document["action"]]
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading, key in columns.items():
        is_number = key in ("cases", "timed", "num_tried", "share", "registers") or "_bytes" in key
        table.add_column(
            heading,
            justify="right" if is_number else "left",
            no_wrap=key in ("op", "target", "problem") or is_number,
            overflow="fold",
        )
    for row in document["rows"]:
        table.add_row(*(cell(key, row) for key in columns.values()))
    console.print(table)
    over = over_words(
        {f"{row['op']} {row.get('key')}": row.get("share") for row in document["rows"]}
    )
    if over is not None:
        console.print(over, markup=False, soft_wrap=True)
    for row in document["rows"]:
        if row.get("problem") is not None:
            names = [row[key] for key in ("op", "target", "case", "source") if row.get(key)]
            console.print(f"{', '.join(names)}: {row['problem']}", markup=False)
    if "failed" in document:
        skipped = sum("skipped" in row for row in document["rows"])
        done = f"{len(document['rows']) - skipped} done, {document['failed']} failed"
        console.print(f"{done}, {skipped} skipped" if skipped else done)


def cell(key: str, row: dict[str, Any]) -> str:
    value = row.get(key)
    if key == "problem":
        return row.get("skipped", "ok") if value is None else "FAILED"
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.1%}"
    if key == "sources":
        return " ".join(file.partition(".")[0] for file in value.split())
    return str(value).removesuffix("_kernel")  # the heading says that already
