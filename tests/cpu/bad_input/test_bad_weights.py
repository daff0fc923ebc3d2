"""Weights, tokenizers and templates that are spoiled or do not fit the model."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from command_line import (
    edit_json,
    generate,
    make_folder,
    refused,
)
from safetensors.torch import load_file, save_file

from ridgeline.cli import main
from ridgeline.errors import (
    CheckpointError,
    ConfigError,
    ModelNotFoundError,
    NumericsError,
    RidgelineError,
    UnsupportedError,
    UsageError,
)

Capture = pytest.CaptureFixture[str]


def test_spoiled_safetensors(folder: Path, capsys: Capture) -> None:
    file = folder / "model.safetensors"
    data = file.read_bytes()
    spoiled = {
        b"\0" * 100: "corrupt",
        struct.pack("<Q", 100) + b"{" + b"x" * 200: "corrupt",
        struct.pack("<Q", 10**12) + data[8:]: f"claims {10**12} bytes",
        data[: len(data) // 2]: "cut short",
        data[:5]: "cut short",
        b"": "cut short",
        b"version https://git-lfs": "git lfs pull",
    }
    for content, words in spoiled.items():
        file.write_bytes(content)
        refused(capsys, CheckpointError, f"{file} {words}", *generate(folder))


def test_tensors_that_do_not_fit(folder: Path, capsys: Capture) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    tensors["model.layers.7.extra.weight"] = torch.zeros(3)
    tensors["lm_head.weight"] = torch.zeros(7, 48)
    save_file(tensors, file)
    words = (
        "1 missing: model.norm.weight 1 unknown: model.layers.7.extra.weight "
        "1 wrong shape: lm_head.weight [7, 48] instead of [1500, 48]"
    )
    refused(capsys, CheckpointError, f"{folder} {words}", *generate(folder))


def test_spoiled_gguf(whole_gguf: Path, tmp_path: Path, capsys: Capture) -> None:
    data = whole_gguf.read_bytes()
    file = tmp_path / "cut.gguf"
    for size in (4, 20, 300, len(data) // 2, len(data) - 40):
        file.write_bytes(data[:size])
        refused(capsys, CheckpointError, f"{file} corrupt or cut short", *generate(file))


def test_a_gguf_of_an_unknown_architecture(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "mamba.gguf"
    writer = gguf.GGUFWriter(file, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(capsys, UnsupportedError, "'mamba' supported: llama gemma3", *generate(file))


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_weights_that_are_no_numbers(folder: Path, temperature: str, capsys: Capture) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"].fill_(math.nan)
    save_file(tensors, file, {"format": "pt"})
    more = ("--temperature", temperature, "--top-p", "0.9", "--top-k", "5", "--min-p", "0.1")
    refused(capsys, NumericsError, "NaN --dtype fp32", *generate(folder, *more))


def test_no_tokenizer(folder: Path, capsys: Capture) -> None:
    (folder / "tokenizer.json").unlink()
    refused(capsys, ModelNotFoundError, f"{folder} no tokenizer.json", *generate(folder))


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"model": 3}', b"\xff\xfe\x00"])
def test_a_corrupt_tokenizer(folder: Path, content: bytes, capsys: Capture) -> None:
    (folder / "tokenizer.json").write_bytes(content)
    refused(capsys, ConfigError, f"{folder}/tokenizer.json cannot be read", *generate(folder))


def test_a_vocabulary_smaller_than_the_tokenizer(tmp_path: Path, capsys: Capture) -> None:
    make_folder(tmp_path, vocab_size=20)
    refused(capsys, UsageError, "token id vocabulary of 20 tokenizer", *generate(tmp_path))


def test_a_vocabulary_larger_than_the_tokenizer(tmp_path: Path, capsys: Capture) -> None:
    make_folder(tmp_path, vocab_size=40_000)
    assert main(generate(tmp_path, "--max-tokens", "9", "--json")) == 0
    assert max(json.loads(capsys.readouterr().out)["tokens"]) > 1500  # ids that have no text


@pytest.mark.parametrize(
    ("template", "kind", "words"),
    [
        ("{% for m in %}", ConfigError, "chat template not valid Jinja line 1"),
        ("{% if x %}", ConfigError, "chat template not valid Jinja"),
        ("{{ raise_exception('no\nthanks') }}", UsageError, "chat template rejects no thanks"),
        ("{{ messages[7].content }}", UsageError, "chat template"),
        ("{{ ''.__class__.__mro__ }}", ConfigError, "chat template sandbox forbids"),
        ({"a": 1}, ConfigError, "chat_template dict string"),
    ],
)
def test_a_spoiled_chat_template(
    folder: Path, template: Any, kind: type[RidgelineError], words: str, capsys: Capture
) -> None:
    edit_json(folder / "tokenizer_config.json", chat_template=template)
    refused(capsys, kind, words, *generate(folder))


def test_a_system_message_without_a_template(whole: Path, capsys: Capture) -> None:
    refused(capsys, UsageError, "--system template", *generate(whole, "--system", "be brief"))
