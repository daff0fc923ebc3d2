"""Training's memory plan for adapters, rounded weights and teachers: a step's peak against what
torch's allocator reports, what lasts against the tensors there are, and through the command.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from allocations import allocations
from command_line import make_folder, refused
from packed import draw, pack
from test_train_plan import free, words
from test_training_memory import (
    GIB,
    H200,
    LENGTH,
    ONE,
    SMALL,
    ResultsAlone,
    order,
    stand_ins,
)
from written_text import TEXT

from ridgeline.cli import main
from ridgeline.errors import OutOfMemoryError
from ridgeline.kernels import host_library
from ridgeline.models import Transformer
from ridgeline.models.families import Description, describe_hf
from ridgeline.models.shapes import describe_shape
from ridgeline.models.training_cost import LEVELS
from ridgeline.models.transformer import build_model, fill_random
from ridgeline.quantization.linear import keep_copies, schemes_of
from ridgeline.quantization.nearest import quantize_nearest
from ridgeline.quantization.scheme import parse_scheme
from ridgeline.training import prepare
from ridgeline.training.config import BatchOptions, TrainConfig
from ridgeline.training.config_file import load_config
from ridgeline.training.memory.methods import TrainingMethod, adapter_size
from ridgeline.training.memory.plan import TrainingMemory, itemise, plan_training, step_size
from ridgeline.training.memory.step import peak
from ridgeline.training.methods.adapters import add_adapters
from ridgeline.training.methods.options import DistillOptions, LoraOptions, QatOptions
from ridgeline.training.methods.rounded import found_roundings
from ridgeline.training.stepping.precision import PRECISIONS
from ridgeline.training.stepping.step import Trainer

Capture = pytest.CaptureFixture[str]
LORA = LoraOptions(rank=8)


def described(**changes: Any) -> Description:
    return describe_hf(SMALL | changes, origin="small")


def filled(description: Description, dtype: torch.dtype = torch.float32) -> Transformer:
    return fill_random(build_model(description.config, dtype, "cpu"))


def measured(trainer: Trainer, config: TrainConfig, sums: int) -> int:
    """What a step allocates; sums of gradients stay from step to step."""
    assert config.batch.micro is not None
    passes = config.batch.sequences // config.batch.micro
    documents = [LENGTH] * config.batch.micro
    batches = [pack(*draw(*documents, vocab=100, seed=seed)) for seed in range(passes)]
    trainer.step(batches, 1e-4)
    return allocations(lambda: trainer.step(batches, 1e-4)).peak_bytes + sums


def adapted(
    description: Description, config: TrainConfig, scheme: str | None = None, ops: Any = None
) -> tuple[Trainer, TrainingMethod]:
    dtype = PRECISIONS[config.precision].dtype
    model = filled(description, dtype)
    if scheme is not None:
        keep_copies(quantize_nearest(model, parse_scheme(scheme)))
    schemes = schemes_of(model)
    learned = add_adapters(model, description, config.lora, seed=0)
    method = TrainingMethod(adapter_size(description, config.lora), schemes)
    return Trainer(model, config, learned, ops=ops), method


@pytest.fixture(autouse=True)
def without_compiled_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are for a machine without a compiler: passes in C++ take less."""
    monkeypatch.setattr(host_library, "_loaded", {})


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("precision", "micro", "targets", "vocab_size"),
    [("fp32", 4, None, 128), ("bf16", 2, None, 1024), ("fp32", 2, "q_proj,v_proj", 1024)],
)
def test_adapters_peak(
    level: Any, precision: Any, micro: int, targets: str | None, vocab_size: int
) -> None:
    """With a small vocabulary in the backward pass, with a larger one in the loss."""
    description = described(vocab_size=vocab_size)
    config = replace(
        ONE,
        precision=precision,
        recomputation=level,
        batch=BatchOptions(sequences=4, micro=micro),
        lora=replace(LORA, targets=targets),
    )
    trainer, method = adapted(description, config)
    size = step_size(description.config, config, "cpu", method)
    assert measured(trainer, config, size.sums) == pytest.approx(peak(size).num_bytes, rel=0.05)


