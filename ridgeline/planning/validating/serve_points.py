"""Published measurements of serving as what would be simulated: each row of serve.csv becomes a
setup and its traffic, or a refusal with its reason.

    point = read_serve_points(Path("points") / "serve.csv")[0]
    point.run(Calibration()).tpot.mean

Other engines are simulated with our scheduler and memory plan, and with what their rows say of
weights, pages and ranks. What they do otherwise is what a calibration is for (serve_judging.py).
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ridgeline.data.workload import Workload, WorkloadRequest
from ridgeline.errors import RidgelineError, UsageError
from ridgeline.models import ModelConfig
from ridgeline.models.cost import num_expert_parameters
from ridgeline.planning.clusters.cluster import GpuPool
from ridgeline.planning.clusters.parsing import gpu_named, parse_cluster
from ridgeline.planning.serving.fleets.fleet import Fleet
from ridgeline.planning.serving.fleets.served import RunReport
from ridgeline.planning.serving.setup import engine_setup, grouped, usual_free_bytes
from ridgeline.planning.serving.step_times import PredictedTimes, Tuning
from ridgeline.planning.serving.sustained import sustained, with_rate
from ridgeline.planning.validating.foreign import gpt_oss_120b, model_named
from ridgeline.planning.validating.points import RefusedRowError, needed, read_rows, real
from ridgeline.planning.validating.source_facts import Row
from ridgeline.recipe import Recipe, edited_at_once

COLUMNS = ("id", "group", "model", "gpu", "num_gpus", "engine", "weights", "kv_dtype", "tp", "isl",
           "osl", "load", "num_requests", "ttft_ms", "tpot_ms", "out_tok_s")  # fmt: skip
# How their benchmarks draw lengths where they are not all equal: from four fifths of what is said.
SHORTEST = 0.8
MOST_AT_ONCE = 2048  # requests that throughput runs of other engines let run at once
WAVES, FEWEST_REQUESTS = {64: 8, 100_000: 4}, 48  # requests a client, by how many clients
ALIKE = 256  # of those that are alike, so many are told apart
FP4_BYTES = 0.5 + 1 / 16  # of a weight, with a scale of a byte for 16
FP4_SHARE = 0.9  # of the sustained share that 8 bits reach
EIGHT_BIT_EXPERTS, FOUR_BIT_EXPERTS = 0.5, 0.29  # of bf16's bytes and time


@dataclass(frozen=True)
class Calibration:
    """What a source's engine and benchmark do otherwise, fitted to points of it."""

    tuning: Tuning = field(default_factory=lambda: Tuning(own_kernels=False))
    equal_lengths: bool = False  # all requests are as long as said, and so end together
    first: float = 1.0  # times the TTFT that is simulated


