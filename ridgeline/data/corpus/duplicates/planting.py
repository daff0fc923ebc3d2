"""Recall, measured on the corpus itself: of a few documents of each unit a copy is made in which
words are changed until the similarity is just above the threshold; it counts as found if the two
share a band. The copies are thrown away.

    plant(table, bands, counts, options).counts()      # {"planted": 16, "planted_found": 16, …}
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ridgeline.data.corpus.duplicates.options import DuplicateOptions
from ridgeline.data.corpus.duplicates.tables import Numbers, packed_strings
from ridgeline.kernels.minhash import shared, shingle_sets, signatures

MOST_OF_A_BATCH = 16
LEAST_SHINGLES = 100  # of a document that is copied: one changed word must not change a tenth
MOST_CHARACTERS = 4000  # of it that are copied


@dataclass(frozen=True)
class Planted:
    num: int = 0
    num_found: int = 0
    similarity: float = 0.0  # summed up

    def plus(self, other: Planted) -> Planted:
        return Planted(
            self.num + other.num,
            self.num_found + other.num_found,
            self.similarity + other.similarity,
        )

    def counts(self) -> dict[str, Any]:
        return {
            "planted": self.num,
            "planted_found": self.num_found,
            "planted_similarity": round(self.similarity, 6),
        }


def plant(table: Any, bands_DB: Tensor, counts_D: Tensor, options: DuplicateOptions) -> Planted:
    """Of documents that are chosen by the hash of their text."""
    hashes = table["text_hash"].to_pylist()
    is_long = (counts_D >= LEAST_SHINGLES).tolist()
    chosen = sorted((text_hash, row) for row, text_hash in enumerate(hashes) if is_long[row])[
        :MOST_OF_A_BATCH
    ]
    planted = Planted()
    for text_hash, row in chosen:
        text = table["text"][row].as_py()[:MOST_CHARACTERS]
        copy, similarity = changed(text, int.from_bytes(text_hash[:8], "big"), options)
        if similarity < options.threshold:
            continue  # few and long words: none could be changed
        both = signatures(
            *packed_strings([text, copy]),
            bands=options.bands,
            rows=options.rows,
            ngram=options.ngram,
        ).bands
        is_found = bool((both[0] == both[1]).any())
        planted = planted.plus(Planted(1, int(is_found), similarity))
    return planted


def changed(text: str, seed: int, options: DuplicateOptions) -> tuple[str, float]:
    """As many words replaced as leave it at the threshold or above, and how similar it then is."""
    words = text.split()
    generator = np.random.default_rng(seed)
    places = generator.permutation(len(words))
    least, most = 1, len(words)
    copy, similarity = text, 0.0
    while least <= most:
        num = (least + most) // 2
        other = list(words)
        for number, place in enumerate(places[:num].tolist()):
            other[place] = "x" + hashlib.blake2b(b"%d %d" % (seed, number)).hexdigest()[:8]
        candidate = " ".join(other)
        own = similarity_of(text, candidate, options.ngram)
        if own >= options.threshold:
            copy, similarity, least = candidate, own, num + 1
        else:
            most = num - 1
    return copy, similarity


def similarity_of(one: str, other: str, ngram: int) -> float:
    hashes_S, starts = shingle_sets(*packed_strings([one, other]), ngram=ngram)
    return float(similarities(hashes_S, starts, torch.tensor([[0, 1]]))[0])


def similarities(hashes_S: Tensor, starts: Tensor, pairs_M2: Tensor) -> Numbers:
    """Jaccard's, of pairs of sets; two empty ones have nothing in common."""
    both = shared(hashes_S, starts, pairs_M2).numpy()
    sizes = starts.diff()[pairs_M2].sum(1).numpy()
    return np.asarray(both / np.maximum(sizes - both, 1))
