"""Which layers lose most: signal to error, in dB, of each block and each matrix of a changed model,
given the inputs that the original has there.

Every part is judged by itself: it gets the inputs that the original's part gets, so that an error
counts where it is made. A token's error is the squared difference over the squared output; the mean
over tokens becomes dB, so that a few tokens with huge activations do not hide the others. 6 dB are
one bit.

    for part in layer_errors(original, changed, windows.tokens[:2])[:5]: print(part.name, part.db)

Letters: T tokens, D hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ridgeline.engine.naive import OneSequence
from ridgeline.errors import UsageError
from ridgeline.models import Transformer
from ridgeline.models.transformer import ExpertMLP, Linear, RopeAngles
from ridgeline.progress import Progress

NO_ERROR_DB = 200.0  # what is shown for equal outputs; less than nothing, for no numbers at all


class PartError(NamedTuple):
    name: str  # as in the model: `layers.3`, `layers.3.mlp.down`
    kind: Literal["block", "matrix"]
    db: float
    block_db: float  # of the block it is in


class Sum:
    """Of the error shares of tokens."""

    def __init__(self) -> None:
        self.total, self.num_tokens = 0.0, 0

    def add(self, wanted_TD: Tensor, found_TD: Tensor) -> None:
        wanted_TD, found_TD = wanted_TD.double(), found_TD.double()
        signal_T = wanted_TD.square().sum(-1).clamp(min=1e-300)
        self.total += float(((found_TD - wanted_TD).square().sum(-1) / signal_T).sum())
        self.num_tokens += len(wanted_TD)

    @property
    def db(self) -> float:
        share = self.total / max(self.num_tokens, 1)
        if math.isnan(share) or share == math.inf:
            return -NO_ERROR_DB
        return NO_ERROR_DB if share == 0 else min(NO_ERROR_DB, -10.0 * math.log10(share))


@torch.inference_mode()
def layer_errors(
    original: Transformer,
    changed: Transformer,
    windows: Sequence[Sequence[int]],
    progress: Progress | None = None,
) -> list[PartError]:
    """Blocks and matrices, the most harmful first: by their block, and in it by themselves."""
    if original.config != changed.config:
        raise UsageError("the models have different shapes; layers are compared one to one")
    sums: dict[str, Sum] = {}
    for number, window in enumerate(windows):
        _one_window(original, changed, window, lambda name: sums.setdefault(name, Sum()))
        if progress is not None:
            progress("comparing layers", number + 1, len(windows))
    return _sorted(sums)


def _sorted(sums: dict[str, Sum]) -> list[PartError]:
    errors = []
    for name, total in sums.items():
        block = ".".join(name.split(".")[:2])
        kind: Literal["block", "matrix"] = "matrix"
        if name == block and name != "head":  # which is a matrix that stands alone
            kind = "block"
        errors.append(PartError(name, kind, total.db, sums[block].db))
    return sorted(errors, key=lambda part: (part.block_db, part.kind, part.db))


def _one_window(
    original: Transformer,
    changed: Transformer,
    window: Sequence[int],
    sum_of: Callable[[str], Sum],
) -> None:
    ours, theirs = (_sequence(model, len(window)) for model in (original, changed))
    tokens_T = torch.tensor(window, device=original.embed.weight.device)
    x_TD = original._embedded(tokens_T, ours)
    our_angles, their_angles = _angles(original, ours), _angles(changed, theirs)
    blocks = zip(original.layers, changed.layers, strict=True)
    for index, (block, other) in enumerate(blocks):
        parts = _parts(block)
        with _inputs_of(parts) as inputs:
            out_TD = block(x_TD.clone(), our_angles, ours)
        found_TD = other(_like(x_TD, changed), their_angles, theirs)
        sum_of(f"layers.{index}").add(out_TD, found_TD.to(out_TD.device))
        for name, part in parts.items():
            own = other.get_submodule(name)
            sum_of(f"layers.{index}.{name}").add(*_outputs(part, own, inputs[name], changed))
        x_TD = out_TD
    x_TD = original.norm(x_TD)
    sum_of("head").add(*_outputs(original.head, changed.head, (x_TD, None), changed))


def _parts(block: nn.Module) -> dict[str, nn.Module]:
    """Matrices of a block; experts, which are stacked, as one."""
    parts: dict[str, nn.Module] = {}
    for name, module in block.named_modules():
        inside = any(name.startswith(f"{other}.") for other in parts)
        if isinstance(module, (Linear, ExpertMLP)) and not inside:
            parts[name] = module
    return parts


@contextmanager
def _inputs_of(parts: dict[str, nn.Module]) -> Any:
    """What each part is given while its block runs: the input, and the norm before it."""
    inputs: dict[str, tuple[Tensor, Any]] = {}

    def note(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            x_TD, norm = (*arguments, None)[:2]
            inputs[name] = (x_TD.clone(), norm)

        return hook

    hooks = [part.register_forward_pre_hook(note(name)) for name, part in parts.items()]
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()


def _outputs(
    part: nn.Module, own: nn.Module, inputs: tuple[Tensor, Any], changed: Transformer
) -> tuple[Tensor, Tensor]:
    """Of the original's and the changed part, for the same input after the original's norm."""
    x_TD, norm = inputs
    if isinstance(part, ExpertMLP):
        plain = nn.Identity()
        normed_TD = norm(x_TD)
        return part(normed_TD, plain), own(_like(normed_TD, changed), plain).to(x_TD.device)
    if norm is not None:
        x_TD = norm(x_TD)
    return part(x_TD), own(_like(x_TD, changed)).to(x_TD.device)


def _like(x_TD: Tensor, model: Transformer) -> Tensor:
    """A copy for a model that may be in another dtype, or elsewhere."""
    weight = model.embed.weight
    return x_TD.to(weight.device, weight.dtype, copy=True)


def _sequence(model: Transformer, length: int) -> OneSequence:
    sequence = OneSequence(model, length)
    sequence.begin(length, length)
    return sequence


def _angles(model: Transformer, sequence: OneSequence) -> RopeAngles:
    ropes = {layer.rope for layer in model.config.layers if layer.rope is not None}
    return {rope: rope.angles(sequence.positions_T, sequence.lengths_T) for rope in ropes}
