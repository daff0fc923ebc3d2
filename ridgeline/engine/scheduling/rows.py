"""The rows of a step: a token for each stream that decodes, then drafted tokens, then pieces
of prompts with what is left of the token budget.

`plan_decode` is the cost of a step with a thousand streams, so it is one plain loop; everything
that is not the next token in the same page is left to the functions behind it.
"""

from __future__ import annotations

from collections.abc import Mapping

from ridgeline.engine.scheduling.running import Running, by_rank
from ridgeline.engine.scheduling.state import Stream, StreamKey
from ridgeline.engine.scheduling.step_plan import Step


def plan_decode(running: Running, step: Step) -> None:
    """One token for each stream that decodes and has no drafts to verify."""
    lists, rest = step.lists, []
    step_id = step.step_id
    on_device = step_id - 1 if step_id - 1 in running.steps else None
    add_row, add_seat, add_id = step.rows.append, lists.seats.append, lists.token_ids.append
    add_position, add_slot = lists.positions.append, lists.slots.append
    add_device_token, add_device_sample = lists.device_tokens.append, lists.device_samples.append
    row = 0
    for stream in running.decoding[: step.budget]:
        position = stream.position
        if position >= stream.limit:
            rest.append(stream)
            continue
        if stream.last_step == on_device:
            add_device_token(row)
            add_device_sample(stream.sample_index)
            add_id(0)
        else:
            add_id(stream.tokens[-1])
        add_row(stream)
        add_seat(stream.seat)
        add_position(position)
        add_slot(stream.offset + position)
        stream.position = position + 1
        stream.sample_index = row
        stream.last_step = step_id
        row += 1
    step.close_decode_rows()
    plan_late_tokens(running, rest, step)


def plan_late_tokens(running: Running, streams: list[Stream], step: Step) -> None:
    """Of the streams that the quick loop has left: a token for each that has no drafts."""
    for stream in streams:
        if stream.drafts == 0:
            _plan_token(running, stream, step)


def _plan_token(running: Running, stream: Stream, step: Step) -> None:
    """A decode row, and what the next ones need to be planned in the quick loop."""
    position, size, unsure = stream.position, running.tables.size, stream.unsure
    if not _may_decode(running, stream) or not _reaches_next(running, stream, step):
        return
    _add_last_token(running, stream, 0, step)
    index = position // size
    stream.offset = (stream.pages[index] - index) * size
    if not unsure and not stream.request.ask.needs_host:
        stream.limit = min((index + 1) * size, stream.full_length - 1)


def _reaches_next(running: Running, stream: Stream, step: Step) -> bool:
    """Whether there is a page for its next token, wherever that may be. For one that could wait
    until that is known nobody is preempted.
    """
    end = stream.position + stream.unsure + 1
    if stream.unsure:
        return running.tables.extend(stream, end, step) == end
    return running.reach(stream, end, step) == end


def note_drafts(running: Running, drafts: Mapping[StreamKey, int]) -> list[Stream]:
    """The streams that will verify drafts, kept out of the quick loop."""
    drafting = []
    for key, count in drafts.items():
        if count < 1:
            continue
        stream = running.streams.get(key)
        if stream is None or stream.request.ask.needs_host:
            continue  # what may come next is only known when the host knows what has come
        if stream.state == "decoding":
            stream.drafts, stream.limit = count, 0
            drafting.append(stream)
    return sorted(drafting, key=by_rank)


def plan_drafts(running: Running, streams: list[Stream], step: Step) -> None:
    """Rows with drafts. Each stream gets its one token first; drafts share what is then left of the
    budget, or half of it when prompts want their part.
    """
    left = step.budget - len(streams)
    if running.prefilling or running.queue.num_waiting:
        left //= 2
    for stream in streams:
        wanted, stream.drafts = stream.drafts, 0
        if step.budget < 1 or not _may_decode(running, stream):
            continue
        first = stream.position + stream.unsure
        wanted = max(min(wanted, left, stream.full_length - 2 - first), 0)
        end = _reach_drafts(running, stream, first, first + 1 + wanted, step)
        if end > first:
            _add_last_token(running, stream, end - first - 1, step)
            left -= end - first - 1


def _reach_drafts(running: Running, stream: Stream, first: int, end: int, step: Step) -> int:
    """How far the stream can write, from `first` up to `end`. Others are preempted for its one
    token alone.
    """
    covered = len(stream.pages) * running.tables.size
    if covered >= end:
        return end
    if covered <= first and not _reaches_next(running, stream, step):
        return first
    return running.tables.extend(stream, end, step)


def _may_decode(running: Running, stream: Stream) -> bool:
    """Whether it runs, has tokens left to make, and does not wait for one to come back."""
    free = stream.state == "decoding" and stream.held_by <= running.received
    return free and stream.position + stream.unsure < stream.full_length - 1


def _add_last_token(running: Running, stream: Stream, num_drafts: int, step: Step) -> None:
    """A row of the stream's last token and its drafts, whose ids are for others to fill in."""
    position = stream.position
    slots = running.tables.slots(stream, position, position + 1 + num_drafts)
    if stream.unsure:
        step.move(stream, 1 + num_drafts)
    if position < len(stream.tokens):
        step.add_row(stream, [stream.tokens[position], *[0] * num_drafts], slots)
    else:
        step.take_from_device(stream)
        step.add_row(stream, [0] * (1 + num_drafts), slots)
    step.add_sample(stream, num_drafts, holds=num_drafts > 0 and not running.ahead)
    stream.position = position + 1  # after drafts, what comes back says where it goes on


def plan_piece(running: Running, stream: Stream, step: Step) -> None:
    """As much of a prompt as budget and pages allow, up to a page's end if it is not all."""
    first, size = stream.position, running.tables.size
    end = min(stream.target, first + step.budget)
    if end < stream.target and end - end % size > first:
        end -= end % size
    end = running.reach(stream, end, step)
    if end <= first:
        return
    step.add_row(stream, stream.tokens[first:end], running.tables.slots(stream, first, end))
    step.pieces.append((stream, end))
    stream.position = end
    if end == stream.target:
        _end_prompt(running, stream, step)


def _end_prompt(running: Running, stream: Stream, step: Step) -> None:
    """The prompt's last piece is planned: the stream samples, and decodes from the next step on."""
    running.tables.promise(stream, 0)
    running.decode(stream)
    request = stream.request
    if request.ask.max_tokens == 0:
        return
    step.add_sample(stream)
    if not request.forked:
        request.forked = True
        for sample in range(1, request.ask.num_samples):
            _fork(running, stream, sample, step)


def _fork(running: Running, stream: Stream, sample: int, step: Step) -> None:
    """Another sample of the request: it shares the prompt and samples from the same row."""
    sibling = running.new_stream(stream.request, sample, stream.tokens[:])
    sibling.started = True
    step.seat(sibling, stream.spare_seats.pop())
    running.tables.fork(stream, sibling, step)
    running.decode(sibling)
    step.add_sample(sibling)
