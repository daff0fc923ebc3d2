"""Which grammars are compiled now, which wait, and which have had their time: numbers alone.

A grammar that is new goes first, because most take milliseconds; one that has had a turn waits for
those that have had less, and then keys take turns: the one that has used least goes on. So nobody
waits for more than the first turns of others, whatever those sent.

    queue = CompileQueue()
    queue.add(1, tenant="key-1f0a", now=0.0)
    queue.advance(now=0.0).begun        # [1]: to be started
    queue.advance(now=0.1).stopped      # what is to be halted, because others are ahead of it
    queue.remove(1)                     # it is done, or nobody waits for it
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

# Seconds of compiling after which a grammar is no longer quick, and after which it is slow. A
# schema of a few fields takes 1 to 40 ms, one of hundreds of fields half a second (128,000 tokens).
TURNS_S = (0.05, 0.5)
MAKE_WAY_S = 0.1  # of compiling, after which it makes way for whoever computes
SLICE_S = 0.5  # that a slow one runs before another one's turn


@dataclass(frozen=True)
class CompileLimits:
    num_running: int = 2  # compiled at once
    num_slow_running: int = 1  # so that others find room, and the engine a core
    timeout_s: float = 30.0  # of compiling, waiting not counted
    in_all_s: float = 60.0  # that a slow one may take with its waiting; then it is one too many
    max_slow: int = 8  # slow ones that are held: each may need memory
    max_slow_per_tenant: int = 4


@dataclass
class CompileJob:
    number: int
    tenant: str
    since: float = 0.0  # it is waited for
    spent_s: float = 0.0
    turn_s: float = 0.0  # since it was last begun or continued
    is_begun: bool = False
    is_running: bool = False
    makes_way: bool = False

    @property
    def level(self) -> int:
        return sum(self.spent_s >= limit for limit in TURNS_S)

    @property
    def is_slow(self) -> bool:
        return self.level == len(TURNS_S)


@dataclass
class Turns:
    """What is to be done now, by the jobs' numbers; those that ended are gone from the queue."""

    begun: list[int] = field(default_factory=list)
    continued: list[int] = field(default_factory=list)
    stopped: list[int] = field(default_factory=list)
    overdue: list[int] = field(default_factory=list)
    crowded: list[int] = field(default_factory=list)  # slow ones beyond the limits
    slowed: list[int] = field(default_factory=list)  # that make way from now on


class CompileQueue:
    def __init__(self, limits: CompileLimits | None = None) -> None:
        self.limits = limits or CompileLimits()
        self._jobs: dict[int, CompileJob] = {}  # in the order in which they came
        self._used_s: Counter[str] = Counter()  # by tenant, of those that have jobs
        self._now = 0.0

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, number: int, tenant: str, now: float, since: float | None = None) -> None:
        """`since` when it is waited for; otherwise from now on."""
        self._count(now)
        self._jobs[number] = CompileJob(number, tenant, now if since is None else since)

    def remove(self, number: int) -> None:
        """It has ended, or is wanted no more; one that is not here is none."""
        job = self._jobs.pop(number, None)
        if job is not None and all(other.tenant != job.tenant for other in self._jobs.values()):
            del self._used_s[job.tenant]

    def advance(self, now: float) -> Turns:
        self._count(now)
        turns = Turns()
        for job in list(self._jobs.values()):
            if job.spent_s >= self.limits.timeout_s:
                turns.overdue.append(job.number)
                self.remove(job.number)
        turns.crowded = self._crowded(now)
        for number in turns.crowded:
            self.remove(number)
        for job in self._jobs.values():
            if job.spent_s >= MAKE_WAY_S and not job.makes_way:
                job.makes_way = True
                turns.slowed.append(job.number)
        chosen = {job.number for job in self._chosen()}
        for job in self._jobs.values():
            if job.is_running and job.number not in chosen:
                job.is_running = False
                turns.stopped.append(job.number)
        for number in chosen:
            job = self._jobs[number]
            if not job.is_running:
                (turns.continued if job.is_begun else turns.begun).append(number)
                job.is_begun = job.is_running = True
                job.turn_s = 0.0
        return turns

    def wait_s(self) -> float | None:
        """Until `advance` has something new to say; None: not before a job comes or ends."""
        running = [job for job in self._jobs.values() if job.is_running]
        return min((self._next_change_s(job) for job in running), default=None)

    def _next_change_s(self, job: CompileJob) -> float:
        ends = [*TURNS_S, MAKE_WAY_S, self.limits.timeout_s]
        until = [end - job.spent_s for end in ends if end > job.spent_s]
        return max(0.001, min([*until, max(0.0, SLICE_S - job.turn_s) or SLICE_S]))

    def _count(self, now: float) -> None:
        elapsed, self._now = max(0.0, now - self._now), now
        for job in self._jobs.values():
            if job.is_running:
                job.spent_s += elapsed
                job.turn_s += elapsed
                self._used_s[job.tenant] += elapsed  # type: ignore[assignment]

    def _crowded(self, now: float) -> list[int]:
        """Slow ones that have waited too long; the newest of those beyond what a tenant may have,
        then of whoever has most.
        """
        slow = [job for job in self._jobs.values() if job.is_slow]
        crowded = [job.number for job in slow if now - job.since > self.limits.in_all_s]
        slow = [job for job in slow if job.number not in crowded]
        counts = Counter(job.tenant for job in slow)
        while counts:
            tenant, count = counts.most_common(1)[0]
            if count <= self.limits.max_slow_per_tenant and counts.total() <= self.limits.max_slow:
                break
            newest = _newest(job for job in slow if job.tenant == tenant)
            slow.remove(newest)
            crowded.append(newest.number)
            counts[tenant] -= 1
        return crowded

    def _chosen(self) -> list[CompileJob]:
        """Who runs now. One that runs is not interrupted in its slice by its equals."""

        def rank(job: CompileJob) -> tuple[int, bool, float, float, int]:
            in_slice = job.is_running and job.turn_s < SLICE_S
            return (job.level, not in_slice, self._used_s[job.tenant], job.spent_s, job.number)

        ranked = sorted(self._jobs.values(), key=rank)
        slow = [job for job in ranked if job.is_slow][: self.limits.num_slow_running]
        quick = [job for job in ranked if not job.is_slow]
        return [*quick, *slow][: self.limits.num_running]


def _newest(jobs: Iterable[CompileJob]) -> CompileJob:
    """The one that has had least time; of several the last that came."""
    return min(jobs, key=lambda job: (job.spent_s, -job.number))
