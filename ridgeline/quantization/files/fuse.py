"""Matrices of a checkpoint as the model's own parameters have them: q, k and v in one, gate and up
in one, and rows in our order.

    for layer, matrix in fused_matrices(checkpoint, describe(checkpoint)): ...
"""

from __future__ import annotations

from collections.abc import Iterator

from ridgeline.models.checkpoint import Checkpoint
from ridgeline.models.families import Description, Part, parts
from ridgeline.models.weights import canonical_names
from ridgeline.progress import Progress
from ridgeline.quantization.files.matrix import Matrix, join
from ridgeline.quantization.files.read import open_quantized, read_quantized
from ridgeline.quantization.scheme import Codes, Grid


def fused_matrices(
    checkpoint: Checkpoint, description: Description, progress: Progress | None = None
) -> Iterator[tuple[str, Matrix]]:
    """The projections of the model's layers (`layers.0.attn.qkv`) whose codes can be kept whole:
    each piece is a matrix, and all are of one scheme. The rest, experts too, loads through
    `decoded`.
    """
    wanted: dict[str, list[Part]] = {}
    for part in parts(description.config, description.names):
        if part.parameter.startswith("layers.") and part.parameter.endswith(".weight"):
            wanted.setdefault(part.parameter, []).append(part)
    wanted = {name: pieces for name, pieces in wanted.items() if _are_rows(pieces)}
    quantized = open_quantized(checkpoint)
    names = checkpoint.tensors if quantized is None else quantized.names
    stored = canonical_names(names, description)
    part_of = {
        stored[part.name]: part
        for pieces in wanted.values()
        for part in pieces
        if part.name in stored
    }
    have: dict[str, dict[str, Matrix]] = {}
    for name, found in read_quantized(checkpoint, part_of.keys(), progress):
        part = part_of[name]
        if not isinstance(found, Matrix):
            continue
        pieces = have.setdefault(part.parameter, {})
        pieces[part.name] = _changed(found, part)
        if len(pieces) == len(wanted[part.parameter]):
            whole = join([pieces[one.name] for one in wanted[part.parameter]])
            del have[part.parameter]
            if whole is not None:
                yield part.parameter.removesuffix(".weight"), whole


def _are_rows(pieces: list[Part]) -> bool:
    return all(piece.index == () or isinstance(piece.index[0], slice) for piece in pieces)


def _changed(matrix: Matrix, part: Part) -> Matrix:
    """With the order of rows that ours have (GGUF stores q and k in another)."""
    if part.change is None:
        return matrix
    (values, grid), scheme = matrix
    zero = None if grid.zero is None else part.change(grid.zero)
    return Matrix(Codes(part.change(values), Grid(part.change(grid.scale), zero)), scheme)
