"""`LoadedState`: a recipe that is loaded in a process of its own, and the rounds it has run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from statistics import median

from ridgeline.ladder.measuring.observation import Observation
from ridgeline.ladder.measuring.part import WorkloadPart
from ridgeline.ladder.measuring.process import WorkerSeat
from ridgeline.ladder.measuring.running import Round
from ridgeline.ladder.outcome import Figures
from ridgeline.ladder.state import ClimbState

WORK_LIMIT_S = 180.0


@dataclass
class LoadedState:
    """A state that is loaded."""

    state: ClimbState
    process: WorkerSeat
    observation: Observation
    part: WorkloadPart  # takes about `round_s`
    at_once: int
    rounds: list[Round] = field(default_factory=list)

    def warm(self, part: WorkloadPart) -> None:
        """Other lengths may need other kernels and graphs than those it was loaded with."""
        if part.share != self.part.share:
            once = replace(part, repeats=1)
            self.process.ask("round", part=once.to_json(), limit_s=WORK_LIMIT_S)

    def round(self, part: WorkloadPart) -> float:
        result = Round(**self.process.ask("round", part=part.to_json(), limit_s=WORK_LIMIT_S))
        self.rounds.append(result)
        return result.output_tokens_per_s

    def figures(self) -> Figures:
        def middle(name: str) -> float | None:
            values = [getattr(each, name) for each in self.rounds]
            known = [value for value in values if value is not None]
            return median(known) if known else None

        rate = middle("output_tokens_per_s")
        assert rate is not None, "figures come after rounds"
        return Figures(
            rate,
            middle("first_token_s"),
            middle("per_output_token_s"),
            middle("request_s"),
            middle("share_of_limit"),
            self.observation.weight_bytes,
        )
