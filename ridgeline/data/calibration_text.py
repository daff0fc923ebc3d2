"""Calibration text as token tensors: a file of the user's, or by default the text of Python's own
help, which every CPython includes (`pydoc_data.topics`, about 465 kB of English prose with some
code).

Quantization takes tensors and knows no tokenizer; this file connects the two.

    batches = calibration_batches(tokenizer, read_text(Path("my.txt")))     # text_files.py
    quantize_model(model, batches, scheme, Gptq())
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.data.tokenizer import Tokenizer
from ridgeline.errors import MissingPackageError, UsageError

NUM_SEQUENCES = 128
LENGTH = 512  # tokens of a sequence
SEQUENCES_A_BATCH = 8
MIN_TOKENS = 2048  # statistics of a matrix need a few thousand tokens


def default_text() -> str:
    """Python's help on its own language."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise MissingPackageError(
            "the default calibration text (pydoc_data.topics) is missing from this Python; "
            "give a text file"
        ) from error
    return "\n\n".join(topics[name] for name in sorted(topics))


def calibration_batches(
    tokenizer: Tokenizer,
    text: str | None = None,
    *,
    num_sequences: int = NUM_SEQUENCES,
    length: int = LENGTH,
    sequences_a_batch: int = SEQUENCES_A_BATCH,
) -> list[Tensor]:
    """Token ids [sequences, length], the sequences spread evenly over the text (default: the built-
    in one). A shorter text gives as many as it has; special tokens in it are treated as plain text.
    """
    if num_sequences < 1 or length < 1 or sequences_a_batch < 1:
        raise UsageError(
            f"{num_sequences} sequences of {length} tokens, {sequences_a_batch} at a time; "
            "each must be at least 1"
        )
    text = default_text() if text is None else text
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    needed = max(MIN_TOKENS, length)
    if len(ids) < needed:
        raise UsageError(
            f"the calibration text has {len(ids)} tokens; at least {needed} are needed: "
            "give a longer text, or none for the default one"
        )
    num_sequences = min(num_sequences, len(ids) // length)
    step = (len(ids) - length) // max(num_sequences - 1, 1)
    rows = [ids[start * step : start * step + length] for start in range(num_sequences)]
    return list(torch.tensor(rows).split(sequences_a_batch))
