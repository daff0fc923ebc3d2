"""`ridgeline profile` from the outside: tables, JSON, files, refusals."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import make_folder, refused

import ridgeline
from ridgeline.cli import main, profile
from ridgeline.cli.main import add_verb_arguments, top_level_parser
from ridgeline.errors import ContextLengthError, HardwareError, OutputError, UsageError
from ridgeline.profiling.tracing import watching
from ridgeline.profiling.tracing.counters import count

Capture = pytest.CaptureFixture[str]
SMALL = ("--device", "cpu", "--context", "40", "--prefill", "2x30", "--steps", "3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


def test_everything_at_once(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    outputs = {name: tmp_path / name for name in ("trace.json", "page.html")}
    command = ["profile", str(folder), *SMALL, "--batch", "2", "--max-batch", "4", "--json"]
    command += ["--trace", str(outputs["trace.json"]), "--html", str(outputs["page.html"])]
    assert main([*command, "--save", str(tmp_path / "records"), "--counters"]) == 0
    found = json.loads(capsys.readouterr().out)
    prefill, decode = found["steps"]
    assert (prefill["phase"], decode["phase"]) == ("prefill", "decode")
    assert decode["label"] == "decode, batch 2, context 40"
    for step in (prefill, decode):
        assert sum(step["totals"].values()) == pytest.approx(step["step_s"], rel=0.03)
        rows = sum(row["seconds"] for row in step["rows"])
        waits = sum(step["totals"][name] for name in ("copies", "gaps", "host"))
        assert rows + waits == pytest.approx(step["step_s"], rel=0.03)
        assert 0 < step["share_of_limit"] < 1
        assert step["ceiling_source"] in ("measured", "datasheet")
    shares = [part["share"] for part in found["gap"]]
    assert shares == sorted(shares, reverse=True)
    assert 0 < sum(shares) < 1  # the rest is the limit's
    gains = [each["speedup"] for each in found["next"]]
    assert gains == sorted(gains, reverse=True)
    assert all(each["low"] <= each["speedup"] <= each["high"] for each in found["next"])
    assert any("counters are a GPU's" in note for note in found["notes"])
    events = json.loads(outputs["trace.json"].read_text())["traceEvents"]
    names = {str(event.get("name", "")) for event in events}
    assert any(name.startswith("aten::") for name in names)
    assert {"layers.0.mlp.gate_up", "sampling", "ridgeline:step"} <= names
    page = outputs["page.html"].read_text()
    assert "mlp.gate_up" in page
    assert "Why it is not 100%" in page
    assert "://" not in page.replace("http://www.w3.org", "").replace("http%3A", "")
    record = json.loads(Path(found["record"]).read_text())
    assert record["values"]["decode_step"]["value"] == decode["step_s"]
    parts = [
        record["values"][f"decode_{name.replace(' ', '_')}"]["value"] for name in decode["totals"]
    ]
    assert sum(parts) == pytest.approx(decode["step_s"], rel=0.03)


def test_on_a_cpu_no_trace_is_taken_that_nobody_wants(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """The clock of scopes divides the step; torch.profiler is for the file alone."""
    monkeypatch.setattr(watching, "traced", lambda *_: pytest.fail("a trace was taken"))
    assert main(["profile", str(folder), *SMALL, "--json"]) == 0
    prefill, decode = json.loads(capsys.readouterr().out)["steps"]
    for step in (prefill, decode):
        assert sum(step["totals"].values()) == pytest.approx(step["step_s"], rel=0.03)


def test_people_see_tables(folder: Path, capsys: Capture) -> None:
    assert main(["profile", str(folder), *SMALL[:4], "--steps", "3"]) == 0
    out = capsys.readouterr().out
    for words in ("prefill, 1 x 40 tokens", "decode, batch 1, context 40", "mlp.gate_up", "host",
                  "What next", "bound by", "of the limit"):  # fmt: skip
        assert words in out
    assert "The largest parts of the rest are" in " ".join(out.split())
    assert "Traceback" not in out


def test_the_plain_loop(folder: Path, capsys: Capture) -> None:
    command = ["profile", str(folder), *SMALL[:4], "--prefill", "30", "--steps", "3"]
    assert main([*command, "--loop", "naive", "--dtype", "fp32", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["loop"] == "naive"
    assert {each["edit"]["loop"] for each in found["next"]} <= {"engine"}
    assert {row["op"] for row in found["steps"][1]["rows"]} >= {"attention", "sampling", "head"}
    refused(capsys, UsageError, "--scheme is for the engine --dtype alone",
            *command, "--loop", "naive", "--scheme", "int8")  # fmt: skip


def test_shapes_and_schemes(capsys: Capture) -> None:
    command = ["profile", "--shape", "tiny", *SMALL, "--scheme", "int8", "--quantize-all"]
    assert main([*command, "--kernels", "reference", "--dtype", "fp32", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["scheme"] == "int8"
    assert not any("weights in" in each["title"] for each in found["next"])


def test_drafting_is_left_out_and_said(folder: Path, capsys: Capture) -> None:
    command = ["profile", str(folder), *SMALL, "--speculation", "prompt-lookup", "--json"]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert any("without speculation" in note for note in found["notes"])


FAKE_NCU = """\
#!{python}
import json, os, subprocess, sys
from pathlib import Path

