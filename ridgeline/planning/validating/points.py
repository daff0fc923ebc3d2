"""Published measurements as what would be planned for: each row of train.csv becomes a setup, or a
refusal with its reason. A row with what it needs unknown is refused; what a source leaves open and
would have chosen well (micro-batch, stages, recomputation) is left to the planner.

    points = read_points(Path("points") / "train.csv")
    points[0].setups, points[0].step_s, points[0].refused
"""

from __future__ import annotations

import csv
import math
import re
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from ridgeline.errors import UsageError
from ridgeline.models import ModelConfig
from ridgeline.parallel.layout import Layout
from ridgeline.planning.clusters.cluster import GpuPool
from ridgeline.planning.training.setup import TrainSetup
from ridgeline.planning.validating.foreign import gpt, model_named, pool_named, stack_of
from ridgeline.planning.validating.source_facts import Row, completed

COLUMNS = ("id", "group", "model", "layers", "hidden", "heads", "vocab", "gpu", "num_gpus", "dtype",
           "tp", "pp", "dp", "seq", "gbs")  # fmt: skip
OPEN_MICRO = (1, 2, 4, 8)  # that a source may have chosen
NARROW_UNITS = {"mxfp8": "fp8", "nvfp4": "fp4"}
USUAL_RATIO = 150  # of a large GPT's width to its depth
CONTRADICTION = 0.3  # of the logarithm of what a source's own figures amount to
MLA = ("deepseek", "nemotron")  # attention or layers that no model of ours has


class RefusedRowError(ValueError):
    """Why a row is not predicted."""


@dataclass(frozen=True)
class TrainPoint:
    """One row."""

    id: str
    source: str
    setups: tuple[TrainSetup, ...] = ()  # several where a source leaves settings open
    pool: GpuPool | None = None
    step_s: float | None = None  # as measured; None: it ran out of memory
    refused: str = ""
    row: Row | None = None


