"""Where the ranks meet: the store that torchrun, or a process of ours, has opened for them.

process = torchrun_process()                        # None: nobody has started any ranks
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import distributed

from ridgeline.errors import HardwareError
from ridgeline.parallel.starting.place import IS_THERE, RankNumbers, numbers_in, restart_count

dist: Any = distributed  # whose stubs name only half of what it has

MEET_S = 300.0  # for all ranks to reach the store


@dataclass(frozen=True)
class RankProcess:
    """A process among the ranks."""

    rank: int
    size: int
    local_rank: int  # among those on this machine
    local_size: int
    store: Any  # where all of them meet


def torchrun_process(environment: Mapping[str, str] = os.environ) -> RankProcess | None:
    """This process's rank if it was started as one of several, by torchrun or as torchrun does."""
    numbers = numbers_in(environment)
    if numbers is None or numbers.size < 2:
        return None
    return RankProcess(*numbers, store=dist.PrefixStore("ridgeline", meet(numbers, environment)))


def meet(numbers: RankNumbers, environment: Mapping[str, str] = os.environ) -> Any:
    """The store that all ranks of this start reach; HardwareError where this one does not."""
    address, port = environment["MASTER_ADDR"], environment["MASTER_PORT"]
    patience = timedelta(seconds=MEET_S)
    try:
        if environment.get(IS_THERE) == "True":
            store = dist.TCPStore(address, int(port), is_master=False, timeout=patience)
        else:
            store = dist.TCPStore(
                address, int(port), numbers.size, numbers.rank == 0, patience, multi_tenant=True
            )
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        if "EADDRINUSE" in str(error):
            reason = "that port is in use on this machine; give another as --master-port"
        raise HardwareError(
            f"rank {numbers.rank} of {numbers.size} cannot meet the others at {address}:{port}: "
            f"{reason}"
        ) from error
    return of_start(store, restart_count(environment))


def of_start(store: Any, restarts: int) -> Any:
    """What is left in a store from before a restart is not seen behind it."""
    return dist.PrefixStore(f"start {restarts}", store)
