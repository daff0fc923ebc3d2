"""GGUF in: every supported block type, the container, and files that are damaged or lie."""

import math
import random
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from yardstick import slowness

from ridgeline.errors import CheckpointError, MissingPackageError, UnsupportedError
from ridgeline.formats import gguf_blocks
from ridgeline.models.checkpoint import open_checkpoint

PLAIN = ["F32", "F16", "BF16"]
LEGACY = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]
K_QUANTS = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
# Worst error as a share of a block's span: half a step; the signed 4- and 5-bit types lack the last
# step on one side, so there it is a whole one.
STEP_ERROR = {"Q8_0": 0.5 / 127, "Q4_0": 1 / 8, "Q4_1": 0.5 / 15, "Q5_0": 1 / 16, "Q5_1": 0.5 / 31}


def kind(name: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[name]


def random_blocks(name: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Random bits with scales that are finite half-precision numbers of a usual size."""
    generator = np.random.default_rng(seed)
    elements, num_bytes = gguf.GGML_QUANT_SIZES[kind(name)]
    blocks = generator.integers(0, 256, (rows * columns // elements, num_bytes), dtype=np.uint8)
    scale_offsets = {"Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}
    for offset in scale_offsets[name]:
        scales = generator.uniform(-0.1, 0.1, len(blocks)).astype(np.float16)
        blocks[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


def write_gguf(path: Path, tensors: dict[str, tuple[str, np.ndarray]], **metadata: Any) -> Path:
    """A file made by the format's own package; tensors are (type, raw data with rows first)."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    writer.add_array("tokenizer.ggml.tokens", ["<s>", "Ġhé", "", "日本"])
    writer.add_array("tokenizer.ggml.scores", [0.5, -1.0])
    for key, value in metadata.items():
        add = {int: writer.add_uint32, str: writer.add_string, list: writer.add_array}[type(value)]
        add(key.replace("__", "."), value)
    for name, (type_name, raw) in tensors.items():
        writer.add_tensor(name, raw, raw_dtype=kind(type_name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    weight = np.arange(64 * 3, dtype=np.float32).reshape(3, 64)
    return write_gguf(
        tmp_path / "small.gguf",
        {
            "token_embd.weight": ("Q8_0", gguf.quantize(weight, kind("Q8_0"))),
            "output_norm.weight": ("F32", weight[0]),
            "blk.0.ffn.weight": ("F16", weight.astype(np.float16)),
        },
    )


# --- blocks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("type_name", LEGACY)
def test_values_come_back_within_a_step(type_name: str) -> None:
    values = np.random.default_rng(0).standard_normal((5, 320)).astype(np.float32)
    raw = gguf.quantize(values, kind(type_name))
    found = gguf_blocks.dequantize(raw, type_name, (5, 320))
    assert found.dtype is torch.float32
    assert torch.equal(found, torch.from_numpy(gguf.dequantize(raw, kind(type_name))))
    blocks = values.reshape(-1, 32)
    largest = np.abs(blocks).max(1)
    span = blocks.max(1) - blocks.min(1) if type_name.endswith("_1") else largest
    error = np.abs(found.numpy().reshape(-1, 32) - blocks).max(1)
    rounding = 2**-10 * np.maximum(span, largest)  # scale and minimum are stored in half precision
    assert (error <= STEP_ERROR[type_name] * span + rounding).all()


@pytest.mark.parametrize("type_name", K_QUANTS)
def test_k_quants_equal_the_package(type_name: str) -> None:
    raw = random_blocks(type_name, 7, 768)
    found = gguf_blocks.dequantize(raw, type_name, (7, 768))
    assert torch.equal(found, torch.from_numpy(gguf.dequantize(raw, kind(type_name))))
    assert found.isfinite().all()
    assert found.std() > 0


def half(data: bytes, offset: int) -> float:
    return float(struct.unpack_from("<e", data, offset)[0])


def q4_k_block(data: bytes) -> list[float]:
    """One Q4_K block, number by number: d, dmin, 12 bytes of scales, 128 of nibbles."""
    packed = data[4:16]
    values = []
    for sub in range(8):
        if sub < 4:
            scale, minimum = packed[sub] & 63, packed[sub + 4] & 63
        else:
            scale = (packed[sub + 4] & 15) | (packed[sub - 4] >> 6) << 4
            minimum = (packed[sub + 4] >> 4) | (packed[sub] >> 6) << 4
        for i in range(32):
            byte = data[16 + sub // 2 * 32 + i]
            nibble = byte >> 4 if sub % 2 else byte & 15
            values.append(half(data, 0) * scale * nibble - half(data, 2) * minimum)
    return values


def q6_k_block(data: bytes) -> list[float]:
    """One Q6_K block, number by number: 128 bytes of low bits, 64 of high bits, 16 scales, d."""
    scales = struct.unpack_from("16b", data, 192)
    values = []
    for i in range(256):
        part, quarter, lane = i // 128, i % 128 // 32, i % 32
        low = data[64 * part + 32 * (quarter % 2) + lane] >> (4 * (quarter // 2)) & 15
        high = data[128 + 32 * part + lane] >> (2 * quarter) & 3
        values.append(half(data, 208) * scales[i // 16] * ((high << 4 | low) - 32))
    return values


def q8_0_block(data: bytes) -> list[float]:
    return [half(data, 0) * value for value in struct.unpack_from("32b", data, 2)]


def q4_1_block(data: bytes) -> list[float]:
    nibbles = [byte & 15 for byte in data[4:20]] + [byte >> 4 for byte in data[4:20]]
    return [half(data, 0) * nibble + half(data, 2) for nibble in nibbles]


@pytest.mark.parametrize(
    ("type_name", "scalar"),
    [("Q4_K", q4_k_block), ("Q6_K", q6_k_block), ("Q8_0", q8_0_block), ("Q4_1", q4_1_block)],
)
def test_blocks_equal_a_scalar_computation(
    type_name: str, scalar: Callable[[bytes], list[float]]
) -> None:
    values = np.random.default_rng(1).standard_normal((3, 512)).astype(np.float32)
    if type_name in K_QUANTS:
        raw = random_blocks(type_name, 3, 512, seed=1)
    else:
        raw = gguf.quantize(values, kind(type_name))
    _, num_bytes = gguf_blocks.block_size(type_name)
    data = raw.tobytes()
    expected = [
        value
        for start in range(0, len(data), num_bytes)
        for value in scalar(data[start : start + num_bytes])
    ]
    found = gguf_blocks.dequantize(raw, type_name, (3, 512)).flatten().double()
    torch.testing.assert_close(found, torch.tensor(expected).double(), rtol=1e-6, atol=1e-6)


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = random_blocks("Q5_K", 3, 1024)
    whole = gguf_blocks.dequantize(raw, "Q5_K", (3, 1024))
    monkeypatch.setattr(gguf_blocks, "CHUNK_ELEMENTS", 5 * 256)
    assert torch.equal(gguf_blocks.dequantize(raw, "Q5_K", (3, 1024)), whole)


def test_temporary_memory_is_bounded() -> None:
    raw = random_blocks("Q4_K", 64, 1 << 16)
    tracemalloc.start()
    gguf_blocks.dequantize(raw, "Q4_K", (64, 1 << 16))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * raw.shape[0] * (1 << 16) + (8 << 20)


@pytest.mark.parametrize("type_name", PLAIN)
def test_plain_types_are_views(type_name: str) -> None:
    dtype = gguf_blocks.PLAIN_TYPES[type_name]
    raw = np.zeros(6 * dtype.itemsize, dtype=np.uint8)
    found = gguf_blocks.dequantize(raw, type_name, (2, 3))
    assert (found.dtype, found.shape) == (dtype, (2, 3))
    assert found.data_ptr() == raw.ctypes.data


def test_wrong_sizes_and_types_are_refused() -> None:
    raw = np.zeros(34, dtype=np.uint8)
    with pytest.raises(CheckpointError, match="takes 68 bytes, got 34"):
        gguf_blocks.dequantize(raw, "Q8_0", (2, 32))
    with pytest.raises(CheckpointError, match="do not fill whole Q8_0 blocks of 32"):
        gguf_blocks.block_bytes("Q8_0", 33)
    with pytest.raises(UnsupportedError, match="IQ2_XXS is not supported; choose one of F32, F16"):
        gguf_blocks.dequantize(raw, "IQ2_XXS", (1, 256))
    with pytest.raises(UnsupportedError, match="number 99"):
        gguf_blocks.type_name(99)


def test_type_ids_and_sizes_are_the_packages() -> None:
    for name, type_id in gguf_blocks.SUPPORTED_TYPES.items():
        assert gguf_blocks.type_name(type_id) == name == gguf.GGMLQuantizationType(type_id).name
        assert gguf_blocks.block_size(name) == gguf.GGML_QUANT_SIZES[kind(name)]


def test_without_the_package_plain_types_still_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    assert gguf_blocks.dequantize(np.zeros(8, np.uint8), "F32", (2,)).tolist() == [0.0, 0.0]
    with pytest.raises(MissingPackageError, match="pip install gguf"):
        gguf_blocks.dequantize(np.zeros(34, np.uint8), "Q8_0", (32,))


# --- container ------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_headers_metadata_and_tensors(small: Path) -> None:
    checkpoint = open_checkpoint(small)
    assert (checkpoint.format, checkpoint.path) == ("gguf", small)
    metadata = checkpoint.metadata
    assert metadata["general.architecture"] == "llama"
    assert metadata["llama.block_count"] == 2
    assert metadata["llama.rope.freq_base"] == 10000.0
    assert metadata["tokenizer.ggml.add_bos_token"] is False
    assert metadata["tokenizer.ggml.tokens"] == ["<s>", "Ġhé", "", "日本"]
    assert metadata["tokenizer.ggml.scores"] == [0.5, -1.0]
    headers = [(info.name, info.shape, info.dtype) for info in checkpoint.tensors.values()]
    assert headers == [
        ("token_embd.weight", (3, 64), "Q8_0"),
        ("output_norm.weight", (64,), "fp32"),
        ("blk.0.ffn.weight", (3, 64), "fp16"),
    ]
    tensors = dict(checkpoint.read())
    assert list(tensors) == list(checkpoint.tensors)
    weight = torch.arange(64 * 3, dtype=torch.float32).reshape(3, 64)
    assert torch.equal(tensors["output_norm.weight"], weight[0])
    assert torch.equal(tensors["blk.0.ffn.weight"], weight.half())
    assert torch.allclose(tensors["token_embd.weight"], weight, atol=191 / 127 / 2 + 0.05)


@pytest.mark.parametrize("type_name", [*PLAIN, *LEGACY, *K_QUANTS])
def test_every_type_through_a_file(type_name: str, tmp_path: Path) -> None:
    values = np.random.default_rng(2).standard_normal((4, 512)).astype(np.float32)
    if type_name in K_QUANTS:
        raw = random_blocks(type_name, 4, 512)
    else:
        raw = gguf.quantize(values, kind(type_name))
    path = write_gguf(tmp_path / "one.gguf", {"w": (type_name, raw), "v": (type_name, raw)})
    checkpoint = open_checkpoint(path)
    expected = gguf_blocks.dequantize(raw.copy().view(np.uint8), type_name, (4, 512))
    for name, tensor in checkpoint.read():
        assert checkpoint.tensors[name].shape == tensor.shape == (4, 512)
        assert checkpoint.tensors[name].stored_bytes == raw.nbytes
        assert torch.equal(tensor, expected)


def test_reading_some_names_with_progress(small: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    names = {"blk.0.ffn.weight", "output_norm.weight"}
    checkpoint = open_checkpoint(small)
    found = checkpoint.read(names, progress=lambda *call: calls.append(call))
    assert [name for name, _ in found] == ["output_norm.weight", "blk.0.ffn.weight"]
    assert calls == [("reading small.gguf", 256, 640), ("reading small.gguf", 640, 640)]
    with pytest.raises(CheckpointError, match=r"has no tensor output_nor\..*did you mean"):
        list(checkpoint.read(["output_nor.weight"]))


def test_alignment_key(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_custom_alignment(256)
    for name in "ab":
        writer.add_tensor(name, np.full(3, ord(name), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensors = dict(open_checkpoint(tmp_path / "a.gguf").read())
    assert tensors["a"].tolist() == [97.0] * 3
    assert tensors["b"].tolist() == [98.0] * 3


def test_writing_to_a_tensor_leaves_the_file_alone(small: Path) -> None:
    before = small.read_bytes()
    for _, tensor in open_checkpoint(small).read():
        tensor.zero_()
    assert small.read_bytes() == before


def test_a_folder_with_one_gguf(small: Path) -> None:
    assert open_checkpoint(small.parent).tensors.keys() == open_checkpoint(small).tensors.keys()
    (small.parent / "second.gguf").write_bytes(small.read_bytes())
    with pytest.raises(CheckpointError, match=r"several GGUF files; name one of second\.gguf"):
        open_checkpoint(small.parent)


def test_the_magic_decides_and_not_the_suffix(small: Path, tmp_path: Path) -> None:
    renamed = small.rename(tmp_path / "weights.dat")
    assert open_checkpoint(renamed).format == "gguf"
    (tmp_path / "fake.gguf").write_bytes(b"hello there, no model")
    with pytest.raises(CheckpointError, match=r"fake\.gguf is not a model"):
        open_checkpoint(tmp_path / "fake.gguf")


@pytest.mark.slow
def test_a_large_vocabulary_parses_fast(tmp_path: Path) -> None:
    words = [f"Ġtoken{i}" for i in range(50_000)]
    path = write_gguf(
        tmp_path / "v.gguf",
        {"w": ("F32", np.zeros(32, np.float32))},
        vocabulary=words,
        merges=[f"a {word}" for word in words],
    )
    times = []
    for _ in range(3):
        slow, start = slowness(), time.perf_counter()
        checkpoint = open_checkpoint(path)
        times.append((time.perf_counter() - start) / slow)
    assert checkpoint.metadata["vocabulary"] == words
    assert min(times) < 0.3


# --- split files ----------------------------------------------------------------------------------


def write_split(folder: Path, count: int = 3) -> list[Path]:
    parts = []
    for number in range(count):
        path = folder / f"m-{number + 1:05d}-of-{count:05d}.gguf"
        tensors = {f"w{number}": ("F32", np.full(8, number, np.float32))}
        parts.append(write_gguf(path, tensors, split__count=count, split__no=number))
    return parts


def test_any_part_of_a_split_file_opens_all(tmp_path: Path) -> None:
    parts = write_split(tmp_path)
    for path in (*parts, tmp_path):
        tensors = {name: tensor[0].item() for name, tensor in open_checkpoint(path).read()}
        assert tensors == {"w0": 0.0, "w1": 1.0, "w2": 2.0}


def test_a_split_file_with_parts_missing_or_mixed_up(tmp_path: Path) -> None:
    parts = write_split(tmp_path)
    second = parts[1].read_bytes()
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(CheckpointError, match=r"m-00002-of-00003\.gguf is not part 2"):
        open_checkpoint(parts[0])
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=r"is missing its parts m-00002-of-00003\.gguf"):
        open_checkpoint(parts[0])
    lone = tmp_path / "lone.gguf"
    lone.write_bytes(second)
    with pytest.raises(UnsupportedError, match="one of 3 parts"):
        open_checkpoint(lone)


# --- damage ---------------------------------------------------------------------------------------


def read_all(path: Path) -> None:
    for name, tensor in open_checkpoint(path).read():
        assert isinstance(name, str)
        tensor.float().sum()


def test_cut_short_at_every_byte(small: Path, tmp_path: Path) -> None:
    whole = small.read_bytes()
    last = list(open_checkpoint(small).tensors.values())[-1]
    cut = tmp_path / "cut.gguf"
    for length in range(last.offset + last.stored_bytes):
        cut.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            open_checkpoint(cut)
    cut.write_bytes(whole[: last.offset + last.stored_bytes])
    read_all(cut)


def raw_file(*parts: bytes, tensors: int = 0, keys: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + b"".join(parts)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(name: str, dims: list[int], type_id: int, offset: int) -> bytes:
    rank = struct.pack("<I", len(dims))
    return text(name) + rank + struct.pack(f"<{len(dims)}QIQ", *dims, type_id, offset)


HUGE = 1 << 60
LIES = {
    "string of 2^60": (raw_file(struct.pack("<Q", HUGE), bytes(64), keys=1), "claims"),
    "2^60 keys": (raw_file(bytes(64), keys=HUGE), "more than the file can hold"),
    "2^60 tensors": (raw_file(bytes(64), tensors=HUGE), "more than the file can hold"),
    "array of 2^60 strings": (
        raw_file(text("k"), struct.pack("<IIQ", 9, 8, HUGE), bytes(64), keys=1),
        "more than the file can hold",
    ),
    "array of 2^60 numbers": (
        raw_file(text("k"), struct.pack("<IIQ", 9, 4, HUGE), bytes(64), keys=1),
        "more than the file can hold",
    ),
    "array of 60 numbers in 64 bytes": (
        raw_file(text("k"), struct.pack("<IIQ", 9, 10, 60), bytes(64), keys=1),
        "claims 480 bytes",
    ),
    "arrays within arrays": (
        raw_file(text("k"), struct.pack("<I", 9), struct.pack("<IQ", 9, 1) * 5000, keys=1),
        "at depth 5",
    ),
    "unknown value type": (raw_file(text("k"), struct.pack("<I", 77), bytes(8), keys=1), "type 77"),
    "key twice": (
        raw_file((text("k") + struct.pack("<IB", 0, 1)) * 2, bytes(32), keys=2),
        "'k' appears twice",
    ),
    "not UTF-8": (raw_file(struct.pack("<Q", 2), b"\xff\xfe", bytes(32), keys=1), "not UTF-8"),
    "alignment 0": (
        raw_file(text("general.alignment"), struct.pack("<II", 4, 0), bytes(32), keys=1),
        "general.alignment is 0",
    ),
    "alignment in words": (
        raw_file(text("general.alignment"), struct.pack("<I", 8), text("x"), bytes(8), keys=1),
        "general.alignment is 'x'",
    ),
    "9 dimensions": (raw_file(entry("w", [1] * 9, 0, 0), bytes(64), tensors=1), "9 dimensions"),
    "2^63 elements": (raw_file(entry("w", [1 << 63], 0, 0), bytes(64), tensors=1), "claims bytes"),
    "offset outside": (raw_file(entry("w", [8], 0, HUGE), bytes(64), tensors=1), "claims bytes"),
    "offset unaligned": (raw_file(entry("w", [1], 0, 4), bytes(64), tensors=1), "claims bytes"),
    "half a block": (raw_file(entry("w", [16], 8, 0), bytes(64), tensors=1), "whole Q8_0 blocks"),
    "empty with a huge row": (
        raw_file(entry("w", [1 << 63, 0], 0, 0), bytes(64), tensors=1),
        "shape",
    ),
    "tensor twice": (
        raw_file(entry("w", [1], 0, 0), entry("w", [1], 0, 32), bytes(128), tensors=2),
        "'w' appears twice",
    ),
    "tensors overlap": (
        raw_file(entry("v", [16], 0, 0), entry("w", [1], 0, 32), bytes(128), tensors=2),
        "'w' overlaps",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_header_is_one_line_and_allocates_nothing(lie: str, tmp_path: Path) -> None:
    content, reason = LIES[lie]
    path = tmp_path / "lie.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=reason) as caught:
        open_checkpoint(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert peak < 4 << 20


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (raw_file(version=1), "version 1"),
        (raw_file(version=4), "version 4"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (raw_file(entry("w", [256], 16, 0), bytes(128), tensors=1), "IQ2_XXS is not supported"),
        (raw_file(entry("w", [256], 200, 0), bytes(128), tensors=1), "number 200"),
    ],
)
def test_well_formed_but_unsupported(content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(UnsupportedError, match=reason):
        open_checkpoint(tmp_path / "m.gguf")


def test_version_2_reads_like_version_3(small: Path) -> None:
    content = bytearray(small.read_bytes())
    content[4] = 2
    small.write_bytes(content)
    read_all(small)


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, int]:
    path = tmp_path_factory.mktemp("gguf") / "victim.gguf"
    values = np.ones((2, 256), np.float32)
    tensors = {f"t{name}": (name, gguf.quantize(values, kind(name))) for name in ("F32", "Q4_0")}
    tensors["k"] = ("Q6_K", random_blocks("Q6_K", 2, 256))
    write_gguf(path, tensors)
    header_bytes = next(iter(open_checkpoint(path).tensors.values())).offset
    return path, path.read_bytes(), header_bytes


@settings(max_examples=400, deadline=None)
@given(seed=st.integers(0, 2**32), num_bytes=st.integers(1, 8), cut=st.booleans())
def test_random_damage_is_always_our_error(
    victim: tuple[Path, bytes, int], seed: int, num_bytes: int, cut: bool
) -> None:
    path, whole, header_bytes = victim
    generator = random.Random(seed)
    content = bytearray(whole)
    for _ in range(num_bytes):
        value = generator.choice([0, 1, 0x7F, 0x80, 0xFF, generator.randrange(256)])
        content[generator.randrange(header_bytes)] = value
    if cut:
        del content[generator.randrange(len(content)) :]
    path.write_bytes(content)
    message = path.name
    try:
        checkpoint = open_checkpoint(path)
        for name, tensor in checkpoint.read():
            assert tensor.numel() == math.prod(checkpoint.tensors[name].shape)
    except (CheckpointError, UnsupportedError) as error:
        message = str(error)
    assert path.name in message
