"""`ridgeline profile --workload`: a whole run, divided by kind of step and by op."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import make_folder, refused

from ridgeline.bench.engine import run_workload
from ridgeline.cli import main
from ridgeline.data.workload import Workload, WorkloadRequest
from ridgeline.engine import Engine
from ridgeline.engine.execution.step_watch import StepWatch, WatchedStep
from ridgeline.engine.scheduling.step_plan import StepPlan
from ridgeline.errors import UsageError
from ridgeline.hardware import Ceiling, Hardware, detect
from ridgeline.models.shapes import RandomShape
from ridgeline.profiling.predicting.next_steps import Advice
from ridgeline.profiling.predicting.prediction import Prediction
from ridgeline.profiling.run_profile import (
    DividedKind,
    divided_kinds,
    losses,
    mend_of,
    phases_of_kinds,
)
from ridgeline.profiling.step_kinds import StepKind, kinds_of
from ridgeline.profiling.tracing.stepping import EngineSteps
from ridgeline.recipe import KV, Limits, Recipe

Capture = pytest.CaptureFixture[str]


def known(hardware: Hardware) -> Hardware:
    """With ceilings: high ones, that nothing reaches."""
    ceilings = {
        "read_bandwidth": Ceiling(1e12, "B/s", "measured"),
        "matrix_fp32": Ceiling(1e14, "FLOP/s", "measured"),
    }
    return replace(hardware, ceilings=ceilings)


@pytest.fixture(scope="module")
def engine() -> Engine:
    recipe = Recipe(dtype="fp32", kv=KV(page_size=16), limits=Limits(max_batch=8, token_budget=64))
    return Engine(RandomShape("tiny"), recipe, device="cpu")


def plan(decode: int = 0, prompts: tuple[int, ...] = (), past: int = 10) -> StepPlan:
    tokens = (*[1] * decode, *prompts)
    return StepPlan(
        0,
        decode,
        num_tokens=tokens,
        first_positions=(*[past] * decode, *[0] * len(prompts)),
        logit_tokens=tuple(range(len(tokens))),
    )


def watched(*steps: tuple[StepPlan, float, float]) -> StepWatch:
    watch = StepWatch(torch.device("cpu"))
    watch.steps = [WatchedStep(*step) for step in steps]
    return watch


def test_steps_are_put_together_by_kind(engine: Engine) -> None:
    watch = watched(
        (plan(0, (20, 30)), 0.0, 2.0),
        (plan(2, (12,)), 2.5, 3.0),
        (plan(3), 3.0, 4.0),
        (plan(4, past=20), 4.25, 5.0),
        (plan(1), 9.0, 9.5),
    )
    kinds = kinds_of(watch, engine.local.costs, known(detect("cpu")), {4: 3.0})
    found = {kind.label: kind for kind in kinds}
    assert [kind.label for kind in kinds] == [
        "prompts alone", "decode, 3-4 rows", "decode, 1 row", "prompts and decode",
    ]  # fmt: skip
    few = found["decode, 3-4 rows"]
    assert (few.device_s, few.idle_s, len(few.plans)) == (1.75, 0.25, 2)
    assert few.mean_decode_rows == 3.5
    assert few.mean_context == pytest.approx((3 * 11 + 4 * 21) / 7)
    assert found["decode, 1 row"].idle_s == 1.0  # for three of four seconds nobody was there
    mixed = found["prompts and decode"]
    assert (mixed.mean_decode_rows, mixed.mean_prompt_pieces, mixed.mean_prompt_tokens) == (
        2,
        1,
        12,
    )
    assert all(kind.limit_s is not None and 0 < kind.limit_s < 1e-3 for kind in kinds)
    assert sum(kind.seconds for kind in kinds) + 3.0 == pytest.approx(9.5)  # the whole run


def test_rows_are_in_kinds_of_twice_as_many(engine: Engine) -> None:
    """Every number of rows stands in one kind, whose label holds it."""
    watch = watched(*((plan(rows), float(rows), rows + 0.5) for rows in range(1, 40)))
    kinds = kinds_of(watch, engine.local.costs, detect("cpu"))
    for kind in kinds:
        rows = [each.num_decode_rows for each in kind.plans]
        assert max(rows) <= kind.most_rows
        assert min(rows) > kind.most_rows // 2
    assert sum(len(kind.plans) for kind in kinds) == 39


def test_parts_add_up_to_the_run(engine: Engine) -> None:
    """Of each kind to the device's time in its steps and before them; of all to the wall clock."""
    sizes = ((30, 12), (50, 8), (9, 20), (40, 3))
    requests = [WorkloadRequest(*each) for each in sizes]
    hardware, watch = known(detect("cpu")), StepWatch(torch.device("cpu"))
    workload = Workload("four", tuple(requests))
    run_workload(engine, workload, hardware)
    run = run_workload(engine, workload, hardware, watch=watch)
    found = kinds_of(watch, engine.local.costs, hardware, run.empty_s)
    assert sum(len(kind.plans) for kind in found) == run.num_steps
    assert sum(kind.limit_s or 0.0 for kind in found) == pytest.approx(run.limit_s)
    in_steps_s = sum(kind.seconds for kind in found)
    assert 0.5 * run.wall_s < in_steps_s <= run.wall_s
    kinds = divided_kinds(EngineSteps(engine), found, hardware, 3, lambda *_: None)
    divided = [each for each in kinds if each.typical is not None]
    assert sum(each.kind.seconds for each in divided) >= 0.98 * in_steps_s
    assert {"decode", "mixed"} <= {each.kind.name for each in divided}
    for each in divided:
        assert sum(each.parts.values()) == pytest.approx(each.kind.seconds)
        names = [op.name for op in each.ops]
        assert {"layers.*.mlp.down", "head"} <= set(names)
        assert all(op.least_s <= op.seconds for op in each.ops)
    lost = losses(kinds, [], on_cpu=True)
    assert [loss.lost_s for loss in lost] == sorted((loss.lost_s for loss in lost), reverse=True)
    assert 0 < sum(loss.lost_s for loss in lost) < in_steps_s
    phases = phases_of_kinds(kinds)
    assert [phase.phase for phase in phases] == ["prefill", "decode"]
    assert sum(phase.num_steps for phase in phases) == run.num_steps
    for phase in phases:
        assert sum(phase.division.values()) == pytest.approx(phase.step_s)
    assert sum(phase.num_steps * phase.step_s for phase in phases) == pytest.approx(in_steps_s)


