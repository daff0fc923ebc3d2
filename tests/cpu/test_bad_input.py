"""Every mistake a user can make is answered in one line with its own exit code, never a crash."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import stat
import struct
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import pytest
import tiny_models
import torch
from command_line import TEMPLATE, check_refusal, edit_json, make_folder, refused, run_process
from gguf_files import write_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_tokenizers import byte_level_metadata

from ridgeline.cli import main
from ridgeline.data import Tokenizer
from ridgeline.errors import (
    CheckpointError,
    ConfigError,
    ContextLengthError,
    HardwareError,
    ModelNotFoundError,
    NumericsError,
    OfflineError,
    OutOfMemoryError,
    OutputError,
    RidgelineError,
    UnsupportedError,
    UsageError,
)
from ridgeline.models.checkpoint import open_checkpoint
from ridgeline.models.checkpoint.gguf import GgufCheckpoint
from ridgeline.models.families import describe, describe_hf
from ridgeline.quantization import load_model

REQUIRED = [
    "architectures",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
]

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with which nothing is wrong."""
    return make_folder(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy of it, to spoil."""
    return Path(shutil.copytree(whole, tmp_path / "model"))


@pytest.fixture(scope="module")
def whole_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(tiny_models.make_model("llama-mha"), path)
    return path


@pytest.fixture(autouse=True)
def no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ridgeline.cli.generate.measure", lambda hardware, *_: hardware)


def generate(folder: Path | str, *more: str) -> tuple[str, ...]:
    return ("generate", str(folder), "hello", "--max-tokens", "2", "--device", "cpu", *more)


# --- paths ----------------------------------------------------------------------------------------


def test_nothing_is_wrong_with_the_whole_model(whole: Path, capsys: Capture) -> None:
    assert main(generate(whole)) == 0
    assert main(generate(f"{whole}/")) == 0
    assert "decode 2 tokens" in capsys.readouterr().err


def test_spaces_and_unicode_in_a_path(whole: Path, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "mein schönes 模型 [bold]x[/bold]"
    shutil.copytree(whole, path)
    assert main(generate(path, "--json")) == 0
    assert json.loads(capsys.readouterr().out)["model"] == str(path)


def test_a_folder_called_demo_is_not_the_demo(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    shutil.copytree(whole, tmp_path / "demo")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ridgeline.models.checkpoint.source.fetch_demo", pytest.fail)
    assert main(generate("./demo")) == 0


@pytest.mark.parametrize(
    "name", ["/no/such/model", "", "a/b/c", "x.gguf", "~nobody-here/x", "a\0b", "a" * 5000]
)
def test_a_path_that_is_not_there(name: str, capsys: Capture) -> None:
    refused(capsys, ModelNotFoundError, "give demo", *generate(name))


def test_files_that_are_no_model(tmp_path: Path, capsys: Capture) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("just some notes\n")
    refused(capsys, CheckpointError, "notes.txt is not a model GGUF", *generate(text))
    (tmp_path / "empty.gguf").write_bytes(b"")
    refused(capsys, CheckpointError, "empty.gguf", *generate(tmp_path / "empty.gguf"))
    (tmp_path / "model.bin").write_bytes(b"PK\x03\x04 and so on, quite long enough")
    refused(capsys, CheckpointError, "model.bin pickle convert", *generate(tmp_path / "model.bin"))
    refused(capsys, CheckpointError, "null neither", *generate("/dev/null"))


def test_folders_that_are_no_model(tmp_path: Path, capsys: Capture) -> None:
    refused(capsys, CheckpointError, ".safetensors .gguf", *generate(tmp_path))
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    (tmp_path / "config.json").write_text("{}")
    refused(capsys, CheckpointError, "pytorch_model.bin pickle convert", *generate(tmp_path))


def test_a_weights_file_that_is_a_folder(folder: Path, capsys: Capture) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    refused(capsys, CheckpointError, "model.safetensors", *generate(folder))


@pytest.fixture
def as_nobody() -> Iterator[Path]:
    """A folder of this user's; root, whom permissions do not hold back, becomes someone else."""
    place = Path(tempfile.mkdtemp())
    place.chmod(0o777)
    was_root = os.geteuid() == 0
    if was_root:
        os.seteuid(65534)
    try:
        yield place
    finally:
        if was_root:
            os.seteuid(0)
        for path in (place, *place.rglob("*")):
            path.chmod(0o700)
        shutil.rmtree(place)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "."])
