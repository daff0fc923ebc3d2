"""How a run is shown while it goes on: a table that fits its terminal, or lines."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from ridgeline.cli.tables import train as table

STEP: dict[str, Any] = {
    "step": 1234, "loss": 3.7887, "lr": 1.49e-5, "gradient_norm": 3.6, "lost_updates": 0.001,
    "tokens": 12_345_678, "tokens_per_s": 65_694.0, "mfu": 0.546, "mfu_measured": 0.777,
    "memory_bytes": 48.7 * 2**30, "seconds": 91.0, "done": 0.42,
}  # fmt: skip


def view() -> table.RunView:
    shown = table.RunView()
    shown.take({"step": 0, "held_out_loss": 3.7172, "done": 0.0})
    shown.take(STEP)
    shown.take({"step": 1200, "held_out_loss": 3.5606, "done": 0.4})
    shown.take(STEP)
    return shown


def drawn(width: int) -> str:
    file = io.StringIO()
    Console(file=file, width=width).print(view())
    return file.getvalue()


@pytest.mark.parametrize(("width", "most"), [(40, 13), (80, 5), (120, 4)])
def test_every_figure_is_whole_at_any_width(width: int, most: int) -> None:
    text = drawn(width)
    lines = [line for line in text.splitlines() if line.strip()]
    assert len(lines) <= most
    assert all(len(line.rstrip()) <= width for line in lines)
    assert "…" not in text
    for words in (
        "42%", "step 1,234", "loss", "3.7887", "3.5606", "3.7172", "1.49e-05", "gradient norm",
        "12,345,678", "65,694", "54.6%", "77.7%", "48.7 GiB",
    ):  # fmt: skip
        assert words in text, words


def test_lines_say_what_is_new(capsys: pytest.CaptureFixture[str]) -> None:
    write = table.lines(table.RunView())
    write({"step": 0, "held_out_loss": 3.7172, "done": 0.0})
    write(STEP)
    write(STEP | {"step": 1235})  # too soon after the last
    write({"step": 1236, "held_out_loss": 3.5606, "done": 1.0})
    first, step, last = capsys.readouterr().err.splitlines()
    assert first == "held-out loss 3.7172 before the first step"
    assert "42%  step 1,234" in step
    assert "loss 3.7887, lr 1.49e-05" in step
    assert "3.7172" not in step
    assert last == "held-out loss 3.5606 after step 1,236"
