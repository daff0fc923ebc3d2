"""Plans for training, from the command line to a run under the plan's own file; and what they rest
on: messages as torch records them, memory as training plans it, pipelines as they are simulated
whole, searches against all settings tried one by one.
"""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
from command_line import make_folder
from packed import TINY
from train_runs import Capture, make_text, single_thread, words

from ridgeline.cli.main import main
from ridgeline.errors import OutOfMemoryError, UsageError
from ridgeline.hardware.collectives import CollectiveCurve, GroupPlace, Wires, place_of, seconds
from ridgeline.models import ModelConfig
from ridgeline.models.families import describe_hf
from ridgeline.models.shapes import describe_shape
from ridgeline.parallel.bubbles import PassTimes, step_span
from ridgeline.parallel.holdings import LAYER, Holdings
from ridgeline.parallel.layout import Layout
from ridgeline.parallel.shards import whole_shapes
from ridgeline.planning.clusters.parsing import parse_cluster
from ridgeline.planning.memory.ledger import heaviest_of, ledger_of, train_config, usable_bytes
from ridgeline.planning.search.best import find_best
from ridgeline.planning.search.space import WantedRun, cores
from ridgeline.planning.training import collectives
from ridgeline.planning.training.collectives import Sends
from ridgeline.planning.training.constants import load_fitted
from ridgeline.planning.training.pipelines import pipeline_span
from ridgeline.planning.training.setup import TrainSetup
from ridgeline.planning.training.step import estimate_step, least_step_s
from ridgeline.training.memory.plan import MOMENT_BYTES, itemise
from ridgeline.training.memory.ranks import pipeline_ranks, rank_shares
from ridgeline.training.ranks.at_scale import step_at_scale
from ridgeline.training.stepping.precision import PRECISIONS, Precision

LLAMA_1B = describe_shape("llama-3.2-1b").config
H100 = parse_cluster("8xH100").pools[0]


def tiny(**changes: object) -> ModelConfig:
    return describe_hf(TINY | {"vocab_size": 4096} | changes, origin="tiny").config


def setup_of(text: str, model: ModelConfig = LLAMA_1B, **changes: Any) -> TrainSetup:
    layout = Layout.parse(text)
    base = TrainSetup(model, layout, 1024, 8 * layout.size_of("data"), 1)
    return replace(base, **changes)


