"""`ridgeline optimize --train`: the answer first, never below the defaults, what alters learning
only inside its bound; and from the command line to a run of `ridgeline train`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import make_folder, refused
from train_climbs import ORDERED, ScriptedBench, scripted_climb
from train_runs import Capture, make_text, single_thread

from ridgeline.cli import main
from ridgeline.errors import UsageError
from ridgeline.ladder.outcome import RungOutcome
from ridgeline.ladder.reporting.report import report
from ridgeline.ladder.training import climb as climbing
from ridgeline.ladder.training import order as ordering
from ridgeline.ladder.training.explaining import explained, ladder_to
from ridgeline.ladder.training.forms import StepNumbers, TrainForm
from ridgeline.ladder.training.losses import equal_loss_gain, paired_losses, steps_to
from ridgeline.ladder.training.rungs import RUNGS, TrainOffer, TrainRung
from ridgeline.ladder.training.subject import open_subject
from ridgeline.ladder.training.telling.writing import climb_of
from ridgeline.ladder.training.timing.bench import LocalBench
from ridgeline.ladder.training.timing.processes import ProcessBench
from ridgeline.training.config import BatchOptions, DataOptions, TrainConfig
from ridgeline.training.config_file import load_config
from ridgeline.training.watching.metrics import read_metrics


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with single_thread():
        yield


def by_micro(form: TrainForm) -> float:
    """Faster the more sequences go through at once, up to 8."""
    micro = form.config.batch.micro or 1
    return {1: 1.6, 2: 1.3, 4: 1.1, 8: 1.0}.get(micro, 1.2) + 0.5 * form.config.compile


def outcome(outcomes: list[RungOutcome], name: str) -> RungOutcome:
    return next(each for each in outcomes if each.name == name)


def small(micro: int) -> TrainConfig:
    batch = replace(ORDERED.batch, micro=micro)
    return replace(ORDERED, precision="fp32", recomputation="none", batch=batch)


# The order of things


def test_defaults_and_guess_come_before_anything() -> None:
    made = scripted_climb(
        ScriptedBench(by_micro), lambda config: by_micro(TrainForm(config)), defaults=small(2)
    )
    made.climber.climb()
    micros = [form.config.batch.micro for form in made.bench.timed[:10]]
    assert set(micros) == {2, 8}
    assert outcome(made.climber.outcomes, "first-guess").status == "kept"
    first = outcome(made.climber.outcomes, "first-guess")
    assert first.predicted is not None
    assert first.predicted.speedup == pytest.approx(1.3)
    assert first.achieved is not None
    assert first.achieved.value == pytest.approx(1.3, rel=0.01)
    assert len(first.achieved.after) >= 5
    assert made.climber.best.batch.micro == 8
    assert made.answers[0] == small(2)
    assert made.answers[-1] == made.climber.best


def test_without_predictions_single_changes_lead_there() -> None:
    made = scripted_climb(ScriptedBench(by_micro), defaults=small(2))
    made.climber.climb()
    assert made.climber.best.batch.micro == 8
    names = [each.name for each in made.climber.outcomes if each.status == "kept"]
    assert names == ["micro-batch-4", "micro-batch-8"]
    total = made.climber.total
    assert total is not None
    assert total.value == pytest.approx(1.3, rel=0.02)
    assert outcome(made.climber.outcomes, "micro-batch-16").status == "dropped"
    assert outcome(made.climber.outcomes, "compile").status == "dropped"
    last_rounds = made.bench.timed[-10:]  # the answer against the defaults
    assert {form.config.batch.micro for form in last_rounds} == {2, 8}


def test_nothing_is_switched_off_because_time_ran_out() -> None:
    """The guess is kept; single changes have no time, and leave it as it is."""
    made = scripted_climb(
        ScriptedBench(by_micro),
        lambda config: by_micro(TrainForm(replace(config, compile=False))),
        defaults=small(2),
        budget_s=30.0,
    )
    made.climber.climb()
    assert made.climber.best.batch.micro == 8
    waiting = [each for each in made.climber.outcomes if each.status == "not reached"]
    assert waiting
    assert all("budget" in each.reason for each in waiting)
    assert made.climber.budget.used_s <= 30.0


def test_a_comparison_that_time_runs_out_of_keeps_nothing() -> None:
    """Steps that turn out to take ten times as long: rounds end with the budget."""
    calls: list[int] = []

    def step(form: TrainForm) -> float:
        calls.append(1)
        return (10.0 if len(calls) > 3 else 1.0) * (0.9 if form.config.batch.micro == 4 else 1.0)

    made = scripted_climb(ScriptedBench(step), defaults=small(2), budget_s=60.0)
    made.climber.climb()
    late = outcome(made.climber.outcomes, "micro-batch-4")
    assert late.status == "not reached"
    assert "rounds gave" in late.reason
    assert made.climber.best == small(2)
    assert made.climber.budget.used_s < 60.0 + 2 * 10.0


def test_compiling_is_not_begun_where_there_is_no_time_for_it() -> None:
    made = scripted_climb(ScriptedBench(lambda form: 0.1), defaults=small(16), budget_s=40.0)
    made.climber.climb()
    assert outcome(made.climber.outcomes, "compile").status == "not reached"
    assert not any(form.config.compile for form in made.bench.timed)


def test_ctrl_c_leaves_the_best_so_far() -> None:
    made = scripted_climb(ScriptedBench(by_micro, stop_after=12), defaults=small(2))
    made.climber.climb()
    assert made.climber.is_stopped
    assert made.answers[-1] == made.climber.best
    assert made.climber.best.batch.micro in (2, 4)
    ladder = explained(made.climber, ladder_to(made.climber.best))
    climb = climb_of(made.climber, ladder, None)
    assert any(note.startswith("stopped by") for note in climb.notes)
    assert "Ctrl-C" in report(climb)


def test_an_answer_that_is_slower_in_the_end_is_not_left() -> None:
    calls: list[int] = []

    def step(form: TrainForm) -> float:
        calls.append(1)
        micro = form.config.batch.micro or 1
        late = len(calls) > 40
        return {2: 1.0, 4: 0.9, 8: 0.8}.get(micro, 2.0) + (1.0 if late and micro == 8 else 0.0)

    made = scripted_climb(ScriptedBench(step), defaults=small(2))
    made.climber.climb()
    assert made.climber.best == small(2)
    assert made.answers[-1] == small(2)
    assert not [each for each in made.climber.outcomes if each.status == "kept"]
    assert any("left instead" in note for note in made.climber.notes)


def test_a_change_that_fails_is_recorded() -> None:
    def step(form: TrainForm) -> float:
        if form.config.compile:
            raise RuntimeError("no compiler\nmore")
        return by_micro(form)

    made = scripted_climb(ScriptedBench(step), defaults=small(8))
    made.climber.climb()
    failed = outcome(made.climber.outcomes, "compile")
    assert failed.status == "failed"
    assert failed.reason == "RuntimeError: no compiler"


def test_a_change_that_computes_something_else_is_dropped() -> None:
    def numbers(form: TrainForm) -> StepNumbers:
        return StepNumbers(3.1 if form.config.batch.micro == 4 else 3.0, 1.0)

    made = scripted_climb(ScriptedBench(by_micro, figures=numbers), defaults=small(2))
    made.climber.climb()
    dropped = outcome(made.climber.outcomes, "micro-batch-4")
    assert dropped.status == "dropped"
    assert "does not compute the same" in dropped.reason
    assert made.climber.best.batch.micro == 2


# What alters learning


def halved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rung that a CPU has too: half the numerics, twice the speed."""

    def offer(context: object, best: TrainConfig) -> TrainOffer | str:
        if best.precision == "bf16":
            return "it is on"
        return TrainOffer("bf16", "half", replace(best, precision="bf16"), "", alters=True)

    monkeypatch.setattr(climbing, "RUNGS", (TrainRung("bf16", "tensor cores", "half", offer),))


