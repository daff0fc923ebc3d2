"""Climbs of shapes on an H200, as far as they are prepared without one: what the first answer is
made from.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from ridgeline.data.workload import Workload, WorkloadRequest
from ridgeline.hardware import Hardware
from ridgeline.hardware.facts import Ceiling
from ridgeline.ladder.rungs import ClimbFacts, quantize
from ridgeline.models.shapes import describe_shape
from ridgeline.profiling.predicting.expected_steps import mean_context
from ridgeline.recipe import Recipe, with_auto

CEILINGS = {
    "read_bandwidth": (4.3e12, "B/s"),
    "matrix_fp32": (52e12, "FLOP/s"),
    "matrix_tf32": (412e12, "FLOP/s"),
    "matrix_bf16": (787e12, "FLOP/s"),
    "matrix_fp8": (1449e12, "FLOP/s"),
    "eager_launch": (7e-6, "s"),
    "graph_step": (1.5e-6, "s"),
}
H200 = Hardware(
    "nvidia", "cuda", "cuda:0", "NVIDIA H200", "sm_90", 141 << 30, 132, "580",
    ceilings={name: Ceiling(*pair, "measured") for name, pair in CEILINGS.items()},
)  # fmt: skip

MANY = [(170 + number % 60, 200 + number % 280) for number in range(1000)]


def without_a_gpu(monkeypatch: Any) -> None:
    """What a GPU can run is asked of torch, which sees none here."""
    monkeypatch.setattr(quantize, "check_runs", lambda *_: None)
    monkeypatch.setattr(quantize, "fp8_dtype", lambda _: torch.float8_e4m3fn)


def job_of(
    shape: str, lengths: list[tuple[int, int]], *, quality: bool = False, memory: int = 141 << 30
) -> Any:
    config = describe_shape(shape).config
    requests = tuple(WorkloadRequest(prompt, output) for prompt, output in lengths)
    goal = "latency" if len(lengths) == 1 else "throughput"
    hardware = replace(H200, memory_bytes=memory)
    facts = ClimbFacts(
        config, hardware, goal, "setting",
        concurrency=len(lengths), longest_prompt=max(prompt for prompt, _ in lengths),
        has_random_weights=True, request_tokens=mean_context(lengths),
    )  # fmt: skip
    return SimpleNamespace(
        facts=facts,
        workload=Workload("made", requests),
        order=SimpleNamespace(quality=quality),
        hardware=hardware,
    )


def filled_of(job: Any) -> Recipe:
    return with_auto(Recipe(), job.facts.config, torch.bfloat16, "cuda:0")
