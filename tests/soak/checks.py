"""What a soak promises, each as one line with its figure and its limit.

checks = checked(soak)
print(table(checks))
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from soak.killing import Outage
from soak.memory import MemoryWatch, Who
from soak.traffic import SentRequest

MAX_GROWTH = 0.02
QUIET_TIMES = 2.0  # p99 may be so many times that of the slower of the two quiet runs
WARM_SHARE = 0.35  # of the run, and of the time after the last kill, before memory must stay
FEWEST = 100  # requests a p99 is taken of


@dataclass(frozen=True)
class Check:
    name: str
    figure: str
    limit: str
    is_ok: bool


@dataclass
class SoakResult:
    """What happened."""

    quiet: list[SentRequest]
    quiet_after: list[SentRequest]  # of another server, which nobody has harmed
    loud: list[SentRequest]
    outages: list[Outage]
    memory: MemoryWatch
    begun: float  # of the loud run
    ended: float
    restarts: float  # that the server counts
    left_behind: dict[str, float]  # figures that are 0 when nothing is held
    changed: list[str]  # prompts with another answer than before
    exit_code: int | None
    problems: list[str] = field(default_factory=list)

    @property
    def well_behaved(self) -> list[SentRequest]:
        return [request for request in self.loud if request.kind == "well-behaved"]

    @property
    def apart(self) -> list[SentRequest]:
        """Well-behaved requests that were not alive during a kill."""
        return [request for request in self.well_behaved if not self._was_hit(request)]

    @property
    def hit(self) -> list[SentRequest]:
        return [request for request in self.well_behaved if self._was_hit(request)]

    def _was_hit(self, request: SentRequest) -> bool:
        return any(outage.touches(request.begun, request.ended) for outage in self.outages)

    @property
    def longest_outage_s(self) -> float:
        return max((outage.seconds for outage in self.outages), default=0.0)


def p99(requests: Sequence[SentRequest]) -> float | None:
    """Of those that were answered: the nearest rank."""
    seconds = sorted(request.seconds for request in requests if request.is_answered)
    return seconds[math.ceil(0.99 * len(seconds)) - 1] if seconds else None


def checked(result: SoakResult) -> list[Check]:
    return [*_answers(result), *_latencies(result), *_memory(result), *_ends(result)]


def _answers(result: SoakResult) -> list[Check]:
    everyone = [*result.quiet, *result.loud, *result.quiet_after]
    wrong = sum(bool(request.problem) for request in everyone)
    calm = [*result.quiet, *result.apart, *result.quiet_after]
    refused = sum(request.is_refused for request in calm)
    return [
        Check(f"without an answer, of {len(everyone)}", str(wrong), "0", wrong == 0),
        Check(
            f"well-behaved refused without a kill, of {len(calm)}",
            str(refused), "0", refused == 0,
        ),
    ]  # fmt: skip


def _latencies(result: SoakResult) -> list[Check]:
    quiets = {"before": result.quiet, "after": result.quiet_after}
    apart, hit = p99(result.apart), p99(result.hit)
    known = [seconds for quiet in quiets.values() if (seconds := p99(quiet)) is not None]
    limit = QUIET_TIMES * max(known) if len(known) == len(quiets) else None
    later = None if limit is None else limit + result.longest_outage_s
    few = min(len(requests) for requests in (*quiets.values(), result.apart)) < FEWEST
    return [
        *(
            Check(f"p99 of {len(quiet)} in the quiet run {when}", _s(p99(quiet)), "",
                  p99(quiet) is not None)
            for when, quiet in quiets.items()
        ),
        _within(f"p99 of {len(result.apart)} not alive during a kill", apart, limit),
        _within(f"p99 of {len(result.hit)} alive during a kill", hit, later, is_needed=False),
        Check("requests a p99 is taken of", f"at least {FEWEST}" if not few else "too few",
              str(FEWEST), not few),
    ]  # fmt: skip


def _within(name: str, value: float | None, limit: float | None, is_needed: bool = True) -> Check:
    is_ok = not is_needed if value is None or limit is None else value <= limit
    return Check(name, _s(value), f"{_s(limit)}", is_ok)


def _s(seconds: float | None) -> str:
    return "none" if seconds is None else f"{seconds:.2f} s"


def growths(result: SoakResult) -> dict[Who, float | None]:
    """The server's from its first requests on; its last engine's once that is warm."""
    last = max((outage.recovered for outage in result.outages), default=result.begun)
    warm = last + WARM_SHARE * (result.ended - last)
    begun = result.begun + WARM_SHARE * (result.ended - result.begun)
    return {
        "server": result.memory.growth("server", begun, result.ended),
        "engine": result.memory.growth("engine", warm, result.ended),
    }


def _memory(result: SoakResult) -> list[Check]:
    return [
        Check(
            f"memory of the {who} grew by", "unknown" if share is None else f"{share:+.2%}",
            f"{MAX_GROWTH:.0%}", share is not None and share <= MAX_GROWTH,
        )
        for who, share in growths(result).items()
    ]  # fmt: skip


def _ends(result: SoakResult) -> list[Check]:
    kills, left = len(result.outages), sum(result.left_behind.values())
    names = ", ".join(name for name, value in result.left_behind.items() if value) or "nothing"
    return [
        Check("engine restarts", f"{result.restarts:.0f}", f"{kills} kills",
              result.restarts == kills),
        Check("left behind at the end", names, "nothing", left == 0),
        Check("answers that changed", str(len(result.changed)), "0", not result.changed),
        Check("exit code after SIGTERM", str(result.exit_code), "0", result.exit_code == 0),
        Check("other problems", str(len(result.problems)), "0", not result.problems),
    ]  # fmt: skip


def table(checks: Sequence[Check]) -> str:
    wide = max(len(check.name) for check in checks)
    figures = max(len(check.figure) for check in checks)
    return "\n".join(
        f"{'ok' if check.is_ok else 'failed':<7} {check.name:<{wide}}  {check.figure:>{figures}}"
        + (f"  limit {check.limit}" if check.limit else "")
        for check in checks
    )


def counts(result: SoakResult) -> dict[str, int]:
    """How many of each kind had which status; 0 is none, of those that went away."""
    return dict(sorted(Counter(f"{s.kind} {s.status}" for s in result.loud).items()))
