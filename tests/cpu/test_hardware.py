"""Detection, the cache of ceilings and the `hardware` verb, without a GPU."""

import json
import logging
import os
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from ridgeline.cli import main
from ridgeline.errors import HardwareError, UsageError
from ridgeline.hardware import Ceiling, Hardware, ceilings, detect, detection, load_cached, measure
from ridgeline.hardware.facts import MEASURED
from ridgeline.hardware.paths import cache_dir
from ridgeline.hardware.probes import PROBES, NotSupportedHere, fp8_dtype, matrix_tf32
from ridgeline.hardware.specs import SPECS, DeviceSpec
from ridgeline.hardware.units import human, human_bytes

pytestmark = pytest.mark.smoke

FACTS = Hardware("nvidia", "cuda", "cuda:0", "Foo 9000", "sm_90", 80 << 30, 132, "580.1")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Probes that answer at once; the list says which ran."""
    seen: list[str] = []

    def fake(key: str) -> object:
        def probe(hardware: Hardware) -> Ceiling:
            seen.append(key)
            if key in ("matrix_tf32", "graph_step"):
                raise NotSupportedHere("not supported")
            if key == "h2d_pinned":
                raise RuntimeError("out of memory\nTried to allocate")
            return Ceiling(100.0 + len(seen), MEASURED[key][1], "measured", 0.01)

        return probe

    monkeypatch.setattr(ceilings, "PROBES", {key: fake(key) for key in MEASURED})
    monkeypatch.setattr("ridgeline.kernels.ceilings.OWN_PROBES", {})
    return seen


def test_a_gpu_that_others_use_is_measured_again_and_not_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Six processes beside it: samples lie apart by more than their median."""
    gpu = replace(FACTS, device_type="cuda", name="a GPU that is shared")
    monkeypatch.setattr(ceilings, "_release", lambda _: None)

    def measured(*samples: tuple[float, float]) -> dict[str, Ceiling]:
        left = [Ceiling(value, "FLOP/s", "measured", spread) for value, spread in samples]
        monkeypatch.setitem(ceilings.PROBES, "matrix_bf16", lambda _: left.pop(0))
        result = ceilings.measure(gpu, {"matrix_bf16"}).ceilings
        assert not left
        return dict(result)

    assert measured((200e12, 1.1), (440e12, 0.7))["matrix_bf16"].value == 440e12
    assert not ceilings.load_cached(gpu).ceilings
    assert measured((200e12, 1.1), (780e12, 0.01))["matrix_bf16"].value == 780e12
    assert ceilings.load_cached(gpu).ceilings["matrix_bf16"].value == 780e12


def row(name: str) -> DeviceSpec:
    return next(spec for spec in SPECS if spec.name == name)


# Hardware


def test_an_unknown_ceiling_is_none_and_a_known_one_prefers_the_measured() -> None:
    assert FACTS.ceiling("matrix_bf16") is None
    assert FACTS.share("matrix_bf16") is None
    sheet = replace(FACTS, datasheet=row("H200").ceilings())
    known = sheet.ceiling("matrix_bf16")
    assert known is not None
    assert known.source == "datasheet"
    measured = Ceiling(787e12, "FLOP/s", "measured", 0.01)
    both = replace(sheet, ceilings={"matrix_bf16": measured})
    assert both.ceiling("matrix_bf16") == measured
    assert both.share("matrix_bf16") == pytest.approx(787 / 989.4)


def test_json_round_trip() -> None:
    full = replace(
        detect("cpu"),
        ceilings={"copy_bandwidth": Ceiling(2e10, "B/s", "measured", 0.1)},
        datasheet=row("H200").ceilings(),
        absent={"matrix_fp8": "not supported"},
    )
    text = json.dumps(full.to_json(), allow_nan=False)
    assert Hardware.from_json(json.loads(text)) == full
    with pytest.raises(UsageError, match="did you mean 'ceilings'"):
        Hardware.from_json({**full.to_json(), "celings": {}})


# Detection


def test_detects_this_cpu() -> None:
    hardware = detect("cpu")
    assert (hardware.device_type, hardware.device) == ("cpu", "cpu")
    assert 1 <= hardware.num_units <= (os.cpu_count() or 1)
    assert hardware.num_threads == torch.get_num_threads()
    assert 1 << 28 < hardware.memory_bytes < 1 << 46
    assert hardware.name
    assert hardware.versions["torch"] == torch.__version__
    assert hardware.ceilings == {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
@pytest.mark.parametrize(
    ("about", "name"),
    [
        ({"model name": "Xeon", "CPU part": "0xd0c"}, "Xeon"),
        ({"CPU implementer": "0x41", "CPU part": "0xd0c"}, "Neoverse N1"),
        ({"CPU implementer": "0x41", "CPU part": "0xfff"}, "aarch64"),
    ],
)
def test_names_of_cores(about: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detection.platform, "processor", lambda: "")
    monkeypatch.setattr(detection.platform, "machine", lambda: "aarch64")
    assert detection._cpu_name(about) == name


def test_without_a_gpu_auto_is_the_cpu_and_cuda_is_one_line() -> None:
    assert detect().device == "cpu"
    with pytest.raises(HardwareError, match="finds no GPU") as caught:
        detect("cuda")
    assert "\n" not in str(caught.value)


def test_a_misspelled_device_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="did you mean 'cuda'"):
        detect("cud")


