"""The lookup's definition against a search written out, and plans with drafts made flat."""

from __future__ import annotations

import random

import pytest
import torch

from ridgeline.engine.scheduling.step_plan import StepPlan
from ridgeline.engine.steps.flat_plan import DraftSlots, first_rows, flattened, without_drafts
from ridgeline.kernels.prompt_lookup import Streams, prompt_lookup


def found_by_hand(tokens: list[int], low: int, high: int, count: int) -> tuple[int, list[int]]:
    """The longest run of last tokens that is there earlier, the latest of those; and the draft."""
    for length in range(high, low - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[len(tokens) - length :]:
                period = tokens[end:]
                return length, [period[n % len(period)] for n in range(count)]
    return 0, [tokens[-1]] * count


@pytest.mark.smoke
@pytest.mark.parametrize("vocab_size", [2, 3, 12])
def test_what_is_found_is_what_a_search_finds(vocab_size: int) -> None:
    draw = random.Random(vocab_size)
    for _ in range(40):
        low = draw.randint(1, 3)
        high, count = draw.randint(low, 6), draw.randint(1, 6)
        lines = [[draw.randrange(vocab_size) for _ in range(draw.randint(1, 40))] for _ in range(4)]
        verified = [draw.randint(0, count) for _ in lines]
        chosen = [[draw.randrange(vocab_size) for _ in range(1 + n)] for n in verified]
        history = torch.full((6, 50), 99, dtype=torch.int32)
        drafts = torch.randint(0, vocab_size, (6, count), dtype=torch.int32)
        seats, rows, row = [4, 1, 5, 0], [], 0
        for seat, line, tokens in zip(seats, lines, chosen, strict=True):
            history[seat, : len(line)] = torch.tensor(line)
            rows.append(row)
            row += len(tokens)
        before = drafts.clone()
        samples = torch.tensor([seats, rows, verified, [len(line) for line in lines]]).int()
        tokens_R = torch.tensor([token for tokens in chosen for token in tokens]).int()
        streams = Streams(history, drafts, low, high)
        found = prompt_lookup(streams, tokens_R, samples).T.tolist()
        for index, (seat, line, tokens) in enumerate(zip(seats, lines, chosen, strict=True)):
            right = 0
            while right < verified[index] and before[seat, right] == tokens[right]:
                right += 1
            whole = line + tokens[: right + 1]
            length, draft = found_by_hand(whole, low, high, count)
            first_right = int(before[seat, 0] == tokens[0])
            assert found[index] == [right + 1, first_right, length]
            assert history[seat, : len(whole)].tolist() == whole
            assert drafts[seat].tolist() == draft
        assert drafts[2].tolist() == before[2].tolist(), "an empty seat is left alone"


PLAN = StepPlan(
    step_id=3,
    num_decode_rows=1,
    num_draft_rows=2,
    keys=[("a", 0), ("b", 0), ("c", 0), ("d", 0)],
    seats=[4, 1, 0, 2],
    first_positions=[9, 30, 7, 2],
    num_tokens=[1, 3, 2, 2],
    token_ids=[5, 7, 0, 0, 0, 0, 12, 13],
    positions=[9, 30, 31, 32, 7, 8, 2, 3],
    slots=[25, 62, 63, 64, 71, 72, 130, -1],
    device_tokens=[4],
    device_samples=[6],
    sample_keys=[("a", 0), ("b", 0), ("c", 0), ("d", 0), ("d", 1)],
    sample_seats=[4, 1, 0, 2, 3],
    sample_drafts=[0, 2, 1, 0, 0],
    logit_tokens=[0, 1, 2, 3, 4, 5, 7, 7],
)


@pytest.mark.smoke
def test_a_plan_is_made_flat() -> None:
    assert first_rows(PLAN) == [0, 1, 4, 6, 7]
    flat = flattened(PLAN, DraftSlots(first=100, per_seat=5), one_token_rows=True)
    assert (flat.num_decode_rows, flat.num_draft_rows) == (6, 0)
    assert flat.seats == [4, 1, 1, 1, 0, 0, 2]
    assert [key[0] for key in flat.keys] == ["a", "b", "b", "b", "c", "c", "d"]
    assert flat.first_positions == [9, 30, 31, 32, 7, 8, 2]
    assert flat.num_tokens == [1] * 6 + [2]
    assert dict(zip(flat.device_tokens, flat.device_samples, strict=True)) == {
        2: 105, 3: 106, 4: 6, 5: 100,
    }  # fmt: skip
    assert flat.sample_seats == [4, 1, 1, 1, 0, 0, 2, 3]
    assert flat.sample_drafts == [0] * 8
    assert (flat.positions, flat.slots) == (PLAN.positions, PLAN.slots)
    whole = flattened(PLAN, DraftSlots(100, 5), one_token_rows=False)
    assert (whole.num_decode_rows, whole.num_tokens) == (1, PLAN.num_tokens)
    assert whole.sample_seats == flat.sample_seats


@pytest.mark.smoke
def test_a_plan_can_do_without_drafts() -> None:
    bare = without_drafts(PLAN)
    assert (bare.num_decode_rows, bare.num_draft_rows) == (3, 0)
    assert bare.seats == PLAN.seats
    assert bare.num_tokens == [1, 1, 1, 2]
    assert bare.token_ids == [5, 7, 0, 12, 13]
    assert bare.positions == [9, 30, 7, 2, 3]
    assert bare.slots == [25, 62, 71, 130, -1]
    assert (bare.device_tokens, bare.device_samples) == ([2], [6])
    assert (bare.sample_keys, bare.logit_tokens) == (PLAN.sample_keys, [0, 1, 2, 4, 4])
