"""Reads fastText's `.ftz`: a classifier whose rows are kept as codes (product quantization).

weights, names = read_model(path)          # for kernels/fasttext, and the labels' names
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.errors import UnsupportedError
from ridgeline.kernels.fasttext import ClassifierWeights, Floats

MAGIC, VERSION = 793712314, 12
TREE, CLASSIFIER = 1, 3  # of losses and of models
CENTROIDS = 256
LABEL = b"__label__"


class _ModelFile:
    """The bytes of a file, taken in their order."""

    def __init__(self, data: bytes) -> None:
        self._data, self._place = data, 0

    def numbers(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{layout}", self._data, self._place)
        self._place += struct.calcsize(f"<{layout}")
        return values

    def array(self, dtype: str, count: int) -> Any:
        values = np.frombuffer(self._data, dtype, count, self._place)
        self._place += values.nbytes
        return values

    def word(self) -> bytes:
        end = self._data.index(b"\0", self._place)
        word, self._place = self._data[self._place : end], end + 1
        return word


def read_model(path: Path) -> tuple[ClassifierWeights, list[str]]:
    """UnsupportedError for a model of another kind."""
    fields = _ModelFile(path.read_bytes())
    magic, version = fields.numbers("ii")
    options = dict(
        zip(
            ("dim", "window", "epochs", "least", "negative", "ngrams", "loss", "model", "buckets",
             "min_chars", "max_chars", "rate"),
            fields.numbers("12i"), strict=True,
        )
    )  # fmt: skip
    fields.numbers("d")
    is_known = (magic, version, options["loss"], options["model"], options["ngrams"]) == (
        MAGIC, VERSION, TREE, CLASSIFIER, 1,
    )  # fmt: skip
    size, num_words, num_labels, _, num_kept = fields.numbers("iiiqq")
    if not is_known or num_kept < 0:
        raise UnsupportedError(f"{path} is no classifier with hierarchical softmax, quantized")
    entries = [(fields.word(), fields.numbers("qb")[0]) for _ in range(size)]
    kept = fields.array("<i4", 2 * num_kept).reshape(-1, 2)
    if not fields.numbers("?")[0]:
        raise UnsupportedError(f"{path} is not quantized; give lid.176.ftz")
    rows = _quantized_rows(fields)
    if fields.numbers("?")[0]:
        raise UnsupportedError(f"{path} has quantized outputs; give lid.176.ftz")
    height, width = fields.numbers("qq")
    outputs = fields.array("<f4", height * width).reshape(height, width)
    assert height == num_labels, (height, num_labels)
    labels = entries[num_words:]
    weights = ClassifierWeights(
        rows=rows,
        outputs=outputs,
        words=[word for word, _ in entries[:num_words]],
        label_counts=np.array([count for _, count in labels], np.int64),
        kept=kept,
        buckets=options["buckets"],
        min_chars=options["min_chars"],
        max_chars=options["max_chars"],
    )
    return weights, [word.removeprefix(LABEL).decode() for word, _ in labels]


def _quantized_rows(fields: _ModelFile) -> Floats:
    """Each row's parts from a table of centroids, times its norm."""
    has_norms, num_rows, dim, num_codes = fields.numbers("?qqi")
    codes = fields.array("u1", num_codes).reshape(num_rows, -1)
    parts = _centroids(fields, codes)
    rows = np.concatenate(parts, axis=1)
    assert rows.shape == (num_rows, dim), rows.shape
    if has_norms:
        norms = fields.array("u1", num_rows).reshape(num_rows, 1)
        rows = rows * _centroids(fields, norms)[0]
    return np.ascontiguousarray(rows, dtype=np.float32)


def _centroids(fields: _ModelFile, codes: Any) -> list[Any]:
    """What the codes of each part stand for."""
    dim, num_parts, part_dim, last_dim = fields.numbers("4i")
    values = fields.array("<f4", dim * CENTROIDS)
    parts, place = [], 0
    for part in range(num_parts):
        width = last_dim if part == num_parts - 1 else part_dim
        table = values[place : place + CENTROIDS * width].reshape(CENTROIDS, width)
        parts.append(table[codes[:, part]])
        place += CENTROIDS * width
    return parts
