"""What every verb promises: help, one JSON document, quiet pipes, distinct exit codes."""

from __future__ import annotations

import argparse
import json
import logging
import os
import pty
import select
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from command_line import TEMPLATE, check_refusal, make_folder, refused, run_process
from tiny_tokenizers import demo

from ridgeline import errors
from ridgeline.cli import main
from ridgeline.cli.arguments.options import add_flags, from_flags, given_flags
from ridgeline.cli.main import VERBS
from ridgeline.errors import RidgelineError, UsageError
from ridgeline.hardware import Hardware
from ridgeline.hardware.facts import Ceiling
from ridgeline.models.checkpoint.source import hub_bar
from ridgeline.recipe import Recipe

Capture = pytest.CaptureFixture[str]
NAMES = sorted(VERBS)
NEED_GPU = {"bench"}  # their documents are looked at where there is one
LASTING = {"serve"}  # ends by a signal: see test_server_command.py


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"), TEMPLATE, max_position_embeddings=4096)


@pytest.fixture
def loud_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ceilings without the wait, from a layer that reports progress, warns and logs."""

    def measure(hardware: Hardware, only: Any = None, progress: Any = None, **_: Any) -> Hardware:
        assert progress is not None
        for done in range(3):
            progress("measuring ceilings", done, 2)
        warnings.warn("something is odd", stacklevel=1)
        logging.getLogger("ridgeline.hardware").warning("something is slow")
        keys = {"read_bandwidth": "B/s", "matrix_fp32": "FLOP/s"}
        ceilings = {key: Ceiling(1e9, unit, "measured") for key, unit in keys.items()}
        return replace(hardware, ceilings=ceilings)

    for verb in VERBS:
        monkeypatch.setattr(f"ridgeline.cli.{verb}.measure", measure, raising=False)
    monkeypatch.setattr("ridgeline.ladder.order.measure", measure)


def arguments(verb: str, folder: Path) -> list[str]:
    """A quick and complete command line of each verb; a new verb is added here."""
    device = ["--device", "cpu"]
    return {
        "hardware": ["hardware", *device],
        "kernels": ["kernels", "list"],
        "learn": ["learn"],
        "explain": ["explain", "page", *device],
        "plan": ["plan", "tiny", "--gpus", "8xH100", "--sequence-length", "64", "--batch", "8"],
        "data": ["data", "build", *raw_text(folder), "--tokenizer", str(folder)],
        "eval": ["eval", str(folder), "--text", str(folder / "config.json"), *device],
        "generate": ["generate", str(folder), "hello", "--max-tokens", "3", *device],
        "profile": ["profile", str(folder), "--context", "40", "--steps", "2", *device],
        "report": ["report", "accuracy"],
        "optimize": ["optimize", str(folder), "--dry-run", *traced(folder), *device],
        "quantize": ["quantize", str(folder), "--scheme", "int8", *quantized(folder), *device],
        "train": ["train", str(folder), *learned(folder), *device],
        "tune": ["tune", "lr", str(folder), *risen(folder), *device],
    }[verb]


def learned(folder: Path) -> list[str]:
    out = Path(tempfile.mkdtemp(dir=folder.parent)) / "run"
    text = folder.parent / "text.txt"
    text.write_text("a text to learn, again and again. " * 20)
    quick = ["--steps", "1", "--batch", "1", "--sequence-length", "16", "--held-out", "0"]
    return ["--data", str(text), "--out", str(out), *quick]


def raw_text(folder: Path) -> list[str]:
    out = Path(tempfile.mkdtemp(dir=folder.parent)) / "corpus"
    text = folder.parent / "raw.txt"
    text.write_text("a text of a few words")
    return ["--in", str(text), "--out", str(out), "--workers", "1", "--rules", "none"]


def risen(folder: Path) -> list[str]:
    quick = ["--range", "1e-6..100", "--range-steps", "12", "--seeds", "2"]
    words = learned(folder)
    at = words.index("--steps")
    return [*words[:at], *words[at + 2 :], *quick]


def traced(folder: Path) -> list[str]:
    trace = folder.parent / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,16,8\n")
    return ["--workload", str(trace)]


def quantized(folder: Path) -> list[str]:
    out = Path(tempfile.mkdtemp(dir=folder.parent)) / "out"
    quick = ["--sequences", "4", "--window", "40", "--batch-sizes", "none"]
    bound = ["--max-kl", "9", "--max-ppl-increase", "0.9"]
    return ["--out", str(out), "--text", str(folder / "config.json"), *quick, *bound]


def strict_json(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


# --- help and version -----------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("argv", [[], ["--help"], ["--version"]])
def test_help_needs_no_torch(argv: list[str]) -> None:
    code = (
        "import sys; from ridgeline.cli import main; code = main(sys.argv[1:]); "
        "heavy = {'torch', 'numpy', 'tokenizers', 'triton'} & set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    command = [sys.executable, "-c", code, *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "ridgeline" in done.stdout


def test_help_names_every_verb(capsys: Capture) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for verb in VERBS:
        assert f"  {verb} " in shown


@pytest.mark.parametrize("verb", NAMES)
def test_each_verb_has_help_with_an_example(verb: str, capsys: Capture) -> None:
    assert main([verb, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"example:\n  ridgeline {verb}" in shown
    assert "--json" in shown
    assert "--debug" in shown


PARTS = (
    ["data", "build"],
    ["data", "plan"],
    ["data", "judge"],
    *(["bench", name] for name in ("kernels", "engine", "serve")),
    *(["tune", name] for name in ("lr", "search", "width", "serve", "scale")),
    ["report", "show"],
)


@pytest.mark.parametrize("words", [[], *([name] for name in NAMES), *PARTS], ids=" ".join)
def test_help_is_short_and_fits_80_columns(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*words, "--help"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    flags = [line for line in shown.splitlines() if line.startswith("  --")]
    assert len(flags) <= 18
    headings = [line for line in shown.splitlines() if line.endswith(":") and line[0] != " "]
    assert headings[-2:] == ["general:", "example:"] or words[1:]


@pytest.mark.parametrize("words", [["generate"], ["serve"], ["optimize"], ["bench", "engine"]])
def test_help_all_shows_what_help_leaves_out(words: list[str], capsys: Capture) -> None:
    assert main([*words, "--help"]) == 0
    short = capsys.readouterr().out
    assert main([*words, "--help-all"]) == 0
    long = capsys.readouterr().out
    assert f"more flags: ridgeline {' '.join(words)} --help-all" in short
    assert "more flags" not in long
    flags = {line.split()[0].rstrip(",") for line in short.splitlines() if line.startswith("  -")}
    assert all(f"  {flag}" in long for flag in flags)
    hidden = "--rounds" if words == ["optimize"] else "--page-size"
    assert hidden not in short
    assert hidden in long


@pytest.mark.parametrize("verb", NAMES)
def test_the_flags_of_the_short_help_exist(verb: str, capsys: Capture) -> None:
    module = import_module(f"ridgeline.cli.{verb}")
    has_parts = verb in ("bench", "data")
    parts = [part for part, _ in module.PARTS.values()] if has_parts else [module]
    for part in parts:
        words = part.__name__.split(".")[2:]
        assert main([*words, "--help-all" if hasattr(part, "MAIN_FLAGS") else "--help"]) == 0
        shown = capsys.readouterr().out
        for flag in getattr(part, "MAIN_FLAGS", ()):
            assert f"  {flag}" in shown


# --- JSON -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", sorted(set(NAMES) - NEED_GPU - LASTING))
@pytest.mark.usefixtures("loud_measuring")
@pytest.mark.filterwarnings("ignore:something is odd")
def test_json_is_one_document_and_nothing_else(verb: str, folder: Path, capsys: Capture) -> None:
    assert main([*arguments(verb, folder), "--json"]) == 0
    assert isinstance(strict_json(capsys.readouterr().out), dict)


def test_the_datasheet_as_json(capsys: Capture) -> None:
    assert main(["hardware", "--list", "--json"]) == 0
    assert len(strict_json(capsys.readouterr().out)["datasheet"]) > 10


@pytest.mark.usefixtures("loud_measuring")
@pytest.mark.filterwarnings("ignore:something is odd")
def test_json_of_a_generation(folder: Path, capsys: Capture) -> None:
    argv = [*arguments("generate", folder), "--json", "--temperature", "0.7", "--seed", "5"]
    assert main(argv) == 0
    document = strict_json(capsys.readouterr().out)
    assert document["seed"] == 5
    assert len(document["tokens"]) <= 3
    assert document["decode_limit"]["ceiling"]["source"] == "measured"
    assert main(argv) == 0
    assert strict_json(capsys.readouterr().out)["tokens"] == document["tokens"]


@pytest.mark.usefixtures("loud_measuring")
@pytest.mark.filterwarnings("ignore:something is odd")
def test_text_on_stdout_and_speed_on_stderr(folder: Path, capsys: Capture) -> None:
    argv = [*arguments("generate", folder), "--max-tokens", "1"]
    assert main([*argv, "--json"]) == 0
    text = strict_json(capsys.readouterr().out)["text"]
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert out.rstrip("\n") == text.rstrip("\n")
    assert "prefill" in err


# --- errors ---------------------------------------------------------------------------------------


def test_each_kind_of_error_has_its_own_exit_code() -> None:
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and RidgelineError in kind.__bases__
    ]
    codes = [kind.exit_code for kind in kinds]
    others = [value for name, value in vars(errors).items() if name.endswith("_EXIT_CODE")]
    assert len(set(codes + others)) == len(codes + others) >= 14
    assert not {0, 1} & {*codes, *others}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["hardwear"], "'hardwear' did you mean 'hardware'?"),
        (["banana"], "'banana' use one of hardware generate"),
        (["hardware", "--jsno"], "'--jsno' did you mean '--json'?"),
        (["hardware", "--dev=cpu"], "'--dev=cpu'"),
        (["hardware", "extra"], "'extra' not understood"),
        (["hardware", "--device"], "--device expected one argument ridgeline hardware --help"),
        (["generate"], "required: MODEL, PROMPT ridgeline generate --help"),
        (["generate", "demo", "x", "--temprature", "1"], "'--temprature' '--temperature'"),
        (["generate", "demo", "x", "--temp", "1"], "'--temp' '--temperature'"),
        (["--json", "hardware"], "--json belongs behind the verb"),
        (["--verison"], "'--verison' did you mean '--version'?"),
    ],
)
def test_unknown_flags_and_verbs(argv: list[str], words: str, capsys: Capture) -> None:
    refused(capsys, UsageError, words, *argv)


def test_a_traceback_only_when_asked_for(capsys: Capture) -> None:
    argv = ["generate", "/no/such/model", "hello"]
    refused(capsys, errors.ModelNotFoundError, "/no/such/model", *argv)
    assert main([*argv, "--debug"]) == errors.ModelNotFoundError.exit_code
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert shown.splitlines()[-1].startswith("ridgeline: error: '/no/such/model'")
    assert main(["--debug", *argv]) == errors.ModelNotFoundError.exit_code


def raiser(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (ZeroDivisionError("two\nlines"), 70, "internal ZeroDivisionError: two lines --debug"),
        (MemoryError(), errors.OutOfMemoryError.exit_code, "out of host memory"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried\nC++ frames"),
            errors.OutOfMemoryError.exit_code,
            "out of memory: smaller",
        ),
        (OSError(28, "No space", "/x/y"), errors.OutputError.exit_code, "/x/y: No space left"),
        (OSError(5, "Input/output"), errors.OutputError.exit_code, "Input/output error"),
    ],
)
def test_what_is_not_ours_is_one_line_too(
    error: BaseException, code: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("ridgeline.cli.hardware.detect", raiser(error))
    returned = main(["hardware"])
    out, err = capsys.readouterr()
    check_refusal(returned, out, err, code, words)


def test_errors_as_a_process_sees_them() -> None:
    """One that needs no torch; the others are refused by the same lines in this process."""
    done = run_process("hardwear", "--json")
    code = errors.UsageError.exit_code
    check_refusal(done.returncode, done.stdout, done.stderr, code, "'hardwear' 'hardware'")


# --- pipes, terminals, Ctrl-C ---------------------------------------------------------------------


def start(*argv: str, **options: Any) -> subprocess.Popen[bytes]:
    """As from a shell, where Ctrl-C is not ignored."""
    return subprocess.Popen(
        [sys.executable, "-m", "ridgeline", *argv],
        stdin=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **options,
    )


def long_generation(folder: Path) -> list[str]:
    return ["generate", str(folder), "hello", "--max-tokens", "4000", "--temperature", "2"]


@pytest.mark.parametrize(
    "argv", [["--help"], pytest.param(["hardware", "--list"], marks=pytest.mark.slow)]
)
def test_a_reader_that_goes_away(argv: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = start(*argv, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"")


@pytest.mark.slow
def test_the_demo_into_head() -> None:
    demo()
    command = (
        f'"{sys.executable}" -m ridgeline generate demo x | head -c 1; echo "${{PIPESTATUS[0]}}"'
    )
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    assert done.stdout[1:] == "0\n"


def test_ctrl_c_while_text_is_streaming(folder: Path) -> None:
    process = start(*long_generation(folder), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.read(1)  # it is at work
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == errors.INTERRUPTED_EXIT_CODE
    assert err == b"ridgeline: error: interrupted\n"


def test_stdout_that_is_closed_or_takes_only_ascii(folder: Path) -> None:
    command = f'"{sys.executable}" -m ridgeline --help >&-'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    done = run_process("hardware", "--list", environment={"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "H200" in done.stdout


def on_terminal(*argv: str, stdout_is_terminal: bool = True) -> bytes:
    """All that a terminal shows; with stdout elsewhere, what stderr alone shows."""
    ours, theirs = pty.openpty()
    stdout = theirs if stdout_is_terminal else subprocess.DEVNULL
    process = start(*argv, stdout=stdout, stderr=theirs, env={**os.environ, "TERM": "xterm"})
    os.close(theirs)
    shown = b"".join(read_until_closed(ours))
    os.close(ours)
    assert process.wait(timeout=60) == 0, shown
    return shown


def read_until_closed(descriptor: int) -> Iterator[bytes]:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        ready, _, _ = select.select([descriptor], [], [], 1)
        try:
            data = os.read(descriptor, 65536) if ready else b""
        except OSError:  # how Linux tells that the other side is closed
            return
        yield data


@pytest.mark.slow
def test_bars_on_a_terminal_and_only_there(folder: Path) -> None:
    argv = arguments("generate", folder)
    assert b"reading model.safetensors" in on_terminal(*argv)
    assert b"reading" not in on_terminal(*argv, stdout_is_terminal=False)
    assert b"reading" not in on_terminal(*argv, "--json")


def test_the_hubs_own_bars_are_ours(capfd: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[str, int, int]] = []
    for progress in (None, lambda *call: seen.append(call)):
        bar = hub_bar("fetching org/name", progress)
        with bar(total=100, unit="B") as downloaded, bar(total=2, desc="files") as files:
            downloaded.update(100)
            downloaded.refresh()
            files.update(1)
    assert capfd.readouterr() == ("", "")
    assert seen[-1] == ("fetching org/name", 100, 100)
    assert {label for label, _, _ in seen} == {"fetching org/name"}


# --- flags from fields ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Knobs:
    size: int = field(default=3, metadata={"help": "how large"})
    names: tuple[str, ...] = field(default=(), metadata={"help": "which ones"})
    share: float | None = field(default=None, metadata={"help": "how much"})


def test_flags_keep_the_configs_own_defaults() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, Knobs)
    assert from_flags(parser.parse_args([]), Knobs) == Knobs()
    given = parser.parse_args(["--names", "a", "--names", "b", "--share", "0.5"])
    assert from_flags(given, Knobs) == Knobs(3, ("a", "b"), 0.5)
    assert "(default: 3)" in parser.format_help()


def test_given_flags_are_given_again() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, Recipe)
    assert given_flags(parser.parse_args([]), Recipe) == []
    words = ["--dtype=auto", "--no-overlap", "--graphs", "--kv-dtype=fp8", "--max-batch=3"]
    args = parser.parse_args(words)
    assert sorted(given_flags(args, Recipe)) == sorted(words)  # a default that was given, too
    own = argparse.ArgumentParser()
    add_flags(own, Knobs)
    several = own.parse_args(["--names=-a", "--names=b c", "--share=-0.5"])
    assert own.parse_args(given_flags(several, Knobs)) == several


@pytest.mark.parametrize(("given", "found"), [(None, "passive"), ("active", "active")])
def test_threads_that_wait_sleep_unless_the_user_says_otherwise(
    given: str | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if given is None:
        monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    else:
        monkeypatch.setenv("OMP_WAIT_POLICY", given)
    assert main(["kernels", "list", "--json"]) == 0
    assert os.environ["OMP_WAIT_POLICY"] == found
