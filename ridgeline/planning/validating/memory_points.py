"""Published figures of memory as what would be planned for: each row of memory.csv becomes a setup
and the form in which that software keeps things, or a refusal with its reason.

    points = read_memory_points(Path("points") / "memory.csv")
    judge_memory(points)[0].error       # of the peak
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median

from ridgeline.errors import UsageError
from ridgeline.models import ExpertsConfig, LayerConfig, ModelConfig
from ridgeline.parallel.layout import Layout
from ridgeline.planning.memory.ledger import usable_bytes
from ridgeline.planning.training.setup import Stack, TrainSetup
from ridgeline.planning.validating.foreign import gpt, pool_named
from ridgeline.planning.validating.foreign_memory import MemoryForm, foreign_memory
from ridgeline.planning.validating.judging import JudgedRow
from ridgeline.planning.validating.points import (
    RefusedRowError,
    layout_of,
    model_of,
    needed,
    number,
    read_rows,
    real,
)
from ridgeline.planning.validating.source_facts import Row, sums_in_fp32

COLUMNS = ("id", "group", "phase", "model", "layers", "hidden", "heads", "vocab", "gpu", "tp", "pp",
           "seq", "mbs", "peak_gib", "steady_gib")  # fmt: skip
GIB = 1 << 30
CONTRADICTION, NOISE = 0.2, 0.05
FOREIGN = Stack("foreign")
# Which sources the constants below were set by, and which they were judged on.
FITTED_TO = ("mcore_goldens", "bloom_layouts", "ridgeline_h200")
JUDGED_ON = ("korthikanti2022", "torchtitan", "bloom")
# Steady figures of Megatron's CI are about 103 MB above weights, gradients and optimizer, whatever
# the layout, and what a stage has received of the one before it; they are those of the last rank,
# which writes the log.
MEGATRON_CI = MemoryForm(overhead_bytes=103e6, device="last")
FIRST_FIGURE = MemoryForm(counts_table=False)  # 18 bytes of a layer's weight, exactly
# nvidia-smi's figures of BLOOM's sweep: 12 GiB beside what is counted (context, NCCL, DeepSpeed's
# buckets, free blocks). In fp16 a rank's part of the gradients is copied to fp32 for the update; in
# bf16 sums in fp32 stand beside the gradients.
DEEPSPEED = MemoryForm(
    gradient_bytes=2.0, cuts="optimizer", update_bytes=4.0, overhead_bytes=12 * GIB,
    logit_bytes=14.0, scores="kept", saves="blocks", activation_slack=1.2,
)  # fmt: skip
DEEPSPEED_BF16 = replace(DEEPSPEED, gradient_bytes=6.0, update_bytes=0.0)
# Tests of transformer_engine's layers whose configs ask for unfused attention, and those whose
# router takes two experts; others take one.
UNFUSED = ("te_tp1_pp4_vp1", "tunable_overlap", "pipeline_split", "average_in_collective",
           "groupedGEMM", "etp1_ep4")  # fmt: skip
TWO_EXPERTS = ("etp1_ep4", "top2router")
# Those with `moe-grouped-gemm`: its products run on four streams, each with a workspace of
# transformer_engine (32 MiB on an H100).
GROUPED = ("average_in_collective", "groupedGEMM", "etp1_ep4", "top2router")
GROUPED_BYTES = 4 * (32 << 20)
# Of a logit: the fused loss does not write over its copy in fp32; and the head's gradients of
# `wgrad-deferral-limit: 2` micro-batches wait in 16 bits for the end of the step.
LOSS_FUSED, HEAD_DEFERRED = 4.0, 2 * 2.0
# fp32 weights, gradients and moments, all cut. Of a logit: fp32, its softmax and its gradient.
TORCHTITAN = MemoryForm(weight_bytes=4.0, gradient_bytes=4.0, optimizer_bytes=8.0, cuts="all",
                        logit_bytes=12.0, has_dropout=False, reserved=1.08,
                        overhead_bytes=0.5e9, whole_inputs=True)  # fmt: skip
# Its loss over ranks of `tensor` is written op by op (torch's loss_parallel): at the peak a
# softmax, a gradient, exp and their sum, each in fp32.
TORCHTITAN_LOSS_BYTES = 16.0
# Weights, gradients and moments in bf16; a norm's result in fp32 too.
TRANSFORMERS = MemoryForm(gradient_bytes=2.0, optimizer_bytes=4.0, has_dropout=False,
                          logit_bytes=14.0, gate_copies=4.0, stream_copies=6.0)  # fmt: skip


@dataclass(frozen=True)
class MemoryPoint:
    """One row, in bytes; a figure that the source does not give is None."""

    id: str
    source: str
    setup: TrainSetup | None = None
    form: MemoryForm | None = None
    steady: float | None = None
    peak: float | None = None
    activations: float | None = None
    is_out_of_memory: bool = False
    usable_bytes: int = 0
    refused: str = ""


def read_memory_points(path: Path) -> list[MemoryPoint]:
    return _without_contradictions([memory_point(row) for row in read_rows(path, COLUMNS)])


def _without_contradictions(points: list[MemoryPoint]) -> list[MemoryPoint]:
    known = [point for point in points if point.peak is not None and point.setup is not None]
    refused = _far_from_equals(known) | _more_for_less(known)
    return [
        replace(point, setup=None, refused=refused[point.id]) if point.id in refused else point
        for point in points
    ]


def _far_from_equals(points: list[MemoryPoint]) -> dict[str, str]:
    """Of at least three rows of the same settings, those far from their median."""
    peaks: dict[object, list[float]] = {}
    for point in points:
        peaks.setdefault((point.source, point.setup, point.form), []).append(point.peak or 0.0)
    return {
        point.id: "rows of the same settings contradict it"
        for point in points
        if len(own := peaks[(point.source, point.setup, point.form)]) > 2
        and abs((point.peak or 0.0) / median(own) - 1) > CONTRADICTION
    }


def _more_for_less(points: list[MemoryPoint]) -> dict[str, str]:
    """Of rows that differ in the micro-batch alone, both where the smaller one is said to need
    more than the larger: one is wrong, and nothing says which.
    """
    groups: dict[object, list[tuple[int, float, str]]] = {}
    for point in points:
        assert point.setup is not None
        assert point.peak is not None
        rest = (point.source, replace(point.setup, micro=1), point.form)
        groups.setdefault(rest, []).append((point.setup.micro, point.peak, point.id))
    reason = "a row of another micro-batch contradicts it"
    return {
        each: reason
        for own in groups.values()
        for (micro, peak, first), (other, less, second) in product(own, own)
        if micro < other and peak > less * (1 + NOISE)
        for each in (first, second)
    }


def memory_point(row: Row) -> MemoryPoint:
    base = MemoryPoint(row["id"], row["group"])
    try:
        if row["phase"] != "train":
            raise RefusedRowError(f"a figure of {row['phase']}, not of a training step")
        setup, form = _setup(row)
    except (RefusedRowError, UsageError) as reason:
        return replace(base, refused=str(reason))
    pool = pool_named(row["gpu"], 1)
    kept = re.search(r"activations ([\d.]+) GiB", row.get("note", ""))
    # GB as nvidia-smi shows them are GiB.
    return replace(
        base,
        setup=setup,
        form=form,
        steady=_bytes(row, "steady_gib"),
        peak=_bytes(row, "peak_gib"),
        activations=float(kept[1]) * GIB if kept else None,
        is_out_of_memory="OOM" in row["peak_gib"],
        usable_bytes=usable_bytes(pool) if pool else 0,
    )


def _bytes(row: Row, name: str) -> float | None:
    value = real(row, name)
    return None if value is None else value * GIB


def _setup(row: Row) -> tuple[TrainSetup, MemoryForm]:
    group = row["group"]
    if group not in (*FITTED_TO, *JUDGED_ON):
        raise RefusedRowError(f"how {group!r} keeps things is not known")
    if group == "mcore_goldens":
        return _megatron_ci(row)
    filled = dict(row) | ({} if number(row, "num_gpus") else _smallest(row))
    layout = layout_of(filled)
    model, sequence = model_of(filled), needed(filled, "seq")
    if group == "bloom_layouts" and model.num_heads % layout.tensor:
        raise RefusedRowError(f"{model.num_heads} heads over tp={layout.tensor}")
    if group == "korthikanti2022":
        layout = replace(layout, sequence="SP" in row["recompute"])
    if (number(row, "vpp") or 1) > 1:
        layout = replace(layout, schedule="interleaved", stages=needed(row, "vpp"))
    micro = number(row, "mbs")
    if micro is None:
        raise RefusedRowError("mbs is not given")
    batch = number(row, "gbs") or micro * layout.size_of("data") * 8 * layout.pipeline
    setup = TrainSetup(model, layout, sequence, batch, micro, stack=FOREIGN)
    return setup, _form(row)


def _smallest(row: Row) -> dict[str, str]:
    """Figures of one rank, whatever the number of copies."""
    return {"num_gpus": str(needed(row, "tp") * (number(row, "pp") or 1))}


def _form(row: Row) -> MemoryForm:
    group, text = row["group"], row["recompute"]
    if group == "korthikanti2022":
        is_selective = text.startswith("selective")
        return (
            replace(FIRST_FIGURE, scores="kept", saves="all")
            if not is_selective
            else (FIRST_FIGURE)
        )
    if group in ("bloom_layouts", "bloom"):
        if row["sharding"] == "ZeRO-0":
            raise RefusedRowError("it ran on a branch of its own, as the source says")
        return DEEPSPEED_BF16 if sums_in_fp32(row) else DEEPSPEED
    if group == "torchtitan":
        is_full = text.startswith("full")
        compiled = "compile" in row["technique"]
        loss = TORCHTITAN_LOSS_BYTES if needed(row, "tp") > 1 else TORCHTITAN.logit_bytes
        return replace(TORCHTITAN, saves="blocks" if is_full else "half of products",
                       reserved=1.04 if compiled else 1.08, logit_bytes=loss)  # fmt: skip
    if "Liger" in row["technique"]:
        return replace(TRANSFORMERS, logit_bytes=0.25, gate_copies=3.0, stream_copies=4.0)
    if "compile" in row["technique"]:
        return replace(TRANSFORMERS, logit_bytes=8.0, gate_copies=2.0, stream_copies=4.0)
    return TRANSFORMERS


def _megatron_ci(row: Row) -> tuple[TrainSetup, MemoryForm]:
    """A functional test of Megatron-LM: what its name says counts where columns are empty."""
    name = row["model"]
    if "muon" in name:
        raise RefusedRowError("Muon keeps other moments")
    gpus, tensor = needed(row, "num_gpus"), number(row, "tp") or 1
    pipeline, context = number(row, "pp") or 1, number(row, "cp") or 1
    data = gpus // (tensor * pipeline * context)
    micro, batch = needed(row, "mbs"), needed(row, "gbs")
    if data < 1 or batch < micro * data:
        raise RefusedRowError(f"{gpus} GPUs, gbs={batch} and mbs={micro} contradict each other")
    # Where an expert is not cut by `tensor`, more ranks share experts, and each holds as many.
    over = re.search(r"_etp(\d+)", name)
    expert = (number(row, "ep") or 1) * (int(over[1]) if over else tensor) // tensor
    layout = Layout(replicate=data, tensor=tensor, pipeline=pipeline, context=context,
                    expert=expert, sequence=_has_sequence(name))  # fmt: skip
    stages = re.search(r"_vp(\d+)", name)
    model = _test_model(row)
    if stages and pipeline > 1:
        counted = int(stages[1])  # layers of a stage, or with the ends counted stages of a device
        is_split = "pipeline_split" in name
        parts = counted if is_split else model.num_layers // pipeline // counted
        if parts > 1:
            layout = replace(layout, schedule="interleaved", stages=parts)
    setup = TrainSetup(model, layout, needed(row, "seq"), batch, micro, stack=FOREIGN)
    cuts = {"distributed optimizer": "optimizer", "FSDP": "all"}.get(row["sharding"], "nothing")
    scores = "kept" if _writes_scores(name, context) else "none"
    saves = "blocks" if row["recompute"] == "full" else "all"
    form = replace(
        MEGATRON_CI, cuts=cuts, scores=scores, saves=saves,  # type: ignore[arg-type]
        learned_positions=setup.sequence,
        overhead_bytes=MEGATRON_CI.overhead_bytes
        + GROUPED_BYTES * name.endswith(GROUPED)
        + _received_bytes(setup),
        logit_bytes=MEGATRON_CI.logit_bytes
        + LOSS_FUSED * name.endswith("cross_entropy_loss_fusion")
        + HEAD_DEFERRED * name.endswith("defer_embedding_wgrad_compute"),
    )  # fmt: skip
    return setup, form


def _received_bytes(setup: TrainSetup) -> float:
    """Of the stream and its gradient; with several stages on a device a round's streams too."""
    layout = setup.layout
    if layout.pipeline == 1:
        return 0.0
    count = 2 + layout.pipeline * (layout.stages > 1)
    stream = 2.0 * setup.micro_tokens * setup.model.hidden_size
    return count * stream / (layout.tensor if layout.sequence else 1)


