"""What a training step is predicted to take on a cluster: counted work over what is reached of the
datasheet, collectives with the passes they hide behind, the pipeline simulated, and what grows with
the number of nodes. No clock is read here.

    estimate = estimate_step(setup, pool, load_fitted())
    estimate.step_s, estimate.tokens_per_s, estimate.parts["products"]
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from ridgeline.errors import UnsupportedError
from ridgeline.models import LayerConfig
from ridgeline.models.cost import layer_matrices, num_parameters
from ridgeline.models.training_cost import training_flops
from ridgeline.parallel.bubbles import PassTimes
from ridgeline.parallel.layout import Layout
from ridgeline.planning.clusters.cluster import GpuPool
from ridgeline.planning.training.collectives import Sends
from ridgeline.planning.training.constants import Fitted, family_of
from ridgeline.planning.training.pipelines import pipeline_span
from ridgeline.planning.training.setup import TrainSetup
from ridgeline.planning.training.work import head_work, layer_work, rank_model
from ridgeline.profiling.predicting.training_work import WorkOp
from ridgeline.profiling.tracing.training_trace import BACKWARD

PARTS = ("products", "attention", "element-wise", "loss", "launches", "tensor", "context", "expert",
         "shard", "replicate", "pipeline", "optimizer", "nodes")  # fmt: skip
WORDS = {
    "products": "with weights, forward and for both gradients, and computed again",
    "attention": "of tokens over those before them, and its gradients",
    "element-wise": "norms, rotations, activations, embeddings",
    "loss": "passes over the head's logits",
    "launches": "between kernels",
    "tensor": "gathers and sums of activations over `tensor`, as far as nothing hides them",
    "context": "keys and values of other ranks",
    "expert": "tokens to the ranks of their experts, and back",
    "shard": "weights and gradients over `shard`, as far as no pass hides them",
    "replicate": "gradients over copies, as far as no pass hides them",
    "pipeline": "devices that wait for each other, and what they send",
    "optimizer": "the gradients' norm, and the update",
    "nodes": "stragglers and traffic, by the number of nodes",
}
# Multiprocessors that collectives take from what runs beside them (notes of 2026-11-17).
TAKEN_INSIDE, TAKEN_ACROSS = 0.15, 0.02
ODD_COLUMNS = 64
# Rows of 16 bits that begin at no multiple of 16 bytes do not reach an A100's matrix units, which
# are four times as fast as its others (312 and 78 TFLOP/s: its datasheet).
EVEN_HEAD, MATRIX_UNITS = 8, 4.0
Seconds = defaultdict[str, float]  # of PARTS
POWER_W = {"hopper": 700.0}  # at which a generation's figures hold, where parts are sold with less


@dataclass(frozen=True)
class StepEstimate:
    step_s: float
    parts: Mapping[str, float]  # of PARTS; they add up to the step
    tokens: int
    flops: float  # that loss and gradients need, of all ranks
    num_gpus: int
    peak_flops: float  # of one GPU, by its datasheet
    stages: tuple[PassTimes, ...]  # of one micro-batch
    transfer_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s

    @property
    def mfu(self) -> float:
        return self.flops / (self.step_s * self.num_gpus * self.peak_flops)


@dataclass(frozen=True)
class LayerTimes:
    """Of one layer or the head, a pass of one micro-batch; parts of all three passes together."""

    forward: float
    inputs: float
    weights: float
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        return self.forward + self.inputs + self.weights


def estimate_step(setup: TrainSetup, pool: GpuPool, fitted: Fitted) -> StepEstimate:
    """UnsupportedError where the GPU does not multiply in what is asked for."""
    times = _Rank(setup, pool, fitted)
    sends = times.sends
    cuts = setup.cuts
    stages = [_stage(times, cut, number, len(cuts)) for number, cut in enumerate(cuts)]
    waits = sends.transfer_s if setup.stack.waits_for_sends else 0.0
    passes = [PassTimes(each.forward + waits, each.inputs + waits, each.weights) for each in stages]
    span = pipeline_span(setup.layout, setup.num_micro, passes, sends.transfer_s)
    parts = dict.fromkeys(PARTS, 0.0)
    heaviest = _heaviest(setup.layout, stages)
    for stage in heaviest:
        for name, value in stage.parts.items():
            parts[name] += setup.num_micro * value
    parts["pipeline"] = max(0.0, span - sum(parts.values()))
    parts |= _once_a_step(times, cuts, heaviest)
    parts = {name: value * fitted.correction(name) for name, value in parts.items()}
    # Copies wait for each other once a step; stages of a pipeline are simulated.
    nodes = max(1, min(setup.layout.size // pool.node.num_gpus, setup.layout.size_of("data")))
    parts["nodes"] = sum(parts.values()) * fitted.tax * math.log2(nodes)
    flops = training_flops(setup.model, [setup.sequence] * setup.batch, setup.tokens)
    peak = pool.rate("bf16") or pool.rate("fp16") or 0.0
    return StepEstimate(
        sum(parts.values()), parts, setup.tokens, flops.total, setup.layout.size, peak,
        tuple(passes), sends.transfer_s,
    )  # fmt: skip


def least_step_s(setup: TrainSetup, pool: GpuPool, fitted: Fitted) -> float:
    """What no schedule, and no way to cut weights over copies, goes below: a device's mean share of
    what the pipeline computes and sends inside its layers.
    """
    alone = replace(setup, layout=replace(setup.layout, shard=1))
    times = _Rank(alone, pool, fitted)
    kinds = Counter(setup.model.layers)
    total = times.head().total + sum(n * times.layer(kind).total for kind, n in kinds.items())
    return total * setup.num_micro / setup.layout.pipeline * fitted.least_correction


def _heaviest(layout: Layout, stages: list[LayerTimes]) -> list[LayerTimes]:
    """The stages of the device that has most to do."""
    devices = [stages[device :: layout.pipeline] for device in range(layout.pipeline)]
    return max(devices, key=lambda own: sum(stage.total for stage in own))


class _Rank:
    """Seconds of one setup on one pool."""

    def __init__(self, setup: TrainSetup, pool: GpuPool, fitted: Fitted) -> None:
        self.setup, self.pool, self.fitted = setup, pool, fitted
        self.sends = Sends(setup, pool)
        self.family = family_of(pool.gpu.name)
        usual = POWER_W.get(self.family)
        power = pool.gpu.power_w
        self.clock = 1.0 if usual is None else min(1.0, power / usual) ** fitted.power_exponent
        self._layers: dict[LayerConfig, LayerTimes] = {}

    def rate(self, units: str) -> float:
        """FLOP/s that products of any size come near to."""
        known = self.pool.rate(units)
        if known is None:
            raise UnsupportedError(f"{self.pool.gpu.name} does not multiply in {units}")
        share = self.fitted.product_share(self.pool.gpu.name, units)
        return known * share * self.clock

    @cached_property
    def is_odd(self) -> bool:
        """A rank's columns of attention are no multiple of what matrix units take at once."""
        return self.setup.model.q_size // self.setup.layout.tensor % ODD_COLUMNS != 0

    @property
    def bytes_s(self) -> float:
        return self.pool.gpu.bandwidth_gb_s * 1e9 * self.fitted.bandwidth

    def layer(self, layer: LayerConfig) -> LayerTimes:
        kind = replace(layer, rope=None)
        if kind not in self._layers:
            self._layers[kind] = self._layer(layer)
        return self._layers[kind]

    def _layer(self, layer: LayerConfig) -> LayerTimes:
        work, setup = layer_work(self.setup, layer), self.setup
        parts: Seconds = defaultdict(float)
        forward = self._ops(work.forward, parts)
        inputs = self._ops(work.inputs, parts)
        weights = self._ops(work.weights, parts) + self._sums(layer, parts)
        inputs += self._again(work.forward, parts)
        # Software that fuses less has as many more kernels as it has passes.
        waits = setup.stack.launch_s * setup.stack.passes
        gap = (self.fitted.kernel_s + waits) * work.num_kernels
        parts["launches"] += gap
        forward, inputs = forward + gap / 3, inputs + 2 * gap / 3
        computed = forward, inputs + weights
        sends = setup.recomputation == "blocks"
        for name, one_way in self._messages(layer).items():
            parts[name] += (2 + sends) * one_way
            forward, inputs = forward + one_way, inputs + (1 + sends) * one_way
        gathered, regathered = self._sharded(layer, computed)
        parts["shard"] += gathered + regathered
        return LayerTimes(forward + gathered, inputs + regathered, weights, parts)

    def _sums(self, layer: LayerConfig, parts: Seconds) -> float:
        """Gradients of a micro-batch, added to those before it: read and written. A product that
        adds by itself does so behind its math.
        """
        layout = self.setup.layout
        if self.setup.num_micro == 1 or self.setup.stack.adds_in_products:
            return 0.0
        own = rank_model(self.setup, layer)
        count = layer_matrices(own, own.layers[0])
        if layout.pipeline == 1:  # else they stay whole until the step ends
            count //= layout.shard
        seconds = 2 * self.setup.stack.gradient_bytes * count / self.bytes_s
        parts["products"] += seconds
        return seconds

    def _messages(self, layer: LayerConfig) -> dict[str, float]:
        """Of a layer's forward pass, as far as nothing hides them."""
        exposed = 1 - self.setup.stack.hides_tensor
        return {
            "tensor": exposed * self.fitted.tensor * self.sends.tensor_s,
            "context": exposed * self.sends.context_s,
            "expert": self.sends.expert_s(layer),
        }

    def _sharded(self, layer: LayerConfig, computed: tuple[float, float]) -> tuple[float, float]:
        """What `shard` adds to both passes of a layer: what its messages take beyond the pass that
        they run beside, and the multiprocessors that they take from it.
        """
        setup, stack = self.setup, self.setup.stack
        gather, scatter = self.sends.shard_s(layer)
        if not gather:
            return 0.0, 0.0
        passes = 1 if setup.layout.pipeline > 1 or not stack.gathers_each_pass else setup.num_micro
        often = passes / setup.num_micro
        again = gather if stack.regathers and setup.layout.pipeline == 1 else 0.0
        is_inside = setup.layout.shard * setup.layout.tensor <= self.pool.domain
        taken = TAKEN_INSIDE if is_inside else TAKEN_ACROSS
        results = []
        for sent, pass_s in ((gather, computed[0]), (again + scatter, computed[1])):
            window = pass_s if stack.hides_data else 0.0
            results.append(often * (max(0.0, sent - window) + taken * min(sent, window)))
        return results[0], results[1]

    def _again(self, forward: Iterable[WorkOp], parts: Seconds) -> float:
        """What foreign software computes again beyond the level's own."""
        total = 0.0
        if self.setup.products_again is not None:
            own = [op for op in forward if op.part == "products"]
            seconds = self.setup.products_again * sum(self._product(op) for op in own)
            parts["products"] += seconds
            total += seconds
        if self.setup.scores_again:
            seconds = sum(self._attention(op) for op in forward if op.part == "attention")
            parts["attention"] += seconds
            total += seconds
        return total

    def head(self) -> LayerTimes:
        work = head_work(self.setup)
        parts: Seconds = defaultdict(float)
        forward = self._ops(work.forward, parts)
        inputs = self._ops(work.inputs, parts)
        weights = self._ops(work.weights, parts)
        return LayerTimes(forward, inputs, weights, parts)

    def _ops(self, ops: Iterable[WorkOp], parts: Seconds) -> float:
        total = 0.0
        for op in ops:
            if op.part == "attention":
                seconds = self._attention(op)
            elif op.units is not None:
                seconds = self._product(op)
            else:
                seconds = self._pass(op)
            seconds *= self.setup.stack.slowness
            parts[op.part] += seconds
            total += seconds
        return total

    def _product(self, op: WorkOp) -> float:
        assert op.units is not None
        rate = self.rate(op.units)
        if "experts" in op.name:
            rate *= self.fitted.experts
        if self.is_odd:
            rate *= self.fitted.odd
        return op.flops / rate + self.fitted.product_bytes * op.num_bytes / self.bytes_s

    def _pass(self, op: WorkOp) -> float:
        """A tensor's way through the memory."""
        times = self.setup.stack.passes if op.part in ("element-wise", "loss") else 1.0
        return times * op.num_bytes / self.bytes_s

    def _attention(self, op: WorkOp) -> float:
        assert op.units is not None
        stack, fitted = self.setup.stack, self.fitted
        units = "bf16" if op.units in ("fp8", "fp4") else op.units
        share = fitted.attention[stack.attention]
        is_backward = op.name.endswith(BACKWARD)
        if is_backward:
            share *= fitted.attention_backward
        if stack.attention == "flash" and self.family != "ampere":
            share *= fitted.hopper_flash
        if stack.attention == "scores" and self.setup.model.head_dim % EVEN_HEAD:
            share /= MATRIX_UNITS
        if self.setup.model.head_dim < 96 and self.family != "ampere":
            share *= 0.75  # 418 of 550 TFLOP/s on an H200 (notes of 2026-11-17)
        flops = op.flops * (2 if stack.attention == "scores" or stack.is_full_attention else 1)
        seconds = flops / (share * self.rate(units))
        if stack.attention == "scores":
            pairs = op.flops * 2 / (4 * self.setup.model.head_dim) / (2 if is_backward else 1)
            share_of_pass = 0.6 if is_backward else 0.4
            seconds += pairs * fitted.score_bytes * share_of_pass / self.bytes_s
        return seconds + op.num_bytes / self.bytes_s


