"""`ridgeline optimize` from the command line to the folder it leaves, and its guard. Workers run in
this process with speeds that are scripted by state: all else is real.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from command_line import make_folder, refused

from ridgeline.cli import main
from ridgeline.cli.options import add_flags, from_flags
from ridgeline.engine import Engine
from ridgeline.engine.loading.saved import saved_recipe as recipe_beside
from ridgeline.errors import (
    CHECK_FAILED_EXIT_CODE,
    INTERRUPTED_EXIT_CODE,
    HardwareError,
    OutputError,
    RidgelineError,
    UsageError,
)
from ridgeline.hardware.facts import Ceiling
from ridgeline.ladder.climbing import climb, last_comparison
from ridgeline.ladder.climbing.check import unpaired
from ridgeline.ladder.guessing.answer import FirstAnswer
from ridgeline.ladder.guessing.earlier import EarlierAnswer, known_answers, remember_answer
from ridgeline.ladder.measuring import control
from ridgeline.ladder.measuring.control import Control
from ridgeline.ladder.measuring.part import WorkloadPart
from ridgeline.ladder.measuring.process import WorkerError
from ridgeline.ladder.measuring.time_ledger import TimeLedger
from ridgeline.ladder.measuring.worker import Workers
from ridgeline.ladder.processes import bench_processes
from ridgeline.ladder.reporting.folder import recipe_flags
from ridgeline.ladder.reporting.result import Climb
from ridgeline.ladder.reporting.summary import changed_fields
from ridgeline.ladder.rungs import batching, quantize
from ridgeline.ladder.searching.budget import Budget
from ridgeline.ladder.searching.outlook import Outlook
from ridgeline.ladder.searching.search import Together
from ridgeline.profiling.predicting.accuracy import PredictionOutcome
from ridgeline.quantization.linear import schemes_of
from ridgeline.recipe import KV, Limits, Recipe
from ridgeline.records import Record
from ridgeline.timing import Timing

TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "2023-11-16 18:15:46.68,16,8\n" * 2
TOGETHER = FirstAnswer.together
NO_GUESS = SimpleNamespace(parts=())
MOVES = (
    next(rung for rung in quantize.SCHEMES if rung.name == "int8"),
    quantize.PAGES[1],
)


def usual_speed(spec: dict[str, Any]) -> float:
    """int8 is faster than fp32, 8-bit pages are not; from the saved folder all is as it was."""
    if spec["loop"] == "naive":
        return 10.0
    quantized = spec["recipe"]["scheme"] == "int8" or spec["folder"] is not None
    return (40.0 if quantized else 20.0) * (0.9 if spec["recipe"]["kv"]["dtype"] == "int8" else 1.0)


class Local:
    """A worker in this process."""

    speed: Callable[[dict[str, Any]], float] = staticmethod(usual_speed)
    num_rounds = 0
    part = WorkloadPart(2)  # of a round
    whole_share = 1.0  # of a round's speed, where the whole is run
    remembered: ClassVar[list[PredictionOutcome]] = []
    answers: ClassVar[list[EarlierAnswer]] = []

    def __init__(self, log: Path, ledger: TimeLedger | None = None) -> None:
        self.ledger = ledger or TimeLedger()
        self.worker, self.specs, self.seats = Workers(), dict[str, Any](), set[str]()

    def ask(
        self, do: str, *, limit_s: float, lives_on: bool = False, **asked: Any
    ) -> dict[str, Any]:
        with self.ledger.timing(do):
            return self.answered(do, **asked)

    def answered(self, do: str, **asked: Any) -> dict[str, Any]:
        asked = json.loads(json.dumps(asked))
        seat = asked.get("seat", "")
        if do == "load":
            self.specs[seat] = asked["spec"]
        if do == "warm":
            return {"part": Local.part.to_json(), "seconds": 1.0}
        if do == "round":
            Local.num_rounds += 1
            rate = Local.speed(self.specs[seat]) * (1 + 0.001 * (Local.num_rounds % 3))
            rate *= Local.whole_share if asked["part"]["share"] >= 1.0 else 1.0
            more = ("first_token_s", "per_output_token_s", "request_s", "share_of_limit")
            return {"output_tokens_per_s": rate, "wall_s": 1.0, "mean_batch": 1.0} | dict.fromkeys(
                more
            )
        try:
            answer: dict[str, Any] = json.loads(json.dumps(self.worker.answer({"do": do, **asked})))
        except RidgelineError as error:
            raise WorkerError("refused", str(error)) from error
        return answer

    is_alive = True

    def close(self, at_once: bool = False) -> None: ...

    def __enter__(self) -> Local:
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> type[Local]:
    monkeypatch.setattr(climb, "remember", Local.remembered.extend)
    Local.remembered.clear()
    Local.answers.clear()
    Local.num_rounds = 0
    monkeypatch.setattr(bench_processes, "Process", Local)
    monkeypatch.setattr(Local, "speed", staticmethod(usual_speed))
    monkeypatch.setattr(Control, "sample", lambda self: 100.0)
    monkeypatch.setattr(climb, "MOVES", MOVES)
    # What is guessed hangs on this machine too; a test of its own guesses.
    monkeypatch.setattr(FirstAnswer, "together", lambda *_: Together(()))
    monkeypatch.setattr(climb, "remember_answer", Local.answers.append)
    # All matrices of a tiny model are faster as they are: here none is asked.
    monkeypatch.setattr("ridgeline.engine.loading.load_plan.measured_choices", lambda *_, **__: [])
    monkeypatch.setattr("ridgeline.ladder.order.measure", lambda hardware, only, progress: hardware)
    # What is predicted of a tiny model hangs on this machine: here every rung is tried.
    monkeypatch.setattr(Outlook, "slower_words", lambda *_: None)
    return Local


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"), hidden_size=64, intermediate_size=128)


@pytest.fixture
def command(model: Path, tmp_path: Path) -> list[str]:
    (tmp_path / "trace.csv").write_text(TRACE)
    (tmp_path / "text.txt").write_text("A hill is lower than a mountain, and so on. " * 8)
    words = ["optimize", str(model), "--out", str(tmp_path / "out"), "--device", "cpu"]
    words += ["--workload", str(tmp_path / "trace.csv"), "--text", str(tmp_path / "text.txt")]
    return [*words, "--window", "60", "--max-kl", "1", "--max-ppl-increase", "0.9"]


def test_a_climb_leaves_a_folder_that_runs_as_its_recipe_says(
    local: type[Local], command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main([*command, "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""  # --json tells nothing besides
    said = json.loads(printed.out)
    found = Climb.from_json(json.loads((out / "climb.json").read_text()))
    assert found.to_json() == Climb.from_json(said["climb"]).to_json()
    assert {rung.name: rung.status for rung in found.rungs} == {
        "int8": "kept",
        "kv-int8": "dropped",
    }
    assert found.total is not None
    assert found.total.value == pytest.approx(2.0, rel=0.01)  # over the engine's defaults
    assert found.before.loop == "engine"
    assert [step.name for step in found.ladder] in (["fused", "int8"], ["engine", "int8"])
    assert found.over_plain == pytest.approx(4.0, rel=0.01)
    assert found.plain is not None  # the two were run beside each other
    assert found.over_plain_words == "measured in 3 rounds (4.00 to 4.01×)"
    assert found.ladder_is_measured
    assert "of the defaults" in found.headline
    assert "rates are of the whole workload, 5 times on each side" in found.notes
    assert {"loading", "rounds", "quality"} <= found.time_ledger.keys()
    assert sum(found.time_ledger.values()) <= found.seconds
    int8 = found.rungs[0]
    assert int8.quality is not None
    assert int8.quality.problem is None
    assert int8.quality.num_tokens > 100
    assert found.serve_command == ("ridgeline", "serve", str(out))
    changed = {row.name for row in changed_fields(found)}
    assert not changed & {"limits.max_context", "limits.memory_share"}  # those were of measuring
    assert [each.rung for each in Local.remembered] == ["int8", "kv-int8"]
    assert (out / "report.html").stat().st_size > 10_000
    assert (out / "card.svg").read_text().startswith("<svg ")
    records = json.loads((out / "records.json").read_text())["records"]
    assert {"before", "after", "int8"} <= {Record.from_json(r).name.split("-")[-1] for r in records}
    recipe = recipe_beside(out)
    assert recipe is not None
    assert recipe.limits.max_batch == 128  # nothing that was chosen is left open
    assert recipe.kernels == ("fused" if found.ladder[0].name == "fused" else "reference")
    with Engine(out, recipe, device="cpu", num_pages=8) as engine:
        assert {scheme.name for scheme in schemes_of(engine.model).values()} == {"int8"}
        assert engine.recipe.kv.dtype == "fp32"


def test_what_is_not_quantized_is_a_link_to_the_original(
    local: type[Local], command: list[str], model: Path, tmp_path: Path
) -> None:
    Local.speed = staticmethod(  # type: ignore[assignment]
        lambda spec: 10.0 if spec["loop"] == "naive" or spec["recipe"]["scheme"] else 20.0
    )
    assert main([*command, "--json"]) == 0
    weights = tmp_path / "out" / "model.safetensors"
    assert weights.is_symlink()
    assert weights.resolve() == (model / "model.safetensors").resolve()
    assert not (tmp_path / "out" / "recipe.json").is_symlink()
    with Engine(tmp_path / "out", device="cpu", num_pages=8) as engine:
        assert engine.generate(["hello"])[0].status == "finished"


def test_the_report_says_why_it_is_not_at_the_limit(
    local: type[Local],
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """From the steps of the answer as they were looked at, by the ceilings of the machine."""
    rates = {"read_bandwidth": 1e11, "matrix_fp32": 1e12, "matrix_bf16": 1e12}
    ceilings = {key: Ceiling(value, "", "measured") for key, value in rates.items()}
    monkeypatch.setattr(
        "ridgeline.ladder.order.measure",
        lambda hardware, only, progress: replace(hardware, ceilings=ceilings),
    )
    assert main(command) == 0
    climb = Climb.from_json(json.loads((tmp_path / "out" / "climb.json").read_text()))
    assert {part.phase for part in climb.gap} <= {"prefill", "decode"}
    assert 0.5 < sum(part.share for part in climb.gap) < 1  # a tiny model waits most of the time
    shown = " ".join(capsys.readouterr().out.split())
    assert "The largest parts of the rest are" in shown
    assert "requests at once instead of" in shown


def test_without_a_terminal_there_is_a_line_for_each_thing_it_does(
    local: type[Local], command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--budget", "9m"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert any("measuring where it begins: the engine in" in line for line in lines)
    tried = [line for line in lines if "weights in int8" in line]
    assert len(tried) == 1, lines
    assert re.fullmatch(
        r" *0:\d\d of 9:00  weights in int8.*; best 20 tokens/s, 1.00× .*", tried[0]
    )
    assert re.search(
        r"before and after, in turns; best 40(.\d)? tokens/s, 2.00× the def", lines[-3]
    )
    assert "the plain loop beside the answer" in lines[-2]
    assert "the ladder from the plain loop" in lines[-1]


def test_outside_the_bound_it_is_dropped(
    local: type[Local], command: list[str], tmp_path: Path
) -> None:
    assert main([*command, "--max-kl", "0", "--json"]) == 0
    found = Climb.from_json(json.loads((tmp_path / "out" / "climb.json").read_text()))
    assert found.rungs[0].status == "dropped"
    assert "allowed is 0" in found.rungs[0].reason
    assert found.headline.startswith("The defaults are the fastest that was found")
    assert "rates are of the whole workload, once on each side" in found.notes
    assert recipe_beside(tmp_path / "out").scheme is None  # type: ignore[union-attr]


def test_what_is_slower_on_the_whole_workload_is_not_left(
    local: type[Local], command: list[str], model: Path, tmp_path: Path
) -> None:
    """Faster in rounds, and slower in the last runs, which are of the files that were left."""
    local.speed = staticmethod(lambda spec: 15.0 if spec["folder"] else usual_speed(spec))
    assert main([*command, "--json"]) == 0
    result = Climb.from_json(json.loads((tmp_path / "out" / "climb.json").read_text()))
    assert result.headline.startswith("The defaults are the fastest that was found")
    assert result.kept == []
    assert any("came to 0.75x of the defaults" in note for note in result.notes)
    assert result.after.figures == result.before.figures
    assert recipe_beside(tmp_path / "out").scheme is None  # type: ignore[union-attr]
    weights = tmp_path / "out" / "model.safetensors"
    assert weights.resolve() == (model / "model.safetensors").resolve()


def test_the_guard_measures_what_the_record_was_measured_on(
    local: type[Local],
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """There was time for rounds of a part and one run of the whole, which is slower."""
    monkeypatch.setattr(Local, "part", WorkloadPart(2, share=0.5))
    monkeypatch.setattr(Local, "whole_share", 0.8)
    left_s = last_comparison.LAST_LOOKS_S + 3.0  # 1.2 s are one run of the whole on each side
    monkeypatch.setattr(Budget, "rest_s", property(lambda _: left_s))
    monkeypatch.setattr(last_comparison, "plain_loop_s", lambda *_: 0.0)
    assert main([*command, "--budget", "1h", "--json"]) == 0
    result = Climb.from_json(json.loads((tmp_path / "out" / "climb.json").read_text()))
    assert "rates are of the whole workload, once on each side" in result.notes
    assert result.after.figures.output_tokens_per_s == pytest.approx(32.0, rel=0.01)
    capsys.readouterr()
    assert main(["optimize", "--check", str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["speed"]["value"] == pytest.approx(1.0, rel=0.01)


def test_the_guard_passes_and_fails(
    local: type[Local], command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--json"]) == 0
    check = ["optimize", "--check", str(tmp_path / "out"), "--device", "cpu", "--json"]
    assert main(check) == 0
    capsys.readouterr()
    Local.speed = staticmethod(lambda spec: 0.8 * usual_speed(spec))  # type: ignore[assignment]
    assert main(check) == CHECK_FAILED_EXIT_CODE
    slower = json.loads(capsys.readouterr().out)
    assert "0.80 of the record" in slower["problems"][0]
    Local.speed = staticmethod(usual_speed)
    saved = json.loads((tmp_path / "out" / "check.json").read_text())
    saved["quality"] |= {"mean_kl": 1e-9, "mean_kl_high": 1e-9}
    (tmp_path / "out" / "check.json").write_text(json.dumps(saved))
    assert main(check) == CHECK_FAILED_EXIT_CODE
    assert "mean KL" in json.loads(capsys.readouterr().out)["problems"][0]
    assert main([*check, "--quality", "off"]) == 0


def test_a_busy_machine_does_not_fail_the_guard(
    local: type[Local],
    command: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """0.54 of the record, where a control that has nothing to do with the recipe fell too."""
    assert main([*command, "--json"]) == 0
    file = tmp_path / "out" / "check.json"
    saved = json.loads(file.read_text())
    assert saved["control"] == [100.0] * len(saved["rates"])
    check = ["optimize", "--check", str(tmp_path / "out"), "--device", "cpu", "--quality", "off"]
    Local.speed = staticmethod(lambda spec: 0.54 * usual_speed(spec))  # type: ignore[assignment]
    assert main(check) == CHECK_FAILED_EXIT_CODE  # as a quiet machine has it
    monkeypatch.setattr(Control, "sample", lambda self: 60.0)
    capsys.readouterr()
    assert main(check) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "a fixed computation runs at 0.60 of its speed then" in shown
    assert main([*check, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["speed"]["value"] == pytest.approx(0.9, rel=0.01)
    assert result["control"]["value"] == pytest.approx(0.6)
    # Samples that differ as much: how busy it was during a round is not known.
    samples = cycle([60.0, 120.0, 100.0])
    monkeypatch.setattr(Control, "sample", lambda self: next(samples))
    assert main(check) == 0
    assert "samples of one fixed computation differ by a factor of 2.0" in " ".join(
        capsys.readouterr().out.split()
    )
    # A recipe that lost more than the machine did still fails.
    Local.speed = staticmethod(lambda spec: 0.25 * usual_speed(spec))  # type: ignore[assignment]
    assert main(check) == CHECK_FAILED_EXIT_CODE
    # Nor does a record of earlier days, which has none, hide what is slower.
    del saved["control"]
    file.write_text(json.dumps(saved))
    capsys.readouterr()
    assert main(check) == CHECK_FAILED_EXIT_CODE
    assert "the record has no control" in " ".join(capsys.readouterr().out.split())


def test_what_the_guard_cannot_know_of_the_machine_is_told(
    local: type[Local],
    command: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A record of a busier machine, and a control for which there is no memory."""
    assert main([*command, "--json"]) == 0
    check = ["optimize", "--check", str(tmp_path / "out"), "--device", "cpu", "--quality", "off"]
    monkeypatch.setattr(Control, "sample", lambda self: 150.0)
    Local.speed = staticmethod(lambda spec: 1.2 * usual_speed(spec))  # type: ignore[assignment]
    capsys.readouterr()
    assert main([*check, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["speed"]["value"] == pytest.approx(1.2, rel=0.01)  # nothing is divided out
    [remark] = result["remarks"]
    assert "at 1.50 of its speed then" in remark
    assert "hide" in remark

    def fails(self: Control) -> float:
        raise torch.AcceleratorError("CUDA error: out of memory")

    monkeypatch.setattr(Control, "sample", fails)
    assert main([*check, "--json"]) == 0
    [remark] = json.loads(capsys.readouterr().out)["remarks"]
    assert remark.startswith("the control could not be timed here")


def test_the_next_climb_begins_with_the_answer_of_this_one(
    local: type[Local],
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(climb, "remember_answer", remember_answer)
    monkeypatch.setattr(FirstAnswer, "together", TOGETHER)
    monkeypatch.setattr("ridgeline.ladder.guessing.answer.first_guess", lambda *_: NO_GUESS)
    assert main([*command, "--json"]) == 0
    (first,) = known_answers()
    assert (dict(first.edit), first.first_was_last) == ({"scheme": "int8"}, False)
    assert first.speedup == pytest.approx(2.0, rel=0.01)
    command[command.index("--out") + 1] = str(tmp_path / "second")
    assert main([*command, "--json"]) == 0
    capsys.readouterr()
    result = Climb.from_json(json.loads((tmp_path / "second" / "climb.json").read_text()))
    assert (result.rungs[0].name, result.rungs[0].status) == ("first-guess", "kept")
    assert result.rungs[0].edit == {"scheme": "int8"}
    assert any("an earlier climb" in note for note in result.notes)
    second = known_answers()[1]
    assert (second.first_was_last, second.from_earlier) == (True, True)
    assert main(["report", "accuracy"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "of 2 climbs, 1 ended with what was tried first (1 began with" in text


def test_outcomes_of_a_busy_machine_are_not_remembered(
    local: type[Local], command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what it gained is told with the words that a wide interval deserves."""
    noise = cycle([1.0, 1.5, 2.0])

    def busy(spec: dict[str, Any]) -> float:
        return usual_speed(spec) ** 2 * next(noise)  # gains are large enough to show

    Local.speed = staticmethod(busy)  # type: ignore[assignment]
    assert main(command) == 0
    shown = " ".join(capsys.readouterr().out.split())
    written = Climb.from_json(json.loads((tmp_path / "out" / "climb.json").read_text()))
    assert written.total is not None
    assert written.total.high > 1.2 * written.total.low
    assert re.match(
        r"About [\d.]+× the speed of the defaults, between [\d.]+ and [\d.]+×: ", written.headline
    )
    assert written.headline in shown
    assert any("not remembered" in note for note in written.notes)
    assert Local.remembered == []


def test_the_control_is_timed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another program takes from any pass counts: a median would leave the slowest out."""
    monkeypatch.setattr(control, "SAMPLE_S", 0.02)
    timed = Control("cpu")
    timed.time(2)
    assert len(timed.rates) == 2
    assert min(timed.rates) > 0
    num_passes = timed._num_passes

    def held_up(step: Callable[[], object], num_steps: int, **_: Any) -> Timing:
        assert num_steps == 1
        return Timing.from_samples([0.5])

    monkeypatch.setattr(control, "time_loop", held_up)
    assert timed.sample() == num_passes / 0.5


def test_the_guards_interval_widens_with_noise() -> None:
    calm, wild = unpaired([10, 10.1, 9.9], [9, 9.1, 8.9]), unpaired([10, 15, 6], [9, 13, 5])
    assert calm.high < 1.0 < wild.high
    assert calm.value == pytest.approx(0.9, rel=0.01)
    assert unpaired([10, 10], [10, 10]).value == 1.0


def test_ctrl_c_leaves_the_best_so_far_and_it_goes_on(
    local: type[Local], command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopping(spec: dict[str, Any]) -> float:
        if spec["recipe"]["kv"]["dtype"] == "int8":
            raise KeyboardInterrupt
        return usual_speed(spec)

    Local.speed = staticmethod(stopping)  # type: ignore[assignment]
    assert main([*command, "--json"]) == INTERRUPTED_EXIT_CODE
    found = Climb.from_json(json.loads((tmp_path / "out" / "climb.json").read_text()))
    assert [rung.status for rung in found.rungs] == ["kept", "not reached"]
    assert not found.ladder_is_measured  # there was no time: predicted
    assert found.plain is None
    assert any("Ctrl-C" in note for note in found.notes)
    assert (tmp_path / "out" / "report.html").is_file()
    assert recipe_beside(tmp_path / "out").scheme == "int8"  # type: ignore[union-attr]
    with Engine(tmp_path / "out", device="cpu", num_pages=8) as engine:
        assert schemes_of(engine.model)
    Local.speed = staticmethod(usual_speed)
    capsys.readouterr()
    Local.remembered.clear()
    Local.answers.clear()
    Local.num_rounds = 0
    assert main([*command, "--resume", "--json"]) == 0
    assert [each.rung for each in Local.remembered] == ["kv-int8"]  # the others were before
    found = Climb.from_json(json.loads(capsys.readouterr().out)["climb"])
    assert [rung.status for rung in found.rungs] == ["kept", "dropped"]
    assert recipe_beside(tmp_path / "out").scheme is None  # type: ignore[union-attr]
    assert not (tmp_path / "out" / "model.safetensors").is_symlink()


def test_a_dry_run_measures_nothing(
    local: type[Local],
    command: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench_processes, "Process", None)
    assert main([*command, "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "first guess:" in text
    assert "weights in int8" in text
    assert main([*command, "--dry-run", "--for", "throughput", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in result["rungs"]}
    assert rows["int8"]["applies"]
    assert rows["int8"]["predicted"]["speedup"] > 0
    assert rows["fp8"]["predicted"] is None  # a CPU only decodes it
    assert result["guess"]["predicted"]["speedup"] >= 1.0
    assert not any(str(value).startswith("int4") for value in result["guess"]["edit"].values())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("more", "kind", "words"),
    [
        (["--device", "cuda"], HardwareError, "no GPU"),
        (["--rounds", "3"], UsageError, "--rounds is 3 at least 5"),
        (["--budget", "soon"], UsageError, "--budget 'soon' 10m"),
        (["--workload", "nosuch.csv"], UsageError, "nosuch.csv neither"),
        (["--quality", "off"], UsageError, "quality off --max-kl"),
        (["--shape", "tiny"], UsageError, "give either a model, or --shape"),
        (["--window", "1"], UsageError, "--window is 1"),
        (["--text", "none.txt"], UsageError, "no file none.txt"),
        (["--task", "hellaswag"], UsageError, "--data"),
        (["--output-tokens", "0"], UsageError, "--output-tokens is 0"),
        (["--out", "/proc/nothing"], OutputError, "cannot write /proc/nothing"),
        (["--check", "."], UsageError, "--check only the folder"),
    ],
)
def test_refusals(
    local: type[Local],
    command: list[str],
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    kind: type[RidgelineError],
    words: str,
) -> None:
    refused(capsys, kind, words, *command, *more)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ContextTokens,Nonsense\n1,2\n", "nonsense.csv Nonsense"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", "line 2 TIMESTAMP"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,-3,2\n", "line 2 -3"),
        ("", "no rows"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,500,2\n", "502 tokens"),
    ],
)
def test_a_workload_of_nonsense(
    local: type[Local],
    command: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: str,
    words: str,
) -> None:
    (tmp_path / "nonsense.csv").write_text(text)
    refused(capsys, UsageError, words, *command, "--workload", str(tmp_path / "nonsense.csv"))


def test_folders_that_cannot_be_used(
    local: type[Local], command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "something").write_text("mine")
    refused(capsys, UsageError, "not empty --resume", *command)
    refused(capsys, UsageError, "no climb to go on with", *command, "--resume")
    refused(capsys, UsageError, "no check.json", "optimize", "--check", str(out))
    assert (out / "something").read_text() == "mine"
    shape = ["optimize", "--shape", "tiny", "--out", str(tmp_path / "o")]
    refused(capsys, UsageError, "--quality off", *shape)


def test_a_full_disk_is_one_line(
    local: type[Local],
    command: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = os.replace

    def full(source: Any, target: Any) -> None:
        if str(target).endswith("finished.json"):
            raise OSError(errno.ENOSPC, "No space left on device")
        plain(source, target)

    monkeypatch.setattr(os, "replace", full)
    refused(capsys, OutputError, "finished.json No space left", *command, "--json")


def test_a_recipe_as_flags_is_that_recipe() -> None:
    recipe = Recipe(
        dtype="bf16",
        tuned=False,
        graphs=True,
        scheme="fp8",
        head="int8",
        kv=KV("fp8", 128),
        limits=Limits(None, 64),
    )
    parser = argparse.ArgumentParser()
    add_flags(parser, Recipe)
    assert from_flags(parser.parse_args(recipe_flags(recipe)), Recipe) == recipe
    assert recipe_flags(Recipe()) == []
    changed = replace(recipe, overlap=False)
    assert "--no-overlap" in recipe_flags(changed)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--ttft-ms", "0"], "--ttft-ms is 0; give milliseconds above 0"),
        (["--tpot-ms", "nan"], "--tpot-ms is nan; give milliseconds above 0"),
        (["--peer-model", "m"], "--peer-model needs a --peer-url"),
        (["--peer-url", "ftp://x"], "--peer-url is 'ftp://x'; give one like http://127.0.0.1:8000"),
    ],
)
def test_bounds_that_mean_nothing(
    words: list[str], problem: str, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, *words]) == 2
    assert problem in capsys.readouterr().err


def test_a_draft_model_is_a_rung(
    local: type[Local],
    model: Path,
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The model drafts for itself here; what it was told to be is in the recipe that is left."""
    draft = next(rung for rung in batching.RUNGS if rung.name == "draft-model")
    monkeypatch.setattr(climb, "MOVES", (draft,))

    def faster_with_drafts(spec: dict[str, Any]) -> float:
        return usual_speed(spec) * (1 + (spec["recipe"]["speculation"]["method"] == "draft"))

    Local.speed = staticmethod(faster_with_drafts)  # type: ignore[assignment]
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "A hill is lower"}\n' * 2)
    command[command.index("--workload") + 1] = str(tmp_path / "prompts.jsonl")
    command += ["--output-tokens", "8", "--json"]
    assert main([*command, "--draft-model", str(model)]) == 0
    said = json.loads(capsys.readouterr().out)["climb"]
    assert [rung["status"] for rung in said["rungs"]] == ["kept"]
    saved = recipe_beside(tmp_path / "out")
    assert saved is not None
    assert saved.speculation.draft_model == str(model.resolve())
    command[command.index("--out") + 1] = str(tmp_path / "other")
    assert main([*command, "--draft-model", str(tmp_path / "nowhere")]) == 3
    assert "nowhere" in capsys.readouterr().err