class FakeProperties:
    name = "AMD Instinct MI300X"
    total_memory = 206 << 30
    multi_processor_count = 304
    L2_cache_size = 4 << 20
    major, minor = 9, 4
    gcnArchName = "gfx942:sramecc+:xnack-"


def test_detects_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: FakeProperties)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    hardware = detect("cuda:1")
    assert (hardware.vendor, hardware.device_type, hardware.device) == ("amd", "rocm", "cuda:1")
    assert hardware.architecture == "gfx942"
    assert hardware.versions["hip"] == "7.0"
    assert hardware.datasheet["matrix_fp8"].value == 2614.9e12
    with pytest.raises(HardwareError, match="cuda:5 does not exist; this machine has 2"):
        detect("cuda:5")


@pytest.mark.parametrize(
    ("file", "tool", "driver"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue", None, "535.54.03"),
        ("NVRM version: Open Kernel Module for x86_64  580.159.04  Release", None, "580.159.04"),
        ("", "550.90\n550.90\n", "550.90"),
        ("", None, "unknown"),
    ],
)
def test_nvidia_driver(
    monkeypatch: pytest.MonkeyPatch, file: str, tool: str | None, driver: str
) -> None:
    monkeypatch.setattr(detection, "_read", lambda path: file)
    monkeypatch.setattr(detection, "query", lambda command: tool)
    assert detection._nvidia_driver() == driver


@pytest.mark.parametrize(
    ("device_type", "architecture", "dtype"),
    [
        ("cuda", "sm_80", None),
        ("cuda", "sm_89", torch.float8_e4m3fn),
        ("cuda", "sm_100", torch.float8_e4m3fn),
        ("rocm", "gfx90a", None),
        ("rocm", "gfx942", torch.float8_e4m3fnuz),
        ("rocm", "gfx950", torch.float8_e4m3fn),
        ("cpu", "x86_64 avx512", None),
    ],
)
def test_fp8_flavour(device_type: str, architecture: str, dtype: torch.dtype | None) -> None:
    hardware = replace(FACTS, device_type=device_type, architecture=architecture)  # type: ignore[arg-type]
    assert fp8_dtype(hardware) == dtype


# Measuring and the cache


def test_every_key_has_a_probe() -> None:
    assert list(PROBES) == list(MEASURED)


def test_a_cache_hit_measures_nothing(calls: list[str]) -> None:
    first = measure(detect("cpu"))
    assert calls == list(MEASURED)
    assert set(first.ceilings) | set(first.absent) == set(MEASURED)
    assert first.absent["matrix_tf32"] == "not supported"
    assert first.absent["h2d_pinned"] == "out of memory"
    calls.clear()
    second = measure(detect("cpu"))
    assert calls == [
        "h2d_pinned"
    ]  # a failure may pass, so it is tried again; a refusal is remembered
    assert second == first
    assert load_cached(detect("cpu")).ceilings == first.ceilings


def test_only_measures_what_is_asked_and_merges(calls: list[str]) -> None:
    first = measure(detect("cpu"), only={"matrix_fp32", "read_bandwidth"})
    assert calls == ["read_bandwidth", "matrix_fp32"]
    assert set(first.ceilings) == {"read_bandwidth", "matrix_fp32"}
    second = measure(detect("cpu"), only={"copy_bandwidth"})
    assert calls == ["read_bandwidth", "matrix_fp32", "copy_bandwidth"]
    assert second.ceilings["matrix_fp32"] == first.ceilings["matrix_fp32"]
    with pytest.raises(UsageError, match="did you mean 'matrix_fp32'"):
        measure(detect("cpu"), only={"matrix_fp33"})


def test_refresh_measures_again_and_keeps_the_rest(calls: list[str]) -> None:
    measure(detect("cpu"), only={"read_bandwidth", "copy_bandwidth"})
    again = measure(detect("cpu"), only={"read_bandwidth"}, refresh=True)
    assert calls[-1] == "read_bandwidth"
    assert again.ceilings["read_bandwidth"].value == 103.0
    assert load_cached(detect("cpu")).ceilings["copy_bandwidth"].value == 101.0


