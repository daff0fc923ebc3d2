"""What a training step is planned for: the model, the layout, the batch, and the software that runs
it. Ridgeline's own is `RIDGELINE`; others stand here because the published measurements that plans
are checked against were made with them.

    setup = TrainSetup(model, Layout.parse("shard=8"), sequence=4096, batch=64, micro=1)
    setup.num_micro         # passes of a rank in a step
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from ridgeline.models import ModelConfig
from ridgeline.parallel.holdings import stage_layers
from ridgeline.parallel.layout import Layout
from ridgeline.training.config import Recomputation

# "scores": all pairs are written out; the others never have them in memory.
AttentionKernel = Literal["scores", "flash", "flash2", "cudnn"]
Units = Literal["bf16", "fp16", "fp8", "fp4", "fp32"]


@dataclass(frozen=True)
class Stack:
    """How a step is executed, as far as it changes what the step takes."""

    name: str
    attention: AttentionKernel = "cudnn"
    passes: float = 1.0  # over element-wise tensors; 1: everything between products is fused
    reduce_bytes: int = 4  # of an element of a gradient that is summed over ranks
    shards_optimizer: bool = False  # over all ranks that replicate (ZeRO-1)
    hides_data: bool = True  # sums of gradients and gathers run beside passes
    hides_tensor: float = 0.0  # share of tensor parallel's messages that hides in products
    splits_sends: bool = False  # ranks of `tensor` share what stages send, whatever else they do
    waits_for_sends: bool = False  # a stage computes nothing while it sends and receives
    gathers_each_pass: bool = True  # with `shard`: weights, and gradients summed, in every pass
    regathers: bool = True  # with `shard`: weights are let go between forward and backward
    has_dropout: bool = False  # masks are kept
    gradient_bytes: int = 4  # of a weight's gradient as it is kept over passes
    adds_in_products: bool = False  # a gradient's product adds to the sum that it belongs to
    master_bytes: float = 12.0  # of a weight: what the optimizer keeps beside it
    fuses_loss: bool = True  # logits of all rows are never there at once
    logit_copies: float = 0.0  # bytes of each logit, where they are
    launch_s: float = 0.0  # of each kernel, where the host waits for it before the next
    slowness: float = 1.0  # of all it computes: a mode that is known to be slower
    is_full_attention: bool = False  # pairs that cannot see each other are computed too
    joins_rows: bool = False  # a token goes to a node once, however many of its experts are there
    even_stages: bool = True  # as many layers on each; else cut by what layers and head cost


FP32_MOMENTS = 8  # bytes of a weight's two
RIDGELINE = Stack(
    "ridgeline", master_bytes=6.0, even_stages=False
)  # 16 bits that bf16 lacks, moments in bf16


@dataclass(frozen=True)
class TrainSetup:
    """One candidate of a search, or one published measurement."""

    model: ModelConfig
    layout: Layout
    sequence: int  # tokens
    batch: int  # sequences of a step, over all ranks
    micro: int  # sequences of a pass
    recomputation: Recomputation = "none"
    units: Units = "bf16"
    stack: Stack = RIDGELINE
    # Share of the layers' products that the backward pass computes again; None: as the level says.
    products_again: float | None = None
    scores_again: bool = False  # attention's core alone is computed again
    device: Literal["cuda", "cpu"] = "cuda"  # what ranks run on

    @property
    def num_micro(self) -> int:
        return max(1, self.batch // (self.layout.size_of("data") * self.micro))

    @property
    def element_bytes(self) -> int:
        """Of an activation, and of a weight that is gathered."""
        return 4 if self.units == "fp32" else 2

    @property
    def optimizer_bytes(self) -> float:
        """Of a weight: what the optimizer reads and writes of it, of its gradient and of what is
        kept beside it. In fp32 nothing stands for bits that a weight lacks, and moments are whole;
        in fp16 our weights are copies of such ones.
        """
        gradient = 2 * self.stack.gradient_bytes
        if self.units == "fp32":
            return gradient + 2 * (4 + FP32_MOMENTS)
        if self.units == "fp16" and self.stack.name == RIDGELINE.name:
            return gradient + 2 * (4 + FP32_MOMENTS) + 4 + 2
        return gradient + 2 * (2 + self.stack.master_bytes)

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.batch * self.sequence

    @property
    def micro_tokens(self) -> int:
        """Of a pass, on one rank."""
        return self.micro * self.sequence // self.layout.context

    @property
    def cuts(self) -> tuple[range, ...]:
        """Layers of each stage."""
        model, count = self.model, self.layout.num_stages
        if not self.stack.even_stages:
            return stage_layers(model, count)
        if model.num_layers % count and (model.num_layers + 2) % count == 0:
            # The embedding and the head count as a layer each.
            each = (model.num_layers + 2) // count
            ends = [0, *(n * each - 1 for n in range(1, count)), model.num_layers]
        else:
            ends = [round(n * model.num_layers / count) for n in range(count + 1)]
        return tuple(range(low, high) for low, high in pairwise(ends))