def _stage(times: _Rank, layers: range, number: int, count: int) -> LayerTimes:
    """Layers of a kind are alike."""
    model = times.setup.model
    kinds = Counter(model.layers[index] for index in layers)
    total = [0.0, 0.0, 0.0]
    parts: Seconds = defaultdict(float)
    own = [(times.layer(kind), often) for kind, often in kinds.items()]
    if number == count - 1:
        own.append((times.head(), 1))
    for each, often in own:
        for index, value in enumerate((each.forward, each.inputs, each.weights)):
            total[index] += often * value
        for name, value in each.parts.items():
            parts[name] += often * value
    return LayerTimes(total[0], total[1], total[2], parts)


def weights_on(setup: TrainSetup, layers: Iterable[int], has_head: bool, has_table: bool) -> float:
    """Parameters of a rank's layers, by `tensor` and `expert` and not by `shard`."""
    count = 0.0
    for kind, often in Counter(setup.model.layers[index] for index in layers).items():
        own = rank_model(setup, kind)
        bare = num_parameters(own) - own.vocab_size * own.hidden_size * (2 - own.tied_embeddings)
        count += often * (bare - own.hidden_size)
    table = -(-setup.model.vocab_size // setup.layout.tensor) * setup.model.hidden_size
    both = has_head and has_table and setup.model.tied_embeddings
    return count + table * (has_head + has_table - both)


def _once_a_step(
    times: _Rank, cuts: tuple[range, ...], heaviest: list[LayerTimes]
) -> dict[str, float]:
    """Gradients over copies, and the optimizer: of the device with most layers."""
    setup, stack, layout = times.setup, times.setup.stack, times.setup.layout
    devices = [
        [index for cut in cuts[device :: layout.pipeline] for index in cut]
        for device in range(layout.pipeline)
    ]
    most = max(devices, key=lambda own: len(own))
    weights = weights_on(setup, most, layout.pipeline == 1, True)
    summed, gathered = times.sends.replicate_s(weights / layout.shard)
    if stack.hides_data:
        forward = sum(stage.forward for stage in heaviest)
        backward = sum(stage.inputs + stage.weights for stage in heaviest)
        summed = max(0.05 * summed, summed - backward)
        gathered = max(0.05 * gathered, gathered - forward)
    held = weights / layout.shard
    if stack.shards_optimizer:
        held /= layout.size_of("gradient")
    moved = held * setup.optimizer_bytes
    return {"replicate": summed + gathered, "optimizer": moved / times.bytes_s}
