"""What `ridgeline train` refuses, each with one line and the exit code of its kind. Flags and run
folders are in test_train_command.py, checkpoints in test_train_saving.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from command_line import TEMPLATE, make_folder, refused
from train_runs import Capture, make_text, words
from written_text import TEXT

from ridgeline.data import Tokenizer
from ridgeline.data.loading import TokenStore, save_shards
from ridgeline.data.loading.store import TokenShard
from ridgeline.errors import MissingPackageError, UsageError
from ridgeline.training.watching import tensorboard


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"), tie_word_embeddings=True)


def test_a_vocabulary_that_does_not_fit(tmp_path: Path, capsys: Capture) -> None:
    small = make_folder(tmp_path / "small", vocab_size=900)
    argv = words(small, make_text(tmp_path), tmp_path / "run")
    refused(capsys, UsageError, "token vocabulary of 900 tokenizer", *argv)
    assert not (tmp_path / "run").exists()


def test_labels_that_are_all_ignored(model: Path, tmp_path: Path, capsys: Capture) -> None:
    tokenizer = Tokenizer.load(model)
    ids = np.array(tokenizer.encode(TEXT[:4000]), dtype=np.uint16)
    shard = TokenShard(
        ids, np.array([0, len(ids)]), np.array([[0, 1]]), np.zeros(len(ids), dtype=np.bool_)
    )
    store = TokenStore([shard], ["book.txt"], tokenizer.vocab_size)
    save_shards(store, tmp_path / "shards", tokenizer)
    argv = words(model, tmp_path / "shards", tmp_path / "run", "--held-out", "0")
    refused(capsys, UsageError, "every target is ignored", *argv)


def test_conversations_without_the_assistant(tmp_path: Path, capsys: Capture) -> None:
    """Each is quarantined, and nothing is left."""
    chat = make_folder(tmp_path / "chat", template=TEMPLATE)
    file = tmp_path / "chats.jsonl"
    row = json.dumps({"messages": [{"role": "user", "content": "hello"}]})
    file.write_text(f"{row}\n{row}\n")
    argv = words(chat, file, tmp_path / "run")
    line = refused(capsys, UsageError, "no text 2 rows quarantined", *argv)
    assert "chats.jsonl line 1" in line


def test_too_little_text_beside_broken_lines(model: Path, tmp_path: Path, capsys: Capture) -> None:
    """The lines that were left out may be why."""
    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": "a few words"}\n{"text": "broken\n{"text": "and a few more"}\n')
    argv = words(model, file, tmp_path / "run")
    line = refused(capsys, UsageError, "fewer than one sequence 1 row quarantined", *argv)
    assert "texts.jsonl line 2" in line


@pytest.mark.parametrize("precision", ["fp8", "fp8-row", "tf32"])
def test_a_precision_that_requires_a_gpu(
    precision: str, model: Path, tmp_path: Path, capsys: Capture
) -> None:
    argv = words(model, make_text(tmp_path), tmp_path / "run", "--precision", precision)
    refused(capsys, UsageError, f"{precision} requires GPU --precision fp32", *argv)
    assert not (tmp_path / "run").exists()


def test_tensorboard_that_is_not_installed(
    model: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorboard, "find_spec", lambda name: None)
    argv = words(model, make_text(tmp_path), tmp_path / "run", "--tensorboard")
    refused(capsys, MissingPackageError, "tensorboard install ridgeline[tensorboard]", *argv)
    assert not (tmp_path / "run").exists()
