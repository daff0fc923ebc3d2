"""The process in which forms of a training step are timed, for processes.py: one JSON object a line
is asked and answered. It ends with its input.

    python -m ridgeline.ladder.training.timing.worker
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ridgeline.ladder.measuring.worker import run_worker
from ridgeline.ladder.training.forms import TrainForm
from ridgeline.ladder.training.subject import open_subject
from ridgeline.ladder.training.timing.bench import LocalBench
from ridgeline.training.config_file import parse_config


class TrainingWorker:
    def __init__(self) -> None:
        self.bench: LocalBench | None = None

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if request["do"] == "load":
            subject = request["subject"]
            config = parse_config(subject["config"], "the subject")
            self.bench = LocalBench(open_subject(config), subject["device"])
            return {}
        assert self.bench is not None, "`load` comes first"
        form = TrainForm.from_json(request["form"])
        if request["do"] == "warm":
            self.bench.warm(form)
            return {}
        if request["do"] == "round":
            return {"step_s": self.bench.step_s(form, request["target_s"])}
        if request["do"] == "phases":
            return asdict(self.bench.numbers(form, request["num_sequences"]))
        losses = self.bench.losses(form.config, request["seed"], request["num_steps"])
        return {"losses": [loss if math.isfinite(loss) else None for loss in losses]}


if __name__ == "__main__":
    run_worker(TrainingWorker())
