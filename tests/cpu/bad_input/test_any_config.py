"""Whatever a config.json or the metadata of a GGUF holds, it is read or refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from gguf_files import write_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_tokenizers import byte_level_metadata

from ridgeline.data import Tokenizer
from ridgeline.errors import (
    RidgelineError,
)
from ridgeline.models.checkpoint import open_checkpoint
from ridgeline.models.checkpoint.gguf import GgufCheckpoint
from ridgeline.models.families import describe, describe_hf
from ridgeline.quantization import load_model

Capture = pytest.CaptureFixture[str]


NUMBERS = (
    st.integers(-3, 200) | st.sampled_from([2**31, 2**63, 10**20, 10**320, -(10**9)]) | st.floats()
)
VALUES = st.one_of(
    NUMBERS,
    st.none(),
    st.booleans(),
    st.text(max_size=4),
    st.lists(NUMBERS, max_size=7),
    st.dictionaries(st.sampled_from(["rope_type", "factor", "x"]), NUMBERS, max_size=2),
)
ROPE_FIELDS = (
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "low_freq_factor",
    "high_freq_factor",
    "long_factor",
    "short_factor",
    "partial_rotary_factor",
    "truncate",
)
ROPES = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(["default", "linear", "dynamic", "yarn", "longrope", "llama3"])},
    optional=dict.fromkeys(ROPE_FIELDS, VALUES),
)
BOUNDED = settings(
    max_examples=120,
    deadline=None,  # nothing asserts on the clock
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
SAMPLES = {family: name for name, (family, _) in tiny_models.MODELS.items()}  # one a family


@contextmanager
def read_or_refused() -> Iterator[None]:
    """The block ends well or in a refusal of ours, short enough for a line."""
    message = ""
    try:
        yield
    except RidgelineError as error:
        message = str(error)
    assert len(message) < 1000


def family_config(name: str) -> dict[str, Any]:
    family, overrides = tiny_models.MODELS[name]
    config = getattr(tiny_models.transformers, f"{family}Config")(
        **{**tiny_models.SMALL, **overrides}
    )
    causal = {"Gemma3Text": "Gemma3"}.get(family, family)
    return {**config.to_dict(), "architectures": [f"{causal}ForCausalLM"]}


@pytest.mark.sweep(keep=1)
@BOUNDED
@given(data=st.data())
def test_any_config_is_read_or_refused(data: st.DataObject, whole: Path) -> None:
    """The model's own folder with some values of its config.json replaced."""
    values = json.loads((whole / "config.json").read_text())
    changes = st.dictionaries(st.sampled_from(sorted(values)), VALUES, min_size=1, max_size=3)
    changed = {**values, **data.draw(changes)}
    if data.draw(st.booleans()):
        changed["rope_parameters"] = data.draw(ROPES)
    spoiled = whole.parent / "spoiled"
    shutil.copytree(whole, spoiled, dirs_exist_ok=True)
    (spoiled / "config.json").write_text(json.dumps(changed))
    with read_or_refused():
        load_model(spoiled, dtype="fp32", device="cpu")
    with read_or_refused():
        Tokenizer.load(spoiled)


@BOUNDED
@given(name=st.sampled_from(sorted(SAMPLES.values())), data=st.data())
def test_any_config_of_any_family_is_read_or_refused(name: str, data: st.DataObject) -> None:
    values = family_config(name)
    changes = st.dictionaries(st.sampled_from(sorted(values)), VALUES, min_size=1, max_size=3)
    changed = {**values, **data.draw(changes)}
    with read_or_refused():
        config = describe_hf(json.loads(json.dumps(changed))).config
        for layer in config.layers:
            if layer.rope is not None and config.head_dim < 10_000:
                layer.rope.angles(torch.arange(3), torch.tensor([3, 3, 3]))


@BOUNDED
@given(name=st.sampled_from(["llama-mha", "gemma3", "qwen3"]), data=st.data())
def test_any_gguf_metadata_is_read_or_refused(
    name: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    checkpoint = gguf_of(name, tmp_path_factory)
    metadata = {**checkpoint.metadata, **byte_level_metadata("gpt-2")}
    values = VALUES.filter(lambda value: value is not None and not isinstance(value, dict))
    changes = st.dictionaries(st.sampled_from(sorted(metadata)), values, min_size=1, max_size=3)
    changed = {**metadata, **data.draw(changes)}
    for key in data.draw(st.sets(st.sampled_from(sorted(metadata)), max_size=1)):
        del changed[key]
    with read_or_refused():
        describe(GgufCheckpoint(checkpoint.path, changed, checkpoint.tensors))
    with read_or_refused():
        Tokenizer.from_gguf(changed)


GGUFS: dict[str, Any] = {}


def gguf_of(name: str, factory: pytest.TempPathFactory) -> Any:
    if name not in GGUFS:
        path = factory.mktemp(name) / "model.gguf"
        write_gguf(tiny_models.make_model(name), path)
        GGUFS[name] = open_checkpoint(path)
    return GGUFS[name]
