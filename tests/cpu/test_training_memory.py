"""Training's memory plan: a step's peak against what torch's allocator reports, what the plan
chooses, and remedies against the plan that follows them.

The CPU runs the plain ops. For a GPU, where an op allocates its results and little else, ops that
do just that stand in.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from allocations import allocations
from packed import draw, pack
from torch import Tensor

from ridgeline.errors import OutOfMemoryError
from ridgeline.hardware.units import human_bytes
from ridgeline.kernels import host_library
from ridgeline.kernels import linear_cross_entropy as cross_entropy
from ridgeline.kernels.adamw import AdamWUpdate
from ridgeline.models import ModelConfig, Transformer
from ridgeline.models.families import describe_hf
from ridgeline.models.shapes import SHAPES, describe_shape
from ridgeline.models.training_cost import LEVELS
from ridgeline.models.transformer import build_model, fill_random
from ridgeline.training.config import BatchOptions, DataOptions, OptimizerOptions, TrainConfig
from ridgeline.training.memory.plan import (
    TrainingMemory,
    choices,
    itemise,
    plan_training,
    step_size,
)
from ridgeline.training.memory.step import peak
from ridgeline.training.stepping import forward
from ridgeline.training.stepping.ops import PlainOps
from ridgeline.training.stepping.step import Trainer

GIB = 2**30
H200 = 139 * GIB
LENGTH = 128
SMALL: dict[str, Any] = SHAPES["tiny"] | {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
}
ONE = TrainConfig(
    precision="fp32",
    data=DataOptions(sequence_length=LENGTH),
    batch=BatchOptions(sequences=4, micro=4),
)


def small(**changes: Any) -> Transformer:
    config = describe_hf(SMALL | changes, origin="small").config
    return fill_random(build_model(config, torch.float32, "cpu"))


def measured(model: Transformer, config: TrainConfig, ops: Any = None) -> int:
    """What a step allocates beyond weights and moments; gradient sums stay from step to step."""
    trainer = Trainer(model, config, ops=ops)
    assert config.batch.micro is not None
    passes = config.batch.sequences // config.batch.micro
    documents = [LENGTH] * config.batch.micro
    batches = [pack(*draw(*documents, vocab=1000, seed=seed)) for seed in range(passes)]
    trainer.step(batches, 1e-4)
    sums = step_size(model.config, config, "cpu").sums
    return allocations(lambda: trainer.step(batches, 1e-4)).peak_bytes + sums


@pytest.fixture(autouse=True)
def without_compiled_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are for a machine without a compiler: passes in C++ take less."""
    monkeypatch.setattr(host_library, "_loaded", {})


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("precision", "micro"), [("fp32", 4), ("bf16", 2)])
def test_a_cpus_peak(level: Any, precision: Any, micro: int) -> None:
    model = small(tie_word_embeddings=micro == 2)
    batch = BatchOptions(sequences=4, micro=micro)
    config = replace(ONE, precision=precision, recomputation=level, batch=batch)
    expected = peak(step_size(model.config, config, "cpu")).num_bytes
    assert measured(model, config) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    ("precision", "level", "micro"),
    [
        ("bf16", "none", 4),
        ("fp32", "blocks", 2),
        pytest.param("fp32", "none", 4, marks=pytest.mark.slow),
        pytest.param("bf16", "attention", 2, marks=pytest.mark.slow),
        pytest.param("bf16", "blocks", 4, marks=pytest.mark.slow),
    ],
)
def test_a_cpus_experts(precision: Any, level: Any, micro: int) -> None:
    """All that autograd keeps of them; what it holds of a block made again is less than planned."""
    mixture = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8}
    model = small(**mixture, num_experts_per_tok=2, num_hidden_layers=2, tie_word_embeddings=False)
    batch = BatchOptions(sequences=4, micro=micro)
    config = replace(ONE, precision=precision, recomputation=level, batch=batch)
    expected = peak(step_size(model.config, config, "cpu")).num_bytes
    least = 0.8 if level == "blocks" else 0.98
    assert least * expected < measured(model, config) < 1.05 * expected


