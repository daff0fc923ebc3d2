"""Which rank a process is. torchrun says so in the environment; ranks that are started here are
told the same way, so that neither they nor what they call sees a difference. No torch.

    numbers_in(os.environ)                              # None: nobody has started any ranks
    rank_environment(RankNumbers(1, 4, 1, 4), "127.0.0.1", port)
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from ridgeline.errors import UsageError

NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
NAMES = (*NUMBERS, "MASTER_ADDR", "MASTER_PORT")
RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
IS_THERE = "TORCHELASTIC_USE_AGENT_STORE"  # True: who starts ranks has opened the store for them
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # where torchrun looks for what went wrong in a rank
PARENT = "RIDGELINE_PARENT"  # the process that has started this rank, if it was one of ours
LOG = "RIDGELINE_RANK_LOG"  # and where its log is


class RankNumbers(NamedTuple):
    rank: int
    size: int
    local_rank: int  # among those on this machine
    local_size: int

    @property
    def node(self) -> int:
        """Which machine, where all have as many ranks."""
        return self.rank // self.local_size


def numbers_in(environment: Mapping[str, str] = os.environ) -> RankNumbers | None:
    """This process's numbers if it was started as a rank, alone or with others."""
    if any(name not in environment for name in NAMES):
        return None
    numbers = RankNumbers(*(_number(environment, name) for name in NUMBERS))
    _number(environment, "MASTER_PORT")
    if not (0 <= numbers.rank < numbers.size and 0 <= numbers.local_rank < numbers.local_size):
        raise UsageError(
            f"the environment has RANK={numbers.rank} of WORLD_SIZE={numbers.size} and LOCAL_RANK="
            f"{numbers.local_rank} of LOCAL_WORLD_SIZE={numbers.local_size}; ranks count from 0 "
            "and are fewer than their size; start with torchrun, or unset these"
        )
    return numbers


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise UsageError(
            f"the environment has {name}={environment[name]!r}; it must be a whole number, as "
            "torchrun sets it; start with torchrun, or unset it"
        ) from None


def restart_count(environment: Mapping[str, str] = os.environ) -> int:
    """How often the ranks were started again before this start."""
    count = environment.get(RESTART_COUNT, "0")
    return int(count) if count.isdecimal() else 0


def is_own_child(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a process of ours has started this one and looks after it."""
    return PARENT in environment  # which may have gone since then


def rank_environment(
    numbers: RankNumbers, address: str, port: int, restarts: int, max_restarts: int
) -> dict[str, str]:
    """What torchrun sets for a rank whose store is there already."""
    nodes = numbers.size // numbers.local_size
    values: dict[str, object] = {
        "RANK": numbers.rank,
        "WORLD_SIZE": numbers.size,
        "LOCAL_RANK": numbers.local_rank,
        "LOCAL_WORLD_SIZE": numbers.local_size,
        "GROUP_RANK": numbers.node,
        "GROUP_WORLD_SIZE": nodes,
        "ROLE_NAME": "default",
        "ROLE_RANK": numbers.rank,
        "ROLE_WORLD_SIZE": numbers.size,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        RESTART_COUNT: restarts,
        "TORCHELASTIC_MAX_RESTARTS": max_restarts,
        "TORCHELASTIC_RUN_ID": "ridgeline",
        IS_THERE: True,
    }
    return {name: str(value) for name, value in values.items()}


def loopback() -> str | None:
    """The network interface that only this machine reaches."""
    with suppress(OSError):
        names = [name for _, name in socket.if_nameindex()]
        return next((name for name in ("lo", "lo0") if name in names), None)
    return None
