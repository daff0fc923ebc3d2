"""Runs the command line in this process or in one of its own, and a tiny model to run it on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import SMALL, spread_weights
from tiny_tokenizers import byte_level_json

from ridgeline.cli import main
from ridgeline.errors import RidgelineError

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


def make_folder(folder: Path, template: str | None = None, **overrides: Any) -> Path:
    """A Hugging Face folder with one random Llama layer or so and 1,500 byte-level tokens."""
    shape = {**SMALL, "vocab_size": 1500, "num_hidden_layers": 1, "eos_token_id": 0, **overrides}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)).float()
    spread_weights(model)
    model.save_pretrained(folder)
    byte_level_json().save(str(folder / "tokenizer.json"))
    about = {"eos_token": "<|endoftext|>"} | ({"chat_template": template} if template else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


def generate(folder: Path | str, *more: str) -> tuple[str, ...]:
    return ("generate", str(folder), "hello", "--max-tokens", "2", "--device", "cpu", *more)


def edit_json(file: Path, **changes: Any) -> None:
    """Set fields of a JSON file; `...` takes one away."""
    values = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))


def refused(
    capsys: pytest.CaptureFixture[str], kind: type[RidgelineError], words: str, *argv: str
) -> str:
    """Run it, and hold it to what every refusal promises; `words` must all be in its one line."""
    capsys.readouterr()  # what the test itself printed
    code = main(list(argv))
    out, err = capsys.readouterr()
    check_refusal(code, out, err, kind.exit_code, words)
    return err


def check_refusal(code: int, out: str, err: str, expected_code: int, words: str) -> None:
    assert code == expected_code, err
    assert out == ""
    assert err.startswith("ridgeline: error: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1, err
    assert len(err) < 2000
    for word in words.split():
        assert word in err, (word, err)


def run_process(*argv: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """`python -m ridgeline …` as a user would start it; stdin is empty unless given."""
    command = [sys.executable, "-m", "ridgeline", *argv]
    environment = {**os.environ, **options.pop("environment", {})}
    options = {"input": "", "capture_output": True, "text": True, "timeout": 120, **options}
    return subprocess.run(command, env=environment, **options)
