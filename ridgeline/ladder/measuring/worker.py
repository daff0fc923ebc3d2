"""The process in which one recipe lives while it is measured: if it dies, only its rung is lost.

Reads one JSON object a line from its input and answers each with one line: `load` first, then
`warm`, `round`, `phases`, `highest_rate`, `prove`, `curve`, or for another kind of work `judge` and
`calibrate` (judging.py). Its answer may be `{"error": …, "kind": …}`. It ends with its input.
process.py is the other end.

    python -m ridgeline.ladder.measuring.worker
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import torch

from ridgeline.bench.serve.bound import LatencyBound
from ridgeline.data.workload import Workload
from ridgeline.engine import Engine
from ridgeline.errors import OutOfMemoryError, RidgelineError
from ridgeline.formats.dtypes import dtype_bytes, parse_dtype
from ridgeline.hardware import Hardware, detect
from ridgeline.hardware.ceilings import load_cached
from ridgeline.kernels import extension
from ridgeline.kernels.compile_times import CompileTimes
from ridgeline.ladder.measuring import judging
from ridgeline.ladder.measuring.held_rate import engine_runs, held_rate, proved, settings_of
from ridgeline.ladder.measuring.looking import Steps, engine_steps, looked_at, naive_steps
from ridgeline.ladder.measuring.part import WorkloadPart, longer
from ridgeline.ladder.measuring.process import NOTED
from ridgeline.ladder.measuring.running import EngineRuns, NaiveRuns, Round
from ridgeline.ladder.measuring.spec import WorkerSpec, read_workload
from ridgeline.ladder.outcome import CurvePoint, Goal
from ridgeline.ladder.state import NOT_OF_WEIGHTS
from ridgeline.models import Transformer
from ridgeline.models.shapes import RandomShape, random_model
from ridgeline.models.transformer import build_model, fill_random
from ridgeline.quantization import load_model
from ridgeline.quantization.choose import LayerChoice, in_words, slower_shapes
from ridgeline.quantization.load import choose_dtype
from ridgeline.recipe import Recipe, with_auto

log = logging.getLogger(__name__)

PROMPT = tuple(range(1, 33))  # arguments twice, to see whether the answers are the same
MAX_WARM_UPS = 4
FIRST = "first"  # a recipe that is not named


class MadeWeights(NamedTuple):
    """What a recipe made of a model."""

    model: Transformer
    recipe: Recipe  # with nothing left open
    choices: Sequence[LayerChoice]  # which matrices are codes


class RecipeWorker:
    def __init__(self) -> None:
        self.runs: EngineRuns | NaiveRuns | None = None
        self.workload: Workload | None = None
        self.steps: Steps | None = None
        self.rounds: list[Round] = []  # that were arguments for
        self.one_by_one = True
        self.judge = judging.Judge()
        self.made: MadeWeights | None = None

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        do: Callable[..., dict[str, Any]] = getattr(self, f"do_{request['do']}")
        return do(**{name: value for name, value in request.items() if name != "do"})

    def do_load(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        began, wanted = time.monotonic(), WorkerSpec.from_json(spec)
        self.workload = read_workload(wanted.workload)
        self.one_by_one = wanted.goal == "latency" or wanted.loop == "naive"
        hardware = load_cached(detect(wanted.device))
        problem = build_kernels() if wanted.build else None
        if wanted.loop == "naive":
            loaded = self._load_naive(wanted, hardware)
        else:
            loaded = self._load_engine(wanted, hardware)
        return loaded | {"seconds": time.monotonic() - began, "build_problem": problem}

    def _load_naive(self, spec: WorkerSpec, hardware: Hardware) -> dict[str, Any]:
        model = plain_model(spec, hardware)
        runs = self.runs = NaiveRuns(model, hardware)
        filled = with_auto(spec.recipe, model.config, model.embed.weight.dtype, spec.device)
        self.steps = naive_steps(model, filled)
        size = float(dtype_bytes(parse_dtype(filled.dtype)))
        return {
            "recipe": asdict(filled),
            "weight_bytes": sum(parameter.nbytes for parameter in model.parameters()),
            "bytes_per_weight": size,
            "bytes_per_kv": size,
            "memory": [],
            "num_pages": 0,
            "plain_for_speed": None,
            "plain_shapes": [],
            "is_deterministic": runs.same_logits([i % model.config.vocab_size for i in PROMPT]),
        }

    def _load_engine(self, spec: WorkerSpec, hardware: Hardware) -> dict[str, Any]:
        model: RandomShape | Path
        if self.made is not None:  # by another one here
            return self._loaded(beside(self.made, spec), spec.goal, hardware)
        if spec.folder is not None:
            model = Path(spec.folder)
        elif spec.shape is not None:
            model = RandomShape(spec.shape)
        else:
            assert spec.path is not None, "a subject is a path or a shape"
            model = Path(spec.path)
        engine = Engine(model, spec.recipe, device=spec.device, num_pages=spec.num_pages)
        self.made = MadeWeights(engine.model, engine.recipe, engine.choices)
        return self._loaded(engine, spec.goal, hardware)

    def _loaded(self, engine: Engine, goal: Goal, hardware: Hardware) -> dict[str, Any]:
        assert self.made is not None, "the weights come first"
        runs = self.runs = EngineRuns(engine, goal, hardware)
        self.steps = engine_steps(engine)
        own = {name: getattr(engine.recipe, name) for name in NOT_OF_WEIGHTS}
        choices = self.made.choices
        return runs.footprint() | {
            "recipe": asdict(replace(self.made.recipe, **own)),
            "weight_bytes": sum(parameter.nbytes for parameter in engine.model.parameters()),
            "plain_for_speed": in_words(choices, engine.recipe.dtype),
            "plain_shapes": [list(shape) for shape in slower_shapes(choices)],
            "is_deterministic": True,
        }

    def do_compile(
        self, spec: Mapping[str, Any], part: Mapping[str, Any], seconds: float
    ) -> dict[str, Any]:
        """A recipe's kernels into the cache that all processes read, by a model with one layer of
        each kind.
        """
        wanted = WorkerSpec.from_json(spec)
        self.workload = read_workload(wanted.workload)
        hardware = load_cached(detect(wanted.device))
        whole = wanted.config
        config = replace(whole, layers=tuple(dict.fromkeys(whole.layers)))
        dtype = choose_dtype(wanted.recipe.dtype, config, hardware)
        model = fill_random(build_model(config, dtype, hardware.device))
        engine = Engine(model, wanted.recipe, device=wanted.device, num_pages=wanted.num_pages)
        self.runs = EngineRuns(engine, wanted.goal, hardware)
        return self.do_warm(part, seconds * config.num_layers / whole.num_layers)

    def do_warm(
        self, part: Mapping[str, Any], seconds: float, again: bool = False
    ) -> dict[str, Any]:
        """Kernels compile, graphs are captured; and how long a part takes `seconds`. Other lengths
        may be other kernels and graphs, so that on a GPU each is run once before it counts; a part
        that is sized `again` was.
        """
        assert self.runs is not None, "`load` comes first"
        on_cpu = self.runs.hardware.device_type == "cpu"
        now = WorkloadPart.from_json(part)
        if not again:
            self._run(now)
        for _ in range(MAX_WARM_UPS):
            took = self._run(now).wall_s
            longest = longer(now, took / now.repeats, seconds)
            if longest == now or took >= seconds / 2:
                break
            now = longest
            if not on_cpu:
                self._run(now)
        last = longer(now, took / now.repeats, seconds)
        if last != now and not on_cpu:
            self._run(last)
        return {"part": last.to_json(), "seconds": took}

    def do_round(self, part: Mapping[str, Any]) -> dict[str, Any]:
        result = self._run(WorkloadPart.from_json(part))
        self.rounds.append(result)
        return result.to_json()

    def _run(self, part: WorkloadPart) -> Round:
        assert self.runs is not None, "`load` comes first"
        assert self.workload is not None, "`load` comes first"
        workload = part.of(self.workload)
        rounds = [self.runs.round(workload) for _ in range(part.repeats)]
        if len(rounds) == 1:
            return rounds[0]
        wall_s = sum(each.wall_s for each in rounds)
        tokens = sum(each.output_tokens_per_s * each.wall_s for each in rounds)
        middle = sorted(rounds, key=lambda each: each.wall_s)[len(rounds) // 2]
        return Round(
            **middle.to_json() | {"output_tokens_per_s": tokens / wall_s, "wall_s": wall_s}
        )

    def do_phases(self, part: Mapping[str, Any]) -> dict[str, Any]:
        assert self.runs is not None, "`load` comes first"
        assert self.workload is not None, "`load` comes first"
        phases = self.runs.phases(WorkloadPart.from_json(part).of(self.workload))
        result = looked_at(phases, self.rounds, self.steps, self.one_by_one)
        return {"phases": [asdict(phase) for phase in result.phases], "slowed": result.slowed}

    def do_highest_rate(
        self,
        workload: str,
        bound: Mapping[str, float | None],
        start: float | None,
        probe_s: float,
        seconds: float,
    ) -> dict[str, Any]:
        """Of requests, within a latency bound, found in so many seconds."""
        assert isinstance(self.runs, EngineRuns), "the plain loop has no requests at once"
        engine, trace = self.runs.engine, read_workload(workload)
        settings = settings_of(trace, LatencyBound(**bound), probe_s, seconds)
        settings = replace(settings, start=start)
        run, vocab_size = engine_runs(engine, self.runs.hardware), engine.model.config.vocab_size
        return asdict(held_rate(run, trace, settings, vocab_size, seconds))

    def do_prove(
        self, workload: str, bound: Mapping[str, float | None], rate: float, seconds: float
    ) -> dict[str, Any]:
        """Whether a rate is held for so many seconds."""
        assert isinstance(self.runs, EngineRuns), "the plain loop has no requests at once"
        engine, trace = self.runs.engine, read_workload(workload)
        settings = settings_of(trace, LatencyBound(**bound))
        run, vocab_size = engine_runs(engine, self.runs.hardware), engine.model.config.vocab_size
        return asdict(proved(run, trace, settings, vocab_size, rate, seconds))

    def do_curve(self, batches: list[int], seconds: float) -> dict[str, Any]:
        """Points as far as these seconds reach."""
        assert self.runs is not None, "`load` comes first"
        if torch.cuda.is_available():
            self.runs.curve(batches)  # graphs of these sizes are captured
        points, began = list[CurvePoint](), time.monotonic()
        for batch in batches:
            if time.monotonic() - began > seconds:
                break
            points += self.runs.curve([batch])
        return {"points": [asdict(point) for point in points]}

    def do_build(self) -> dict[str, Any]:
        return {"problem": build_kernels()}

    def do_judge(self, **arguments: Any) -> dict[str, Any]:
        return self.judge.compare(**arguments)

    def do_calibrate(self, **arguments: Any) -> dict[str, Any]:
        return judging.calibrate(**arguments)

    def do_write(self, **arguments: Any) -> dict[str, Any]:
        return judging.write_codes(**arguments)


class Workers:
    """The recipes of a process, by name: those but the first run the weights of another, so that
    nothing is read, quantized or started again where only limits are changed.
    """

    def __init__(self) -> None:
        self.by_name: dict[str, RecipeWorker] = {}

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        arguments = dict(request)
        name, sharing = arguments.pop("seat", FIRST), arguments.pop("sharing", None)
        if arguments["do"] == "drop":
            return self._drop(name)
        worker = self.by_name.setdefault(name, RecipeWorker())
        if sharing is not None:
            worker.made = self.by_name[sharing].made
            assert worker.made is not None, "an engine's weights are shared"
        try:
            return worker.answer(arguments)
        except Exception:
            if sharing is not None:
                self._drop(name)
            raise

    def _drop(self, name: str) -> dict[str, Any]:
        self.by_name.pop(name, None)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return {}


def beside(made: MadeWeights, spec: WorkerSpec) -> Engine:
    """Another engine over the same weights: their codes, head and copies are what they are."""
    recipe = replace(spec.recipe, dtype="auto", scheme=None, head="plain", copies=None)
    return Engine(made.model, recipe, num_pages=spec.num_pages)


def plain_model(spec: WorkerSpec, hardware: Hardware) -> Transformer:
    if spec.shape is not None:
        dtype = choose_dtype(spec.recipe.dtype, spec.config, hardware)
        return random_model(spec.shape, dtype, hardware.device)
    assert spec.path is not None, "a subject is a path or a shape"
    return load_model(Path(spec.path), dtype=spec.recipe.dtype, device=spec.device)


def build_kernels() -> str | None:
    """CUDA C++ for this GPU, unless that was done; why not, where it cannot be."""
    try:
        extension.build_all()
    except RidgelineError as error:
        return str(error)
    return None


def kind_of(error: BaseException) -> str:
    """Whether another state of the memory could help, or the recipe cannot be run at all."""
    short = isinstance(error, MemoryError | torch.cuda.OutOfMemoryError)
    if short or isinstance(error, OutOfMemoryError) or "can't allocate memory" in str(error):
        return "memory"
    return "refused" if isinstance(error, RidgelineError) else "failed"


class AnsweringWorker(Protocol):
    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]: ...


def answered(worker: AnsweringWorker, request: Mapping[str, Any]) -> dict[str, Any]:
    """Its answer; where the time went goes to its log."""
    began = time.monotonic()
    with CompileTimes() as times:
        answer = worker.answer(request)
    log.info("%s: %.1f s; %s", request["do"], time.monotonic() - began, times.words())
    return answer


def serve(requests: IO[str], answers: IO[str], worker: AnsweringWorker | None = None) -> None:
    worker = worker or Workers()
    for line in requests:
        try:
            answer = answered(worker, json.loads(line))
        except Exception as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            text = (
                first if isinstance(error, RidgelineError) else f"{type(error).__name__}: {first}"
            )
            answer = {"error": text, "kind": kind_of(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def run_worker(worker: AnsweringWorker) -> None:
    """Answers go where standard output was; what libraries print there goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    logging.basicConfig(level=logging.INFO, format=f"{NOTED} %(asctime)s %(message)s")
    serve(sys.stdin, answers, worker)


if __name__ == "__main__":
    run_worker(Workers())
