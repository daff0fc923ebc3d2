"""How many tokens are drafted for each stream in a step: as many as pay off, or none.

A stream's drafts are right with a probability that is measured as it runs, and until then taken
from all streams whose drafts rest on a run of the same length; n in a row with its n-th power. The
table of costs says what more tokens in a step take. Of all drafts that could be
verified, the likeliest ones are taken up to the number at which the tokens expected a second are
most, and none unless that beats the plain step by a margin. Pure numbers.

A lookup is judged in every step, whether its drafts are verified or not, so that it costs nothing
to notice that it has become good. A draft model has to be tried for that: seldom, and more seldom
the longer it does not pay.

    policy = DraftPolicy(StepCosts(), max_drafts=5)
    plan = scheduler.plan(now, policy.wanted(num_rows=scheduler.num_decoding))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from itertools import compress, filterfalse
from math import sqrt
from typing import NamedTuple

from ridgeline.engine.scheduling.state import StreamKey
from ridgeline.engine.scheduling.step_costs import StepCosts

MARGIN = 1.02  # times the plain step's tokens a second, for drafts to be worth the doubt
STREAM_DECAY, ALL_DECAY = 0.95, 0.995  # what a trial keeps of the weight of those before it
PRIOR_WEIGHT = 4.0  # trials that a stream starts with, as right as all others have been
FIRST_RATE, FIRST_WEIGHT = 0.5, 3.0  # of drafts of an engine that has not made any
CARE = 0.25  # standard deviations
# These were chosen by simulation: tests/cpu/test_draft_policy.py.
CLASSES = 32  # probabilities are told apart to this fraction
ENOUGH_PLAIN = 2  # plain steps of a size before the first with drafts
PLAIN_EVERY, PLAIN_RUN = 200, 2  # of so many steps some are plain: the second overlaps the first
FIRST_PAUSE, LONGEST_PAUSE = 32, 4096  # steps between trials that did not pay
HOLDS, MAX_KNOWN = 8, 256  # steps for which a decision holds; decisions that are kept

DraftKind = tuple[
    int, int
]  # of a stream: how likely it has drafts, and that each is right, in classes


class DraftOutcome(NamedTuple):
    """What a step brought one of its samples."""

    key: StreamKey
    num_accepted: int  # of the drafts it had
    first_right: bool  # whether its first draft was what was chosen, verified or not
    match: int  # what drafts for the next step rest on: a run of so many tokens; 0: there are none


class Rate:
    """How often drafts are right, the last ones counting most."""

    __slots__ = ("decay", "right", "tried")

    def __init__(self, decay: float) -> None:
        self.decay, self.right, self.tried = decay, 0.0, 0.0

    def note(self, num_right: int, num_tried: int) -> None:
        self.right = self.right * self.decay + num_right
        self.tried = self.tried * self.decay + num_tried

    def mean(self, prior: float, weight: float) -> float:
        return (self.right + prior * weight) / (self.tried + weight)

    def careful(self, prior: float, weight: float) -> float:
        """The mean minus a margin for its uncertainty: among many streams, those that look best
        were mostly lucky.
        """
        mean = self.mean(prior, weight)
        return max(mean - CARE * sqrt(mean * (1 - mean) / (self.tried + weight)), 0.0)


class StreamRecord:
    __slots__ = ("last_trial", "match", "num_drafting", "rate")

    def __init__(self) -> None:
        self.rate = Rate(STREAM_DECAY)
        self.match = 0  # of its drafts
        self.num_drafting = 0  # steps with drafts of it that have not come back
        self.last_trial = 0


class DraftPolicy:
    """`free` says that drafts are made anyway and judged in every step; `ahead` that a stream may
    have drafts in a step while its last ones have not come back.
    """

    def __init__(
        self, costs: StepCosts, max_drafts: int, free: bool = True, ahead: bool = False
    ) -> None:
        self.costs, self.max_drafts, self.free, self.ahead = costs, max_drafts, free, ahead
        self.streams: dict[StreamKey, StreamRecord] = {}
        self.with_drafts: dict[
            StreamKey, StreamRecord
        ] = {}  # those that have drafts, mostly few or none
        self._out: list[Sequence[StreamKey]] = []  # of each step that has not come back
        self.rate = Rate(ALL_DECAY)  # of all streams
        self.rates: dict[int, Rate] = {}  # the same by what the drafts rest on
        self.lasting = Rate(ALL_DECAY)  # how often a stream with drafts has some after a step
        self._step, self._next_trial, self._pause = 0, 0, FIRST_PAUSE
        self._num_since = 0  # steps since the last one that had to be plain
        # When it was worked out how many drafts are best for so many streams of each kind.
        self._known: dict[
            tuple[tuple[tuple[DraftKind, int], ...], int], tuple[int, Counter[DraftKind]]
        ] = {}

    @property
    def mean_rate(self) -> float:
        return self.rate.mean(FIRST_RATE, FIRST_WEIGHT)

    def wanted(self, num_rows: int) -> dict[StreamKey, int]:
        """Drafts for a step of this many streams."""
        self._step += 1
        if not self.with_drafts:
            return {}
        rates = self._rates()
        if not rates or self._is_plain_due(num_rows):
            return {}
        counts = self._best(rates, max(num_rows, 1))
        if not counts and not self.free:
            return self._trial(rates)
        return counts

    def _is_plain_due(self, num_rows: int) -> bool:
        """Whether a plain step is due: drafts are compared with its time, which must be recent."""
        if self.costs.num_plain(num_rows) < ENOUGH_PLAIN:
            return True
        self._num_since = (self._num_since + 1) % PLAIN_EVERY
        return self._num_since >= PLAIN_EVERY - PLAIN_RUN

    def _rates(self) -> dict[StreamKey, tuple[float, float]]:
        """For streams that could have drafts: the probability that there are any, and that each
        is right. A stream that is in a step now may have none left after it.
        """
        lasting = self.lasting.mean(FIRST_RATE, FIRST_WEIGHT) if self.free else 1.0
        out, mean = set[StreamKey]().union(*self._out), self.mean_rate
        prior = {match: rate.mean(mean, FIRST_WEIGHT) for match, rate in self.rates.items()}
        return {
            key: (
                lasting if key in out else 1.0,
                record.rate.careful(prior.get(record.match, mean), PRIOR_WEIGHT),
            )
            for key, record in self.with_drafts.items()
            if self.ahead or not record.num_drafting
        }

    def _best(
        self, rates: dict[StreamKey, tuple[float, float]], num_rows: int
    ) -> dict[StreamKey, int]:
        """The likeliest drafts, up to the number with the most tokens a second."""
        classes = {
            key: (round(there * CLASSES), round(rate * CLASSES))
            for key, (there, rate) in rates.items()
        }
        chosen = self._chosen(tuple(sorted(Counter(classes.values()).items())), num_rows)
        return {key: chosen[kind] for key, kind in classes.items() if chosen[kind]}

    def _chosen(
        self, kinds: tuple[tuple[DraftKind, int], ...], num_rows: int
    ) -> Counter[DraftKind]:
        """Drafts for each kind of stream, given how many streams there are of each. The result of
        a few steps ago is reused: costs change slowly, and the device waits for the host.
        """
        step, chosen = self._known.get((kinds, num_rows), (-HOLDS, Counter[DraftKind]()))
        if self._step - step >= HOLDS:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            chosen = self._most_tokens_a_second(dict(kinds), num_rows)
            self._known[kinds, num_rows] = (self._step, chosen)
        return chosen

    def _most_tokens_a_second(
        self, sizes: dict[DraftKind, int], num_rows: int
    ) -> Counter[DraftKind]:
        gains = sorted(
            (
                ((there / CLASSES) * (rate / CLASSES) ** number, (there, rate))
                for there, rate in sizes
                for number in range(1, self.max_drafts + 1)
            ),
            reverse=True,
        )
        plain = max(self.costs.of(num_rows), 1e-9)
        best = MARGIN * num_rows / plain
        num_drafts, num_expected, taken = 0, float(num_rows), Counter[DraftKind]()
        chosen: Counter[DraftKind] = Counter()
        for gain, kind in gains:
            num_drafts += sizes[kind]
            num_expected += gain * sizes[kind]
            taken[kind] += 1
            seconds = self.costs.of(num_rows + num_drafts, max(taken.values()))
            rate = num_expected / max(seconds, plain)  # to verify more never takes less
            if gain > 0 and rate > best:
                best, chosen = rate, taken.copy()
        return chosen

    def _trial(self, rates: dict[StreamKey, tuple[float, float]]) -> dict[StreamKey, int]:
        """A trial, when one is due: one draft for the stream that has gone longest without."""
        if self._step < self._next_trial:
            return {}
        self._next_trial = self._step + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        return {min(rates, key=lambda key: self.streams[key].last_trial): 1}

    def launched(self, keys: Sequence[StreamKey], drafts: Sequence[int]) -> None:
        """A step is out with these samples, and so many drafts of each."""
        self._out.append(keys)
        for key in filterfalse(self.streams.__contains__, keys):
            self.streams[key] = StreamRecord()
        for key in compress(keys, drafts):
            record = self.streams[key]
            record.num_drafting += 1
            record.last_trial = self._step

    def received(self, outcomes: Iterable[DraftOutcome], drafts: Sequence[int]) -> None:
        """The oldest launched step has come back; `drafts` are those it was launched with.
        Samples that had no drafts and have none now are left out.
        """
        del self._out[:1]
        for outcome, num_drafts in zip(outcomes, drafts, strict=True):
            record = self.streams.get(outcome.key)
            if record is None:  # it has ended
                continue
            record.num_drafting -= num_drafts > 0
            self._learn(record, outcome, num_drafts)
            if record.match:
                self.lasting.note(outcome.match > 0, 1)
            self._set_match(outcome.key, record, outcome.match)

    def _set_match(self, key: StreamKey, record: StreamRecord, match: int) -> None:
        record.match = match
        if match:
            self.with_drafts[key] = record
        else:
            self.with_drafts.pop(key, None)

    def rest(self) -> None:
        """Steps follow that are not reported here: what is drafted after them is unknown."""
        for key, record in list(self.with_drafts.items()):
            self._set_match(key, record, 0)

    def _learn(self, record: StreamRecord, outcome: DraftOutcome, num_drafts: int) -> None:
        """From drafts that were there: after a lookup that found nothing they say nothing. Drafts
        that could not be run count as wrong.
        """
        num_right, num_tried = outcome.num_accepted, min(num_drafts, outcome.num_accepted + 1)
        if not num_drafts and self.free:
            num_right, num_tried = int(outcome.first_right), 1
        if num_tried and record.match:
            own = self.rates.setdefault(record.match, Rate(ALL_DECAY))
            for rate in (record.rate, self.rate, own):
                rate.note(num_right, num_tried)
            if num_right:
                self._pause, self._next_trial = FIRST_PAUSE, self._step

    def forget(self, request_id: Hashable, num_samples: int) -> None:
        for sample in range(num_samples):
            self.streams.pop((request_id, sample), None)
            self.with_drafts.pop((request_id, sample), None)

    def waits(self, num_rows: int, num_drafting: int, host_s: float) -> bool:
        """Whether the next step should wait for one with drafts to come back. If it does not, the
        streams with drafts are missing in it; if it does, the device has nothing to do for as long
        as the host takes.
        """
        num_expected = num_drafting * self.mean_rate
        gained = self.costs.of(num_rows) * (num_expected + num_drafting)
        return gained >= host_s * (2 * num_rows + num_expected - num_drafting)
