"""What a GPU holds under other software than Ridgeline's, item by item, so that published figures
of memory can be predicted: weights, gradients and optimizer by the byte, kept activations by
Korthikanti's formula (arXiv 2205.05198) with heads, experts and gates as the model has them.

Ridgeline's own ledger is memory/ledger.py; both share what a rank holds of a model and how many
passes a schedule has under way.

    held = foreign_memory(setup, MEGATRON_CI)
    held.steady, held.peak, held.items["activations"]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ridgeline.models import LayerConfig, ModelConfig
from ridgeline.parallel.bubbles import most_held
from ridgeline.planning.training.setup import TrainSetup
from ridgeline.planning.training.step import weights_on
from ridgeline.planning.training.work import rank_model

STEADY = ("weights", "gradients", "optimizer", "overhead")


@dataclass(frozen=True)
class MemoryForm:
    """How a piece of software keeps things, and what its figure is a figure of."""

    weight_bytes: float = 2.0
    gradient_bytes: float = 4.0
    optimizer_bytes: float = 12.0  # of a weight, before ranks share them
    update_bytes: float = 0.0  # of a weight that the rank updates, once activations are gone
    cuts: Literal["nothing", "optimizer", "all"] = "nothing"  # over ranks that hold the same
    logit_bytes: float = 6.0  # of each logit of a pass, at the peak
    overhead_bytes: float = 0.0  # context, buffers of libraries
    scores: Literal["kept", "none"] = "none"
    has_dropout: bool = True
    gate_copies: float = 3.0  # tensors of the MLP's width that a layer keeps
    stream_copies: float = 4.0  # of the hidden size: both norms' inputs and results
    saves: Literal["all", "scores again", "half of products", "blocks"] = "all"
    device: Literal["last", "heaviest"] = "heaviest"  # of a pipeline, that was read
    whole_inputs: bool = False  # of products that ranks of `tensor` share, though tokens are shared
    counts_table: bool = True  # else figures are of layers alone
    learned_positions: int = 0  # rows of a table that every rank has
    reserved: float = 1.0  # of what is allocated
    activation_slack: float = 1.0  # of activations: blocks that the next pass does not fit into


@dataclass(frozen=True)
class ForeignMemory:
    items: Mapping[str, float]

    @property
    def steady(self) -> float:
        """Between steps."""
        return sum(self.items[name] for name in STEADY)

    @property
    def peak(self) -> float:
        return sum(self.items.values())


def foreign_memory(setup: TrainSetup, form: MemoryForm) -> ForeignMemory:
    """Of the device that was read."""
    last = setup.layout.pipeline - 1
    devices = {last} if form.device == "last" else {0, last}
    return max((_of(setup, form, device) for device in devices), key=lambda held: held.peak)


def _of(setup: TrainSetup, form: MemoryForm, device: int) -> ForeignMemory:
    layout, model = setup.layout, setup.model
    cuts = setup.cuts
    layers = [index for cut in cuts[device :: layout.pipeline] for index in cut]
    is_last = device == layout.pipeline - 1
    weights = weights_on(setup, layers, is_last, device == 0)
    if not form.counts_table:
        weights -= weights_on(setup, [], is_last, device == 0)
    if device == 0:
        weights += form.learned_positions * model.hidden_size
    copies, gathered = layout.size_of("gradient"), 0.0
    if form.cuts == "all":
        # Two layers and what is outside of layers are whole for a pass; their gradients too.
        layer = weights_on(setup, layers[:1], False, False)
        gathered = 2.0 * (2 * layer + weights_on(setup, [], is_last, device == 0))
        gathered += form.gradient_bytes * layer
    experts = _expert_weights(setup, layers)
    cut = (weights - experts) / copies + experts * layout.expert / copies
    kept = cut if form.cuts == "all" else weights
    updated = weights if form.cuts == "nothing" else cut
    passes = {
        "activations": form.activation_slack * _activations(setup, form, device, layers),
        "logits": _logits(setup, form) if is_last else 0.0,
    }
    items = {
        "weights": form.weight_bytes * kept,
        "gradients": form.gradient_bytes * kept,
        "optimizer": form.optimizer_bytes * updated,
        "overhead": form.overhead_bytes,
        "gathered": gathered,
        **passes,
        "update": max(0.0, form.update_bytes * updated - sum(passes.values())),
    }
    return ForeignMemory({name: form.reserved * value for name, value in items.items()})


def _expert_weights(setup: TrainSetup, layers: list[int]) -> float:
    """Of experts, which fewer ranks hold the same of."""
    total = 0.0
    for index in layers:
        own = rank_model(setup, setup.model.layers[index])
        experts = own.layers[0].experts
        if experts is not None:
            total += 3.0 * own.hidden_size * experts.mlp_size * experts.num_held
    return total


def _activations(setup: TrainSetup, form: MemoryForm, device: int, layers: list[int]) -> float:
    layout, model = setup.layout, setup.model
    own = [
        sum(_kept(setup, form, model.layers[index], form.saves) for index in cut)
        for cut in setup.cuts[device :: layout.pipeline]
    ]
    # One layer more is made again for its backward pass.
    again = 0.0
    if form.saves != "all":
        again = max(_kept(setup, form, model.layers[index], "all") for index in layers)
        again += 2 * _whole_input(setup, form)  # attention's and the MLP's
    return setup.micro_tokens * (most_held(layout, setup.num_micro, device, own) + again)


def _whole_input(setup: TrainSetup, form: MemoryForm) -> float:
    """Bytes a token, beside the share that the stream's own tensor has."""
    is_shared = form.whole_inputs and setup.layout.sequence and setup.layout.tensor > 1
    return 2.0 * setup.model.hidden_size if is_shared else 0.0


def _kept(setup: TrainSetup, form: MemoryForm, layer: LayerConfig, saves: str) -> float:
    """Of a layer, bytes a token."""
    layout = setup.layout
    own = rank_model(setup, layer)
    shared = layout.tensor if layout.sequence else 1
    hidden = own.hidden_size
    if saves == "blocks":
        return 2.0 * hidden / shared
    if saves == "half of products":
        products = own.q_size + 2 * own.kv_size + 2 * hidden / shared + 2 * own.mlp_size
        return 2.0 * (hidden / shared + own.q_size) + products
    stream = (2 * form.stream_copies + 2 * form.has_dropout) * hidden / shared
    attention = 2.0 * (2 * own.q_size + 2 * own.kv_size)
    if form.scores == "kept" and saves != "scores again":
        pair_bytes = 5 if form.has_dropout else 2
        attention += pair_bytes * own.num_heads * setup.sequence
    return stream + attention + _mlp(own, layer, form)


def _mlp(own: ModelConfig, layer: LayerConfig, form: MemoryForm) -> float:
    if layer.experts is None:
        return 2.0 * form.gate_copies * own.mlp_size
    experts = own.layers[0].experts
    assert experts is not None
    rows = experts.experts_per_token
    # Of each routed row its input, the expert's tensors, and its result.
    return 2.0 * rows * (form.gate_copies * experts.mlp_size + 2 * own.hidden_size)


def _logits(setup: TrainSetup, form: MemoryForm) -> float:
    columns = -(-setup.model.vocab_size // setup.layout.tensor)
    # The head's input, and the gradient of it.
    ends = 2 * _whole_input(setup, form)
    return setup.micro_tokens * (form.logit_bytes * columns + ends)
