"""From the names in a config to what a run needs: the model, its batches, where it stands.

prepared = prepare(config, Path("run"), device="cpu", resume=False)
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ridgeline.data import Tokenizer
from ridgeline.data.loading.sources import Quarantine
from ridgeline.data.loading.split import SplitData, split_data
from ridgeline.data.loading.tokenizing import read_tokens
from ridgeline.engine.loading.saved import tokenizer_of
from ridgeline.errors import CheckpointError, UnsupportedError, UsageError
from ridgeline.formats.dtypes import dtype_name
from ridgeline.hardware import detect
from ridgeline.hardware.detection import available_memory
from ridgeline.kernels import host_library
from ridgeline.models import Transformer, build_model
from ridgeline.models.checkpoint import open_checkpoint, resolve_model
from ridgeline.models.config import ModelConfig
from ridgeline.models.families import Description, describe, describe_hf
from ridgeline.models.shapes import SHAPES, describe_shape
from ridgeline.parallel.starting.supervisor import LOGS
from ridgeline.progress import Progress
from ridgeline.quantization import load_model
from ridgeline.quantization.files.fuse import kept_schemes
from ridgeline.quantization.linear import keep_copies
from ridgeline.quantization.load import runnable
from ridgeline.quantization.methods.sparsity import parse_sparsity
from ridgeline.quantization.scheme import parse_scheme
from ridgeline.training.choices import (
    TrainingPace,
    choice_in_words,
    fitted,
    is_open,
    measured_pace,
    with_choices_of,
    with_usual,
)
from ridgeline.training.config import (
    FILE_NAME,
    TrainConfig,
    check_complete,
    differences,
    load_config,
    save_config,
    with_auto,
)
from ridgeline.training.initial import fill_initial
from ridgeline.training.memory.methods import TrainingMethod, adapter_size
from ridgeline.training.memory.plan import TrainingMemory, itemise, plan_training
from ridgeline.training.methods.adapters import add_adapters
from ridgeline.training.methods.rounded import found_roundings
from ridgeline.training.saving.adapter_files import AdapterExporter, read_adapter
from ridgeline.training.saving.checkpoint import (
    Exporter,
    LastWhole,
    SavedState,
    last_whole,
    remove_checkpoint,
    remove_leftovers,
    restore,
)
from ridgeline.training.stepping.captured import check_graphs
from ridgeline.training.stepping.ops import check_compiles
from ridgeline.training.stepping.precision import PRECISIONS, check_precision
from ridgeline.training.stepping.step import Trainer
from ridgeline.training.watching.tensorboard import check_tensorboard

QUARANTINE_NAME = "quarantine.jsonl"
VOCAB_MULTIPLE = 64  # a shape's vocabulary is the tokenizer's, rounded up: products run faster


@dataclass(frozen=True)
class PreparedRun:
    """A run that is ready to take its next step."""

    config: TrainConfig  # nothing is left to "auto"
    device: str
    trainer: Trainer
    data: SplitData
    state: SavedState
    exporter: Exporter | AdapterExporter
    quarantine: Quarantine
    memory: TrainingMemory
    began: float  # when its opening did, by time.perf_counter
    notes: tuple[str, ...] = ()  # what was chosen
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class TeacherModel:
    """The model whose probabilities are learned."""

    path: Path
    config: ModelConfig

    def load(self, dtype: str, device: str, progress: Progress | None) -> Transformer:
        """Frozen."""
        model = load_model(
            self.path, dtype=dtype, device=device, keep_codes=False, progress=progress
        )
        return model.requires_grad_(False)


@dataclass(frozen=True)
class StartingModel:
    """Where weights come from: a checkpoint, or nowhere."""

    description: Description
    tokenizer: Tokenizer | None  # None: for a shape that is only measured
    path: Path | None
    teacher: TeacherModel | None = None

    def method(self, config: TrainConfig, device: str) -> TrainingMethod:
        """What the memory plan has to know of how the model is trained."""
        teacher = None if self.teacher is None else self.teacher.config
        if config.lora.rank is None:
            return TrainingMethod(teacher=teacher)
        assert self.path is not None, "check_complete"
        stored = kept_schemes(open_checkpoint(self.path), self.description)
        codes, _ = runnable(stored, PRECISIONS[config.precision].dtype, device)
        return TrainingMethod(adapter_size(self.description, config.lora), codes, teacher)

    def load(self, device: str, seed: int, progress: Progress | None) -> Transformer:
        """In fp32, whatever is computed in later."""
        if self.path is not None:
            return load_model(self.path, dtype="fp32", device=device, progress=progress)
        return fill_initial(build_model(self.description.config, torch.float32, device), seed)

    def trainer(
        self,
        config: TrainConfig,
        device: str,
        checkpoint: Path | None,
        progress: Progress | None,
    ) -> Trainer:
        """With the weights of a checkpoint of the run, where there is one."""
        if config.lora.rank is not None:
            return self._adapter_trainer(config, device, checkpoint, progress)
        weights = self if checkpoint is None else replace(self, path=checkpoint)
        model = weights.load(device, config.seed, progress)
        rounded = None
        if config.qat.is_given:
            scheme, sparsity = config.qat.scheme, config.qat.sparsity
            rounded = found_roundings(
                model,
                None if scheme is None else parse_scheme(scheme),
                None if sparsity is None else parse_sparsity(sparsity),
            )
        teacher = self._load_teacher(config, device, progress)
        return Trainer(model, config, rounded=rounded, teacher=teacher)

    def _adapter_trainer(
        self,
        config: TrainConfig,
        device: str,
        checkpoint: Path | None,
        progress: Progress | None,
    ) -> Trainer:
        """The base as it is, in the dtype that is computed in, codes as codes."""
        assert self.path is not None, "check_complete"
        dtype = dtype_name(PRECISIONS[config.precision].dtype)
        model = load_model(
            self.path, dtype=dtype, device=device, keep_codes=True, progress=progress
        )
        if device == "cpu":  # decoding takes longer than a product there
            keep_copies(model)
        learned = add_adapters(model, self.description, config.lora, config.seed)
        if checkpoint is not None:
            read_adapter(model, checkpoint)
        teacher = self._load_teacher(config, device, progress)
        return Trainer(model, config, learned, teacher=teacher)

    def _load_teacher(
        self, config: TrainConfig, device: str, progress: Progress | None
    ) -> Transformer | None:
        if self.teacher is None:
            return None
        return self.teacher.load(dtype_name(PRECISIONS[config.precision].dtype), device, progress)

    def exporter(self, config: TrainConfig) -> Exporter | AdapterExporter:
        assert self.tokenizer is not None, "a run has one"
        files = self.tokenizer.files()
        if config.lora.rank is None:
            return Exporter(self.description, files)
        return AdapterExporter(config.lora, str(config.model), files)


@dataclass(frozen=True)
class PlannedRun:
    """What is known of a run before anything is loaded."""

    ordered: TrainConfig
    config: TrainConfig  # with what the memory plan chose
    device: str
    source: StartingModel
    method: TrainingMethod
    memory: TrainingMemory
    data: SplitData
    quarantine: Quarantine
    saved: LastWhole  # where it goes on from
    began: float  # on perf_counter's clock

    @property
    def model(self) -> ModelConfig:
        return self.source.description.config

    @property
    def needs_pace(self) -> bool:
        """Whether anything is left open that the machine's pace decides."""
        return self.ordered.end.minutes is not None and is_open(self.ordered)

    def completed(self, pace: TrainingPace | None) -> tuple[PlannedRun, tuple[str, ...]]:
        """With nothing left open, and what the pace decided in words."""
        usual: tuple[TrainConfig, tuple[str, ...]] = with_usual(self.config), ()
        config, notes = usual if pace is None else self._fitted(pace)
        memory = itemise(self.model, config, self.device, self.memory.free_bytes, self.method)
        return replace(self, config=config, memory=memory), notes

    def _fitted(self, pace: TrainingPace) -> tuple[TrainConfig, tuple[str, ...]]:
        minutes, micro = self.ordered.end.minutes, self.config.batch.micro
        assert minutes is not None, "needs_pace"
        left_s = 60 * minutes - (time.perf_counter() - self.began)
        opened = replace(self.config, batch=self.ordered.batch)
        config = fitted(opened, pace, left_s, micro)
        return config, (choice_in_words(config, pace, left_s),)


