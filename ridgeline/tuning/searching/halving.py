"""Which runs may go on: rungs are shares of a run's length, and a budget of whole runs, of which
there is always enough left to bring one run to its end. Plain integers and floats.

Successive halving lets a fixed share of each rung go on. Here a run goes one rung further when that
is the most promising use of the work (surrogate.py): settings that fall fast at first are not
always those that end lowest, and a fixed share never learns it.

    rungs = Rungs(keep=3, num=3)            # shares 1/9, 1/3, 1
    room = Room(rungs, left=4.0)
    room.allows(0, 2), room.allows(1, 2)    # a new run, one rung more; the leader has reached two
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.errors import UsageError
from ridgeline.tuning.searching.space import Point

SLACK = 1e-9  # of sums of shares


@dataclass(frozen=True)
class Rungs:
    """Shares of a run's length after which it is judged: the last is 1."""

    keep: int = 3  # one of so many goes on
    num: int = 3

    def __post_init__(self) -> None:
        if self.keep < 2:
            raise UsageError(
                f"--one-in is {self.keep}: one trial of so many goes on; give at least 2"
            )
        if self.num < 1:
            raise UsageError(f"--rungs is {self.num}; give at least 1")

    @property
    def shares(self) -> tuple[float, ...]:
        return tuple(float(self.keep) ** (number + 1 - self.num) for number in range(self.num))

    def cost(self, reached: int, goal: int) -> float:
        """In whole runs, of going on from so many rungs to `goal`."""
        before = self.shares[reached - 1] if reached else 0.0
        return self.shares[goal - 1] - before


@dataclass(frozen=True)
class TrialState:
    """A run of the study, as far as it has come."""

    number: int
    point: Point
    losses: tuple[float, ...] = ()  # at the rungs it has reached
    problem: str = ""  # why it does not go on: diverged, failed
    is_diverged: bool = False

    @property
    def reached(self) -> int:
        return len(self.losses)

    @property
    def is_open(self) -> bool:
        return not self.problem


@dataclass(frozen=True)
class Move:
    """One rung more: of a new run, or of a trial."""

    point: Point
    goal: int  # rungs to reach
    trial: int | None = None  # None: new


class Room:
    """What a wave may still take of the budget."""

    def __init__(self, rungs: Rungs, left: float) -> None:
        self.rungs, self.left = rungs, left

    def allows(self, reached: int, leader: int, *, is_leader: bool = False) -> bool:
        """Whether a run may go on from so many rungs: it has to be possible to bring it to its end,
        and, whatever it turns out to be, the leader with its so many rungs.
        """
        whole = self.rungs.cost(reached, self.rungs.num)
        if is_leader:
            return whole <= self.left + SLACK
        beside = self.rungs.cost(reached, reached + 1) + self.rungs.cost(leader, self.rungs.num)
        return max(whole, beside) <= self.left + SLACK

    def take(self, move: Move) -> None:
        self.left -= self.rungs.cost(move.goal - 1, move.goal)
