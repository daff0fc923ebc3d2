"""The text that quantized models are judged on unless the user gives one: stories, letters, news,
science, recipes, chats, sums, a little code, German and Spanish. It was written for this purpose,
so that no model has learned it by heart, it is the same on every machine, and nothing in it
resembles the default calibration text (Python's help): a model that was fitted to its calibration
text shows it here.

    windows = cut(judged_text(), tokenizer, JUDGED_WINDOW)
"""

from __future__ import annotations

from pathlib import Path

from ridgeline.data.text_files import read_text

FILE = Path(__file__).with_name("judged_text.txt")
JUDGED_WINDOW = 512  # tokens: some 14 windows, which intervals need


def judged_text(max_bytes: int | None = None) -> str:
    """All of it, or its first bytes."""
    return read_text(FILE, max_bytes)