def teacher_source(
    config: TrainConfig, student: ModelConfig, progress: Progress | None
) -> TeacherModel | None:
    if config.distill.teacher is None:
        return None
    path = resolve_model(config.distill.teacher, progress=progress)
    teacher = describe(open_checkpoint(path)).config
    vocab_size = teacher.vocab_size
    if vocab_size != student.vocab_size:
        raise UsageError(
            f"--distill {config.distill.teacher} has a vocabulary of {vocab_size:,} tokens, and "
            f"the model has {student.vocab_size:,}; give a teacher with the model's tokenizer"
        )
    return TeacherModel(path, teacher)


def plan_run(
    config: TrainConfig,
    run: Path,
    *,
    device: str = "auto",
    resume: bool = False,
    progress: Progress | None = None,
) -> PlannedRun:
    """All that is refused is refused here; nothing is written and no weight is loaded."""
    began = time.perf_counter()
    check_complete(config)
    if config.tensorboard:
        check_tensorboard()
    device = detect(device).device
    config = with_whole_paths(config)
    if (run / FILE_NAME).is_file():
        config = with_choices_of(config, load_config(run))
    config = with_auto(config, device)
    check_precision(config.precision, device)
    if config.compile:
        check_compiles(device)
    check_run_folder(config, run, resume)
    saved = last_whole(run) if resume else LastWhole(None)
    source = model_source(config, progress)
    model = source.description.config
    check_length(config, model)
    if config.graphs:
        check_graphs(config, model, device)
    source = replace(source, teacher=teacher_source(config, model, progress))
    method = source.method(config, device)
    ordered = config
    memory = plan_training(model, config, device, available_memory(device), method)
    config = memory.config
    assert config.data.path is not None, "check_complete"
    assert source.tokenizer is not None, "model_source"
    tokenized = read_tokens([Path(config.data.path)], source.tokenizer, progress)
    try:
        data = split_data(
            tokenized.store,
            sequence_length=config.data.sequence_length,
            vocab_size=source.description.config.vocab_size,
            held_out=config.data.held_out,
        )
    except UsageError as error:
        if not tokenized.quarantine.count:
            raise
        raise UsageError(f"{error} ({tokenized.quarantine.summary()})") from None
    return PlannedRun(
        ordered, memory.config, device, source, method, memory, data, tokenized.quarantine, saved,
        began,
    )  # fmt: skip


