"""Climbs whose workers run in the test's own process, at scripted speeds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from command_line import make_folder

from ridgeline.errors import (
    RidgelineError,
)
from ridgeline.ladder.climbing import climb
from ridgeline.ladder.guessing.answer import FirstAnswer
from ridgeline.ladder.guessing.earlier import EarlierAnswer
from ridgeline.ladder.measuring.control import Control
from ridgeline.ladder.measuring.part import WorkloadPart
from ridgeline.ladder.measuring.process import WorkerError
from ridgeline.ladder.measuring.time_ledger import TimeLedger
from ridgeline.ladder.measuring.worker import Workers
from ridgeline.ladder.processes import bench_processes
from ridgeline.ladder.rungs import quantize
from ridgeline.ladder.searching.outlook import Outlook
from ridgeline.ladder.searching.together import Together
from ridgeline.profiling.predicting.accuracy import PredictionOutcome

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
    runs_curves = False  # over the batch; they take seconds where they are not scripted
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
        if do == "curve" and not Local.runs_curves:
            rate = Local.speed(self.specs[seat])
            points = [
                {
                    "batch": batch,
                    "output_tokens_per_s": rate * batch,
                    "per_output_token_s": 1 / rate,
                }
                for batch in asked["batches"]
            ]
            return {"points": points}
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
