"""A server from its start to its end: binds, runs, drains, closes.

SIGTERM and SIGINT begin the drain: nobody new is let in, those inside have `drain_seconds` to end,
and what is left then is told so. A second signal waits for nobody.

    serve(engine, "demo", ServerConfig(port=0), on_ready=print)
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from ipaddress import ip_address
from typing import Any

import uvicorn

from ridgeline.engine import Engine
from ridgeline.errors import UnsupportedError, UsageError
from ridgeline.server.answering import Answering
from ridgeline.server.config import MIB, ServerConfig
from ridgeline.server.door.gate import Gate
from ridgeline.server.door.keys import Keys
from ridgeline.server.door.refusals import shutting_down
from ridgeline.server.door.wire import BoundedProtocol, WireBounds
from ridgeline.server.exchange import Bodies
from ridgeline.server.front import Front
from ridgeline.server.logs import log_facts
from ridgeline.server.metrics.metrics import Meters
from ridgeline.server.metrics.served import served_by
from ridgeline.server.protocol import RequestLimits
from ridgeline.server.protocol.thinking import tags_for
from ridgeline.server.pump import Pump
from ridgeline.server.routes import Routes
from ridgeline.server.watchdog import Watchdog

log = logging.getLogger(__name__)

NUM_THREADS = 4  # that parse and tokenize; most of that work is outside Python's lock
LAST_WORDS_S = 2.0  # for telling those that did not end in time
BODIES_TOTAL = 256 * MIB  # of all requests that are being read


class QuietServer(uvicorn.Server):
    """uvicorn without its ways with signals, which end a process by the signal it drained for."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(config: ServerConfig) -> socket.socket:
    """A listening socket, before anything is loaded: a port that is taken is said at once."""
    try:
        found = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, _, _, _, address = found[0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        raise UsageError(
            f"cannot listen on {config.host} port {config.port}: {error.strerror or error}; try "
            "another --port, or 0 for a free one"
        ) from error
    bound.set_inheritable(False)
    return bound


def url_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_local(bound: socket.socket) -> bool:
    """Whether only this machine can reach it."""
    return ip_address(bound.getsockname()[0].partition("%")[0]).is_loopback


class Serving:
    def __init__(
        self, engine: Engine, name: str, config: ServerConfig, bound: socket.socket
    ) -> None:
        if engine.tokenizer is None:
            raise UnsupportedError("the model has no tokenizer, and clients send texts")
        self.config, self._bound, keys = config, bound, Keys(config.keys())
        self.meters = Meters(served_by(engine, name))
        self.pump = Pump(engine, self.meters)
        limits = engine.recipe.limits.filled()
        max_running = limits.max_batch * engine.num_replicas
        self.gate = Gate(max_running, config.max_waiting, config.max_per_key)
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenize")
        self.answering = Answering(
            self.pump,
            self.gate,
            Bodies(config.max_body_bytes(limits.max_context), BODIES_TOTAL),
            self.meters,
            engine.tokenizer,
            RequestLimits(
                (name,),
                limits.max_context,
                engine.config.vocab_size,
                ignores_unknown=config.unknown_fields == "ignore",
                thinking_tags=tags_for(config.reasoning, engine.tokenizer),
                sampling=self._default_sampling(engine),
            ),
            self._threads,
            config.log_prompts,
        )
        routes = Routes(self.answering, config.step_timeout / 2, keys.are_asked_for)
        self.front = Front(keys, routes.all(), self.meters, is_local(bound))
        if not (is_local(bound) or keys.are_asked_for):
            log.warning("no API key is set: anyone who can reach %s can use it", url_of(bound))
        self._server = QuietServer(self._uvicorn(self.front))
        self._watchdog = Watchdog(self.pump, config.step_timeout)
        self._drain: asyncio.Task[None] | None = None

    def _default_sampling(self, engine: Engine) -> Mapping[str, Any]:
        values = engine.generation.sampling if self.config.generation_config == "model" else {}
        if values:
            facts = {**values, "source": "generation_config.json"}
            log_facts(log, "sampling defaults; turn off with --generation-config none", facts)
        return values

    def _uvicorn(self, app: Front) -> uvicorn.Config:
        seconds = self.config.client_timeout
        bounds = WireBounds(
            max_connections=self.config.max_connections,
            head_s=min(seconds, WireBounds.head_s),
            body_s=seconds,
            read_s=seconds,
        )
        return uvicorn.Config(
            app,
            http=partial(BoundedProtocol, bounds=bounds),  # type: ignore[arg-type]
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=min(self.config.max_connections, 2048),
            timeout_graceful_shutdown=LAST_WORDS_S,  # type: ignore[arg-type]
        )

    def run(self, on_ready: Callable[[], None]) -> None:
        """Until a signal ends it."""
        asyncio.run(self._run(on_ready))

    async def _run(self, on_ready: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.begin_drain)
        self.pump.start(loop)
        self._watchdog.start()
        try:
            serving = asyncio.create_task(self._server.serve(sockets=[self._bound]))
            while not self._server.started and not serving.done():
                await asyncio.sleep(0.005)
            on_ready()
            await serving
        finally:
            self._watchdog.stop()
            await loop.run_in_executor(None, self.pump.close)
            self._threads.shutdown(wait=False, cancel_futures=True)

    def begin_drain(self) -> None:
        """The first time gracefully, the second time at once."""
        if self._drain is not None:
            self._drain.cancel()
            self._server.should_exit = True
            return
        self.gate.is_closed = True
        self._drain = asyncio.create_task(self._drained())

    async def _drained(self) -> None:
        seconds = self.config.drain_seconds
        log.info("shutting down: %d requests have %g s to finish", self.gate.num_requests, seconds)
        end = time.monotonic() + seconds
        while self.gate.num_requests and time.monotonic() < end:
            await asyncio.sleep(0.02)
        self.pump.fail_all(shutting_down())
        end = time.monotonic() + LAST_WORDS_S
        while self.gate.num_requests and time.monotonic() < end:
            await asyncio.sleep(0.02)
        self._server.should_exit = True