command = sys.argv[sys.argv.index({python!r}):]
looked = [command[0], "-P", "-c", "import ridgeline; print(ridgeline.__file__)"]
found = subprocess.run(looked, capture_output=True, text=True, cwd="/").stdout.strip()
Path({seen!r}).write_text(json.dumps({{"command": command, "package": found}}))
print('"ID","Kernel Name","dram__throughput.avg.pct_of_peak_sustained_elapsed"')
print('"0","_decode_kernel","80.0"')
"""


@pytest.fixture
def fake_ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An `ncu` that writes down what it was to run, as if the device were a GPU."""
    seen, tool = tmp_path / "seen.json", tmp_path / "bin" / "ncu"
    tool.parent.mkdir()
    tool.write_text(FAKE_NCU.format(python=sys.executable, seen=str(seen)))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=os.pathsep)
    monkeypatch.setattr(profile, "count", lambda command, _: count(command, "cuda"))
    return seen


def parsed(arguments: list[str]) -> dict[str, Any]:
    parser = top_level_parser()
    add_verb_arguments(parser, "profile", profile)
    return {
        key: each for key, each in vars(parser.parse_args(arguments)).items() if key != "parser"
    }


def test_counters_are_read_of_the_same_steps(
    folder: Path, tmp_path: Path, fake_ncu: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """Whatever started this process: `sys.argv` here is the test's own. No files are written."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    given = ["profile", str(folder), *SMALL, "--batch", "2", "--max-batch", "4", "--dtype", "fp32"]
    given += ["--no-prefix-cache", "--kernels", "reference"]
    asked = ["--counters", "--json", "--html", str(tmp_path / "p.html"), "--save", str(tmp_path)]
    assert main([*given, *asked]) == 0
    assert json.loads(capsys.readouterr().out)["counters"] == "ncu"
    seen = json.loads(fake_ncu.read_text())
    python, *words = seen["command"]
    assert (python, words[:3]) == (sys.executable, ["-P", "-m", "ridgeline"])
    assert parsed(words[3:]) == parsed([*given, "--counted-steps"])
    assert seen["package"] == ridgeline.__file__  # the child finds this very package


def test_counters_of_a_shape(fake_ncu: Path, capsys: Capture) -> None:
    given = ["profile", "--shape", "tiny", *SMALL, "--loop", "naive", "--prefill=30"]
    assert main([*given, "--counters"]) == 0
    words = json.loads(fake_ncu.read_text())["command"][4:]
    assert parsed(words) == parsed([*given, "--counted-steps"])


def test_bad_input(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    model = ("profile", str(folder), "--device", "cpu")
    refused(capsys, UsageError, "give either a model, or --shape", "profile")
    refused(capsys, UsageError, "give either a model, or --shape", *model, "--shape", "tiny")
    refused(capsys, UsageError, "shape 'llama-9' is unknown", "profile", "--shape", "llama-9")
    refused(capsys, UsageError, "--batch is 0 at least 1", *model, "--batch", "0")
    refused(capsys, UsageError, "--context is 1", *model, "--context", "1")
    refused(capsys, UsageError, "--prefill is '2y3' 16x2048", *model, "--prefill", "2y3")
    refused(capsys, UsageError, "--prefill is '0'", *model, "--prefill", "0")
    refused(capsys, ContextLengthError, "--context is 999 at most 128", *model, "--context", "999")
    refused(capsys, ContextLengthError, "--prefill", *model, "--context", "40", "--prefill", "128")
    refused(capsys, UsageError, "--batch is 200 max_batch", *model, "--batch", "200",
            "--context", "20", "--max-batch", "8")  # fmt: skip
    blocked = tmp_path / "file"
    blocked.write_text("")
    refused(capsys, OutputError, "file", *model, *SMALL[2:], "--html", str(blocked / "page.html"))


def test_no_gpu_where_one_is_asked_for(folder: Path, capsys: Capture) -> None:
    refused(
        capsys,
        HardwareError,
        "no GPU --device cpu",
        "profile",
        str(folder),
        "--device",
        "cuda:7",
    )
