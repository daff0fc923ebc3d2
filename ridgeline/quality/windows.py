"""Text to measure on, cut into windows of tokens.

Windows do not overlap, nothing is put before them (no BOS), and the last short one is kept. A
window's first token has nothing to be predicted from and is not scored.

    text = read_text(Path("wikitext2_test.txt.gz"), max_bytes=100_000)     # data/text_files.py
    windows = cut(text, tokenizer, 2048, str(path))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    """An error for windows made by the tokenizer of another kind of model."""
    largest = max(max(window) for window in windows)
    if largest >= engine.config.vocab_size:
        raise UsageError(
            f"the text has token id {largest}, and {name} knows {engine.config.vocab_size} tokens; "
            "compare models with the same tokenizer"
        )
