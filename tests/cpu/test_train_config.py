"""TrainConfig: checked when it is made, JSON in and out, named runs, differences in words."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ridgeline.configs import training
from ridgeline.configs.named import is_named_run, named_run
from ridgeline.errors import OptionError, UsageError
from ridgeline.training.choices import with_choices_of
from ridgeline.training.config import (
    BatchOptions,
    DataOptions,
    OptimizerOptions,
    RunLength,
    TrainConfig,
    check_complete,
    with_auto,
)
from ridgeline.training.config_file import changes, load_config, parse_config, save_config

CONFIG = TrainConfig(
    model="demo",
    data=DataOptions("book.txt", sequence_length=128),
    batch=BatchOptions(12),
    optimizer=OptimizerOptions(lr=3e-5, max_norm=None),
    end=RunLength(tokens=1000),
)


def test_json_in_and_out(tmp_path: Path) -> None:
    save_config(CONFIG, tmp_path)
    assert load_config(tmp_path) == CONFIG
    assert json.loads((tmp_path / "train.json").read_text())["optimizer"]["lr"] == 3e-5


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"optimiser": {}}, "optimiser optimizer"),
        ({"optimizer": {"learning": 1}}, "optimizer learning"),
        ({"data": {"sequence_lenght": 8}}, "sequence_lenght sequence_length"),
        ({"batch": 8}, "batch '8' object"),
        ({"batch": {"sequences": 8, "micro": 3}}, "micro_batch 3 8 try 2"),
        ({"precision": "bf61"}, "precision 'bf61' 'bf16'"),
        ({"seed": True}, "seed True"),
        ({"schedule": {"warmup": -1}}, "warmup -1"),
        ({"end": {"steps": 3, "minutes": 1}}, "--steps --minutes"),
        ({"version": 7}, "version 7"),
    ],
)
def test_a_file_that_is_wrong(values: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_config({"version": 1} | values, "train.json")
    for word in ["train.json", *words.split()]:
        assert word in str(error.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_a_learning_rate_is_a_number(value: float) -> None:
    with pytest.raises(UsageError, match="lr is"):
        OptimizerOptions(lr=value)


def test_an_option_in_the_wrong_part() -> None:
    with pytest.raises(OptionError, match="OptimizerOptions"):
        TrainConfig(lr=1e-3)  # type: ignore[call-arg]


def test_what_is_left_open_is_filled_in() -> None:
    filled = with_auto(CONFIG, "cpu")
    assert filled.precision == "fp32"
    assert (filled.batch.micro, filled.recomputation) == (None, "auto")  # the memory plan chooses
    assert with_auto(CONFIG, "cuda:1").precision == "bf16"
    assert with_auto(filled, "cuda") == filled
    assert CONFIG.batch_tokens == 1536


def test_a_run_that_goes_on_keeps_what_was_chosen() -> None:
    chosen = replace(
        CONFIG, precision="bf16", recomputation="blocks", batch=BatchOptions(12, micro=4)
    )
    assert with_choices_of(CONFIG, chosen) == chosen
    named = replace(CONFIG, precision="fp32", recomputation="none", batch=BatchOptions(12, micro=2))
    assert with_choices_of(named, chosen) == named
    other = replace(CONFIG, batch=BatchOptions(10))  # which 4 does not divide
    assert with_choices_of(other, chosen).batch.micro is None


def test_what_is_missing_is_named() -> None:
    check_complete(CONFIG)
    for change, word in (
        ({"model": None}, "model"),
        ({"shape": "tiny"}, "either"),
        ({"tokenizer": "demo"}, "--tokenizer"),
        ({"data": DataOptions()}, "--data"),
        ({"end": RunLength()}, "--steps"),
    ):
        with pytest.raises(UsageError, match=word):
            check_complete(replace(CONFIG, **change))  # type: ignore[arg-type]


def test_differences_are_listed() -> None:
    other = replace(CONFIG, optimizer=OptimizerOptions(lr=1e-5), end=RunLength(steps=5), seed=3)
    assert changes(CONFIG, other) == [
        "seed 3, was 0",
        "optimizer.lr 1e-05, was 3e-05",
        "optimizer.max_norm 1.0, was None",
    ]


@pytest.mark.parametrize("name", ["finetune_demo", "pretrain_tiny"])
def test_named_runs_lack_only_their_data(name: str) -> None:
    config = named_run(f"configs:{name}")
    assert config == getattr(training, name)()
    check_complete(replace(config, data=replace(config.data, path="book.txt")))


def test_a_named_run_is_told_from_a_model(tmp_path: Path) -> None:
    assert is_named_run("configs:x")
    assert is_named_run("dir/runs.py:x")
    assert not is_named_run("org/name:file.gguf")
    assert not is_named_run("demo")
    with pytest.raises(UsageError, match="did you mean 'finetune_demo'"):
        named_run("configs:finetune_dmeo")
    file = tmp_path / "own.py"
    file.write_text("def a(): return 5\ndef b(x): return x\n")
    with pytest.raises(UsageError, match="returned a int"):
        named_run(f"{file}:a")
    with pytest.raises(UsageError, match="without arguments"):
        named_run(f"{file}:b")
    file.write_text("def a(:")
    with pytest.raises(UsageError, match="cannot be imported"):
        named_run(f"{file}:a")
