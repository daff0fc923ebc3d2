"""What is predicted of a GGUF file whose blocks a CPU multiplies as they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tiny_models
import torch
from gguf_files import write_gguf
from test_block_linear import KINDS, needs_compiler
from test_gains import CPU, SMALL

from ridgeline.engine import Engine
from ridgeline.ladder.order import blocks_of
from ridgeline.models.checkpoint import open_checkpoint
from ridgeline.models.cost import MeanStep
from ridgeline.profiling.predicting.gains import predict
from ridgeline.profiling.predicting.prediction import BlockBytes, PhaseTime, Situation
from ridgeline.profiling.predicting.step_model import head_bytes, head_share
from ridgeline.quantization.sizes import read_bytes_per_weight
from ridgeline.recipe import Recipe, edited, with_auto


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2}
    monkeypatch.setattr(tiny_models, "SMALL", tiny_models.SMALL | sizes)
    monkeypatch.setattr("ridgeline.engine.loading.sources.tokenizer_of", lambda path: None)
    file = tmp_path / "model.gguf"
    write_gguf(tiny_models.make_model("llama-tied"), file, KINDS["Q4_1"])
    return file


@needs_compiler
def test_headers_tell_what_a_loaded_model_reads(path: Path) -> None:
    blocks = blocks_of(open_checkpoint(path), "cpu")
    assert blocks is not None
    plain, headed = (
        Engine(path, Recipe(head=head, quantize_all=True), num_pages=8)
        for head in ("plain", "int8")
    )
    known = pytest.approx(read_bytes_per_weight(plain.model), rel=0.01)  # small ones are filled up
    assert blocks.mean == known
    config = headed.model.config
    other = head_bytes(config, headed.recipe)
    changed = blocks.mean + head_share(config) * (other - blocks.head)
    assert changed == pytest.approx(read_bytes_per_weight(headed.model), rel=0.01)
    assert blocks_of(open_checkpoint(path), "cuda") is None


def plain_loop(blocks: BlockBytes | None) -> Situation:
    filled = edited(with_auto(Recipe(), SMALL, torch.float32, "cpu"), "blocks", True)
    work = MeanStep(1, 1, 1, 300, 300)
    phase = PhaseTime("decode", 100.0, 60e-3, work, {"matrices": 50e-3, "host": 10e-3})
    return Situation(SMALL, filled, "naive", CPU, 4.0, 4.0, (phase,), blocks=blocks)


def test_the_engine_reads_the_files_blocks() -> None:
    """The plain loop has expanded them."""
    edit = {"loop": "engine", "kernels": "fused"}
    blocks = BlockBytes(mean=0.72, head=1.06)
    without, with_blocks = (predict(plain_loop(each), edit) for each in (None, blocks))
    assert with_blocks.speedup > 1.5 * without.speedup
    assert "4.00 to 0.72 bytes a weight" in with_blocks.why
    expanding = edited(plain_loop(blocks).recipe, "blocks", False)
    apart = predict(replace(plain_loop(blocks), recipe=expanding), edit)
    assert apart.speedup == pytest.approx(without.speedup)


def test_a_head_in_int8_is_weighed_against_the_files_own() -> None:
    plain = plain_loop(None)
    before = replace(
        plain, loop="engine", recipe=edited(plain.recipe, "kernels", "fused"), bytes_per_weight=0.9
    )
    large, small = (
        predict(replace(before, blocks=BlockBytes(mean=0.9, head=head)), {"head": "int8"})
        for head in (2.1, 0.5)
    )
    assert large.speedup > 1.2 > small.speedup
    assert "0.90 to 0.67 bytes a weight" in large.why
