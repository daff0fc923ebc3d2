"""What a search decides, on formulas: the budget holds, waves are decided the same after a kill at
any moment, and good settings are found.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_studies import (
    OWN,
    SPACE,
    ScriptedTrials,
    bowl,
    in_folder,
    order,
    searched,
)

from ridgeline.errors import CheckpointError, NumericsError, RequestError, UsageError
from ridgeline.tuning.kept_folder import differing
from ridgeline.tuning.pages.search_page import search_page
from ridgeline.tuning.searching.halving import Move, Room, Rungs, TrialState
from ridgeline.tuning.searching.journal import JOURNAL, journal_in_memory
from ridgeline.tuning.searching.outcome import study_document
from ridgeline.tuning.searching.process import LossProcess
from ridgeline.tuning.searching.search import (
    JobResult,
    SearchBudget,
    SearchLoop,
    SearchOrder,
    TrialJob,
    check_any,
)
from ridgeline.tuning.searching.space import (
    Between,
    OneOf,
    Point,
    SearchSpace,
    parse_choices,
)
from ridgeline.tuning.searching.surrogate import Surrogate

# The space


@given(st.lists(st.floats(0, 1), min_size=5, max_size=5))
def test_a_place_gives_its_point_back(place: list[float]) -> None:
    point = SPACE.at(place)
    assert SPACE.holds(point)
    assert SPACE.at(SPACE.place(point)) == point


def test_ranges_above_zero_are_of_ratios() -> None:
    assert Between(1e-5, 1e-1).at([0.5]) == pytest.approx(1e-3)
    assert Between(0.0, 10.0).at([0.5]) == 5.0
    assert OneOf((1, 10, 100)).at([0.5]) == 10
    assert OneOf((0, 10, 100)).at([0.5]) == 10  # even: 50 lies nearer to 10
    assert Between(4, 64, is_whole=True).at([0.5]) == 16


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("1e-3..1e-5", float, "smaller one first"),
        ("a..b", float, "not a number"),
        ("4,x", int, "'x' is not a whole number"),
        (",", int, "nothing to choose"),
        ("4,4", int, "twice"),
        ("a..b", str, "no number; give values"),
        ("-1..1", float, "from zero on"),
        ("maybe", bool, "yes or no"),
        ("1e-5..inf", float, "smaller one first"),
    ],
)
def test_choices_that_make_no_sense(text: str, kind: type, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_choices("lr", text, kind)


def test_an_empty_space_is_refused() -> None:
    with pytest.raises(UsageError, match="nothing to search"):
        SearchSpace(())
    with pytest.raises(UsageError, match="twice"):
        SearchSpace((("lr", OneOf((1,))), ("lr", OneOf((2,)))))


# Halving


def test_shares_and_costs() -> None:
    rungs = Rungs(3, 3)
    assert rungs.shares == pytest.approx((1 / 9, 1 / 3, 1.0))
    assert sum(rungs.cost(goal - 1, goal) for goal in (1, 2, 3)) == pytest.approx(1.0)
    for wrong in ({"keep": 1}, {"num": 0}):
        with pytest.raises(UsageError):
            Rungs(**wrong)


def trial(number: int, *losses: float, problem: str = "") -> TrialState:
    return TrialState(number, {"n": number}, losses, problem)


def test_there_is_always_enough_left_for_an_answer() -> None:
    room = Room(Rungs(), 1.0)
    assert room.allows(0, 0, is_leader=True)
    room.take(Move({}, 1))
    assert not room.allows(0, 1)  # 1/9, and 8/9 for the leader
    assert not room.allows(0, 0, is_leader=True)  # it could not be brought to its end
    assert room.allows(1, 1, is_leader=True)
    room.take(Move({}, 2, 1))
    assert not room.allows(1, 2)
    assert room.allows(2, 2, is_leader=True)
    room.take(Move({}, 3, 1))
    assert room.left == pytest.approx(0.0)
    assert not any(room.allows(reached, 3) for reached in (0, 1, 2))


def test_no_work_is_begun_that_could_not_come_to_an_answer() -> None:
    """With 0.8 of a run left and an answer there, only what has passed two rungs may go on."""
    room = Room(Rungs(), 0.8)
    assert [room.allows(reached, 3) for reached in (0, 1, 2)] == [False, False, True]
    assert not room.allows(2, 2)  # the leader has none, and it would be the leader's


def test_a_run_moves_once_in_a_wave() -> None:
    trials = [trial(number, 5.0 - number) for number in range(6)]
    space = SearchSpace((("n", OneOf(tuple(range(6)))),))
    surrogate, room, moves = Surrogate(space, Rungs(), trials, 0), Room(Rungs(), 10.0), []
    while (move := surrogate.best_move(room)) is not None:
        surrogate.imagine(move)
        moves.append(move)
    assert sorted(move.trial or 0 for move in moves) == list(range(6))
    assert {move.goal for move in moves} == {2}


@settings(max_examples=6, deadline=None)
@given(st.floats(1.0, 3.0), st.integers(0, 5))
def test_a_budget_is_kept_and_leaves_an_answer(runs: float, seed: int) -> None:
    loop = searched(own_order=order(runs, seed=seed))
    assert loop.used_runs <= runs + 1e-6
    assert loop.best is not None
    assert loop.trials[0].point == OWN
    for number, state in enumerate(loop.trials):
        assert state.number == number
        assert SPACE.holds(state.point)
    points = [tuple(state.point.items()) for state in loop.trials]
    assert len(set(points)) == len(points), "nothing is tried twice"


def test_good_settings_are_found() -> None:
    own, best = bowl(OWN, 1.0), bowl({"lr": 3e-3, "batch": 4, "schedule": "cosine"}, 1.0)
    regrets = []
    for seed in range(2):
        answer = searched(own_order=order(8.0, seed=seed)).best
        assert answer is not None
        regrets.append((answer.losses[-1] - best) / (own - best))
    assert max(regrets) < 0.05, regrets


def test_a_gain_that_is_too_small_is_none() -> None:
    """Beside the best, where little is to be gained for sure, or where nothing is known."""
    process = LossProcess(np.array([0]), num_rungs=1, random=np.random.default_rng(0))
    places = np.array([[0.0], [0.02], [0.04], [0.08], [0.1], [0.12], [0.2], [0.3]])
    losses = np.array([-0.5, -0.52, -0.55, -0.55, -0.52, -0.5, 0.3, 1.5])
    process.learn(places, np.zeros(len(places)), losses)
    moves, best = np.array([[0.06], [0.9]]), places[2:3]
    near, far = process.improvements(moves, best)
    assert near > 0
    less_near, less_far = process.improvements(moves, best, 0.2)
    assert less_near < 0.1 * near
    assert less_far > 0.5 * far
    assert less_far > less_near


def test_a_small_space_ends_before_its_budget() -> None:
    space = SearchSpace((("batch", OneOf((4, 8))),))
    loop = SearchLoop(
        journal_in_memory(space), SearchOrder(space, SearchBudget(50.0)), ScriptedTrials(by_batch)
    )
    loop.run()
    assert [state.reached for state in loop.trials] == [3, 3]
    assert loop.best is not None
    assert loop.best.point == {"batch": 4}


def by_batch(point: Point, share: float) -> float:
    return 1.0 + float(point["batch"]) - share


def test_an_answer_comes_though_the_best_run_changed_late() -> None:
    """Enough was left for the first run alone, which then fell behind the second."""
    trials = [
        TrialState(0, {"batch": 4}, (3.0, 9.0)),
        TrialState(1, {"batch": 8}, (4.0,)),
    ]
    space, rungs = SearchSpace((("batch", OneOf((4, 8, 16))),)), Rungs()
    surrogate = Surrogate(space, rungs, trials, 0)
    move = surrogate.best_move(Room(rungs, 0.7))
    assert move == Move({"batch": 4}, 3, 0)
    assert surrogate.best_move(Room(rungs, 0.5)) is None  # nothing could come to its end
    surrogate.imagine(move)
    assert surrogate.best_move(Room(rungs, 0.7)) is None  # it is on its way


@pytest.mark.parametrize("seed", range(6))
def test_a_small_budget_has_an_answer(seed: int) -> None:
    """Losses at rungs that say nothing of those at the end: the best run changes all the time."""

    def noise(point: Point, share: float) -> float:
        what = math.log10(float(point["lr"])) * float(point["batch"]) * (1.0 + share + seed)
        return 3.0 + math.sin(997.0 * what)

    for runs in (1.0, 1.4, 2.0, 3.0):
        loop = SearchLoop(journal_in_memory(SPACE), order(runs, seed=seed), ScriptedTrials(noise))
        loop.run()
        assert loop.best is not None, f"{runs} runs"
        assert loop.used_runs <= runs + 1e-9


@pytest.mark.parametrize(("num", "together"), [(1, 3), (3, 3), (5, 5)])
def test_as_many_are_decided_as_run_at_once(num: int, together: int) -> None:
    class Counting(ScriptedTrials):
        def run(self, jobs: Sequence[TrialJob]) -> Iterator[JobResult]:
            sizes.append(len(jobs))
            yield from super().run(jobs)

    sizes: list[int] = []
    searched(Counting(num_parallel=num), order(6.0))
    assert sizes[0] == 6  # even over the space
    assert set(sizes[1:4]) == {together}
    assert max(sizes[1:]) == together


# Time


def test_time_is_a_budget_too() -> None:
    trials = ScriptedTrials(seconds=60.0)
    loop = searched(trials, order(None, 240.0))
    assert [job.point for job in trials.jobs[:1]] == [OWN]  # alone: it shows what a run takes
    assert 180.0 < sum(loop.journal.seconds()) <= 240.0 + 1.0  # of diverged trials
    assert loop.best is not None


def test_a_budget_too_small_for_one_trial() -> None:
    trials = ScriptedTrials(seconds=900.0)
    with pytest.raises(UsageError, match=r"too small for one trial: a whole run takes about 15:00"):
        searched(trials, order(None, 600.0))
    assert len(trials.jobs) == 1
    with pytest.raises(UsageError, match="too small for one trial"):
        SearchBudget(0.5)
    with pytest.raises(UsageError, match="--budget TIME or --runs N"):
        SearchBudget()


# What cannot be learned


def test_diverged_trials_are_counted_and_do_not_stop_the_search() -> None:
    loop = searched()
    document = study_document(loop)
    diverged = [state for state in loop.trials if state.is_diverged]
    assert diverged
    assert document["num_diverged"] == len(diverged)
    assert all(float(state.point["lr"]) > 5e-2 for state in diverged)
    page = search_page(document, "tiny <b>")
    assert f"{len(diverged)} diverged and were given up." in page
    assert "<b> ·" not in page
    for heading in ("From rung to rung", "What each setting does", "Trials"):
        assert heading in page


def test_importance_names_what_matters() -> None:
    document = study_document(searched(own_order=order(7.0)))
    importance = document["importance"]
    assert set(importance) == set(SPACE.names)
    assert max(importance, key=importance.__getitem__) == "lr"
    lowest = min(document["responses"]["lr"], key=lambda each: each[1])
    assert 3e-4 < lowest[0] < 3e-2


def test_a_study_in_which_everything_fails_says_why() -> None:
    loop = searched(ScriptedTrials(lambda point, share: math.inf))
    with pytest.raises(NumericsError, match="all 6 trials were given up; the first: the"):
        check_any(loop.trials)
    failed = [trial(0, problem="out of memory")]
    with pytest.raises(RequestError, match="out of memory"):
        check_any(failed)
    assert search_page(study_document(loop), "tiny").count("</html>") == 1


# The journal


def whole_study(folder: Path) -> SearchLoop:
    with in_folder(folder, resume=False) as journal:
        loop = SearchLoop(journal, order(), ScriptedTrials())
        loop.run()
        return loop


def test_a_kill_at_any_byte_gives_the_same_study(tmp_path: Path) -> None:
    undisturbed = whole_study(tmp_path / "whole").trials
    data = (tmp_path / "whole" / JOURNAL).read_bytes()
    cuts = [round(share * len(data)) for share in (0.0, 0.03, 0.3, 0.6, 0.9, 1.0)]
    cuts += [data.index(b'"wave"') + 40, data.rindex(b'"rung-') + 9, len(data) - 1]
    for number, cut in enumerate(cuts):
        folder = tmp_path / str(number)
        with in_folder(folder, resume=False):
            pass
        (folder / JOURNAL).write_bytes(data[:cut])
        with in_folder(folder, resume=True) as journal:
            loop = SearchLoop(journal, order(), ScriptedTrials())
            loop.run()
            assert loop.trials == undisturbed, f"cut at {cut} of {len(data)}"


@pytest.mark.parametrize("jobs", [0, 5, 9])
def test_work_that_is_done_is_not_done_again(tmp_path: Path, jobs: int) -> None:
    folder, first, second = tmp_path / "study", ScriptedTrials(stop_after=jobs), ScriptedTrials()
    with (
        pytest.raises(KeyboardInterrupt),
        in_folder(folder, resume=False) as journal,
    ):
        SearchLoop(journal, order(), first).run()
    with in_folder(folder, resume=True) as journal:
        loop = SearchLoop(journal, order(), second)
        loop.run()
        trials = loop.trials
    assert trials == whole_study(tmp_path / "whole").trials
    done = [(job.number, job.share) for job in first.jobs + second.jobs]
    assert len(set(done)) == len(done)


def test_a_longer_budget_goes_on(tmp_path: Path) -> None:
    before = whole_study(tmp_path / "study").trials
    with in_folder(tmp_path / "study", resume=True) as journal:
        loop = SearchLoop(journal, order(5.0), ScriptedTrials())
        loop.run()
        after = loop.trials
    assert len(after) > len(before)
    for old, new in zip(before, after, strict=False):
        assert new.losses[: old.reached] == old.losses


def test_optuna_reads_the_journal(tmp_path: Path) -> None:
    """With its own classes, as its dashboard does."""
    import optuna

    whole_study(tmp_path / "study")
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "study" / JOURNAL))
    storage = optuna.storages.JournalStorage(backend)
    study = optuna.load_study(study_name="search", storage=storage)
    with in_folder(tmp_path / "study", resume=True) as journal:
        loop = SearchLoop(journal, order(), ScriptedTrials())
        assert loop.best is not None
        assert study.best_params == loop.best.point
        assert study.best_value == loop.best.losses[-1]
        assert len(study.trials) == len(loop.trials)


def test_folders_that_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    with pytest.raises(UsageError, match="no study to resume"), in_folder(folder, resume=True):
        pass
    with (
        in_folder(folder, resume=False),
        pytest.raises(UsageError, match="searched by another process"),
        in_folder(folder, resume=True),
    ):
        pass
    with pytest.raises(UsageError, match="add --resume"), in_folder(folder, resume=False):
        pass
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(UsageError, match="not empty"), in_folder(tmp_path / "other", resume=False):
        pass
    (folder / JOURNAL).write_text("no json\n{}\n")
    with pytest.raises(CheckpointError, match="cannot be read"), in_folder(folder, resume=True):
        pass


def test_what_differs_is_listed() -> None:
    saved = {"over": {"lr": {"low": 1e-5}}, "train": {"seed": 0}, "rungs": 3}
    given = {"over": {"lr": {"low": 1e-4}, "batch": {}}, "train": {"seed": 0}, "rungs": 3}
    assert differing(saved, given) == ["over.lr.low 0.0001, was 1e-05", "over.batch {}, was None"]
