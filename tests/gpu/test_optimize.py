"""The ladder on a GPU: a small shape from the engine's defaults to a better recipe, in processes of
their own, and its guard.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ridgeline.cli import main
from ridgeline.engine import Engine, Sampling
from ridgeline.errors import CHECK_FAILED_EXIT_CODE
from ridgeline.ladder.reporting.folder import CHECK
from ridgeline.ladder.reporting.result import Climb
from ridgeline.ladder.searching.together import GUESS
from ridgeline.models.shapes import random_model
from ridgeline.recipe import Limits, Recipe

PROMPT = list(range(1, 200))


@pytest.mark.parametrize(
    ("goal", "workload", "ladder"),
    [
        ("latency", "batch-1", {"fused", "bf16", "graphs"}),
        ("throughput", "cpu", {"fused", "bf16", "batching"}),
    ],
)
def test_a_climb_on_a_small_shape(
    goal: str, workload: str, ladder: set[str], tmp_path: Path, alone: Callable[[], bool]
) -> None:
    """The defaults and a guess first, then single changes; the ladder to the answer explains it."""
    out = tmp_path / "out"
    command = ["optimize", "--shape", "qwen3-0.6b", "--out", str(out), "--for", goal]
    command += ["--workload", workload, "--quality", "off", "--budget", "100s"]
    assert main([*command, "--json"]) == 0
    climb = Climb.from_json(json.loads((out / "climb.json").read_text()))
    failed = [(rung.name, rung.reason) for rung in climb.rungs if rung.status == "failed"]
    assert not failed
    assert climb.rungs[0].name == GUESS
    assert climb.rungs[0].achieved is not None
    assert climb.first_answer_s is not None
    assert ladder <= {step.name for step in climb.ladder}
    assert climb.after.figures.output_tokens_per_s > 0
    if alone():  # else nothing may be faster beyond noise
        assert climb.total is not None, climb.headline
        assert climb.total.value >= 1.0, climb.headline
    if not alone() and not (out / CHECK).exists():
        return  # so slow that there was no time to compare the whole
    status = main(["optimize", "--check", str(out), "--json"])
    assert status in ((0,) if alone() else (0, CHECK_FAILED_EXIT_CODE))


@pytest.mark.parametrize(
    "edit", [{"tf32": True, "dtype": "fp32"}, {"tuned": False, "dtype": "bf16"}]
)
def test_switched_recipes_run_and_leave_nothing_behind(edit: dict[str, object]) -> None:
    dtype = torch.float32 if edit["dtype"] == "fp32" else torch.bfloat16
    model = random_model("qwen3-0.6b", dtype, "cuda", num_layers=2)
    limits = Limits(max_context=512, max_batch=4)
    before = torch.backends.cuda.matmul.fp32_precision
    with Engine(model, Recipe(limits=limits, **edit), num_pages=64) as engine:  # type: ignore[arg-type]
        (output,) = engine.generate([PROMPT], Sampling(max_tokens=8, ignore_eos=True))
    assert output.status == "finished"
    assert torch.backends.cuda.matmul.fp32_precision == before
