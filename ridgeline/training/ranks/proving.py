"""A layout proven before the first step: a few steps of the user's own model, cut down in layers,
vocabulary and the width of MLPs, under the layout, held to the plain loop.

Every rank runs the plain loop over the whole small model itself, and compares the loss, the norm
and its own part of every gradient: nothing is gathered, so that it runs at any scale. It is done in
fp32, whatever the run computes in, for a sum that is left out is no matter of rounding.

    proof = prove(model_config, train_config, mesh)     # NumericsError names parameter and axis
    proof.num_layers, proof.seconds

What was proven once on this machine is remembered, with the versions it was proven with.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from ridgeline.data.loading.packing import IGNORED, PackedBatch, joined
from ridgeline.errors import NumericsError, OutputError
from ridgeline.formats.files import atomic_write
from ridgeline.hardware.paths import cache_dir
from ridgeline.models import LayerConfig, ModelConfig, Transformer
from ridgeline.models.transformer import build_model, fill_random
from ridgeline.parallel.holdings import Part
from ridgeline.parallel.layout import AxisName, Layout
from ridgeline.parallel.mesh import Mesh
from ridgeline.training.config import OptimizerOptions, TrainConfig
from ridgeline.training.naive import naive_gradients, naive_loss_and_gradients
from ridgeline.training.ranks.crew import Crew
from ridgeline.training.ranks.rank_trainer import rank_trainer, whole_tensors
from ridgeline.training.ranks.weights.local_model import read_region
from ridgeline.training.stepping.gradients import norm_pieces
from ridgeline.training.stepping.step import StepLimits
from ridgeline.version import __version__

# Of each rank, step by step, or as many as its pipeline wants: gradients of several are summed and
# compared, and one pass more shows what they changed.
PASSES = (2, 1)
BOUND = 1e-4  # of a gradient's own norm; fp32 rounds a thousand times finer
LR = 1e-3
EPS = 1e-3  # of AdamW: a gradient that is nothing but rounding must not move a weight
SHORTEST = 16  # tokens of a sequence
# About; those of a large model take most of the time, and cut alike.
VOCABULARY = 8192  # tokens
COLUMNS = 2048  # of an MLP, or of an expert


@dataclass(frozen=True)
class Proof:
    num_layers: int
    num_gradients: int
    worst: float  # difference of a gradient, of its norm
    seconds: float


class GradientComparison:
    """A step's, beside the plain ones, before it changes weights by them."""

    def __init__(self, expected: Mapping[str, Tensor], parts: Mapping[str, Part]) -> None:
        self._expected, self._parts = expected, parts
        self.differences: dict[str, float] = {}  # of each on this rank, of the whole one's norm
        self.wrong: tuple[str, Tensor] | None = None  # the first that differs

    def __call__(self, gradients: Mapping[str, Tensor], factor: float) -> None:
        for name, part in self._parts.items():
            wanted = read_region(self._expected[name], part.region)
            own = gradients[name][: len(wanted)] * factor
            scale = self._expected[name].norm().item() or 1.0
            self.differences[name] = (own - wanted).norm().item() / scale
            if self.wrong is None and not self.differences[name] <= BOUND:
                self.wrong = name, own

    def how_many(self) -> str:
        wrong = [each for each in self.differences.values() if not each <= BOUND]
        return f"({len(wrong)} of {len(self.differences)} gradients differ)"


