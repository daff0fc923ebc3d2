"""Many clients for minutes, some of them rude, and an engine whose process is killed: every request
must end with an answer or a stated refusal, nothing may be left behind, memory must stay, and the
same prompts must give the same answers before and after.

    PYTHONPATH=$PWD:$PWD/tests python -m soak.clients demo --seconds 300
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from soak.raw_http import Reply, exchange, post
from soak.server_process import ServerProcess, memory_flags
from soak.warming import fill_pages

PROMPTS = [
    f"{start} {thing}"
    for start in ("Tell me about", "Why do people like", "Write a line on", "What is")
    for thing in ("the sea", "old maps", "rain", "bread", "a quiet street", "the moon", "tin")
]
WARM_SHARE = 0.1  # of the run, after the cache is filled: from then on memory must stay
KILL_SHARE = 0.1
MEMORY_BYTES = 1200 << 20  # of `demo`: 160 pages or so for 64 clients
REFUSALS = {429, 503}
MALFORMED = [
    b"{", b'{"model": ', b"[]", b"null", b'"text"', b"\xff\xfe", b'{"messages": 3}',
    b'{"model": "x", "messages": [{"role": "nobody", "content": "?"}]}',
    b'{"model": 7, "prompt": "a"}', b'{"prompt": "a", "max_tokens": -1}', b"{}" * 50,
]  # fmt: skip


@dataclass
class Story:
    """What happened."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def note(self, kind: str, reply: Reply, is_good: bool, how: str) -> None:
        self.counts[f"{kind}: {how}"] += 1
        if not is_good:
            text = (reply.body or b"|".join(reply.events[-2:]))[:200]
            self.problems.append(f"{kind}: {how}: status {reply.status} {reply.note} {text!r}")


@dataclass
class Soak:
    server: ServerProcess
    seconds: float
    fills: bool = True
    max_tokens: int = 24
    seed: int = 0
    story: Story = field(default_factory=Story)
    warm_at: float = 0.0  # by the monotonic clock

    def body(self, draw: random.Random, **more: Any) -> tuple[str, dict[str, Any]]:
        """A request that is in order, and its path."""
        prompt, is_chat = draw.choice(PROMPTS), draw.random() < 0.7
        words: Any = {"messages": [{"role": "user", "content": prompt}]}
        words = words if is_chat else {"prompt": prompt}
        options = {"model": self.server.model, "max_tokens": draw.randint(1, self.max_tokens)}
        if draw.random() < 0.3:
            options |= {"temperature": 0.8, "seed": draw.randint(0, 99), "n": draw.choice((1, 2))}
        path = "/v1/chat/completions" if is_chat else "/v1/completions"
        return path, {**words, **options, **more}

    async def client(self, number: int, end: float) -> None:
        draw = random.Random(self.seed * 1000 + number)
        kinds: list[Callable[[random.Random], Awaitable[None]]] = [
            *[self.streamed] * 10, *[self.whole] * 2, *[self.cancelled] * 3,
            *[self.gone] * 2, self.cut_body, *[self.malformed] * 2,
        ]  # fmt: skip
        while time.monotonic() < end:
            await draw.choice(kinds)(draw)

    async def streamed(self, draw: random.Random) -> None:
        path, body = self.body(draw, stream=True)
        self.ended("stream", await self.ask(post(path, body)))

    async def whole(self, draw: random.Random) -> None:
        path, body = self.body(draw)
        self.ended("whole", await self.ask(post(path, body)))

    async def cancelled(self, draw: random.Random) -> None:
        """Goes away in the middle of the answer."""
        path, body = self.body(draw, stream=True)
        reply = await self.ask(post(path, body), stop_after=draw.randint(200, 1500))
        is_good = reply.status == 200 or (reply.status in REFUSALS and bool(reply.error))
        self.story.note("cancel", reply, is_good, f"status {reply.status}")

    async def gone(self, draw: random.Random) -> None:
        """Goes away before there is an answer."""
        path, body = self.body(draw, stream=draw.random() < 0.5)
        reply = await self.ask(post(path, body), stop_after=0)
        self.story.note("disconnect", reply, not reply.note, reply.note or "sent")

    async def cut_body(self, draw: random.Random) -> None:
        path, body = self.body(draw)
        data = post(path, body)
        reply = await self.ask(data[: draw.randint(10, len(data) - 1)], stop_after=0)
        self.story.note("half a body", reply, not reply.note, reply.note or "sent")

    async def malformed(self, draw: random.Random) -> None:
        path = draw.choice(("/v1/chat/completions", "/v1/completions", "/v1/embeddings"))
        reply = await self.ask(post(path, draw.choice(MALFORMED)))
        is_good = reply.status in {400, 404, *REFUSALS} and reply.error is not None
        self.story.note("malformed", reply, is_good, f"status {reply.status}")

    async def ask(self, data: bytes, **options: Any) -> Reply:
        return await exchange(self.server.port, data, timeout_s=300.0, **options)

    def ended(self, kind: str, reply: Reply) -> None:
        if reply.is_done:
            self.story.note(kind, reply, True, "answered")
        elif reply.error is not None and reply.is_complete:
            is_good = reply.status in {200, *REFUSALS}
            self.story.note(kind, reply, is_good, f"refused, status {reply.status}")
        else:
            self.story.note(kind, reply, False, "no end")

    async def run(self, num_clients: int) -> None:
        end = time.monotonic() + self.seconds
        killing = asyncio.create_task(self._kill())
        await asyncio.gather(*(self.client(number, end) for number in range(num_clients)))
        await killing

    async def _kill(self) -> None:
        """The engine's process; the next one's cache is filled at once."""
        await asyncio.sleep(self.seconds * KILL_SHARE)
        self.server.kill_engine()
        if self.fills:
            await fill_pages(self.server)
        self.warm_at = time.monotonic()

    async def greedy(self) -> list[str]:
        """Of a few prompts, one after the other."""
        found = []
        for prompt in PROMPTS[:8]:
            body = {"model": self.server.model, "prompt": prompt, "max_tokens": 16,
                    "temperature": 0}  # fmt: skip
            reply = await self.ask(post("/v1/completions", body))
            found.append(reply.text if reply.is_done else f"none: {reply}")
        return found