@dataclass(frozen=True)
class ServePoint:
    """One row."""

    id: str
    source: str  # table, engine and model: they share a calibration
    config: ModelConfig | None = None
    pool: GpuPool | None = None
    recipe: Recipe = field(default_factory=Recipe)
    weights: str = ""
    prompt: tuple[int, int] = (0, 0)  # tokens, from and to
    output: tuple[int, int] = (0, 0)
    concurrency: int | None = None  # None: all at once
    num_requests: int = 0
    measured: Mapping[str, float] = field(default_factory=dict)  # "TPOT" and "TTFT" s, "tokens/s"
    refused: str = ""

    def run(
        self, calibration: Calibration, known: dict[str, PredictedTimes] | None = None
    ) -> RunReport:
        """RidgelineError where it fits in no way. `known` are times of points by their names, kept
        for other calibrations.
        """
        assert self.config is not None, self.refused
        assert self.pool is not None, self.refused
        hardware, tuning = sustained(self.pool), calibration.tuning
        free = usual_free_bytes(hardware)
        experts = num_expert_parameters(self.config)
        if self.weights == "fp4" and self.pool.gpu.fp4 is not None:
            ceiling, eight_bit = hardware.ceiling("matrix_fp8"), self.pool.gpu.fp8
            if ceiling is not None and eight_bit:
                rate = ceiling.value * FP4_SHARE * self.pool.gpu.fp4 / eight_bit
                hardware = with_rate(hardware, "matrix_fp8", rate)
        recipe = self.recipe
        if experts and self.weights in ("fp8", "fp4"):  # no scheme of ours quantizes experts
            share = EIGHT_BIT_EXPERTS if self.weights == "fp8" else FOUR_BIT_EXPERTS
            tuning = replace(tuning, matrices=tuning.matrices * share)
            free += int((1 - share) * 2 * experts / recipe.parallel.tensor)
            recipe = edited_at_once(recipe, {"scheme": None})
        times = None
        if known is not None and self.id in known:
            times = known[self.id].tuned(tuning)
        setup = engine_setup(self.config, recipe, hardware, tuning, free_bytes=free, times=times)
        if known is not None:
            known[self.id] = setup.times
        workload = self.workload(calibration.equal_lengths)
        if self.concurrency is not None:
            return Fleet([setup]).run_closed(workload, self.concurrency).report()
        size = self.group_size
        return Fleet([grouped(setup, size)]).run(workload).report().times_as_many(size)

    @property
    def draws_lengths(self) -> bool:
        """Whether its lengths differ unless a calibration says that they are equal."""
        alike = any(low == high for low, high in (self.prompt, self.output))
        return alike and self.concurrency is not None

    @property
    def group_size(self) -> int:
        """Requests that one stands for: many that are all alike and come at once."""
        alike = all(low == high for low, high in (self.prompt, self.output))
        at_once = min(self.num_requests, MOST_AT_ONCE)
        return max(1, at_once // ALIKE) if alike and self.concurrency is None else 1

    def workload(self, equal_lengths: bool) -> Workload:
        """As many requests as show how it goes on."""
        draw = random.Random(self.id)
        at_once = self.concurrency or min(self.num_requests, MOST_AT_ONCE)
        waves = next(times for most, times in WAVES.items() if at_once <= most)
        count = max(FEWEST_REQUESTS, waves * at_once)
        if self.concurrency is None:
            count = max(1, min(self.num_requests, count) // self.group_size)

        def tokens(span: tuple[int, int]) -> int:
            as_said = equal_lengths or self.concurrency is None or span[0] < span[1]
            return draw.randint(span[0] if as_said else max(1, int(SHORTEST * span[1])), span[1])

        rows = [(tokens(self.prompt), tokens(self.output)) for _ in range(count)]
        return Workload(self.id, tuple(WorkloadRequest(*row) for row in rows))


def read_serve_points(path: Path) -> list[ServePoint]:
    return [serve_point_of(row) for row in read_rows(path, COLUMNS)]


def serve_point_of(row: Row) -> ServePoint:
    base = ServePoint(row["id"], f"{row['group']} {row['engine']} {row['model']}")
    try:
        return _point(row, base)
    except RefusedRowError as reason:
        return replace(base, refused=str(reason))


def _point(row: Row, base: ServePoint) -> ServePoint:
    config, pool = _model(row), _pool(row)
    if (row.get("mode") or "aggregated") == "disaggregated":
        raise RefusedRowError("its prefill and decode parts are not in columns")
    weights = _weights(row["weights"])
    prompt, output = _span(row, "isl"), _span(row, "osl")
    tensor, stages = int(real(row, "tp") or 1), int(real(row, "pp") or 1)
    if stages > 1:
        raise RefusedRowError("pipeline stages are not simulated")
    concurrency = _concurrency(row["load"])
    context = min(config.max_context, max(1024, prompt[1] + output[1]))
    edit: dict[str, Any] = {
        "parallel.tensor": tensor,
        "kv.prefix_cache": False,
        "limits.max_context": context,
        "scheme": {"fp8": "fp8", "fp4": "fp8", "int4": "int4-g128"}.get(weights),
    }
    if row["kv_dtype"].startswith("fp8") or (not row["kv_dtype"] and "TensorRT" in row["engine"]):
        edit["kv.dtype"] = "fp8"
    if concurrency is None:
        edit["limits.max_batch"] = MOST_AT_ONCE
    return replace(
        base,
        config=config,
        pool=pool,
        recipe=edited_at_once(Recipe(), edit),
        weights=weights,
        prompt=prompt,
        output=output,
        concurrency=concurrency,
        num_requests=concurrency or needed(row, "num_requests"),
        measured=_measured(row),
    )


def _measured(row: Row) -> dict[str, float]:
    values = {
        "TPOT": (real(row, "tpot_ms") or 0.0) / 1e3,
        "TTFT": (real(row, "ttft_ms") or 0.0) / 1e3,
        "tokens/s": real(row, "out_tok_s") or 0.0,
    }
    known = {name: value for name, value in values.items() if value}
    if not known:
        raise RefusedRowError("neither tpot_ms nor ttft_ms nor out_tok_s is given")
    return known


def _model(row: Row) -> ModelConfig:
    name = row["model"].split("/")[-1].lower().replace("-instruct", "").replace(" shape", "")
    if name == "gpt-oss-120b":
        return gpt_oss_120b()
    plain = re.sub(r"llama[- ]3(\.\d)?[- ](\d+b)", r"llama-3.1-\2", name)
    known = model_named(plain.replace(" ", "-"))
    if known is None:
        raise RefusedRowError(f"the model {row['model']!r} is not known")
    return known


def _pool(row: Row) -> GpuPool:
    words = re.sub(r"\(.*\)|SXM|_sxm|\d+W", "", row["gpu"], flags=re.IGNORECASE).strip()
    try:
        name = gpu_named(words).name
        return parse_cluster(f"{needed(row, 'num_gpus')}x{name}").pools[0]
    except UsageError:
        raise RefusedRowError(f"the GPU {row['gpu']!r} is not known") from None


def _weights(text: str) -> str:
    """What is said, or what a model comes in."""
    plain = text.lower()
    kinds = (("fp4", "fp4"), ("fp8", "fp8"), ("int4", "int4"), ("bf16", "bf16"), ("fp16", "bf16"))
    if not plain:
        return "bf16"
    for word, kind in kinds:
        if word in plain:
            return kind
    raise RefusedRowError(f"the weights {text!r} are not known")


def _span(row: Row, name: str) -> tuple[int, int]:
    """`1024`, or `100-1024`: drawn evenly."""
    low, _, high = row[name].partition("-")
    if not low.strip().isdigit():
        raise RefusedRowError(f"{name} is not given")
    return int(low), int(high or low)


def _concurrency(load: str) -> int | None:
    """None where all come at once."""
    match = re.match(r"(?:concurrency|batch) (\d+)", load)
    if match:
        return int(match[1])
    if "at once" in load:
        return None
    raise RefusedRowError(f"the load {load!r} is not known")


def simulated(
    point: ServePoint,
    calibration: Calibration,
    known: dict[str, PredictedTimes] | None = None,
) -> dict[str, float] | str:
    """What the row has, as it would be; or why there is nothing."""
    try:
        report = point.run(calibration, known)
    except RidgelineError as error:
        return str(error)
    return {
        "TPOT": report.tpot.mean,
        "TTFT": report.ttft.mean * calibration.first,
        "tokens/s": report.output_tokens_per_s,
    }