def test_prompts_are_computed_beside_decode_rows(engine: Engine) -> None:
    """Each call is one step, with all of its prompts and all sequences that decode."""
    plans: list[StepPlan] = []
    watch = StepWatch(torch.device("cpu"))
    with EngineSteps(engine).mixing(3, 20, 2, 10, 8) as step:
        engine.runner.watch = watch
        try:
            for _ in range(8):
                step()
        finally:
            engine.runner.watch = None
        plans = [each.plan for each in watch.steps]
    assert len(plans) == 8
    assert {each.num_decode_rows for each in plans} == {3}
    assert {tuple(each.num_tokens[3:]) for each in plans} == {(10, 10)}
    assert not engine.has_work
    with pytest.raises(UsageError, match="more than a step has"):
        EngineSteps(engine).mixing(3, 20, 2, 40, 8).__enter__()


def test_what_does_not_fit_alone_is_said(engine: Engine) -> None:
    too_long = StepKind("decode", 16, (plan(16),), 1.0, 0.0, None)  # the largest batch is 8
    (found,) = divided_kinds(EngineSteps(engine), [too_long], detect("cpu"), 3, lambda *_: None)
    assert found.typical is None
    assert "max_batch is 8" in found.why_not
    assert (found.parts, found.ops) == ({}, [])


def advice(flags: str, gain: float, **edit: Any) -> Advice:
    return Advice(flags, edit, flags, Prediction(gain, gain, gain, ""))


