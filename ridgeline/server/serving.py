"""A server from its start to its end: runs, reads its files again, drains, closes.

SIGTERM and SIGINT begin the drain: nobody new is let in, those inside have `drain_seconds` to end,
and what is left then gets an error. A second signal waits for nobody. SIGHUP reads keys and
certificate again.

    sockets = Sockets.bound_by(config)          # before the engine is loaded
    Serving(engine, ("demo",), config, sockets).run(on_ready=print)
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from ridgeline.engine import Engine
from ridgeline.errors import UnsupportedError
from ridgeline.server.answering import Answering
from ridgeline.server.config import MIB, ServerConfig
from ridgeline.server.door.gate import Gate
from ridgeline.server.door.keys import Keys
from ridgeline.server.door.origin import ANY, Origins
from ridgeline.server.door.rates import Rates
from ridgeline.server.door.refusals import shutting_down
from ridgeline.server.door.wire import WireBounds
from ridgeline.server.exchange import Bodies
from ridgeline.server.front import Front
from ridgeline.server.listening import (
    LAST_WORDS_S,
    PROBE_BOUNDS,
    HttpServer,
    bind,
    is_local,
    load_certificate,
    tls_context,
    url_of,
)
from ridgeline.server.logs import log_facts
from ridgeline.server.metrics.metrics import Meters
from ridgeline.server.metrics.requests import RequestRow
from ridgeline.server.metrics.served import served_by
from ridgeline.server.protocol import RequestLimits
from ridgeline.server.protocol.thinking import tags_for
from ridgeline.server.pump import Pump
from ridgeline.server.reloading import Reloading
from ridgeline.server.routes import Routes
from ridgeline.server.watchdog import Watchdog

log = logging.getLogger(__name__)

NUM_THREADS = 4  # that parse and tokenize; most of that work is outside Python's lock
BODIES_TOTAL = 256 * MIB  # of all requests that are being read


class Sockets(NamedTuple):
    main: socket.socket
    probe: socket.socket | None  # for /health and /ready alone

    @classmethod
    def bound_by(cls, config: ServerConfig) -> Sockets:
        main, probe = bind(config.host, config.port), None
        if config.probe_port is not None:
            probe = bind(config.host, config.probe_port, "--probe-port")
        return cls(main, probe)


class Serving:
    def __init__(
        self, engine: Engine, names: Sequence[str], config: ServerConfig, sockets: Sockets
    ) -> None:
        """`names` of the model, its own first."""
        if engine.tokenizer is None:
            raise UnsupportedError("the model has no tokenizer, and clients send texts")
        self.config, self._sockets = config, sockets
        self.keys, self._tls = Keys(config.api_keys()), tls_context(config)
        self.rates = Rates(config.requests_per_minute, config.tokens_per_minute)
        self.meters = Meters(served_by(engine, names[0]))
        self.meters.on_end.append(self._count_tokens)
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
                tuple(names),
                limits.max_context,
                engine.config.vocab_size,
                ignores_unknown=config.unknown_fields == "ignore",
                thinking_tags=tags_for(config.reasoning, engine.tokenizer),
                sampling=self._default_sampling(engine),
            ),
            self._threads,
            config.log_prompts,
        )
        routes = Routes(
            self.answering,
            self.rates,
            slow_s=config.step_timeout / 2,
            has_key=self.keys.are_required,
            root_path=config.root_path,
        )
        self.front = Front(
            routes.all(),
            self.meters,
            keys=self.keys,
            origins=Origins(config.allow_origin),
            is_local=is_local(sockets.main),
            root_path=config.root_path,
        )
        self._server = HttpServer(self.front, self._bounds(), tls=self._tls)
        self._probe = self._probe_server(routes)
        self._watchdog = Watchdog(self.pump, config.step_timeout)
        self._drain: asyncio.Task[None] | None = None
        self._reloading = Reloading(config.files, self.reload)
        self._warn()

    def _default_sampling(self, engine: Engine) -> Mapping[str, Any]:
        values = engine.generation.sampling if self.config.generation_config == "model" else {}
        if values:
            facts = {**values, "source": "generation_config.json"}
            log_facts(log, "sampling defaults; turn off with --generation-config none", facts)
        return values

    @property
    def url(self) -> str:
        return url_of(self._sockets.main, self._tls is not None)

    @property
    def probe_url(self) -> str | None:
        return None if self._sockets.probe is None else url_of(self._sockets.probe)

    def _bounds(self) -> WireBounds:
        seconds = self.config.client_timeout
        return WireBounds(
            max_connections=self.config.max_connections,
            head_s=min(seconds, WireBounds.head_s),
            body_s=seconds,
            read_s=seconds,
        )

    def _probe_server(self, routes: Routes) -> HttpServer | None:
        if self._sockets.probe is None:
            return None
        app = Front(routes.probes(), self.meters, keys=Keys(), origins=Origins(), is_local=False)
        return HttpServer(app, PROBE_BOUNDS, keep_alive_s=int(PROBE_BOUNDS.head_s))

    def _warn(self) -> None:
        """Of what is allowed and yet rarely meant."""
        if not (is_local(self._sockets.main) or self.keys.are_required):
            log.warning("no API key is set: anyone who can reach %s can use it", self.url)
        if ANY in self.config.allow_origin and not self.keys.are_required:
            log.warning("no API key is set and --allow-origin is *: any web page can use it")

    def _count_tokens(self, row: RequestRow, now: float) -> None:
        self.rates.count_tokens(row.tenant, row.num_prompt_tokens + row.num_tokens)

    def reload(self) -> None:
        """Keys and certificate, as they stand in their files now; UsageError: nothing changed."""
        keys = self.config.api_keys()
        tls_context(self.config)  # whether it can be loaded
        self.keys.use(keys)
        if self._tls is not None:
            load_certificate(self._tls, self.config)
        self.rates.keep(self.keys.tenants)

    def run(self, on_ready: Callable[[], None]) -> None:
        """Until a signal ends it."""
        asyncio.run(self._run(on_ready))

    async def _run(self, on_ready: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.begin_drain)
            loop.add_signal_handler(signal.SIGHUP, self._hang_up)
        self.pump.start(loop)
        self._watchdog.start()
        reloading = asyncio.create_task(self._reloading.run())
        try:
            await self._serve(on_ready)
        finally:
            reloading.cancel()
            self._watchdog.stop()
            await loop.run_in_executor(None, self.pump.close)
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def _serve(self, on_ready: Callable[[], None]) -> None:
        serving = [asyncio.create_task(self._server.serve(sockets=[self._sockets.main]))]
        if self._probe is not None and self._sockets.probe is not None:
            serving.append(asyncio.create_task(self._probe.serve(sockets=[self._sockets.probe])))
        servers = [self._server, *([] if self._probe is None else [self._probe])]
        while not all(server.started for server in servers) and not serving[0].done():
            await asyncio.sleep(0.005)
        on_ready()
        try:
            await serving[0]
        finally:
            if self._probe is not None:
                self._probe.should_exit = True
            await asyncio.gather(*serving)

    def _hang_up(self) -> None:
        if self._reloading.has_hung_up:
            self.begin_drain()
        else:
            self._reloading.now()

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