@pytest.mark.skipif(host_library.find_compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_compiled_passes_take_no_more_than_is_planned(
    precision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    assert host_library.prepare()
    for level in LEVELS:
        model = small(tie_word_embeddings=True)
        config = replace(ONE, precision=precision, recomputation=level)
        assert measured(model, config) <= peak(step_size(model.config, config, "cpu")).num_bytes


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_norms_of_heads_and_of_results_are_counted(family: str) -> None:
    """Query and key norms, norms behind each half, and a soft-cap."""
    from test_cost import tiny

    model = tiny(family)
    config = replace(ONE, recomputation="none")
    expected = peak(step_size(model.config, config, "cpu")).num_bytes
    documents = pack(*draw(*[LENGTH] * 4, vocab=model.config.vocab_size))
    trainer = Trainer(model, config)
    trainer.step([documents], 1e-4)
    taken = allocations(lambda: trainer.step([documents], 1e-4)).peak_bytes
    assert taken == pytest.approx(expected, rel=0.1)


class ResultsAlone(PlainOps):
    """As kernels allocate: results, and nothing on the way."""

    def norm(self, x_TD: Tensor, gain: Any, residual_TD: Tensor | None) -> tuple[Tensor, Tensor]:
        if residual_TD is None:
            return torch.zeros_like(x_TD), x_TD
        return torch.zeros_like(x_TD), torch.zeros_like(x_TD)

    def norm_backward(
        self, hidden_TD: Tensor, gain: Any, grad_TD: Tensor, grad_hidden_TD: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(hidden_TD), torch.zeros_like(gain.weight_D)

    def activation(self, gate_up_T2F: Tensor, kind: Any) -> Tensor:
        return torch.zeros(len(gate_up_T2F), gate_up_T2F.shape[1] // 2)

    def activation_backward(
        self, gate_up_T2F: Tensor, grad_TF: Tensor, kind: Any, remakes: bool = False
    ) -> Tensor:
        return torch.zeros_like(gate_up_T2F)

    def rotate(
        self, x_TNH: Tensor, angles: Any, inverse: bool = False, out: Tensor | None = None
    ) -> Tensor:
        return torch.zeros_like(x_TNH) if out is None else out.zero_()


class AttentionAlone(torch.autograd.Function):
    """Keeps its inputs, its result and a sum a head; sums the queries' gradient in fp32."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # type: ignore[override]
        out = torch.zeros(q.shape)
        ctx.save_for_backward(q, k, v, out, torch.zeros(q.shape[:2]))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        q, k, v, _, _ = ctx.saved_tensors
        summed = torch.zeros(q.shape)
        result = tuple(torch.zeros(each.shape) for each in (q, k, v))
        del summed
        return result


def losses_alone(logits: Tensor, targets: Tensor, losses: Tensor, *rest: Any) -> None:
    losses.fill_(1.0)


def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """For attention, the loss and the optimizer of a GPU."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **more: Any) -> Any:
        return AttentionAlone.apply(q, k, v)

    def update(self: AdamWUpdate, *rest: Any) -> Tensor:
        return torch.zeros((), dtype=torch.int64)

    monkeypatch.setattr(forward, "document_attention", attend)
    monkeypatch.setattr(cross_entropy, "plain_row_losses", losses_alone)
    monkeypatch.setattr(AdamWUpdate, "_on_host", update)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("micro", [4, 2])
def test_a_gpus_peak(level: Any, micro: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins(monkeypatch)
    model = small(intermediate_size=192)
    batch = BatchOptions(sequences=4, micro=micro)
    config = replace(ONE, recomputation=level, batch=batch)
    expected = peak(step_size(model.config, config, "cuda")).num_bytes
    with torch.backends.mkldnn.flags(enabled=False):  # which makes a result twice
        taken = measured(model, config, ResultsAlone())
    assert taken == pytest.approx(expected, rel=0.02)


def shape(name: str) -> ModelConfig:
    return describe_shape(name).config


def order(length: int = 4096, sequences: int = 8, **more: Any) -> TrainConfig:
    return TrainConfig(
        precision=more.pop("precision", "bf16"),
        data=DataOptions(sequence_length=length),
        batch=BatchOptions(sequences=sequences, micro=more.pop("micro", None)),
        **more,
    )


def test_what_is_kept_from_step_to_step() -> None:
    """8B parameters: 2 bytes each for weights, remainders and one of two means; the sums of several
    passes are in fp32.
    """
    plan = itemise(shape("llama-3.1-8b"), order(micro=1, recomputation="blocks"), "cuda:0", H200)
    sizes = {item.name: item.num_bytes / 8.03e9 for item in plan.items}
    for name, expected in {"weights": 2, "remainders": 2, "moments": 4, "gradients": 4.1}.items():
        assert sizes[name] == pytest.approx(expected, rel=0.03), name
    assert "masters" not in sizes
    half = itemise(shape("llama-3.1-8b"), order(micro=1, recomputation="blocks", precision="fp16"),
                   "cuda:0", H200)  # fmt: skip
    sizes = {item.name: item.num_bytes / 8.03e9 for item in half.items}
    assert (sizes["masters"], sizes["moments"]) == (pytest.approx(4, 0.01), pytest.approx(8, 0.01))


@pytest.mark.parametrize(
    ("name", "sequences", "length"),
    [
        ("llama-3.2-1b", 8, 4096),
        ("llama-3.2-3b", 8, 4096),
        ("llama-3.1-8b", 4, 4096),
        ("smollm2-135m", 32, 2048),
    ],
)
def test_an_h200_trains_what_is_promised(name: str, sequences: int, length: int) -> None:
    plan = plan_training(shape(name), order(length, sequences), "cuda:0", H200)
    assert plan.fits
    assert plan.config.batch.micro is not None
    assert plan.config.recomputation != "auto"
    assert plan.config.batch.micro * length <= 16_384
    if name == "llama-3.2-1b":
        assert (plan.config.recomputation, plan.config.batch.micro) == ("none", 4)


@pytest.mark.parametrize(
    ("config", "allocated_gib"),
    [
        (order(recomputation="elementwise", micro=8), 36.68),
        (order(recomputation="elementwise", micro=4), 28.56),
        (order(recomputation="none", micro=8), 48.68),
        (order(recomputation="none", micro=4), 34.56),
        (order(recomputation="none", micro=8, precision="fp8"), 45.49),
        (
            order(
                recomputation="elementwise",
                micro=8,
                precision="fp8",
                fp8_weight_gradients="bf16",
            ),
            38.49,
        ),
    ],
)
def test_tensors_take_what_was_allocated_on_an_h200(
    config: TrainConfig, allocated_gib: float
) -> None:
    """`max_memory_allocated` of the record of 2026-11-18. What the allocator reserved beyond it,
    0.3 to 7.5%, is not predicted to that: results/LOG.md.
    """
    plan = itemise(shape("llama-3.2-1b"), config, "cuda:0", H200)
    slack = sum(item.num_bytes for item in plan.items if item.name == "allocator")
    assert (plan.reserved_bytes - slack) / GIB == pytest.approx(allocated_gib, rel=0.01)


def test_less_memory_means_more_recomputation_and_then_smaller_passes() -> None:
    model, config = shape("llama-3.2-1b"), order()
    chosen = []
    for free in (60, 34, 30, 27, 24, 22, 21, 20, 19):
        try:
            plan = plan_training(model, config, "cuda:0", free * GIB)
        except OutOfMemoryError:
            break
        tokens = (plan.config.batch.micro or 0) * 4096
        chosen.append((plan.config.recomputation, tokens))
        assert plan.used_bytes <= free * GIB
    assert chosen[0] == ("none", 16_384)
    levels = [LEVELS.index(level) for level, _ in chosen]
    assert levels == sorted(levels)
    assert len(set(chosen)) >= 3


def test_what_is_named_stays() -> None:
    config = order(micro=2, recomputation="attention")
    assert list(choices(config, "cuda")) == [config]
    odd = order(length=3000, sequences=6)
    sizes = {each.batch.micro for each in choices(odd, "cuda")}
    assert sizes == {3, 2, 1}  # divisors of the batch, at most 16,384 tokens


def remedy_of(config: TrainConfig, model: ModelConfig, free: int) -> tuple[str, TrainConfig]:
    """The line, and the config with what it says, read as a user would type it."""
    with pytest.raises(OutOfMemoryError) as error:
        plan_training(model, config, "cuda:0", free)
    line = str(error.value)
    advice = line.rpartition("; ")[2]
    flags = dict(re.findall(r"use (--[a-z-]+) (\S+)", advice))
    changed = config
    if "leave --micro-batch out" in advice:
        changed = replace(changed, batch=replace(changed.batch, micro=None))
    if "leave --recomputation out" in advice:
        changed = replace(changed, recomputation="auto")
    edits: dict[str, Any] = {
        "--recomputation": lambda c, v: replace(c, recomputation=v),
        "--micro-batch": lambda c, v: replace(c, batch=replace(c.batch, micro=int(v))),
        "--batch": lambda c, v: replace(c, batch=replace(c.batch, sequences=int(v))),
        "--precision": lambda c, v: replace(c, precision=v),
        "--moments": lambda c, v: replace(c, optimizer=OptimizerOptions(moments=v)),
        "--sequence-length": lambda c, v: replace(c, data=DataOptions(sequence_length=int(v))),
    }
    for flag, value in flags.items():
        changed = edits[flag](changed, value)
    return line, changed


@pytest.mark.parametrize(
    ("name", "config", "free"),
    [
        ("llama-3.2-1b", order(recomputation="none", micro=8), 40),
        ("llama-3.2-1b", order(recomputation="blocks", micro=8), 18),
        ("llama-3.2-1b", order(precision="fp32"), 21),
        ("llama-3.1-8b", order(), 86),
        ("llama-3.2-1b", order(length=65_536, sequences=1), 19),
        ("llama-3.1-8b", order(precision="fp32"), 90),
    ],
)
def test_a_remedy_was_planned_and_fits(name: str, config: TrainConfig, free: int) -> None:
    line, changed = remedy_of(config, shape(name), free * GIB)
    for item in ("weights", "moments", "activations", "workspace", "libraries"):
        assert re.search(rf"{item} [\d.]+ [KMGT]iB", line), line
    assert f"{free} GiB are free" in line
    assert changed != config, line
    plan = plan_training(shape(name), changed, "cuda:0", free * GIB)
    assert plan.fits


def test_where_nothing_helps_the_line_says_how_much_would() -> None:
    with pytest.raises(OutOfMemoryError, match="no setting helps") as error:
        plan_training(shape("llama-3.1-70b"), order(), "cuda:0", 40 * GIB)
    assert re.search(r"a device with [\d.]+ GiB free", str(error.value))


def test_items_add_up() -> None:
    plan = plan_training(shape("llama-3.2-1b"), order(), "cuda:0", H200)
    assert isinstance(plan, TrainingMemory)
    assert plan.used_bytes == sum(item.num_bytes for item in plan.items)
    assert plan.used_bytes - plan.reserved_bytes == 768 << 20
    assert human_bytes(plan.used_bytes).endswith("GiB")
