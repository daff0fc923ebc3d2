"""What a climb is asked for (`ClimbOrder`), and the same made ready to run (`ClimbJob`): model,
workload and hardware found and checked before anything is measured.

    job = prepared(ClimbOrder("demo", out=Path("out"), budget_s=240.0))
    job.facts, job.workload
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from ridgeline.bench.engine import check_fits
from ridgeline.bench.serve.bound import LatencyBound
from ridgeline.data.traces import load_workload
from ridgeline.data.workload import MIXES, Workload
from ridgeline.engine.loading.draft_loading import check_words, find_draft
from ridgeline.engine.loading.saved import tokenizer_of
from ridgeline.engine.loading.sources import keeps_blocks
from ridgeline.errors import UsageError
from ridgeline.hardware import Hardware, detect
from ridgeline.kernels.ceilings import measure
from ridgeline.ladder.measuring.judging import Measured
from ridgeline.ladder.measuring.peer import PeerMet, PeerOrder
from ridgeline.ladder.measuring.rounds import MIN_ROUNDS
from ridgeline.ladder.outcome import Goal
from ridgeline.ladder.rungs import ClimbFacts
from ridgeline.ladder.state import ClimbSubject, setting
from ridgeline.models.checkpoint import Checkpoint, open_checkpoint, resolve_model
from ridgeline.models.families import describe
from ridgeline.models.shapes import check_one, describe_shape
from ridgeline.profiling.predicting.expected_steps import Lengths, mean_context
from ridgeline.profiling.predicting.prediction import BlockBytes
from ridgeline.progress import Progress
from ridgeline.quality.gate import USUAL, QualityBounds
from ridgeline.quantization.files.fuse import kept_schemes
from ridgeline.quantization.files.read import is_quantized
from ridgeline.quantization.head import HEAD
from ridgeline.quantization.sizes import bytes_per_weight, head_matrix, stored_bytes
from ridgeline.recipe import Recipe, Speculation

CEILINGS = ("read_bandwidth", "matrix_fp32", "matrix_bf16")
GPU_CEILINGS = ("matrix_tf32", "matrix_fp8", "eager_launch", "graph_step")
LETTERS_A_TOKEN = 4  # of a text, about
USUAL_WORKLOADS = {
    ("latency", True): "batch-1",
    ("latency", False): "batch-1",
    ("throughput", True): "cpu",
    ("throughput", False): "throughput",
}  # by goal, and whether the device is a CPU
CPU_WINDOW, CPU_WINDOWS = 256, 8  # tokens that quality is measured on there: seconds, not minutes


@dataclass(frozen=True)
class ClimbOrder:
    """What is asked for."""

    model: str | None
    shape: str | None = None  # random weights of this shape instead
    out: Path = Path("optimized")
    goal: Goal = "latency"
    workload: str | None = None  # a mix or a file; None: usual for goal and device
    output_tokens: int = 256  # made for each prompt of a file of prompts
    bounds: QualityBounds = USUAL
    latency: LatencyBound = field(default_factory=LatencyBound)  # of a rate that is to be found
    quality: bool = True
    measured: Measured | None = None  # None: as is usual for the device
    budget_s: float | None = None
    resume: bool = False
    device: str = "auto"
    rounds: int = MIN_ROUNDS
    draft_model: str | None = None  # that may draft tokens ahead
    peer: PeerOrder | None = None  # another server, measured under the same workload
    command: tuple[str, ...] = field(default_factory=lambda: ("ridgeline", *sys.argv[1:]))

    def __post_init__(self) -> None:
        check_one(self.model, self.shape)
        if self.output_tokens < 1:
            raise UsageError(f"--output-tokens is {self.output_tokens}; give at least 1")
        if self.shape is not None and self.quality:
            raise UsageError("random weights have no answers to compare; add --quality off")


@dataclass(frozen=True)
class ClimbJob:
    """An order, made out: what is run, on what, where."""

    order: ClimbOrder
    subject: ClimbSubject
    workload: Workload  # all at once
    trace: Workload  # with its arrival times, where it has any
    hardware: Hardware
    facts: ClimbFacts
    measured: Measured
    peer: PeerMet | None = None


def prepared(order: ClimbOrder, progress: Progress | None = None) -> ClimbJob:
    """What can be wrong is said before anything is measured."""
    hardware = detect(order.device)
    subject, checkpoint = subject_of(order, hardware, progress)
    quantized = checkpoint is not None and _is_coded(checkpoint)
    whole, has_text = workload_of(order, subject)
    draft = draft_of(order, subject, progress)
    workload = whole.at_once()
    check_fits(workload, subject.config.max_context)
    peer = peer_of(order, subject)
    measured = order.measured or usual_measured(subject.device)
    on_cpu = subject.device == "cpu"
    wanted = {*CEILINGS, *(() if on_cpu else GPU_CEILINGS)}
    hardware = measure(hardware, wanted, progress)
    more = {
        "goal": order.goal,
        "quality": order.quality,
        "measured": measured.to_json(),
        "bounds": asdict(order.bounds),
    }
    facts = ClimbFacts(
        subject.config,
        hardware,
        order.goal,
        setting(subject, workload, hardware, more),
        concurrency=1 if order.goal == "latency" else len(workload.requests),
        prefix_share=common_prefix_share(workload, subject.config.vocab_size),
        longest_prompt=max(request.num_prompt_tokens for request in workload.requests),
        request_tokens=mean_context(lengths_of(workload)),
        judged_tokens=judged_tokens(measured) if order.quality else 0,
        has_text=has_text,
        has_random_weights=subject.has_random_weights,
        is_quantized=quantized,
        blocks=None if checkpoint is None else blocks_of(checkpoint, subject.device),
        draft_model=draft,
        bounds=order.bounds,
    )
    return ClimbJob(order, subject, workload, whole, hardware, facts, measured, peer)


def judged_tokens(measured: Measured) -> int:
    """About how many quality is measured on: no more than a given text has."""
    most = measured.window * measured.num_windows
    if measured.text is None:
        return most
    return min(most, Path(measured.text).stat().st_size // LETTERS_A_TOKEN)


def lengths_of(workload: Workload) -> Lengths:
    return [(each.num_prompt_tokens, each.num_output_tokens) for each in workload.requests]


def subject_of(
    order: ClimbOrder, hardware: Hardware, progress: Progress | None
) -> tuple[ClimbSubject, Checkpoint | None]:
    if order.shape is not None:
        config = describe_shape(order.shape).config
        return ClimbSubject(order.shape, None, order.shape, config, hardware.device), None
    assert order.model is not None, "an order has a model or a shape"
    path = resolve_model(order.model, progress=progress).resolve()
    checkpoint = open_checkpoint(path)
    config = describe(checkpoint).config
    return ClimbSubject(order.model, path, None, config, hardware.device), checkpoint


def _is_coded(checkpoint: Checkpoint) -> bool:
    return is_quantized(checkpoint) and checkpoint.format != "gguf"


def blocks_of(checkpoint: Checkpoint, device: str) -> BlockBytes | None:
    """Where the engine leaves a GGUF file's blocks as they are; by its headers alone."""
    if not keeps_blocks(Recipe(), device):
        return None
    description = describe(checkpoint)
    matrix = head_matrix(description.config)
    kept = kept_schemes(checkpoint, description, blocks=True)
    if HEAD not in kept:
        return None
    mean = bytes_per_weight(description.config, torch.float32, head=kept[HEAD], kept=kept)
    head = stored_bytes(kept[HEAD], matrix, torch.float32) / (matrix.num_outputs * matrix.depth)
    return BlockBytes(mean, head)