class Memory:
    """Looks at the server's memory while the clients run."""

    def __init__(self, server: ServerProcess, every_s: float = 1.0) -> None:
        self.samples: list[tuple[float, int, int]] = []
        self._server, self._every_s, self._end = server, every_s, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def start(self) -> None:
        self.began = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        self._end.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._end.wait(self._every_s):
            self.samples.append((time.monotonic() - self.began, *self._server.rss_bytes()))

    def growth(self, warm_s: float, end_s: float) -> dict[str, float]:
        """From the first tenth after warming up to the last tenth, of each process."""
        span = (end_s - warm_s) / 10
        early = [row for row in self.samples if warm_s <= row[0] < warm_s + span]
        late = [row for row in self.samples if end_s - span <= row[0] <= end_s]
        assert early, "memory was looked at"
        assert late, "memory was looked at"
        return {
            name: median(row[column] for row in late) / median(row[column] for row in early) - 1
            for column, name in ((1, "server"), (2, "engine"))
        }


def soak(
    server: ServerProcess, seconds: float, num_clients: int, fills: bool = True
) -> dict[str, Any]:
    """Everything that was promised, as figures; `problems` is empty when it was kept. `fills` has
    the cache filled, without which memory says nothing.
    """
    run = Soak(server, seconds, fills)
    before = asyncio.run(run.greedy())
    memory = Memory(server, min(1.0, seconds / 50))
    memory.start()
    asyncio.run(run.run(num_clients))
    memory.stop()
    idle = server.wait_until_idle(60.0)
    after = asyncio.run(run.greedy())
    problems = list(run.story.problems)
    problems += [f"left behind: {name} is {value}" for name, value in idle.items() if value]
    problems += [
        f"{prompt!r} gave {old!r} and then {new!r}"
        for prompt, old, new in zip(PROMPTS, before, after, strict=False)
        if old != new
    ]
    warm_s = run.warm_at - memory.began + seconds * WARM_SHARE
    if warm_s > seconds * 0.8:
        problems.append(f"the cache was full after {warm_s:.0f} s: too late to tell of memory")
        warm_s = seconds * 0.8
    restarts = server.metric("ridgeline:engine_restarts_total")
    problems += [] if restarts >= 1 else ["the engine was not restarted"]
    return {
        "seconds": seconds,
        "clients": num_clients,
        "counts": dict(run.story.counts.most_common()),
        "restarts": restarts,
        "warm_s": round(warm_s),
        "growth": memory.growth(warm_s, seconds),
        "rss_mib": [round(size / 2**20) for size in memory.samples[-1][1:]],
        "num_problems": len(problems),
        "problems": problems[:20],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--max-growth", type=float, default=0.02)
    parser.add_argument("--log", type=Path, help="file for the server's log")
    args = parser.parse_args()
    flags = ("--device", "cpu", "--max-context", "2048", *memory_flags(MEMORY_BYTES))
    with ServerProcess(args.model, *flags, log=args.log) as server:
        found = soak(server, args.seconds, args.clients)
        found["exit_code"] = server.stop()
    print(json.dumps(found, indent=2))
    grown = [name for name, share in found["growth"].items() if share > args.max_growth]
    for name in grown:
        print(f"the memory of the {name} grew by {found['growth'][name]:.1%}", file=sys.stderr)
    return int(bool(found["num_problems"] or grown or found["exit_code"]))


if __name__ == "__main__":
    sys.exit(main())