def prove(model: ModelConfig, train: TrainConfig, mesh: Mesh) -> Proof:
    """NumericsError on every rank where any of them finds a difference."""
    start = time.perf_counter()
    small = cut_down(model, mesh.layout)
    orders = [proving_order(train, mesh.layout, num_passes) for num_passes in PASSES]
    whole = fill_random(build_model(small, torch.float32, mesh.device))
    trainer = rank_trainer(small, orders[0], mesh, whole_tensors(whole))
    parts = trainer.local.parts
    worst, problem = 0.0, None
    for step, order in enumerate(orders):
        crew = Crew(mesh, order)
        on_host = sequences(order, small.vocab_size, step)
        passes = crew.own_passes(on_host, small)
        batch = [each.to(mesh.device) for each in on_host]
        plain, expected = naive_loss_and_gradients(whole, [joined(batch)])
        if step == 0:
            trainer.before_update = comparison = GradientComparison(expected, parts)
            # Limits let a step whose numbers are none end, and change nothing.
            result = trainer.step(passes, lr=LR, limits=StepLimits())
            loss, norm = result.loss, result.gradient_norm
            worst = max(comparison.differences.values())
            if comparison.wrong is not None:
                why = explained(*comparison.wrong, expected, whole, batch, mesh, parts)
                problem = f"{why} {comparison.how_many()}"
        else:  # shows what the update made; one of its own would be seen by nobody
            loss, norm = trainer.loss_and_norm(passes)
        plain_norm = norm_in_all(expected)
        problem = problem or scalars_differ(step, loss, plain, norm, plain_norm)
        if stop := next(filter(None, crew.from_all(problem)), None):
            raise NumericsError(
                f"the layout {mesh.layout.words()} does not compute what one device does: {stop}; "
                "nothing was trained"
            )
        if step == 0:
            plain_update(whole, expected, plain_norm, order.optimizer.max_norm)
    (seconds,) = crew.of_first(time.perf_counter() - start)
    return Proof(small.num_layers, len(trainer.local.parts), worst, seconds)


def norm_in_all(gradients: Mapping[str, Tensor]) -> float:
    norms = [piece.norm().double() for each in gradients.values() for piece in norm_pieces(each)]
    return torch.stack(norms).norm().item()