def prepare(
    config: TrainConfig,
    run: Path,
    *,
    device: str = "auto",
    resume: bool = False,
    progress: Progress | None = None,
) -> PreparedRun:
    plan = plan_run(config, run, device=device, resume=resume, progress=progress)
    return prepare_planned(plan, run, progress)


def prepare_planned(plan: PlannedRun, run: Path, progress: Progress | None = None) -> PreparedRun:
    """Load the model and write the run's folder."""
    config, saved = plan.config, plan.saved
    if plan.device == "cpu":
        host_library.prepare(progress)
    trainer = plan.source.trainer(config, plan.device, saved.checkpoint, progress)
    pace = measured_pace(trainer, plan.data, plan.device) if plan.needs_pace else None
    plan, notes = plan.completed(pace)
    state = SavedState(num_samples=plan.data.train.num_windows)
    if saved.checkpoint is not None:
        state = _restored(trainer, saved.checkpoint, state)
    save_config(plan.config, run)
    for path in saved.broken:  # their steps are run again
        remove_checkpoint(path)
    remove_leftovers(run)
    if plan.quarantine.count:
        plan.quarantine.write(run / QUARANTINE_NAME)
    warnings = tuple(
        f"{problem}; going on from {saved.checkpoint} before it" for problem in saved.problems
    )
    return PreparedRun(
        plan.config,
        plan.device,
        trainer,
        plan.data,
        state,
        plan.source.exporter(plan.config),
        plan.quarantine,
        plan.memory,
        plan.began,
        notes,
        warnings,
    )


