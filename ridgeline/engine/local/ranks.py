"""An engine's model on several ranks: who they are, and how each comes to its part.

`Engine(model, Recipe(parallel=Parallel(tensor=2)))` starts the other ranks itself, each a process
on this machine, with a GPU of its own where the device is one; they end with the engine, or with
the process that made it. Under torchrun the ranks are there already: every process makes the same
`Engine`, and the script goes on in rank 0 alone. The constructor of the others runs steps for rank
0 until its engine is closed or its script has ended, and then ends the process with SystemExit(0),
so that whatever stands behind it, as printing the answer, happens once.

    torchrun --nproc-per-node 2 script.py

Every rank plans the same memory, from the least that is free on any of them, and loads only its
part of each tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from ridgeline.data import Tokenizer
from ridgeline.engine.execution.tensor_runner import serve
from ridgeline.engine.loading.loading import GivenModel, Loaded, load, load_from
from ridgeline.engine.loading.saved import saved_recipe
from ridgeline.engine.loading.sources import check_same_dtype, with_saved_kv
from ridgeline.engine.loading.split_sources import SplitCheckpoint, SplitModel, SplitSource
from ridgeline.errors import RidgelineError, UnsupportedError, UsageError
from ridgeline.hardware import detect
from ridgeline.models import ModelConfig, Transformer
from ridgeline.models.checkpoint import open_checkpoint, resolve_model
from ridgeline.models.families import describe
from ridgeline.models.shapes import RandomShape
from ridgeline.parallel.degrees import check_degree
from ridgeline.parallel.inference.coded import check_cut, schemes_by_layer
from ridgeline.parallel.inference.group import Group
from ridgeline.parallel.inference.launch import Ranks, started
from ridgeline.parallel.inference.links import Gone, join, nobody_knows
from ridgeline.parallel.inference.stages import stage_layers
from ridgeline.parallel.starting.meeting import RankProcess, torchrun_process
from ridgeline.parallel.starting.order import check_gpus, device_type_of_ranks
from ridgeline.progress import Progress
from ridgeline.quantization.head import check_head
from ridgeline.quantization.linear import schemes_of
from ridgeline.quantization.load import choose_dtype
from ridgeline.quantization.nearest import check_unquantized
from ridgeline.quantization.scheme import parse_scheme
from ridgeline.recipe import Parallel, Recipe


class Members(NamedTuple):
    """The ranks of an engine, from rank 0."""

    group: Group
    end: Callable[[], None]  # ends those that were started for it


@dataclass(frozen=True)
class Task:
    """What each rank has to know of the model."""

    source: Path | ModelConfig  # a checkpoint, or the shape of a model whose weights are sent
    recipe: Recipe
    device_type: str  # cpu or cuda
    dtype: torch.dtype | None = None  # of the model that is sent

    @property
    def config(self) -> ModelConfig:
        if isinstance(self.source, Path):
            return describe(open_checkpoint(self.source)).config
        return self.source

    def source_for(
        self,
        group: Group,
        num_local: int,
        whole: Transformer | None = None,
        is_sent: bool = False,
    ) -> SplitSource:
        """Where a rank's part comes from. Every rank loads from it. `whole` is the model where it
        is there already; `is_sent` if rank 0 alone has it. `num_local` ranks are on this machine.
        """
        if isinstance(self.source, Path):
            return SplitCheckpoint(self.source, self.device_type, group, num_local)
        assert self.dtype is not None, "a model that is there has a dtype"
        return SplitModel(
            self.source, self.dtype, self.device_type, group, num_local, whole, is_sent
        )


def load_on_ranks(
    model: GivenModel,
    recipe: Recipe | None,
    tokenizer: Tokenizer | None,
    device: str,
    progress: Progress | None,
) -> tuple[Loaded, Members | None]:
    """The model on one rank, or rank 0's part of it and all ranks. Other ranks do not return."""
    if isinstance(model, str):
        model = resolve_model(model, progress=progress)
    if isinstance(model, Path):
        recipe = recipe or saved_recipe(model)
    recipe = recipe or Recipe()
    if recipe.parallel.num_ranks == 1:
        return load(model, recipe, tokenizer, device, progress), None
    if isinstance(model, RandomShape):
        hardware = detect(device)
        dtype = choose_dtype(recipe.dtype, model.description.config, hardware)
        model = model.whole(dtype, hardware.device)
    task = task_for(model, recipe, device)
    process = torchrun_process()
    if process is None:
        return _load_and_start(task, model, tokenizer, progress)
    _check_process(process, recipe, task.device_type)
    group = _join(process, task, local=process.size == process.local_size)
    whole = model if isinstance(model, Transformer) else None
    source = task.source_for(group, process.local_size, whole)
    loaded = load_from(source, task.recipe, tokenizer, progress)
    if process.rank:
        serve(loaded.model, loaded.recipe, group)
        raise SystemExit(0)
    return loaded, Members(group, lambda: None)


