"""Thousands of requests that nobody should send: no crash, no 500, every one that asks for an
answer gets one, and memory stays.

    PYTHONPATH=$PWD:$PWD/tests python -m soak.hostile demo --requests 10000
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from soak.hostile_bodies import LARGEST, Hostile, bad_grammar, draw_hostile
from soak.raw_http import Reply, exchange, post
from soak.server_process import ServerProcess, memory_flags
from soak.warming import fill_pages

NUM_CLIENTS = 24
NUM_GRAMMARS = 500  # before memory is looked at; compiled ones are kept, up to a bound
RESTARTS = "ridgeline:engine_restarts_total"
WARM_SHARE = 0.3  # of the requests, after which memory must stay
FLAGS = ("--device", "cpu", "--client-timeout", "3", "--max-context", "2048")
MEMORY_BYTES = 1200 << 20


@dataclass
class Siege:
    server: ServerProcess
    num_requests: int
    seed: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    rss: list[tuple[int, int]] = field(default_factory=list)  # after each percent of the requests
    _next: int = 0

    async def run(self) -> None:
        await asyncio.gather(*(self._client() for _ in range(NUM_CLIENTS)))

    async def _client(self) -> None:
        while self._next < self.num_requests:
            number, self._next = self._next, self._next + 1
            if number % max(1, self.num_requests // 100) == 0:
                self.rss.append(self.server.rss_bytes())
            draw = random.Random(self.seed * 10**6 + number)
            kind, hostile = draw_hostile(draw, self.server.model)
            started = time.monotonic()
            reply = await exchange(
                self.server.port, hostile.parts, timeout_s=120.0, pause_s=hostile.pause_s,
                half_close=hostile.half_close, stop_after=hostile.stop_after,
            )  # fmt: skip
            self._judge(number, kind, hostile, reply, time.monotonic() - started)

    def _judge(
        self, number: int, kind: str, hostile: Hostile, reply: Reply, seconds: float
    ) -> None:
        self.counts[f"{kind} {reply.status or 'none'}"] += 1
        wrong = ""
        if reply.status >= 500 and reply.status != 503:
            wrong = f"status {reply.status}"
        elif "no end" in reply.note:
            wrong = reply.note
        elif hostile.stop_after is None and not reply.is_complete:
            wrong = f"no answer ({reply.note})"
        elif hostile.stop_after is None and reply.status >= 400 and reply.error is None:
            wrong = f"status {reply.status} without a stated reason"
        if wrong:
            sent = b"".join(hostile.parts)[:300]
            self.problems.append(
                f"#{number} {kind} after {seconds:.1f} s: {wrong}; sent {sent!r}; "
                f"got {reply.body[:200]!r}"
            )

    def growth(self) -> dict[str, float]:
        """From the tenth after warming up to the last one, of each process."""
        warm = int(len(self.rss) * WARM_SHARE)
        early, late = self.rss[warm : warm + 10], self.rss[-10:]
        return {
            name: max(row[column] for row in late) / max(row[column] for row in early) - 1
            for column, name in enumerate(("server", "engine"))
        }


async def warm_up(server: ServerProcess) -> None:
    """Until it has been as large as it gets: every page of the cache used once, the grammars that
    it keeps compiled, and the largest requests that are answered, many at a time.
    """
    await fill_pages(server)
    for number in range(NUM_GRAMMARS):
        grammar = bad_grammar(random.Random(-number), server.model)
        await exchange(server.port, grammar.parts)
    for path, value in LARGEST.items():
        data = post(path, {"model": server.model, **value})
        await asyncio.gather(*(exchange(server.port, data) for _ in range(NUM_CLIENTS)))


async def still_serves(server: ServerProcess) -> str:
    """What a plain request gives; empty when it is as it should be."""
    body = {"model": server.model, "prompt": "The sky is", "max_tokens": 4, "temperature": 0}
    reply = await exchange(server.port, post("/v1/completions", body))
    return "" if reply.is_done else f"a plain request is not answered: {reply}"


def besiege(server: ServerProcess, num_requests: int, seed: int = 0) -> dict[str, Any]:
    """Everything that was promised, as figures; `problems` is empty when it was kept."""
    siege = Siege(server, num_requests, seed)
    before = server.metric(RESTARTS)
    started = time.monotonic()
    asyncio.run(siege.run())
    seconds = time.monotonic() - started
    problems = list(siege.problems)
    if not server.is_alive:
        problems.append("the server has died")
        return {"num_problems": len(problems), "problems": problems[:20]}
    restarts = server.metric(RESTARTS) - before
    problems += [f"the engine was restarted {restarts:.0f} times"] if restarts else []
    problems += [text] if (text := asyncio.run(still_serves(server))) else []
    idle = server.wait_until_idle(60.0)
    problems += [f"left behind: {name} is {value}" for name, value in idle.items() if value]
    return {
        "requests": num_requests,
        "seconds": round(seconds, 1),
        "statuses": dict(sorted(siege.counts.items())),
        "growth": siege.growth(),
        "rss_mib": [[round(size / 2**20) for size in row] for row in siege.rss[::10]],
        "num_problems": len(problems),
        "problems": problems[:40],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-growth", type=float, default=0.02)
    parser.add_argument("--log", type=Path, help="file for the server's log")
    args = parser.parse_args()
    flags = (*FLAGS, *memory_flags(MEMORY_BYTES))
    with ServerProcess(args.model, *flags, log=args.log) as server:
        asyncio.run(warm_up(server))
        found = besiege(server, args.requests, args.seed)
        if server.is_alive:
            found["exit_code"] = server.stop()
    print(json.dumps(found, indent=2))
    grown = [name for name, share in found.get("growth", {}).items() if share > args.max_growth]
    for name in grown:
        print(f"the memory of the {name} grew by {found['growth'][name]:.1%}", file=sys.stderr)
    return int(bool(found["num_problems"] or grown or found.get("exit_code", 1)))


if __name__ == "__main__":
    sys.exit(main())
