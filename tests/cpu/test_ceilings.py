"""Ceilings that hold: the best of torch's and our kernels' rates counts, and what still exceeds one
is told in words wherever a share is shown.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sample_tables
from command_line import generate, make_folder
from rich.console import Console

from ridgeline.cli import kernels, main
from ridgeline.cli.bench import kernels as bench_kernels
from ridgeline.hardware import Ceiling, Hardware, detect, load_cached
from ridgeline.hardware import ceilings as torch_ceilings
from ridgeline.hardware.facts import MEASURED
from ridgeline.hardware.units import over_words
from ridgeline.kernels import ceilings, host_library

Capture = pytest.CaptureFixture[str]
OVER = "above 100% of the limit"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Probes that answer at once, with this ARM CPU's rates; the list says which ran."""
    ran: list[str] = []
    reached = {"matrix_fp32": 36e9, "matrix_bf16": 35e9, "matrix_int8": 4.8e9, "eager_launch": 1e-6}

    def probe(key: str, rate: float, by: str | None = None) -> Callable[[Hardware], Ceiling]:
        def timed(hardware: Hardware) -> Ceiling:
            ran.append(by or key)
            return Ceiling(rate, MEASURED[key][1], "measured", 0.01, by)

        return timed

    usual = {key: probe(key, reached.get(key, 1e9)) for key in MEASURED}
    own = {"matrix_bf16": probe("matrix_bf16", 60e9, "own products")}
    own["read_bandwidth"] = probe("read_bandwidth", 0.5e9, "own reading")
    monkeypatch.setattr(torch_ceilings, "PROBES", usual)
    monkeypatch.setattr(ceilings, "OWN_PROBES", own)
    return ran


def test_the_best_of_both_counts(rates: list[str], capsys: Capture) -> None:
    """A CPU's int8 products may go through fp32, so they are not slower than those."""
    assert main(["hardware", "--device", "cpu", "--json"]) == 0
    known = Hardware.from_json(json.loads(capsys.readouterr().out)["hardware"]).ceilings
    assert (known["matrix_bf16"].value, known["matrix_bf16"].by) == (60e9, "own products")
    assert (known["matrix_int8"].value, known["matrix_int8"].unit) == (36e9, "OP/s")
    assert (known["read_bandwidth"].value, known["read_bandwidth"].by) == (1e9, None)
    assert known["eager_launch"].value == 1e-6
    assert main(["hardware", "--device", "cpu"]) == 0
    assert "matrix bf16: reached by own products" in capsys.readouterr().out
    assert load_cached(detect("cpu")).ceilings == known  # what servers and workers read


def test_what_torch_reached_alone_is_completed_later(rates: list[str]) -> None:
    alone = torch_ceilings.measure(detect("cpu"), {"matrix_bf16"})
    assert rates == ["matrix_fp32", "matrix_bf16"]
    assert alone.ceilings["matrix_bf16"].value == 36e9
    both = ceilings.measure(detect("cpu"), {"matrix_bf16"})
    assert rates[2:] == ["own products"]
    assert both.ceilings["matrix_bf16"].value == 60e9
    ceilings.measure(detect("cpu"), {"matrix_bf16"})
    assert len(rates) == 3  # all is cached


def test_a_gpu_converts_nothing(rates: list[str]) -> None:
    gpu = Hardware("nvidia", "cuda", "cuda:0", "Foo 9000", "sm_90", 80 << 30, 132, "580.1")
    known = torch_ceilings._with(gpu, torch_ceilings._Known({
        "matrix_fp32": Ceiling(50e12, "FLOP/s", "measured"),
        "matrix_int8": Ceiling(4e12, "OP/s", "measured"),
    }))  # fmt: skip
    assert known.ceilings["matrix_int8"].value == 4e12


@pytest.mark.skipif(host_library.find_compiler() is None, reason="no C++ compiler")
def test_int8_is_not_below_fp32_on_this_cpu() -> None:
    """With the real probes: torch's own int8 product is ten times slower than fp32 on ARM."""
    known = ceilings.measure(detect("cpu"), {"matrix_int8", "matrix_fp32"}).ceilings
    assert known["matrix_int8"].value >= known["matrix_fp32"].value > 1e8
    own = json.loads(torch_ceilings.cache_path(detect("cpu")).read_text())["ceilings"]
    assert own["own_matrix_int8"]["by"].startswith("quantized_linear")
    assert known["matrix_int8"].value >= own["own_matrix_int8"]["value"]


def test_words_name_what_exceeds() -> None:
    assert over_words({"decode": 1.0004, "prefill": None}) is None
    text = over_words({"decode": 1.248, "prefill": 0.4, "a": 1.1, "b": 1.2, "c": 1.01})
    assert text is not None
    assert text.startswith(f"{OVER}: decode 125%, b 120%, a 110% and 1 more; that limit was")
    assert "ridgeline hardware --refresh" in text


# Commands, on a machine whose limits are far too low.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def low(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(hardware: Hardware, *_: Any) -> Hardware:
        keys = ("read_bandwidth", "matrix_fp32", "matrix_bf16", "matrix_fp16")
        slow = {key: Ceiling(1e3, MEASURED[key][1], "measured") for key in keys}
        return replace(hardware, ceilings=slow)

    for name in ("profile", "generate", "bench.engine", "bench.compare"):
        monkeypatch.setattr(f"ridgeline.cli.{name}.measure", measure)


def flat(text: str) -> str:
    return " ".join(text.split())


def test_generate_tells_it(low: None, folder: Path, capsys: Capture) -> None:
    assert main(list(generate(folder))) == 0
    assert OVER in flat(capsys.readouterr().err)


def test_profile_tells_it_and_draws_no_dot_over_the_roof(
    low: None, folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    page = tmp_path / "page.html"
    command = ["profile", str(folder), "--device", "cpu", "--context", "40", "--steps", "2"]
    assert main([*command, "--html", str(page)]) == 0
    assert f"note: {OVER}" in flat(capsys.readouterr().out)
    text = page.read_text()
    assert OVER in text
    assert "above this roof, which was measured too low, and drawn on it" in text


def test_kernels_tell_it(capsys: Capture) -> None:
    tune, timed = sample_tables.kernels("tune"), sample_tables.bench_kernels()
    for document, render in ((tune, kernels.render), (timed, bench_kernels.render)):
        console = Console(width=80)
        render(document, console)
        assert OVER not in capsys.readouterr().out
        document["rows"][0]["share"] = 1.022
        render(document, console)
        assert OVER in flat(capsys.readouterr().out)


def test_bench_tells_it(low: None, folder: Path, tmp_path: Path, capsys: Capture) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hello"}\n')
    command = ["bench", "engine", str(folder), "--workload", str(prompts), "--output-tokens", "2"]
    command += ["--device", "cpu", "--rounds", "1", "--max-context", "64"]
    assert main(command) == 0
    shown = flat(capsys.readouterr().out)
    assert f"{OVER}: these steps" in shown
    assert "not the fastest these steps can run here" in shown
    assert main([*command, "--compare", "fp32,bf16"]) == 0
    assert OVER in flat(capsys.readouterr().out)
