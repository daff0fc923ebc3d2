"""The scaling law: constants that made the losses come back, intervals hold them, runs are read
from their folders, and shapes of equal cost cost the same.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from command_line import make_folder, refused
from train_runs import Capture, make_text, single_thread

from ridgeline.cli import main
from ridgeline.cli.tune.scale import problems
from ridgeline.errors import UsageError
from ridgeline.models.shapes import describe_shape, shape_name
from ridgeline.tuning.network_shapes import cost_of, equal_shape
from ridgeline.tuning.rates.verdict import verdict_of
from ridgeline.tuning.scaling.law import (
    LawPoint,
    ScalingLaw,
    fit_law,
    law_intervals,
)
from ridgeline.tuning.scaling.runs import law_points

CHINCHILLA = ScalingLaw(1.69, 406.4, 0.34, 410.7, 0.28)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with single_thread():
        yield


def made_points(noise: float, seed: int = 0) -> list[LawPoint]:
    draw = np.random.default_rng(seed)
    return [
        LawPoint("", n, d, CHINCHILLA.loss(n, d) * float(np.exp(draw.normal(0.0, noise))))
        for n in np.geomspace(1e6, 1e9, 5)
        for d in np.geomspace(2e7, 2e10, 5)
    ]


def test_constants_come_back() -> None:
    law = fit_law(made_points(0.0))
    assert law.floor == pytest.approx(CHINCHILLA.floor, rel=2e-3)
    assert law.size_exponent == pytest.approx(CHINCHILLA.size_exponent, rel=5e-3)
    assert law.data_exponent == pytest.approx(CHINCHILLA.data_exponent, rel=5e-3)
    parameters, tokens = law.best_split(1e21) or (0.0, 0.0)
    expected = CHINCHILLA.best_split(1e21)
    assert expected is not None
    assert (parameters, tokens) == pytest.approx(expected, rel=0.05)
    assert 6 * parameters * tokens == pytest.approx(1e21)


def test_the_best_split_is_the_lowest() -> None:
    best = CHINCHILLA.best_split(1e20)
    assert best is not None
    for times in (0.9, 1.1):
        other = CHINCHILLA.loss(best[0] * times, best[1] / times)
        assert CHINCHILLA.loss(*best) < other


@pytest.mark.slow
def test_intervals_hold_the_truth() -> None:
    """95% each: of three constants over five sets of runs 12 of 15 at least."""
    inside = 0
    for seed in range(5):
        intervals, laws = law_intervals(made_points(0.003, seed), draws=40)
        assert len(laws) == 40
        for name in ("floor", "size_exponent", "data_exponent"):
            assert intervals[name].low < intervals[name].high
            inside += intervals[name].low <= getattr(CHINCHILLA, name) <= intervals[name].high
    assert inside >= 11, inside


def test_what_makes_no_difference_has_no_split() -> None:
    points = [LawPoint("", n, d, 2.0 + 100 / d**0.5) for n in (1e6, 1e7) for d in (1e6, 1e7, 1e8)]
    law = fit_law(points)
    assert law.size_factor * 1e6**-law.size_exponent < 1e-3
    with pytest.raises(UsageError, match="6 finished runs of 1 sizes"):
        fit_law([LawPoint("", 1e6, d, 3.0) for d in range(1, 7)])


# Shapes


@pytest.mark.parametrize("equal", ["parameters", "flops"])
@pytest.mark.parametrize("parts", [{"layers": 1}, {"layers": 8}, {"layers": 4, "heads": 2},
                                   {"width": 96}, {"layers": 3, "width": 96}])  # fmt: skip
def test_shapes_of_equal_cost(parts: dict[str, int], equal: str) -> None:
    name = equal_shape("tiny", parts, equal)  # type: ignore[arg-type]
    config, base = describe_shape(name).config, describe_shape("tiny").config
    cost = cost_of(config, equal)  # type: ignore[arg-type]
    assert cost == pytest.approx(cost_of(base, equal), rel=0.02)  # type: ignore[arg-type]
    assert config.num_layers == parts.get("layers", 2)
    assert config.num_heads == parts.get("heads", 4)
    assert config.hidden_size == parts.get("width", config.hidden_size)


def test_shapes_that_cannot_be() -> None:
    with pytest.raises(UsageError, match="no network with width 512"):
        equal_shape("tiny", {"width": 512}, "parameters")
    assert equal_shape("tiny", {"layers": 4}, "free") == "tiny:layers=4"
    assert equal_shape("tiny:layers=4", {"width": 64}, "free") == "tiny:layers=4,width=64,mlp=128"
    assert shape_name("tiny", {}) == "tiny"
    for wrong in ("tiny:layers", "tiny:depth=3", "tiny:layers=0", "tiny:layers=-1", "tiny:"):
        with pytest.raises(UsageError, match="is not understood"):
            describe_shape(wrong)
    with pytest.raises(UsageError, match="unknown"):
        describe_shape("tinny:layers=3")


# Runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six short runs of two widths."""
    folder = tmp_path_factory.mktemp("scale")
    text, tokenizer = make_text(folder), make_folder(folder / "tokenizer")
    for width in (16, 32):
        for steps in (3, 6, 12):
            shape = f"tiny:layers=1,width={width},heads=2,mlp={2 * width}"
            argv = ["train", "--shape", shape, "--tokenizer", str(tokenizer), "--data", str(text)]
            argv += ["--sequence-length", "32", "--batch", "2", "--lr", "1e-2", "--device", "cpu"]
            argv += ["--steps", str(steps), "--warmup", "1", "--eval-sequences", "2"]
            assert main([*argv, "--out", str(folder / "runs" / f"{width}-{steps}"), "--json"]) == 0
    return folder / "runs"


