"""Safetensors in and out: shards and index, damage, a full disk, and the host memory it takes."""

import errno
import json
import os
import random
import resource
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from ridgeline.errors import (
    CheckpointError,
    ConfigError,
    ModelNotFoundError,
    OutputError,
    UnsupportedError,
)
from ridgeline.models.checkpoint import open_checkpoint, save, save_safetensors

CONFIG = {"model_type": "llama", "hidden_size": 8}
INDEX = "model.safetensors.index.json"


def some_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 8, generator=generator)
    return {
        "fp32": x,
        "fp16": x.half(),
        "bf16": x.bfloat16(),
        "fp8_e4m3": x.to(torch.float8_e4m3fn),
        "fp8_e5m2": x.to(torch.float8_e5m2),
        "int8": (x * 50).to(torch.int8),
        "int32": (x * 50).to(torch.int32),
        "uint8": (x.abs() * 50).to(torch.uint8),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
    }


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in type, shape and every bit."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def write_folder(folder: Path, tensors: dict[str, torch.Tensor] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors or some_tensors(), folder / "model.safetensors")
    return folder


# --- in -------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_one_file(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_folder(tmp_path / "m"))
    assert checkpoint.format == "safetensors"
    assert checkpoint.path == tmp_path / "m"
    assert checkpoint.metadata == CONFIG
    expected = some_tensors()
    for name, info in checkpoint.tensors.items():
        assert info.shape == tuple(expected[name].shape)
        assert info.stored_bytes == expected[name].nbytes
        assert info.dtype == {"scalar": "fp32", "empty": "fp32"}.get(name, name)
    found = {name: tensor.clone() for name, tensor in checkpoint.read()}
    assert found.keys() == expected.keys()
    assert all(same(found[name], expected[name]) for name in expected)


