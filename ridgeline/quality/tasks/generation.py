"""Greedy completions of many prompts through the engine, in its batches."""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.data import Tokenizer
from ridgeline.engine import Engine, Sampling
from ridgeline.progress import Progress
from ridgeline.quality.tasks.score import tokenizer_for

PROMPTS_AT_ONCE = 256  # between two looks at the progress


def completions(
    engine: Engine, prompts: Sequence[str], sampling: Sampling, progress: Progress | None = None
) -> list[str]:
    tokenizer = tokenizer_for(engine)
    tokens = [tokenizer.encode(prompt) for prompt in prompts]
    texts: list[str] = []
    for start in range(0, len(tokens), PROMPTS_AT_ONCE):
        for output in engine.generate(tokens[start : start + PROMPTS_AT_ONCE], sampling):
            output.raise_unless_finished()
            texts.append(continued(tokenizer, output.tokens, sampling.stop))
        if progress is not None:
            progress("questions", len(texts), len(tokens))
    return texts


def continued(tokenizer: Tokenizer, tokens: Sequence[int], stop: Sequence[str]) -> str:
    """The text of tokens after a prompt, up to the first stop string. Leading space is kept: in a
    program it is indentation.
    """
    decoder = tokenizer.decoder(continuation=True)
    text = "".join(map(decoder.push, tokens)) + decoder.finish()
    return text[: min((start for start in map(text.find, stop) if start >= 0), default=None)]