def _load_and_start(
    task: Task, model: Transformer | Path, tokenizer: Tokenizer | None, progress: Progress | None
) -> tuple[Loaded, Members]:
    """As rank 0, with the other ranks started from here."""
    size = task.recipe.parallel.num_ranks
    _check_devices(size, task.device_type)
    num_threads = torch.get_num_threads()
    ranks = Ranks(size, f"{__name__}:main", task)

    def end() -> None:
        ranks.stop()
        torch.set_num_threads(num_threads)

    if task.device_type == "cpu":  # the ranks share the cores
        torch.set_num_threads(max(1, num_threads // size))
    try:
        ranks.wait_until_here()
        group = _join(RankProcess(0, size, 0, size, ranks.store), task, True, ranks.gone)
        whole = model if isinstance(model, Transformer) else None
        source = task.source_for(group, size, whole, is_sent=whole is not None)
        loaded = load_from(source, task.recipe, tokenizer, progress)
    except BaseException:
        end()
        raise
    return loaded, Members(group, end)


def main() -> None:
    """A rank that was started by rank 0. What goes wrong while it loads, rank 0 tells."""
    process, task = started()
    try:
        group = _join(process, task, local=True)
        is_sent = not isinstance(task.source, Path)
        loaded = load_from(task.source_for(group, process.local_size, is_sent=is_sent), task.recipe)
        serve(loaded.model, loaded.recipe, group)
    except RidgelineError as error:
        raise SystemExit(error.exit_code) from None


def task_for(model: Transformer | Path, recipe: Recipe, device: str) -> Task:
    """Checked as far as it can be before anything is started."""
    if isinstance(model, Transformer):
        weight = model.embed.weight
        check_same_dtype(model, recipe)
        if schemes_of(model):
            raise UnsupportedError(
                "the model is quantized already, and ranks share a model's plain weights; give the "
                "path of the quantized checkpoint, or a plain model and a scheme"
            )
        task = Task(model.config, recipe, weight.device.type, weight.dtype)
    else:
        checkpoint = open_checkpoint(model)
        recipe = with_saved_kv(recipe, checkpoint)
        if recipe.head != "plain":
            check_head(checkpoint, describe(checkpoint), parse_scheme(recipe.head))
        if recipe.scheme is not None:
            check_unquantized(checkpoint, recipe.scheme)
        task = Task(model, recipe, device_type_of_ranks(device, recipe.parallel.num_ranks))
    check_degree(task.config, recipe.parallel.tensor, recipe.parallel.expert)
    stage_layers(task.config, recipe.parallel.pipeline)
    if recipe.scheme is not None:
        scheme = parse_scheme(recipe.scheme)
        coded = schemes_by_layer(task.config, scheme)
        check_cut(task.config, recipe.parallel.tensor, coded)
    return task


def _check_devices(num_ranks: int, device_type: str) -> None:
    check_gpus(num_ranks, device_type, "use --tensor-parallel {num_gpus}, or a machine with more")


def _check_process(process: RankProcess, recipe: Recipe, device_type: str) -> None:
    wanted = recipe.parallel.num_ranks
    if process.size != wanted:
        remedy = (
            f", or use --tensor-parallel {process.size}" if recipe.parallel.pipeline == 1 else ""
        )
        raise UsageError(
            f"{_in_words(recipe.parallel)} and torchrun has started {process.size} ranks; start "
            f"{wanted}{remedy}"
        )
    _check_devices(process.local_size, device_type)


def _join(process: RankProcess, task: Task, local: bool, gone: Gone = nobody_knows) -> Group:
    device = "cpu" if task.device_type == "cpu" else f"cuda:{process.local_rank}"
    num_stages = task.recipe.parallel.pipeline
    return join(process.store, process.rank, process.size, device, local, gone, num_stages)


def _in_words(parallel: Parallel) -> str:
    stages = f" and pipeline_parallel {parallel.pipeline}" if parallel.pipeline > 1 else ""
    return f"tensor_parallel is {parallel.tensor}{stages}"