def test_permission_denied(whole: Path, as_nobody: Path, name: str, capsys: Capture) -> None:
    copy = as_nobody / "model"
    copy_readable(whole, copy)
    (copy / name).chmod(0)
    code = main(generate(copy))
    out, err = capsys.readouterr()
    kind = {"config.json": ConfigError, "tokenizer.json": ConfigError}.get(name, CheckpointError)
    check_refusal(code, out, err, kind.exit_code, "ermission denied")
    assert str(copy) in err


def copy_readable(source: Path, target: Path) -> None:
    """Copy as root what is then owned by the user that the test has become."""
    user = os.geteuid()
    if os.getuid() == 0:
        os.seteuid(0)
    shutil.copytree(source, target)
    if os.getuid() == 0:
        for path in (target, *target.iterdir()):
            os.chown(path, user, -1)
        os.seteuid(user)


def test_a_hub_name_without_a_network() -> None:
    done = run_process(*generate("nobody/no-such-model"), environment={"HF_HUB_OFFLINE": "1"})
    words = "'nobody/no-such-model' hub could not be reached folder"
    check_refusal(done.returncode, done.stdout, done.stderr, OfflineError.exit_code, words)


# --- config.json ----------------------------------------------------------------------------------


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


# --- weights --------------------------------------------------------------------------------------