def _writes_scores(name: str, context: int) -> bool:
    """Of "local" layers, and where a test's config says `attention-backend: unfused`."""
    is_local = "mcore_te_" not in name and "memory_speed" not in name and "fp8" not in name
    return context == 1 and (is_local or name.endswith(UNFUSED))


def _has_sequence(name: str) -> bool:
    return "sp_" in name or "experts" in name


def _test_model(row: Row) -> ModelConfig:
    layers, hidden = needed(row, "layers"), needed(row, "hidden")
    vocab = number(row, "vocab") or 50304
    plain = gpt(layers, hidden, needed(row, "heads"), vocab + -vocab % 128, needed(row, "seq"),
                number(row, "kv_heads"), number(row, "ffn"))  # fmt: skip
    if "7b_" in row["model"] or "account_for_embedding" in row["model"]:
        plain = replace(plain, tied_embeddings=False)
    count = re.search(r"(\d+)experts", row["model"])
    if "moe" in row["model"] or (number(row, "ep") or 1) > 1:
        if count is None:
            raise RefusedRowError("how many experts is not given")
        rows = 2 if row["model"].endswith(TWO_EXPERTS) else 1
        experts = ExpertsConfig(int(count[1]), rows, plain.mlp_size, True)
        plain = replace(plain, layers=(LayerConfig(None, None, experts),) * layers)
    return plain


def judge_memory(points: Iterable[MemoryPoint]) -> list[JudgedRow]:
    """Each figure that a row gives; "fits" of rows that ran out of memory."""
    rows = []
    for point in points:
        if point.setup is None or point.form is None:
            rows.append(JudgedRow(point.id, point.source, "peak", None, None,
                                  refused=point.refused))  # fmt: skip
            continue
        held = foreign_memory(point.setup, point.form)
        if point.is_out_of_memory:
            rows.append(JudgedRow(point.id, point.source, "out of memory", held.peak, None,
                                  limit=point.usable_bytes))  # fmt: skip
        figures = (
            ("steady", held.steady, point.steady),
            ("peak", held.peak, point.peak),
            ("activations", held.items["activations"], point.activations),
        )
        for kind, predicted, measured in figures:
            if measured is not None:
                rows.append(JudgedRow(point.id, point.source, kind, predicted, measured))
    return rows
