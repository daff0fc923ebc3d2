"""Products with a GGUF file's own blocks: panels hold the file's bits, sums of codes are exact, and
whole models give the plain loop's tokens.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny_models
import torch
from engines import engine_for, naive_outputs, prompts_of
from gguf_files import write_gguf
from torch import Tensor

from ridgeline.engine import Engine, Sampling
from ridgeline.engine.execution.forward import ForwardPass
from ridgeline.errors import CheckpointError, UnsupportedError
from ridgeline.formats.gguf_blocks import block_size, dequantize
from ridgeline.kernels import host_library
from ridgeline.kernels.block_linear import TYPES
from ridgeline.kernels.block_linear.cpu import BlockMatrix, BlockProduct, expand, pack
from ridgeline.kernels.block_linear.reference import block_linear, code_inputs
from ridgeline.kernels.skinny_linear.fused import FusedParts
from ridgeline.models import Transformer
from ridgeline.quantization import load_model
from ridgeline.quantization.block_linear import BlockLinear
from ridgeline.quantization.block_scheme import block_scheme
from ridgeline.quantization.sizes import weight_bytes
from ridgeline.recipe import Recipe

KINDS = gguf.GGMLQuantizationType
HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0]}  # fp16 in a block
HALVES |= {"Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}

needs_compiler = pytest.mark.skipif(host_library.find_compiler() is None, reason="no C++ compiler")


@pytest.fixture(scope="module", autouse=True)
def built() -> bool:
    return host_library.load("block_linear")


def random_blocks(kind: str, num_outputs: int, depth: int, exact: bool = False) -> Tensor:
    """Any bits, but for scales: with `exact` powers of two."""
    elements, num_bytes = block_size(kind)
    draw = np.random.default_rng(3)
    raw = draw.integers(0, 256, (num_outputs, depth // elements, num_bytes), dtype=np.uint8)
    for offset in HALVES[kind]:  # exact sums fit the 24 bits of fp32
        powers = 2.0 ** draw.integers(-1, 2, raw.shape[:2])
        scales = powers if exact else draw.uniform(0.001, 0.02, raw.shape[:2])
        raw[..., offset : offset + 2] = scales.astype(np.float16)[..., None].view(np.uint8)
    return torch.from_numpy(raw.reshape(num_outputs, -1))


def product_of(kind: str, raw: Tensor, depth: int, **parts: Any) -> BlockProduct:
    panels = pack(raw, kind, len(raw), depth)
    bias = parts.pop("bias", None)
    return BlockProduct(BlockMatrix([(panels, kind, len(raw))], depth, bias), **parts)


@needs_compiler
@pytest.mark.parametrize("kind", TYPES)
def test_panels_hold_the_files_bits(kind: str) -> None:
    raw = random_blocks(kind, 23, 512)
    found = expand(pack(raw, kind, 23, 512), kind, 23, 512)
    assert torch.equal(found, dequantize(raw.numpy(), kind, (23, 512)))


@needs_compiler
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 12, 31, 70])
def test_whole_numbers_come_out_exactly(kind: str, num_rows: int) -> None:
    """With scales that are powers of two and inputs that are their own codes, nothing is rounded:
    one code that met the wrong input would show.
    """
    raw = random_blocks(kind, 40, 512, exact=True)
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randint(-126, 127, (num_rows, 16, 32), generator=generator).float()
    x[..., 0] = 127.0
    codes, scale = code_inputs(x.flatten(1))
    assert torch.equal(codes.float(), x)
    assert torch.equal(scale, torch.ones_like(scale))
    weight = dequantize(raw.numpy(), kind, (40, 512)).double()
    expected = x.flatten(1).double() @ weight.T
    if kind in ("Q4_K", "Q5_K", "Q6_K"):  # scales of scales have up to 16 bits: fp32 rounds sums
        expected = expected.float().double()
        close = 1e-6 * (x.flatten(1).double().abs() @ weight.abs().T)
        found = product_of(kind, raw, 512)(x.flatten(1))
        assert bool(((found - expected).abs() <= close).all())
    else:
        assert torch.equal(product_of(kind, raw, 512)(x.flatten(1)).double(), expected)


@needs_compiler
@pytest.mark.parametrize("activation", [None, "silu", "gelu"])
@pytest.mark.parametrize("num_rows", [1, 5, 66])
def test_products_are_the_reference(activation: Any, num_rows: int) -> None:
    """With all that stands around them, in fp32 and bf16, and x with gaps between its rows."""
    generator = torch.Generator().manual_seed(0)
    raw = random_blocks("Q4_1", 96, 256)
    weight = dequantize(raw.numpy(), "Q4_1", (96, 256))
    columns = 48 if activation else 96
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(num_rows, 300, generator=generator).to(dtype)[:, :256]
        norm, bias = (
            torch.rand(256, generator=generator) + 0.5,
            torch.randn(96, generator=generator),
        )
        residual = torch.randn(num_rows, columns, generator=generator).to(dtype)
        product = product_of(
            "Q4_1",
            raw,
            256,
            bias=bias,
            norm_weight_D=norm,
            eps=1e-5,
            offset=1.0,
            activation=activation,
        )
        fused = FusedParts(bias, residual, norm, 1e-5, 1.0, activation)
        expected = block_linear(x, weight, fused).float()
        found = product(x, residual).float()
        tolerance = 1e-4 if dtype == torch.float32 else 1e-2
        # A norm's last bit may move an input to the next code.
        assert (found - expected).norm() <= tolerance * expected.norm()


@needs_compiler
def test_a_rows_result_does_not_depend_on_its_batch() -> None:
    raw = random_blocks("Q6_K", 48, 512)
    product = product_of("Q6_K", raw, 512)
    x = torch.randn(29, 512, generator=torch.Generator().manual_seed(1))
    together = product(x)
    assert all(torch.equal(product(x[i : i + 1])[0], together[i]) for i in range(29))


@needs_compiler
def test_rows_of_several_types_are_one_matrix() -> None:
    kinds = [("Q4_K", 32), ("Q6_K", 16), ("Q8_0", 7)]
    raws = [random_blocks(kind, count, 256) for kind, count in kinds]
    matrix = BlockMatrix(
        [(pack(r, k, n, 256), k, n) for r, (k, n) in zip(raws, kinds, strict=True)], 256
    )
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(2))
    parts = [product_of(k, r, 256)(x) for r, (k, _) in zip(raws, kinds, strict=True)]
    assert torch.equal(BlockProduct(matrix)(x), torch.cat(parts, 1))


@needs_compiler
def test_what_is_no_number_stays_none() -> None:
    product = product_of("Q8_0", random_blocks("Q8_0", 16, 64), 64)
    x = torch.ones(3, 64)
    x[0, 5], x[1, 40] = torch.nan, torch.inf
    found = product(x)
    assert not found[:2].isfinite().any()
    assert found[2].isfinite().all()


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    small = tiny_models.SMALL | {"hidden_size": 64, "intermediate_size": 96}
    monkeypatch.setattr(tiny_models, "SMALL", small | {"num_hidden_layers": 2})
    normed = ("Qwen3", {"head_dim": 32, "num_attention_heads": 3, "num_key_value_heads": 1})
    monkeypatch.setitem(tiny_models.MODELS, "qwen3-wide", normed)


def written(name: str, kind: str, folder: Path) -> Path:
    path = folder / f"{name}-{kind}.gguf"
    write_gguf(tiny_models.make_model(name), path, KINDS[kind])
    return path


def in_blocks(path: Path) -> Transformer:
    return load_model(path, dtype="fp32", device="cpu", keep_codes=True, keep_blocks=True)


def layers_at_once(engine: Engine) -> bool:
    passes = engine.runner.passes
    assert isinstance(passes, ForwardPass)
    return passes.layers_at_once is not None


@needs_compiler
@pytest.mark.parametrize(
    ("name", "kind", "at_once"),
    [
        ("llama-mha", "Q4_1", True),
        ("llama-tied", "Q4_0", True),
        ("qwen2", "Q8_0", True),
        ("qwen3-wide", "Q5_1", True),
        ("qwen3", "Q8_0", False),
        ("gemma3", "Q5_0", False),
    ],
)
def test_an_engine_gives_the_plain_loops_tokens(
    name: str, kind: str, at_once: bool, sizes: None, tmp_path: Path
) -> None:
    """Prompts and decode steps together, through pages, with all layers in one call where they are
    plain ones.
    """
    model = in_blocks(written(name, kind, tmp_path))
    assert isinstance(model.layers[0].mlp.down, BlockLinear)
    assert isinstance(model.head, BlockLinear)
    engine = engine_for(model, budget=24)
    assert layers_at_once(engine) == at_once
    prompts = prompts_of([3, 17, 40, 1])
    sampling = Sampling(max_tokens=8)
    found = [output.tokens for output in engine.generate(prompts, sampling)]
    assert found == [naive_outputs(model, prompt, sampling)[0] for prompt in prompts]


@needs_compiler
@pytest.mark.parametrize("kv_dtype", ["bf16", "fp16", "int8"])
def test_pages_of_other_dtypes(kv_dtype: str, sizes: None, tmp_path: Path) -> None:
    model = in_blocks(written("llama-mha", "Q4_1", tmp_path))
    engines = [engine_for(model, kv_dtype=kv_dtype), engine_for(model, kernels="reference")]
    assert [layers_at_once(engine) for engine in engines] == [kv_dtype != "int8", False]
    found, expected = (
        engine.generate(prompts_of([9, 30]), Sampling(max_tokens=4)) for engine in engines
    )
    assert [output.tokens[:1] for output in found] == [output.tokens[:1] for output in expected]


@needs_compiler
def test_files_stay_in_blocks_unless_asked_otherwise(
    sizes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written("llama-mha", "Q4_1", tmp_path)
    monkeypatch.setattr("ridgeline.engine.loading.sources.tokenizer_of", lambda path: None)
    assert Engine(path, num_pages=8).model.layers[0].attn.qkv.scheme.name == "q4_1"
    for recipe in (Recipe(blocks=False), Recipe(kernels="reference"), Recipe(deterministic=True)):
        engine = Engine(path, recipe, num_pages=8)
        assert not any(isinstance(part, BlockLinear) for part in engine.model.modules())
    with pytest.raises(UnsupportedError, match="blocks and scheme int8"):
        Engine(path, Recipe(blocks=True, scheme="int8"), num_pages=8)
    headed = Engine(path, Recipe(head="int8", quantize_all=True), num_pages=8)
    assert not isinstance(headed.model.head, BlockLinear)
    assert isinstance(headed.model.layers[0].mlp.down, BlockLinear)


@needs_compiler
def test_memory_is_what_the_plan_says(sizes: None, tmp_path: Path) -> None:
    """Panels are as large as the file's blocks, but for whole panels and, in the K types, scales
    that take a byte each.
    """
    model = in_blocks(written("llama-tied", "Q4_1", tmp_path))
    kept = {n: m.scheme for n, m in model.named_modules() if isinstance(m, BlockLinear)}
    held = sum(value.nbytes for value in model.parameters())
    planned = weight_bytes(model.config, torch.float32, kept=kept)
    assert planned <= held <= 1.1 * planned


def test_block_schemes() -> None:
    scheme = block_scheme([("Q4_K", 64), ("Q4_K", 16), ("Q6_K", 16)])
    assert scheme is not None
    assert (scheme.name, scheme.rows) == ("q4_k+q6_k", (("Q4_K", 80), ("Q6_K", 16)))
    assert scheme.num_bytes(256) == 80 * 144 + 16 * 210
    assert block_scheme([("Q4_K", 24), ("Q6_K", 16)]) is None  # a panel would hold two types


def test_scales_that_are_no_numbers(sizes: None, tmp_path: Path) -> None:
    path = written("llama-mha", "Q4_1", tmp_path)
    data = bytearray(path.read_bytes())
    reader = gguf.GGUFReader(path)
    start = next(t for t in reader.tensors if t.name == "blk.0.ffn_up.weight").data_offset
    data[start + 2 : start + 4] = np.float16(np.inf).tobytes()
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_up\.weight' has scales that are NaN"):
        in_blocks(path)


HARNESS = """
#include "{source}"
#include <cstdio>
#include <cstdlib>
#include <vector>
int main() {{
    const int formats[] = {{2, 3, 6, 7, 8, 12, 13, 14}};
    for (int format : formats) {{
        const int64_t depth = 512, outputs = 35, rows = 31;
        const int64_t bytes = file_bytes(format, depth);
        std::vector<uint8_t> file(bytes * outputs);
        for (uint8_t& byte : file) byte = rand();
        for (int64_t i = 0; i + 1 < (int64_t)file.size(); ++i) file[i] &= 0x3b;  // finite halves
        std::vector<uint8_t> panels(3 * ridgeline_block_linear_panel_bytes(format, depth));
        ridgeline_block_linear_pack(format, file.data(), outputs, depth, panels.data(), 1);
        std::vector<float> weight(outputs * depth), x(rows * depth), out(rows * outputs);
        ridgeline_block_linear_expand(format, panels.data(), outputs, depth, weight.data(), 1);
        for (size_t i = 0; i < x.size(); ++i) x[i] = i % 32 ? rand() % 255 - 127 : 127;
        const Matrix matrix = {{{{{{panels.data(), outputs, (int64_t)panels.size() / 3, format}}}},
                              1, depth, outputs, nullptr}};
        const Product product = {{&matrix, nullptr, 0, 0, 0}};
        ridgeline_block_linear_multiply(&product, x.data(), depth, nullptr, 0, out.data(), rows, 2);
        double worst = 0;
        for (int64_t r = 0; r < rows; ++r) {{
            for (int64_t o = 0; o < outputs; ++o) {{
                double sum = 0, size = 0;
                for (int64_t i = 0; i < depth; ++i) {{
                    const double term = (double)x[r * depth + i] * weight[o * depth + i];
                    sum += term, size += std::fabs(term);
                }}
                worst = std::max(worst, std::fabs(out[r * outputs + o] - sum) / (size + 1e-30));
            }}
        }}
        printf("%d %g\\n", format, worst);
        if (!(worst < 1e-6)) return 1;
    }}
}}
"""
PATHS = {
    "AVX2": ("c++", ["-mavx2", "-mfma", "-mf16c"], []),
    "AVX-512 without VNNI": ("c++", ["-march=skylake-avx512"], []),
    "plain loops": ("c++", [], []),
    "NEON with dot products": (
        "aarch64-linux-gnu-g++-12",
        ["-march=armv8.2-a+dotprod+fp16"],
        ["qemu-aarch64-static"],
    ),
    "NEON without": ("aarch64-linux-gnu-g++-12", ["-march=armv8-a"], ["qemu-aarch64-static"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_every_processors_path_gives_the_same(path: str, tmp_path: Path) -> None:
    """Built for other processors than this one, and run here where it or an emulator can."""
    compiler, flags, emulator = PATHS[path]
    if not all(map(shutil.which, [compiler, *emulator])):
        pytest.skip(f"{compiler} or {emulator} is not installed")
    if compiler == "c++" and platform.machine() != "x86_64":
        pytest.skip("its instructions are another processor's")
    if "512" in path and "avx512bw" not in host_library.processor():
        pytest.skip("no AVX-512 here")
    program, text = tmp_path / "program", tmp_path / "main.cpp"
    text.write_text(HARNESS.format(source=host_library.source("block_linear")))
    common = ["-O2", "-fopenmp", "-static", "-fno-math-errno", "-fno-trapping-math", "-std=c++17"]
    subprocess.run([compiler, *common, "-w", *flags, "-o", program, text], check=True)
    subprocess.run([*emulator, program], check=True)
