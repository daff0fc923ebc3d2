"""Minutes of many clients on one server, some rude and some hostile, while its engine is killed
again and again. A quiet run comes first, the same clients, all well-behaved; and another behind it,
on a server that nobody has harmed, because the machine may have become slower meanwhile.

    PYTHONPATH=$PWD:$PWD/tests python -m soak demo --seconds 600 --clients 64

Prints what it checked, a line each with its figure and its limit; exits with 1 if one failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from soak.checks import SoakResult, checked, counts, growths, p99, table
from soak.hostile_bodies import LARGEST
from soak.killing import Killer
from soak.memory import MemoryWatch, num_compiling
from soak.raw_http import exchange, post
from soak.server_process import ServerProcess, memory_flags
from soak.traffic import GOOD_KEY, KEYS, SentRequest, Target, Traffic, authorized

from ridgeline.hardware import detect
from ridgeline.records import Record, Value

MEMORY_BYTES = 700 << 20  # weights of `demo`, and few enough pages that they are soon all used
KILL_SHARE = 0.5  # of the run; the engine that is there then must keep its memory
KILL_EVERY_S = 45.0
SETTLED = 2.0  # outages later, those who waited for the engine have their answers
PAUSE_S = 15.0  # between a client's requests: 64 of them keep two ARM cores three quarters busy
WARM_SHARE = 0.2  # of the quiet run, before it counts
PROMPTS = ("The sky is", "Two and two", "Once upon a time", "def add(a, b):")
FLAGS = (
    "--device", "cpu", "--max-context", "2048", "--client-timeout", "5",
    *(word for key in KEYS for word in ("--api-key", key)),
)  # fmt: skip


async def greedy(server: ServerProcess) -> dict[str, str]:
    """Answers that must stay the same."""
    answers = {}
    for prompt in PROMPTS:
        body = {"model": server.model, "prompt": prompt, "max_tokens": 16, "temperature": 0}
        reply = await exchange(
            server.port, authorized(post("/v1/completions", body), GOOD_KEY), timeout_s=60.0
        )
        answers[prompt] = reply.text if reply.is_done else f"none: {reply}"
    return answers


async def send_largest(server: ServerProcess, paths: Iterable[str] = LARGEST) -> None:
    """The largest requests that are answered: what they take, malloc keeps. Those that the engine
    computes one at a time, which on a CPU takes seconds; the others together.
    """
    for path in paths:
        value = LARGEST[path]
        data = authorized(post(path, {"model": server.model, **value}), GOOD_KEY)
        num = 1 if path == "/v1/completions" else 8
        await asyncio.gather(*(exchange(server.port, data, timeout_s=120.0) for _ in range(num)))


async def loud_run(
    server: ServerProcess, traffic: Traffic, num_clients: int, seconds: float, kill_every_s: float
) -> Killer:
    """The last engine has had the largest prompt before its memory counts: otherwise it grows when
    the first client sends one.
    """
    killer = Killer(server)

    async def kill() -> None:
        await killer.run(seconds * KILL_SHARE, kill_every_s)
        if killer.outages:
            await asyncio.sleep(SETTLED * killer.outages[-1].seconds)
            await send_largest(server, ["/v1/completions"])

    await asyncio.gather(traffic.run_apart(num_clients, seconds), kill())
    return killer


def quiet_run(
    server: ServerProcess, num_clients: int, seconds: float, pause_s: float
) -> list[SentRequest]:
    """Requests sent once the server was warm."""
    target = Target(server.port, server.model)
    warm = Traffic(target, is_quiet=True, pause_s=pause_s, seed=1)
    asyncio.run(warm.run(num_clients, WARM_SHARE * seconds))
    quiet = Traffic(target, is_quiet=True, pause_s=pause_s, seed=2)
    asyncio.run(quiet.run(num_clients, (1 - WARM_SHARE) * seconds))
    return quiet.requests


def soak(
    start: Callable[[Path | None], ServerProcess],
    *,
    seconds: float,
    quiet_seconds: float,
    num_clients: int,
    pause_s: float,
    kill_every_s: float = KILL_EVERY_S,
    log: Path | None = None,
) -> SoakResult:
    """Everything that is checked, of two servers, one after the other; `log` is the first one's."""
    with start(log) as server:
        before = asyncio.run(greedy(server))
        quiet = quiet_run(server, num_clients, quiet_seconds, pause_s)
        asyncio.run(send_largest(server))
        target, begun = Target(server.port, server.model), time.monotonic()
        loud = Traffic(target, is_quiet=False, pause_s=pause_s, seed=3)
        with MemoryWatch(server, min(2.0, seconds / 100)) as memory:
            killer = asyncio.run(loud_run(server, loud, num_clients, seconds, kill_every_s))
        ended = time.monotonic()
        left = server.wait_until_idle(60.0)
        left |= {"grammars being compiled": float(num_compiling(server))}
        after = asyncio.run(greedy(server))
        restarts = server.metric("ridgeline:engine_restarts_total")
        exit_code = server.stop()
    with start(None) as server:
        quiet_after = quiet_run(server, num_clients, quiet_seconds, pause_s)
    return SoakResult(
        quiet=quiet,
        quiet_after=quiet_after,
        loud=loud.requests,
        outages=killer.outages,
        memory=memory,
        begun=begun,
        ended=ended,
        restarts=restarts,
        left_behind=left,
        changed=[prompt for prompt in PROMPTS if before[prompt] != after[prompt]],
        exit_code=exit_code,
        problems=killer.problems,
    )


