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
from ridgeline.engine.loading.head_choice import measured_head, with_plain_head
from ridgeline.engine.loading.loading import Loaded, load, planned, saved_recipe, with_saved_kv
from ridgeline.engine.loading.memory import MemoryPlan
from ridgeline.errors import HardwareError, RidgelineError, UnsupportedError, UsageError
from ridgeline.formats.dtypes import dtype_name
from ridgeline.hardware import detect
from ridgeline.hardware.detection import available_memory
from ridgeline.models import ModelConfig, Transformer
from ridgeline.models.checkpoint import open_checkpoint, resolve_model
from ridgeline.models.families import describe
from ridgeline.parallel.degrees import check_degree, rank_config
from ridgeline.parallel.group import Group
from ridgeline.parallel.launch import RankProcess, Ranks, started, torchrun_place
from ridgeline.parallel.links import Gone, join, nobody_knows
from ridgeline.parallel.shards import cut_weights, load_split_weights, sent_parameters
from ridgeline.parallel.tensor import quantize_split_head, split_model
from ridgeline.progress import Progress
from ridgeline.quantization.choose import in_words
from ridgeline.quantization.files.read import decoded
from ridgeline.quantization.head import check_head
from ridgeline.quantization.load import COMPUTE_DTYPES, choose_dtype
from ridgeline.quantization.scheme import parse_scheme
from ridgeline.recipe import Recipe, with_auto


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


