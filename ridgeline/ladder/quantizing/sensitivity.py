"""What it costs a model if one projection alone is quantized, for every scheme it could have: the
KL divergence of its next-token distributions, on a little of the calibration text.

Each projection is measured once, with the roughest of its schemes: its weights are rounded, and the
text goes on from there to the logits. Divergence grows with the squared error of a projection's
outputs, so the other schemes follow from theirs, which need no pass through the model; this way an
8-bit scheme is told from nothing too, where the divergence itself would drown in the noise of bf16.
Weights are rounded to nearest here: how good codes are found makes the errors smaller, much alike
everywhere, and whoever searches with these figures measures whole mixtures (mixture.py).

    costs = sensitivity(model, batches, {"layers.0.mlp.down": [parse_scheme("int8")]})
    costs["layers.0.mlp.down"]["int8"]          # nats a token

Letters: T tokens, D hidden size, O outputs, V vocabulary, R rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ridgeline.models import Transformer
from ridgeline.models.transformer import Block
from ridgeline.progress import Progress
from ridgeline.quality.divergence import kl_divergence
from ridgeline.quantization.blocks import BlockWalk
from ridgeline.quantization.scheme import Scheme, decode, encode, find_grid
from ridgeline.quantization.statistics import Statistics, collect, error_db, matrices

TOKENS_ON_CPU, TOKENS_ON_GPU = 256, 2048  # whose logits of the original are kept, in fp32
LEAST = 1e-12  # nats: where rounding hits exactly
ROWS_AT_ONCE = 64  # whose logits are compared together, in fp64


def sensitivity(
    model: Transformer,
    batches: Sequence[Tensor],
    candidates: Mapping[str, Sequence[Scheme]],
    progress: Progress | None = None,
) -> dict[str, dict[str, float]]:
    """By projection and name of a scheme; a projection without candidates is left out."""
    walk = BlockWalk(model, some_of(batches, model.embed.weight.is_cuda))
    probe = _Probe(walk)
    result: dict[str, dict[str, float]] = {}
    wanted = [name for name, schemes in candidates.items() if schemes]
    for index in range(model.config.num_layers):
        block = walk.copy_block(index)
        statistics = collect(block, walk)
        for own_name, weight_OD in matrices(block).items():
            name = f"layers.{index}.{own_name.removesuffix('.weight')}"
            if not candidates.get(name):
                continue
            errors, roughest_OD, error = _errors(weight_OD, statistics[own_name], candidates[name])
            kl = probe.divergence(index, block, weight_OD, roughest_OD)
            result[name] = {scheme: kl * share / error for scheme, share in errors.items()}
            if progress is not None:
                progress("measuring projections", len(result), len(wanted))
        walk.advance(block)
    return result


def some_of(batches: Sequence[Tensor], on_gpu: bool) -> list[Tensor]:
    """The first tokens: sequences as they are, or the beginning of one."""
    room, result = TOKENS_ON_GPU if on_gpu else TOKENS_ON_CPU, list[Tensor]()
    for batch in batches:
        tokens_BS = batch.unsqueeze(0) if batch.dim() == 1 else batch
        count = min(len(tokens_BS), max(1, room // tokens_BS.shape[1]))
        result.append(tokens_BS[:count, :room])
        room -= result[-1].numel()
        if room <= 0:
            break
    return result


@torch.no_grad()
def _errors(
    weight_OD: Tensor, statistics: Statistics, schemes: Sequence[Scheme]
) -> tuple[dict[str, float], Tensor, float]:
    """Each scheme's squared error of the outputs, as a share; and the weights that are furthest
    off, with the share that they alone cause.
    """
    weight_OD = weight_OD.float()
    shares, roughest = {}, (weight_OD, 0.0)
    for scheme in schemes:
        decoded_OD = decode(encode(weight_OD, find_grid(weight_OD, scheme), scheme), scheme)
        shares[scheme.name] = _share(error_db(weight_OD, decoded_OD, statistics, scheme))
        alone = _share(error_db(weight_OD, decoded_OD, statistics, None))
        roughest = max(roughest, (decoded_OD, alone), key=lambda one: one[1])
    return shares, *roughest


def _share(decibels: float) -> float:
    return 10.0 ** (decibels / 10.0)


class _Probe:
    """Runs the rest of the model behind a changed block and compares what comes out."""

    def __init__(self, walk: BlockWalk) -> None:
        self.walk, self.model = walk, walk.model
        inputs = list(walk.inputs)
        self._advance(0)
        self.original = list(self._logits())
        walk.inputs = inputs

    @torch.no_grad()
    def divergence(self, index: int, block: Block, weight_OD: Tensor, changed_OD: Tensor) -> float:
        """Mean KL with these weights of the block, which is then as it was."""
        inputs, before_OD = list(self.walk.inputs), weight_OD.clone()
        weight_OD.copy_(changed_OD)
        self.walk.advance(block)
        self._advance(index + 1)
        weight_OD.copy_(before_OD)
        pairs = zip(self.original, self._logits(), strict=True)
        kl_T = torch.cat([kl_divergence(original_RV, found_RV) for original_RV, found_RV in pairs])
        self.walk.inputs = inputs
        return max(float(kl_T.mean()), LEAST)

    def _advance(self, start: int) -> None:
        for block in self.model.layers[start:]:
            assert isinstance(block, Block)
            self.walk.advance(block)

    @torch.no_grad()
    def _logits(self) -> Iterator[Tensor]:
        for x_TD in self.walk.inputs:
            for rows_RD in x_TD.split(ROWS_AT_ONCE):
                yield self.model.logits(self.model.norm(rows_RD))