def record_of(model: str, result: SoakResult) -> Record:
    values = {
        "requests": Value(float(len(result.loud)), "1"),
        "well_behaved": Value(float(len(result.well_behaved)), "1"),
        "kills": Value(float(len(result.outages)), "1"),
        "longest_outage": Value(result.longest_outage_s, "s"),
    }
    parts = {
        "quiet": result.quiet,
        "quiet_after": result.quiet_after,
        "apart_from_kills": result.apart,
        "during_kills": result.hit,
    }
    for name, requests in parts.items():
        seconds = p99(requests)
        if seconds is not None:
            values[f"p99_{name}"] = Value(seconds, "s", num_samples=len(requests))
    for who, share in growths(result).items():
        if share is not None:
            values[f"memory_growth_{who}"] = Value(share, "1")
    notes = [f"{'ok' if check.is_ok else 'failed'}: {check.name}: {check.figure}"
             for check in checked(result)]  # fmt: skip
    command = ("python", "-m", "soak", *sys.argv[1:])
    return Record.create(f"soak-{model}", detect("cpu"), values, command, notes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--seconds", type=float, default=600.0, help="with hostile clients")
    parser.add_argument(
        "--quiet-seconds", type=float, default=180.0, help="before that, and after it"
    )
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument(
        "--pause", type=float, default=PAUSE_S, help="mean seconds between requests"
    )
    parser.add_argument("--kill-every", type=float, default=KILL_EVERY_S, help="seconds")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="write a record there")
    parser.add_argument("--log", type=Path, help="file for the server's log")
    args = parser.parse_args()
    flags = (*FLAGS, *memory_flags(MEMORY_BYTES))
    result = soak(
        lambda log: ServerProcess(args.model, *flags, log=log, key=GOOD_KEY),
        seconds=args.seconds, quiet_seconds=args.quiet_seconds, num_clients=args.clients,
        pause_s=args.pause, kill_every_s=args.kill_every, log=args.log,
    )  # fmt: skip
    for problem in [
        *result.problems,
        *(request.problem for request in result.loud if request.problem),
    ][:20]:
        print(problem)
    print(json.dumps(counts(result), indent=2))
    checks = checked(result)
    print(table(checks))
    if args.save is not None:
        print(f"record: {record_of(args.model, result).save(args.save)}")
    return int(not all(check.is_ok for check in checks))


if __name__ == "__main__":
    sys.exit(main())
