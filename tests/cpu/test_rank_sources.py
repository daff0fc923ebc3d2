"""Where ranks' weights come from, tensor by tensor: the same as a whole model's."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from command_line import make_folder
from gguf_files import Q4_0, write_gguf
from packed import tiny
from rank_saving import check_same

from ridgeline.quantization import load_model
from ridgeline.training.initial import fill_initial
from ridgeline.training.ranks.weights.sources import initial_weights, stored_tensors


def test_initial_weights() -> None:
    for changes in ({}, {"tie_word_embeddings": False}):
        model = tiny(**changes)
        fill_initial(model, seed=3)
        check_same(initial_weights(model.config, 3, "cpu"), model)


def test_stored_weights(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", num_hidden_layers=2)
    check_same(stored_tensors(folder), load_model(folder, dtype="fp32", device="cpu"))


@pytest.mark.parametrize("quantized", [None, Q4_0], ids=["plain", "blocks"])
def test_gguf(quantized: object, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", hidden_size=64)
    peer = transformers.AutoModelForCausalLM.from_pretrained(folder)
    write_gguf(peer, tmp_path / "model.gguf", quantized)  # type: ignore[arg-type]
    path = tmp_path / "model.gguf"
    check_same(stored_tensors(path), load_model(path, dtype="fp32", device="cpu"))