def test_any_single_file_name_will_do(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert len(open_checkpoint(folder).tensors) == len(some_tensors())
    save_file({"x": torch.ones(1)}, folder / "more.safetensors")
    with pytest.raises(CheckpointError, match=r"2 \.safetensors files and no model\.safetensors\."):
        open_checkpoint(folder)


def test_tensors_come_in_file_order_as_views_with_progress(tmp_path: Path) -> None:
    tensors = {name: torch.full((4,), float(i)) for i, name in enumerate("cab")}
    save_safetensors(tmp_path / "m", tensors.items(), CONFIG, max_shard_bytes=16)
    calls: list[tuple[str, int, int]] = []
    checkpoint = open_checkpoint(tmp_path / "m")
    found = [name for name, _ in checkpoint.read(progress=lambda *call: calls.append(call))]
    assert found == ["c", "a", "b"]
    assert [done for _, done, _ in calls] == [16, 32, 48]
    assert {total for _, _, total in calls} == {48}
    assert calls[0][0] == "reading model-00001-of-00003.safetensors"
    assert [name for name, _ in checkpoint.read(["b", "c"])] == ["c", "b"]
    with pytest.raises(CheckpointError, match="has no tensor nope"):
        next(checkpoint.read(["nope"]))


def mapped_shards(folder: Path) -> set[str]:
    """Of this folder: models that other tests keep may be mapped too."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {os.path.basename(line) for line in lines if f"{folder}/" in line}


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_a_shard_is_let_go_before_the_next(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((1000,), float(i)) for i in range(6)}
    save_safetensors(tmp_path / "m", tensors.items(), CONFIG, max_shard_bytes=8000)
    checkpoint = open_checkpoint(tmp_path / "m")
    assert mapped_shards(tmp_path) == set()
    for _, tensor in checkpoint.read():
        tensor.sum()
        assert len(mapped_shards(tmp_path)) == 1
    del tensor
    assert mapped_shards(tmp_path) == set()


def test_writing_to_a_tensor_leaves_the_file_alone(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", {"x": torch.ones(100)})
    before = (folder / "model.safetensors").read_bytes()
    for _, tensor in open_checkpoint(folder).read():
        tensor.zero_()
    assert (folder / "model.safetensors").read_bytes() == before


def test_an_index_that_names_what_is_not_there(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    save_safetensors(folder, some_tensors().items(), CONFIG, max_shard_bytes=600)
    shard = sorted(folder.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"missing: {shard.name}"):
        open_checkpoint(folder)
    save_file({"other": torch.ones(1)}, shard)
    with pytest.raises(CheckpointError, match=r"index\.json lists tensors that no file contains: "):
        open_checkpoint(folder)
    save_file({"fp32": torch.ones(1)}, shard)
    with pytest.raises(CheckpointError, match="repeats tensors of another file: fp32"):
        open_checkpoint(folder)
    shard.write_bytes(content)
    assert len(open_checkpoint(folder).tensors) == len(some_tensors())


@pytest.mark.parametrize(
    "index",
    [
        "",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {}}',
        '{"weight_map": {"a": 5}}',
        '{"weight_map": {"a": "../secret.safetensors"}}',
        '{"weight_map": {"a": "/etc/passwd"}}',
        '{"weight_map": {"a": ".."}}',
        '{"weight_map": {"a": "x\\u0000y"}}',
        "[" * 100_000,
    ],
)
def test_a_bad_index(index: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / INDEX).write_text(index)
    with pytest.raises(CheckpointError, match=INDEX):
        open_checkpoint(folder)


@pytest.mark.parametrize("config", [None, "", "{", "[1]", "null", "[" * 100_000, "\xff\xfe"])
def test_a_bad_config(config: str | None, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "config.json").unlink()
    if config is not None:
        (folder / "config.json").write_text(config, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"config\.json") as caught:
        open_checkpoint(folder)
    assert "\n" not in str(caught.value)


# --- not a model ----------------------------------------------------------------------------------


def test_what_is_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="does not exist"):
        open_checkpoint(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="is not a model: it holds no"):
        open_checkpoint(tmp_path / "empty")
    for step in ("step-1", "step-2"):  # a run of training
        (tmp_path / "run" / "checkpoints" / step / "training").mkdir(parents=True)
        for name in ("model.safetensors", "training/masters.safetensors"):
            (tmp_path / "run" / "checkpoints" / step / name).write_bytes(b"")
    for folder in (tmp_path / "run", tmp_path / "run" / "checkpoints"):
        with pytest.raises(CheckpointError, match=r"give the one below it, .*/step-2$"):
            open_checkpoint(folder)
    (tmp_path / "notes.txt").write_text("some notes about models")
    with pytest.raises(CheckpointError, match="is not a model: give a GGUF file, or a folder"):
        open_checkpoint(tmp_path / "notes.txt")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="neither a file nor a folder"):
        open_checkpoint(tmp_path / "pipe")
    folder = write_folder(tmp_path / "m")
    with pytest.raises(CheckpointError, match="give its folder"):
        open_checkpoint(folder / "model.safetensors")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickle_is_refused_with_the_way_to_convert(name: str, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / name)
    (tmp_path / "config.json").write_text("{}")
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(
            CheckpointError, match=r"refused; convert it .*save_pretrained"
        ) as error:
            open_checkpoint(path)
        assert "\n" not in str(error.value)


# --- damage ---------------------------------------------------------------------------------------


def one_tensor(folder: Path) -> Path:
    return write_folder(folder, {"w": torch.arange(6.0).reshape(2, 3)}) / "model.safetensors"


def test_cut_short_at_every_byte(tmp_path: Path) -> None:
    file = one_tensor(tmp_path / "m")
    whole = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"model\.safetensors is c"):
            open_checkpoint(file.parent)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "cut short: it has 0 bytes"),
        (struct.pack("<Q", 1 << 40) + b"{}", "its header claims 1099511627776 bytes, .* has 10"),
        (struct.pack("<Q", 2**64 - 1) + b"{}", "its header claims 18446744073709551615 bytes"),
        (struct.pack("<Q", 2) + b"[]", "corrupt"),
        (struct.pack("<Q", 2) + b"\xff\xff", "corrupt"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git lfs pull"),
        (b"PK\x03\x04" + bytes(100), "corrupt"),
    ],
)
def test_a_bad_header(content: bytes, reason: str, tmp_path: Path) -> None:
    file = one_tensor(tmp_path / "m")
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=reason) as caught:
        open_checkpoint(file.parent)
    assert str(file) in str(caught.value)


def with_header(header: dict[str, object], data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    "tensor",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 800]},
        {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]},
        {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "data_offsets": [0, 8]},
        "text",
    ],
)
def test_a_header_whose_numbers_lie(tensor: object, tmp_path: Path) -> None:
    file = one_tensor(tmp_path / "m")
    file.write_bytes(with_header({"w": tensor}, bytes(8)))
    with pytest.raises(CheckpointError, match=r"model\.safetensors is corrupt"):
        open_checkpoint(file.parent)


def test_a_type_we_do_not_read(tmp_path: Path) -> None:
    file = one_tensor(tmp_path / "m")
    tensor = {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}
    file.write_bytes(with_header({"w": tensor}, bytes(3)))
    with pytest.raises(UnsupportedError, match="'w' has the type F6_E2M3"):
        open_checkpoint(file.parent)


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    folder = write_folder(tmp_path_factory.mktemp("victim"))
    return folder / "model.safetensors", (folder / "model.safetensors").read_bytes()


@settings(max_examples=400, deadline=None)
@given(seed=st.integers(0, 2**32), num_bytes=st.integers(1, 8), cut=st.booleans())
def test_random_damage_is_always_our_error(
    victim: tuple[Path, bytes], seed: int, num_bytes: int, cut: bool
) -> None:
    file, whole = victim
    generator = random.Random(seed)
    (header_bytes,) = struct.unpack("<Q", whole[:8])
    content = bytearray(whole)
    for _ in range(num_bytes):
        value = generator.choice([*b'0123456789"[],{}: ', generator.randrange(256)])
        content[generator.randrange(8 + header_bytes)] = value
    if cut:
        del content[generator.randrange(len(content)) :]
    file.write_bytes(content)
    message = file.name
    try:
        for _, tensor in open_checkpoint(file.parent).read():
            tensor.clone()
    except (CheckpointError, UnsupportedError) as error:
        message = str(error)
    assert file.name in message


# --- out ------------------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("max_shard_bytes", [1, 600, 1 << 30])
def test_round_trip(max_shard_bytes: int, tmp_path: Path) -> None:
    expected = some_tensors()
    extra_file = tmp_path / "tokenizer.json"
    extra_file.write_text("{}")
    folder = tmp_path / "new" / "m"
    save_safetensors(
        folder,
        ((name, tensor) for name, tensor in expected.items()),
        CONFIG,
        max_shard_bytes=max_shard_bytes,
        extra_files={"tokenizer.json": extra_file, "note.txt": b"hello"},
    )
    checkpoint = open_checkpoint(folder)
    found = {name: tensor.clone() for name, tensor in checkpoint.read()}
    assert found.keys() == expected.keys()
    assert all(same(found[name], expected[name]) for name in expected)
    assert checkpoint.metadata == CONFIG
    assert (folder / "tokenizer.json").read_text() == "{}"
    assert (folder / "note.txt").read_bytes() == b"hello"
    assert os.listdir(tmp_path / "new") == ["m"]
    assert folder.stat().st_mode & 0o777 == (tmp_path / "new").stat().st_mode & 0o777


def test_names_and_index_are_hugging_faces(tmp_path: Path) -> None:
    tensors = [(name, torch.ones(4)) for name in "abc"]
    save_safetensors(tmp_path / "m", tensors, CONFIG, max_shard_bytes=32)
    first, second = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    assert sorted(os.listdir(tmp_path / "m")) == sorted(["config.json", first, second, INDEX])
    index = json.loads((tmp_path / "m" / INDEX).read_text())
    assert index["metadata"]["total_size"] == 48
    assert index["weight_map"] == {"a": first, "b": first, "c": second}
    save_safetensors(tmp_path / "one", tensors, CONFIG)
    assert sorted(os.listdir(tmp_path / "one")) == ["config.json", "model.safetensors"]


def test_transposed_tied_and_streamed_tensors(tmp_path: Path) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    tensors = {"x": x, "tied": x, "t": x.t(), "row": x[1], "p": torch.nn.Parameter(x)}
    save_safetensors(tmp_path / "m", tensors.items(), CONFIG)
    save_safetensors(tmp_path / "copy", open_checkpoint(tmp_path / "m").read(), CONFIG)
    for name, tensor in open_checkpoint(tmp_path / "copy").read():
        assert torch.equal(tensor, tensors[name])


def test_an_existing_folder_is_kept(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    save_safetensors(tmp_path / "empty", [("x", torch.ones(1))], CONFIG)
    with pytest.raises(OutputError, match="already exists and is not empty"):
        save_safetensors(tmp_path / "empty", [("y", torch.ones(1))], CONFIG)
    assert list(open_checkpoint(tmp_path / "empty").tensors) == ["x"]
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="is a file"):
        save_safetensors(tmp_path / "file", [], CONFIG)
    with pytest.raises(OutputError, match="cannot write"):
        save_safetensors(tmp_path / "file" / "inside", [], CONFIG)


@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_a_full_disk_leaves_nothing(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the writes of two shards, index and config in turn finds no space left."""
    count = iter(range(100))

    def full(path: Path) -> None:
        if next(count) == after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    write_file = save.write_file
    monkeypatch.setattr(save, "sync", full)
    monkeypatch.setattr(save, "write_file", lambda path, data: (full(path), write_file(path, data)))
    tensors = [("a", torch.ones(4)), ("b", torch.ones(4))]
    with pytest.raises(OutputError, match=r"cannot write .*m: No space left on device"):
        save_safetensors(tmp_path / "m", tensors, CONFIG, max_shard_bytes=16)
    assert os.listdir(tmp_path) == []


@pytest.fixture
def small_files_only() -> Iterator[None]:
    """The kernel refuses to let any file grow past 1 MiB, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("small_files_only")
def test_a_write_that_the_kernel_refuses_leaves_nothing(tmp_path: Path) -> None:
    tensors = [("fits", torch.ones(1000)), ("does not", torch.ones(1 << 19))]
    with pytest.raises(OutputError, match=r"cannot write .*m: .*File too large"):
        save_safetensors(tmp_path / "m", tensors, CONFIG, max_shard_bytes=4000)
    assert os.listdir(tmp_path) == []


def test_a_generator_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(4)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_safetensors(tmp_path / "m", tensors(), CONFIG, max_shard_bytes=1)
    assert os.listdir(tmp_path) == []


# --- host memory ----------------------------------------------------------------------------------

MEASURE = """
import sys
from pathlib import Path
import torch
from ridgeline.models.checkpoint import open_checkpoint, save_safetensors

def status(key):
    line = next(l for l in open("/proc/self/status") if l.startswith(key))
    return int(line.split()[1]) * 1024

def forget_peak():
    open("/proc/self/clear_refs", "w").write("5")

folder = Path(sys.argv[1])
forget_peak()
before = status("VmRSS")
def pieces():
    for i in range(16):
        yield f"w{i}", torch.full((4 << 20,), i, dtype=torch.float32)
save_safetensors(folder, pieces(), {}, max_shard_bytes=64 << 20)
print("save", status("VmHWM") - before)

checkpoint = open_checkpoint(folder)
forget_peak()
before = status("VmRSS")
model = {}
for name, tensor in checkpoint.read():
    model[name] = tensor.clone()
print("read", status("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs /proc")
def test_host_memory_stays_under_the_largest_shard(tmp_path: Path) -> None:
    """256 MiB in shards of 64 MiB: reading adds at most a shard and 10%, saving holds one."""
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "m")]
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    # Freed tensors go back to the system at once, so that the peak is ours and not the allocator's.
    environment["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    peak = {line.split()[0]: int(line.split()[1]) for line in done.stdout.splitlines()}
    model, shard, slack = 256 << 20, 64 << 20, 8 << 20
    assert peak["read"] <= model + 1.1 * shard + slack
    assert peak["save"] <= 1.1 * shard + (16 << 20) + slack  # and the tensor that opens the next
