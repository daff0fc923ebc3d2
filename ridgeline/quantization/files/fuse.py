"""Turns a quantized checkpoint into the model's own parameters: q, k and v fused, gate and up
fused, and rows in our order. Codes that are to be kept stay codes, and those layers are never
expanded; the rest comes as plain tensors.

    kept = kept_schemes(checkpoint, description)
    for weights in model_weights(checkpoint, part_of, kept.keys()): ...   # a Whole or a WeightPiece
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

from ridgeline.models.checkpoint import Checkpoint
from ridgeline.models.families import Description, WeightPart, parts
from ridgeline.models.weights import canonical_names
from ridgeline.progress import Progress
from ridgeline.quantization.block_scheme import BlockScheme, block_scheme, can_stay
from ridgeline.quantization.files import gguf
from ridgeline.quantization.files.matrix import StoredMatrix, decoded_matrix, join, joined_scheme
from ridgeline.quantization.files.read import open_quantized, read_quantized
from ridgeline.quantization.scheme import Codes, Grid, Scheme, parse_scheme

WEIGHT = ".weight"
HEAD = "head"
PROJECTIONS = (".qkv.weight", ".out.weight", ".gate_up.weight", ".down.weight")


class Whole(NamedTuple):
    """A complete projection, as codes."""

    layer: str  # layers.0.attn.qkv
    matrix: StoredMatrix


class WeightPiece(NamedTuple):
    """A tensor to copy into a part of a parameter."""

    part: WeightPart
    tensor: Tensor


def kept_schemes(
    checkpoint: Checkpoint, description: Description, blocks: bool = False
) -> dict[str, Scheme]:
    """The projections (`layers.0.attn.qkv`) whose codes can be kept, by the headers alone: every
    piece is in one of our schemes, and all pieces in the same one. Experts, routers, embedding and
    head are not included. With `blocks`, matrices of a GGUF file in its own blocks, and its head.
    """
    schemes = _block_schemes(checkpoint) if blocks else _schemes_by_name(checkpoint)
    if not schemes:
        return {}
    stored = canonical_names(schemes, description)
    by_layer = {}
    for parameter, pieces in _projections(description).items():
        names = [stored.get(part.name) for part in pieces]
        known = [schemes[name] for name in names if name is not None]
        scheme = joined_scheme(known) if len(known) == len(pieces) else None
        if scheme is not None:
            by_layer[parameter.removesuffix(WEIGHT)] = scheme
    head = stored.get(head_name(description))
    if blocks and head is not None:
        by_layer[HEAD] = schemes[head]
    return by_layer


def head_name(description: Description) -> str:
    """The head's own name; a tied one has the embedding's."""
    wanted = "embed.weight" if description.config.tied_embeddings else HEAD + WEIGHT
    named = parts(description.config, description.names)
    return next(part.name for part in named if part.parameter == wanted)


def tied_head(checkpoint: Checkpoint, description: Description) -> StoredMatrix:
    """The blocks of an embedding that is the head as well."""
    stored = canonical_names(checkpoint.tensors, description)
    return gguf.read_blocks(checkpoint, stored[head_name(description)])


def _block_schemes(checkpoint: Checkpoint) -> dict[str, Scheme]:
    """By name, of the matrices that can stay in a GGUF file's blocks."""
    if checkpoint.format != "gguf":
        return {}
    by_name: dict[str, Scheme] = {}
    for name, info in checkpoint.tensors.items():
        if can_stay(info.dtype, info.shape):
            scheme = block_scheme([(info.dtype, info.shape[0])])
            assert scheme is not None, "one part fits"
            by_name[name] = scheme
    return by_name


def _schemes_by_name(checkpoint: Checkpoint) -> dict[str, Scheme]:
    """Of the matrices whose codes can be kept, by the weights' names."""
    if checkpoint.format == "gguf":
        scheme = parse_scheme(gguf.SCHEME)
        return {n: scheme for n, info in checkpoint.tensors.items() if gguf.keeps_codes(info)}
    quantized = open_quantized(checkpoint)
    layouts = {} if quantized is None else quantized.layouts
    return {name: parse_scheme(one.scheme) for name, one in layouts.items() if one.scheme}


def _projections(description: Description) -> dict[str, list[WeightPart]]:
    """The pieces of each layer's matrices; a piece is a range of rows."""
    by_parameter: dict[str, list[WeightPart]] = {}
    for part in parts(description.config, description.names):
        name = part.parameter
        if name.endswith(PROJECTIONS):
            by_parameter.setdefault(name, []).append(part)
    return by_parameter


def model_weights(
    checkpoint: Checkpoint,
    part_of: Mapping[str, WeightPart],
    kept: Collection[str],
    progress: Progress | None = None,
    blocks: bool = False,
) -> Iterator[Whole | WeightPiece]:
    """Every part of the model (`part_of`: by stored name) once. Pieces of the layers in `kept` wait
    until all have been read; if their codes turn out not to form a matrix, they come as plain
    pieces.
    """
    count: dict[str, int] = {}
    for part in part_of.values():
        count[part.parameter] = count.get(part.parameter, 0) + 1
    waiting: dict[str, list[tuple[WeightPart, StoredMatrix]]] = {}
    plain = {parameter for parameter in count if parameter.removesuffix(WEIGHT) not in kept}
    in_blocks = _names_of(part_of, kept) if blocks else ()
    for name, stored in read_quantized(checkpoint, part_of.keys(), progress, in_blocks):
        part = part_of[name]
        parameter = part.parameter
        if parameter in plain or not isinstance(stored, StoredMatrix):
            plain.add(parameter)
            yield _plain(part, stored)
            yield from (_plain(*one) for one in waiting.pop(parameter, []))
            continue
        pieces = waiting.setdefault(parameter, [])
        pieces.append((part, stored))
        del stored  # the caller's own copy is then the only one
        if len(pieces) == count[parameter]:
            yield from _joined(waiting.pop(parameter))


def _names_of(part_of: Mapping[str, WeightPart], kept: Collection[str]) -> set[str]:
    """The stored pieces of these layers."""
    return {name for name, part in part_of.items() if part.parameter.removesuffix(WEIGHT) in kept}


def _joined(pieces: list[tuple[WeightPart, StoredMatrix]]) -> Iterator[Whole | WeightPiece]:
    pieces.sort(key=lambda piece: _first_row(piece[0]))
    whole = join([_changed(matrix, part) for part, matrix in pieces])
    if whole is not None:
        layer = pieces[0][0].parameter.removesuffix(WEIGHT)
        pieces.clear()
        yield Whole(layer, whole)
    yield from (_plain(*piece) for piece in pieces)


def _first_row(part: WeightPart) -> int:
    rows = part.index[0] if part.index else slice(0, None)
    assert isinstance(rows, slice), f"{part.name} is not a piece of rows"
    return int(rows.start)


def _plain(part: WeightPart, stored: StoredMatrix | Tensor) -> WeightPiece:
    tensor = decoded_matrix(stored) if isinstance(stored, StoredMatrix) else stored
    return WeightPiece(part, part.change(tensor) if part.change else tensor)


def _changed(matrix: StoredMatrix, part: WeightPart) -> StoredMatrix:
    """The matrix with its rows in our order (GGUF stores q and k in another)."""
    if part.change is None:
        return matrix
    (values, grid), scheme = matrix
    if isinstance(scheme, BlockScheme):
        return StoredMatrix(Codes(part.change(values), grid), scheme)
    zero = None if grid.zero is None else part.change(grid.zero)
    return StoredMatrix(Codes(part.change(values), Grid(part.change(grid.scale), zero)), scheme)
