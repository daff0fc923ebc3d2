"""A server whose engine computes nothing: its process gives every stream a token a step, as fast as
they are taken or at a pace. What is left is the server's own work for a token.

    python -m soak.fast_engine FOLDER --pace 80      # says its port when it is ready
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

from ridgeline.engine import Engine
from ridgeline.engine.execution.work import StepMeter
from ridgeline.engine.local.local_backend import LocalBackend
from ridgeline.engine.process import worker
from ridgeline.engine.process.heartbeat import Heartbeat
from ridgeline.engine.process.worker import Add, Cancel, Command, EngineOrder, Ready, Relay
from ridgeline.engine.scheduling.state import End
from ridgeline.recipe import KV, Limits, Recipe
from ridgeline.server.config import ServerConfig
from ridgeline.server.serving import Serving, Sockets

PACE = 0.0  # steps a second; 0: no pause
FIRST_TOKEN, NUM_TOKENS = 300, 1000  # ids of plain words


class Stream:
    def __init__(self, add: Add, relay: Relay) -> None:
        self.relay, self.left = relay, add.job.sampling.max_tokens or 1
        self.token = FIRST_TOKEN + relay.number % NUM_TOKENS

    def step(self) -> bool:
        """One token; whether it was the last."""
        self.left -= 1
        self.token = FIRST_TOKEN + (self.token + 1 - FIRST_TOKEN) % NUM_TOKENS
        self.relay.push(0, self.token, None, None if self.left else "length")
        if not self.left:
            self.relay.end(End(self.relay.number, "finished", "length"))
        return not self.left


def run_fast(connection: Connection, heartbeat: Heartbeat, order: EngineOrder) -> None:
    """Stands for worker.run_own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    local = LocalBackend(order.model, order.recipe, device="cpu", num_pages=order.num_pages)
    heartbeat.note(local.progress, local.stats)
    connection.send([Ready(local.wait_until_ready(), local.costs)])
    inbox: SimpleQueue[Command] = SimpleQueue()
    threading.Thread(target=worker._read, args=(connection, inbox), daemon=True).start()
    streams: dict[int, Stream] = {}
    outbox: list[worker.WorkerMessage] = []
    meter, pace, due = StepMeter(local.runner.device), pace_of(order), time.monotonic()
    while True:
        while not streams or not inbox.empty():
            command = inbox.get()
            if isinstance(command, Add):
                relay = Relay(command.ask.request_id, command.job, outbox, meter)
                streams[relay.number] = Stream(command, relay)
            elif isinstance(command, Cancel):
                streams.pop(command.number, None)
        for number in [number for number, stream in streams.items() if stream.step()]:
            del streams[number]
        connection.send(outbox)
        outbox.clear()
        if pace:
            due = max(due + 1 / pace, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))


def pace_of(order: EngineOrder) -> float:
    """It travels in a field that nothing else reads here."""
    return float((order.model / "pace").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="a model with a tokenizer")
    parser.add_argument("--pace", type=float, default=PACE, help="steps a second (0: no pause)")
    args = parser.parse_args()
    (args.folder / "pace").write_text(str(args.pace))
    worker.run_own = run_fast
    limits = Limits(max_batch=512, token_budget=4096, memory_share=0.2)
    recipe = Recipe(dtype="fp32", kv=KV(page_size=16), limits=limits)
    config = ServerConfig(port=0, max_waiting=1024, max_per_key=1024)
    sockets = Sockets.bound_by(config)
    engine = Engine.supervised(args.folder, recipe, device="cpu", num_pages=64)
    serving = Serving(engine, ("fast",), config, sockets)
    serving.run(lambda: print(serving.url, flush=True))


if __name__ == "__main__":
    sys.exit(main())
