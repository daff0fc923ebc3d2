"""A run of `ridgeline train` on a GPU as users start it, over text, with saving: how long the
device is idle before each step, and what saving costs.

    PYTHONPATH=.:tests python -m training_waits --data text --tokenizer demo
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from training_speed import say

from ridgeline.cli import main as ridgeline
from ridgeline.training.stepping.step import Trainer

FIRST, LAST = 12, 30  # steps that are traced
GPU_WORK = ("kernel", "gpu_memset")
SAVED = ("step", "stall_s", "save_s", "save_bytes")


class TracedSteps:
    """In a `Trainer`'s step: a trace of the device alone, from one step's call to another's."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._step = Trainer.step
        self._profiler = profile(activities=[ProfilerActivity.CUDA])
        self._num_calls = 0

    def __call__(self, trainer: Trainer, *args: Any, **options: Any) -> Any:
        self._num_calls += 1
        if self._num_calls == FIRST:
            self._profiler.start()
        if self._num_calls == LAST:
            torch.cuda.synchronize()
            self._profiler.stop()
            self._profiler.export_chrome_trace(str(self._path))
        return self._step(trainer, *args, **options)


def idle_before_steps(path: Path) -> list[float]:
    """Seconds: a step ends where its numbers are copied to the host, and the next begins with the
    first kernel behind that; what the device does between is not idle.
    """
    events = json.loads(path.read_text())["traceEvents"]
    own = [e for e in events if e.get("cat") in GPU_WORK]
    work = sorted((float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in own)
    copies = sorted(
        float(e["ts"])
        for e in events
        if e.get("cat") == "gpu_memcpy" and "DtoH" in e["name"] and e["args"].get("bytes") == 16
    )
    waits = []
    for copied in copies[:-1]:
        before = max((end for start, end in work if start < copied), default=copied)
        after = min((start for start, _ in work if start >= copied), default=copied)
        waits.append(max(0.0, after - before) / 1e6)
    return waits


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--tokenizer", default="demo")
    parser.add_argument("--shape", default="llama-3.2-1b")
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--flags", default="", help="more of `ridgeline train`'s")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out, trace = Path(folder) / "run", Path(folder) / "trace.json"
        traced = TracedSteps(trace)
        Trainer.step = lambda *args, **options: traced(*args, **options)  # type: ignore[method-assign]
        command = ["train", "--shape", args.shape, "--tokenizer", args.tokenizer]
        command += ["--data", args.data, "--sequence-length", "4096", "--batch", "8"]
        command += ["--steps", str(args.steps), "--out", str(out), *args.flags.split()]
        status = ridgeline(command)
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        waits = idle_before_steps(trace)
    steps = [row for row in rows if "tokens_per_s" in row]
    saves = [row for row in rows if "stall_s" in row]
    say(
        idle_before_a_step_ms=[round(1e3 * each, 3) for each in waits],
        median_ms=round(1e3 * median(waits), 3) if waits else None,
        tokens_per_s=round(median(row["tokens_per_s"] for row in steps)),
        saves=[{key: row[key] for key in SAVED} for row in saves],
        seconds=steps[-1]["seconds"],
        good=bool(waits) and max(waits) <= 2e-4,
    )
    return status


if __name__ == "__main__":
    sys.exit(main())
