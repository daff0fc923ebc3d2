"""fastText's classifier in C++ (cpu.cpp): the likeliest label of texts in one buffer, on one core.

The package `fasttext` defines what is right; the tests compare label by label and score by score.
data/corpus/stages/language_model.py reads the model's file.

    if host_library.load("fasttext"):
        labels, scores = Classifier(weights).predict(data, offsets, most_chars=1000)
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.kernels.byte_pairs import Bytes, Offsets, joined
from ridgeline.kernels.host_library import function

OP = "fasttext"
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class ClassifierWeights:
    """A model with subwords and hierarchical softmax, its rows as numbers."""

    rows: Floats  # [words and kept buckets, dim]
    outputs: Floats  # [labels, dim]: of the inner nodes of the labels' tree, one is spare
    words: Sequence[bytes]  # the first rows' own
    label_counts: NDArray[np.int64]  # falling: the tree is made of them
    kept: NDArray[np.int32]  # [K, 2]: buckets of subwords and their rows, behind the words'
    buckets: int
    min_chars: int  # of a subword
    max_chars: int


class Classifier:
    def __init__(self, weights: ClassifierWeights) -> None:
        self._kept = (np.ascontiguousarray(weights.rows), np.ascontiguousarray(weights.outputs))
        data, offsets = joined(weights.words)
        counts = np.ascontiguousarray(weights.label_counts, dtype=np.int64)
        kept = np.ascontiguousarray(weights.kept, dtype=np.int32)
        sizes = np.array(
            [
                weights.rows.shape[1],
                weights.min_chars,
                weights.max_chars,
                weights.buckets,
                len(weights.words),
                len(counts),
                len(kept),
            ],
            dtype=np.int64,
        )
        handle = ctypes.c_void_p()
        function(OP, "create", "pppppppp")(
            ctypes.addressof(handle),
            sizes.ctypes.data,
            *(each.ctypes.data for each in self._kept),
            counts.ctypes.data,
            data.ctypes.data,
            offsets.ctypes.data,
            kept.ctypes.data,
        )
        self._handle = handle

    def __del__(self) -> None:
        if handle := getattr(self, "_handle", None):
            function(OP, "free", "p")(handle)

    def predict(
        self, data: Bytes, offsets: Offsets, *, most_chars: int
    ) -> tuple[NDArray[np.int32], NDArray[Any]]:
        """The number of each text's label, -1 where there is nothing to go by, and its score."""
        count = len(offsets) - 1
        labels, scores = np.empty(count, np.int32), np.empty(count, np.float32)
        function(OP, "predict", "pppllpp")(
            self._handle,
            data.ctypes.data,
            offsets.ctypes.data,
            count,
            most_chars,
            labels.ctypes.data,
            scores.ctypes.data,
        )
        return labels, scores