def draft_of(order: ClimbOrder, subject: ClimbSubject, progress: Progress | None) -> str | None:
    """Where the draft model lies; one that cannot serve is refused before anything is measured."""
    if order.draft_model is None:
        return None
    path = resolve_model(order.draft_model, progress=progress).resolve()
    recipe = Recipe(speculation=Speculation("draft", draft_model=str(path)))
    draft = find_draft(recipe, subject.config, progress)
    check_words(draft, None if subject.path is None else tokenizer_of(subject.path))
    return str(path)


def peer_of(order: ClimbOrder, subject: ClimbSubject) -> PeerMet | None:
    """One that does not answer is refused before anything is measured."""
    if order.peer is None:
        return None
    return order.peer.met(None if subject.path is None else tokenizer_of(subject.path))


def workload_of(order: ClimbOrder, subject: ClimbSubject) -> tuple[Workload, bool]:
    """And whether its prompts are text."""
    name = order.workload or USUAL_WORKLOADS[order.goal, subject.device == "cpu"]
    tokenizer = None if subject.path is None else tokenizer_of(subject.path)
    workload = load_workload(name, tokenizer=tokenizer, num_output_tokens=order.output_tokens)
    has_text = name not in MIXES and workload.requests[0].prompt is not None
    return workload, has_text


def usual_measured(device: str) -> Measured:
    return Measured(window=CPU_WINDOW, num_windows=CPU_WINDOWS) if device == "cpu" else Measured()


def common_prefix_share(workload: Workload, vocab_size: int, block: int = 64) -> float:
    """Of all prompt tokens, in blocks, those that an earlier prompt began with too."""
    visited: set[tuple[int, ...]] = set()
    total = known = 0
    for index in range(len(workload.requests)):
        ids: Sequence[int] = workload.prompt_ids(index, vocab_size)
        prefix: tuple[int, ...] = ()
        total += len(ids)
        for start in range(0, len(ids) - block + 1, block):
            prefix = (hash((prefix, tuple(ids[start : start + block]))),)
            known += block if prefix in visited else 0
            visited.add(prefix)
    return known / max(total, 1)