@pytest.mark.parametrize(
    "change",
    [
        {"versions": {"torch": "9.9", "triton": "3.9.0"}},
        {"versions": {"torch": "2.13", "triton": "9.9"}},
        {"driver": "999.1"},
        {"name": "Foo 9001"},
        {"num_threads": 64},
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_key_changes_with(change: dict[str, object]) -> None:
    base = replace(FACTS, versions={"torch": "2.13", "triton": "3.9.0"})
    assert ceilings.cache_path(base) != ceilings.cache_path(replace(base, **change))  # type: ignore[arg-type]
    assert ceilings.cache_path(base) == ceilings.cache_path(replace(base, device="cuda:1"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"key": {}}',
        '{"key": "KEY", "ceilings": {"matrix_fp32": {"value": 1}}, "absent": {}}',
        '{"key": "KEY", "ceilings": [], "absent": {}}',
    ],
)
def test_a_corrupt_cache_is_measured_anew(
    calls: list[str], caplog: pytest.LogCaptureFixture, text: str
) -> None:
    hardware = detect("cpu")
    path = ceilings.cache_path(hardware)
    path.parent.mkdir(parents=True)
    path.write_text(text.replace('"KEY"', json.dumps(ceilings._key(hardware))))
    found = measure(hardware, only={"matrix_fp32"})
    assert calls == ["matrix_fp32"]
    assert found.ceilings["matrix_fp32"].value == 101.0
    assert "measuring again" in caplog.text
    assert load_cached(hardware).ceilings == found.ceilings


def test_an_unwritable_cache_is_a_warning(
    calls: list[str], cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.mkdir()
    (cache / "hardware").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        found = measure(detect("cpu"), only={"matrix_fp32"})
    assert found.ceilings["matrix_fp32"].value == 101.0
    assert "measured again next time" in caplog.text
    assert calls == ["matrix_fp32"]


def test_progress_reaches_the_end(calls: list[str]) -> None:
    steps: list[tuple[int, int]] = []
    measure(detect("cpu"), progress=lambda label, done, total: steps.append((done, total)))
    assert steps == [(done, len(MEASURED)) for done in range(len(MEASURED) + 1)]


def test_cache_folder_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"
    monkeypatch.delenv("RIDGELINE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "ridgeline"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "ridgeline"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "file"))
    with pytest.raises(UsageError, match="is a file"):
        cache_dir()


def test_real_probes_on_this_cpu() -> None:
    """Wide physical bounds: a laptop to a large server, idle or busy."""
    found = measure(detect("cpu"), only={"matrix_fp32", "eager_launch", "matrix_tf32"})
    assert 1e8 < found.ceilings["matrix_fp32"].value < 1e14
    assert 1e-8 < found.ceilings["eager_launch"].value < 1e-3
    assert found.absent == {"matrix_tf32": "not supported"}
    assert found.ceilings["matrix_fp32"].source == "measured"


def test_precision_switch_is_put_back() -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    with pytest.raises(NotSupportedHere):
        matrix_tf32(detect("cpu"))
    PROBES["matrix_fp32"](detect("cpu"))
    assert torch.backends.cuda.matmul.fp32_precision == before


# Units and the verb


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (4.25e12, "B/s", "4.25 TB/s"),
        (55e9, "B/s", "55 GB/s"),
        (787.4e12, "FLOP/s", "787 TFLOP/s"),
        (1285e12, "FLOP/s", "1285 TFLOP/s"),
        (2.4e11, "OP/s", "240 GOP/s"),
        (1.24e-5, "s", "12.4 µs"),
        (8.9e-7, "s", "890 ns"),
        (0.0, "s", "0 ns"),
    ],
)
def test_figures_for_people(value: float, unit: str, text: str) -> None:
    assert human(value, unit) == text


def test_sizes_for_people() -> None:
    assert [human_bytes(n) for n in (512, 2 << 20, 141 << 30)] == ["512 B", "2 MiB", "141 GiB"]


def test_verb_prints_one_json_document(
    calls: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["hardware", "--device", "cpu", "--json", "--save", str(tmp_path / "out")]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert err == ""
    hardware = Hardware.from_json(document["hardware"])
    assert hardware.ceilings["matrix_bf16"].unit == "FLOP/s"
    saved = json.loads(Path(document["record"]).read_text())
    assert saved["values"]["eager_launch"]["unit"] == "s"
    assert set(saved["hardware"]) <= {field.name for field in fields(Hardware)}


def test_verb_prints_a_table_of_80_columns(
    calls: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["hardware", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out
    for label, _ in MEASURED.values():
        assert label in out
    assert "not supported" in out
    assert "unknown" in out
    assert "inf" not in out


def test_verb_lists_the_datasheet(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["hardware", "--list"]) == 0
    out = capsys.readouterr().out
    for spec in SPECS:
        assert spec.name in out
        assert spec.source in out
    assert "…" not in out
    assert main(["hardware", "--list", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["datasheet"]) == len(SPECS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_verb_without_its_device_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hardware", "--device", "cuda"]) == HardwareError.exit_code
    err = capsys.readouterr().err
    assert err.startswith("ridgeline: error: torch ")
    assert "finds no GPU; use --device cpu" in err
    assert err.count("\n") == 1
