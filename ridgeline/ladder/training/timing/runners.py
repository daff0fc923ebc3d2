"""Loaded models that run steps of forms: forms that keep their weights in the same way share one.
With a learning rate of 0 weights stay what they are, so that every form can be held to the same
loss, while a step does all of its work.

    runner = open_runner(subject, form, "cpu")
    runner.use(form)
    runner.step(batches)().loss         # reading it waits for the device
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from ridgeline.data.loading.packing import PackedBatch
from ridgeline.kernels.document_attention import AttentionPath
from ridgeline.ladder.training.forms import StepNumbers, TrainForm
from ridgeline.ladder.training.subject import TrainSubject
from ridgeline.models import Transformer
from ridgeline.training.config import TrainConfig
from ridgeline.training.loss import head_loss, plain_loss
from ridgeline.training.naive import naive_step
from ridgeline.training.stepping.precision import PRECISIONS
from ridgeline.training.stepping.step import StepMode, Trainer

Numbers = Callable[[], StepNumbers]  # of a step that was launched: waits for it


class StepRunner(Protocol):
    update_s: float  # of a step's time, that its update takes, however many passes it has

    def use(self, form: TrainForm) -> None: ...

    def step(self, batches: Sequence[PackedBatch], lr: float = 0.0) -> Numbers: ...

    def time_update(self) -> None: ...


def weights_key(form: TrainForm) -> str:
    """Forms of one key share their weights."""
    if form.loop != "train":
        return "plain"
    plan = PRECISIONS[form.config.precision].with_moments(form.config.optimizer.moments)
    return f"{plan.dtype} {plan.format}"


def open_runner(subject: TrainSubject, form: TrainForm, device: str) -> StepRunner:
    if form.loop != "train":
        config = replace(form.config, precision="fp32")
        model = subject.source.load(device, config.seed, None)
        return PlainRunner(model, config)
    return TrainerRunner(subject.source.trainer(form.config, device, None, None))


class TrainerRunner:
    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.update_s = 0.0
        self._modes: dict[TrainForm, StepMode] = {}

    def use(self, form: TrainForm) -> None:
        """The last two are kept, which are compared: graphs hold memory."""
        mode = self._modes.pop(form, None)
        if mode is None:
            attention: AttentionPath | None = "defined" if form.plain_attention else None
            mode = self.trainer.mode_of(form.config, attention=attention)
        self._modes = dict([*self._modes.items(), (form, mode)][-2:])
        self.trainer.mode = mode

    def step(self, batches: Sequence[PackedBatch], lr: float = 0.0) -> Numbers:
        result = self.trainer.step(batches, lr)
        return lambda: StepNumbers(result.loss, result.gradient_norm)

    def time_update(self) -> None:
        """Of gradients that are zero: it is the same work."""
        learned = self.trainer.weights.parameters
        gradients = {name: torch.zeros_like(each) for name, each in learned.items()}
        scale = torch.ones((), device=next(iter(gradients.values())).device)
        for _ in range(2):  # the first compiles
            began = time.perf_counter()
            self.trainer.optimizer.step(gradients, 0.0, scale).item()
            self.update_s = time.perf_counter() - began


class PlainRunner:
    """The plain loop, with torch's own AdamW."""

    def __init__(self, model: Transformer, config: TrainConfig) -> None:
        self.model = model.requires_grad_(True)
        options = config.optimizer
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=options.lr,
            betas=(options.beta1, options.beta2),
            eps=options.eps,
            weight_decay=options.weight_decay,
        )
        self.max_norm = options.max_norm
        self.update_s = 0.0
        self._loss = plain_loss

    def use(self, form: TrainForm) -> None:
        self._loss = plain_loss if form.loop == "plain" else head_loss

    def step(self, batches: Sequence[PackedBatch], lr: float = 0.0) -> Numbers:
        loss = naive_step(self.model, self.optimizer, batches, lr, self.max_norm, self._loss)
        return lambda: StepNumbers(loss, None)

    def time_update(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        for _ in range(2):
            began = time.perf_counter()
            self.optimizer.step()
            if self.model.embed.weight.is_cuda:
                torch.cuda.synchronize()
            self.update_s = time.perf_counter() - began
        self.optimizer.zero_grad()