def check_length(config: TrainConfig, model: ModelConfig) -> None:
    length, limit = config.data.sequence_length, model.max_context
    if length > limit:
        raise UsageError(
            f"sequence_length is {length}; the model's context is {limit} tokens; "
            f"give at most {limit}"
        )


def _restored(trainer: Trainer, checkpoint: Path, begun: SavedState) -> SavedState:
    state = restore(trainer, checkpoint)
    if state.num_samples != begun.num_samples:
        raise CheckpointError(
            f"{checkpoint} was made from data of {state.num_samples} sequences, and there are "
            f"{begun.num_samples} now; give the same data"
        )
    return state


def check_run_folder(config: TrainConfig, run: Path, resume: bool) -> None:
    """That the folder is new, or belongs to this run and is meant to be gone on with."""
    if run.exists() and not run.is_dir():
        raise UsageError(f"--out {run} is a file; give a folder")
    if not (run / FILE_NAME).is_file():
        if resume:
            raise UsageError(f"--out {run} has no run to resume; remove --resume to begin one")
        if run.is_dir() and any(each.name != LOGS for each in run.iterdir()):
            raise UsageError(f"--out {run} is not empty and no training run; give a new folder")
        return
    changed = differences(load_config(run), config)
    if changed:
        raise UsageError(
            f"--out {run} belongs to a run with another config: {'; '.join(changed)}; give "
            "another folder, or the same config"
        )
    if not resume:
        raise UsageError(f"--out {run} has a run already; add --resume, or give a new folder")


def model_source(config: TrainConfig, progress: Progress | None = None) -> StartingModel:
    if config.model is not None:
        path = resolve_model(config.model, progress=progress)
        description = describe(open_checkpoint(path))
        return StartingModel(description, _tokenizer(path), path)
    assert config.shape is not None, "check_complete"
    describe_shape(config.shape)  # whose error names the shapes there are
    if config.tokenizer is None:
        raise UsageError(
            "--shape has no tokenizer; add --tokenizer MODEL for the one of a model, e.g. demo"
        )
    tokenizer = _tokenizer(resolve_model(config.tokenizer, progress=progress))
    vocab_size = -(-tokenizer.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    values = SHAPES[config.shape] | {"vocab_size": vocab_size}
    return StartingModel(describe_hf(values, origin=f"shape {config.shape}"), tokenizer, None)


def untokenized_source(config: TrainConfig, progress: Progress | None = None) -> StartingModel:
    """For steps over random tokens: no tokenizer is needed, and a shape keeps its vocabulary."""
    if config.model is None:
        assert config.shape is not None, "check_one"
        return StartingModel(describe_shape(config.shape), None, None)
    path = resolve_model(config.model, progress=progress)
    return StartingModel(describe(open_checkpoint(path)), None, path)


def _tokenizer(path: Path) -> Tokenizer:
    tokenizer = tokenizer_of(path)
    if tokenizer is None:
        raise UnsupportedError(f"{path} has no tokenizer, which training on text needs")
    return tokenizer


def with_whole_paths(config: TrainConfig) -> TrainConfig:
    """Files by their whole names: a run may be resumed from another folder."""

    def whole(name: str | None) -> str | None:
        return str(Path(name).resolve()) if name and Path(name).exists() else name

    return replace(
        config,
        model=whole(config.model),
        tokenizer=whole(config.tokenizer),
        distill=replace(config.distill, teacher=whole(config.distill.teacher)),
        data=replace(config.data, path=whole(config.data.path)),
    )
