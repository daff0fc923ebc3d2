"""A device without tensors, for tests of the scheduler: it runs plans on memory that remembers
which prefix was written in which slot, and refuses to read anything but a row's own prefix.

The model behind it is a chain of hashes. What is "written" for a token is the hash of all tokens up
to it (and the tenant's salt), and the next token follows from that hash, so that one wrong slot
anywhere changes what is read. `naive_tokens` is the same model without pages.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Hashable, Sequence
from itertools import accumulate

from ridgeline.engine.scheduling.scheduler import Scheduler
from ridgeline.engine.scheduling.state import Ask, StreamKey
from ridgeline.engine.scheduling.step_plan import StepPlan


def chain(salt: str, tokens: Sequence[int]) -> list[int]:
    """The hash of each beginning of `tokens`."""
    value, found = sum(salt.encode()), []
    for token in tokens:
        value = hash((value, token))
        found.append(value)
    return found


def next_token(value: int, sample: int, vocab: int) -> int:
    return hash((value, sample)) % vocab


def naive_tokens(ask: Ask, sample: int, vocab: int) -> list[int]:
    """The output of a request that runs alone."""
    tokens = list(ask.prompt)
    output: list[int] = []
    for _ in range(ask.max_tokens):
        output.append(next_token(chain(ask.salt, tokens + output)[-1], sample, vocab))
        if output[-1] in ask.stop_ids and len(output) > ask.min_tokens:
            break
    return output


class Footprint:
    """The memory a step touches, for the time in which it is out."""

    def __init__(self) -> None:
        self.read: dict[int, StreamKey] = {}  # slot to reader
        self.written: dict[int, StreamKey] = {}
        self.copied_from: set[int] = set()  # pages


class FakeDevice:
    def __init__(self, scheduler: Scheduler, vocab: int, draw: random.Random) -> None:
        config = scheduler.config
        self.size, self.window = config.page_size, config.window
        self.vocab, self.draw = vocab, draw
        self.memory: list[int | None] = [None] * (config.num_pages * config.page_size)
        self.table: dict[tuple[int, int], int] = {}  # seat and index to page
        self.owner: dict[int, StreamKey] = {}  # who sits where
        self.salts: dict[Hashable, str] = {}
        self.history: dict[StreamKey, list[int]] = {}  # what each stream has been made of, truly
        self.outputs: list[list[int]] = []  # of the step run last
        self.last_step = 0
        self.out: dict[int, Footprint] = {}  # steps that have not been received

    def submitted(self, ask: Ask) -> None:
        self.salts[ask.request_id] = ask.salt
        self.history[ask.request_id, 0] = [*ask.prompt, *ask.output]
        for sample in range(1, ask.num_samples):
            self.history[ask.request_id, sample] = list(ask.prompt)

    def run(self, plan: StepPlan) -> list[list[int]]:
        """The tokens of each sample."""
        assert plan.step_id == self.last_step + 1
        footprint = Footprint()
        self._copy(plan, footprint)
        for seat, key in plan.joined:
            self.owner[seat] = key
        for seat, index, page in zip(
            plan.table_seats, plan.table_indexes, plan.table_pages, strict=True
        ):
            self.table[seat, index] = page
        entries = list(zip(plan.table_seats, plan.table_indexes, strict=True))
        assert len(set(entries)) == len(entries), "one entry of the page table is set twice"
        plan = self._moved(plan)
        ids = self._token_ids(plan)
        self._write(plan, ids, footprint)
        self._read(plan, ids, footprint)
        self._check_against_steps_out(footprint, set(plan.table_pages))
        self.outputs = self._sample(plan, ids)
        self.out[plan.step_id] = footprint
        self.last_step = plan.step_id
        return self.outputs

    def slot(self, seat: int, position: int) -> int:
        return self.table[seat, position // self.size] * self.size + position % self.size

    def _moved(self, plan: StepPlan) -> StepPlan:
        """The plan with rows behind drafts where they belong, now that it is known."""
        positions, slots = list(plan.positions), list(plan.slots)
        firsts, starts = list(plan.first_positions), list(accumulate(plan.num_tokens, initial=0))
        for token, sample in zip(plan.moved_tokens, plan.moved_samples, strict=True):
            row = bisect_right(starts, token) - 1
            positions[token] += len(self.outputs[sample]) - 1
            slots[token] = self.slot(plan.seats[row], positions[token])
            firsts[row] = positions[starts[row]]
        return plan._replace(positions=positions, slots=slots, first_positions=firsts)

    def _copy(self, plan: StepPlan, footprint: Footprint) -> None:
        sources = {source for source, _ in plan.copies}
        targets = [target for _, target in plan.copies]
        assert len(set(targets)) == len(targets)
        assert not sources & set(targets), "copies depend on their order"
        for source, target in plan.copies:
            start, end = source * self.size, target * self.size
            self.memory[end : end + self.size] = self.memory[start : start + self.size]
            footprint.copied_from.add(source)
            for older in self.out.values():
                assert target not in older.copied_from
                touched = {slot // self.size for slot in (*older.read, *older.written)}
                assert target not in touched, "a page is overwritten while a step uses it"

    def _token_ids(self, plan: StepPlan) -> list[int]:
        ids = list(plan.token_ids)
        for token, sample in zip(plan.device_tokens, plan.device_samples, strict=True):
            ids[token] = self.outputs[sample][-1]
        start, drafting = 0, plan.num_decode_rows + plan.num_draft_rows
        for row, count in enumerate(plan.num_tokens):
            drafts = plan.sample_drafts[row] if row < drafting else 0
            key, first = plan.keys[row], plan.first_positions[row]
            assert self.owner[plan.seats[row]] == key
            known = self.history[key][first : first + count - drafts]
            assert ids[start : start + count - drafts] == known, "a row has another stream's tokens"
            tokens = self.history[key][: first + count - drafts]
            for index in range(start + count - drafts, start + count):
                ids[index] = self._draft(key, tokens)
                tokens = [*tokens, ids[index]]
            start += count
        assert start == len(ids) == len(plan.positions) == len(plan.slots)
        return ids

    def _draft(self, key: StreamKey, tokens: list[int]) -> int:
        """A draft: often what the model will say."""
        if self.draw.random() < 0.7:
            return next_token(chain(self.salts[key[0]], tokens)[-1], key[1], self.vocab)
        return self.draw.randrange(self.vocab)

    def _rows(self, plan: StepPlan, ids: list[int]) -> list[tuple[int, int, list[int]]]:
        """For each row its first token in the step, its first position, and the chain up to its
        end.
        """
        rows, start = [], 0
        for key, first, count in zip(plan.keys, plan.first_positions, plan.num_tokens, strict=True):
            tokens = self.history[key][:first] + ids[start : start + count]
            assert len(tokens) == first + count, "a row begins behind its stream's end"
            assert plan.positions[start : start + count] == list(range(first, first + count))
            rows.append((start, first, chain(self.salts[key[0]], tokens)))
            start += count
        return rows

    def _write(self, plan: StepPlan, ids: list[int], footprint: Footprint) -> None:
        for row, (start, first, values) in enumerate(self._rows(plan, ids)):
            for position in range(first, len(values)):
                slot = plan.slots[start + position - first]
                if slot < 0:
                    continue
                assert slot == self.slot(plan.seats[row], position)
                assert slot not in footprint.written, "two rows write one slot"
                self.memory[slot] = values[position]
                footprint.written[slot] = plan.keys[row]

    def _read(self, plan: StepPlan, ids: list[int], footprint: Footprint) -> None:
        for row, (_, first, values) in enumerate(self._rows(plan, ids)):
            seen = 0 if self.window is None else max(0, first - self.window + 1)
            for position in range(seen, len(values)):
                slot = self.slot(plan.seats[row], position)
                assert self.memory[slot] == values[position], (
                    f"step {plan.step_id}: {plan.keys[row]} reads at position {position} what is "
                    "not its own prefix"
                )
                footprint.read[slot] = plan.keys[row]

    def _check_against_steps_out(self, footprint: Footprint, new_pages: set[int]) -> None:
        for older in self.out.values():
            for slot, key in footprint.written.items():
                assert older.read.get(slot, key) == key, "a slot is rewritten while a step reads it"
                assert older.written.get(slot, key) == key
                page = slot // self.size
                assert page not in new_pages & older.copied_from, "a copied page is taken too early"

    def _sample(self, plan: StepPlan, ids: list[int]) -> list[list[int]]:
        outputs, logits = [], 0
        ends = [values for _, _, values in self._rows(plan, ids)]
        row_of_token = [row for row, count in enumerate(plan.num_tokens) for _ in range(count)]
        for key, seat, drafts in zip(
            plan.sample_keys, plan.sample_seats, plan.sample_drafts, strict=True
        ):
            assert self.owner[seat] == key
            tokens = plan.logit_tokens[logits : logits + 1 + drafts]
            logits += 1 + drafts
            assert [plan.positions[token] for token in tokens] == list(
                range(plan.positions[tokens[0]], plan.positions[tokens[0]] + 1 + drafts)
            )
            output = []
            for index, token in enumerate(tokens):
                value = ends[row_of_token[token]][plan.positions[token]]
                output.append(next_token(value, key[1], self.vocab))
                if index < drafts and ids[token + 1] != output[-1]:
                    break
            self.history[key] = self.history[key][: plan.positions[tokens[0]] + 1] + output
            outputs.append(output)
        assert logits == len(plan.logit_tokens)
        return outputs
