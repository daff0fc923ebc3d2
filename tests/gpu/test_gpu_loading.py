"""Batches reach a GPU from pinned memory, are those of the host to the bit, and no step waits."""

import numpy as np
import torch

from ridgeline.data.loading import DataState, Loader, TokenStore, split_data
from ridgeline.data.loading.store import TokenShard

NUM_TOKENS, LENGTH = 2_000_000, 4096


def store() -> TokenStore:
    random = np.random.default_rng(0)
    tokens = random.integers(0, 50_000, NUM_TOKENS).astype(np.uint16)
    ends = np.sort(random.choice(NUM_TOKENS - 1, 2000, replace=False)) + 1
    offsets = np.concatenate(([0], ends, [NUM_TOKENS]))
    origins = np.zeros((len(offsets) - 1, 2), dtype=np.int64)
    return TokenStore([TokenShard(tokens, offsets, origins)], ["a"], 50_000)


def test_batches_on_a_gpu_are_those_of_the_host_and_no_step_waits() -> None:
    windows = split_data(store(), sequence_length=LENGTH, vocab_size=50_000).train
    device = torch.device("cuda")
    work = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    with (
        Loader(windows, DataState(1), sequences=8, device=device) as loader,
        Loader(windows, DataState(1), sequences=8) as host,
    ):
        for _ in range(30):
            batch, expected = next(loader), next(host)
            for _ in range(40):  # a step of some 40 ms
                work @ work
            for name in ("ids", "targets", "positions", "starts"):
                assert torch.equal(getattr(batch, name).cpu(), getattr(expected, name))
            assert batch.num_targets == expected.num_targets
        assert loader.waits == 0
        assert loader.late_copies <= 1  # the first
