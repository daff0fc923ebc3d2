"""`ridgeline serve --tensor-parallel 2 --replicas 2` over HTTP: engines that Ray has placed, each
with two ranks, answer as one engine on one device does.
"""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import write_model

from ridgeline.data import Tokenizer
from ridgeline.engine import Engine, Sampling
from ridgeline.quantization import load_model
from ridgeline.recipe import Limits, Recipe

LIMIT_S = 300.0  # to a start of Ray and four ranks, on a machine however busy
PROMPTS = [f"number {number} of some" for number in range(6)]


def answers_alone(folder: Path) -> list[str]:
    recipe = Recipe(dtype="fp32", limits=Limits(max_batch=8, memory_share=0.05))
    engine = Engine(load_model(folder, dtype="fp32", device="cpu"), recipe, num_pages=64)
    tokenizer = Tokenizer.load(folder)
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    outputs = engine.generate(prompts, Sampling(max_tokens=12, ignore_eos=True))
    return [tokenizer.decode(output.tokens) for output in outputs]


@pytest.mark.slow
def test_replicas_with_ranks_answer_as_one_engine(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    write_model(tmp_path)
    expected = answers_alone(tmp_path)
    flags = (
        "--device cpu --dtype fp32 --port 0 --tensor-parallel 2 --replicas 2 --memory-share 0.05"
    )
    command = [sys.executable, "-P", "-m", "ridgeline", "serve", str(tmp_path), *flags.split()]
    log = (tmp_path / "log").open("w")
    process = subprocess.Popen(
        command, text=True, stdout=subprocess.PIPE, stderr=log, start_new_session=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.match(r"(http://127\.0\.0\.1:\d+) serves", line)
        assert match, line + (tmp_path / "log").read_text()
        with httpx.Client(base_url=match[1], timeout=LIMIT_S) as client:

            def answer(prompt: str) -> str:
                body: dict[str, Any] = {"model": tmp_path.name, "prompt": prompt, "max_tokens": 12}
                body |= {"temperature": 0, "ignore_eos": True}
                reply = client.post("/v1/completions", json=body)
                assert reply.status_code == 200, reply.text
                text: str = reply.json()["choices"][0]["text"]
                return text

            with ThreadPoolExecutor(len(PROMPTS)) as pool:
                assert list(pool.map(answer, PROMPTS)) == expected
        process.terminate()  # it alone: it needs Ray's own processes to end those of the replicas
        out, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, (tmp_path / "log").read_text()
        assert "0 restarts" in out
    finally:
        process.kill()
        process.wait()
        log.close()
