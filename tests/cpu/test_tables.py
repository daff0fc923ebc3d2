"""Every table that the command line prints, on a terminal of 80 columns: no line is longer, and no
number is cut.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import sample_tables as samples
from rich.console import Console
from sample_climbs import h200

from ridgeline.cli import bench, hardware, kernels, report
from ridgeline.cli.generate import summary_lines
from ridgeline.cli.tables import eval as eval_table
from ridgeline.cli.tables import profile as profile_table
from ridgeline.cli.tables import quantize as quantize_table
from ridgeline.cli.tables.optimize import climb_table
from ridgeline.hardware import Hardware, detect
from ridgeline.hardware.facts import DATASHEET_ONLY, MEASURED, Ceiling
from ridgeline.hardware.specs import SPECS
from ridgeline.ladder.reporting.comparing import NamedClimb, compare

WIDTH = 80
Draw = Callable[[Console], None]


def drawn(draw: Draw) -> str:
    console = Console(width=WIDTH, file=io.StringIO(), force_terminal=False, highlight=False)
    draw(console)
    written = console.file
    assert isinstance(written, io.StringIO)
    return written.getvalue()


def measured_machine() -> Hardware:
    values = {"s": 6.52e-6}
    ceilings = {
        key: Ceiling(values.get(unit, 1.234e14), unit, "measured", 0.12)
        for key, (_, unit) in MEASURED.items()
    }
    promised = {
        key: Ceiling(1.979e15, unit, "datasheet")
        for key, (_, unit) in (MEASURED | DATASHEET_ONLY).items()
        if unit != "s"
    }
    machine = replace(detect("cpu"), name=samples.DEVICE, ceilings=ceilings)
    return replace(machine, datasheet=promised, absent={})


def tables() -> dict[str, tuple[Draw, tuple[str, ...]]]:
    """How each is drawn, and what must stand in it whole."""

    def shows(render: Callable[[Any, Console], None], document: Any) -> Draw:
        return lambda console: render(document, console)

    machine = {"hardware": measured_machine().to_json()}
    spec = SPECS[0]
    return {
        "hardware": (shows(hardware.render, machine), ("12.0%", "datasheet")),
        "datasheets": (
            shows(hardware.render_list, [vars(spec)]), (spec.name, f"{spec.bandwidth_gb_s:.0f}"),
        ),
        "profile": (
            shows(profile_table.draw, samples.profile()),
            ("41.2%", "1.32 ms", "5.69 TB/s", "87%", "1.63x", "1.50–1.72x", "--scheme fp8",
             "mlp.gate_up + activation"),
        ),
        "optimize": (
            lambda console: console.print(climb_table(h200())), ("11.4×", "2.41× (2.38 to 2.44)"),
        ),
        "quantize": (
            shows(quantize_table.render, samples.quantize()),
            ("15 GiB", "8.123", "+0.42%", "0.00612", "0.0871", "3.12%", "-18.2", "mlp.gate_up",
             "4.34 GiB", "5.34 GiB", "+23%", "0.00569 to 0.00655"),
        ),
        "eval": (
            shows(eval_table.render, samples.evaluation()),
            ("8.123", "7.554 to 8.692", "+0.420%", "0.00612", "3.12%", "79.1%", "21.3 dB"),
        ),
        "bench engine": (
            shows(bench.render, samples.bench_engine() | {"what": "engine"}),
            ("18700.9", "71.3%", "1048576 tokens in", "8.89x", "21.30", "106.50"),
        ),
        "bench engine --compare": (
            shows(bench.render, samples.compared()), ("118342.1", "1.92x", "8123.4", "71%"),
        ),
        "bench kernels": (
            shows(bench.render, samples.bench_kernels()),
            ("123.4", "4.12 TB/s", "87.1%", "160.2", "1.30x", "torch.compile"),
        ),
        "bench serve": (
            shows(bench.render, samples.bench_serve(1)),
            ("212.3 / 424.6 / 1062", "91.2%", "2150.4", "16.3/s"),
        ),
        "bench serve, two endpoints": (
            shows(bench.render, samples.bench_serve(2)), ("212.3", "1062", "2150.4", "91.2%"),
        ),
        "report compare": (
            shows(report.render, {"what": "compare", **both()}),
            ("1.00× the speed", "kept, 1.63×", "mean KL 0.0061 nats"),
        ),
        "report accuracy": (
            shows(report.render, samples.accuracy()), ("8.1%", "-2.1%", "1.50", "1.31"),
        ),
        **{
            f"kernels {action}": (shows(kernels.render, samples.kernels(action)), words)
            for action, words in (
                ("list", ("deterministic_attention", "115")),
                ("check", ("paged_attention", "0.031")),
                ("build", ("quantized_linear", "31.2 s")),
                ("tune", ("skinny_linear", "91.3%", "BLOCK_N=16", "num_stages=3")),
                ("compile", ("deterministic_attention", "gfx942", "168", "65536", "LLVM ERROR")),
            )
        },
    }  # fmt: skip


def both() -> dict[str, Any]:
    return compare(NamedClimb("llama-fast", h200()), NamedClimb("faster", h200())).to_json()


@pytest.mark.parametrize("name", tables())
def test_tables_fit_80_columns(name: str) -> None:
    draw, words = tables()[name]
    shown = drawn(draw)
    long = [line for line in shown.splitlines() if len(line) > WIDTH]
    assert [line for line in long if "https://" not in line] == []  # addresses are not wrapped
    assert "…" not in shown.replace("… not reached", "")
    for word in words:
        assert word in shown


def test_the_lines_below_a_generated_text_fit_80_columns() -> None:
    limit = {"seconds": 0.186, "share": 0.17, "bound": "compute", "ceiling": {"source": "measured"}}
    result: dict[str, Any] = {
        "num_prompt_tokens": 1031,
        "prefill_s": 1.074,
        "prefill_limit": limit,
        "tokens": [1] * 256,
        "decode_tokens_per_s": 1310.6,
        "decode_limit": limit | {"bound": "memory"},
        "finish_reason": "length",
        "scheme": "int4-g128",
        "head": "int8",
        "dtype": "bf16",
        "device": samples.DEVICE,
        "seed": 3524660587,
        "plain_expert_bytes": 0,
        "plain_for_speed": None,
        "sampling": {"temperature": 0.65, "top_p": 0.95, "top_k": 20, "min_p": 0.05}
        | {"repetition_penalty": 1.05},
    }
    lines = summary_lines(result)
    assert max(map(len, lines)) <= WIDTH
    assert "1310.6 tok/s" in lines[1]