@pytest.mark.parametrize("text", ["tensor=2", "shard=4", "shard=2,tensor=2", "replicate=2"])
def test_messages_are_those_that_torch_records(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the layer: what one more of them adds."""
    sent: dict[str, float] = {}

    def noted(name: str, num_bytes: float, place: GroupPlace, wires: Wires) -> float:
        sent[name] = sent.get(name, 0.0) + (num_bytes if place.size > 1 else 0.0)
        return 0.0

    monkeypatch.setattr(collectives, "seconds", noted)
    one, two = (tiny(num_hidden_layers=count) for count in (1, 2))
    setup = setup_of(text, one, sequence=64, batch=Layout.parse(text).size_of("data"))
    recorded = [
        step_at_scale(model, train_config(replace(setup, model=model))) for model in (one, two)
    ]
    sends = Sends(setup, H100)
    layer = one.layers[0]
    for _ in range(4):  # attention and MLP, forward and backward
        _ = Sends(setup, H100).tensor_s
    _ = sends.shard_s(layer)
    if setup.layout.shard > 1:  # gathered again for the backward pass
        sent["all-gather"] += sends.gathered(layer) * 2
    if setup.layout.shard == 1:
        sends.replicate_s(sends.gathered(layer))
    for name in ("all-gather", "reduce-scatter", "all-reduce"):
        both = [
            sum(e.num_bytes for e in step.collectives if e.kind == name and e.num_ranks > 1)
            for step in recorded
        ]
        assert sent.get(name, 0.0) == pytest.approx(both[1] - both[0], rel=0.02, abs=4096)


@pytest.mark.parametrize(
    "text",
    ["shard=4", "replicate=2,shard=2,tensor=2", "pipeline=2,shard=2", "tensor=2,sequence=false",
     "pipeline=2,stages=2,schedule=interleaved"],
)  # fmt: skip
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_of_ranks_are_those_of_holdings(text: str, tied: bool) -> None:
    model = tiny(num_hidden_layers=5, tie_word_embeddings=tied)
    config = train_config(setup_of(text, model, sequence=64))
    layout, shapes = config.layout, whole_shapes(model)
    shares = list(rank_shares(model, config))
    for rank, share in zip(pipeline_ranks(layout), shares, strict=True):
        parts = [Holdings(model, layout).of(name, shape, rank) for name, shape in shapes.items()]
        assert share.num_held == sum(prod(part.local_shape) for part in parts if part is not None)
        own = {LAYER.match(name)[1] for name, part in zip(shapes, parts, strict=True)  # type: ignore[index]
               if part is not None and LAYER.match(name)}  # fmt: skip
        assert share.model.num_layers == len(own)


def test_experts_of_a_rank() -> None:
    model = describe_shape("qwen3-30b-a3b").config
    whole = next(rank_shares(model, train_config(setup_of("shard=8", model))))
    spread = next(rank_shares(model, train_config(setup_of("shard=8,expert=8", model))))
    assert spread.num_held == pytest.approx(whole.num_held, rel=0.01)
    assert spread.num_gathered < whole.num_gathered / 2


@pytest.mark.parametrize("text", ["replicate=1", "shard=8", "shard=2,tensor=2,pipeline=2"])
def test_a_ledger_is_trainings_own_plan(text: str) -> None:
    setup = setup_of(text)
    plan = itemise(setup.model, train_config(setup), "cuda:0", 0)
    ledger = ledger_of(setup)
    assert ledger.peak_bytes == plan.used_bytes
    assert len(ledger.stages) == setup.layout.pipeline
    assert heaviest_of(setup).peak_bytes == ledger.peak_bytes


def test_sharing_the_stream_by_tokens_keeps_less() -> None:
    whole = ledger_of(setup_of("tensor=2,sequence=false", recomputation="blocks"))
    shared = ledger_of(setup_of("tensor=2", recomputation="blocks"))
    items = [{i.name: i.num_bytes for i in each.heaviest.items} for each in (whole, shared)]
    assert items[1]["activations"] < 0.6 * items[0]["activations"]


@pytest.mark.parametrize(
    ("text", "num_micro"),
    [("pipeline=4", 64), ("pipeline=4,stages=2,schedule=interleaved", 32), ("pipeline=3", 50),
     ("pipeline=4,stages=2,schedule=zero-bubble", 32), ("pipeline=2,schedule=gpipe", 24)],
)  # fmt: skip
def test_many_micro_batches_take_what_all_of_them_simulated_take(text: str, num_micro: int) -> None:
    layout = Layout.parse(text)
    times = [PassTimes(1.0 + 0.1 * (n % 3), 1.2, 0.9) for n in range(layout.num_stages)]
    whole = step_span(layout, num_micro, times, 0.05)
    assert pipeline_span(layout, num_micro, times, 0.05) == pytest.approx(whole, rel=0.015)


def test_parts_add_up_and_more_work_takes_longer() -> None:
    fitted = load_fitted()
    setup = setup_of("shard=8", sequence=8192)
    estimate = estimate_step(setup, H100, fitted)
    assert sum(estimate.parts.values()) == pytest.approx(estimate.step_s)
    assert 0 < estimate.mfu < 0.75
    longer = estimate_step(replace(setup, recomputation="blocks"), H100, fitted)
    assert 1.15 < longer.step_s / estimate.step_s < 1.4
    twice = estimate_step(replace(setup, batch=2 * setup.batch), H100, fitted)
    assert 1.8 < twice.step_s / estimate.step_s <= 2.0
    slow = parse_cluster("8xH100@ib100").pools[0]
    assert estimate_step(setup, slow, fitted).step_s == estimate.step_s  # one node needs no cards


@pytest.mark.parametrize("units", ["bf16", "fp16", "fp32"])
def test_the_optimizer_moves_what_training_keeps(units: Precision) -> None:
    plan = PRECISIONS[units]
    weight = 2 if plan.format.weight == "bf16" else 4
    moved = 2 * 4 + 2 * (weight + MOMENT_BYTES[plan.format.moments]) + 6 * plan.has_copies
    model = describe_shape("tiny").config
    setup = TrainSetup(model, Layout(), 128, 8, 1, units=units)
    assert setup.optimizer_bytes == moved


def test_slower_networks_make_steps_longer() -> None:
    fitted = load_fitted()
    steps = [
        estimate_step(setup_of("shard=64"), parse_cluster(f"64xH100@{net}").pools[0], fitted).step_s
        for net in ("ib400", "ib100", "ib100/4")
    ]
    assert steps == sorted(steps)
    assert steps[2] > 1.2 * steps[0]


def test_a_bound_is_below_every_way_to_cut_weights() -> None:
    fitted = load_fitted()
    pool = parse_cluster("16xH100").pools[0]
    wanted = WantedRun(sequence=1024, batch=64)
    checked = 0
    for core in list(cores(LLAMA_1B, 16, pool, wanted))[::23]:
        bound = least_step_s(core.setup, pool, fitted)
        for setup in core.splits():
            assert estimate_step(setup, pool, fitted).step_s >= bound
            checked += 1
    assert checked > 20


def test_the_best_is_the_best_of_all() -> None:
    fitted, wanted = load_fitted(), WantedRun(sequence=2048, batch=16, recomputation="none")
    result = find_best(LLAMA_1B, H100, 8, wanted, fitted, keep=1)
    free, steps = usable_bytes(H100), []
    for core in cores(LLAMA_1B, 8, H100, wanted):
        for setup in core.splits():
            if heaviest_of(setup).peak_bytes <= free:
                steps.append(estimate_step(setup, H100, fitted).step_s)
    assert result.plans[0].estimate.step_s == min(steps)
    assert result.num_estimated < len(steps)


def test_rejections_name_what_binds_and_remedies_fit() -> None:
    model = describe_shape("llama-3.1-8b").config
    pool = parse_cluster("8xA100-40GB").pools[0]
    result = find_best(model, pool, 8, WantedRun(sequence=8192, batch=64), load_fitted())
    assert result.plans
    assert result.rejected
    for plan in result.plans:
        assert plan.ledger.peak_bytes <= usable_bytes(pool)
    for each in result.rejected:
        assert heaviest_of(each.setup).peak_bytes > usable_bytes(pool)
        assert "GiB" in each.reason
    mended = [each for each in result.rejected if each.remedy.startswith("recomputation ")]
    for each in mended:
        level = each.remedy.removeprefix("recomputation ")
        changed = replace(each.setup, recomputation=level)  # type: ignore[arg-type]
        assert heaviest_of(changed).peak_bytes <= usable_bytes(pool)


def test_collectives_by_place_and_by_curve() -> None:
    assert place_of(64, 8, 8) == GroupPlace(1, 64)
    assert place_of(64, 1, 8) == GroupPlace(8, 8)
    wires = Wires(450e9, 50e9)
    inside = seconds("all-reduce", 1 << 30, GroupPlace(8, 1), wires)
    across = seconds("all-reduce", 1 << 30, GroupPlace(8, 16), wires)
    assert inside == pytest.approx(18e-6 + 2 * (1 << 30) * 7 / 8 / (0.85 * 450e9))
    assert across > inside
    assert seconds("all-gather", 1 << 30, GroupPlace(1, 1), wires) == 0.0
    curve = CollectiveCurve("all-reduce", 8, ((1 << 20, 1e-4), (1 << 30, 1e-2)), "a device")
    measured = replace(wires, curves=(curve,))
    assert seconds("all-reduce", 1 << 30, GroupPlace(8, 1), measured) == 1e-2
    assert seconds("all-reduce", 1 << 10, GroupPlace(8, 1), measured) == 1e-4
    assert curve.seconds(1 << 25) == pytest.approx(1e-3)  # half way, both axes logarithmic
    assert curve.seconds(1 << 31) == pytest.approx(2e-2)


def planned(capsys: Capture, *argv: str) -> dict[str, Any]:
    assert main(["plan", *argv, "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


SMALL = ("--gpus", "2x4090", "--sequence-length", "64", "--batch", "4")


def test_a_plan_from_the_command_line(tmp_path: Path, capsys: Capture) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text('"4090" = 0.5\n')
    document = planned(
        capsys, "llama-3.2-1b", "--gpus", "2x4090", "--batch", "16", "--sequence-length", "1024",
        "--tokens", "1B", "--prices", str(prices), "--out", str(tmp_path / "plans"),
    )  # fmt: skip
    best = document["plans"][0]
    for key in ("step_s", "tokens_per_s", "mfu", "days", "cost", "energy_mwh"):
        value = best[key]
        assert 0 < value["low"] < value["value"] < value["high"]
    hours = best["days"]["value"] * 24
    assert best["cost"]["value"] == pytest.approx(hours * 2 * 0.5)
    assert "not measured here" in document["basis"]
    saved = json.loads((tmp_path / "plans" / "plan-1.json").read_text())
    assert Layout.parse(str(tmp_path / "plans" / "plan-1.json")).as_json() == best["layout"]
    assert saved["step_s"] == best["step_s"]
    page = (tmp_path / "plans" / "plan.html").read_text()
    assert "<svg" in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert main(["plan", "llama-3.2-1b", *SMALL]) == 0
    shown = capsys.readouterr().out
    assert "run it: ridgeline train --shape llama-3.2-1b" in shown
    assert "cost" not in shown  # no prices, no money


@pytest.mark.slow
def test_a_run_under_a_plans_file(tmp_path: Path, capsys: Capture) -> None:
    """Two ranks over gloo learn under the layout that was planned."""
    import subprocess
    import sys

    model, text = make_folder(tmp_path / "model", tie_word_embeddings=True), make_text(tmp_path)
    plan = planned(capsys, str(model), *SMALL, "--out", str(tmp_path / "plans"))["plans"][0]
    run = words(model, text, tmp_path / "run", "--precision", "fp32", "--steps", "1")
    file = str(tmp_path / "plans" / "plan-1.json")
    command = [sys.executable, "-P", "-m", "ridgeline", *run, "--layout", file, "--no-prove",
               "--json"]  # fmt: skip
    with single_thread():
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["layout"] == plan["layout_words"]


@pytest.mark.parametrize(
    ("argv", "code", "words_"),
    [
        (("llama-3.2-1b",), 2, "needs --gpus"),
        (("--gpus", "8xH100"), 2, "needs a model"),
        (("llama-3.2-1b", "--gpus", "8xB9000"), 2, "is unknown"),
        (("llama-3.2-1b", "--gpus", "0xH100"), 2, "at least 1"),
        (("llama-3.2-1b", "--gpus", "1.5xH100"), 2, "no whole number"),
        (("llama-3.1-405b", "--gpus", "8xH100"), 9, "in no layout"),
        (("llama-3.2-1b", "--gpus", "8xH100", "--tokens", "many"), 2, "number of tokens"),
        (("llama-3.2-1b", "--gpus", "8xH100", "--batch", "0"), 2, "at least 1"),
        (("llama-3.2-1b", "--gpus", "8xH100", "--sequence-length", "9999999"), 2, "context"),
        (("llama-3.2-1b", "--gpus", "8xH100", "--points", "x"), 2, "--validate"),
        (("--validate",), 2, "--points"),
        (("--validate", "--points", "/nowhere"), 2, "no folder"),
        (("no-such-model", "--gpus", "8xH100"), 3, "no-such-model"),
    ],
)
def test_bad_input(argv: tuple[str, ...], code: int, words_: str, capsys: Capture) -> None:
    assert main(["plan", *argv]) == code
    error = capsys.readouterr().err
    assert words_ in error
    assert len(error.strip().splitlines()) == 1


def test_a_layout_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan-1.json"
    path.write_text(json.dumps({"schema": 99, "layout": {"shard": 2, "fold": 3}}))
    with pytest.raises(UsageError, match="fold"):
        Layout.parse(str(path))


def test_a_model_that_fits_nowhere_says_how_far() -> None:
    from ridgeline.cli.plan.train import nothing_fits

    model = describe_shape("llama-3.1-405b").config
    result = find_best(model, H100, 8, WantedRun(sequence=8192, batch=8), load_fitted())
    assert not result.plans
    error = OutOfMemoryError(nothing_fits("llama-3.1-405b", result, parse_cluster("8xH100")))
    assert "needs" in str(error)
    assert "128 of them would do" in str(error)
