"""The native kernel for a tokenizer, where it has one that gives the same ids.

What it cannot do exactly it says (UnsupportedError): then the `tokenizers` library does the work.
Before it is used at all, it has to agree with the library on a text of many scripts and traps.

    native = native_encoder(tokenizer)
    ids, offsets = native.encode(data, text_offsets)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.data.corpus.tokens.character_classes import class_table, order_table
from ridgeline.data.corpus.tokens.word_rules import word_rule
from ridgeline.data.incremental import BYTE_OF
from ridgeline.data.tokenizer import Tokenizer
from ridgeline.errors import UnsupportedError
from ridgeline.kernels import host_library
from ridgeline.kernels.byte_pairs import NO_TOKEN, OP, BytePairs, CodeTable, Merges

# Texts on which pre-tokenizers are known to part ways.
TRAPS = (
    "don't DON'T we'Ve it's I'ſ x'LL 'tis '' 's",
    "a  1\n\n12 12345 1234.5 ½²Ⅷ١٢٣ \t\t and\r\nlines\r\r  \n  x \n",
    "HelloWorld helloWORLD HTTPServer ǅungla éÉ A\u0301b 日本語とEnglish混ぜる नमस्ते สวัสดี",
    "\u00a0nbsp\u3000wide\u2028line\u0085 \x1c\x1d👩‍👩‍👧 🇫🇷 a/b//c\n/ x=1;\n\n\n}   ",
    "word▁with▁blocks " + "x" * 300 + " " * 70 + "=" * 90 + "\n" * 9,
    "one space each, HelloWorld's 1234 words; don't (stop) here: é日本の",
)
SAMPLED = range(0x20, 0x30000, 7)  # characters, each between two letters


class NativeTokenizer:
    """One tokenizer's kernel."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        pipeline = json.loads(tokenizer.plain_backend.to_str())
        recognized = word_rule(pipeline)
        merges = _merges(pipeline["model"])
        if not host_library.load(OP):
            raise UnsupportedError("it needs a C++ compiler, and none works here")
        self.encoder = BytePairs(recognized.rule, class_table(recognized), merges)
        self.order: CodeTable | None = order_table() if recognized.composes else None
        self._check(tokenizer, recognized.composes)

    def _check(self, tokenizer: Tokenizer, composes: bool) -> None:
        characters = [chr(code) for code in SAMPLED if not 0xD800 <= code < 0xE000]
        texts = [*TRAPS, "".join(f"a{character}" for character in characters)]
        if composes:
            texts = [tokenizer.plain_backend.normalizer.normalize_str(text) for text in texts]
        added = tokenizer.plain_backend.get_added_tokens_decoder().values()
        others = [token.content for token in added if not token.special]  # not the kernel's
        texts = [text for text in texts if not any(other in text for other in others)]
        for text, expected in zip(texts, tokenizer.encode_many(texts), strict=True):
            if self.encode_text(text).tolist() != expected:
                raise UnsupportedError("its ids differ from the library's on a text of traps")

    def encode_text(self, text: str) -> NDArray[np.uint32]:
        data = np.frombuffer(text.encode() or b"\0", dtype=np.uint8)
        offsets = np.array([0, len(text.encode())], dtype=np.int64)
        return self.encoder.encode(data, offsets)[0]


def _merges(model: Mapping[str, Any]) -> Merges:
    if model["type"] != "BPE":
        raise UnsupportedError(f"its model is {model['type']}")
    if model.get("dropout"):
        raise UnsupportedError("it leaves out merges at random")
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise UnsupportedError("its tokens have marks inside or at the end of words")
    ids: dict[str, int] = model["vocab"]
    byte_ids = np.full(256, NO_TOKEN, dtype=np.uint32)
    for character, byte in BYTE_OF.items():
        if character in ids:
            byte_ids[byte] = ids[character]
    if (byte_ids == NO_TOKEN).any() and (model.get("unk_token") or model.get("byte_fallback")):
        raise UnsupportedError("it has another token for bytes without one")
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    triples = [(ids[left], ids[right], ids[left + right]) for left, right in pairs]
    whole = []
    if model.get("ignore_merges"):
        whole = [
            (bytes(BYTE_OF[character] for character in text), token_id)
            for text, token_id in ids.items()
            if all(character in BYTE_OF for character in text)
        ]
    return Merges(byte_ids, np.array(triples, dtype=np.uint32).reshape(-1, 3), whole)