def test_runs_are_fitted_and_drawn(runs: Path, tmp_path: Path, capsys: Capture) -> None:
    capsys.readouterr()
    argv = ["tune", "scale", str(runs), "--out", str(tmp_path / "law"), "--draws", "20", "--json"]
    assert main(argv) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["points"]) == 6
    assert len({point["parameters"] for point in document["points"]}) == 2
    assert document["error"] < 0.05
    page = (tmp_path / "law" / "report.html").read_text()
    assert "by the law" in page
    assert main(argv[:-1]) == 0
    assert "loss = " in capsys.readouterr().out


def test_the_best_settings_of_a_size_count(runs: Path, tmp_path: Path) -> None:
    """Another seed is another point; another rate of the same size and tokens is left out."""
    others = {"better": (1e-3, 0, 0.5), "worse": (2e-3, 0, 1.5), "seed": (1e-3, 7, 0.6)}
    for name, (lr, seed, times) in others.items():
        shutil.copytree(runs / "16-6", tmp_path / name)
        config = json.loads((runs / "16-6" / "train.json").read_text())
        config["optimizer"]["lr"], config["seed"] = lr, seed
        (tmp_path / name / "train.json").write_text(json.dumps(config))
        rows = [
            json.loads(row)
            for row in (runs / "16-6" / "metrics.jsonl").read_text().split("\n")
            if row
        ]
        for row in rows:
            if "held_out_loss" in row:
                row["held_out_loss"] *= times
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    folders = [*sorted(runs.iterdir()), *(tmp_path / name for name in others)]
    points, left_out = law_points(folders)
    names = {Path(point.name).name for point in points}
    assert {"better", "seed", "16-3", "32-6"} <= names
    assert not {"worse", "16-6"} & names
    assert len(left_out) == 2
    assert all("better, of its size and tokens, ended lower" in line for line in left_out)


def test_runs_that_say_nothing(runs: Path, tmp_path: Path, capsys: Capture) -> None:
    out = ["--out", str(tmp_path / "law")]
    (tmp_path / "empty").mkdir()
    refused(
        capsys, UsageError, "empty is no run metrics.jsonl",
        "tune", "scale", str(tmp_path / "empty"), *out,
    )  # fmt: skip
    one = str(runs / "16-3")
    refused(capsys, UsageError, "1 finished runs 5 runs or more", "tune", "scale", one, *out)
    refused(capsys, UsageError, "--draws is 1", "tune", "scale", one, "--draws", "1", *out)
    refused(capsys, UsageError, "--flops is -1", "tune", "scale", one, "--flops", "-1", *out)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "train.json").write_text((runs / "16-3" / "train.json").read_text())
    (broken / "metrics.jsonl").write_text('{"step": 0, "held_out_loss": 7.0}\n')
    argv = ["tune", "scale", str(runs), str(broken), "--draws", "20", *out, "--json"]
    assert main(argv) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["left_out"] == [f"{broken}: it has no metrics of steps"]
    other = json.loads((runs / "16-3" / "train.json").read_text())
    other["data"]["path"] = "/other/text"
    (broken / "train.json").write_text(json.dumps(other))
    metrics = (runs / "16-3" / "metrics.jsonl").read_text()
    (broken / "metrics.jsonl").write_text(metrics)
    (broken / "checkpoints").symlink_to(runs / "16-3" / "checkpoints")
    refused(
        capsys, UsageError, "losses of different text do not compare",
        "tune", "scale", str(runs), str(broken), *out,
    )  # fmt: skip


# The verdict of a range test


def test_a_suggestion_stays_below_what_diverges() -> None:
    rates = [1e-4 * 10 ** (step / 20) for step in range(80)]
    steady = [5.0 if lr < 1e-3 else 4.0 if lr < 1e-1 else 9.0 for lr in rates]
    narrow = [5.0 if lr < 1e-3 else 4.0 if lr < 2e-3 else 9.0 for lr in rates]
    apart = verdict_of(rates, [steady, steady, steady])
    close = verdict_of(rates, [narrow, narrow, narrow])
    assert apart.suggested is not None
    assert close.suggested is not None
    flat, climbs = apart.seeds[0].flattens_at, close.seeds[0].diverges_at
    assert flat is not None
    assert climbs is not None
    assert apart.suggested == pytest.approx(2 * flat)
    assert close.suggested == pytest.approx(climbs / 2)
    assert not close.problem
    unlike = verdict_of(rates, [steady, narrow])
    assert "seeds do not agree" in unlike.problem


def test_exponents_at_their_ends_are_said() -> None:
    assert problems(CHINCHILLA) == []
    (line,) = problems(ScalingLaw(0.5, 6e3, 0.9, 7.6, 0.05))
    assert "do not say b:" in line
