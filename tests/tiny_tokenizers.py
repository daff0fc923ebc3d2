"""Small vocabularies trained on the tests' own text (written_text.py), also as GGUF metadata."""

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from written_text import TEXT

from ridgeline.data import Tokenizer
from ridgeline.data.vocabulary import Vocabulary
from ridgeline.errors import OfflineError
from ridgeline.models.checkpoint import resolve_model

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

# Each of these has caught some tokenizer somewhere.
TRAPS = [
    "",
    "a  1",
    "\n\n12",
    "12345 1234.5",
    " leading",
    "trailing ",
    "   \n  \t x",
    " " * 300 + "x",
    "don't DON'T we'Ve it's",
    "HelloWorld helloWORLD",
    "日本語とEnglish混ぜる",
    "naïve e\u0301 Zu\u0308rich",
    "👩‍👩‍👧 🇫🇷 😀",
    "नमस्ते สวัสดี",
    "\x00\x01 null",
    "½ ² Ⅷ ١٢٣",
    "tabs\t\tand\r\nlines\r\r",
    "\u00a0nbsp\u3000wide\u2028line",
    "a/b//c\n/ x=1;\n\n\n}",
    "word▁with▁blocks",
]


@cache
def demo() -> Tokenizer:
    """The demo model's tokenizer; the test is skipped where the model cannot be fetched."""
    try:
        return Tokenizer.load(resolve_model("demo"))
    except OfflineError as error:
        pytest.skip(str(error))


@cache
def byte_level_tokens() -> tuple[dict[str, int], list[str]]:
    """1,500 byte-level tokens by text, and their merges as lines."""
    source = tokenizers.Tokenizer(models.BPE())
    source.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    source.train_from_iterator([TEXT[:200_000]], trainer)
    model = json.loads(source.to_str())["model"]
    return model["vocab"], [" ".join(pair) for pair in model["merges"]]


def no_blanks() -> dict[str, int]:
    """A logit bias against tokens of nothing but blanks, which a grammar for JSON lets random
    weights write for ever. It leaves room below itself: an end can still be less likely.
    """
    ids, _ = byte_level_tokens()
    return {str(ids[text]): -50 for text in ids if set(text) <= set("ĠĊĉč")}


def no_end() -> dict[str, int]:
    """A logit bias against each of the tokens that an output may end with."""
    return {str(number): -100 for number in range(len(SPECIALS))}


def byte_level_metadata(pre: str, **more: Any) -> dict[str, Any]:
    ids, merges = byte_level_tokens()
    tokens = sorted(ids, key=ids.__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": 0,
        **more,
    }


@cache
def sentencepiece_pieces() -> tuple[str, ...]:
    """1,000 pieces, best first: words begin with `▁`."""
    source = tokenizers.Tokenizer(models.BPE())
    source.normalizer = normalizers.Replace(" ", "▁")
    source.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=1000, show_progress=False)
    source.train_from_iterator(TEXT[:200_000].splitlines(), trainer)
    ids = source.get_vocab()
    return tuple(sorted(ids, key=ids.__getitem__))


def sentencepiece_metadata(**more: Any) -> dict[str, Any]:
    """As converters lay it out: special tokens, 256 byte tokens, pieces scored by their rank."""
    special = ["<unk>", "<s>", "</s>", "<table>", "<end_of_turn>"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = list(sentencepiece_pieces())
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": special + bytes_ + pieces,
        "tokenizer.ggml.token_type": [2, 3, 3, 4, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.scores": [0.0] * 261 + [-float(rank) for rank in range(len(pieces))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **more,
    }


def byte_level_json(
    *, bos: str | None = None, special: Sequence[str] = SPECIALS
) -> tokenizers.Tokenizer:
    """What a tokenizer.json holds: GPT-2's rule, optionally with a BOS put before each text."""
    ids, merges = byte_level_tokens()
    pairs = [tuple(line.split(" ")) for line in merges]
    backend = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    if bos is not None:
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, ids[bos])]
        )
    return backend


def tagged_tokenizer(
    tags: tuple[str, ...], *, special: bool = False, template: str | None = None
) -> Tokenizer:
    """The byte-level one, with these texts as tokens of their own."""
    backend = byte_level_json()
    (backend.add_special_tokens if special else backend.add_tokens)(list(tags))
    return Tokenizer(
        Vocabulary(
            backend,
            vocab_size=backend.get_vocab_size(),
            bos_id=None,
            eos_ids=(0,),
            prefix_ids=(),
            suffix_ids=(),
            special_texts={},
            chat_templates={} if template is None else {"default": template},
        )
    )
