"""Records: stamped completely, the same after a round trip, strict when read."""

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import ridgeline
from ridgeline import records
from ridgeline.errors import OutputError, UsageError
from ridgeline.hardware import clocks as clocks_module
from ridgeline.hardware import detect
from ridgeline.hardware.clocks import Clocks, parse_nvidia_smi, parse_rocm_smi, read_clocks
from ridgeline.records import Record, Value, source_commit

pytestmark = pytest.mark.smoke


@pytest.fixture
def record() -> Record:
    value = Value(3.4e12, "B/s", 0.02, 300, share_of_ceiling=0.8, ceiling_source="measured")
    return Record.create("decode", detect("cpu"), {"read": value}, notes=["idle machine"])


def test_is_stamped(record: Record) -> None:
    assert record.schema == 1
    assert record.command[0] == "ridgeline"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", record.created)
    assert record.versions["ridgeline"] == ridgeline.__version__
    assert {"python", "torch", "triton", "platform"} <= set(record.versions)
    assert record.hardware["device_type"] == "cpu"
    assert record.clocks is None


def test_command_has_no_machine_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/somewhere/bin/ridgeline", "hardware", "--json"])
    record = Record.create("x", detect("cpu"), {})
    assert record.command == ("ridgeline", "hardware", "--json")


def test_round_trip_through_json(record: Record) -> None:
    with_clocks = replace(record, clocks=Clocks(sm_mhz=1980.0, power_limit_w=700.0))
    for original in (record, with_clocks):
        assert Record.from_json(json.loads(json.dumps(original.to_json()))) == original


def test_unknown_and_missing_keys_are_errors(record: Record) -> None:
    data = record.to_json()
    with pytest.raises(UsageError, match="unknown key 'valuse'; did you mean 'values'"):
        Record.from_json({**data, "valuse": {}})
    with pytest.raises(UsageError, match="did you mean 'spread'"):
        Record.from_json({**data, "values": {"read": {"value": 1, "unit": "s", "spraed": 0}}})
    with pytest.raises(UsageError, match="is missing commit"):
        Record.from_json({key: value for key, value in data.items() if key != "commit"})
    with pytest.raises(UsageError, match="schema 99"):
        Record.from_json({**data, "schema": 99})


def test_a_share_names_its_ceiling() -> None:
    with pytest.raises(UsageError, match="source"):
        Value(1.0, "s", share_of_ceiling=0.5)


def test_saves_under_name_device_and_date(record: Record, tmp_path: Path) -> None:
    named = replace(record, hardware={**record.hardware, "name": "NVIDIA H200"})
    path = named.save(tmp_path / "results")
    assert path.name == f"decode-nvidia-h200-{record.created[:10]}.json"
    assert Record.from_json(json.loads(path.read_text())) == named
    second = named.save(tmp_path / "results")
    assert second.name.endswith("-2.json")
    assert len(list(path.parent.iterdir())) == 2


def test_saving_where_it_cannot_is_an_output_error(record: Record, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot write"):
        record.save(tmp_path / "file")


def test_not_a_number_is_never_saved(record: Record, tmp_path: Path) -> None:
    broken = replace(record, values={"x": Value(float("nan"), "s")})
    with pytest.raises(ValueError):
        broken.save(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_commit_of_this_checkout_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the package inside another repository is not stamped with that one's commit."""

    def git(*arguments: str) -> None:
        settings = ("-c", "user.name=t", "-c", "user.email=t@example.org")
        subprocess.run(
            ["git", *settings, *arguments], cwd=tmp_path, check=True, capture_output=True
        )

    git("init")
    package = tmp_path / "ridgeline"
    package.mkdir()
    (package / "__init__.py").write_text("")
    git("add", ".")
    git("commit", "-m", "first")
    monkeypatch.setattr(records, "__file__", str(package / "records.py"))
    commit, dirty = source_commit()
    assert re.fullmatch("[0-9a-f]{40}", commit or "")
    assert dirty is False
    (package / "__init__.py").write_text("changed = 1\n")
    assert source_commit() == (commit, True)
    installed = tmp_path / "env" / "ridgeline"
    installed.mkdir(parents=True)
    monkeypatch.setattr(records, "__file__", str(installed / "records.py"))
    assert source_commit() == (None, None)


def test_nvidia_clocks() -> None:
    clocks = parse_nvidia_smi("1980, 1980, 3201, 700.00, 76.52, 29\n")
    assert clocks == Clocks(1980.0, 1980.0, 3201.0, 700.0, 76.52, 29.0)
    hidden = parse_nvidia_smi("345, 1980, [N/A], [Not Supported], 70.1, 29")
    assert hidden is not None
    assert (hidden.memory_mhz, hidden.power_limit_w) == (None, None)
    assert parse_nvidia_smi("") is None
    assert parse_nvidia_smi("Unable to determine the device handle") is None


def test_amd_clocks() -> None:
    card = {
        "sclk clock speed:": "(2100Mhz)",
        "mclk clock speed:": "(1300Mhz)",
        "Max Graphics Package Power (W)": "750.0",
        "Average Graphics Package Power (W)": "141.0",
    }
    clocks = parse_rocm_smi(json.dumps({"card0": card}))
    assert clocks == Clocks(2100.0, None, 1300.0, 750.0, 141.0, None)
    assert parse_rocm_smi("{}") is None
    assert parse_rocm_smi("no devices") is None


def test_clocks_are_asked_of_the_right_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch counts visible devices, nvidia-smi all: the device is named by its identifier."""
    asked: list[list[str]] = []

    def query(command: list[str]) -> str:
        asked.append(command)
        return "1980, 1980, 3201, 700.00, 76.52, 29"

    device = SimpleNamespace(uuid="1234-abcd")
    monkeypatch.setattr(clocks_module, "query", query)
    monkeypatch.setattr(clocks_module.torch.cuda, "get_device_properties", lambda index: device)
    gpu = replace(detect("cpu"), device_type="cuda", device="cuda:1")
    found = read_clocks(gpu)
    assert found is not None
    assert found.power_limit_w == 700.0
    assert asked[0][-2:] == ["-i", "GPU-1234-abcd"]
    assert not any(word in ("-pl", "-lgc", "-ac", "-pm") for word in asked[0])
    assert read_clocks(replace(gpu, device_type="rocm")) is None  # not rocm-smi's JSON
    assert asked[1][:3] == ["rocm-smi", "-d", "1"]


def test_no_clocks_on_a_cpu() -> None:
    assert read_clocks(detect("cpu")) is None
