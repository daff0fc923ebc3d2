"""cuda.cu of decode attention without a GPU: its own source, run thread for thread on the CPU by
tests/cuda_on_cpu.h, against the reference; how its work is cut; which kernel is chosen.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated import built, still_written, translated
from torch import Tensor

from ridgeline.errors import UnsupportedError
from ridgeline.kernels import decode_attention as package
from ridgeline.kernels.agreement import compare
from ridgeline.kernels.attention import AttentionSpec
from ridgeline.kernels.attention.inputs import rows_of
from ridgeline.kernels.decode_attention import cuda, op
from ridgeline.kernels.decode_attention.cuda import DecodeCut
from ridgeline.kernels.decode_attention.op import DecodeCase
from ridgeline.kernels.decode_attention.splits import choose_split, count_splits
from ridgeline.kernels.targets import TARGETS

CPU = torch.device("cpu")
BF16, FP16, INT8, FP8 = torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn
FP8_AMD = torch.float8_e4m3fnuz
DTYPES = [(BF16, None), (FP16, None), (BF16, FP8), (FP16, FP8), (BF16, INT8), (FP16, INT8)]
MIXED = DecodeCase((40, 1, 0), heads=(4, 2), head_dim=64, page_size=16)
LONG = replace(MIXED, lengths=(1000, 63, 512, 513), cache=INT8)
# How the kernel is built: for chips that convert e4m3 and for others, and in plain C++.
BUILDS = {
    "sm_90": (),
    "sm_80": ("__CUDA_ARCH__=800",),
    "portable": ("RIDGELINE_PORTABLE",),
}

every_head_dim = [
    replace(MIXED, head_dim=head_dim, dtype=dtype, cache=cache)
    for head_dim in cuda.HEAD_DIMS
    for dtype, cache in DTYPES
]
awkward: list[tuple[DecodeCase, DecodeCut]] = [
    (replace(LONG, heads=(4, 1), cache=FP8, split_tokens=256), DecodeCut(2, 2)),
    (
        replace(LONG, heads=(8, 1), head_dim=128, page_size=64, window=300, softcap=30.0),
        DecodeCut(4, 4),
    ),
    (
        replace(LONG, heads=(16, 1), head_dim=128, page_size=32, window=150, cache=None),
        DecodeCut(8, 2),
    ),
    (replace(LONG, heads=(9, 1), cache=None, split_tokens=16), DecodeCut(1, 6)),
    (replace(LONG, heads=(20, 1), head_dim=80, softcap=5.0, split_tokens=48), DecodeCut(3, 1)),
    (
        replace(LONG, heads=(40, 2), head_dim=96, page_size=256, window=1, cache=FP8),
        DecodeCut(8, 6),
    ),
    (replace(LONG, heads=(12, 1), head_dim=256, page_size=128, window=257), DecodeCut(8, 3)),
    (
        replace(LONG, lengths=(5000,), heads=(2, 1), split_tokens=4096, strided=True),
        DecodeCut(2, 3),
    ),
]


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ctypes.CDLL]:
    return built("decode_attention", BUILDS, tmp_path_factory.mktemp("cuda_on_cpu"))


Use = Callable[[str], None]


@pytest.fixture
def use(builds: dict[str, ctypes.CDLL], monkeypatch: pytest.MonkeyPatch) -> Use:
    return lambda name: monkeypatch.setattr(cuda, "library", lambda *_: builds[name])


def inputs_of(setting: DecodeCase) -> dict[str, Any]:
    return op.make(setting, CPU, torch.Generator().manual_seed(0))


def check(setting: DecodeCase, cut: DecodeCut | None = None, **changed: Any) -> Tensor:
    inputs = inputs_of(setting) | changed
    inputs["run"] = inputs["run"]._replace(config=cut)
    found = cuda.decode_attention(**inputs)
    compare(found, op.define(**inputs), op.case(setting))
    return found


@pytest.mark.parametrize("build", BUILDS)
def test_every_head_dim_and_dtype(build: str, use: Use) -> None:
    use(build)
    for setting in every_head_dim:
        if build != "sm_80" or setting.cache == FP8:  # else it is what sm_90 does
            check(setting)


@pytest.mark.parametrize("build", ["sm_90", "portable"])
@pytest.mark.parametrize(
    ("setting", "cut"), [pytest.param(*pair, id=pair[0].label) for pair in awkward]
)
def test_awkward_sizes(build: str, setting: DecodeCase, cut: DecodeCut, use: Use) -> None:
    use(build)
    check(setting, cut)


def test_the_kind_of_fp8_that_amd_has(use: Use) -> None:
    use("portable")
    check(replace(MIXED, cache=FP8_AMD))


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("window", [None, 40])
def test_the_kernel_before_is_waited_for(
    settled: bool, window: int | None, builds: dict[str, ctypes.CDLL], use: Use
) -> None:
    """What it writes is NaN until a block waits: all, or with `settled` q and the newest tokens."""
    use("sm_90")
    setting = replace(LONG, split_tokens=128, window=window)
    inputs = inputs_of(setting)
    plain = cuda.decode_attention(**inputs)
    last = inputs["tables"].lengths.long() - 1
    page = inputs["tables"].page_table[torch.arange(4), last // 16].long()
    written: list[tuple[Tensor, Any]] = [(inputs["q_BNH"], ...)]
    for scale in (inputs["pages"].k_scale, inputs["pages"].v_scale):  # NaN there does for codes
        written.append((scale, (page, slice(None), last % 16) if settled else ...))
    if not settled:
        written.append((inputs["tables"].lengths, ...))
    with still_written(builds["sm_90"], written):
        run = inputs["run"]._replace(settled=settled)
        found = cuda.decode_attention(**inputs | {"run": run})
    assert torch.equal(found, plain)


def test_a_sequence_is_the_same_bits_in_any_batch(use: Use) -> None:
    use("sm_90")
    inputs = inputs_of(replace(LONG, split_tokens=128))
    together = cuda.decode_attention(**inputs)
    rows = rows_of(inputs, "q_BNH", slice(2, 3))
    assert torch.equal(cuda.decode_attention(**inputs | rows), together[2:3])


@pytest.mark.parametrize("cache", [FP8, INT8])
def test_queries_beyond_the_range_of_fp16(cache: torch.dtype, use: Use) -> None:
    """Codes are multiplied in fp16: queries of any size must fit."""
    use("sm_90")
    setting = replace(MIXED, cache=cache)
    q_BNH = inputs_of(setting)["q_BNH"]
    for size in (1e30, 1e-30):
        check(setting, q_BNH=q_BNH * size, spec=AttentionSpec(0.125 / size))


def test_v_scales_far_apart(use: Use) -> None:
    """Weights times V scales pass through fp16 too: whichever comes first, both must count."""
    use("sm_90")
    setting = replace(MIXED, lengths=(512,), cache=INT8)
    inputs = inputs_of(setting)
    place = inputs["tables"].page_table[0].long()
    for factors in (torch.linspace(-4, 4, 512), torch.linspace(4, -4, 512)):
        scales = inputs["pages"].v_scale.clone()
        scales[place] *= (10.0**factors).view(-1, 1, 16)
        check(setting, DecodeCut(2, 3), pages=inputs["pages"]._replace(v_scale=scales))


def test_scores_that_keep_growing(use: Use) -> None:
    """The maximum moves only now and then; the sums must follow when it does."""
    use("sm_90")
    for cache in (None, INT8):
        setting = replace(MIXED, lengths=(512,), cache=cache, heads=(1, 1))
        inputs = inputs_of(setting)
        q_BNH = torch.ones_like(inputs["q_BNH"])
        place = inputs["tables"].page_table[0].long()
        growing = torch.linspace(-1, 1, 512).view(-1, 1, 16, 1)
        if cache is None:
            inputs["pages"].k_pages[place] = growing.expand(-1, 1, 16, 64).to(BF16)
        else:
            inputs["pages"].k_pages[place] = 100
            inputs["pages"].k_scale[place] = (growing / 100)[..., 0]
        spec = AttentionSpec(1.0)
        check(setting, DecodeCut(1, 3), q_BNH=q_BNH, spec=spec, pages=inputs["pages"])


def test_cost_in_shared_memory_is_what_the_source_says(builds: dict[str, ctypes.CDLL]) -> None:
    stage_bytes = builds["sm_90"].ridgeline_decode_attention_stage_bytes
    for head_dim in cuda.HEAD_DIMS:
        for kind, dtype in enumerate(cuda.KINDS):
            assert cuda.stage_bytes(head_dim, dtype) == stage_bytes(head_dim, kind)


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_blocks_fit_an_sm_together(target: str) -> None:
    for head_dim in cuda.HEAD_DIMS:
        for dtype in cuda.KINDS[:4]:
            cut = cuda.choose_cut(head_dim, dtype, TARGETS[target])
            queues = cut.num_warps * cut.stages * cuda.stage_bytes(head_dim, dtype)
            assert cut.per_unit == (4 if dtype.itemsize == 1 else 2)
            assert cut.per_unit * (queues + 1024) <= TARGETS[target].shared_bytes + 1024
    assert cuda.choose_cut(128, INT8, TARGETS["sm_90"]) == DecodeCut(4, 2, 4)
    assert cuda.choose_cut(128, BF16, TARGETS["sm_90"]) == DecodeCut(4, 3)


def test_splits_are_one_wave_of_blocks() -> None:
    h200 = TARGETS["sm_90"]
    for per_unit in (1, 2, 4):
        tokens = choose_split(8, 32768, h200, cuda.STEP, per_unit, at_most=True)
        num_blocks = 8 * count_splits(32768, tokens, None)
        assert 0.96 * per_unit * h200.num_units <= num_blocks <= per_unit * h200.num_units


def test_what_is_refused_says_why(use: Use) -> None:
    with pytest.raises(UnsupportedError, match="kernels build"):
        cuda.decode_attention(**inputs_of(MIXED))
    use("sm_90")
    with pytest.raises(UnsupportedError, match=r"queries in torch\.float32"):
        check(replace(MIXED, dtype=torch.float32))
    with pytest.raises(UnsupportedError, match="head dim 48"):
        check(replace(MIXED, head_dim=48))
    with pytest.raises(UnsupportedError, match=r"over pages of torch\.float16"):
        check(replace(MIXED, cache=FP16))
    with pytest.raises(ValueError, match="not a multiple of 16"):
        check(replace(MIXED, split_tokens=100))
    long_lengths = inputs_of(MIXED)["tables"]._replace(lengths=torch.ones(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="int32"):
        check(MIXED, tables=long_lengths)
    with pytest.raises(UnsupportedError, match="make them longer"):
        check(replace(MIXED, lengths=(70_000,), heads=(1, 1), split_tokens=16))


def test_the_faster_kernel_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """By measurement; without one by dtype, and by nothing of the batch where splits are given."""
    calls: list[tuple[str, Any]] = []
    best: dict[str, Any] | None = None

    class Elsewhere(torch.Tensor):
        device = torch.device("cuda", 0)  # type: ignore[assignment]

    def choose(setting: DecodeCase) -> tuple[str, Any]:
        inputs = inputs_of(setting)
        inputs["q_BNH"] = inputs["q_BNH"].as_subclass(Elsewhere)
        package.decode_attention(**inputs)
        return calls.pop()

    from ridgeline.kernels.decode_attention import triton

    monkeypatch.setattr(package, "chosen", lambda *_: best)
    monkeypatch.setattr(cuda, "supported", lambda *_: True)
    for name, module in (("cuda", cuda), ("triton", triton)):

        def call(*given: Any, name: str = name) -> None:
            calls.append((name, given[-1].config))

        monkeypatch.setattr(module, "decode_attention", call)
    assert choose(MIXED) == ("triton", None)
    assert choose(replace(MIXED, cache=INT8)) == ("cuda", None)
    best = asdict(DecodeCut(4, 6, 1))
    assert choose(MIXED) == ("cuda", DecodeCut(4, 6, 1))
    assert choose(replace(MIXED, split_tokens=256)) == ("triton", None)
    best = asdict(triton.DecodeTiles(64, 8, 2))
    assert choose(replace(MIXED, cache=INT8)) == ("triton", triton.DecodeTiles(64, 8, 2))
    monkeypatch.setattr(cuda, "supported", lambda *_: False)
    best = None
    assert choose(replace(MIXED, cache=INT8)) == ("triton", None)


def test_the_search_offers_both_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = DecodeCase((64,), cache=INT8)
    assert [type(way).__name__ for way in op.search(**inputs_of(setting)).configs] == [
        "DecodeTiles"
    ]
    monkeypatch.setattr(cuda, "library", lambda *_: object())
    search = op.search(**inputs_of(setting))
    assert search.key == "bf16 int8 32/8x128 1x64"
    assert DecodeCut(8, 3, 2) in cuda.cuts(128, INT8, TARGETS["sm_90"])
    assert any(isinstance(way, DecodeCut) for way in search.configs)


def test_the_source_translates_for_rocm(tmp_path: Path) -> None:
    """What the translation leaves of CUDA's own calls is behind the guard."""
    text = translated("decode_attention", tmp_path)
    assert "hip/hip_fp16.h" in text
    portable, _, tensor_cores = text.partition("#if PORTABLE && !defined(RIDGELINE_ON_CPU)")
    assert "hipLaunchKernel(" in tensor_cores
    assert "cuda" not in re.sub(r"cuda_on_cpu\.h|cuda\.py|cuda\.cu", "", portable)


def test_heads_of_other_dims_are_left_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "library", lambda name: object())
    for head_dim, takes in ((64, True), (12, False), (20, False), (72, False)):
        setting = replace(MIXED, head_dim=head_dim, cache=INT8)
        inputs = op.make(setting, CPU, torch.Generator().manual_seed(0))
        assert cuda.supported(inputs["q_BNH"], inputs["pages"]) == takes
