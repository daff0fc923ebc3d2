"""From the names in a config to what a run needs: the model, its batches, where it stands.

prepared = prepare(config, Path("run"), device="cpu", resume=False)
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from ridgeline.data.loading.sources import Quarantine
from ridgeline.data.loading.split import SplitData, split_data
from ridgeline.errors import CheckpointError, UsageError
from ridgeline.hardware import detect
from ridgeline.hardware.detection import available_memory
from ridgeline.kernels import host_library
from ridgeline.models.config import ModelConfig
from ridgeline.parallel.mesh import Mesh, alone
from ridgeline.parallel.starting.supervisor import LOGS
from ridgeline.progress import Progress
from ridgeline.training.choices import (
    TrainingPace,
    choice_in_words,
    fitted,
    is_open,
    measured_pace,
    with_choices_of,
    with_usual,
)
from ridgeline.training.config import TrainConfig, check_complete, with_auto
from ridgeline.training.config_file import FILE_NAME, changes, load_config, save_config
from ridgeline.training.memory.methods import TrainingMethod
from ridgeline.training.memory.plan import TrainingMemory, itemise, plan_training
from ridgeline.training.ranks.crew import Crew
from ridgeline.training.ranks.likeness import check_alike
from ridgeline.training.ranks.reading import read_tokens_once
from ridgeline.training.saving.adapter_files import AdapterExporter
from ridgeline.training.saving.checkpoint import (
    Exporter,
    LastWhole,
    SavedState,
    last_whole,
    remove_checkpoint,
    remove_leftovers,
    restore,
)
from ridgeline.training.saving.rank_files import last_whole_of_ranks
from ridgeline.training.starting_model import StartingModel, model_source, teacher_source
from ridgeline.training.stepping.captured import check_graphs
from ridgeline.training.stepping.ops import check_compiles
from ridgeline.training.stepping.precision import check_precision
from ridgeline.training.stepping.step import Trainer
from ridgeline.training.watching.tensorboard import check_tensorboard

QUARANTINE_NAME = "quarantine.jsonl"


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
    crew: Crew
    whole: ModelConfig  # the model of which the trainer may have a part
    notes: tuple[str, ...] = ()  # what was chosen
    warnings: tuple[str, ...] = ()


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


def plan_run(
    config: TrainConfig,
    run: Path,
    *,
    device: str = "auto",
    resume: bool = False,
    progress: Progress | None = None,
    mesh: Mesh | None = None,
) -> PlannedRun:
    """All that is refused is refused here; nothing is written and no weight is loaded. `mesh` has
    the ranks, where they have joined: all plan the same.
    """
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
    saved = LastWhole(None)
    if resume:
        saved = last_whole(run) if mesh is None else last_whole_of_ranks(run, mesh)
    source = model_source(config, progress)
    model = source.description.config
    check_alike(config, model, mesh)
    check_length(config, model)
    if config.graphs:
        check_graphs(config, model, device)
    source = replace(source, teacher=teacher_source(config, model, progress))
    method = source.method(config, device)
    ordered = config
    free = available_memory(device)
    if mesh is not None:
        free = mesh.agreed(free, "min")
    memory = plan_training(model, config, device, free, method)
    config = memory.config
    assert config.data.path is not None, "check_complete"
    assert source.tokenizer is not None, "model_source"
    paths = [Path(config.data.path)]
    tokenized = read_tokens_once(paths, source.tokenizer, mesh, progress)
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
    mesh: Mesh | None = None,
) -> PreparedRun:
    plan = plan_run(config, run, device=device, resume=resume, progress=progress, mesh=mesh)
    return prepare_planned(plan, run, progress, mesh)


def prepare_planned(
    plan: PlannedRun, run: Path, progress: Progress | None = None, mesh: Mesh | None = None
) -> PreparedRun:
    """Load the model and write the run's folder."""
    config, saved = plan.config, plan.saved
    mesh = mesh or alone(plan.device)
    if plan.device == "cpu":
        host_library.prepare(progress)
    trainer = plan.source.trainer(config, plan.device, saved.checkpoint, progress, mesh)
    pace = None
    if plan.needs_pace:
        pace = measured_pace(trainer, plan.data, plan.device, config.layout.size_of("data"))
    plan, notes = plan.completed(pace)
    crew = Crew(mesh, plan.config)
    plan = replace(plan, config=crew.value_of_first(plan.config))  # clocks differ
    state = SavedState(num_samples=plan.data.train.num_windows)
    if saved.checkpoint is not None:
        state = _restored(trainer, saved.checkpoint, state)
    if crew.is_first:
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
        Crew(mesh, plan.config),
        plan.model,
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
    changed = changes(load_config(run), config)
    if changed:
        raise UsageError(
            f"--out {run} belongs to a run with another config: {'; '.join(changed)}; give "
            "another folder, or the same config"
        )
    if not resume:
        raise UsageError(f"--out {run} has a run already; add --resume, or give a new folder")


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
