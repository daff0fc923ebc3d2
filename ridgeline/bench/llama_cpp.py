"""The same workload through llama.cpp on a CPU (the package llama-cpp-python), on the same GGUF
file and threads: one request after the other, and all at once in one batch.

Its own functions are called, without the package's convenience layer: prompts in batches of 512,
greedy tokens from the logits, keys and values in fp16 as it has them by default.

    peer = LlamaCpp(path, num_threads=2)
    print(peer.build)                                   # AVX512 = 1 | AVX512_VNNI = 1 | …
    run = peer.alone(prompt, num_output_tokens=64)      # its prefill_s and decode_s
    wall_s = peer.together(prompts, lengths)
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ridgeline.errors import UnsupportedError

BATCH = 512  # tokens a step, as llama.cpp has it by default
INSTALL = "pip install llama-cpp-python"


class AloneRun(NamedTuple):
    """One request by itself."""

    prefill_s: float  # to the first token
    decode_s: float  # from the first token to the last


class LlamaCpp:
    def __init__(
        self, path: Path, num_threads: int, context: int = 2048, num_requests: int = 1
    ) -> None:
        """Room for so many requests at once, of `context` tokens each."""
        self.lib = lib = _package()
        self._quiet = lib.llama_log_callback(lambda *_: None)
        lib.llama_log_set(self._quiet, None)
        lib.llama_backend_init()
        params = lib.llama_model_default_params()
        self.model = lib.llama_model_load_from_file(str(path).encode(), params)
        if not self.model:
            raise UnsupportedError(f"llama.cpp cannot load {path}")
        settings = lib.llama_context_default_params()
        settings.n_ctx = context * num_requests
        settings.n_batch = settings.n_ubatch = BATCH
        settings.n_seq_max = num_requests
        settings.n_threads = settings.n_threads_batch = num_threads
        settings.no_perf = True
        self.context = lib.llama_init_from_model(self.model, settings)
        if not self.context:
            raise UnsupportedError(f"llama.cpp cannot make a context of {settings.n_ctx} tokens")
        self.vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        self.batch = lib.llama_batch_init(BATCH, 0, 1)

    @property
    def build(self) -> str:
        """What it was compiled for."""
        info: bytes = self.lib.llama_print_system_info()
        return info.decode().strip()

    def alone(self, prompt: Sequence[int], num_output_tokens: int) -> AloneRun:
        self._forget()
        start = time.perf_counter()
        (token,) = self._read(prompt, 0)
        first = time.perf_counter()
        for count in range(num_output_tokens - 1):
            (token,) = self._step([(token, len(prompt) + count, 0, True)])
        return AloneRun(first - start, time.perf_counter() - first)

    def together(self, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> float:
        """Seconds for all: prompts first, then a step makes a token of each that is not done."""
        self._forget()
        start = time.perf_counter()
        tokens = {index: self._read(prompt, index)[0] for index, prompt in enumerate(prompts)}
        for count in range(1, max(lengths)):
            tokens = {index: token for index, token in tokens.items() if lengths[index] > count}
            rows = [
                (token, len(prompts[index]) + count - 1, index, True)
                for index, token in tokens.items()
            ]
            tokens = dict(zip(tokens, self._step(rows), strict=True))
        return time.perf_counter() - start

    def close(self) -> None:
        self.lib.llama_batch_free(self.batch)
        self.lib.llama_free(self.context)
        self.lib.llama_model_free(self.model)

    def _forget(self) -> None:
        lib = self.lib
        lib.llama_memory_clear(lib.llama_get_memory(self.context), True)

    def _read(self, prompt: Sequence[int], sequence: int) -> list[int]:
        """A prompt's first token."""
        last = len(prompt) - 1
        tokens: list[int] = []
        for start in range(0, len(prompt), BATCH):
            part = prompt[start : start + BATCH]
            rows = [
                (token, start + place, sequence, start + place == last)
                for place, token in enumerate(part)
            ]
            tokens = self._step(rows)
        return tokens

    def _step(self, rows: Sequence[tuple[int, int, int, bool]]) -> list[int]:
        """Token, position, sequence, and whether its logits are wanted; the likeliest next ones."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for place, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[place] = token
            batch.pos[place] = position
            batch.n_seq_id[place] = 1
            batch.seq_id[place][0] = sequence
            batch.logits[place] = wanted
        code = self.lib.llama_decode(self.context, batch)
        if code != 0:
            raise UnsupportedError(f"llama.cpp could not decode a batch (it returned {code})")
        wanted_rows = [place for place, row in enumerate(rows) if row[3]]
        return [self._likeliest(place) for place in wanted_rows]

    def _likeliest(self, place: int) -> int:
        logits = self.lib.llama_get_logits_ith(self.context, place)
        return int(np.ctypeslib.as_array(logits, shape=(self.vocab_size,)).argmax())


def _package() -> Any:
    try:
        import llama_cpp
    except ImportError as error:
        raise UnsupportedError(
            f"--peer llama.cpp needs the package llama-cpp-python; {INSTALL}"
        ) from error
    return llama_cpp


def check_gguf(path: object) -> Path:
    """Only a GGUF file is the same model for both."""
    if not isinstance(path, Path) or path.suffix != ".gguf":
        raise UnsupportedError(
            "--peer llama.cpp runs a GGUF file on a CPU; give one, or demo, as the model"
        )
    return path
