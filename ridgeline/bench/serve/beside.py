"""A server beside its bare engine, in one run: the same prompts, lengths and settings through HTTP
and without it. How much of the engine's tokens/s reaches the clients, and what the server adds to
the first token.

What it adds is told by request: from the client's last byte sent to the first byte it got, less
what the engine's process says it took from the request's submission to its first token. Alone, and
beside as many streams as were asked for.

    with OwnServer(str(folder)) as server, LoadProcesses(2) as load:
        served = ServedSide(server, load, met, plan).measured()
    alone = engine_rates(engine, plan)
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from ridgeline.bench.engine import Percentiles
from ridgeline.bench.serve.client import Answer
from ridgeline.bench.serve.endpoint import Met
from ridgeline.bench.serve.load import Burst, LoadProcesses, Own, Shot
from ridgeline.bench.serve.own_server import OwnServer
from ridgeline.bench.serve.prompts import prompt_ids
from ridgeline.data.workload import Workload, WorkloadRequest
from ridgeline.engine import Engine, Output, Sampling
from ridgeline.errors import RequestError
from ridgeline.progress import Progress

PROBE = Workload("probe", (WorkloadRequest(32, 2),))  # a request whose first token is looked at
PROBE_GAP_S = 0.05  # between two of them
WARM_SEED = 500_000  # prompts of the rounds that do not count


@dataclass(frozen=True)
class BesidePlan:
    """What both sides do."""

    workload: Workload
    num_streams: int
    num_requests: int  # the workload is repeated, or cut
    num_rounds: int
    num_probes: int
    timeout_s: float = 600.0

    def ids(self, number: int, vocab_size: int, seed: int) -> list[int]:
        index, more = self._place(number)
        return prompt_ids(self.workload, index, vocab_size, seed + more)

    def request(self, number: int) -> WorkloadRequest:
        return self.workload.requests[self._place(number)[0]]

    def _place(self, number: int) -> tuple[int, int]:
        num = len(self.workload.requests)
        return number % num, number // num

    def seeds(self) -> list[int]:
        """Of the rounds, the first one to warm up."""
        return [WARM_SEED, *(1000 * number for number in range(1, self.num_rounds + 1))]


@dataclass
class ServedFigures:
    rates: list[float] = field(default_factory=list)  # tokens/s of each round
    alone_s: list[float] = field(default_factory=list)  # the server's part of first tokens
    beside_s: list[float] = field(default_factory=list)  # the same beside the streams
    own: Own | None = None  # the client, in the last round

    @property
    def rate(self) -> float:
        return median(self.rates)

    @property
    def alone(self) -> Percentiles | None:
        return Percentiles.of(self.alone_s)

    @property
    def beside(self) -> Percentiles | None:
        return Percentiles.of(self.beside_s)


class ServedSide:
    def __init__(self, server: OwnServer, load: LoadProcesses, met: Met, plan: BesidePlan) -> None:
        self._server, self._load, self._met, self._plan = server, load, met, plan
        self._figures = ServedFigures()

    def measured(self, progress: Progress) -> ServedFigures:
        plan, seeds = self._plan, self._plan.seeds()
        wall_s = 0.0
        for number, seed in enumerate(seeds):
            wall_s = self._round(seed, is_counted=number > 0)
            progress("rounds through HTTP", number + 1, len(seeds) + 2)
        self._figures.alone_s = self._probed("alone", [PROBE_GAP_S] * plan.num_probes, 0)
        progress("rounds through HTTP", len(seeds) + 1, len(seeds) + 2)
        # While all streams run: not at their beginning, when prompts are computed, nor at the end.
        gaps = [0.3 * wall_s, *[0.4 * wall_s / plan.num_probes] * (plan.num_probes - 1)]
        self._figures.beside_s = self._probed("beside", gaps, plan.num_streams)
        progress("rounds through HTTP", len(seeds) + 2, len(seeds) + 2)
        return self._figures

    def _round(self, seed: int, is_counted: bool) -> float:
        shots = [self._shot(number, 0.0, seed) for number in range(self._plan.num_requests)]
        answers, own = self._fired(shots, f"round-{seed}", self._plan.num_streams)
        wall_s = max(answer.end for answer in answers) - min(answer.due for answer in answers)
        if is_counted:
            self._figures.rates.append(sum(answer.tokens for answer in answers) / wall_s)
            self._figures.own = own
        return wall_s

    def _probed(self, name: str, gaps_s: Sequence[float], num_streams: int) -> list[float]:
        """The server's part of each probe's first token, with so many streams beside it."""
        seed = WARM_SEED + 1 + num_streams
        shots = [self._shot(number, 0.0, seed) for number in range(num_streams)]
        due = 0.0
        for number, gap_s in enumerate(gaps_s, num_streams):
            due += gap_s
            shots.append(Shot(number, due, self._met.maker.body(PROBE, 0, seed + number)))
        answers, _ = self._fired(shots, name, None)
        engine_s = self._engine_times(name)
        return [
            answer.head - answer.sent - engine_s[answer.index]
            for answer in answers[num_streams:]
            if answer.head is not None and answer.index in engine_s
        ]

    def _shot(self, number: int, due_s: float, seed: int) -> Shot:
        num = len(self._plan.workload.requests)
        body = self._met.maker.body(self._plan.workload, number % num, seed + number // num)
        return Shot(number, due_s, body)

    def _fired(
        self, shots: Sequence[Shot], name: str, num_clients: int | None
    ) -> tuple[list[Answer], Own]:
        met, timeout_s = self._met, self._plan.timeout_s
        burst = Burst(met.endpoint, met.path, shots, timeout_s, num_clients, name=name)
        report = self._load.run(burst)
        failed = [answer for answer in report.answers if answer.error is not None]
        if failed:
            raise RequestError(
                f"{len(failed)} of {len(shots)} requests failed; the first: {failed[0].error}: "
                f"{failed[0].detail}"
            )
        return report.answers, report.own

    def _engine_times(self, name: str) -> dict[int, float]:
        """What the engine took to each first token, by the requests' numbers."""
        return {
            int(line["request_id"].rpartition("-")[2]): line["engine_first_token_s"]
            for line in self._server.log_lines()
            if line.get("request_id", "").startswith(f"{name}-") and "engine_first_token_s" in line
        }


def engine_rates(
    engine: Engine, plan: BesidePlan, vocab_size: int, progress: Progress
) -> list[float]:
    """Output tokens/s of each round, in this process and without texts being sent anywhere."""
    rates, seeds = [], plan.seeds()
    for number, seed in enumerate(seeds):
        rate = _engine_round(engine, plan, vocab_size, seed)
        rates += [rate] if number else []
        progress("rounds of the engine alone", number + 1, len(seeds))
    return rates


def _engine_round(engine: Engine, plan: BesidePlan, vocab_size: int, seed: int) -> float:
    """As many streams at a time as there are clients on the other side."""
    waiting = deque(
        (plan.ids(number, vocab_size, seed), plan.request(number).num_output_tokens)
        for number in range(plan.num_requests)
    )
    num_running = num_tokens = 0
    begun = time.monotonic()
    while waiting or engine.has_work:
        while waiting and num_running < plan.num_streams:
            ids, max_tokens = waiting.popleft()
            temperature = plan.workload.temperature
            engine.add(
                ids, Sampling(max_tokens=max_tokens, temperature=temperature, ignore_eos=True)
            )
            num_running += 1
        for event in engine.step():
            if isinstance(event, Output):
                event.raise_unless_finished()
                num_running -= 1
                num_tokens += len(event.tokens)
    return num_tokens / (time.monotonic() - begun)
