"""Checkpoints of layouts: saved under one, resumed under any other; every tensor is the same to the
bit, and so are all later steps of the same layout.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from command_line import generate, make_folder
from packed import TINY
from process_ranks import run_ranks
from rank_saving import (
    FP32,
    Run,
    Values,
    check_same,
    go_on,
    go_on_each_precision,
    save_and_go_on,
    save_each_precision,
    save_in_small_files,
)
from train_runs import single_thread

from ridgeline.cli import main
from ridgeline.errors import CheckpointError
from ridgeline.parallel.layout import Layout
from ridgeline.parallel.mesh import alone
from ridgeline.quantization import load_model
from ridgeline.training.config import Precision
from ridgeline.training.ranks.weights.sources import stored_tensors
from ridgeline.training.saving.checkpoint import (
    SavedState,
    check_whole,
    checkpoint_path,
    last_whole,
    read_state,
)
from ridgeline.training.saving.optimizer_files import StoredOptimizer

ONE = "replicate=1"
TINY_GQA = TINY | {"tie_word_embeddings": False}  # two KV heads
# Four ranks have a row of the router each, or one of three experts, and the last one has none.
MOE = TINY_GQA | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
}
PRECISIONS: list[Precision] = ["fp32", "bf16", "bf16-stochastic", "bf16-nearest", "fp16"]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with single_thread():
        yield


def in_layout(layout: str, work: Callable[..., Any], values: Values, *more: Any) -> Any:
    """What the first rank returns, or the one device."""
    if layout == ONE:
        return work(None, values, *more)
    return run_ranks(Layout.parse(layout), work, values, *more)[0]


def check_pairs(layouts: list[str], values: Values, folder: Path) -> None:
    """From each layout to each."""
    begun = {
        layout: in_layout(layout, save_and_go_on, values, FP32, folder / layout)
        for layout in layouts
    }
    for layout in layouts:
        check_whole(checkpoint_path(folder / layout, 2))
    for layout in layouts:
        found = in_layout(layout, go_on, values, FP32, [folder / each for each in layouts])
        for source, (run, state) in zip(layouts, found, strict=True):
            expected = begun[source]
            same_tensors(run.saved.tensors, expected.saved.tensors)
            assert run.after.loss == pytest.approx(expected.after.loss, rel=1e-6)
            assert state.layout == Layout.parse(source)
            assert (state.counters.steps, state.progress.updates) == (2, 2)
            if source == layout:
                assert run.after.loss == expected.after.loss
                same_tensors(run.after.tensors, expected.after.tensors)


def same_tensors(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


@pytest.mark.slow
def test_from_each_layout_to_each(tmp_path: Path) -> None:
    """The vocabulary, 131, cannot be shared evenly; the head is the embedding."""
    check_pairs(["shard=2", "tensor=2"], TINY, tmp_path)


def test_a_layout_of_one_rank(tmp_path: Path) -> None:
    """It has no other to send to; one device goes on from it, and it from one device."""
    meshes, runs = (alone(), None), [tmp_path / "rank", tmp_path / "device"]
    begun = [save_and_go_on(mesh, TINY, FP32, run) for mesh, run in zip(meshes, runs, strict=True)]
    for mesh in meshes:
        for own, ((run, _), expected) in zip(
            meshes, zip(go_on(mesh, TINY, FP32, runs), begun, strict=True), strict=True
        ):
            same_tensors(run.saved.tensors, expected.saved.tensors)
            if own is mesh:
                same_tensors(run.after.tensors, expected.after.tensors)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layouts", "values"),
    [
        ([ONE, "shard=2", "tensor=2", "shard=2,tensor=2", "replicate=2"], TINY),
        (["tensor=4", "shard=4", ONE], TINY_GQA),
        (["shard=4", "shard=2,tensor=2", ONE], MOE),
        (["replicate=2,shard=2", "tensor=2,sequence=false"], TINY),
    ],
    ids=["pairs", "copies-of-kv-heads", "fewer-rows-than-ranks", "copies-of-shards"],
)
def test_from_each_layout_to_each_at_length(
    layouts: list[str], values: Values, tmp_path: Path
) -> None:
    check_pairs(layouts, values, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "target"), [("shard=2", "tensor=2"), ("tensor=2", ONE), (ONE, "shard=2")]
)
def test_every_precision(source: str, target: str, tmp_path: Path) -> None:
    """What the optimizer keeps differs; losses in 16 bits differ by their last bits."""
    begun = in_layout(source, save_each_precision, TINY, PRECISIONS, tmp_path)
    for layout in (source, target):
        found = in_layout(layout, go_on_each_precision, TINY, PRECISIONS, tmp_path)
        for expected, run in zip(begun, found, strict=True):
            same_tensors(run.saved.tensors, expected.saved.tensors)
            assert run.after.loss == pytest.approx(expected.after.loss, rel=2e-3)
            if layout == source:
                assert run.after.loss == expected.after.loss
                same_tensors(run.after.tensors, expected.after.tensors)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer."""
    return make_folder(tmp_path_factory.mktemp("model"), tie_word_embeddings=True, vocab_size=1501)


