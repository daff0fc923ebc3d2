"""Vocabulary: what a tokenizer file says, whichever kind of file it was.

`folder_vocabulary.py` reads Hugging Face folders into it, `gguf_vocabulary.py` GGUF metadata;
`tokenizer.py` is the only one that uses it. This file also owns the list of token texts that are
known to end a turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tokenizers

# Texts of tokens that end a turn or a text. A model whose metadata names only one of them stops at
# all of those that its vocabulary marks as control tokens: llama.cpp's rule (src/llama-vocab.cpp),
# less its infill tokens.
END_TEXTS = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|return|>",
        "<|call|>",
        "<|calls|>",
        "<|flush|>",
        "<end_of_turn>",
        "<turn|>",
        "<|tool_response>",
        "<end_of_utterance>",
        "<eos>",
        "</s>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<｜end▁of▁sentence｜>",
        "[e~[",
    }
)

# Those that end a whole text in pre-training, not one turn of a chat.
TEXT_END_TEXTS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<｜end▁of▁sentence｜>",
    "<eos>",
    "</s>",
    "[EOS]",
)


@dataclass(frozen=True)
class Vocabulary:
    """A text splitter with its merges, and the ids and texts with a special meaning."""

    backend: tokenizers.Tokenizer  # adds no BOS or EOS itself: `prefix_ids` and `suffix_ids` do
    vocab_size: int  # ids run from 0 to vocab_size - 1
    bos_id: int | None  # begins a text, where the model has such a token
    eos_ids: tuple[
        int, ...
    ]  # generation ends at any of these; the first is the model's own end-of-text
    prefix_ids: tuple[int, ...]  # put before a text that is encoded with special tokens
    suffix_ids: tuple[int, ...]  # put after it
    special_texts: Mapping[
        str, str
    ]  # bos_token, eos_token and the like, as chat templates name them
    chat_templates: Mapping[str, str]  # by name; "default" is the one used


def end_ids(named: Iterable[int], controls: Mapping[str, int]) -> tuple[int, ...]:
    """The ids that end generation: those the model names, then well-known control tokens."""
    known = {text: token_id for text, token_id in controls.items() if text in END_TEXTS}
    # In these formats `<|end|>` closes one message of several, and `</s>` is ordinary text
    # (llama.cpp does the same).
    if ("<|call|>" in known and "<|return|>" in known) or (
        "<|calls|>" in known and "<|flush|>" in known
    ):
        known.pop("<|end|>", None)
    if "<|tool_response>" in known:
        known.pop("</s>", None)
    return tuple(dict.fromkeys([*named, *sorted(known.values())]))


def text_end_id(eos_ids: Sequence[int], specials: Mapping[str, int]) -> int | None:
    """The token that ends a document of plain text: the model's own end where that ends texts. A
    model tuned for chat names the end of a turn; the text's is then among the other ends, or is a
    special token of the vocabulary that pre-training has left.
    """
    ends = {specials[text]: None for text in TEXT_END_TEXTS if text in specials}
    named = [token_id for token_id in eos_ids if token_id in ends]
    return next(iter([*named, *ends, *eos_ids]), None)


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.uint32]:
    """What ids are kept in: two bytes where they are enough."""
    return np.uint16 if vocab_size <= 2**16 else np.uint32
