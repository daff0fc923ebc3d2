"""What the registry knows of MinHash signatures: their work, their shapes, their baseline."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels.cost import OpCost
from ridgeline.kernels.inputs import label
from ridgeline.kernels.minhash import reference
from ridgeline.kernels.op import Case, Op, OpInputs, case_lists, functions

# Letters of each length of UTF-8, capitals, digits, and marks of each length that separate.
ALPHABET = "abcdefgh AEIO  09 .,-\n äöß é§ 中文字。「」 ’“ 🙂 "
INT32_BYTES, INT64_BYTES = 4, 8


@dataclass(frozen=True)
class MinHashCase:
    """Documents of so many characters each."""

    lengths: tuple[int, ...]
    bands: int = 26
    rows: int = 8
    ngram: int = reference.NGRAM
    is_ascii: bool = False

    @property
    def label(self) -> str:
        return label(
            f"{len(self.lengths)} of {min(self.lengths)}-{max(self.lengths)}",
            f"{self.bands}x{self.rows}",
            self.ngram != reference.NGRAM and f"{self.ngram}-grams",
            self.is_ascii and "ascii",
        )


def make(setting: MinHashCase, device: torch.device, generator: torch.Generator) -> OpInputs:
    alphabet = [c for c in ALPHABET if c.isascii()] if setting.is_ascii else list(ALPHABET)
    total = sum(setting.lengths)
    drawn = torch.randint(0, len(alphabet), (total,), device=device, generator=generator)
    codes = [character.encode() for character in alphabet]
    if setting.is_ascii:  # by tensors: there may be gigabytes of it
        text = torch.tensor([code[0] for code in codes], dtype=torch.uint8, device=device)[drawn]
        sizes = torch.tensor(setting.lengths)
    else:
        letters = iter([codes[number] for number in drawn.tolist()])
        documents = [b"".join(next(letters) for _ in range(size)) for size in setting.lengths]
        text = torch.tensor(list(b"".join(documents)), dtype=torch.uint8, device=device)
        sizes = torch.tensor([len(document) for document in documents])
    return {
        "text_N": text,
        "offsets": torch.cat((torch.zeros(1, dtype=torch.int64), sizes.cumsum(0))).to(device),
        "bands": setting.bands,
        "rows": setting.rows,
        "ngram": setting.ngram,
    }


def case(*args: Any, **kwargs: Any) -> Case:
    setting = MinHashCase(*args, **kwargs)
    return Case(setting.label, partial(make, setting), torch.float32)


def launch(**inputs: Any) -> tuple[Tensor, ...]:
    from ridgeline.kernels.minhash import triton

    return triton.signatures(**inputs)


def defined(**inputs: Any) -> tuple[Tensor, ...]:
    """By the reference, which is for CPUs."""
    text, offsets = inputs.pop("text_N"), inputs.pop("offsets")
    results = reference.signatures(text.cpu(), offsets.cpu(), **inputs)
    return tuple(each.to(text.device) for each in results)


def cost(text_N: Tensor, offsets: Tensor, bands: int, rows: int, **_: Any) -> OpCost:
    """The text once, and what is known of each document."""
    a_document = bands * rows * INT32_BYTES + (bands + 1) * INT64_BYTES
    return OpCost(text_N.nbytes + offsets.nbytes, (len(offsets) - 1) * a_document)


SMALL = [
    case((0, 1, 2, 3, 9, 0, 40, 200), bands=3, rows=4),
    case((600, 511, 512, 513, 17), bands=26),
    case((1, 30, 90), bands=5, rows=3, ngram=1),
    case((80, 1200), bands=2, rows=1, ngram=13),
    case((64, 1000), bands=7, rows=5, is_ascii=True),
]
LARGE = [
    case(tuple(range(0, 20_000, 97))),
    case((5000,) * 4000, is_ascii=True),
    case((1_000_000, 10, 3_000_000), is_ascii=True),
]
BENCH = [case((size,) * (2**26 // size), is_ascii=True) for size in (1000, 5000, 50_000)]
COMPILE = [case((20, 30)), case((20, 30), bands=5, rows=13, ngram=8)]

OP = Op(
    name="minhash",
    summary="Which documents are near duplicates: least permuted hashes of runs of words",
    **functions(defined, launch, cost),
    **case_lists(SMALL, LARGE, BENCH, COMPILE),
)
