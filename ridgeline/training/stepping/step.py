"""One training step: forward and backward over micro-batches, then clip and update in one pass.

The loss is the sum over every counted token of the whole batch, divided by how many there are: a
batch gives the same gradients however it is cut into micro-batches. The division is part of the
optimizer's pass. On a GPU nothing here waits for the device: what a step found out is read later,
from the result.

    trainer = Trainer(model, config)
    result = trainer.step(batches, lr=1e-4)
    result.loss, result.gradient_norm
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from ridgeline.data.loading.packing import PackedBatch
from ridgeline.errors import NumericsError, UsageError
from ridgeline.kernels.document_attention import AttentionPath
from ridgeline.models import ModelConfig, Transformer
from ridgeline.parallel.mesh import Axis
from ridgeline.training.config import TrainConfig
from ridgeline.training.loss import head_loss
from ridgeline.training.methods.rounded import RoundedWeights
from ridgeline.training.stepping.captured import (
    Capture,
    CapturedPasses,
    PassGradients,
    capture_pass,
)
from ridgeline.training.stepping.cut import MatrixCut
from ridgeline.training.stepping.distillation import Teacher
from ridgeline.training.stepping.experts import ExpertCut
from ridgeline.training.stepping.forward import ForwardPlan, hidden_states, loss_of
from ridgeline.training.stepping.fp8 import Fp8Plan, Fp8Weights
from ridgeline.training.stepping.gradients import GradientSum, scale_of
from ridgeline.training.stepping.ops import TrainingOps, ops_for
from ridgeline.training.stepping.optimizer import Optimizer
from ridgeline.training.stepping.precision import PRECISIONS, LossScale, Weights, check_precision
from ridgeline.training.stepping.sharing import ALONE, Sharing

WholePass = Callable[[Transformer, PackedBatch, ForwardPlan], Tensor]


@dataclass(frozen=True)
class StepLimits:
    """A step beyond them changes nothing, nor does one whose numbers are not finite."""

    loss: float = math.inf
    norm: float = math.inf


@dataclass(frozen=True)
class StepResult:
    """Reading a number waits for the step, if the device is not done with it."""

    num_tokens: int  # that were counted
    num_weights: int  # that the optimizer could change
    numbers: Tensor  # on the host: loss, gradient norm, lost updates, whether it is a bad step
    copied: torch.cuda.Event | None = None  # when they are there; None: they are
    may_overflow: bool = False  # with a loss scale: such a step is left out, and the scale halved

    @cached_property
    def _read(self) -> list[float]:
        if self.copied is not None:
            self.copied.synchronize()
        values: list[float] = self.numbers.tolist()
        return values

    @property
    def is_ready(self) -> bool:
        return self.copied is None or self.copied.query()

    @property
    def loss(self) -> float:
        """Mean over the counted tokens, before the update."""
        return self._read[0]

    @property
    def gradient_norm(self) -> float:
        """Before clipping."""
        return self._read[1]

    @property
    def lost_share(self) -> float:
        """Of all weights: those whose update rounding threw away."""
        return self._read[2] / self.num_weights

    @property
    def is_bad(self) -> bool:
        """Beyond the step's limits, or not numbers: nothing was changed."""
        return bool(self._read[3])

    def check(self) -> None:
        """That the step had numbers; where it had none it changed nothing."""
        if not self.may_overflow and not math.isfinite(self.gradient_norm):
            raise NumericsError(not_numbers(self.loss))


@dataclass(frozen=True)
class TrainerProgress:
    """What a trainer knows besides its tensors."""

    updates: int = 0  # steps that changed the weights
    loss_scale: float | None = None
    good_steps: int = 0  # since the loss scale changed


@dataclass(frozen=True)
class StepMode:
    """How steps run, whatever the weights are kept as."""

    forward: ForwardPlan
    uses_tf32: bool
    captured: CapturedPasses | None  # passes as graphs