def test_spoiled_safetensors(folder: Path, capsys: Capture) -> None:
    file = folder / "model.safetensors"
    data = file.read_bytes()
    spoiled = {
        b"\0" * 100: "corrupt",
        struct.pack("<Q", 100) + b"{" + b"x" * 200: "corrupt",
        struct.pack("<Q", 10**12) + data[8:]: f"claims {10**12} bytes",
        data[: len(data) // 2]: "cut short",
        data[:5]: "cut short",
        b"": "cut short",
        b"version https://git-lfs": "git lfs pull",
    }
    for content, words in spoiled.items():
        file.write_bytes(content)
        refused(capsys, CheckpointError, f"{file} {words}", *generate(folder))


def test_tensors_that_do_not_fit(folder: Path, capsys: Capture) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    tensors["model.layers.7.extra.weight"] = torch.zeros(3)
    tensors["lm_head.weight"] = torch.zeros(7, 48)
    save_file(tensors, file)
    words = (
        "1 missing: model.norm.weight 1 unknown: model.layers.7.extra.weight "
        "1 wrong shape: lm_head.weight [7, 48] instead of [1500, 48]"
    )
    refused(capsys, CheckpointError, f"{folder} {words}", *generate(folder))


def test_spoiled_gguf(whole_gguf: Path, tmp_path: Path, capsys: Capture) -> None:
    data = whole_gguf.read_bytes()
    file = tmp_path / "cut.gguf"
    for size in (4, 20, 300, len(data) // 2, len(data) - 40):
        file.write_bytes(data[:size])
        refused(capsys, CheckpointError, f"{file} corrupt or cut short", *generate(file))


def test_a_gguf_of_an_unknown_architecture(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "mamba.gguf"
    writer = gguf.GGUFWriter(file, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(capsys, UnsupportedError, "'mamba' supported: llama gemma3", *generate(file))


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_weights_that_are_no_numbers(folder: Path, temperature: str, capsys: Capture) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"].fill_(math.nan)
    save_file(tensors, file, {"format": "pt"})
    more = ("--temperature", temperature, "--top-p", "0.9", "--top-k", "5", "--min-p", "0.1")
    refused(capsys, NumericsError, "NaN --dtype fp32", *generate(folder, *more))


# --- tokenizer and chat template ------------------------------------------------------------------


def test_no_tokenizer(folder: Path, capsys: Capture) -> None:
    (folder / "tokenizer.json").unlink()
    refused(capsys, ModelNotFoundError, f"{folder} no tokenizer.json", *generate(folder))


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"model": 3}', b"\xff\xfe\x00"])
def test_a_corrupt_tokenizer(folder: Path, content: bytes, capsys: Capture) -> None:
    (folder / "tokenizer.json").write_bytes(content)
    refused(capsys, ConfigError, f"{folder}/tokenizer.json cannot be read", *generate(folder))


def test_a_vocabulary_smaller_than_the_tokenizer(tmp_path: Path, capsys: Capture) -> None:
    make_folder(tmp_path, vocab_size=20)
    refused(capsys, UsageError, "token id vocabulary of 20 tokenizer", *generate(tmp_path))


def test_a_vocabulary_larger_than_the_tokenizer(tmp_path: Path, capsys: Capture) -> None:
    make_folder(tmp_path, vocab_size=40_000)
    assert main(generate(tmp_path, "--max-tokens", "9", "--json")) == 0
    assert max(json.loads(capsys.readouterr().out)["tokens"]) > 1500  # ids that have no text


@pytest.mark.parametrize(
    ("template", "kind", "words"),
    [
        ("{% for m in %}", ConfigError, "chat template not valid Jinja line 1"),
        ("{% if x %}", ConfigError, "chat template not valid Jinja"),
        ("{{ raise_exception('no\nthanks') }}", UsageError, "chat template refuses no thanks"),
        ("{{ messages[7].content }}", UsageError, "chat template"),
        ("{{ ''.__class__.__mro__ }}", ConfigError, "chat template may not"),
        ({"a": 1}, ConfigError, "chat_template dict string"),
    ],
)
def test_a_spoiled_chat_template(
    folder: Path, template: Any, kind: type[RidgelineError], words: str, capsys: Capture
) -> None:
    edit_json(folder / "tokenizer_config.json", chat_template=template)
    refused(capsys, kind, words, *generate(folder))


def test_a_system_message_without_a_template(whole: Path, capsys: Capture) -> None:
    refused(capsys, UsageError, "--system template", *generate(whole, "--system", "be brief"))


# --- prompts --------------------------------------------------------------------------------------


def with_prompt(folder: Path, prompt: str, *more: str) -> tuple[str, ...]:
    return ("generate", str(folder), prompt, "--device", "cpu", *more)


def test_empty_prompts(whole: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    for prompt in ("", "  \n"):
        refused(capsys, UsageError, "prompt is empty", *with_prompt(whole, prompt))
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    refused(capsys, UsageError, "prompt is empty", *with_prompt(whole, "-"))
    monkeypatch.setattr(sys, "stdin", None)
    refused(capsys, UsageError, "stdin is closed", *with_prompt(whole, "-"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9 \xff"), "utf-8"))
    refused(capsys, UsageError, "stdin UTF-8", *with_prompt(whole, "-"))


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_prompts_without_utf8(folder: Path, template: str | None, capsys: Capture) -> None:
    edit_json(folder / "tokenizer_config.json", chat_template=template)
    for prompt in ("half \ud83d", "\udcff"):
        refused(capsys, UsageError, "surrogate", *with_prompt(folder, prompt))


def test_prompts_that_are_too_long(
    whole: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "tokens context of 128 shorter"
    refused(capsys, ContextLengthError, words, *with_prompt(whole, "word " * 500))
    monkeypatch.setattr(sys, "stdin", io.StringIO("word " * 200_000))
    refused(capsys, ContextLengthError, words, *with_prompt(whole, "-"))


def test_a_cache_that_does_not_fit(folder: Path, capsys: Capture) -> None:
    edit_json(folder / "config.json", max_position_embeddings=10**12)
    argv = ("generate", str(folder), "hello", "--device", "cpu", "--max-tokens", str(10**11))
    refused(capsys, OutOfMemoryError, "tokens GiB free --max-tokens", *argv)


# --- flags ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "value", "kind", "words"),
    [
        ("--temperature", "-1", UsageError, "temperature -1.0 positive"),
        ("--temperature", "nan", UsageError, "temperature nan positive"),
        ("--temperature", "inf", UsageError, "temperature inf positive"),
        ("--temperature", "abc", UsageError, "--temperature 'abc' number"),
        ("--temperature", "-abc", UsageError, "--temperature expected"),
        ("--top-p", "2", UsageError, "top_p 2.0 at most 1"),
        ("--top-p", "0", UsageError, "top_p 0.0 above 0"),
        ("--top-k", "-3", UsageError, "top_k -3"),
        ("--top-k", "1.5", UsageError, "--top-k '1.5' whole number"),
        ("--min-p", "nan", UsageError, "min_p nan"),
        ("--max-tokens", "0", UsageError, "max_tokens 0 at least 1"),
        ("--max-tokens", "1e3", UsageError, "--max-tokens '1e3' whole number"),
        ("--seed", "-1", UsageError, "seed -1"),
        ("--seed", str(2**64), UsageError, f"seed {2**64}"),
        ("--stop", "", UsageError, "stop string empty"),
        ("--dtype", "fp31", UsageError, "'fp31' fp32 did you mean"),
        ("--dtype", "", UsageError, "dtype ''"),
        ("--dtype", "int8", UnsupportedError, "int8 fp32, bf16"),
        ("--device", "banana", UsageError, "'banana' cuda:N"),
        ("--device", "cuda:-1", UsageError, "'cuda:-1' cuda:N"),
        ("--device", "", UsageError, "device '' cuda:N"),
    ],
)
def test_flags_with_wrong_values(
    whole: Path, flag: str, value: str, kind: type[RidgelineError], words: str, capsys: Capture
) -> None:
    refused(capsys, kind, words, "generate", str(whole), "hello", flag, value)


def test_a_gpu_that_is_not_here(whole: Path, capsys: Capture) -> None:
    words = "cuda:99" if torch.cuda.is_available() else "no GPU here --device cpu"
    for verb in (("hardware",), ("generate", str(whole), "hello")):
        refused(capsys, HardwareError, words, *verb, "--device", "cuda:99")
    if not torch.cuda.is_available():
        refused(capsys, HardwareError, words, "hardware", "--device", "cuda")


# --- output ---------------------------------------------------------------------------------------


def test_results_that_cannot_be_written(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below", "/proc/nothing", "x" * 5000):
        monkeypatch.setattr("ridgeline.cli.hardware.measure", pytest.fail)  # refused before
        refused(capsys, OutputError, str(place)[:50], "hardware", "--save", str(place))

    def disk_full(descriptor: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("ridgeline.cli.hardware.measure", lambda hardware, **_: hardware)
    monkeypatch.setattr(os, "fsync", disk_full)
    words = f"{tmp_path}/results No space left on device"
    refused(capsys, OutputError, words, "hardware", "--save", str(tmp_path / "results"))
    assert list((tmp_path / "results").iterdir()) == []


def test_a_folder_that_may_not_be_written(as_nobody: Path, capsys: Capture) -> None:
    as_nobody.joinpath("closed").mkdir(mode=stat.S_IRUSR | stat.S_IXUSR)
    place = as_nobody / "closed" / "results"
    refused(capsys, OutputError, f"{place} Permission denied", "hardware", "--save", str(place))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_behind_stdout() -> None:
    with open("/dev/full", "w") as full:
        done = run_process(
            "hardware", "--list", "--json", capture_output=False, stdout=full, stderr=-1
        )
    words = "write the output: No space left on device"
    check_refusal(done.returncode, "", done.stderr, OutputError.exit_code, words)


# --- beyond what was thought of -------------------------------------------------------------------

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
    deadline=2000,
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
