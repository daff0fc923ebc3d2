"""Paths that are no model, may not be read, or are not there."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from command_line import (
    check_refusal,
    generate,
    refused,
)

from ridgeline.cli import main
from ridgeline.errors import (
    CheckpointError,
    ConfigError,
    ModelNotFoundError,
    OfflineError,
)

Capture = pytest.CaptureFixture[str]


def test_nothing_is_wrong_with_the_whole_model(whole: Path, capsys: Capture) -> None:
    assert main(generate(whole)) == 0
    assert main(generate(f"{whole}/")) == 0
    assert "decode 2 tokens" in capsys.readouterr().err


def test_spaces_and_unicode_in_a_path(whole: Path, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "mein schönes 模型 [bold]x[/bold]"
    shutil.copytree(whole, path)
    assert main(generate(path, "--json")) == 0
    assert json.loads(capsys.readouterr().out)["model"] == str(path)


def test_a_folder_called_demo_is_not_the_demo(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    shutil.copytree(whole, tmp_path / "demo")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ridgeline.models.checkpoint.source.fetch_demo", pytest.fail)
    assert main(generate("./demo")) == 0


@pytest.mark.parametrize(
    "name", ["/no/such/model", "", "a/b/c", "x.gguf", "~nobody-here/x", "a\0b", "a" * 5000]
)
def test_a_path_that_is_not_there(name: str, capsys: Capture) -> None:
    refused(capsys, ModelNotFoundError, "give demo", *generate(name))


def test_files_that_are_no_model(tmp_path: Path, capsys: Capture) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("just some notes\n")
    refused(capsys, CheckpointError, "notes.txt is not a model GGUF", *generate(text))
    (tmp_path / "empty.gguf").write_bytes(b"")
    refused(capsys, CheckpointError, "empty.gguf", *generate(tmp_path / "empty.gguf"))
    (tmp_path / "model.bin").write_bytes(b"PK\x03\x04 and so on, quite long enough")
    refused(capsys, CheckpointError, "model.bin pickle convert", *generate(tmp_path / "model.bin"))
    refused(capsys, CheckpointError, "null neither", *generate("/dev/null"))


def test_folders_that_are_no_model(tmp_path: Path, capsys: Capture) -> None:
    refused(capsys, CheckpointError, ".safetensors .gguf", *generate(tmp_path))
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    (tmp_path / "config.json").write_text("{}")
    refused(capsys, CheckpointError, "pytorch_model.bin pickle convert", *generate(tmp_path))


def test_a_weights_file_that_is_a_folder(folder: Path, capsys: Capture) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    refused(capsys, CheckpointError, "model.safetensors", *generate(folder))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "."])
def test_permission_denied(whole: Path, as_nobody: Path, name: str, capsys: Capture) -> None:
    copy = as_nobody / "model"
    copy_readable(whole, copy)
    (copy / name).chmod(0)
    code = main(generate(copy))
    out, err = capsys.readouterr()
    kind = {"config.json": ConfigError, "tokenizer.json": ConfigError}.get(name, CheckpointError)
    check_refusal(code, out, err, kind.exit_code, "ermission denied")
    assert str(copy) in err


def copy_readable(source: Path, target: Path) -> None:
    """Copy as root what is then owned by the user that the test has become."""
    user = os.geteuid()
    if os.getuid() == 0:
        os.seteuid(0)
    shutil.copytree(source, target)
    if os.getuid() == 0:
        for path in (target, *target.iterdir()):
            os.chown(path, user, -1)
        os.seteuid(user)


def test_a_hub_name_without_a_network(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    words = "'nobody/no-such-model' hub could not be reached folder"
    refused(capsys, OfflineError, words, *generate("nobody/no-such-model"))
