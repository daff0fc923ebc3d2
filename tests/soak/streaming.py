"""How many events a second the server can push, and what each costs it: many streams at once from
an engine that computes nothing (fast_engine.py).

    PYTHONPATH=$PWD:$PWD/tests python -m soak.streaming --streams 200 --tokens 400
"""

from __future__ import annotations

import argparse
import os
import re
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from live_server import write_model
from soak.raw_http import post
from soak.server_process import children_of

TICKS = os.sysconf("SC_CLK_TCK")
END = b"0\r\n\r\n"


class StreamCosts(NamedTuple):
    """From when all streams have begun until they have ended."""

    num_tokens: int
    num_events: int  # fewer than tokens where the server was behind, and merged some
    wall_s: float
    server_cpu_s: float  # of the process that speaks HTTP, all its threads
    engine_cpu_s: float
    first_byte_s: list[float]  # of requests that came meanwhile, sorted


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


class Streams:
    """Requests that are answered at once, read as cheaply as can be."""

    def __init__(self, port: int, num: int, body: dict[str, Any]) -> None:
        self._chooser, self._open = selectors.DefaultSelector(), set[int]()
        self._begun: set[int] = set()
        self.num_events = 0
        for _ in range(num):
            client = socket.create_connection(("127.0.0.1", port))
            client.sendall(post("/v1/chat/completions", body))
            self._chooser.register(client, selectors.EVENT_READ)
            self._open.add(client.fileno())

    def begin(self) -> None:
        """Until each has an event."""
        num = len(self._open)
        while len(self._begun) < num:
            self._read()

    def finish(self) -> None:
        while self._open:
            self._read()

    def _read(self) -> None:
        for key, _ in self._chooser.select():
            client = key.fileobj
            assert isinstance(client, socket.socket)
            data = client.recv(1 << 16)
            num = data.count(b'"content":"')
            self.num_events += num
            if num:
                self._begun.add(key.fd)
            if not data or data.endswith(END):
                self._chooser.unregister(client)
                self._open.discard(key.fd)
                client.close()


def probe(port: int, num: int, pause_s: float) -> list[float]:
    """From the last byte sent to the first one that came back, of requests one after the other."""
    seconds = []
    body = {"model": "fast", "stream": True, "max_tokens": 1, "prompt": [400] * 32}
    data = post("/v1/completions", body)
    for _ in range(num):
        time.sleep(pause_s)
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(data)
            begun = time.monotonic()
            client.recv(1)
            seconds.append(time.monotonic() - begun)
            while not client.recv(1 << 16).endswith(END):
                pass
    return seconds


def measure(
    folder: Path, num_streams: int, num_tokens: int, pace: float, num_probes: int
) -> StreamCosts:
    command = [sys.executable, "-m", "soak.fast_engine", str(folder), "--pace", str(pace)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert server.stdout is not None
    pool = ProcessPoolExecutor(1, get_context("spawn"))
    try:
        line = server.stdout.readline()
        match = re.search(r":(\d+)$", line.strip())
        assert match is not None, f"the server did not start: {line!r}"
        body = {
            "model": "fast", "stream": True, "max_tokens": num_tokens,
            "messages": [{"role": "user", "content": "Hello"}],
        }  # fmt: skip
        pids = (server.pid, max(children_of(server.pid), key=cpu_s))
        streams = Streams(int(match[1]), num_streams, body)
        streams.begin()
        probing = pool.submit(probe, int(match[1]), num_probes, 0.03)
        num_before, before, begun = streams.num_events, list(map(cpu_s, pids)), time.monotonic()
        streams.finish()
        wall_s = time.monotonic() - begun
        spent = [cpu_s(pid) - start for pid, start in zip(pids, before, strict=True)]
        num_events = streams.num_events - num_before
        firsts = sorted(probing.result())
        return StreamCosts(
            num_streams * num_tokens - num_before, num_events, wall_s, *spent, firsts
        )
    finally:
        server.kill()
        server.wait()
        pool.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--pace", type=float, default=0.0, help="steps a second (0: no pause)")
    parser.add_argument("--probes", type=int, default=0, help="requests that come meanwhile")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder)
        costs = measure(folder, args.streams, args.tokens, args.pace, args.probes)
    tokens, events = costs.num_tokens, costs.num_events
    print(f"{tokens:,} tokens in {events:,} events in {costs.wall_s:.2f} s")
    print(f"{tokens / costs.wall_s:,.0f} tokens/s, {events / costs.wall_s:,.0f} events/s")
    print(
        f"server: {1e6 * costs.server_cpu_s / events:.1f} µs of CPU an event, "
        f"{events / costs.server_cpu_s:,.0f} events/s on a core; "
        f"{tokens / costs.server_cpu_s:,.0f} tokens/s on a core"
    )
    print(f"engine's process: {1e6 * costs.engine_cpu_s / tokens:.1f} µs a token")
    firsts = costs.first_byte_s
    if firsts:
        p50, p99 = (1e3 * firsts[int(share * (len(firsts) - 1))] for share in (0.5, 0.99))
        print(f"first byte of {len(firsts)} more requests: p50 {p50:.1f} ms, p99 {p99:.1f} ms")


if __name__ == "__main__":
    main()