def load_on_ranks(
    model: Transformer | str | Path,
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
    if recipe.parallel.tensor == 1:
        return load(model, recipe, tokenizer, device, progress), None
    task = _task(model, recipe, device)
    process = torchrun_place()
    if process is None:
        return _load_and_start(task, model, tokenizer, progress)
    _check_process(process, recipe, task.device_type)
    group = _join(process, task, local=process.size == process.local_size)
    whole = model if isinstance(model, Transformer) else None
    part, filled, plan = load_part(task, group, process.local_size, whole, False, progress)
    if process.rank:
        serve(part, filled, group)
        raise SystemExit(0)
    return Loaded(part, _tokenizer(task, tokenizer), filled, plan), Members(group, lambda: None)


def _load_and_start(
    task: Task, model: Transformer | Path, tokenizer: Tokenizer | None, progress: Progress | None
) -> tuple[Loaded, Members]:
    """As rank 0, with the other ranks started from here."""
    size = task.recipe.parallel.tensor
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
        part, filled, plan = load_part(task, group, size, whole, whole is not None, progress)
        loaded = Loaded(part, _tokenizer(task, tokenizer), filled, plan)
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
        part, filled, _ = load_part(task, group, process.local_size, None, is_sent)
        serve(part, filled, group)
    except RidgelineError as error:
        raise SystemExit(error.exit_code) from None


def _task(model: Transformer | Path, recipe: Recipe, device: str) -> Task:
    """Checked as far as it can be before anything is started."""
    if isinstance(model, Transformer):
        weight = model.embed.weight
        name = dtype_name(weight.dtype)
        if recipe.dtype not in ("auto", name):
            raise UsageError(f"the recipe's dtype is {recipe.dtype}, and the model is in {name}")
        task = Task(model.config, recipe, weight.device.type, weight.dtype)
    else:
        checkpoint = open_checkpoint(model)
        recipe = with_saved_kv(recipe, checkpoint)
        if recipe.head != "plain":
            check_head(checkpoint, describe(checkpoint), parse_scheme(recipe.head))
        task = Task(model, recipe, _device_type(device, recipe.parallel.tensor))
    _check_recipe(recipe, task.device_type)
    check_degree(task.config, recipe.parallel.tensor)
    return task


def _device_type(device: str, num_ranks: int) -> str:
    """Without a look at a GPU that may be another rank's."""
    if device.startswith("cuda:"):
        raise UsageError(
            f"device is {device} and tensor_parallel {num_ranks}: each rank takes a GPU of its "
            "own; give cuda, and CUDA_VISIBLE_DEVICES to choose which"
        )
    if device in ("auto", "cuda") and torch.cuda.is_available():
        return "cuda"
    return detect(device).device_type


def _check_recipe(recipe: Recipe, device_type: str) -> None:
    """What is not done yet on several ranks is refused, never ignored."""
    what = undone_on_ranks(recipe, device_type)
    if what is not None:
        raise UnsupportedError(
            f"the recipe has {what} and tensor_parallel {recipe.parallel.tensor}, which the "
            "engine does not do together yet; leave one of them out"
        )


def undone_on_ranks(recipe: Recipe, device_type: str) -> str | None:
    """What a recipe has that cannot be had on several ranks yet."""
    on_cpu = device_type == "cpu"
    for asked, what in (
        (recipe.scheme is not None, f"scheme {recipe.scheme}"),
        (recipe.deterministic, "deterministic"),
        (recipe.kernels == "fused" and on_cpu, "kernels fused on a CPU"),
        (recipe.speculation.method != "none", f"speculation {recipe.speculation.method}"),
    ):
        if asked:
            return what
    return None


def _check_devices(num_ranks: int, device_type: str) -> None:
    """A GPU for each rank on this machine."""
    num_gpus = torch.cuda.device_count() if device_type == "cuda" else num_ranks
    if num_gpus < num_ranks:
        raise HardwareError(
            f"{num_ranks} ranks of tensor parallel need a GPU each, and there are {num_gpus}; "
            f"use --tensor-parallel {num_gpus}, or a machine with more"
        )


def _check_process(process: RankProcess, recipe: Recipe, device_type: str) -> None:
    if process.size != recipe.parallel.tensor:
        raise UsageError(
            f"tensor_parallel is {recipe.parallel.tensor} and torchrun has started {process.size} "
            f"ranks; start {recipe.parallel.tensor}, or use --tensor-parallel {process.size}"
        )
    _check_devices(process.local_size, device_type)


def _join(process: RankProcess, task: Task, local: bool, gone: Gone = nobody_knows) -> Group:
    device = "cpu" if task.device_type == "cpu" else f"cuda:{process.local_rank}"
    return join(process.store, process.rank, process.size, device, local, gone)


def load_part(
    task: Task,
    group: Group,
    num_local: int,
    whole: Transformer | None = None,
    is_sent: bool = False,
    progress: Progress | None = None,
) -> tuple[Transformer, Recipe, MemoryPlan]:
    """A rank's part of the model, the recipe with nothing left open, and the plan of its memory.
    Every rank calls it. `whole` is the model where it is there already; `is_sent` if rank 0 alone
    has it. `num_local` ranks are on this machine.
    """
    config = task.config
    on_cpu = task.device_type == "cpu"
    device = "cpu" if on_cpu else f"cuda:{torch.cuda.current_device()}"
    dtype = _agreed_dtype(task, config, device, group)
    if not on_cpu:  # what the link itself takes is then no longer free
        group.data.all_reduce(torch.zeros(1 << 20, device=device))
    # On a CPU all ranks live from the same memory.
    free = group.smallest(available_memory(device) // (num_local if on_cpu else 1))
    filled = with_auto(task.recipe, config, dtype, device)
    filled, plan = group.together(lambda: planned(config, task.recipe, filled, device, free))
    filled, plan = _with_head_agreed(config, filled, plan, device, group)
    model = group.together(lambda: split_model(config, dtype, device, group))
    if isinstance(task.source, Path):
        checkpoint, shown = open_checkpoint(task.source), progress if group.rank == 0 else None
        description = describe(checkpoint)
        group.together(
            lambda: load_split_weights(model, decoded(checkpoint), description, group, shown)
        )
    elif is_sent:
        cut_weights(model, config, group, sent_parameters(whole, config, dtype, group))
    else:
        assert whole is not None, "a model that is not sent is there"
        held = dict(whole.named_parameters())
        cut_weights(model, config, group, held.__getitem__)
    if filled.head != "plain":
        group.together(lambda: quantize_split_head(model, parse_scheme(filled.head)))
    return model, filled, plan


def _with_head_agreed(
    config: ModelConfig, filled: Recipe, plan: MemoryPlan, device: str, group: Group
) -> tuple[Recipe, MemoryPlan]:
    """Each rank times its own part of the head: what is slower on one is plain on all."""
    own = group.together(lambda: measured_head(config, filled, device))
    if own is None or not group.largest(not own.quantize):
        return filled, plan
    reason = in_words([own], filled.dtype) or f"head {filled.head} is slower on another rank"
    return with_plain_head(config, filled, plan, None, None, reason)


def _agreed_dtype(task: Task, config: ModelConfig, device: str, group: Group) -> torch.dtype:
    """What one rank would choose; the smaller one, if a rank is short of memory."""
    if task.dtype is not None:
        return task.dtype
    held = config if device == "cpu" else rank_config(config, group.size)
    chosen = group.together(lambda: choose_dtype(task.recipe.dtype, held, detect(device)))
    return COMPUTE_DTYPES[group.largest(COMPUTE_DTYPES.index(chosen))]


def _tokenizer(task: Task, tokenizer: Tokenizer | None) -> Tokenizer | None:
    if tokenizer is None and isinstance(task.source, Path):
        return Tokenizer.load(task.source)
    return tokenizer
