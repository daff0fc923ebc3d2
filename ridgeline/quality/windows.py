"""Text to measure on, cut into windows of tokens.

Windows do not overlap, nothing is put before them (no BOS), and the last short one is kept. A
window's first token has nothing to be predicted from and is not scored.

    text = read_text(Path("wikitext2_test.txt.gz"), max_bytes=100_000)
    windows = cut(text, tokenizer, 2048, str(path))
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ridgeline.data import Tokenizer
from ridgeline.engine import Engine
from ridgeline.errors import ContextLengthError, UsageError

MIN_TOKENS = 2  # one to predict, and one to predict it from


@dataclass(frozen=True)
class Windows:
    tokens: tuple[tuple[int, ...], ...]
    num_bytes: tuple[int, ...]  # of the text of each window's scored tokens

    @property
    def num_scored(self) -> list[int]:
        return [len(window) - 1 for window in self.tokens]


def read_text(path: Path, max_bytes: int | None = None) -> str:
    """A UTF-8 file, plain or gzip, or its first bytes (a character that they cut is left out)."""
    data = read_bytes(path, max_bytes)
    if not data.strip():
        raise UsageError(f"{path} is empty; give a file with some text")
    try:
        text = data.decode("utf-8", errors="strict")
    except UnicodeDecodeError as error:
        was_cut = max_bytes is not None and error.start > len(data) - 4 and len(data) == max_bytes
        if not was_cut:
            raise UsageError(f"{path} is not UTF-8 text: {error.reason} at {error.start}") from None
        text = data[: error.start].decode("utf-8")
    if "\0" in text:
        raise UsageError(f"{path} is not text: it holds zero bytes; give a UTF-8 text file")
    return text


def read_bytes(path: Path, max_bytes: int | None = None) -> bytes:
    """Of a file as it is, or of what is in a gzip file."""
    try:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rb") if packed else path.open("rb") as source:
            return bytes(source.read(-1 if max_bytes is None else max_bytes))
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UsageError(f"{path} is a broken gzip file: {error}") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read {str(path)!r}: {reason}; give a text file") from error


def cut(text: str, tokenizer: Tokenizer, window: int, origin: str = "the text") -> Windows:
    if window < MIN_TOKENS:
        raise UsageError(f"window is {window}; give at least {MIN_TOKENS} tokens")
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) < MIN_TOKENS:
        raise UsageError(f"{origin} has {len(ids)} token; at least {MIN_TOKENS} are needed")
    parts = [tuple(ids[start : start + window]) for start in range(0, len(ids), window)]
    parts = [part for part in parts if len(part) >= MIN_TOKENS]
    sizes = [sum(len(tokenizer.token_bytes(token)) for token in part[1:]) for part in parts]
    return Windows(tuple(parts), tuple(sizes))


def check_window(engine: Engine, window: int) -> None:
    if window > engine.max_context:
        raise ContextLengthError(
            f"window is {window} tokens; the model's context here is {engine.max_context}; "
            f"give a window of at most {engine.max_context}"
        )


def check_vocabulary(windows: Sequence[Sequence[int]], engine: Engine, name: str) -> None:
    """An error for windows that were made by the tokenizer of another kind of model."""
    largest = max(max(window) for window in windows)
    if largest >= engine.config.vocab_size:
        raise UsageError(
            f"the text has token id {largest}, and {name} knows {engine.config.vocab_size} tokens; "
            "compare models with the same tokenizer"
        )
