"""What a climb decides, with scripted speeds: order, keeping and dropping, failures, budget, going
on after a stop. Nothing is run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from ridgeline.errors import UsageError
from ridgeline.hardware import Hardware
from ridgeline.ladder.measuring.observation import Observation
from ridgeline.ladder.measuring.process import WorkerError
from ridgeline.ladder.measuring.rounds import speedup_of
from ridgeline.ladder.outcome import Figures, Quality, Speedup
from ridgeline.ladder.rungs import ClimbFacts, Offer, Rung, RungContext
from ridgeline.ladder.searching.bench import Enough
from ridgeline.ladder.searching.budget import Budget, parse_duration
from ridgeline.ladder.searching.finished import Finished
from ridgeline.ladder.searching.news import ClimbNews
from ridgeline.ladder.searching.progress import ClimbProgress, Options
from ridgeline.ladder.searching.search import FEWEST_ROUNDS, ClimbSearch, GuessedPart, Together
from ridgeline.ladder.state import ClimbState, applied
from ridgeline.models.cost import MeanStep
from ridgeline.models.shapes import describe_shape
from ridgeline.profiling.predicting.prediction import PhaseTime, Prediction, Situation
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


def test_it_tells_the_best_so_far_and_the_time_that_is_left() -> None:
    bench, watched = FakeBench(by_label, noise=0.0), Watched()
    facts = ClimbFacts(CONFIG, CPU, "latency", "setting")
    budget = Budget(300.0, clock=lambda: bench.now)
    search = ClimbSearch(
        facts,
        bench,
        budget,
        Options(quality=False, stages=((BF16, INT8),)),
        news=ClimbNews(watched, budget),
        predictor=predictor({"bf16": 1.4, "int8": 1.3}),
        starts=[DEFAULTS],
    )
    search.run()
    first, bf16, int8, last = watched.standings
    assert first.doing == "measuring where it begins: the engine in fp32"
    assert (first.best, first.used_s, first.budget_s) == ("", 0.0, 300.0)
    assert (bf16.doing, bf16.best) == ("bf16", "20 tokens/s, 1.00× the defaults")
    assert (int8.doing, int8.best) == ("int8", "30 tokens/s, 1.50× the defaults")
    assert (int8.num_done, int8.num_all, int8.part) == (1, 2, "")
    assert 0 < int8.used_s < last.used_s
    assert last.best == "45 tokens/s, 2.25× the defaults"


def test_a_callable_of_ones_own_hears_of_it_too() -> None:
    calls: list[tuple[str, int, int]] = []
    news = ClimbNews(lambda *call: calls.append(call), Budget(None))
    news("downloading", 3, 10)
    assert calls == [("downloading", 3, 10)]


def test_the_guess_is_measured_first_and_its_parts_are_tried_without() -> None:
    bench = FakeBench(pages_cost)
    result = from_defaults(bench, BF16, INT8, PAGES, guess=GUESSED, gains={"int8": 1.4})
    assert bench.asked[:2] == ["open", "compare bf16"]
    first = result.outcomes[0]
    assert (first.name, first.title, first.status) == ("first-guess", "bf16 + pages", "kept")
    assert first.edit == {"dtype": "bf16", "kv.page_size": 128}
    assert statuses(result)["without-pages"] == "kept"
    assert statuses(result)["without-bf16"] == "dropped"
    assert (result.best.recipe.scheme, result.best.recipe.kv.page_size) == ("int8", 64)
    assert result.start == DEFAULTS


def test_the_defaults_with_the_same_codes_are_measured_beside_the_guess() -> None:
    """Next, and all other changes of the guess undone at once: they win here."""
    guess = [(INT8, {"scheme": "int8"}), (PAGES, {"kv.page_size": 128}), (BF16, {"dtype": "bf16"})]
    speeds = {"fp32": 60.0, "bf16": 40.0}
    bench = FakeBench(lambda state: 10.0 if state == DEFAULTS else speeds[state.recipe.dtype])
    result = from_defaults(bench, guess=guess)
    assert [each.name for each in result.outcomes[:2]] == ["first-guess", "same-codes"]
    assert result.outcomes[1].title == "the defaults with int8"
    assert result.best == applied(DEFAULTS, {"scheme": "int8"})


def test_a_guess_that_is_slower_leaves_the_defaults_as_the_best() -> None:
    bench = FakeBench(lambda state: 5.0 if state.recipe.dtype == "bf16" else by_label(state))
    result = from_defaults(bench, INT8, guess=GUESSED)
    assert statuses(result) == {"first-guess": "dropped", "int8": "kept"}
    assert result.best == applied(DEFAULTS, {"scheme": "int8"})


def test_a_guess_that_fails_leaves_the_defaults_as_the_best() -> None:
    bench = FakeBench(by_label, failing={"bf16": WorkerError("memory", "needs 40 GiB")})
    result = from_defaults(bench, guess=GUESSED)
    assert statuses(result) == {"first-guess": "failed"}
    assert result.best == DEFAULTS


def test_what_is_not_reached_stays_as_the_answer_has_it() -> None:
    """A comparison takes ten seconds: there is time for the guess alone."""
    bench = FakeBench(by_label)
    result = from_defaults(bench, INT8, guess=GUESSED, gains={"int8": 1.4}, budget_s=20.0)
    assert statuses(result)["first-guess"] == "kept"
    assert statuses(result)["int8"] == "not reached"
    assert dict(GUESSED[0][1]) | dict(GUESSED[1][1]) == {"dtype": "bf16", "kv.page_size": 128}
    assert result.best == applied(DEFAULTS, {"dtype": "bf16", "kv.page_size": 128})


def test_ctrl_c_behind_the_guess_leaves_the_guess() -> None:
    bench = FakeBench(by_label, stop_at=3)
    result = from_defaults(bench, INT8, guess=GUESSED, gains={"int8": 1.4})
    assert result.is_stopped
    assert result.best.recipe.dtype == "bf16"


def test_a_guess_outside_the_quality_bound_is_not_kept() -> None:
    bench = FakeBench(by_label, quality=lambda state: BAD)
    result = from_defaults(bench, guess=GUESSED)
    assert statuses(result) == {"first-guess": "dropped"}


def statuses(found: ClimbProgress) -> dict[str, str]:
    return {outcome.name: outcome.status for outcome in found.outcomes}


def test_what_is_faster_is_kept_and_the_next_is_held_against_it() -> None:
    bench = FakeBench(by_label)
    found = climb(bench, BF16, INT8)
    assert statuses(found) == {"engine": "kept", "bf16": "kept", "int8": "kept"}
    gains = [o.achieved.value for o in found.outcomes if o.achieved]
    assert gains == pytest.approx([2.0, 1.5, 1.5], rel=0.02)
    assert found.best.recipe.scheme == "int8"
    assert found.best.recipe.dtype == "bf16"


def test_a_slower_rung_is_dropped_after_few_rounds_and_leaves_no_trace() -> None:
    bench = FakeBench(lambda state: 5.0 if state.recipe.dtype == "bf16" else by_label(state))
    found = climb(bench, BF16, INT8)
    dropped = found.outcomes[1]
    assert dropped.status == "dropped"
    assert "slower" in dropped.reason
    assert dropped.achieved is not None
    assert len(dropped.achieved.before) == FEWEST_ROUNDS
    assert "judge bf16" not in bench.asked
    assert found.best.recipe.dtype == "fp32"


def test_what_is_within_noise_gets_more_rounds_and_is_dropped() -> None:
    bench = FakeBench(by_label, noise=0.2)
    found = climb(bench, PAGES)
    outcome = found.outcomes[1]
    assert outcome.status == "dropped"
    assert "beyond noise" in outcome.reason
    assert outcome.achieved is not None
    assert len(outcome.achieved.before) == 12


def test_outside_the_quality_bound_is_dropped_with_the_numbers() -> None:
    bench = FakeBench(by_label, quality=lambda state: BAD)
    found = climb(bench, INT8)
    assert found.outcomes[1].status == "dropped"
    assert "0.5" in found.outcomes[1].reason
    assert found.outcomes[1].quality == BAD
    assert found.best.recipe.scheme is None


def test_int4_outside_the_bound_is_calibrated_and_measured_again() -> None:
    bench = FakeBench(by_label, quality=lambda state: FINE if state.folder else CLOSE)
    found = climb(bench, INT4)
    assert found.outcomes[1].status == "kept"
    assert found.best.folder == "folder"
    assert found.best.recipe.scheme is None
    assert "compare folder" in bench.asked


@pytest.mark.parametrize(("quality", "budget_s"), [(BAD, None), (CLOSE, 200.0)])
def test_codes_are_not_looked_for_in_vain(quality: Quality, budget_s: float | None) -> None:
    """Where rounding is far outside the bound, or there is no time."""
    bench = FakeBench(by_label, quality=lambda state: quality)
    found = climb(bench, INT4, budget_s=budget_s)
    assert found.outcomes[1].status == "dropped"
    assert "codes on data" in found.outcomes[1].reason
    assert not any(word.startswith("calibrate") for word in bench.asked)


def test_calibrated_codes_outside_the_bound_are_dropped_with_their_numbers() -> None:
    bench = FakeBench(by_label, quality=lambda state: CLOSE)
    found = climb(bench, INT4)
    assert found.outcomes[1].status == "dropped"
    assert "with codes found on data" in found.outcomes[1].reason
    assert found.best.folder is None


def test_quality_off_is_said_and_nothing_is_judged() -> None:
    bench = FakeBench(by_label, quality=lambda state: BAD)
    found = climb(bench, INT8, quality=False)
    assert found.outcomes[1].status == "kept"
    assert "not measured" in found.outcomes[1].reason
    assert not any(word.startswith("judge") for word in bench.asked)


@pytest.mark.parametrize("kind", ["died", "hung", "memory", "failed"])
def test_a_rung_whose_process_fails_is_recorded_and_the_climb_goes_on(kind: Any) -> None:
    bench = FakeBench(by_label, failing={"bf16": WorkerError(kind, "ended by SIGKILL")})
    found = climb(bench, BF16, INT8)
    assert statuses(found) == {"engine": "kept", "bf16": "failed", "int8": "kept"}
    assert "SIGKILL" in found.outcomes[1].reason
    assert "drop bf16" in bench.asked


def test_where_the_engine_cannot_be_run_nothing_else_applies() -> None:
    bench = FakeBench(by_label, failing={"fp32": WorkerError("failed", "does not compile")})
    found = climb(bench, BF16)
    assert statuses(found) == {"engine": "failed", "bf16": "not applicable"}
    assert found.best == found.start


def test_an_engine_that_is_not_faster_alone_may_be_with_another_rung() -> None:
    bench = FakeBench(lambda state: 30.0 if state.recipe.dtype == "bf16" else 10.0)
    found = climb(bench, BF16)
    assert statuses(found) == {"engine": "dropped", "bf16": "kept"}
    assert found.best.loop == "engine"
    assert found.outcomes[1].edit == {"loop": "engine", "dtype": "bf16"}


def test_in_a_stage_the_largest_predicted_gain_comes_first() -> None:
    bench = FakeBench(by_label)
    gains = {"int8": 1.5, "int4-g64": 2.5}
    found = climb(bench, stages=((ENGINE,), (INT8, INT4)), gains=gains)
    assert [outcome.name for outcome in found.outcomes] == ["engine", "int4-g64", "int8"]
    assert statuses(found)["int8"] == "dropped"  # held against int4


@pytest.mark.parametrize(
    ("int4", "quality", "first"),
    [(2.0, True, "int8"), (2.4, True, "int4-g64"), (1.9, False, "int4-g64")],
)
def test_what_quality_may_refuse_comes_later(int4: float, quality: bool, first: str) -> None:
    """Half of 1.0 is less than 0.6, half of 1.4 is more; without a bound nothing is refused."""
    stages = ((ENGINE,), (replace(INT4, chance=0.5), INT8))
    gains = {"int8": 1.6, "int4-g64": int4}
    found = climb(FakeBench(by_label), stages=stages, gains=gains, quality=quality)
    assert found.outcomes[1].name == first


def test_a_model_that_does_not_fit_starts_from_what_does_and_says_so() -> None:
    bench = FakeBench(by_label, too_large=lambda state: state.recipe.scheme is None)
    found = climb(bench)
    assert found.start.recipe.scheme == "int8"
    assert "40 GiB" in found.notes[0]
    with pytest.raises(WorkerError, match="40 GiB"):
        climb(FakeBench(by_label, too_large=lambda state: True))


def test_a_model_that_is_not_deterministic_is_told() -> None:
    found = climb(FakeBench(by_label, is_deterministic=False))
    assert any("not deterministic" in note for note in found.notes)


def test_the_budget_goes_to_the_largest_gains() -> None:
    """A rung takes ten seconds, and there is time for two more behind the engine."""
    bench = FakeBench(lambda state: by_label(state) * state.recipe.kv.page_size)
    gains = {"bf16": 1.02, "int8": 1.6, "128": 1.3}
    found = climb(bench, BF16, PAGES, INT8, gains=gains, budget_s=40.0)
    assert statuses(found)["int8"] == "kept"
    assert statuses(found)["pages"] == "kept"
    assert statuses(found)["bf16"] == "not reached"


def test_time_that_is_left_goes_to_what_was_put_off() -> None:
    bench = FakeBench(by_label)
    gains = {"bf16": 1.02, "int8": 1.6, "128": 1.3}

    def quick(state: ClimbState) -> float:
        bench.round_s = 0.2  # the first rung was slow, the others are not
        return by_label(state)

    bench.round_s, bench.speed = 3.0, quick
    found = climb(bench, BF16, PAGES, INT8, gains=gains, budget_s=60.0)
    assert statuses(found)["bf16"] == "kept"


def test_what_was_put_off_comes_back_where_it_promises_more() -> None:
    """Pages promise nothing to fp32, much to bf16: they come behind it, before what is last."""
    last = rung("last", {"kv.prefix_cache": False})

    def predict(situation: Situation, edit: Mapping[str, Any]) -> Prediction:
        gains = {"dtype": 1.5, "scheme": 1.4, "kv.prefix_cache": 1.02, "loop": 2.0}
        gains["kv.page_size"] = 1.3 if situation.recipe.dtype == "bf16" else 1.0
        gain = gains[next(iter(edit))]
        return Prediction(gain, gain / 1.3, gain * 1.3, "scripted")

    bench = FakeBench(by_label)
    facts = ClimbFacts(CONFIG, CPU, "latency", "setting")
    options = Options(stages=((ENGINE,), (PAGES,), (BF16,), (INT8,), (last,)))
    budget = Budget(1000.0, clock=lambda: bench.now)
    found = ClimbSearch(facts, bench, budget, options, None, None, predict).run()
    names = [outcome.name for outcome in found.outcomes]
    assert names == ["engine", "bf16", "int8", "pages", "last"]


def test_what_nothing_is_expected_of_comes_last_unless_it_leads() -> None:
    def order(pages: Rung, budget_s: float | None) -> list[str]:
        gains = {"bf16": 1.5, "int8": 1.4, "128": 1.0}
        found = climb(FakeBench(by_label), pages, BF16, INT8, gains=gains, budget_s=budget_s)
        return [outcome.name for outcome in found.outcomes]

    late = ["engine", "bf16", "int8", "pages"]
    early = ["engine", "pages", "bf16", "int8"]
    assert order(PAGES, 1000.0) == late
    assert order(PAGES, None) == early
    assert order(replace(PAGES, leads=True), 1000.0) == early


def test_what_cannot_give_more_than_others_promise_has_no_more_rounds() -> None:
    """Pages change nothing, within noise: of interest only where nothing better is to come."""

    def rounds(int8: float, budget_s: float | None) -> int:
        bench = FakeBench(by_label, noise=0.05)
        gains = {"128": 1.5, "int8": int8, "bf16": 1.0}
        found = climb(bench, PAGES, INT8, gains=gains, budget_s=budget_s)
        achieved = next(o.achieved for o in found.outcomes if o.name == "pages")
        assert achieved is not None
        return len(achieved.before)

    assert rounds(int8=1.4, budget_s=1000.0) == 5
    assert rounds(int8=1.4, budget_s=None) == rounds(int8=1.0, budget_s=1000.0) == 12


def test_what_judging_takes_once_is_not_expected_again() -> None:
    """The engine takes 10 s, bf16 10 and 40 to judge, int8 10 and 20: 90; the end has 16 of 110."""
    gains = {"bf16": 1.5, "int8": 1.4}
    bench = FakeBench(by_label, judge_s=20.0)
    found = climb(bench, BF16, INT8, gains=gains, budget_s=110.0)
    assert statuses(found) == {"engine": "kept", "bf16": "kept", "int8": "kept"}
    assert [round(o.seconds) for o in found.outcomes] == [10, 50, 30]


def test_the_last_place_is_for_what_promises_most() -> None:
    """A rung takes ten seconds, and there is time for one more behind the engine."""
    gains = {"int8": 1.6, "128": 1.0}
    pages = replace(PAGES, leads=True)
    found = climb(FakeBench(by_label), pages, INT8, gains=gains, budget_s=30.0)
    assert statuses(found)["int8"] == "kept"
    assert statuses(found)["pages"] == "not reached"


def test_a_near_miss_is_tried_again_when_what_it_hangs_on_was_kept() -> None:
    tuned = rung("tuned", {"tuned": False})  # any edit
    scheme = rung("int8", {"scheme": "int8"}, again_after=("tuned",))

    def speed(state: ClimbState) -> float:
        if state.loop == "naive":
            return 10.0
        if state.recipe.tuned:
            return 20.0 if state.recipe.scheme is None else 19.8
        return 21.0 if state.recipe.scheme is None else 30.0

    found = climb(FakeBench(speed, noise=0.005), scheme, tuned)
    names = [(outcome.name, outcome.status) for outcome in found.outcomes]
    assert names == [("engine", "kept"), ("int8", "dropped"), ("tuned", "kept"), ("int8", "kept")]
    assert "again" in found.outcomes[-1].title


def test_a_rung_that_comes_to_apply_is_tried_when_it_does() -> None:
    """As codes on a GPU, which need 16-bit work: it was kept only after graphs."""

    def codes(place: RungContext) -> Offer | str:
        if place.state.recipe.dtype != "bf16":
            return "it needs 16 bits"
        return Offer({"scheme": "int8"}, "they are there")

    int8 = Rung("int8", "quantize", "int8", codes, True)
    found = climb(FakeBench(by_label), int8, BF16)
    assert [(o.name, o.status) for o in found.outcomes] == [
        ("engine", "kept"),
        ("bf16", "kept"),
        ("int8", "kept"),
    ]


def test_what_launches_hid_is_seen_once_graphs_are_kept() -> None:
    half = rung("bf16", {"dtype": "bf16"}, again_after=("graphs",), near=0.5)
    graphs = rung("graphs", {"kv.page_size": 128})  # any edit

    def speed(state: ClimbState) -> float:
        if state.loop == "naive":
            return 10.0
        if state.recipe.kv.page_size != 128:
            return 12.0 if state.recipe.dtype == "fp32" else 9.0
        return 20.0 if state.recipe.dtype == "fp32" else 40.0

    found = climb(FakeBench(speed, noise=0.005), half, graphs, INT8, gains={"int8": 1.5})
    names = [(outcome.name, outcome.status) for outcome in found.outcomes]
    assert names[:4] == [
        ("engine", "kept"),
        ("bf16", "dropped"),
        ("graphs", "kept"),
        ("bf16", "kept"),
    ]


def test_what_is_predicted_to_be_slower_is_not_measured() -> None:
    bench = FakeBench(by_label)
    gains = {"int4-g64": 2.5, "int8": 0.7}
    found = climb(bench, stages=((ENGINE,), (INT4, INT8)), gains=gains)
    assert statuses(found) == {"engine": "kept", "int4-g64": "kept", "int8": "not applicable"}
    assert "predicted to be slower" in found.outcomes[2].reason
    assert found.outcomes[2].predicted is not None
    assert "compare int8" not in bench.asked
    found = climb(FakeBench(by_label), stages=((ENGINE,), (INT4, INT8)), gains={"int8": 0.8})
    assert statuses(found)["int8"] == "dropped"  # its interval reaches above 1


def test_ctrl_c_keeps_what_was_done() -> None:
    bench = FakeBench(by_label, stop_at=4)  # open, compare, keep, compare bf16
    found = climb(bench, BF16, INT8, quality=False)
    assert found.is_stopped
    assert statuses(found)["engine"] == "kept"
    assert statuses(found)["int8"] == "not reached"
    assert found.best.loop == "engine"


def test_a_stopped_climb_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "finished.json"
    first = FakeBench(by_label, stop_at=5)
    stopped = climb(first, BF16, INT8, finished=Finished(path), quality=False)
    assert stopped.is_stopped
    second = FakeBench(by_label)
    found = climb(second, BF16, INT8, finished=Finished(path), quality=False)
    assert statuses(found) == {"engine": "kept", "bf16": "kept", "int8": "kept"}
    assert [word for word in second.asked if word.startswith("compare")] == ["compare int8"]
    assert [outcome.name for outcome in found.measured] == ["int8"]
    assert found.outcomes[0].achieved == stopped.outcomes[0].achieved


def test_a_failure_is_tried_again_when_the_climb_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "finished.json"
    broken = FakeBench(by_label, failing={"int8": WorkerError("died", "killed")})
    climb(broken, INT8, finished=Finished(path))
    found = climb(FakeBench(by_label), INT8, finished=Finished(path))
    assert statuses(found)["int8"] == "kept"


def test_a_torn_file_of_finished_rungs_is_measured_anew(tmp_path: Path) -> None:
    path = tmp_path / "finished.json"
    path.write_text('{"schema": 1, "entr')
    assert Finished(path).entries == {}


def test_a_busy_machine_is_told() -> None:
    found = climb(FakeBench(by_label, noise=0.6), PAGES)
    assert any("noisy machine" in note for note in found.notes)
    assert not any("noisy machine" in note for note in climb(FakeBench(by_label), PAGES).notes)


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90.0), ("10m", 600.0), ("1.5h", 5400.0)])
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["10", "m", "-3m", "0s", "10 minutes", ""])
def test_durations_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="--budget"):
        parse_duration(text)


def test_too_few_rounds_are_refused() -> None:
    with pytest.raises(UsageError, match="--rounds is 4"):
        Options(rounds=4)


def test_the_seen_survives_its_file() -> None:
    seen = Observation(Recipe(dtype="bf16"), 7, 2.0, 1.0, plain_shapes=((4, 5),), remarks=("slow",))
    assert Observation.from_json(seen.to_json()) == seen


def test_what_would_be_judged_beyond_the_budget_is_not_begun() -> None:
    """Judging the first takes 120 s by how fast prompts are: of 100 s that is too long, and what
    changes no answers is still tried.
    """
    slow = PhaseTime("prefill", 1.0, 1.0, MeanStep(1.0, 50.0, 1.0, 50.0, 50.0))
    bench = FakeBench(lambda state: 30.0 if state.recipe.kv.page_size == 128 else 20.0)
    look = bench.seen
    bench.seen = lambda state: replace(look(state), phases=(slow,))  # type: ignore[method-assign]

    def statuses_of(judged_tokens: int) -> dict[str, str]:
        facts = ClimbFacts(CONFIG, CPU, "latency", "setting", judged_tokens=judged_tokens)
        options = Options(stages=((INT8, PAGES),))
        budget = Budget(100.0, clock=lambda: bench.now)
        gains = predictor({"int8": 1.5, "128": 1.2, "bf16": 1.3})
        search = ClimbSearch(
            facts, bench, budget, options, None, None, gains,
            starts=[DEFAULTS], guess=lambda *_: Together(GUESSED),
        )  # fmt: skip
        return statuses(search.run())

    assert statuses_of(2000) == {"first-guess": "kept", "int8": "not reached",
                                 "pages": "dropped"}  # fmt: skip
    assert bench.asked[1] == "compare fp32"  # the guess without bf16
    bench.now = 0.0
    assert statuses_of(100)["int8"] == "dropped"  # it was measured