@pytest.fixture(scope="module")
def made(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """A checkpoint of two ranks."""
    run = tmp_path_factory.mktemp("runs") / "run"
    files = {
        name: (folder / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")
    }
    values = json.loads((folder / "config.json").read_text())
    told = run_ranks(Layout.parse("shard=2"), save_and_go_on, values, FP32, run, files)
    return checkpoint_path(run, 2), told[0]


@pytest.mark.slow
def test_other_libraries_and_commands_load_it(
    made: tuple[Path, Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, run = made
    names = {path.name for path in checkpoint.glob("model*")}
    assert names == {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    }
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype="auto", output_loading_info=True
    )
    assert not any(info.values())
    weights = run.saved.tensors
    assert torch.equal(theirs.model.embed_tokens.weight, weights["weight.embed.weight"])
    layer = theirs.model.layers[0]
    fused = weights["weight.layers.0.attn.qkv.weight"]
    attn = layer.self_attn
    pieces = [attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight]
    assert torch.equal(torch.cat(pieces), fused)
    assert main([*generate(checkpoint)]) == 0
    codes = tmp_path / "codes"
    argv = ["quantize", str(checkpoint), "--scheme", "int8", "--out", str(codes)]
    quick = ["--sequences", "4", "--window", "40", "--batch-sizes", "none", "--device", "cpu"]
    assert main([*argv, *quick, "--max-kl", "9", "--max-ppl-increase", "0.9"]) == 0
    check_same(stored_tensors(codes), load_model(codes, dtype="fp32", device="cpu"))
    capsys.readouterr()


def test_a_checkpoint_without_one_of_its_files_is_refused(
    made: tuple[Path, Run], tmp_path: Path
) -> None:
    """And the one before is taken."""
    checkpoint, _ = made
    files = [
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "training/optimizer-00001-of-00002.safetensors",
        "training/optimizer.safetensors.index.json",
        "training/state.json",
    ]
    run = tmp_path / "run"
    shutil.copytree(checkpoint, checkpoint_path(run, 2))
    for number, (name, is_cut) in enumerate(product(files, (False, True))):
        newer = checkpoint_path(run, 4 + number)
        shutil.copytree(checkpoint, newer)
        content = (newer / name).read_bytes()
        (newer / name).unlink()
        if is_cut:
            (newer / name).write_bytes(content[:-20])
        found = last_whole(run)
        assert found.checkpoint == checkpoint_path(run, 2)
        assert str(newer / name) in found.problems[0]
        assert ("cut short" if is_cut else "missing") in found.problems[0]
        shutil.rmtree(newer)


def test_a_missing_file_is_named_by_whoever_reads_it(
    made: tuple[Path, Run], tmp_path: Path
) -> None:
    """Even where nothing had compared files with their list."""
    checkpoint = tmp_path / "copy"
    shutil.copytree(made[0], checkpoint)
    (checkpoint / "training/optimizer-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="optimizer-00002-of-00002"):
        StoredOptimizer.open(checkpoint / "training")
    (checkpoint / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model-00002-of-00002"):
        list(stored_tensors(checkpoint))


@pytest.mark.slow
def test_many_small_files(tmp_path: Path) -> None:
    """As those of a large model; a tensor above the limit has one of its own."""
    told = run_ranks(Layout.parse("shard=2"), save_in_small_files, TINY, tmp_path / "run", 10_000)
    checkpoint = checkpoint_path(tmp_path / "run", 2)
    assert len(list(checkpoint.glob("model-*.safetensors"))) > 4
    assert len(list(checkpoint.glob("training/optimizer-*.safetensors"))) > 8
    for layout in ("shard=2", ONE):
        ((run, _),) = in_layout(layout, go_on, TINY, FP32, [tmp_path / "run"])
        same_tensors(run.saved.tensors, told[0].saved.tensors)


def test_older_states_have_no_layout(tmp_path: Path) -> None:
    state = tmp_path / "training/state.json"
    state.parent.mkdir()
    state.write_text(json.dumps({"counters": {"steps": 3}, "num_samples": 7}))
    assert read_state(tmp_path).layout == Layout()
    assert "layout" not in SavedState().as_json()
    values = SavedState(layout=Layout(shard=2)).as_json()
    state.write_text(json.dumps(values))
    assert read_state(tmp_path).layout == Layout(shard=2)