class Trainer:
    """A model with what learning it takes. `parameters` are those that are learned, by default
    all.
    """

    def __init__(
        self,
        model: Transformer,
        config: TrainConfig,
        parameters: Mapping[str, nn.Parameter] | None = None,
        ops: TrainingOps | None = None,
        *,
        rounded: RoundedWeights | None = None,
        teacher: Transformer | None = None,
        weights: Weights | None = None,
        sharing: Sharing = ALONE,
        cut: MatrixCut | None = None,
        context: Axis | None = None,
        experts: ExpertCut | None = None,
        sums: GradientSum | None = None,
    ) -> None:
        assert config.precision != "auto", "with_auto comes first"
        device = next(model.parameters()).device
        if ops is None:
            check_precision(config.precision, str(device))
        plan = PRECISIONS[config.precision].with_moments(config.optimizer.moments)
        self.model = model.train()
        self._is_halted = torch.zeros((), dtype=torch.bool, device=device)
        self.weights = weights or Weights(parameters or dict(model.named_parameters()), plan)
        self.sharing = sharing
        self._cut, self._context, self._experts = cut, context, experts
        self._num_weights = sharing.num_weights(self.weights.num_elements)
        self.optimizer = Optimizer(self.weights, config.optimizer, config.seed)
        self.loss_scale = LossScale() if plan.scales_loss else None
        self.max_norm = config.optimizer.max_norm
        self.rounded = rounded
        self._sums = sums or GradientSum(self.weights.parameters)
        self.mode = self.mode_of(config, ops)
        self._teacher = None
        if teacher is not None:
            plan_of = ForwardPlan(self.mode.forward.ops, deterministic=config.deterministic)
            self._teacher = Teacher(teacher, plan_of, config.distill.weight)
        # Called once, with the gradients and what makes them those of the mean.
        self.before_update: Callable[[Mapping[str, Tensor], float], None] | None = None

    def mode_of(
        self,
        config: TrainConfig,
        ops: TrainingOps | None = None,
        attention: AttentionPath | None = None,
        capture: Capture = capture_pass,
    ) -> StepMode:
        """Steps as this config orders, with the weights there are: `trainer.mode = mode` runs them.
        What the weights are kept as cannot change.
        """
        plan = PRECISIONS[config.precision].with_moments(config.optimizer.moments)
        kept = self.weights.plan
        assert (plan.dtype, plan.format) == (kept.dtype, kept.format), config.precision
        fp8 = None
        if plan.fp8 is not None:
            fp8 = Fp8Plan(Fp8Weights(), plan.fp8, config.fp8_weight_gradients == "bf16")
        # Without a memory plan, which would have chosen, everything is kept.
        recomputation = "none" if config.recomputation == "auto" else config.recomputation
        forward = ForwardPlan(
            ops or ops_for(self._is_halted.device, config.compile),
            recomputation,
            config.deterministic,
            fp8,
            self.rounded,
            attention,
            self._cut,
            self._context,
            self._experts,
        )
        captured = None
        if config.graphs:
            captured = CapturedPasses(
                self._pass_alone, config.data.sequence_length, capture=capture
            )
        return StepMode(forward, plan.uses_tf32, captured)

    @property
    def teacher_config(self) -> ModelConfig | None:
        return None if self._teacher is None else self._teacher.model.config

    @property
    def progress(self) -> TrainerProgress:
        scale = self.loss_scale
        if scale is None:
            return TrainerProgress(self.optimizer.num_steps)
        return TrainerProgress(self.optimizer.num_steps, scale.value, scale.num_good)

    @progress.setter
    def progress(self, progress: TrainerProgress) -> None:
        self.optimizer.num_steps = progress.updates
        if self.loss_scale is not None and progress.loss_scale is not None:
            self.loss_scale = LossScale(progress.loss_scale, progress.good_steps)

    def step(
        self, batches: Sequence[PackedBatch], lr: float, limits: StepLimits | None = None
    ) -> StepResult:
        """Learn one batch, given as its micro-batches. Where the result is not a number, nothing is
        changed; on a CPU that is an error at once, on a GPU when the result is checked.

        With limits, a bad step is none of the two: it changes nothing, and neither does any step
        behind it before `go_on` is called. Whoever reads the result finds the weights as they were.
        """
        with tf32_products(self.mode.uses_tf32):
            loss, count, gradients = self._accumulate(batches)
            factor = self._factor(count)
            loss, norm = self.sharing.totals(loss, gradients)
            norm = norm * factor
            if limits is None:
                self._check_at_once(loss / count, norm)
            is_bad = self._is_bad(loss / count, norm, limits or StepLimits())
            if limits is not None:
                self._is_halted |= is_bad
            lost = self.sharing.sum_of(self._update(gradients, lr, norm, factor))
            self._forget_codes()
            if self.rounded is not None:
                self.rounded.forget()
        return self._result(
            torch.stack((loss / count, norm, lost.to(norm), is_bad.to(norm))), count
        )

    def go_on(self) -> None:
        """Steps change weights again."""
        self._is_halted.zero_()

    def _is_bad(self, loss: Tensor, norm: Tensor, limits: StepLimits) -> Tensor:
        """On the device. Overflows of fp16 are usual, and not bad."""
        is_beyond = (loss > limits.loss) | (norm > limits.norm)
        if self.loss_scale is not None:
            return is_beyond & norm.isfinite()
        return is_beyond | ~norm.isfinite() | ~loss.isfinite()

    def _check_at_once(self, loss: Tensor, norm: Tensor) -> None:
        if norm.device.type == "cpu" and self.loss_scale is None and not norm.isfinite():
            raise NumericsError(not_numbers(loss.item()))

    def _update(
        self, gradients: Mapping[str, Tensor], lr: float, norm: Tensor, factor: float
    ) -> Tensor:
        """Returns how many updates were lost in rounding."""
        if self.before_update is not None:
            self.before_update(gradients, factor)
            self.before_update = None
        if self.loss_scale is not None:  # in fp16 overflows are usual: the host has to know
            is_finite = bool(norm.isfinite())
            self.loss_scale.after(is_finite)
            if not is_finite:
                return torch.zeros_like(norm)
        scale = scale_of(norm, factor, self.max_norm)
        scale = torch.where(self._is_halted, torch.nan, scale)
        return self.optimizer.step(gradients, lr, scale)

    def _result(self, numbers: Tensor, count: int) -> StepResult:
        num_weights, may_overflow = self._num_weights, self.loss_scale is not None
        if not numbers.is_cuda:
            return StepResult(count, num_weights, numbers, None, may_overflow)
        host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        host.copy_(numbers, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return StepResult(count, num_weights, host, copied, may_overflow)

    def _factor(self, count: int) -> float:
        """From what the backward passes leave to gradients of the mean."""
        return 1.0 / (count if self.loss_scale is None else self.loss_scale.value)

    def _accumulate(self, batches: Sequence[PackedBatch]) -> tuple[Tensor, int, dict[str, Tensor]]:
        """The summed loss, the counted tokens, and gradients of the sum: of the scaled mean where
        the loss is scaled.
        """
        count = self.sharing.total_count(sum(batch.num_targets for batch in batches))
        if count == 0:
            raise UsageError(
                "no token of this batch has a target that counts: there is nothing to learn; "
                "check that the data has text to learn (an assistant's, or a completion)"
            )
        seed = 1.0 if self.loss_scale is None else self.loss_scale.value / count
        total, gradients = self._run_passes(batches, seed)
        return total, count, gradients

    def run_passes(self, batches: Sequence[PackedBatch]) -> dict[str, Tensor]:
        """Gradients of the summed loss, and nothing that the host would wait for."""
        return self._run_passes(batches, 1.0)[1]

    def _run_passes(
        self, batches: Sequence[PackedBatch], seed: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        total, gradients = self._run(batches, seed)
        self.sharing.finish(gradients)
        if self.rounded is not None:
            self.rounded.finish(gradients)
        return total, gradients

    def _run(self, batches: Sequence[PackedBatch], seed: float) -> tuple[Tensor, dict[str, Tensor]]:
        """All passes: the summed loss, and gradients of it times `seed`."""
        self._sums.begin(len(batches))
        total = torch.zeros((), device=batches[0].ids.device)
        gradients: dict[str, Tensor] = {}
        for batch in batches:
            if self.mode.captured is None:
                total += self._pass(batch, seed)
            else:
                loss, gradients = self.mode.captured.run(batch)
                total += loss
        if self.mode.captured is None:
            gradients = self._sums.take()
        return total, gradients

    def _pass(self, batch: PackedBatch, seed: float) -> Tensor:
        """Forward and backward; the summed loss."""
        loss = self.learned_loss(batch)
        (loss if seed == 1.0 else loss * seed).backward()
        self._sums.add()
        return loss.detach()

    def _pass_alone(self, batch: PackedBatch) -> PassGradients:
        """For a graph: it makes weights' codes itself and leaves none, since the next time it is
        replayed they are those of other weights.
        """
        assert self.loss_scale is None, "check_graphs"
        self._forget_codes()
        loss = self._pass(batch, 1.0)
        self._forget_codes()
        return PassGradients(loss, self._sums.take())

    def _forget_codes(self) -> None:
        if self.mode.forward.fp8 is not None:
            self.mode.forward.fp8.weights.forget()

    def gradients(self, batches: Sequence[PackedBatch]) -> tuple[float, int, dict[str, Tensor]]:
        """Loss, counted tokens, and the gradient of every parameter, as far as it lies on this
        rank, in fp32; nothing is changed.
        """
        loss, count, sums = self._accumulate(batches)
        factor = self._factor(count)
        loss, _ = self.sharing.totals(loss, sums)
        return (
            (loss / count).item(),
            count,
            {name: each.float() * factor for name, each in sums.items()},
        )

    def loss_and_norm(self, batches: Sequence[PackedBatch]) -> tuple[float, float]:
        """As a step finds them: of the mean, and before clipping; nothing is changed."""
        loss, count, sums = self._accumulate(batches)
        loss, norm = self.sharing.totals(loss, sums)
        return (loss / count).item(), norm.item() * self._factor(count)

    def learned_loss(self, batch: PackedBatch) -> Tensor:
        """What is made smaller: with a teacher the divergence from it, or a mixture with `loss`."""
        if self._teacher is None:
            return self.loss(batch)
        return self._whole_pass(self._taught_loss, batch)

    def _taught_loss(self, model: Transformer, batch: PackedBatch, plan: ForwardPlan) -> Tensor:
        assert self._teacher is not None, "learned_loss"
        hidden_TD = hidden_states(model, batch, plan)
        share = self._teacher.weight
        loss = self._teacher.divergence(model, hidden_TD, batch)
        if share == 1.0:
            return loss
        return share * loss + (1 - share) * head_loss(model, hidden_TD, batch.targets)

    def loss(self, batch: PackedBatch) -> Tensor:
        """Of the text, summed over the batch's counted tokens."""
        return self._whole_pass(loss_of, batch)

    def _whole_pass(self, run: WholePass, batch: PackedBatch) -> Tensor:
        """By the model's own `training_loss`, where it has one that gathers weights first."""
        own: Callable[..., Tensor] | None = getattr(self.model, "training_loss", None)
        if own is None:
            return run(self.model, batch, self.mode.forward)
        return own(run, batch, self.mode.forward)


def not_numbers(loss: float) -> str:
    return f"the gradients of this step are not numbers (loss {loss:.4g})"


@contextmanager
def tf32_products(are_wanted: bool) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    if not are_wanted:
        yield
        return
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
