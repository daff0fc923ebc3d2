"""The same workload through another engine (transformers, llama.cpp), measured the same way.

`transformers` runs in two modes: a `generate` call for each request, and all requests in one batch,
padded on the left to the longest prompt and run to the longest output; there, what a request makes
beyond its own length is thrown away and not counted. Arrival times are left out: a peer has all
requests from the beginning.

    peer = transformers_peer(path, "bf16", "cpu")  # llama.cpp's is bench/llama_cpp.py
    for run in peer_runs(peer, workload): run.name, run.output_tokens_per_s
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ridgeline.bench.llama_cpp import LlamaCpp
from ridgeline.data.workload import Workload
from ridgeline.errors import UnsupportedError
from ridgeline.formats.dtypes import dtype_name, parse_dtype
from ridgeline.models.families import Description
from ridgeline.progress import Progress
from ridgeline.quantization import load_model, save_model

PEERS = ("transformers", "llama.cpp")


@dataclass(frozen=True)
class PeerRun:
    name: str
    num_requests: int
    num_output_tokens: int
    wall_s: float
    prefill_tokens_per_s: float | None = None  # where both were timed by themselves
    decode_tokens_per_s: float | None = None
    build: str | None = None  # what it was compiled for, where it says so

    @property
    def output_tokens_per_s(self) -> float:
        return self.num_output_tokens / self.wall_s


def llama_cpp_runs(
    peer: LlamaCpp, workload: Workload, progress: Progress | None = None
) -> Iterator[PeerRun]:
    """One after the other, where that says more than all at once; and all at once."""
    prompts, lengths = _asked(workload, peer.vocab_size)
    peer.alone(prompts[0][:16], 2)  # whatever is done once
    if progress is not None:
        progress("llama.cpp", 0, 1)
    start = time.monotonic()
    alone = [peer.alone(*request) for request in zip(prompts, lengths, strict=True)]
    wall_s = time.monotonic() - start
    decode_s, prefill_s = sum(run.decode_s for run in alone), sum(run.prefill_s for run in alone)
    num_decoded, num_read = sum(lengths) - len(lengths), sum(map(len, prompts))
    decode_rate = num_decoded / decode_s if num_decoded else None
    yield PeerRun(
        "one by one", len(prompts), sum(lengths), wall_s, num_read / prefill_s, decode_rate
    )
    if len(prompts) > 1:
        wall_s = peer.together(prompts, lengths)
        yield PeerRun("all at once", len(prompts), sum(lengths), wall_s)


def _asked(workload: Workload, vocab_size: int) -> tuple[list[list[int]], list[int]]:
    prompts = [workload.prompt_ids(index, vocab_size) for index in range(len(workload.requests))]
    return prompts, [request.num_output_tokens for request in workload.requests]


def transformers_peer(source: Path | Description, dtype: str, device: str) -> Any:
    """Their model, in plain weights of `dtype`: from a folder or a GGUF file, or of a shape with
    random weights.
    """
    try:
        import transformers
    except ImportError as error:
        raise UnsupportedError(
            "--peer transformers needs the transformers package; pip install transformers"
        ) from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    kind = parse_dtype(dtype)
    if isinstance(source, Path):
        return _loaded(transformers, source, kind).to(device).eval()
    values = dict(source.hf_config)
    name = values["architectures"][0].replace("ForCausalLM", "Config")
    with torch.device(device):
        config = getattr(transformers, name)(**values)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=kind).eval()


def _loaded(transformers: Any, path: Path, dtype: torch.dtype) -> Any:
    """A GGUF file goes through safetensors first: read by itself it may stay in its blocks, which
    is another kind of work.
    """
    read = transformers.AutoModelForCausalLM.from_pretrained
    if path.is_dir():
        return read(path, dtype=dtype)
    with tempfile.TemporaryDirectory() as folder:
        model = load_model(path, dtype=dtype_name(dtype), device="cpu")
        save_model(model, Path(folder) / "model", source=path)
        return read(Path(folder) / "model", dtype=dtype)


def peer_runs(
    model: Any, workload: Workload, progress: Progress | None = None
) -> Iterator[PeerRun]:
    """One after the other, and as one padded batch."""
    vocab_size = model.config.get_text_config().vocab_size
    prompts, lengths = _asked(workload, vocab_size)
    _generate(model, [prompts[0]], 2)  # whatever is done once
    start = time.monotonic()
    for done, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        if progress is not None:
            progress("transformers, one by one", done, len(prompts))
        _generate(model, [prompt], length)
    yield PeerRun("one by one", len(prompts), sum(lengths), time.monotonic() - start)
    if progress is not None:
        progress("transformers, padded batch", 0, 1)
    start = time.monotonic()
    _generate(model, prompts, max(lengths))
    yield PeerRun("padded batch", len(prompts), sum(lengths), time.monotonic() - start)


@torch.inference_mode()
def _generate(model: Any, prompts: list[list[int]], num_tokens: int) -> None:
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    made = model.generate(
        ids.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    assert made.shape[1] == longest + num_tokens, f"{made.shape} for {num_tokens} tokens"
    if made.device.type == "cuda":
        torch.cuda.synchronize(made.device)
