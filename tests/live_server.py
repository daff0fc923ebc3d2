"""A server with a tiny model, over a real socket: its HTTP side in a thread of this process, its
engine in a process of its own whose faults are switched on by files.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch
from forked_processes import forked_engine
from safetensors.torch import save_file
from server_faults import FAULTS, make_breakable
from tiny_tokenizers import byte_level_json

from ridgeline.engine import Engine
from ridgeline.recipe import KV, Limits, Recipe, edited
from ridgeline.server.config import ServerConfig
from ridgeline.server.serving import Serving, Sockets

MAX_CONTEXT = 2048
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }} Call as <tool_call>{}</tool_call>{% endif %}"
    "<|im_start|>assistant\n"
)
RECIPE = Recipe(
    dtype="fp32",
    kv=KV(page_size=16),
    limits=Limits(max_batch=32, token_budget=256, memory_share=0.2),
)


def write_model(folder: Path, template: str = TEMPLATE, tags: tuple[str, ...] = ()) -> None:
    """A Hugging Face folder with one random Llama layer that speaks 1,500 byte-level tokens, and
    these tags.
    """
    hidden, vocab, wide = 48, 1500 + len(tags), 80
    shapes = {
        "embed_tokens": (vocab, hidden),
        "norm": (hidden,),
        "layers.0.input_layernorm": (hidden,),
        "layers.0.post_attention_layernorm": (hidden,),
        **{f"layers.0.self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"},
        **{f"layers.0.mlp.{name}_proj": (wide, hidden) for name in ("gate", "up")},
        "layers.0.mlp.down_proj": (hidden, wide),
    }
    random = torch.Generator().manual_seed(0)
    weights = {
        f"model.{name}.weight": torch.randn(shape, generator=random) * 0.3 + ("norm" in name)
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors")
    about = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": MAX_CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(about))
    tokenizer = byte_level_json()
    tokenizer.add_tokens(list(tags))
    tokenizer.save(str(folder / "tokenizer.json"))
    texts = {"eos_token": "<|endoftext|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(texts))


class LiveServer:
    def __init__(self, folder: Path, config: ServerConfig, recipe: Recipe = RECIPE) -> None:
        self.faults = folder / "faults"
        self.faults.mkdir(exist_ok=True)
        os.environ[FAULTS] = str(self.faults)
        sockets = Sockets.bound_by(config)
        self.engine = Engine.supervised(
            folder,
            recipe,
            device="cpu",
            num_pages=1024,
            setup=partial(make_breakable, grammar_timeout=config.grammar_timeout),
            early=forked_engine,
        )
        self.serving = Serving(self.engine, config.served_model_name or ("tiny",), config, sockets)
        self.url = self.serving.url
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self.serving.run, args=(self._on_ready,))

    def _on_ready(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready.set()

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(10)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self.serving.begin_drain)
        self._thread.join(20)
        assert not self._thread.is_alive()

    @contextmanager
    def fault(self, name: str) -> Iterator[None]:
        file = self.faults / name
        file.touch()
        try:
            yield
        finally:
            file.unlink(missing_ok=True)

    @property
    def engine_pid(self) -> int:
        pid = self.engine._backend._worker._process.pid  # type: ignore[attr-defined]
        assert isinstance(pid, int)
        return pid

    def kill_engine(self) -> None:
        os.kill(self.engine_pid, signal.SIGKILL)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        if body is not None:
            options["json"] = body
        return httpx.post(self.url + path, timeout=30, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30, **options)

    def is_idle(self) -> bool:
        """Nothing runs and nothing is held."""
        stats = self.engine.stats
        busy = (stats.num_waiting, stats.num_prefilling, stats.num_decoding, stats.num_pages_used)
        return busy == (0, 0, 0, 0) and self.serving.gate.num_inside == 0


def until(what: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def chat(content: str = "hello", **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"model": "tiny", "messages": messages, "temperature": 0, **more}


def events_of(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """What a stream says, without its end mark."""
    for line in lines:
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[6:])


@contextmanager
def live_server(
    folder: Path,
    max_context: int | None = None,
    template: str = TEMPLATE,
    tags: tuple[str, ...] = (),
    max_batch: int = RECIPE.limits.max_batch,
    **changes: Any,
) -> Iterator[LiveServer]:
    write_model(folder, template, tags)
    recipe = edited(RECIPE, "limits.max_context", max_context)
    recipe = edited(recipe, "limits.max_batch", max_batch)
    server = LiveServer(folder, ServerConfig(port=0, **changes), recipe)
    server.start()
    try:
        yield server
    finally:
        server.stop()