def read_rows(path: Path, columns: tuple[str, ...]) -> list[Row]:
    try:
        with open(path, encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            rows: list[Row] = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    missing = [name for name in columns if name not in (reader.fieldnames or ())]
    if missing:
        raise UsageError(f"{path} lacks the columns {', '.join(missing)} (docs/planning.md)")
    return [completed(row) for row in rows]


def read_points(path: Path) -> list[TrainPoint]:
    return [point_of(row) for row in read_rows(path, COLUMNS)]


def point_of(row: Row) -> TrainPoint:
    base = TrainPoint(row["id"], row["group"], row=row)
    try:
        pool = _pool_of(row)
        setups = tuple(setups_of(row))
        step_s = measured_step(row, setups[0])
    except RefusedRowError as reason:
        return replace(base, refused=str(reason))
    return replace(base, setups=setups, pool=pool, step_s=step_s)


def number(row: Row, name: str) -> int | None:
    """None where nothing, or no number, stands there."""
    match = re.match(r"\d+", row.get(name, "") or "")
    return int(match[0]) if match else None


def needed(row: Row, name: str) -> int:
    value = number(row, name)
    if value is None:
        raise RefusedRowError(f"{name} is not given")
    return value


def real(row: Row, name: str) -> float | None:
    match = re.match(r"[\d.]+", row.get(name, "") or "")
    return float(match[0]) if match else None


def _pool_of(row: Row) -> GpuPool:
    pool = pool_named(row["gpu"], needed(row, "num_gpus"))
    if pool is None:
        raise RefusedRowError(f"the GPU {row['gpu']!r} is not known")
    return pool


def model_of(row: Row) -> ModelConfig:
    name = row["model"]
    if any(word in name.lower() for word in MLA):
        raise RefusedRowError(f"{name}: its layers are no model's of ours")
    known = model_named(name)
    if known is not None:
        return known
    if not name.startswith(("GPT", "MPT", "BLOOM")):
        raise RefusedRowError(f"the model {name!r} is not known")
    layers, hidden = _depth_and_width(row)
    heads = number(row, "heads") or _usual_heads(hidden, number(row, "tp") or 1)
    vocab = number(row, "vocab") or 51200
    return gpt(layers, hidden, heads, vocab, number(row, "seq") or 2048, number(row, "kv_heads"),
               number(row, "ffn"))  # fmt: skip


def _depth_and_width(row: Row) -> tuple[int, int]:
    """As given; where a source names a GPT by its size alone, a width of GPT's usual 128 to 180
    times the depth, and as many layers as make up the size and the pipeline can share.
    """
    layers, hidden = number(row, "layers"), number(row, "hidden")
    if layers is not None and hidden is not None:
        return layers, hidden
    size = re.search(r"GPT (\d+(?:\.\d+)?)B", row["model"])
    if size is None:
        raise RefusedRowError("layers is not given")
    count, pipeline = float(size[1]) * 1e9, number(row, "pp") or 1
    width = hidden or round((count * USUAL_RATIO / 12) ** (1 / 3) / 512) * 512
    depth = layers or max(1, round(count / (12 * width**2) / pipeline)) * pipeline
    return depth, width


def _usual_heads(hidden: int, tensor: int) -> int:
    """Where they are not given: of about 128 dims, as the layout can share them. They change little
    but the pairs' softmax.
    """
    fitting = [n for n in range(tensor, hidden // 32 + 1, tensor) if hidden % n == 0]
    return min(fitting or [1], key=lambda n: abs(hidden / n - 128))


def setups_of(row: Row) -> list[TrainSetup]:
    stack = stack_of(row["group"], row)
    if stack is None:
        raise RefusedRowError(f"the software of {row['group']!r} is not known")
    model, sequence = model_of(row), _sequence(row)
    layout = layout_of(row)
    model = _divisible(model, layout)
    batch = _batch(row, layout, sequence)
    setups = []
    micros = [number(row, "mbs")] if number(row, "mbs") else OPEN_MICRO
    for micro, chosen in product(micros, _schedules(row, layout, model)):
        assert micro is not None
        micro = _pass_size(row, layout, batch, micro)
        for level in _levels(row):
            base = TrainSetup(
                model, chosen, sequence, batch, micro, units=_units(row["dtype"]), stack=stack
            )
            setups.append(replace(base, **level))
    fitting = [each for each in setups if batch % (layout.size_of("data") * each.micro) == 0]
    if not fitting:
        fitting = setups  # a ramp of batches: whole passes are counted
    return fitting


def _sequence(row: Row) -> int:
    known = number(row, "seq")
    if known is None and "config default" in row.get("note", ""):
        known = int(re.findall(r"\((\d+) is the config default", row["note"])[0])
    if known is None:
        raise RefusedRowError("seq is not given")
    return known


def layout_of(row: Row) -> Layout:
    tensor, pipeline = number(row, "tp"), number(row, "pp") or 1
    if tensor is None:
        raise RefusedRowError("tp is not given")
    context, gpus = number(row, "cp") or 1, needed(row, "num_gpus")
    data = gpus // (tensor * pipeline * context)
    if data * tensor * pipeline * context != gpus:
        raise RefusedRowError(f"tp × pp × cp does not divide {gpus} GPUs")
    expert = number(row, "ep") or 1
    if expert > data * context and expert <= data * context * tensor:
        expert = data * context  # over ranks of `tensor` too: each has as many weights of experts
    if (data * context) % expert:
        raise RefusedRowError(f"ep={expert} does not divide {data * context} ranks")
    sharded = any(word in row.get("sharding", "") for word in ("FSDP", "FULL_SHARD", "GRAD_OP"))
    sequence = tensor > 1 and not _is_before_sequence(row)
    spread: dict[str, Any] = {"shard": data} if sharded else {"replicate": data}
    return Layout(tensor=tensor, pipeline=pipeline, context=context, expert=expert,
                  sequence=sequence, **spread)  # fmt: skip


def _is_before_sequence(row: Row) -> bool:
    old = row["group"] in ("megatron2021", "megatron2021t2", "bloom_layouts", "bloom")
    return old or (row["group"] == "korthikanti2022" and "sequence" not in row["recompute"]
                   and "SP" not in row["recompute"])  # fmt: skip


def _divisible(model: ModelConfig, layout: Layout) -> ModelConfig:
    """Vocabularies and heads as software fills them up."""
    heads = model.num_heads
    if heads % layout.tensor:
        raise RefusedRowError(f"{heads} heads over tp={layout.tensor}")
    return model


def _batch(row: Row, layout: Layout, sequence: int) -> int:
    known = number(row, "gbs")
    if known is not None:
        return known
    local = re.search(r"local batch (\d+)", row.get("note", ""))
    if local:
        return int(local[1]) * layout.size_of("data")
    micro = number(row, "mbs")
    if micro is not None and layout.pipeline == 1:  # one pass a step, as nothing else is said
        return micro * layout.size_of("data")
    raise RefusedRowError("gbs is not given")


def _pass_size(row: Row, layout: Layout, batch: int, micro: int) -> int:
    """Whole passes of all ranks: where a source's own number cannot be one, the nearest."""
    return max(1, min(micro, batch // layout.size_of("data")))


def _schedules(row: Row, layout: Layout, model: ModelConfig) -> list[Layout]:
    if layout.pipeline == 1:
        return [layout]
    stages, schedule = number(row, "vpp"), row.get("schedule", "")
    if stages is None and (not schedule or "interleaved" in schedule):
        per_device = model.num_layers // layout.pipeline
        choices = [n for n in range(1, 9) if per_device % n == 0]
        return [_with_stages(layout, each) for each in choices]
    return [_with_stages(layout, stages if stages and stages > 1 else 1)]


def _with_stages(layout: Layout, stages: int) -> Layout:
    if stages == 1:
        return layout
    return replace(layout, schedule="interleaved", stages=stages)


def _levels(row: Row) -> list[dict[str, Any]]:
    """What is computed again."""
    text = row.get("recompute", "").lower()
    if text.startswith("full"):
        return [{"recomputation": "blocks"}]
    if "op" in text or (row["group"] == "torchtitan" and "selective" in text):
        return [{"recomputation": "elementwise", "products_again": 0.5}]
    if "selective" in text:
        return [{"recomputation": "none", "scores_again": True}]
    if text == "none":
        return [{"recomputation": "none"}]
    return [
        {"recomputation": "none"},
        {"recomputation": "elementwise"},
        {"recomputation": "blocks"},
    ]


def _units(text: str) -> Any:
    plain = text.lower()
    if "fp4" in plain:
        return "fp4"
    if "fp8" in plain or "float8" in plain:
        return "fp8"
    return "fp16" if plain == "fp16" else "bf16"


def measured_step(row: Row, setup: TrainSetup) -> float | None:
    """Seconds of a step, from whatever the source gives; None: it ran out of memory."""
    if "OOM" in row.get("mem_gib", "") and not real(row, "step_s"):
        return None
    gpus = setup.layout.size
    step, tokens, rate = real(row, "step_s"), real(row, "tok_s_gpu"), real(row, "tflops_gpu")
    if (
        step
        and rate
        and abs(math.log(stated_flops(row, setup) / (step * rate * 1e12 * gpus))) > 0.3
    ):
        raise RefusedRowError("its step_s and its tflops_gpu contradict each other")
    if step:
        return step
    if tokens:
        return setup.tokens / (tokens * gpus)
    if rate:
        return stated_flops(row, setup) / (rate * 1e12 * gpus)
    raise RefusedRowError("neither step_s nor tok_s_gpu nor tflops_gpu is given")


def stated_flops(row: Row, setup: TrainSetup) -> float:
    """Of a step, by the formula that Megatron's papers count with: all pairs, and with
    recomputation four passes instead of three.
    """
    model, hardware = setup.model, "hardware FLOPs" in row.get("note", "")
    hardware = hardware or row["group"] in ("bloom_layouts", "bloom")
    layers, hidden, s, vocab = model.num_layers, model.hidden_size, setup.sequence, model.vocab_size
    times, head = (96, 16) if hardware else (72, 12)
    own = 1 + s / (6 * hidden) + vocab / (head * layers * hidden)
    return float(times * setup.batch * s * layers * hidden**2 * own)