def falling(rate: float) -> list[float]:
    return [3.0 - rate * step for step in range(60)]


@pytest.mark.parametrize(("rate", "status"), [(0.02, "kept"), (0.0199, "kept"), (0.01, "dropped")])
def test_losses_over_paired_seeds_decide(
    rate: float, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    halved(monkeypatch)
    bench = ScriptedBench(
        lambda form: 0.5 if form.config.precision == "bf16" else 1.0,
        lambda config, count: falling(rate if config.precision == "bf16" else 0.02),
    )
    made = scripted_climb(bench, defaults=small(8))
    made.climber.climb()
    tried = outcome(made.climber.outcomes, "bf16")
    assert tried.status == status
    assert tried.losses is not None
    assert (tried.losses.num_seeds, tried.losses.num_steps) == (3, 60)
    assert (tried.losses.problem is None) == (status == "kept")
    page = report(climb_of(made.climber, [], None))
    assert "Increase of the loss" in page
    assert "to an equal loss, over the defaults" in page
    if status == "kept":
        assert tried.losses.equal_loss_gain == pytest.approx(2.0 * rate / 0.02, rel=0.02)
    else:
        assert "allowed is +0.50%" in tried.reason
        assert made.climber.best == small(8)


def test_without_time_for_losses_it_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    halved(monkeypatch)
    bench = ScriptedBench(lambda form: 0.5 if form.config.precision == "bf16" else 1.0)
    made = scripted_climb(bench, defaults=small(8), budget_s=50.0)
    made.climber.climb()
    tried = outcome(made.climber.outcomes, "bf16")
    assert tried.status == "not reached"
    assert "3 × 20 steps" in tried.reason
    assert made.climber.best == small(8)


def test_time_to_an_equal_loss() -> None:
    slow, fast = ([[4.0 - rate * n for n in range(200)]] * 2 for rate in (0.01, 0.005))
    # twice as fast, and twice as many steps to the same loss: nothing is gained
    assert equal_loss_gain(slow, fast, speedup=2.0) == pytest.approx(1.0, rel=0.02)
    assert equal_loss_gain(slow, slow, speedup=1.5) == pytest.approx(1.5)
    assert equal_loss_gain([[3.0] * 20] * 2, [[3.0] * 20] * 2, speedup=1.5) is None
    assert steps_to([4.0, 3.0, 2.0], 2.5) == pytest.approx(2.5)
    noisy = [[4.0 + seed - 0.1 * n for n in range(20)] for seed in (0.0, 0.3)]
    other = [[x * factor for x in run] for run, factor in zip(noisy, (1.0, 1.02), strict=True)]
    wide = paired_losses(noisy, other, bound=0.02, speedup=1.0)
    assert wide.increase == pytest.approx(0.01)
    assert wide.problem is not None  # two seeds that differ say little: the interval ends far above
    broken = [[*run[:-1], float("nan")] for run in noisy]
    result = paired_losses(noisy, broken, bound=0.02, speedup=1.0)
    assert result.problem == "the loss is no number with it"
    assert json.loads(json.dumps(result.increase, allow_nan=False)) == 0.0


# Which changes there are


def test_what_a_device_cannot_do_says_why() -> None:
    made = scripted_climb(ScriptedBench(by_micro), defaults=small(16))
    made.climber.climb()
    reasons = {
        each.name: each.reason for each in made.climber.outcomes if each.status == "not applicable"
    }
    assert "a CPU has no products in fp8" in reasons["fp8"]
    assert "it fits into memory" in reasons["recomputation"]
    assert reasons["graphs"] == "CUDA graphs need a GPU"
    assert {"fp8", "fp8-row", "fp8-bf16-gradients", "recomputation", "bf16"} <= set(reasons)


def test_what_is_given_is_left_as_it_is() -> None:
    batch = BatchOptions(16, micro=4)
    ordered = replace(ORDERED, batch=batch, precision="fp32", recomputation="elementwise")
    made = scripted_climb(ScriptedBench(by_micro), ordered=ordered)
    made.climber.climb()
    best = made.climber.best
    assert (best.batch.micro, best.recomputation, best.precision) == (4, "elementwise", "fp32")
    reasons = [each.reason for each in made.climber.outcomes if each.status == "not applicable"]
    for flag in ("--micro-batch 4", "--recomputation elementwise", "--precision fp32"):
        assert f"{flag} is given" in reasons


def test_less_is_computed_again_where_fewer_sequences_fit() -> None:
    ordered = replace(ORDERED, batch=BatchOptions(16))
    tight = replace(small(16), recomputation="blocks")
    made = scripted_climb(ScriptedBench(by_micro), ordered=ordered, defaults=tight)
    context = replace(made.climber.job.context, free_bytes=95 << 20)
    offer = RUNGS[1].offer(context, tight)
    assert isinstance(offer, TrainOffer)
    assert offer.config.recomputation in ("none", "elementwise", "attention")
    assert context.fits(offer.config)


def test_graphs_are_offered_where_they_can_be() -> None:
    made = scripted_climb(ScriptedBench(by_micro))
    context = replace(made.climber.job.context, device="cuda:0")
    rung = next(each for each in RUNGS if each.name == "graphs")
    offer = rung.offer(context, replace(small(8), precision="bf16"))
    assert isinstance(offer, TrainOffer)
    assert offer.config.graphs
    assert not offer.alters
    assert rung.offer(context, offer.config) == "it is on"
    assert "needs bf16 or fp8" in str(rung.offer(context, small(8)))
    answer = replace(offer.config, precision="fp8", compile=True)
    names = [step.name for step in ladder_to(answer)]
    assert names[3:] == ["bf16", "attention", "micro-batch", "graphs", "compile", "fp8"]


# What is timed


@pytest.fixture(scope="module")
def bench() -> LocalBench:
    config = TrainConfig(shape="tiny", data=DataOptions(None, 32), batch=BatchOptions(4))
    return LocalBench(open_subject(config), "cpu")


def test_every_form_of_the_ladder_computes_the_same(bench: LocalBench) -> None:
    """From the plain loop to the answer: the loss of the same sequences, and the gradients."""
    batch = BatchOptions(4, micro=2)
    answer = replace(
        small(2), data=DataOptions(None, 32), batch=batch, recomputation="blocks", precision="bf16"
    )
    steps = ladder_to(answer)
    names = ["plain", "fused-loss", "fused-ops", "bf16", "attention", "micro-batch"]
    assert [step.name for step in steps] == names
    assert steps[-1].form == TrainForm(answer)
    numbers = [bench.numbers(step.form, 4) for step in steps]
    for one in numbers[:3]:
        assert one.loss == pytest.approx(numbers[0].loss, rel=1e-5)
    for one in numbers[3:]:
        assert one.loss == pytest.approx(numbers[0].loss, rel=2e-3)
        assert one.gradient_norm == pytest.approx(numbers[2].gradient_norm, rel=1e-2)


def test_timing_leaves_the_weights_as_they_are(bench: LocalBench) -> None:
    form = TrainForm(replace(small(2), data=DataOptions(None, 32), batch=BatchOptions(4, 2)))
    before = bench.numbers(form, 4)
    assert bench.step_s(form, 0.01) > 0
    assert bench.numbers(form, 4) == before


def test_a_long_step_is_timed_by_a_part(bench: LocalBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two passes of four, twice their time and one update: about what the whole takes."""
    form = TrainForm(replace(small(1), data=DataOptions(None, 32), batch=BatchOptions(4, 1)))
    ticks = iter(range(100_000))
    timed = LocalBench(bench.subject, "cpu", clock=lambda: float(next(ticks)))
    runner = timed._runner(form)
    runner.update_s = 0.25
    timed.warm(form)
    timed._part_s[form] = 100.0
    # the clock ticks with every look at it: two seconds for the part
    assert timed.step_s(form, 0.0) == pytest.approx(0.25 + 2 * (2.0 - 0.25))


def test_runs_of_one_seed_are_the_same_and_learn(bench: LocalBench) -> None:
    config = replace(
        small(4), data=DataOptions(None, 32), batch=BatchOptions(4, 4),
        optimizer=replace(ORDERED.optimizer, lr=1e-2),
        schedule=replace(ORDERED.schedule, warmup=0),
    )  # fmt: skip
    first = bench.losses(config, 1, 6)
    assert first == bench.losses(config, 1, 6)
    assert first != bench.losses(config, 2, 6)
    assert first[-1] < first[0] - 0.5


@pytest.mark.slow
def test_compiled_norms_compute_the_same(bench: LocalBench) -> None:
    config = replace(small(2), data=DataOptions(None, 32), batch=BatchOptions(4, 2))
    plain, compiled = (
        bench.numbers(TrainForm(replace(config, compile=each)), 4) for each in (False, True)
    )
    assert compiled.loss == pytest.approx(plain.loss, rel=1e-5)
    assert compiled.gradient_norm == pytest.approx(plain.gradient_norm, rel=1e-4)


@pytest.mark.slow
def test_a_process_of_its_own_measures_the_same(bench: LocalBench, tmp_path: Path) -> None:
    config = replace(small(2), data=DataOptions(None, 32), batch=BatchOptions(4, 2))
    apart = ProcessBench(config, "cpu", tmp_path)
    try:
        form = TrainForm(config)
        assert apart.numbers(form, 4).loss == pytest.approx(bench.numbers(form, 4).loss, rel=1e-5)
        assert apart.step_s(form, 0.01) > 0
        assert apart.losses(config, 1, 3) == pytest.approx(bench.losses(config, 1, 3), rel=1e-4)
        assert set(apart.ledger.seconds) >= {"loading", "rounds", "quality"}
    finally:
        apart.close()


# The command


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"), tie_word_embeddings=True)


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of one step, and nothing is compiled."""
    monkeypatch.setattr(climbing, "RUNGS", tuple(rung for rung in RUNGS if rung.name != "compile"))
    usual = ordering.TrainClimbOrder.__init__
    monkeypatch.setattr(
        ordering.TrainClimbOrder, "__init__",
        lambda self, *args, **more: usual(self, *args, **more, round_s=0.001),
    )  # fmt: skip


def test_what_it_leaves_is_what_train_runs(
    model: Path, tmp_path: Path, capsys: Capture, brief: None
) -> None:
    text, out = make_text(tmp_path), tmp_path / "fast"
    argv = ["optimize", "--train", str(model), "--data", str(text), "--device", "cpu"]
    argv += ["--sequence-length", "32", "--batch", "4", "--lr", "1e-2", "--out", str(out)]
    assert main([*argv, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    climb = document["climb"]
    assert climb["unit"] == "learned tokens/s"
    assert [step["name"] for step in climb["ladder"]][:2] == ["fused-loss", "fused-ops"]
    assert climb["ladder"][0]["achieved"] is not None
    assert climb["plain"] is not None
    assert {"loading", "rounds"} <= set(climb["time_ledger"])
    assert {"train.json", "climb.json", "records.json", "report.html", "card.svg"} <= {
        path.name for path in out.iterdir()
    }
    config = load_config(out)
    assert config.optimizer.lr == 1e-2
    assert (config.batch.sequences, config.data.sequence_length) == (4, 32)
    assert "auto" not in (config.precision, config.recomputation)
    assert config.batch.micro is not None
    records = json.loads((out / "records.json").read_text())["records"]
    assert {"tokens_per_s", "step"} <= set(records[0]["values"])
    page = (out / "report.html").read_text()
    for words in ("What was tried", "The ladder", "What is learned", "Memory plan", "a step"):
        assert words in page, words
    # the chain: what it says to type is what runs
    assert climb["serve_command"][:3] == ["ridgeline", "train", str(out / "train.json")]
    run = tmp_path / "run"
    assert main(["train", str(out / "train.json"), "--steps", "3", "--out", str(run),
                 "--device", "cpu"]) == 0  # fmt: skip
    rows = [row for row in read_metrics(run) if "lr" in row]
    assert [row["step"] for row in rows] == [1, 2, 3]
    ran = load_config(run)
    assert (ran.batch, ran.precision, ran.recomputation) == (
        config.batch, config.precision, config.recomputation,
    )  # fmt: skip
    capsys.readouterr()
    assert main(["report", "show", str(out)]) == 0
    assert "learned tokens/s" in capsys.readouterr().out


def test_a_shape_needs_neither_text_nor_tokenizer(
    tmp_path: Path, capsys: Capture, brief: None
) -> None:
    out = tmp_path / "fast"
    argv = ["optimize", "--train", "--shape", "tiny", "--device", "cpu", "--out", str(out)]
    assert main([*argv, "--sequence-length", "16", "--batch", "2", "--budget", "30s"]) == 0
    told = capsys.readouterr().out
    assert "of Python's help, which is built in" in " ".join(told.split())
    assert "--tokenizer MODEL --data FILE" in told
    assert load_config(out).shape == "tiny"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--train", "--workload", "batch-1"), "--workload does not go with --train"),
        (("--train", "--for", "throughput"), "--for does not go with --train"),
        (("--train", "--dry-run"), "--dry-run does not go with --train"),
        (("--train", "--check", "x"), "--check does not go with --train"),
        (("--batch", "4"), "--batch goes with --train"),
        (("--max-loss-increase", "0.1"), "--max-loss-increase goes with --train"),
        (("--train", "--max-loss-increase", "nan"), "--max-loss-increase is nan; give a share"),
        (("--train", "--rounds", "2"), "--rounds is 2; give at least 5"),
        (("--train", "--micro-batch", "3"), "micro_batch is 3, which does not divide"),
        (("--train", "--precision", "fp8"), "precision fp8 requires a GPU with fp8"),
        (("--train", "--sequence-length", "100000"), "sequence_length is 100000;"),
        (("--train", "--shape", "tiny"), "give either a model, or --shape"),
    ],
)
def test_what_does_not_go_together_is_refused(
    flags: tuple[str, ...], words: str, model: Path, tmp_path: Path, capsys: Capture
) -> None:
    argv = ("optimize", str(model), "--device", "cpu", "--out", str(tmp_path / "out"), *flags)
    refused(capsys, UsageError, words, *argv)
    assert not (tmp_path / "out").exists()


def test_a_config_file_is_a_run(tmp_path: Path, capsys: Capture) -> None:
    missing = str(tmp_path / "train.json")
    refused(capsys, UsageError, "cannot read train.json", "train", missing, "--steps", "1")
    (tmp_path / "train.json").write_text('{"version": 1, "precisoin": "bf16"}')
    refused(capsys, UsageError, "precisoin precision", "train", missing, "--steps", "1")