@pytest.mark.parametrize("level", LEVELS)
def test_adapters_peak_on_a_gpu(level: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins(monkeypatch)
    description = described(vocab_size=128, intermediate_size=192)
    config = replace(ONE, recomputation=level, lora=LORA)
    trainer, method = adapted(description, config, ops=ResultsAlone())
    size = step_size(description.config, config, "cuda", method)
    with torch.backends.mkldnn.flags(enabled=False):  # which makes a result twice
        taken = measured(trainer, config, size.sums)
    assert taken == pytest.approx(peak(size).num_bytes, rel=0.05)


@pytest.mark.parametrize("scheme", [None, "int8", "int4-g32", "fp8"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_adapters_keep_from_step_to_step(scheme: str | None, precision: Any) -> None:
    """The base by its scheme; optimizer's tensors for adapters alone."""
    description = described()
    config = replace(ONE, precision=precision, recomputation="none", lora=LORA)
    trainer, method = adapted(description, config, scheme)
    plan = itemise(description.config, config, "cpu", GIB, method)
    frozen = [p for p in trainer.model.parameters() if not p.requires_grad]
    frozen += list(trainer.model.buffers())
    names = ("weights", "copies")
    assert bytes_of(plan, *names) == pytest.approx(unique_bytes(frozen), rel=0.01)
    learned = [p for p in trainer.model.parameters() if p.requires_grad]
    assert bytes_of(plan, "adapters") == unique_bytes(learned)
    kept = unique_bytes([tensor for _, tensor in trainer.weights.tensors()])
    assert bytes_of(plan, "remainders", "moments") == kept


def unique_bytes(tensors: list[Any]) -> int:
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def bytes_of(plan: TrainingMemory, *names: str) -> int:
    return sum(item.num_bytes for item in plan.items if item.name in names)


@pytest.mark.parametrize("scheme", ["int8", "int4-g32", "int4-g32-asym"])
def test_rounded_weights_peak(scheme: str) -> None:
    description = described(intermediate_size=1024)
    config = replace(ONE, recomputation="none", qat=QatOptions(scheme=scheme))
    model = filled(description)
    trainer = Trainer(model, config, rounded=found_roundings(model, parse_scheme(scheme), None))
    plan = itemise(description.config, config, "cpu", GIB)
    held = bytes_of(plan, "rounded weights")
    assert held == sum(4 * each.weight_OD.numel() for each in roundings(trainer))
    size = step_size(description.config, config, "cpu")
    expected = peak(size).num_bytes + held
    assert measured(trainer, config, size.sums) == pytest.approx(expected, rel=0.05)


def roundings(trainer: Trainer) -> list[Any]:
    assert trainer.rounded is not None
    return list(trainer.rounded.roundings.values())


@pytest.mark.parametrize("weight", [1.0, 0.5])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_teachers_peak(weight: float, precision: Any) -> None:
    description = described()
    config = replace(
        ONE, precision=precision, recomputation="none", distill=DistillOptions("big", weight)
    )
    teacher = filled(description, PRECISIONS[config.precision].dtype)
    trainer = Trainer(filled(description), config, teacher=teacher)
    method = TrainingMethod(teacher=description.config)
    size = step_size(description.config, config, "cpu", method)
    assert measured(trainer, config, size.sums) == pytest.approx(peak(size).num_bytes, rel=0.05)
    plan = itemise(description.config, config, "cpu", GIB, method)
    assert bytes_of(plan, "teacher") == unique_bytes(list(teacher.parameters()))


def test_adapters_fit_where_all_weights_do_not() -> None:
    """An 8B model needs 80 GB to be trained, and a fifth of that beside adapters."""
    description = describe_shape("llama-3.1-8b")
    config = order()
    with pytest.raises(OutOfMemoryError):
        plan_training(description.config, config, "cuda:0", 30 * GIB)
    config = replace(config, lora=LoraOptions(rank=16))
    method = TrainingMethod(adapter_size(description, config.lora))
    assert method.adapters is not None
    assert method.adapters.num_parameters == 41_943_040
    plan = plan_training(description.config, config, "cuda:0", 30 * GIB, method)
    assert plan.fits
    scheme = parse_scheme("int4-g128")
    names = ("attn.qkv", "attn.out", "mlp.gate_up", "mlp.down")
    codes = {f"layers.{index}.{name}": scheme for index in range(32) for name in names}
    coded = plan_training(description.config, config, "cuda:0", H200, replace(method, codes=codes))
    assert bytes_of(coded, "weights") < 0.4 * bytes_of(plan, "weights")
    assert not bytes_of(coded, "copies")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"), tie_word_embeddings=True)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text(TEXT[:40_000])
    return path


def needed(out: Path) -> int:
    """What a run takes, by its plan."""
    config = load_config(out)
    source = prepare.model_source(config)
    shape = source.description.config
    source = replace(source, teacher=prepare.teacher_source(config, shape, None))
    return itemise(shape, config, "cpu", 0, source.method(config, "cpu")).used_bytes


@pytest.mark.parametrize(
    "flags",
    [
        ("--lora", "4"),
        ("--lora", "4", "--distill", "MODEL"),
        ("--qat", "int8"),
        ("--distill", "MODEL", "--distill-weight", "0.5"),
    ],
)
def test_every_method_is_planned_and_chosen_for(
    flags: tuple[str, ...],
    model: Path,
    text: Path,
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With recomputation left open; a byte less than the choice takes leads to another."""
    given = [str(model) if flag == "MODEL" else flag for flag in flags]
    first, second = tmp_path / "first", tmp_path / "second"
    assert main([*words(model, text, first, *given), "--json"]) == 0
    chosen = load_config(first)
    assert chosen.recomputation == "none"
    assert chosen.batch.micro == 8
    free(monkeypatch, needed(first) - 1)
    assert main([*words(model, text, second, *given), "--json"]) == 0
    again = load_config(second)
    assert (again.recomputation, again.batch.micro) != ("none", 8)
    free(monkeypatch, 1000)
    name = "teacher" if "--distill" in flags else "weights"
    refused(capsys, OutOfMemoryError, name, *words(model, text, tmp_path / "third", *given))