def plain_update(
    model: Transformer, gradients: Mapping[str, Tensor], norm: float, max_norm: float | None
) -> None:
    """The first, as the plain loop makes it of gradients that are there already, in torch's one
    pass over memory.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=(0.9, 0.95), eps=EPS, weight_decay=0.0, fused=True
    )
    scale = 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name].mul_(scale)
    optimizer.step()
    optimizer.zero_grad()


def prove_once(model: ModelConfig, train: TrainConfig, mesh: Mesh) -> Proof | None:
    """None where it was proven before; the first rank knows."""
    crew = Crew(mesh, train)
    key = proof_key(model, train, mesh)
    path = cache_dir() / "layouts" / f"{key}.json"
    (is_known,) = crew.of_first(crew.is_first and path.is_file())
    if is_known:
        return None
    proof = prove(model, train, mesh)
    if crew.is_first:
        with suppress(OSError, OutputError):  # it is proven again then
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as file:
                json.dump({"layout": mesh.layout.words(), **asdict(proof)}, file)
    return proof


def proof_key(model: ModelConfig, train: TrainConfig, mesh: Mesh) -> str:
    """Of everything that may change what ranks compute."""
    shape = replace(cut_down(model, mesh.layout), max_context=1)
    what = (
        mesh.layout,
        shape,
        train.recomputation,
        mesh.device.type,
        torch.__version__,
        __version__,
    )
    return hashlib.sha256(repr(what).encode()).hexdigest()[:16]


def cut_down(model: ModelConfig, layout: Layout) -> ModelConfig:
    """Two layers, one of each kind there is, and at least as many as there are stages; of a large
    vocabulary and of wide MLPs about as much as VOCABULARY and COLUMNS, with the same remainders.
    """
    layers = list(dict.fromkeys(model.layers))
    wanted = max(2, layout.num_stages, len(layers))
    for layer in model.layers:
        if len(layers) < wanted:
            layers.append(layer)
    while len(layers) < wanted:
        layers.append(model.layers[-1])
    return replace(
        model,
        layers=tuple(narrowed(layer, layout) for layer in layers),
        vocab_size=shortened(model.vocab_size, VOCABULARY, layout),
        mlp_size=shortened(model.mlp_size, COLUMNS, layout),
    )


def narrowed(layer: LayerConfig, layout: Layout) -> LayerConfig:
    if layer.experts is None:
        return layer
    columns = shortened(layer.experts.mlp_size, COLUMNS, layout)
    return replace(layer, experts=replace(layer.experts, mlp_size=columns))


def shortened(size: int, wanted: int, layout: Layout) -> int:
    """About as many as wanted, of which ranks have as uneven parts."""
    period = 64 * layout.tensor * layout.shard
    return min(size, -(-wanted // period) * period + size % period)


def proving_order(train: TrainConfig, layout: Layout, num_passes: int) -> TrainConfig:
    """Short sequences, one in each pass of a rank."""
    step = 2 * layout.context * layout.tensor
    length = -(-SHORTEST // step) * step
    count = max(num_passes, layout.num_stages) * layout.size_of("data")
    return TrainConfig(
        precision="fp32",
        recomputation=train.recomputation,
        batch=replace(train.batch, sequences=count, micro=1),
        data=replace(train.data, sequence_length=length),
        optimizer=OptimizerOptions(eps=EPS),
        layout=layout,
    )


def sequences(order: TrainConfig, vocab_size: int, seed: int) -> list[PackedBatch]:
    """Each of two documents, of which a few tokens are not learned: other counts in each."""
    length = order.data.sequence_length
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(order.batch.size):
        first = length // 4 + 3 * number % (length // 2)
        ids = torch.randint(0, vocab_size, (length,), generator=generator)
        targets = ids.roll(-1)
        targets[[first - 1, length - 1]] = IGNORED
        targets[: number % 5] = IGNORED
        positions = torch.cat([torch.arange(first), torch.arange(length - first)])
        starts = torch.tensor([0, first, length], dtype=torch.int32)
        made.append(PackedBatch.of(ids, targets, positions, starts))
    return made


def scalars_differ(
    step: int, loss: float, plain_loss: float, norm: float, plain_norm: float
) -> str | None:
    for name, value, wanted in (("loss", loss, plain_loss), ("norm", norm, plain_norm)):
        if not abs(value - wanted) <= BOUND * abs(wanted):
            what = "the gradient norm" if name == "norm" else "the loss"
            return f"{what} of step {step + 1} is {value:.6g} instead of {wanted:.6g}"
    return None


def explained(
    name: str,
    own: Tensor,
    expected: Mapping[str, Tensor],
    whole: Transformer,
    batch: Sequence[PackedBatch],
    mesh: Mesh,
    parts: Mapping[str, Part],
) -> str:
    """Which axis is to blame: that whose sum explains the difference, if it is left out or taken
    twice; else one along which the parameter is cut.
    """
    region = parts[name].region
    wanted = read_region(expected[name], region)
    text = f"the gradient of {name} on rank {mesh.rank}"
    for axis in several(mesh.layout):
        size = mesh.layout.size_of(axis)
        for factor, what in ((size, "summed twice or more"), (1 / size, "averaged, not summed")):
            if is_close(own, wanted * factor):
                return f"{text} is {factor:.4g} times what it must be: {what} over {axis}"
    for axis in several(mesh.layout):
        if axis in ("replicate", "shard"):
            shares = mesh.layout.group(mesh.rank, axis)
            kept = [
                each
                for rank in set(mesh.layout.group(mesh.rank, "data")) - set(shares) | {mesh.rank}
                for each in (batch[i] for i in mesh.layout.sequences(rank, len(batch)))
            ]
            alone = naive_gradients(whole, kept)[name]
            count = sum(each.num_targets for each in batch)
            share = sum(each.num_targets for each in kept) / count
            if is_close(own, read_region(alone, region) * share):
                return f"{text} is that of its own sequences alone: the sum over {axis} is missing"
    suspects = ", ".join(several(mesh.layout)) or "none"
    off = (own - wanted).norm().item() / (wanted.norm().item() or 1.0)
    return f"{text} is off by {off:.3g} of its norm; axes of this layout: {suspects}"


def several(layout: Layout) -> Iterator[AxisName]:
    axes: tuple[AxisName, ...] = (
        "tensor", "expert", "context", "shard", "replicate", "pipeline"
    )  # fmt: skip
    return (axis for axis in axes if layout.size_of(axis) > 1)


def is_close(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).norm() <= BOUND * other.norm())
