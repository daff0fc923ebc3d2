"""`ridgeline serve`: an OpenAI-compatible server, until SIGTERM or Ctrl-C ends it."""

from __future__ import annotations

import argparse
import logging
import os
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from ridgeline.cli import early
from ridgeline.cli.arguments.options import add_flags, add_model, add_recipe, from_flags
from ridgeline.cli.arguments.parser import group
from ridgeline.cli.terminal import Terminal
from ridgeline.engine import Engine
from ridgeline.engine.loading.saved import saved_recipe
from ridgeline.engine.process.worker import Setup
from ridgeline.errors import MissingPackageError
from ridgeline.hardware.units import human_bytes
from ridgeline.models.checkpoint import resolve_model
from ridgeline.recipe import Recipe

try:
    from ridgeline.server.config import ServerConfig, with_environment
    from ridgeline.server.door.keys import Keys
    from ridgeline.server.door.origin import Origins
    from ridgeline.server.engine_process import setup_for
    from ridgeline.server.listening import tls_context
    from ridgeline.server.logs import SERVER, log_facts, start_logging
    from ridgeline.server.serving import Serving, Sockets
    from ridgeline.server.short_turns import take_short_turns
except ModuleNotFoundError as error:
    raise MissingPackageError(
        f"`ridgeline serve` needs the package {error.name}; run: pip install 'ridgeline[serve]'"
    ) from error

log = logging.getLogger(__name__)

EXAMPLE = """\
ridgeline serve demo
ridgeline serve model/ --port 9000 --api-key-file keys.txt
curl http://127.0.0.1:8000/v1/chat/completions \\
  -H 'content-type: application/json' \\
  -d '{"model": "demo", "messages": [{"role": "user", "content": "Hello"}]}'"""
MAIN_FLAGS = (
    "--device", "--recipe", "--replicas", "--host", "--port", "--served-model-name",
    "--api-key-file", "--dtype", "--scheme", "--kv-dtype", "--max-context", "--max-batch",
    "--memory-share", "--speculation", "--tensor-parallel",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_recipe(parser)
    group(parser, "model").add_argument(
        "--replicas", type=int, metavar="N", help="run N engines, placed by Ray (default: one)"
    )
    add_flags(parser, ServerConfig)
    add_flags(parser, Recipe)


def run(args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    config = with_environment(from_flags(args, ServerConfig), os.environ)
    check_config(config)
    sockets = Sockets.bound_by(config)
    start_logging(process=SERVER, log_prompts=config.log_prompts)
    early.share_cores()
    early.one_arena()
    with terminal.progress() as progress:
        path = resolve_model(args.model, progress=progress)
        base = saved_recipe(path) if args.recipe is None else Recipe.load(args.recipe)
        recipe = from_flags(args, Recipe, base)
        engine = make_engine(args, path, recipe, setup_for(config))
    names = config.served_model_name or (name_of(args.model),)
    serving = Serving(engine, names, config, sockets)
    take_short_turns()

    def on_ready() -> None:
        url, seconds = serving.url, time.monotonic() - early.BEGAN
        facts = {"url": url, "probe_url": serving.probe_url, "model": names[0]}
        log_facts(log, "ready", {**facts, "seconds": round(seconds, 2)})
        if not terminal.json:
            print(ready_line(url, ", ".join(names), engine, seconds), flush=True)

    serving.run(on_ready)
    return {
        "model": names[0],
        "served_s": time.monotonic() - early.BEGAN,
        "restarts": engine.num_restarts,
    }


def check_config(config: ServerConfig) -> None:
    """What is wrong with keys, origins or certificate is said before anything is loaded."""
    Keys(config.api_keys())
    Origins(config.allow_origin)
    tls_context(config)


def make_engine(args: argparse.Namespace, path: Path, recipe: Recipe, setup: Setup) -> Engine:
    if args.replicas is None:
        return Engine.supervised(
            path, recipe, device=args.device, setup=setup, early=early.starter()
        )
    # By its name: on another machine it is found, or fetched, at another place.
    return Engine.replicated(
        args.model, recipe, num_replicas=args.replicas, device=args.device, setup=setup
    )


def name_of(model: str) -> str:
    """As it was given; of a path its last part."""
    return Path(model).name if os.path.exists(model) else model


def ready_line(url: str, name: str, engine: Engine, seconds: float) -> str:
    plan, recipe = engine.memory_plan, engine.recipe
    weights, pages = (human_bytes(plan.bytes_of(part)) for part in ("weights", "KV pages"))
    tokens = plan.num_pages * recipe.kv.page_size
    return (
        f"{url} serves {name}: weights {weights}, KV pages {pages} ({tokens:,} tokens), context "
        f"{engine.max_context:,}; ready in {seconds:.1f} s"
    )


def render(result: dict[str, Any], console: Console) -> None:
    lived = f"served {result['model']} for {result['served_s']:.0f} s"
    console.print(f"{lived}, {result['restarts']} restarts of the engine", markup=False)
