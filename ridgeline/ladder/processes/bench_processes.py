"""Measures states in processes of their own: the best so far and one candidate, both loaded at once
where memory takes both, in rounds that take turns; the judge of their answers beside them.

What a round runs is a part of the workload (part.py) that takes about `round_s` for the slower
side; the faster one repeats it. Where both do not fit at once, each is loaded in its turn.

    with Processes(subject, workload, "latency", hardware, Path("out/work")) as bench:
        bench.open(baseline("cpu"))
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any, Self

from ridgeline.bench.serve.bound import LatencyBound
from ridgeline.data.workload import Workload
from ridgeline.hardware import Hardware
from ridgeline.hardware.clocks import Clocks, ClockSampler
from ridgeline.kernels.extension import find_nvcc
from ridgeline.ladder.measuring.held_rate import FoundRate
from ridgeline.ladder.measuring.judging import Measured
from ridgeline.ladder.measuring.observation import Observation, phase_from
from ridgeline.ladder.measuring.part import MAX_REPEATS, WorkloadPart, first_part
from ridgeline.ladder.measuring.process import Process, WorkerError, WorkerSeat
from ridgeline.ladder.measuring.rounds import MIN_ROUNDS, speedup_of
from ridgeline.ladder.measuring.spec import WorkerSpec, write_workload
from ridgeline.ladder.measuring.time_ledger import TimeLedger
from ridgeline.ladder.outcome import CurvePoint, Figures, Goal, Quality, RateProof, Speedup
from ridgeline.ladder.processes.codes import find_codes, write_codes
from ridgeline.ladder.processes.compiling import CompilingAhead
from ridgeline.ladder.processes.judge_process import JudgeProcess
from ridgeline.ladder.processes.loaded import WORK_LIMIT_S, LoadedState
from ridgeline.ladder.processes.sizes import CURVE_BATCHES, WorkerSizes
from ridgeline.ladder.searching.bench import Enough
from ridgeline.ladder.state import ClimbState, ClimbSubject
from ridgeline.quality.gate import USUAL, QualityBounds

log = logging.getLogger(__name__)

ROUND_S = 1.5
LOAD_LIMIT_S = 600.0
OPEN_ROUNDS = 3
SLOWED = 1.15  # by being looked at: such a process is not measured any more
CURVE_S = 6.0


class Processes:
    def __init__(
        self,
        subject: ClimbSubject,
        workload: Workload,
        goal: Goal,
        hardware: Hardware,
        work: Path,
        *,
        measured: Measured | None = None,
        bounds: QualityBounds = USUAL,
        latency: LatencyBound | None = None,
        trace: Workload | None = None,
        round_s: float = ROUND_S,
    ) -> None:
        self.subject, self.workload, self.goal, self.hardware = subject, workload, goal, hardware
        self.work, self.round_s = work, round_s
        self.latency = latency or LatencyBound()
        self.clocks: Clocks | None = None  # while rounds ran last
        self.ledger = TimeLedger()
        self._running: dict[str, LoadedState] = {}
        self._used: dict[str, WorkloadPart] = {}  # in the last comparison of a state
        self._figures: dict[str, Figures] = {}  # of states that were let go since
        self._judge = JudgeProcess(subject, measured or Measured(), bounds, self._new_process)
        self._spare: Process | None = None
        self._numbers = count()
        self._one_at_a_time = False  # two were found not to fit
        self._alone_key: str | None = None  # of a state that has the whole memory
        self._short = set[str]()  # half of the memory does not hold their pages
        self._ahead: tuple[WorkerSeat, Future[LoadedState]] | None = None  # loaded beside others
        self._builder: Process | None = None
        if subject.device != "cpu" and find_nvcc() is not None:
            # What a later rung needs is built meanwhile; there it waits until that is done.
            self._builder = self._new_process()
            self._builder.begin("build")
        workload_file = work / "workload.json"
        self.sizes = WorkerSizes(
            subject, workload, goal, hardware, workload_file, repeats=bool(self.latency)
        )
        write_workload(workload, workload_file)
        self._compiling = CompilingAhead(self.sizes, self._new_process)
        self._trace_file = work / "trace.json"
        if trace is not None:
            write_workload(trace, self._trace_file)

    def compile_ahead(self, states: Sequence[ClimbState]) -> None:
        """Their kernels, as long as CUDA C++ is being built."""
        if self._builder is not None:
            self._compiling.begin(states, self.round_s)

    def load_ahead(self, state: ClimbState) -> None:
        """Begin to load what is measured soon, so that the cores compile for two at once. Nothing
        is timed until it is there.
        """
        seat, spec = self._seat(state), self.sizes.spec(state, self._one_at_a_time)
        seat.process.ledger = TimeLedger()  # meanwhile others are waited for
        pool = ThreadPoolExecutor(1)
        self._ahead = seat, pool.submit(self._loaded, state, seat, spec)
        pool.shutdown(wait=False)

    def _settle(self) -> None:
        """What is loaded ahead is there, or failed and is loaded when it is needed."""
        if self._ahead is None:
            return
        (seat, future), self._ahead = self._ahead, None
        with self.ledger.timing("warm"):
            try:
                running = future.result()
            except WorkerError as error:
                log.info("%s was not loaded ahead: %s", seat.name, error)
                return
        seat.process.ledger = self.ledger
        self._running[seat.name] = running
        for each in self._running.values():  # how long a round is was seen beside another one
            each.part = self._sized(each.process, each.part, again=True)

    def open(self, state: ClimbState) -> Observation:
        num_rounds = OPEN_ROUNDS if self._ahead is None else 1  # it is compared at once
        running = self._ensure(state)
        self._settle()
        self._used[state.key] = running.part
        for _ in range(num_rounds):
            running.round(running.part)
        return self.observed(state)

    def observed(self, state: ClimbState) -> Observation:
        running = self._ensure(state)
        if not running.rounds:
            running.round(running.part)
        running.observation = replace(running.observation, figures=running.figures())
        return running.observation

    def compare(self, before: ClimbState, after: ClimbState, enough: Enough) -> Speedup:
        for key in self._running.keys() - {before.key, after.key}:  # a guess that was not taken
            self._running.pop(key).process.close()
        try:
            first = self._ensure(before)
            second = self._ensure(after)
        except WorkerError as error:
            if error.kind != "memory" or not self._running:
                raise
            return self._in_turns(before, after)
        parts = self._parts(first, second)
        self._used |= {before.key: parts[0], after.key: parts[1]}
        for side, part in zip((first, second), parts, strict=True):
            side.warm(part)
        with ClockSampler(self.hardware) as sampler:
            speedup = self._rounds((first, second), parts, enough)
        self.clocks = sampler.median or self.clocks
        return speedup

    def run_part(self, state: ClimbState, part: WorkloadPart) -> None:
        """Once; figures are of this run alone."""
        running = self._alone(state) if state.key in self._short else self._ensure(state)
        running.rounds.clear()
        self._used[state.key] = part
        running.round(part)

    def compare_part(
        self, before: ClimbState, after: ClimbState, part: WorkloadPart, rounds: int
    ) -> tuple[list[float], list[float]]:
        """Rates of one part in rounds that take turns; figures are of these alone. Where half of
        the memory does not hold the pages that one of them takes, each has all of it in its turn.
        """
        if self._short & {before.key, after.key}:
            return self._part_in_turns(before, after, part, rounds)
        try:
            sides = self._ensure(before), self._ensure(after)
        except WorkerError as error:
            if error.kind != "memory" or not self._running:
                raise
            return self._part_in_turns(before, after, part, rounds)
        if self._short & {before.key, after.key}:
            return self._part_in_turns(before, after, part, rounds)
        rates: tuple[list[float], list[float]] = ([], [])
        for side in sides:
            side.rounds.clear()
            self._used[side.state.key] = part
        for number in range(rounds):
            turns = list(zip(sides, rates, strict=True))
            for side, kept in turns if number % 2 == 0 else reversed(turns):
                kept.append(side.round(part))
        return rates

    def _part_in_turns(
        self, before: ClimbState, after: ClimbState, part: WorkloadPart, rounds: int
    ) -> tuple[list[float], list[float]]:
        """One loaded after the other; what was measured of the first is kept for its figures."""
        result = []
        for state in (before, after):
            running = self._alone(state)
            running.rounds.clear()
            self._used[state.key] = part
            result.append([running.round(part) for _ in range(rounds)])
            self._figures[state.key] = running.figures()
        return result[0], result[1]

    def _rounds(
        self,
        sides: tuple[LoadedState, LoadedState],
        parts: tuple[WorkloadPart, WorkloadPart],
        enough: Enough,
    ) -> Speedup:
        rates: tuple[list[float], list[float]] = ([], [])
        while True:
            turns = list(zip(sides, parts, rates, strict=True))
            number = len(rates[0])
            for side, part, kept in turns if number % 2 == 0 else reversed(turns):
                kept.append(side.round(part))
            if number and enough(speedup := speedup_of(*rates)):
                return speedup

    def _in_turns(self, before: ClimbState, after: ClimbState) -> Speedup:
        """The memory takes one at a time: `after`, `before`, and `after` again, so that a machine
        that gets slower or faster meanwhile is not taken for one of them.
        """
        self._one_at_a_time = True
        rates: dict[str, list[float]] = {before.key: [], after.key: []}
        parts: dict[str, WorkloadPart] = {}
        few, rest = MIN_ROUNDS // 2 + 1, MIN_ROUNDS // 2
        for state, rounds in ((after, few), (before, MIN_ROUNDS), (after, rest)):
            self.let_go()
            running = self._ensure(state)
            part = parts.setdefault(state.key, running.part)
            self._used[state.key] = part
            rates[state.key] += [running.round(part) for _ in range(rounds)]
        return speedup_of(rates[before.key], rates[after.key])

    def _parts(self, first: LoadedState, second: LoadedState) -> tuple[WorkloadPart, WorkloadPart]:
        """As long for both; who is faster does it several times."""
        if first.at_once != second.at_once:
            return first.part, second.part
        share = min(first.part.share, second.part.share)

        def part(side: LoadedState) -> WorkloadPart:
            room = side.part.share * side.part.repeats / share
            repeats = max(1, min(MAX_REPEATS, round(room)))
            return replace(side.part, share=share, repeats=repeats)

        return part(first), part(second)

    def keep(self, state: ClimbState) -> Observation:
        for key in [key for key in self._running if key != state.key]:
            self._running.pop(key).process.close()
        return self.look(state)

    def drop(self, state: ClimbState) -> None:
        running = self._running.pop(state.key, None)
        if running is not None:
            running.process.close()

    def _looked_at(self, running: LoadedState) -> Observation:
        arguments = {"part": replace(running.part, repeats=1).to_json()}
        observation = running.process.ask("phases", **arguments, limit_s=WORK_LIMIT_S)
        phases = tuple(phase_from(phase) for phase in observation["phases"])
        running.observation = replace(running.observation, phases=phases, figures=running.figures())
        if observation["slowed"] > SLOWED:
            log.info("looking at its steps left them %.2f times slower", observation["slowed"])
            running.process.close()  # loaded again where it is needed
        return running.observation

    def look(self, state: ClimbState) -> Observation:
        """At its steps."""
        running = self._ensure(state)
        if not running.rounds:
            running.round(running.part)
        return self._looked_at(running)

    def part_of(self, state: ClimbState) -> WorkloadPart:
        """What its rounds ran last; the whole, where none ran here."""
        return self._used.get(state.key, WorkloadPart(len(self.workload.requests)))

    def rates(
        self, state: ClimbState, part: WorkloadPart, rounds: int, beside: Callable[[], None]
    ) -> list[float]:
        """Of so many rounds of this part, alone, `beside` called before each."""
        running = self._ensure(state)
        running.round(part)
        rates = []
        for _ in range(rounds):
            beside()
            rates.append(running.round(part))
        return rates

    def figures(self, state: ClimbState) -> Figures | None:
        running = self._running.get(state.key)
        if running is None or not running.rounds:
            return self._figures.get(state.key)
        return running.figures()

    def curve(self, state: ClimbState) -> tuple[CurvePoint, ...]:
        running = self._ensure(state)
        batches = [batch for batch in CURVE_BATCHES if batch <= self.sizes.largest_batch(state)]
        arguments = {"batches": batches, "seconds": CURVE_S}
        result = running.process.ask("curve", **arguments, limit_s=WORK_LIMIT_S)
        return tuple(CurvePoint(**point) for point in result["points"])

    def highest_rate(
        self, state: ClimbState, start: float | None, probe_s: float, seconds: float
    ) -> FoundRate:
        """Of requests within the latency bound; `start` is tried first."""
        arguments = self._traffic | {"start": start, "probe_s": probe_s, "seconds": seconds}
        running, limit_s = self._alone(state), 3 * seconds + LOAD_LIMIT_S
        return FoundRate(**running.process.ask("highest_rate", **arguments, limit_s=limit_s))

    def prove(self, state: ClimbState, rate: float, seconds: float) -> RateProof:
        """That a rate is held so long, or that it is not."""
        arguments = self._traffic | {"rate": rate, "seconds": seconds}
        running, limit_s = self._alone(state), 3 * seconds + LOAD_LIMIT_S
        return RateProof(**running.process.ask("prove", **arguments, limit_s=limit_s))

    @property
    def _traffic(self) -> dict[str, Any]:
        return {"workload": str(self._trace_file), "bound": asdict(self.latency)}

    def _alone(self, state: ClimbState) -> LoadedState:
        """With the whole memory, as it will be served."""
        if self._alone_key != state.key:
            self.let_go()
        others, self._one_at_a_time = self._one_at_a_time, True
        try:
            running = self._ensure(state)
        finally:
            self._one_at_a_time = others
        self._alone_key = state.key
        return running

    def judge(self, state: ClimbState) -> Quality:
        try:
            return self._judge.quality(state)
        except WorkerError as error:
            if error.kind != "memory" or not self._running:
                raise
        self.let_go()  # those that were measured make room, and are loaded again when needed
        return self._judge.quality(state)

    def calibrated(self, state: ClimbState) -> ClimbState:
        scheme, dtype = state.recipe.scheme, state.recipe.dtype
        assert scheme is not None, "a state that is calibrated has a scheme"
        folder = self.work / f"{scheme}-{dtype}"
        if not (folder / "config.json").is_file():
            self.let_go()
            find_codes(self._new_process(), self.subject, state, folder)
        return ClimbState(replace(state.recipe, scheme=None), state.loop, str(folder))

    def write_codes(
        self, state: ClimbState, folder: Path, plain: Sequence[tuple[int, int]]
    ) -> None:
        """The checkpoint that the state's scheme makes of the model, but for these shapes."""
        assert state.recipe.scheme is not None, "what is not quantized is not written"
        write_codes(self._new_process(), self.subject, state, folder, plain)

    def _ensure(self, state: ClimbState) -> LoadedState:
        """Loaded and warm; again, if its process has ended meanwhile."""
        if self._alone_key not in (None, state.key):
            self.let_go()  # there is no room beside it
        running = self._running.get(state.key)
        if running is None or not running.process.is_alive:
            self._running.pop(state.key, None)
            try:
                self._running[state.key] = self._start(state)
            except WorkerError as error:
                if error.kind != "memory" or not self._judge.is_loaded:
                    raise
                self._judge.end()
                self._running[state.key] = self._start(state)
        return self._running[state.key]

    def _start(self, state: ClimbState) -> LoadedState:
        return self._loaded(state, self._seat(state), self.sizes.spec(state, self._one_at_a_time))

    def _loaded(self, state: ClimbState, seat: WorkerSeat, spec: WorkerSpec) -> LoadedState:
        try:
            if self._compiling.is_running:
                seat.ask("build", limit_s=LOAD_LIMIT_S)
                self._compiling.end()
            loaded = seat.load(spec.to_json(), LOAD_LIMIT_S)
            at_once = self.sizes.at_once(state)
            part = self._sized(seat, first_part(self.workload, at_once))
        except WorkerError:
            seat.close(at_once=True)
            raise
        observation = Observation.of_worker(loaded)
        if state.loop == "engine" and observation.num_pages < self.sizes.num_pages(state):
            self._short.add(state.key)
        return LoadedState(state, seat, observation, part, at_once)

    def _sized(self, seat: WorkerSeat, first: WorkloadPart, again: bool = False) -> WorkloadPart:
        """What takes about `round_s`, and is warm."""
        arguments = {"part": first.to_json(), "seconds": self.round_s, "again": again}
        warm = seat.ask("warm", **arguments, limit_s=LOAD_LIMIT_S)
        return WorkloadPart.from_json(warm["part"])

    def _seat(self, state: ClimbState) -> WorkerSeat:
        """In a process that has its weights, or a new one."""
        for running in self._running.values():
            same = running.state.weights_key == state.weights_key and state.loop == "engine"
            if same and running.process.is_alive and not self._one_at_a_time:
                return WorkerSeat(running.process.process, state.key, sharing=running.process)
        process = self._spare or self._new_process()
        self._spare = None
        if self.subject.device != "cpu":  # cores are free: the next one imports meanwhile
            self._spare = self._new_process()
        return WorkerSeat(process, state.key)

    def _new_process(self) -> Process:
        return Process(self.work / f"worker-{next(self._numbers)}.log", ledger=self.ledger)

    def let_go(self) -> None:
        """Of all that are loaded; they are loaded again when they are needed."""
        self._settle()
        self._alone_key = None
        while self._running:
            self._running.popitem()[1].process.close()

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead[0].process.kill()
        self._compiling.end()
        self.let_go()
        self._judge.end()
        if self._spare is not None:
            self._spare.close(at_once=True)
        if self._builder is not None:  # a build that is killed leaves a lock behind
            self._builder.leave()
        self._spare = self._builder = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
