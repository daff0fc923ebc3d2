"""From the start of a process to its first token: what a user waits for after a restart.

A process of its own imports, plans, loads and answers one prompt; the clock is its parent's. The
weights are read once before, so that they lie in the page cache. `cold` gives it empty caches, as
on a machine where nothing was compiled yet.

    time_start(path, recipe, "cuda").first_token_s
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from ridgeline.engine import Engine, Sampling
from ridgeline.errors import HardwareError
from ridgeline.recipe import VERSION, Recipe, recipe_from

PROMPT_TOKENS = 128
LIMIT_S = 900.0


class Start(NamedTuple):
    ready_s: float  # until requests can be added
    first_token_s: float


def time_start(path: Path, recipe: Recipe, device: str, *, cold: bool = False) -> Start:
    _read_all(path)
    recipe_text = json.dumps({"version": VERSION} | asdict(recipe))
    with tempfile.TemporaryDirectory() as empty:
        environment = dict(os.environ)
        if cold:
            environment |= {"RIDGELINE_CACHE": empty, "TRITON_CACHE_DIR": f"{empty}/triton"}
        command = [sys.executable, "-m", "ridgeline.bench.start", str(path), device, recipe_text]
        began = time.monotonic()
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout is not None, "it was asked for"
        times = {line.strip(): time.monotonic() - began for line in process.stdout}
        _, errors = process.communicate(timeout=LIMIT_S)
    if process.returncode or "token" not in times:
        last = (errors.strip().splitlines() or ["it said nothing"])[-1]
        raise HardwareError(f"the process that was to be timed ended early: {last}")
    return Start(times["ready"], times["token"])


def _read_all(path: Path) -> None:
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
        with file.open("rb", buffering=0) as opened:
            while opened.read(1 << 24):
                pass


def main(path: str, device: str, recipe: str) -> None:
    engine = Engine(Path(path), recipe_from(json.loads(recipe)), device=device)
    print("ready", flush=True)
    vocab_size = engine.model.config.vocab_size
    prompt = [(7919 * (index + 1)) % vocab_size for index in range(PROMPT_TOKENS)]
    for delta in engine.stream(prompt, Sampling(max_tokens=1, ignore_eos=True)):
        if delta.tokens:
            print("token", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
