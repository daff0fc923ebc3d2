"""Round-to-nearest: every projection's weights are rounded to their nearest codes, without data.

One layer at a time, whose 16-bit weights are freed before the next: `load_nearest` loads a
checkpoint that would not fit unquantized.

    quantize_nearest(model, parse_scheme("int8"), skip=("layers.0.*", "*.down"))
    model = load_nearest(path, parse_scheme("int4-g128"), torch.bfloat16, "cuda:0")
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor

from ridgeline.errors import NumericsError, UsageError
from ridgeline.models import Transformer, build_model
from ridgeline.models.checkpoint import Checkpoint, open_checkpoint
from ridgeline.models.families import Description, describe
from ridgeline.models.transformer import ExpertMLP, random_parameters
from ridgeline.models.weights import stream_weights
from ridgeline.progress import Progress
from ridgeline.quantization.files.matrix import StoredMatrix, join
from ridgeline.quantization.files.read import is_quantized
from ridgeline.quantization.filling import Filling
from ridgeline.quantization.fitting import SchemeFit, scheme_fit
from ridgeline.quantization.linear import QuantizedLinear, quantizable, replace_layer
from ridgeline.quantization.scheme import Codes, Scheme, encode, find_grid
from ridgeline.quantization.sizes import MatrixSize

log = logging.getLogger(__name__)

AT_ONCE = 1 << 25  # weights


def quantize_nearest(
    model: Transformer,
    scheme: Scheme,
    skip: Collection[str] = (),
    progress: Progress | None = None,
    plain: Collection[MatrixSize] = (),
) -> Transformer:
    """The model itself, **changed in place**: all projections except those that `skip` names (or
    matches, as `layers.0.*`), those of a shape in `plain`, and those that the scheme does not fit.
    """
    names = chosen_layers(model, scheme, skip, plain)
    for done, name in enumerate(names):
        if progress is not None:
            progress("quantizing", done, len(names))
        layer = quantizable(model)[name]
        replace_layer(
            model, name, nearest(name, layer.weight, layer.bias, scheme, layer.weight.dtype)
        )
    return model


def nearest(
    name: str, weight_OD: Tensor, bias_O: Tensor | None, scheme: Scheme, dtype: torch.dtype
) -> QuantizedLinear:
    return QuantizedLinear(nearest_codes(name, weight_OD, scheme).codes, scheme, dtype, bias_O)


@torch.no_grad()
def nearest_codes(name: str, weight_OD: Tensor, scheme: Scheme) -> StoredMatrix:
    """A few rows at a time where rows have separate scales: the weights are in fp32 meanwhile, and
    a head is large.
    """
    separate = scheme.spread in ("row", "group")
    rows = max(1, AT_ONCE // weight_OD.shape[1]) if separate else len(weight_OD)
    pieces = [StoredMatrix(_codes(name, piece, scheme), scheme) for piece in weight_OD.split(rows)]
    whole = join(pieces)
    assert whole is not None, "the pieces have one scheme"
    return whole


def _codes(name: str, weight_OD: Tensor, scheme: Scheme) -> Codes:
    if not weight_OD.isfinite().all():
        raise NumericsError(
            f"{name} has weights that are NaN or infinite; they cannot be quantized"
        )
    return encode(weight_OD, find_grid(weight_OD, scheme), scheme)


def chosen_layers(
    model: Transformer,
    scheme: Scheme,
    skip: Collection[str] = (),
    plain: Collection[MatrixSize] = (),
) -> list[str]:
    """The layers to quantize; logs which ones are not, and why. `model` may have no memory
    allocated. Shapes in `plain` were measured to be slower (choose.py).
    """
    layers, fit = quantizable(model), model_fit(model, scheme, skip)
    warn_of_experts(model)
    if fit.unfit and len(fit.unfit) == fit.num_projections:
        words = "int8" if fit.proposal == "int8" else f"{fit.proposal} or int8"
        raise UsageError(
            f"scheme {scheme.name} fits none of the model's matrices, whose rows have "
            f"{' or '.join(map(str, fit.row_lengths))} weights; try {words}"
        )
    if fit.unfit:
        log.warning("scheme %s", fit.in_words())
    fitting = (name for name in not_skipped(model, skip) if name not in fit.unfit)
    return [name for name in fitting if tuple(layers[name].weight.shape) not in plain]


def model_fit(model: Transformer, scheme: Scheme, skip: Collection[str] = ()) -> SchemeFit:
    """How many of the projections that are to be quantized the scheme fits."""
    layers, wanted = quantizable(model), not_skipped(model, skip)
    shapes = {name: MatrixSize(*layers[name].weight.shape) for name in wanted}
    return scheme_fit(shapes, scheme)


def not_skipped(model: Transformer, skip: Collection[str]) -> list[str]:
    """Projections that none of these words names or matches."""
    layers = quantizable(model)
    unknown = [word for word in skip if not any(_names(word, name) for name in layers)]
    if unknown:
        raise UsageError(
            f"skip has {unknown[0]!r}, which names no projection of the model; "
            "try layers.0.* or *.down"
        )
    return [name for name in layers if not any(_names(word, name) for word in skip)]


def warn_of_experts(model: Transformer) -> None:
    if any(isinstance(module, ExpertMLP) for module in model.modules()):
        log.warning("experts are not quantized: this is not supported yet")


def _names(word: str, name: str) -> bool:
    return word == name or fnmatchcase(name, word)


def load_nearest(
    path: Path,
    scheme: Scheme,
    dtype: torch.dtype,
    device: str,
    progress: Progress | None = None,
    plain: Collection[MatrixSize] = (),
) -> Transformer:
    """A quantized model from a checkpoint that is not quantized; matrices of the shapes in `plain`
    stay plain.
    """
    checkpoint = open_checkpoint(path)
    check_unquantized(checkpoint, scheme.name)
    description = describe(checkpoint)
    model = build_model(description.config, dtype, "meta")
    chosen = {f"{layer}.weight" for layer in chosen_layers(model, scheme, plain=plain)}
    filling = Filling(model, description, device)
    for part, tensor in stream_weights(model, checkpoint, description, progress):
        whole = filling.put(part, tensor)
        del tensor
        if whole is not None:
            _keep(filling, part.parameter, whole, scheme, chosen)
        del whole
    return filling.finished()


def draw_nearest(
    description: Description,
    scheme: Scheme,
    dtype: torch.dtype,
    device: str,
    seed: int = 0,
    plain: Collection[MatrixSize] = (),
) -> Transformer:
    """The same of random weights, those of `fill_random`: drawn one matrix at a time."""
    model = build_model(description.config, dtype, "meta")
    chosen = {f"{layer}.weight" for layer in chosen_layers(model, scheme, plain=plain)}
    filling = Filling(model, description, device)
    for name, whole in random_parameters(model, device, seed):
        _keep(filling, name, whole, scheme, chosen)
        del whole
    return filling.finished()


def _keep(
    filling: Filling, name: str, whole: Tensor, scheme: Scheme, chosen: Collection[str]
) -> None:
    """As codes, where its layer was chosen."""
    if name not in chosen:
        filling.set(name, whole)
        return
    layer = name.removesuffix(".weight")
    bias_O = quantizable(filling.model)[layer].bias
    codes = nearest(layer, whole, bias_O, scheme, whole.dtype)
    replace_layer(filling.model, layer, codes)


def check_unquantized(checkpoint: Checkpoint, scheme: str) -> None:
    if is_quantized(checkpoint):
        raise UsageError(
            f"the recipe's scheme is {scheme}, but {checkpoint.path} is quantized already; "
            "remove --scheme"
        )
