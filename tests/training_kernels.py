"""What training calls, on a GPU in one run: every kernel compiled (many beside each other), checked
against its reference, forward and every gradient, then timed beside torch's and, where it can be
imported, Liger's.

    PYTHONPATH=.:tests:../liger python -m training_kernels --save results
    make gpu-training-kernels PEERS=../liger

The public functions' own tests (tests/gpu/test_gpu_training_kernels.py) run in a second process
beside the checks. Times are taken after both, whatever they found; what failed ends with code 1.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import torch
from kernel_checks import check_forward, check_gradients, make_inputs

from ridgeline.bench.kernels.ops import KernelResult, as_record, bench_case
from ridgeline.hardware import Hardware, detect
from ridgeline.hardware.clocks import ClockSampler
from ridgeline.kernels.ceilings import measure
from ridgeline.kernels.compile_times import CompileTimes
from ridgeline.kernels.launch import only_compiling, target_of
from ridgeline.kernels.op import Case, Op
from ridgeline.kernels.registry import get_op

OPS = (
    "linear_cross_entropy",
    "rms_norm",
    "rms_norm_backward",
    "gated_activation_backward",
    "rotary",
    "adamw",
    "rows_to_fp8",
    "document_attention",
)
CEILINGS = {"copy_bandwidth", "read_bandwidth", "matrix_bf16"}
TESTS = Path(__file__).parent / "gpu" / "test_gpu_training_kernels.py"
MOST_TOLD = 12  # failures of an op or of the tests, by their first line


def concerns_training(op: Op, case: Case) -> bool:
    """Of the norm, whose codes and configs are inference's, what has gradients."""
    return op.name != "rms_norm" or bool(case.gradients)


def cases_of(op: Op, device: torch.device) -> list[Case]:
    target = target_of(torch.empty(0, device=device))
    return [case for case in op.cases if op.supports(target, case) and concerns_training(op, case)]


def compile_all(ops: list[Op], device: torch.device) -> CompileTimes:
    """What checks and timing will launch; a kernel that does not compile says so when checked."""
    with CompileTimes() as times, only_compiling():
        for op in ops:
            for case in (*cases_of(op, device), *op.bench_cases):
                if concerns_training(op, case):
                    with suppress(Exception):  # it fails again, and is named, when it is checked
                        op.launch(**make_inputs(case, device))
            torch.cuda.empty_cache()
    return times


def checks(op: Op, device: torch.device) -> Iterator[tuple[str, Callable[[], None]]]:
    for case in cases_of(op, device):
        yield f"{op.name} {case.label}", lambda case=case: check_forward(op, case, device)
        if op.differentiable is not None and case.gradients:
            label = f"{op.name} {case.label}, gradients"
            yield label, lambda case=case: check_gradients(op, case, device)


def check_all(ops: list[Op], device: torch.device) -> list[str]:
    """Prints a line an op, and what failed and why, which it returns."""
    failed = []
    for op in ops:
        began, own, count = time.monotonic(), [], 0
        for label, check in checks(op, device):
            count += 1
            try:
                check()
            except Exception as error:  # a compiler or a device may fail in any way it likes
                own.append(f"{label}: {first_line(error)}")
        torch.cuda.empty_cache()
        passed_s = time.monotonic() - began
        print(f"  {op.name}: {count - len(own)} of {count} checks passed, {passed_s:.1f} s")
        tell(own)
        failed += own
    return failed


def tell(failed: list[str]) -> None:
    for line in failed[:MOST_TOLD]:
        print(f"    FAILED {line}", flush=True)
    if len(failed) > MOST_TOLD:
        print(f"    and {len(failed) - MOST_TOLD} more", flush=True)


def first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__} {lines[0].strip() if lines else ''}"[:200]


def time_all(ops: list[Op], hardware: Hardware) -> Iterator[KernelResult]:
    for op in ops:
        print(op.name)
        for case in op.bench_cases:
            if not concerns_training(op, case):
                continue
            try:
                result = bench_case(op, case, hardware, compiled=False)
            except Exception as error:
                print(f"  {case.label}: not timed: {first_line(error)}", flush=True)
                continue
            print(f"  {line_of(result)}", flush=True)
            yield result
            torch.cuda.empty_cache()


def line_of(result: KernelResult) -> str:
    """Our time, the share of the limit, and how many times as long the others take."""
    if result.bound == "memory":
        rate = f"{result.bytes_per_s / 1e12:.2f} TB/s"
    else:
        rate = f"{result.flops_per_s / 1e12:.0f} TFLOP/s"
    own_s = result.timing.median_s
    limit = "" if result.share is None else f" {result.share:.0%} of limit"
    others = ", ".join(f"{name} {s / own_s:.2f}x" for name, s in result.baselines.items())
    missing = ", ".join(f"{name}: {why[:40]}" for name, why in result.failed.items())
    return f"{result.case}: {1e3 * own_s:.3f} ms, {rate}{limit}; {others}" + (
        f" ({missing})" if missing else ""
    )


def start_tests() -> subprocess.Popen[str]:
    """The public functions' tests, without the folder's conftest, which builds CUDA C++ first."""
    command = [sys.executable, "-m", "pytest", "--noconftest", "-p", "no:cacheprovider"]
    return subprocess.Popen(
        [*command, "-q", "--tb=line", "-rfE", str(TESTS)],
        env={**os.environ, "COLUMNS": "400"},  # a failure's line has its message to the end
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end_tests(process: subprocess.Popen[str]) -> list[str]:
    """What failed, in pytest's own short lines, which name the test and end with the message."""
    text, _ = process.communicate()
    lines = [line for line in text.splitlines() if line.strip()]
    named = [line.partition("::")[2] for line in lines if line.startswith(("FAILED", "ERROR"))]
    passed = process.returncode == 0
    print(f"  {TESTS.name}: {'passed' if passed else f'{len(named)} failed'}")
    if passed:
        return []
    failed = [line[:300] for line in named or lines[-3:]]
    tell(failed)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(prog="training_kernels", description=__doc__)
    parser.add_argument("ops", nargs="*", help=f"of {', '.join(OPS)}; all where none is named")
    parser.add_argument("--save", type=Path, help="folder for the record")
    parser.add_argument("--no-check", action="store_true", help="times alone")
    parser.add_argument("--no-times", action="store_true", help="checks alone")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("training kernels are checked and timed on a GPU, and none was found")
    began = time.monotonic()
    device, ops = torch.device("cuda:0"), [get_op(name) for name in args.ops or OPS]
    tests = None if args.no_check or args.ops else start_tests()
    times = compile_all(ops, device)
    print(f"{times.words()}; {time.monotonic() - began:.0f} s")
    failed = [] if args.no_check else check_all(ops, device)
    failed += end_tests(tests) if tests is not None else []
    print(f"{len(failed)} failures; {time.monotonic() - began:.0f} s", flush=True)
    if not args.no_times:
        hardware = measure(detect("cuda:0"), CEILINGS)
        with ClockSampler(hardware) as clocks:
            rows = list(time_all(ops, hardware))
        if args.save is not None:
            record = as_record(rows, hardware, "bench-training-kernels", clocks.median)
            print(record.save(args.save))
    print(f"{time.monotonic() - began:.0f} s in all")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
