"""What the ranks of a layout send each other in a step, and how long it takes: bytes by formula, as
torch's own recording has them (training/ranks/at_scale.py; a test holds both together), seconds by
hardware/collectives.py.

    sent = LayerSends(setup, pool).tensor_s         # of one layer's forward pass
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ridgeline.hardware.collectives import CollectiveName, Wires, place_of, seconds
from ridgeline.models import LayerConfig
from ridgeline.models.cost import layer_matrices
from ridgeline.parallel.layout import AXES, AxisName
from ridgeline.planning.clusters.cluster import GpuPool
from ridgeline.planning.training.setup import TrainSetup
from ridgeline.planning.training.work import rank_model


def wires_of(pool: GpuPool) -> Wires:
    is_switched = pool.node.joint in ("switch", "mesh")
    return Wires(pool.link_bytes_s, pool.network_bytes_s, is_switched, pool.curves)


@dataclass(frozen=True)
class Sends:
    """Seconds of collectives of one setup on one pool."""

    setup: TrainSetup
    pool: GpuPool

    @cached_property
    def wires(self) -> Wires:
        return wires_of(self.pool)

    def stride(self, axis: AxisName) -> int:
        """How far apart neighbours along an axis are numbered."""
        result = 1
        for each in reversed(AXES):
            if each == axis:
                break
            result *= getattr(self.setup.layout, each)
        return result

    def over(self, axis: AxisName, name: CollectiveName, num_bytes: float) -> float:
        """Of one collective along an axis."""
        size = getattr(self.setup.layout, axis)
        stride = self.stride("context") if axis == "expert" else self.stride(axis)
        return seconds(name, num_bytes, place_of(size, stride, self.pool.domain), self.wires)

    def over_copies(self, name: CollectiveName, num_bytes: float) -> float:
        """Along all axes whose ranks have the same weights' gradients."""
        layout = self.setup.layout
        size = layout.size_of("gradient")
        place = place_of(size, layout.tensor, self.pool.domain)
        return seconds(name, num_bytes, place, self.wires)

    @cached_property
    def stream_bytes(self) -> float:
        """Of one pass's residual stream, before it is shared by tokens."""
        return float(
            self.setup.micro_tokens * self.setup.model.hidden_size * self.setup.element_bytes
        )

    @cached_property
    def tensor_s(self) -> float:
        """Of a layer's forward pass; backward it is as much again."""
        if self.setup.layout.tensor == 1:
            return 0.0
        if not self.setup.layout.sequence:
            return 2 * self.over("tensor", "all-reduce", self.stream_bytes)
        gathered = self.over("tensor", "all-gather", self.stream_bytes)
        return 2 * (gathered + self.over("tensor", "reduce-scatter", self.stream_bytes))

    @cached_property
    def context_s(self) -> float:
        """Of a layer's forward pass: keys and values that other ranks' queries see."""
        layout, model = self.setup.layout, self.setup.model
        if layout.context == 1:
            return 0.0
        heads = max(1, model.num_kv_heads // layout.tensor) * model.head_dim
        tokens = self.setup.micro * self.setup.sequence
        received = (
            tokens
            * 3
            * (layout.context - 1)
            / (4 * layout.context)
            * 2
            * heads
            * self.setup.element_bytes
        )
        # As an exchange in which every rank sends an even part of what all of it receives.
        whole = received * layout.context / (layout.context - 1)
        return self.over("context", "all-to-all", whole)

    def expert_s(self, layer: LayerConfig) -> float:
        """Of a layer's forward pass: tokens to the ranks of their experts, and back."""
        layout = self.setup.layout
        if layer.experts is None or layout.expert == 1:
            return 0.0
        rows = self.setup.micro_tokens * layer.experts.experts_per_token
        moved = rows * self.setup.model.hidden_size * self.setup.element_bytes * self._joined(layer)
        return 2 * self.over("expert", "all-to-all", float(moved))

    def _joined(self, layer: LayerConfig) -> float:
        """Share of the rows that are left where a token's rows for one node go together."""
        assert layer.experts is not None
        place = place_of(self.setup.layout.expert, self.stride("context"), self.pool.domain)
        chosen = layer.experts.experts_per_token
        if not self.setup.stack.joins_rows or place.nodes == 1:
            return 1.0
        return place.nodes * (1 - (1 - 1 / place.nodes) ** chosen) / chosen

    def shard_s(self, layer: LayerConfig) -> tuple[float, float]:
        """To gather a layer's weights, and to share out its gradients' sums."""
        if self.setup.layout.shard == 1:
            return 0.0, 0.0
        weights = self.gathered(layer)
        return (
            self.over("shard", "all-gather", weights * self.setup.element_bytes),
            self.over("shard", "reduce-scatter", weights * self.setup.stack.reduce_bytes),
        )

    def gathered(self, layer: LayerConfig) -> float:
        """Weights of a layer on a rank that are cut by `shard`: all but whole experts."""
        own = rank_model(self.setup, layer)
        count = layer_matrices(own, own.layers[0])
        if layer.experts is not None and self.setup.layout.expert > 1:
            held = own.layers[0].experts
            assert held is not None
            count -= 3 * own.hidden_size * held.mlp_size * held.num_held
        return float(count)

    @cached_property
    def transfer_s(self) -> float:
        """Of the stream between two stages."""
        layout = self.setup.layout
        if layout.pipeline == 1:
            return 0.0
        is_shared = layout.sequence or self.setup.stack.splits_sends
        num_bytes = self.stream_bytes / (layout.tensor if is_shared else 1)
        return self.over("pipeline", "send", num_bytes)

    def replicate_s(self, num_weights: float) -> tuple[float, float]:
        """Of a rank's weights: to sum their gradients over copies, and to gather what each of the
        ranks has updated.
        """
        stack, layout = self.setup.stack, self.setup.layout
        summed = num_weights * stack.reduce_bytes
        if layout.shard > 1:
            return self.over("replicate", "all-reduce", summed), 0.0
        if stack.shards_optimizer:
            gathered = self.over_copies("all-gather", num_weights * self.setup.element_bytes)
            return self.over_copies("reduce-scatter", summed), gathered
        return self.over_copies("all-reduce", summed), 0.0
