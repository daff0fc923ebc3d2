"""The text that calibration reads: the default one, a user's, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_tokenizers import sentencepiece_metadata

from ridgeline.data import Tokenizer
from ridgeline.data.calibration_text import calibration_batches, default_text
from ridgeline.data.text_files import read_text
from ridgeline.errors import UsageError


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_gguf(sentencepiece_metadata())


def test_the_default_text_is_python_s_help() -> None:
    text = default_text()
    assert len(text) > 200_000
    assert "assignment" in text
    assert text == default_text()


def test_sequences_are_spread_over_the_text(tokenizer: Tokenizer) -> None:
    text = "".join(f"word {number} and then some. " for number in range(3000))
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    batches = calibration_batches(
        tokenizer, text, num_sequences=10, length=128, sequences_a_batch=4
    )
    assert [tuple(batch.shape) for batch in batches] == [(4, 128), (4, 128), (2, 128)]
    rows = torch.cat(batches)
    assert rows[0].tolist() == ids[:128]
    step = (len(ids) - 128) // 9
    assert rows[9].tolist() == ids[9 * step : 9 * step + 128]
    assert rows.dtype == torch.int64


def test_a_short_text_gives_all_it_has(tokenizer: Tokenizer) -> None:
    text = "some words of a text that is not long. " * 200
    count = len(tokenizer.encode(text, add_special_tokens=False))
    batches = calibration_batches(tokenizer, text, length=512)
    assert sum(len(batch) for batch in batches) == count // 512
    with pytest.raises(UsageError, match=r"has \d+ tokens; at least 2048"):
        calibration_batches(tokenizer, "too short")
    with pytest.raises(UsageError, match="at least 1"):
        calibration_batches(tokenizer, text, length=0)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b" \n\t ", "is empty"),
        (b"text\x00more", "zero bytes"),
        (b"\x89PNG\r\n\x1a\n\xff\xfe", "not UTF-8"),
    ],
)
def test_files_that_are_no_text(content: bytes, said: str, tmp_path: Path) -> None:
    file = tmp_path / "given.txt"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=said) as caught:
        read_text(file)
    assert "\n" not in str(caught.value)
    assert "given.txt" in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        read_text(tmp_path / "none.txt")
    (tmp_path / "good.txt").write_text("Grüße\n", encoding="utf-8")
    assert read_text(tmp_path / "good.txt") == "Grüße\n"
