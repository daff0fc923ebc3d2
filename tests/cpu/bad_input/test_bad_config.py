"""A config.json that lacks something or says something wrong."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from command_line import (
    edit_json,
    generate,
    refused,
)

from ridgeline.errors import (
    ConfigError,
    OutOfMemoryError,
    RidgelineError,
    UnsupportedError,
)

Capture = pytest.CaptureFixture[str]

REQUIRED = [
    "architectures",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
]


@pytest.mark.parametrize("name", REQUIRED)
def test_a_config_without_a_field(folder: Path, name: str, capsys: Capture) -> None:
    edit_json(folder / "config.json", **{name: ...})
    refused(capsys, ConfigError, f"config.json has no field '{name}'", *generate(folder))


@pytest.mark.parametrize(
    ("name", "value", "kind", "words"),
    [
        ("num_hidden_layers", -1, ConfigError, "num_hidden_layers -1 positive"),
        ("num_hidden_layers", 0, ConfigError, "num_hidden_layers 0 positive"),
        ("num_hidden_layers", 10**12, ConfigError, "num_hidden_layers 1000000000000"),
        ("num_hidden_layers", "3", ConfigError, "num_hidden_layers '3' whole number"),
        ("num_hidden_layers", 1.5, ConfigError, "num_hidden_layers 1.5 whole number"),
        ("num_hidden_layers", math.inf, ConfigError, "num_hidden_layers inf whole number"),
        ("num_hidden_layers", math.nan, ConfigError, "num_hidden_layers nan whole number"),
        ("num_hidden_layers", True, ConfigError, "num_hidden_layers True whole number"),
        ("num_attention_heads", 0, ConfigError, "num_attention_heads 0 positive"),
        ("num_attention_heads", 3, ConfigError, "3 query heads 2 key-value heads"),
        ("num_key_value_heads", 0, ConfigError, "num_key_value_heads 0 positive"),
        ("num_key_value_heads", 3, ConfigError, "4 query heads 3 key-value heads"),
        ("head_dim", -12, ConfigError, "head_dim -12 positive"),
        ("head_dim", 13, ConfigError, "rotary_dim 13 even"),
        ("hidden_size", [48], ConfigError, "hidden_size [48] whole number"),
        ("hidden_size", -48, ConfigError, "hidden_size -48 positive"),
        ("hidden_size", 10**15, OutOfMemoryError, "weights GiB free smaller"),
        ("hidden_size", 10**400, ConfigError, "hidden_size whole number"),
        ("vocab_size", 10**14, OutOfMemoryError, "weights GiB free smaller"),
        ("intermediate_size", 0, ConfigError, "intermediate_size 0 positive"),
        ("max_position_embeddings", -5, ConfigError, "max_position_embeddings -5 positive"),
        ("rms_norm_eps", "tiny", ConfigError, "rms_norm_eps 'tiny' number"),
        ("tie_word_embeddings", "yes", ConfigError, "tie_word_embeddings 'yes' true or false"),
        ("hidden_act", "relu9", UnsupportedError, "'relu9' supported: silu"),
        ("hidden_act", ["silu"], UnsupportedError, "['silu'] supported: silu"),
        ("architectures", ["GPT2LMHeadModel"], UnsupportedError, "GPT2LMHeadModel Gemma3For"),
        ("architectures", "LlamaForCausalLM", ConfigError, "architectures"),
        ("rope_parameters", {"rope_type": "spiral"}, UnsupportedError, "'spiral' yarn llama3"),
        ("rope_parameters", {"rope_type": ["yarn"]}, UnsupportedError, "supported: default"),
        ("rope_parameters", {"rope_type": "linear"}, ConfigError, "'linear' needs a factor"),
        ("rope_parameters", {"rope_type": "linear", "factor": "2"}, ConfigError, "factor '2'"),
        ("rope_parameters", {"rope_theta": -1.0}, ConfigError, "theta -1.0"),
        ("rope_parameters", {"rope_theta": math.nan}, ConfigError, "rope_theta nan"),
        ("rope_parameters", [1, 2], ConfigError, "rope_parameters [1, 2] object"),
        ("rope_parameters", {"rope_type": "longrope"}, ConfigError, "longrope need 6"),
    ],
)  # fmt: skip
def test_a_config_with_a_wrong_value(
    folder: Path, name: str, value: Any, kind: type[RidgelineError], words: str, capsys: Capture
) -> None:
    edit_json(folder / "config.json", **{name: value})
    refused(capsys, kind, words, *generate(folder))


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("GptOssForCausalLM", None),
        ("DeepseekV3ForCausalLM", None),
        ("FalconForCausalLM", None),
        ("LlamaForCausualLM", "LlamaForCausalLM"),
        ("Gemma4ForCausalLM", "Gemma3ForCausalLM"),
    ],
)
def test_an_unknown_architecture_is_not_taken_for_one_with_the_same_ending(
    folder: Path, name: str, near: str | None, capsys: Capture
) -> None:
    edit_json(folder / "config.json", architectures=[name])
    line = refused(capsys, UnsupportedError, f"{name} supported:", *generate(folder))
    if near is None:
        assert "did you mean" not in line
    else:
        assert f"did you mean '{near}'" in line


def test_heads_that_do_not_divide_the_hidden_size(folder: Path, capsys: Capture) -> None:
    changes = {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": ...}
    edit_json(folder / "config.json", **changes)
    refused(capsys, ConfigError, "hidden_size 48 num_attention_heads 5", *generate(folder))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[1, 2]", "JSON list object"),
        (b"{'a': 1}", "not valid JSON"),
        (b"", "not valid JSON"),
        (b'{"a": "\xff\xfe"}', "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", "not valid JSON"),
    ],
)
def test_a_config_that_is_no_json_object(
    folder: Path, content: bytes, words: str, capsys: Capture
) -> None:
    (folder / "config.json").write_bytes(content)
    refused(capsys, ConfigError, f"{folder}/config.json {words}", *generate(folder))


def test_no_config(folder: Path, capsys: Capture) -> None:
    (folder / "config.json").unlink()
    refused(capsys, ConfigError, f"{folder} has no config.json", *generate(folder))
