"""The guess comes first, and whatever becomes of it an answer is left; speeds are scripted."""

from __future__ import annotations

from dataclasses import replace

from scripted_search import (
    BAD,
    BF16,
    CONFIG,
    CPU,
    DEFAULTS,
    GUESSED,
    INT8,
    PAGES,
    FakeBench,
    by_label,
    from_defaults,
    pages_cost,
    predictor,
    statuses,
)

from ridgeline.ladder.measuring.process import WorkerError
from ridgeline.ladder.rungs import ClimbFacts
from ridgeline.ladder.searching.budget import Budget
from ridgeline.ladder.searching.progress import Options
from ridgeline.ladder.searching.search import ClimbSearch
from ridgeline.ladder.searching.together import Together
from ridgeline.ladder.state import applied
from ridgeline.models.cost import MeanStep
from ridgeline.profiling.predicting.prediction import PhaseTime


def test_the_guess_is_measured_first_and_its_parts_are_tried_without() -> None:
    bench = FakeBench(pages_cost)
    result = from_defaults(bench, BF16, INT8, PAGES, guess=GUESSED, gains={"int8": 1.4})
    assert bench.asked[:3] == ["open", "look fp32", "compare bf16"]
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


def test_a_change_that_was_the_whole_guess_is_not_measured_again() -> None:
    """Unless another one is kept, and it may be worth more behind that."""
    bench = FakeBench(lambda state: 5.0 if state.recipe.dtype == "bf16" else by_label(state))
    result = from_defaults(bench, BF16, guess=[(BF16, {"dtype": "bf16"})])
    assert statuses(result)["first-guess"] == "dropped"
    assert [asked for asked in bench.asked if asked.startswith("compare bf16")] == ["compare bf16"]
    again = next(each for each in result.outcomes if each.name == "bf16")
    assert (again.status, again.reason) == ("not applicable", "it was tried before all else")


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
