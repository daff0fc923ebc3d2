"""`JudgeProcess`: the process that judges answers, started when the first are judged and kept for
others, since it holds what the unmodified model answered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ridgeline.ladder.measuring.judging import Measured
from ridgeline.ladder.measuring.process import Process, WorkerError
from ridgeline.ladder.outcome import Quality
from ridgeline.ladder.state import ClimbState, ClimbSubject
from ridgeline.quality.gate import QualityBounds

JUDGE_LIMIT_S = 1800.0


class JudgeProcess:
    def __init__(
        self,
        subject: ClimbSubject,
        measured: Measured,
        bounds: QualityBounds,
        new_process: Callable[[], Process],
    ) -> None:
        self.subject, self.measured, self.bounds = subject, measured, bounds
        self._new_process = new_process
        self._process: Process | None = None

    @property
    def is_loaded(self) -> bool:
        return self._process is not None

    def quality(self, state: ClimbState) -> Quality:
        """Of a state's answers, against the unmodified model's."""
        assert self.subject.path is not None, "random weights have no quality"
        arguments: dict[str, Any] = {
            "path": str(self.subject.path),
            "device": self.subject.device,
            "state": state.to_json(),
            "measured": self.measured.to_json(),
            "bounds": {
                "max_kl": self.bounds.max_kl,
                "max_ppl_increase": self.bounds.max_ppl_increase,
            },
        }
        if self._process is None:
            self._process = self._new_process()
        try:
            return Quality(**self._process.ask("judge", **arguments, limit_s=JUDGE_LIMIT_S))
        except WorkerError:
            self._process = None
            raise

    def end(self) -> None:
        if self._process is not None:
            self._process.close(at_once=True)
        self._process = None
