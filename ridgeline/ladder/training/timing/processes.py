"""The bench of a climb in a process of its own (worker.py): a GPU that runs out of memory or faults
takes the process with it, and not the climb. The next form starts another one.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ridgeline.ladder.measuring.process import Process, WorkerError
from ridgeline.ladder.measuring.time_ledger import TimeLedger
from ridgeline.ladder.training.forms import StepNumbers, TrainForm
from ridgeline.training.config import TrainConfig
from ridgeline.training.config_file import VERSION

COMMAND = (sys.executable, "-m", "ridgeline.ladder.training.timing.worker")
LIMIT_S = 1800.0  # of one answer: a model is loaded in it, kernels are compiled


class ProcessBench:
    def __init__(
        self, config: TrainConfig, device: str, work: Path, ledger: TimeLedger | None = None
    ) -> None:
        self._subject = {"config": {"version": VERSION} | asdict(config), "device": device}
        self._log = work / "training.log"
        self.ledger = ledger or TimeLedger()
        self._process: Process | None = None

    def warm(self, form: TrainForm) -> None:
        self._ask("warm", form=form.to_json())

    def step_s(self, form: TrainForm, target_s: float) -> float:
        step_s: float = self._ask("round", form=form.to_json(), target_s=target_s)["step_s"]
        return step_s

    def numbers(self, form: TrainForm, num_sequences: int) -> StepNumbers:
        answer = self._ask("phases", form=form.to_json(), num_sequences=num_sequences)
        return StepNumbers(**answer)

    def losses(self, config: TrainConfig, seed: int, num_steps: int) -> list[float]:
        answer = self._ask(
            "judge", form=TrainForm(config).to_json(), seed=seed, num_steps=num_steps
        )
        return [float("nan") if loss is None else loss for loss in answer["losses"]]

    def close(self) -> None:
        if self._process is not None:
            self._process.close(at_once=True)
            self._process = None

    def _ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        if self._process is None or not self._process.is_alive:
            self._process = Process(self._log, COMMAND, self.ledger)
            self._process.ask("load", limit_s=LIMIT_S, subject=self._subject)
        try:
            return self._process.ask(do, limit_s=LIMIT_S, lives_on=True, **arguments)
        except WorkerError as error:
            if error.kind != "refused":  # memory, or a fault: a new process is sound
                self.close()
            raise
