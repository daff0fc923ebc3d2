"""How the engine's process behaves as part of a server.

Engine.supervised(path, recipe, setup=setup_for(config))
"""

from __future__ import annotations

import signal
from dataclasses import replace
from functools import partial

from ridgeline.engine.local.local_backend import LocalBackend
from ridgeline.engine.process.worker import Setup
from ridgeline.server.config import ServerConfig
from ridgeline.server.logs import start_logging
from ridgeline.server.short_turns import take_short_turns


def setup_for(config: ServerConfig) -> Setup:
    """What is done in that process before its first step. No keys go there."""
    return partial(prepare, grammar_timeout=config.grammar_timeout, log_prompts=config.log_prompts)


def prepare(
    local: LocalBackend, grammar_timeout: float | None = None, log_prompts: bool = False
) -> None:
    """In that process. Who stops a service, or makes it read its files again, may signal all its
    processes: this one goes on until the requests have ended, and ends with the server.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    start_logging(process="engine", log_prompts=log_prompts)
    limit_grammars(local, grammar_timeout)
    take_short_turns()


def limit_grammars(local: LocalBackend, timeout_s: float | None) -> None:
    if local.grammars is not None and timeout_s is not None:
        compilers = local.grammars.compilers
        compilers.limits = replace(compilers.limits, timeout_s=timeout_s)
