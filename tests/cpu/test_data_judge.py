"""`data judge`: a filter that takes noise out is kept, one that takes text out is not, and neither
is one that changes nothing beyond noise.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import make_folder
from train_runs import single_thread
from written_text import TEXT

from ridgeline.cli.arguments.parser import Parser
from ridgeline.cli.data import judge as command
from ridgeline.cli.terminal import Terminal
from ridgeline.errors import CHECK_FAILED_EXIT_CODE, NumericsError, UsageError
from ridgeline.ladder.filters.judge import FilterOrder, reason_words
from ridgeline.ladder.training.losses import PairedShares, paired_losses, paired_shares
from ridgeline.tuning.short_run import ShortRun


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with single_thread():
        yield


def noise(count: int) -> str:
    draw = random.Random(0)
    return "".join(chr(draw.randrange(33, 127)) for _ in range(count))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clean text, the same with as much noise between, and other text to judge by."""
    folder = tmp_path_factory.mktemp("filter")
    make_folder(folder / "tokenizer")
    parts = [TEXT[first : first + 2000] for first in range(0, 40_000, 2000)]
    (folder / "clean.jsonl").write_text("".join(json.dumps({"text": p}) + "\n" for p in parts))
    dirty = [each for part in parts for each in (part, noise(2000))]
    (folder / "dirty.jsonl").write_text("".join(json.dumps({"text": p}) + "\n" for p in dirty))
    half = [p for part in parts for p in (part[:1000], part[1000:])]
    (folder / "cut.jsonl").write_text("".join(json.dumps({"text": p}) + "\n" for p in half))
    (folder / "judged.txt").write_text(TEXT[50_000:56_000])
    return folder


def judged(folder: Path, before: str, after: str, *more: str) -> tuple[int, dict[str, object]]:
    """As the command line does it."""
    parser = Parser(prog="ridgeline data judge")
    command.add_arguments(parser)
    shape = ["--shape", "tiny:layers=1,width=32,heads=2,mlp=64"]
    words = [str(folder / before), str(folder / after), "--text", str(folder / "judged.txt")]
    words += [*shape, "--tokenizer", str(folder / "tokenizer"), "--device", "cpu"]
    words += ["--sequence-length", "32", "--batch", "4", "--steps", "60", "--warmup", "4"]
    args: argparse.Namespace = parser.parse_args([*words, "--seeds", "3", "--lr", "5e-3", *more])
    terminal = Terminal(json=True)
    document = command.run(args, terminal)
    command.render(document, terminal.console)
    return command.exit_code(document), document


def test_noise_is_worth_filtering(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, document = judged(folder, "dirty.jsonl", "clean.jsonl")
    assert code == 0
    assert document["is_kept"]
    assert float(str(document["high"])) < 0
    assert "kept: the loss is -" in capsys.readouterr().out
    json.dumps(document, allow_nan=False)


@pytest.mark.slow
def test_a_filter_that_adds_noise_is_dropped(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, document = judged(folder, "clean.jsonl", "dirty.jsonl")
    assert code == CHECK_FAILED_EXIT_CODE
    assert not document["is_kept"]
    assert "it is worse" in str(document["reason"])
    assert "dropped: the loss is +" in capsys.readouterr().out


def test_the_gate() -> None:
    """Better in the mean is not enough; the words are those of `optimize --train`."""
    sure = paired_shares([3.0, 3.1, 3.2], [2.9, 3.0, 3.1])
    unsure = paired_shares([3.0, 3.1, 3.2], [2.6, 3.1, 3.2])
    assert sure.high < 0
    assert unsure.mean < 0 < unsure.high
    assert "no better beyond noise" in reason_words(unsure, False)
    runs = [[3.0] * 8, [3.1] * 8, [3.2] * 8]
    worse = [[3.3] * 8, [3.5] * 8, [3.6] * 8]
    problem = paired_losses(runs, worse, 0.005, 1.0).problem
    shares = paired_shares([3.0, 3.1, 3.2], [3.3, 3.5, 3.6])
    assert problem is not None
    assert problem.startswith(reason_words(shares, True))
    assert PairedShares(3, 0.1, 0.0, 0.2) != shares


def test_orders_that_make_no_sense(folder: Path) -> None:
    order = FilterOrder(command.PROXY, Path("a"), Path("b"), Path("c"))
    for wrong, words in (
        ({"seeds": 2}, "--seeds is 2"),
        ({"judged": Path("a")}, "learned and judged"),
        ({"after": Path("a")}, "before the filter and behind it"),
    ):
        with pytest.raises(UsageError, match=words):
            replace(order, **wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="nothing"):
        judged(folder, "nothing.jsonl", "clean.jsonl")


def test_a_proxy_that_diverges(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShortRun, "scheduled_step", lambda self, num_steps: math.nan)
    with pytest.raises(NumericsError, match="step 1 of a proxy"):
        judged(folder, "dirty.jsonl", "clean.jsonl")
