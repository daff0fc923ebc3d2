"""Kills the engine's process again and again, and says from when to when each was missed.

killer = Killer(server)
await killer.run(seconds=600.0, every_s=60.0)
killer.outages
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from typing import NamedTuple

from soak.raw_http import exchange, post
from soak.server_process import ServerProcess
from soak.traffic import GOOD_KEY, authorized

RECOVERY_S = 120.0  # a server that does not answer after so long has not recovered


class Outage(NamedTuple):
    killed: float
    recovered: float  # a request that came later has been answered

    @property
    def seconds(self) -> float:
        return self.recovered - self.killed

    def touches(self, begun: float, ended: float) -> bool:
        return begun < self.recovered and ended > self.killed


@dataclass
class Killer:
    server: ServerProcess
    outages: list[Outage] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    async def run(self, seconds: float, every_s: float) -> None:
        """For so long, at times that nobody can foresee."""
        draw, end = random.Random(11), time.monotonic() + seconds
        while True:
            pause = every_s * draw.uniform(0.6, 1.4) if self.outages else every_s * 0.3
            if time.monotonic() + pause > end:
                return
            await asyncio.sleep(pause)
            await self._kill()

    async def _kill(self) -> None:
        before, killed = self.server.engine_pid, time.monotonic()
        self.server.kill_engine()
        while self.server.engine_pid == before:
            await asyncio.sleep(0.01)
        body = {"model": self.server.model, "prompt": "Still there?", "max_tokens": 1}
        data = authorized(post("/v1/completions", body), GOOD_KEY)
        while True:
            reply = await exchange(self.server.port, data, timeout_s=RECOVERY_S)
            now = time.monotonic()
            if reply.is_done or now > killed + RECOVERY_S:
                break
            await asyncio.sleep(0.1)  # refused: it is being started
        if not reply.is_done:
            self.problems.append(f"no answer {RECOVERY_S:g} s after a kill: {reply}")
        self.outages.append(Outage(killed, now))
