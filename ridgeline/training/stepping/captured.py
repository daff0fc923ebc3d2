"""Forward and backward passes as CUDA graphs: the host starts one instead of some hundred kernels,
which counts where a step's kernels are shorter than their launches.

A pass is captured the second time a batch of its shape comes; the first one runs as usual, and
compiles and plans what it needs. Its inputs are copied into memory that stays. Documents of any
lengths share a graph: their starts are padded with empty ones, and attention takes the lengths from
the device. Only the passes are captured: what the optimizer does is some launches for all tensors,
and reads numbers that change from step to step.

    passes = CapturedPasses(run_pass, longest=4096)
    loss, gradients = passes.run(batch)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ridgeline.capture import capture
from ridgeline.data.loading.packing import PackedBatch
from ridgeline.errors import UsageError
from ridgeline.models import ModelConfig
from ridgeline.training.config import TrainConfig
from ridgeline.training.stepping.precision import PRECISIONS

MOST_GRAPHS = 4  # shapes; batches of others run without one
LEAST_DOCUMENTS = 16  # that there is room for; then twice as many each time


class PassGradients(NamedTuple):
    loss: Tensor  # summed, detached
    gradients: dict[str, Tensor]  # by the parameters' names


RunPass = Callable[[PackedBatch], PassGradients]


class Replayed(Protocol):
    def replay(self) -> None: ...


# Of what a pass does: the graph, and what it leaves there each time it is replayed.
Capture = Callable[[Callable[[], PassGradients]], tuple[Replayed, PassGradients]]


@dataclass(frozen=True)
class PassShape:
    """Batches of one shape run the same kernels."""

    num_tokens: int
    room: int  # documents
    lengths: tuple[int, ...] | None  # of documents that are all of one length; None: of any

    @staticmethod
    def of(batch: PackedBatch) -> PassShape:
        lengths = batch.lengths
        if len(set(lengths)) == 1:
            return PassShape(len(batch.ids), len(lengths), lengths)
        room = LEAST_DOCUMENTS
        while room < len(lengths):
            room *= 2
        return PassShape(len(batch.ids), room, None)


class StaticBatch:
    """A batch whose tensors stay where they are."""

    def __init__(self, shape: PassShape, batch: PackedBatch, longest: int) -> None:
        """`longest`: tokens of a sequence, of which no document has more."""
        self.shape = shape
        starts = torch.full_like(batch.starts[:1], shape.num_tokens).expand(shape.room + 1)
        self.batch = PackedBatch(
            torch.empty_like(batch.ids),
            torch.empty_like(batch.targets),
            torch.empty_like(batch.positions),
            starts.clone(),
            is_padded=shape.lengths is None,
        )
        # What the host knows: of documents of any lengths how long they may be.
        whole, rest = divmod(shape.num_tokens, longest)
        bound = (longest,) * whole + ((rest,) if rest else ())
        vars(self.batch).update(lengths=shape.lengths or bound)
        self.fill(batch)

    def fill(self, batch: PackedBatch) -> None:
        own = self.batch
        own.ids.copy_(batch.ids)
        own.targets.copy_(batch.targets)
        own.positions.copy_(batch.positions)
        count = len(batch.starts)
        own.starts[:count].copy_(batch.starts)
        own.starts[count:].fill_(self.shape.num_tokens)


class CapturedPass(NamedTuple):
    graph: Replayed
    static: StaticBatch
    result: PassGradients


def capture_pass(work: Callable[[], PassGradients]) -> tuple[Replayed, PassGradients]:
    """What passes before have left in torch's cache would lie beside the graph's own memory. Other
    threads load data meanwhile.
    """
    torch.cuda.empty_cache()
    return capture(work, own_thread=True)


class CapturedPasses:
    def __init__(self, run: RunPass, longest: int, *, capture: Capture = capture_pass) -> None:
        """`run` leaves nothing behind but its result, and waits for nothing."""
        self._run, self._longest, self._capture = run, longest, capture
        self._graphs: dict[PassShape, CapturedPass] = {}
        self._known: set[PassShape] = set()

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def run(self, batch: PackedBatch) -> PassGradients:
        """The result is valid until the next pass."""
        shape = PassShape.of(batch)
        captured = self._graphs.get(shape)
        if captured is None:
            is_new = shape not in self._known
            self._known.add(shape)
            if is_new or len(self._graphs) == MOST_GRAPHS:
                return self._run(batch)
            captured = self._graphs[shape] = self._captured(shape, batch)
        else:
            captured.static.fill(batch)
        captured.graph.replay()
        return captured.result

    def _captured(self, shape: PassShape, batch: PackedBatch) -> CapturedPass:
        static = StaticBatch(shape, batch, self._longest)
        graph, result = self._capture(lambda: self._run(static.batch))
        return CapturedPass(graph, static, result)


def graphs_problem(config: TrainConfig, model: ModelConfig, device: str) -> str | None:
    """Why passes cannot be captured; None: they can."""
    if device == "cpu":
        return "CUDA graphs need a GPU"
    if config.lora.rank is not None or config.qat.is_given or config.distill.teacher is not None:
        return "graphs are for training of all weights, without adapters, rounding or a teacher"
    plan = PRECISIONS[config.precision]
    if plan.dtype != torch.bfloat16:
        return f"attention over documents of any lengths needs bf16 or fp8, not {config.precision}"
    if any(layer.experts is not None for layer in model.layers):
        return "which experts tokens go to decides what is launched"
    if model.head_dim % 8:
        return f"attention with heads of {model.head_dim} dims runs document by document"
    ropes = {layer.rope for layer in model.layers if layer.rope is not None}
    if any(rope.type == "longrope" for rope in ropes):
        return "the longrope rotation reads numbers from the host"
    return None


def check_graphs(config: TrainConfig, model: ModelConfig, device: str) -> None:
    problem = graphs_problem(config, model, device)
    if problem is not None:
        raise UsageError(f"--graphs cannot be: {problem}; leave it out")
