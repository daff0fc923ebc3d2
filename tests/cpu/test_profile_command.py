"""`ridgeline profile` from the outside: tables, JSON, files, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import make_folder, refused

from ridgeline.cli import main
from ridgeline.errors import ContextLengthError, HardwareError, OutputError, UsageError

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
    assert "://" not in page.replace("http://www.w3.org", "").replace("http%3A", "")
    record = json.loads(Path(found["record"]).read_text())
    assert record["values"]["decode_step"]["value"] == decode["step_s"]
    parts = [
        record["values"][f"decode_{name.replace(' ', '_')}"]["value"] for name in decode["totals"]
    ]
    assert sum(parts) == pytest.approx(decode["step_s"], rel=0.03)


def test_people_see_tables(folder: Path, capsys: Capture) -> None:
    assert main(["profile", str(folder), *SMALL[:4], "--steps", "3"]) == 0
    out = capsys.readouterr().out
    for words in ("prefill, 1 x 40 tokens", "decode, batch 1, context 40", "mlp.gate_up", "host",
                  "What next", "bound by", "of the limit"):  # fmt: skip
        assert words in out
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


def test_guessing_is_left_out_and_said(folder: Path, capsys: Capture) -> None:
    command = ["profile", str(folder), *SMALL, "--speculation", "prompt-lookup", "--json"]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert any("without guessed tokens" in note for note in found["notes"])


def test_bad_input(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    model = ("profile", str(folder), "--device", "cpu")
    refused(capsys, UsageError, "one of the two", "profile")
    refused(capsys, UsageError, "one of the two", *model, "--shape", "tiny")
    refused(capsys, UsageError, "shape 'llama-9' is not known", "profile", "--shape", "llama-9")
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
        "no GPU here --device cpu",
        "profile",
        str(folder),
        "--device",
        "cuda:7",
    )
