"""What goes wrong around `ridgeline quantize` while it works: stopped, no room, the wrong device.
The original is untouched in every case. Flags and texts are in test_quantize_cli.py.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import check_refusal, make_folder, refused

import ridgeline.cli.quantize as verb
from ridgeline.cli import main
from ridgeline.errors import (
    INTERRUPTED_EXIT_CODE,
    OutputError,
    UnsupportedError,
    UsageError,
)
from ridgeline.kernels.targets import TARGETS
from ridgeline.models.checkpoint import save as saving
from ridgeline.quantization.devices import check_target

Capture = pytest.CaptureFixture[str]
LAYERS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"), hidden_size=64, num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "measured.txt"
    path.write_text("The quick brown fox jumps over the lazy dog, and again. " * 20)
    return path


@pytest.fixture(autouse=True)
def untouched(folder: Path):
    """Whatever happens in a test, the original keeps its files and their bytes."""
    before = digests(folder)
    yield
    assert digests(folder) == before


def digests(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in folder.rglob("*")
    }


def argv(folder: Path, out: Path, text: Path, *more: str, scheme: str = "int8") -> list[str]:
    quick = ["--sequences", "4", "--window", "40", "--device", "cpu"]
    quick += ["--max-kl", "5", "--max-ppl-increase", "0.9"]
    about = ["--scheme", scheme, "--out", str(out), "--text", str(text), "--batch-sizes", "none"]
    return ["quantize", str(folder), *about, *quick, *more]


# Ctrl-C reaches the process when its first layer is kept, whatever the machine's speed; also where
# tests run in the background, whose children a shell lets ignore it.
STOPPED = """
import os, signal, sys
from ridgeline.cli import main
from ridgeline.quantization.calibrating.work import Results

def keep_and_stop(self, index, result, keep=Results.put):
    keep(self, index, result)
    os.kill(os.getpid(), signal.SIGINT)

Results.put = keep_and_stop
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_stopped_in_the_middle_it_goes_on(
    folder: Path, text: Path, tmp_path: Path, capsys: Capture
) -> None:
    out, work = tmp_path / "out", tmp_path / "work"
    asked = argv(folder, out, text, "--method", "gptq", "--work", str(work))
    command = [sys.executable, "-c", STOPPED, *asked]
    stopped = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert stopped.returncode == INTERRUPTED_EXIT_CODE, stopped.stderr
    assert stopped.stdout == ""
    assert "Traceback" not in stopped.stderr
    assert not out.exists()
    layers = list(work.rglob("layer-*.safetensors"))
    assert len(layers) == 1
    written = {file: file.stat().st_mtime_ns for file in layers}
    assert main(asked) == 0
    assert "saved in" in capsys.readouterr().out
    assert {file: file.stat().st_mtime_ns for file in layers} == written
    assert len(list(work.rglob("*.safetensors"))) == LAYERS
    assert hidden(tmp_path) == []


def hidden(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name.startswith(".")]


def test_a_full_disk_is_seen_before_the_work(
    folder: Path, text: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
    monkeypatch.setattr(verb, "load_model", None)  # it would have to be called
    words = "needs free another disk"
    refused(capsys, OutputError, words, *argv(folder, tmp_path / "a" / "out", text))
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_meanwhile(
    folder: Path, text: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(saving, "save_file", full)
    words = "cannot write No space left"
    refused(capsys, OutputError, words, *argv(folder, tmp_path / "out", text))
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_takes_no_folder(
    folder: Path, text: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verb, "load_model", None)
    words = "cannot write not writable"
    refused(capsys, OutputError, words, *argv(folder, text / "out", text))


def test_a_chip_without_fp8(
    folder: Path, text: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def as_on_an_a100(scheme: object, dtype: str, device: str) -> None:
        check_target(scheme, TARGETS["sm_80"])  # type: ignore[arg-type]

    monkeypatch.setattr(verb, "check_runs", as_on_an_a100)
    words = "fp8 sm_80 has no fp8; use int8, int4-g128 or w8a8-int8"
    refused(capsys, UnsupportedError, words, *argv(folder, tmp_path / "out", text, scheme="fp8"))
    assert list(tmp_path.iterdir()) == []


def test_the_original_as_target(folder: Path, text: Path, capsys: Capture) -> None:
    refused(capsys, UsageError, "--out not empty new folder", *argv(folder, folder, text))
    refused(capsys, UsageError, "--out", *argv(folder, folder / "model.safetensors", text))


def test_nothing_left_to_quantize(
    folder: Path, text: Path, tmp_path: Path, capsys: Capture
) -> None:
    words = "* leaves no projection skip fewer"
    refused(capsys, UsageError, words, *argv(folder, tmp_path / "out", text, "--skip", "*"))


def test_a_window_as_long_as_the_context(
    folder: Path, text: Path, tmp_path: Path, capsys: Capture
) -> None:
    """Longer ones are cut to it: the default is longer than some models reach."""
    out = tmp_path / "out"
    assert main(argv(folder, out, text, "--window", "2048")) == 0, capsys.readouterr().err
    assert (out / "config.json").is_file()


def test_a_quantized_checkpoint_has_no_other_scheme(
    folder: Path, text: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "out"
    assert main(argv(folder, out, text)) == 0
    capsys.readouterr()
    about = ["--text", str(text), "--window", "40", "--device", "cpu", "--scheme", "int8"]
    code = main(["eval", str(out), *about])
    shown, said = capsys.readouterr()
    check_refusal(code, shown, said, UsageError.exit_code, "int8 quantized already remove --scheme")