def test_a_loss_is_mended_by_what_touches_it() -> None:
    known_gains = [
        advice("--head int8", 1.4, head="int8"),
        advice("--scheme int8", 1.3, scheme="int8"),
        advice("--kv-dtype fp8", 1.1, **{"kv.dtype": "fp8"}),
    ]
    cases = {
        ("layers.*.mlp.down", "matrices", "memory"): "--scheme int8 (1.30x in all)",
        ("head", "matrices", "memory"): "--head int8 (1.40x in all)",
        ("decode_attention", "attention", "memory"): "--kv-dtype fp8 (1.10x in all)",
        ("device idle", "host", "host"): "more rows a step",
    }
    for (name, part, verdict), text in cases.items():
        assert mend_of(name, part, verdict, known_gains, False) == text  # type: ignore[arg-type]
    assert "kernels tune" in mend_of("head", "matrices", "memory", [], False)
    assert "none is known" in mend_of("head", "matrices", "memory", [], True)


def test_waiting_is_lost_as_a_whole() -> None:
    waiting = DividedKind(StepKind("decode", 4, (plan(4),), 1.0, 0.5, None), None, "too little")
    (loss,) = losses([waiting], [], on_cpu=False)
    assert (loss.what, loss.lost_s, loss.verdict) == ("device idle", 0.5, "host")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Ten requests, the last one late: meanwhile nobody is there."""
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [f"2023-11-16 18:15:46.{number}000000,{20 + number},12" for number in range(9)]
    path = tmp_path / "trace.csv"
    path.write_text("\n".join([*lines, "2023-11-16 18:15:48.5000000,30,8", ""]))
    return path


def test_a_trace_from_outside(folder: Path, trace: Path, tmp_path: Path, capsys: Capture) -> None:
    command = ["profile", str(folder), "--device", "cpu", "--workload", str(trace), "--steps", "3"]
    files = ["--html", str(tmp_path / "page.html"), "--save", str(tmp_path)]
    assert main([*command, *files, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    run = found["run"]
    assert run["num_requests"] == 10
    parts = sum(kind["seconds"] for kind in run["kinds"])
    whole = parts + run["no_requests_s"] + run["beside_steps_s"]
    assert whole == pytest.approx(run["wall_s"], rel=0.01)
    assert run["no_requests_s"] > 0.2  # before the last one
    assert len({step["name"] for step in found["steps"]}) == len(found["steps"])
    assert found["next"] == [each for each in found["next"] if each["flags"]]
    page = (tmp_path / "page.html").read_text()
    assert "What is lost, and what would mend it" in page
    record = json.loads(Path(found["record"]).read_text())
    assert record["values"]["no_requests"]["value"] == run["no_requests_s"]
    assert record["values"]["output_tokens_per_s"]["share_of_ceiling"] == run["share_of_limit"]


def test_people_see_the_losses(folder: Path, trace: Path, capsys: Capture) -> None:
    words = ["--workload", str(trace), "--requests", "4", "--at-once", "--steps", "2"]
    assert main(["profile", str(folder), "--device", "cpu", *words]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for text in ("4 requests in", "What is lost", "mended by", "decode, 3-4 rows",
                 "Gains are for the workload", "ops of all kinds of steps"):  # fmt: skip
        assert text in out
    assert "no request was there" not in out


def test_bad_input(folder: Path, trace: Path, tmp_path: Path, capsys: Capture) -> None:
    model = ("profile", str(folder), "--device", "cpu")
    run = (*model, "--workload", str(trace))
    for flag in ("--batch", "--context", "--prefill"):
        refused(capsys, UsageError, f"{flag} is for steps of one size", *run, flag, "4")
    refused(capsys, UsageError, "--trace is for steps", *run, "--trace", str(tmp_path / "t"))
    refused(capsys, UsageError, "--counters is for steps", *run, "--counters")
    refused(capsys, UsageError, "--workload is for inference", *run, "--train")
    refused(capsys, UsageError, "--workload runs through the engine", *run, "--loop", "naive")
    refused(capsys, UsageError, "--requests is 0", *run, "--requests", "0")
    refused(capsys, UsageError, "--speedup", *run, "--at-once", "--speedup", "2")
    refused(capsys, UsageError, "--at-once is for a workload", *model, "--at-once")
    refused(capsys, UsageError, "--output-tokens is for a", *model, "--output-tokens", "4")
    refused(capsys, UsageError, "context", *run, "--max-context", "24")
