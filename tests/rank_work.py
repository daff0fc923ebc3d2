"""What ranks of a test do: a few steps of a tiny model under a layout, and all of it gathered."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from packed import draw, pack
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

from ridgeline.data.loading.packing import PackedBatch, joined
from ridgeline.errors import NumericsError
from ridgeline.models import ModelConfig, Transformer
from ridgeline.models.transformer import build_model, fill_random
from ridgeline.parallel.mesh import Mesh
from ridgeline.parallel.shards import whole_shapes
from ridgeline.training.config import BatchOptions, TrainConfig
from ridgeline.training.ranks.context import context_cut
from ridgeline.training.ranks.proving import Proof, prove
from ridgeline.training.ranks.rank_trainer import rank_trainer, whole_tensors
from ridgeline.training.ranks.weights import copies, sums
from ridgeline.training.ranks.weights.gathering import gathered_tensors
from ridgeline.training.stepping.forward import hidden_states

LENGTH = 16  # tokens of a sequence


@dataclass
class Told:
    """What a rank says of a run."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]  # of the first step, whole
    weights: dict[str, Tensor]  # after the last one, whole


def sequences(count: int, vocab: int, length: int = LENGTH) -> list[PackedBatch]:
    """Each of some documents, with other numbers of counted tokens."""
    made = []
    for number in range(count):
        first = 3 + 5 * number % (length - 4)
        documents = draw(first, length - first, vocab=vocab, seed=number)
        made.append(pack(*documents, ignored=range(number % 3)))
    return made


def whole_model(config: ModelConfig) -> Transformer:
    return fill_random(build_model(config, torch.float32, "cpu"))


def steps(mesh: Mesh, config: ModelConfig, train: TrainConfig, num_steps: int, micro: int) -> Told:
    """`train.batch.sequences` sequences each step."""
    torch.manual_seed(0)
    trainer = rank_trainer(config, train, mesh, whole_tensors(whole_model(config)))
    count = train.batch.size
    shapes = whole_shapes(config)
    cut = context_cut(config, mesh.layout, mesh.rank, LENGTH)
    told = Told([], [], {}, {})
    for step in range(num_steps):
        batch = sequences(count * num_steps, config.vocab_size)[step * count : (step + 1) * count]
        own = [batch[i] for i in mesh.layout.sequences(mesh.rank, count)]
        parts = [cut(joined(own[i : i + micro])) for i in range(0, len(own), micro)]
        if step == 0:
            _, _, gradients = trainer.gradients(parts)
            told.gradients = gathered_tensors(gradients, trainer.local.parts, shapes, mesh)
        result = trainer.step(parts, lr=1e-2)
        told.losses.append(result.loss)
        told.norms.append(result.gradient_norm)
    masters = {name: trainer.weights.master(name) for name in trainer.weights.parameters}
    told.weights = gathered_tensors(masters, trainer.local.parts, shapes, mesh)
    return told


def proven(mesh: Mesh, config: ModelConfig) -> Proof:
    return prove(config, TrainConfig(batch=BatchOptions(sequences=4), layout=mesh.layout), mesh)


def proven_with_a_mutant(mesh: Mesh, config: ModelConfig, mutant: str) -> str:
    """What the proof says of ranks that compute wrongly."""
    break_ranks(mutant)
    try:
        proven(mesh, config)
    except NumericsError as error:
        return str(error)
    return "nothing was found"


class NoSums:
    """torch.distributed, whose sums over copies are left out."""

    def __getattr__(self, name: str) -> Any:
        if name == "all_reduce":
            return lambda tensor, **options: NoWork()
        return getattr(torch.distributed, name)


class NoWork:
    """Of a collective that does nothing."""

    def wait(self) -> None:
        return


def break_ranks(mutant: str) -> None:
    """In this process, which ends with the test."""
    usual_factor, usual_squares = FSDPModule.set_gradient_divide_factor, sums.squares
    usual_finish, usual_totals = sums.RankSharing.finish, sums.RankSharing.totals
    if mutant == "mean":
        FSDPModule.set_gradient_divide_factor = lambda self, _: usual_factor(self, 2.0)
    elif mutant == "no data sum":
        _fsdp_collectives.dist = copies.dist = NoSums()
    elif mutant == "no tensor sum":
        sums.sum_over = lambda axis, tensors: None
    elif mutant == "tied twice":

        def finish(self: sums.RankSharing, gradients: dict[str, Tensor]) -> None:
            usual_finish(self, gradients)
            for name in gradients:
                if self._parts[name].is_tied:
                    gradients[name].mul_(2)

        sums.RankSharing.finish = finish  # type: ignore[assignment, method-assign]
    elif mutant == "norm over one mesh":

        def totals(
            self: sums.RankSharing, loss: Tensor, gradients: dict[str, Tensor]
        ) -> tuple[Tensor, Tensor]:
            square = usual_squares(self._parts, gradients)
            self._mesh.axis("tensor").all_reduce(square)
            return usual_totals(self, loss, gradients)[0], square.sqrt().float()

        sums.RankSharing.totals = totals  # type: ignore[assignment, method-assign]
    else:
        assert mutant == "norms counted twice", mutant
        sums.squares = lambda parts, each: 2 * usual_squares(parts, each)


def hidden_beside(mesh: Mesh, config: ModelConfig, perturbed: int) -> tuple[bool, bool]:
    """Of two rows that differ in one document: whether what the head takes of all others has the
    same bits, and whether that of this one's tokens differs. True where a rank has none of them.
    """
    train = TrainConfig(precision="fp32")
    trainer = rank_trainer(config, train, mesh, whole_tensors(whole_model(config)))
    model: Any = trainer.model
    model.hidden = MethodType(hidden_states, model)
    register_fsdp_forward_method(model, "hidden")
    cut = context_cut(config, mesh.layout, mesh.rank, LENGTH)
    batch = joined(sequences(2, config.vocab_size))
    begin, end = batch.starts[perturbed : perturbed + 2].tolist()
    ids = batch.ids.clone()
    ids[begin:end] = (ids[begin:end] + 7) % config.vocab_size
    rows = [cut(batch), cut(replace(batch, ids=ids))]
    with torch.no_grad():
        one_TD, two_TD = (model.hidden(row, trainer.mode.forward) for row in rows)
    is_own = rows[0].ids != rows[1].ids
    return torch.equal(one_TD[~is_own], two_TD[~is_own]), bool(
        (one_TD != two_TD)[is_own].any(-1).all()
    )


def starved(mesh: Mesh, config: ModelConfig, train: TrainConfig) -> tuple[dict[str, Tensor], float]:
    """Gradients where every token chooses the same experts, those of the first rank of a group;
    and the share of rows that had no room.
    """
    trainer = rank_trainer(config, train, mesh, whole_tensors(undecided(config)))
    count = train.batch.size
    batch = sequences(count, config.vocab_size)
    own = [batch[i] for i in mesh.layout.sequences(mesh.rank, count)]
    _, _, gradients = trainer.gradients([joined(own)])
    experts = trainer.mode.forward.experts
    assert experts is not None
    dropped, rows = experts.dropped.take().tolist()
    whole = gathered_tensors(gradients, trainer.local.parts, whole_shapes(config), mesh)
    return whole, dropped / max(rows, 1)


def undecided(config: ModelConfig) -> Transformer:
    """Routers find all experts equal: every token goes to the first ones."""
    model = whole_model(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "router" in name:
                parameter.zero_()
    return model
