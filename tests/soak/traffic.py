"""The clients of a soak: well-behaved ones, rude ones that go away in the middle, hostile ones.
What came of each request is a `SentRequest`, whatever happened.

    traffic = Traffic(Target(server.port, server.model), is_quiet=False, pause_s=5.0)
    await traffic.run(num_clients=64, seconds=600.0)
    traffic.requests

Making a hostile request can take half a second, in which nobody else in that process hears an
answer: `run_apart` gives those clients a process of their own.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any, NamedTuple

from soak.hostile_bodies import Hostile, draw_hostile
from soak.hostile_grammars import draw_grammar
from soak.raw_http import Reply, exchange, post

GOOD_KEY, RUDE_KEY, HOSTILE_KEY = "soak-well-behaved", "soak-rude-client", "soak-hostile-one"
KEYS = (GOOD_KEY, RUDE_KEY, HOSTILE_KEY)
HOSTILE = "hostile"  # how the names of such kinds begin
GOOD_SHARE, RUDE_SHARE = 0.68, 0.19  # of the clients, unless all are well-behaved
TIMEOUT_S = 120.0  # a request that has no answer after so long has none
HOSTILE_PAUSE_S = 0.3  # between the requests of one hostile client
SUBJECTS = ("the sea", "old maps", "rain", "bread", "a quiet street", "the moon", "tin")
REFUSALS = {429, 503}  # that a request in order may get
BAD = {*range(400, 500), 503}  # that one out of order may get
SMALL_SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


class Target(NamedTuple):
    """A server, as far as its clients know it."""

    port: int
    model: str


class SentRequest(NamedTuple):
    """One request, as its client saw it."""

    kind: str
    begun: float  # by the monotonic clock
    ended: float
    status: int
    is_answered: bool  # whole; or the client went away itself
    is_refused: bool
    problem: str = ""

    @property
    def seconds(self) -> float:
        return self.ended - self.begun


def authorized(data: bytes, key: str) -> bytes:
    """The request with a key, if it has headers to put one among."""
    head, line, rest = data.partition(b"content-type: application/json\r\n")
    return head + line + (f"authorization: Bearer {key}\r\n".encode() if line else b"") + rest


@dataclass
class Traffic:
    """`is_quiet`: every client is well-behaved. `pause_s` is the mean one between the requests of a
    client that is not hostile.
    """

    server: Target
    is_quiet: bool
    pause_s: float
    max_tokens: int = 8
    seed: int = 0
    requests: list[SentRequest] = field(default_factory=list)

    async def run(
        self, num_clients: int, seconds: float, numbers: range | None = None
    ) -> list[SentRequest]:
        """All of so many clients, or those of these numbers."""
        end = time.monotonic() + seconds
        numbers = range(num_clients) if numbers is None else numbers
        await asyncio.gather(*(self._client(number, num_clients, end) for number in numbers))
        return self.requests

    async def run_apart(self, num_clients: int, seconds: float) -> list[SentRequest]:
        """All of them, those that are not well-behaved in another process."""
        good = range(num_good(num_clients))
        others = range(len(good), num_clients)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            loop = asyncio.get_running_loop()
            apart = loop.run_in_executor(pool, _run_others, self, num_clients, seconds, others)
            await self.run(num_clients, seconds, good)
            self.requests += await apart
        return self.requests

    async def _client(self, number: int, num_clients: int, end: float) -> None:
        draw = random.Random(self.seed * 1000 + number)
        send, pause_s = self._role(number / num_clients)
        await asyncio.sleep(draw.uniform(0, pause_s))
        while time.monotonic() < end:
            await send(draw)
            pause = draw.expovariate(1 / pause_s) if pause_s else 0.0
            await asyncio.sleep(min(pause, max(0.0, end - time.monotonic())))

    def _role(self, share: float) -> tuple[Callable[[random.Random], Awaitable[None]], float]:
        """What a client does, and how long it rests: the first two thirds are well-behaved, a fifth
        is rude, the rest hostile.
        """
        if self.is_quiet or share < GOOD_SHARE:
            return self.well_behaved, self.pause_s
        if share < GOOD_SHARE + RUDE_SHARE:
            return self.rude, self.pause_s
        return (self.hostile if share < 0.95 else self.grammar), min(HOSTILE_PAUSE_S, self.pause_s)

    def body(self, draw: random.Random, **more: Any) -> tuple[str, dict[str, Any]]:
        """A request that is in order, and its path. Prompts differ, so that pages are used."""
        prompt = f"{draw.randint(0, 10**6)} words on {draw.choice(SUBJECTS)}:"
        is_chat = draw.random() < 0.6
        words: Any = {"messages": [{"role": "user", "content": prompt}]}
        body = {"model": self.server.model, "max_tokens": draw.randint(1, self.max_tokens)}
        if draw.random() < 0.3:
            body |= {"temperature": 0.8, "seed": draw.randint(0, 99)}
        path = "/v1/chat/completions" if is_chat else "/v1/completions"
        return path, {**(words if is_chat else {"prompt": prompt}), **body, **more}

    async def well_behaved(self, draw: random.Random) -> None:
        path, body = self.body(draw, stream=draw.random() < 0.7)
        if path.endswith("chat/completions") and draw.random() < 0.15:
            form = {"name": "x", "schema": SMALL_SCHEMA, "strict": True}
            body |= {"response_format": {"type": "json_schema", "json_schema": form}}
        await self._send("well-behaved", Hostile([authorized(post(path, body), GOOD_KEY)]))

    async def rude(self, draw: random.Random) -> None:
        """In the middle of the answer, before there is one, or in the middle of the question."""
        path, body = self.body(draw, stream=draw.random() < 0.7)
        data = authorized(post(path, body), RUDE_KEY)
        kind = draw.choice(("aborted", "aborted", "gone", "half a question"))
        if kind == "half a question":
            data = data[: draw.randint(10, len(data) - 1)]
        stop_after = draw.randint(200, 1500) if kind == "aborted" else 0
        await self._send(kind, Hostile([data], stop_after=stop_after))

    async def hostile(self, draw: random.Random) -> None:
        kind, made = draw_hostile(draw, self.server.model)
        parts = [authorized(made.parts[0], HOSTILE_KEY), *made.parts[1:]]
        await self._send(f"{HOSTILE}: {kind}", made._replace(parts=parts))

    async def grammar(self, draw: random.Random) -> None:
        """Half of them do not wait for what they caused."""
        path, body = self.body(draw, **draw_grammar(draw))
        data = authorized(post(path, body), HOSTILE_KEY)
        made = Hostile([data], stop_after=0 if draw.random() < 0.5 else None)
        await self._send(f"{HOSTILE}: grammar", made)

    async def _send(self, kind: str, made: Hostile) -> None:
        begun = time.monotonic()
        reply = await exchange(
            self.server.port, made.parts, timeout_s=TIMEOUT_S, pause_s=made.pause_s,
            half_close=made.half_close, stop_after=made.stop_after,
        )  # fmt: skip
        self.requests.append(judged(kind, begun, reply, made.stop_after is not None))


def num_good(num_clients: int) -> int:
    """The clients, the first ones, that are well-behaved."""
    return sum(number / num_clients < GOOD_SHARE for number in range(num_clients))


def _run_others(
    traffic: Traffic, num_clients: int, seconds: float, numbers: range
) -> list[SentRequest]:
    return asyncio.run(traffic.run(num_clients, seconds, numbers))


def judged(kind: str, begun: float, reply: Reply, went: bool) -> SentRequest:
    """`went`: the client did not wait for all of it."""
    ended = time.monotonic()
    allowed = BAD if kind.startswith(HOSTILE) else REFUSALS
    is_refused = reply.is_complete and reply.error is not None
    problem = ""
    if reply.status >= 500 and reply.status not in allowed:
        problem = f"status {reply.status}"
    elif went:
        problem = reply.note if "no end" in reply.note else ""
    elif is_refused and reply.status not in {200, *allowed}:
        problem = f"refused with status {reply.status}"
    elif not (is_refused or reply.is_done):
        problem = f"no answer: status {reply.status} {reply.note}"
    if problem:
        tail = (reply.body or b"|".join(reply.events[-2:]))[:200]
        problem = f"{kind} after {ended - begun:.1f} s: {problem} {tail!r}"
    is_answered = went or reply.is_done
    return SentRequest(
        kind, begun, ended, reply.status, is_answered, is_refused and not went, problem
    )
