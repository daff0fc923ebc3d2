"""Climbs whose speeds, answers and gains are scripted: nothing is run, and the clock is the
bench's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ridgeline.hardware import Hardware
from ridgeline.ladder.measuring.observation import Observation
from ridgeline.ladder.measuring.process import WorkerError
from ridgeline.ladder.measuring.rounds import speedup_of
from ridgeline.ladder.outcome import Figures, Quality, Speedup
from ridgeline.ladder.rungs import ClimbFacts, Offer, Rung, RungContext
from ridgeline.ladder.searching.bench import Enough
from ridgeline.ladder.searching.budget import Budget
from ridgeline.ladder.searching.finished import Finished
from ridgeline.ladder.searching.progress import ClimbProgress, Options
from ridgeline.ladder.searching.search import ClimbSearch
from ridgeline.ladder.searching.together import GuessedPart, Together
from ridgeline.ladder.state import ClimbState
from ridgeline.models.shapes import describe_shape
from ridgeline.profiling.predicting.prediction import Prediction, Situation
from ridgeline.progress import Standing, WholeRun
from ridgeline.recipe import Recipe

CPU = Hardware("intel", "cpu", "cpu", "some CPU", "x86_64", 8 << 30, 2, "6.1")


CONFIG = describe_shape("tiny").config


FINE = Quality(0.001, None, None, 0.001, None, None, 100, None)


CLOSE = replace(FINE, mean_kl=0.05, problem="mean KL is 0.05, allowed is 0.02")


BAD = replace(FINE, mean_kl=0.5, problem="mean KL is 0.5, allowed is 0.02")


def rung(
    name: str,
    edit: Mapping[str, Any],
    *,
    changes: bool = False,
    essential: bool = False,
    **more: Any,
) -> Rung:
    def offer(place: RungContext) -> Offer | str:
        return Offer(edit, f"{name} applies")

    return Rung(name, "overhead", name, offer, changes, essential, **more)


ENGINE = rung("engine", {"loop": "engine"}, essential=True)


BF16 = rung("bf16", {"dtype": "bf16"}, changes=True)


INT8 = rung("int8", {"scheme": "int8"}, changes=True)


INT4 = rung("int4-g64", {"scheme": "int4-g64"}, changes=True)


PAGES = rung("pages", {"kv.page_size": 128})


@dataclass
class FakeBench:
    """Speeds by a function of the state; a clock that goes on with every round."""

    speed: Callable[[ClimbState], float]
    quality: Callable[[ClimbState], Quality] = lambda state: FINE
    noise: float = 0.01
    round_s: float = 1.0
    now: float = 0.0
    failing: dict[str, WorkerError] = field(default_factory=dict)  # by scheme or dtype
    too_large: Callable[[ClimbState], bool] = lambda state: False
    asked: list[str] = field(default_factory=list)
    stop_at: int | None = None  # comparisons, after which Ctrl-C comes
    is_deterministic: bool = True
    draws: int = 0
    judge_s: float = 0.0  # once more for the original, which is run the first time

    def open(self, state: ClimbState) -> Observation:
        self.asked.append("open")
        if self.too_large(state):
            raise WorkerError("memory", "needs 40 GiB")
        return self.seen(state)

    def look(self, state: ClimbState) -> Observation:
        self.asked.append(f"look {label(state)}")
        return self.seen(state)

    def observed(self, state: ClimbState) -> Observation:
        return self.seen(state)

    def seen(self, state: ClimbState) -> Observation:
        figures = Figures(self.speed(state), None, None, None, None, 1000)
        return Observation(
            state.recipe, 1000, 4.0, 4.0, is_deterministic=self.is_deterministic, figures=figures
        )

    def compare(self, before: ClimbState, after: ClimbState, enough: Enough) -> Speedup:
        self.asked.append(f"compare {label(after)}")
        if self.stop_at is not None and len(self.asked) > self.stop_at:
            raise KeyboardInterrupt
        failure = self.failing.get(label(after))
        if failure is not None:
            raise failure
        rates: tuple[list[float], list[float]] = ([], [])
        while True:
            for state, kept in zip((before, after), rates, strict=True):
                self.draws += 1
                self.now += self.round_s
                wiggle = 1 + self.noise * ((self.draws * 7) % 5 - 2) / 2
                kept.append(self.speed(state) * wiggle)
            if len(rates[0]) > 1 and enough(found := speedup_of(*rates)):
                return found

    def keep(self, state: ClimbState) -> Observation:
        self.asked.append(f"keep {label(state)}")
        return self.seen(state)

    def drop(self, state: ClimbState) -> None:
        self.asked.append(f"drop {label(state)}")

    def judge(self, state: ClimbState) -> Quality:
        first = not any(each.startswith("judge") for each in self.asked)
        self.now += (2 if first else 1) * self.judge_s
        self.asked.append(f"judge {label(state)}")
        return self.quality(state)

    def calibrated(self, state: ClimbState) -> ClimbState:
        self.asked.append(f"calibrate {label(state)}")
        return ClimbState(replace(state.recipe, scheme=None), state.loop, "folder")


def label(state: ClimbState) -> str:
    recipe = state.recipe
    return state.folder or recipe.scheme or (recipe.dtype if state.loop == "engine" else "naive")


def predictor(gains: Mapping[str, float]) -> Callable[[Situation, Mapping[str, Any]], Prediction]:
    def predict(situation: Situation, edit: Mapping[str, Any]) -> Prediction:
        gain = next((gains[str(v)] for v in edit.values() if str(v) in gains), 1.0)
        return Prediction(gain, gain / 1.3, gain * 1.3, "scripted")

    return predict


SPEEDS = {"fp32": 20.0, "bf16": 30.0, "int8": 45.0, "int4-g64": 60.0, "naive": 10.0, "folder": 58.0}


def by_label(state: ClimbState) -> float:
    return SPEEDS[label(state)]


def climb(
    bench: FakeBench,
    *rungs: Rung,
    gains: Mapping[str, float] | None = None,
    budget_s: float | None = None,
    finished: Finished | None = None,
    quality: bool = True,
    stages: tuple[tuple[Rung, ...], ...] | None = None,
    **more: Any,
) -> ClimbProgress:
    facts = ClimbFacts(CONFIG, CPU, "latency", "setting")
    options = Options(quality=quality, stages=stages or ((ENGINE,), *((each,) for each in rungs)))
    budget = Budget(budget_s, clock=lambda: bench.now)
    search = ClimbSearch(
        facts, bench, budget, options, finished, None, predictor(gains or {}), **more
    )
    return search.run()


DEFAULTS = ClimbState(Recipe(dtype="fp32"), "engine")


def from_defaults(
    bench: FakeBench, *rungs: Rung, guess: Sequence[GuessedPart] = (), **more: Any
) -> ClimbProgress:
    """As `optimize` climbs: from the engine's defaults, the guess first."""
    return climb(
        bench, stages=(rungs,), starts=[DEFAULTS], guess=lambda *_: Together(guess), **more
    )


GUESSED = ((BF16, {"dtype": "bf16"}), (PAGES, {"kv.page_size": 128}))


def pages_cost(state: ClimbState) -> float:
    """Pages of 128 tokens take a tenth off every speed."""
    return by_label(state) * (0.9 if state.recipe.kv.page_size == 128 else 1.0)


class Watched(WholeRun):
    def __init__(self) -> None:
        self.standings: list[Standing] = []

    def show(self, standing: Standing) -> None:
        self.standings.append(standing)


def statuses(found: ClimbProgress) -> dict[str, str]:
    return {outcome.name: outcome.status for outcome in found.outcomes}
