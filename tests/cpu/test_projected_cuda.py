"""cuda.cu of projected attention without a GPU: its own source, run thread for thread on the CPU, a
cluster of blocks at a time, against the reference.
"""

from __future__ import annotations

import ctypes
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from emulated import built, poison_results, still_written
from torch import Tensor

from ridgeline.errors import UnsupportedError
from ridgeline.kernels import projected_attention as public
from ridgeline.kernels.agreement import compare
from ridgeline.kernels.attention.decode_run import DecodeRun
from ridgeline.kernels.decode_attention.op import DecodeCase
from ridgeline.kernels.projected_attention import cuda, op
from ridgeline.kernels.projected_attention.cuda import Clustered
from ridgeline.kernels.projected_attention.op import ProjectedCase
from ridgeline.kernels.projected_attention.triton import Fused
from ridgeline.kernels.targets import TARGETS

CPU = torch.device("cpu")
BF16, FP16 = torch.bfloat16, torch.float16
H200 = TARGETS["sm_90"]
MIXED = DecodeCase((40, 1, 0, 17), heads=(4, 2), head_dim=64, page_size=16)
LONG = replace(MIXED, lengths=(1000, 63, 512, 513, 16))


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ctypes.CDLL]:
    return built("projected_attention", {"sm_90": ()}, tmp_path_factory.mktemp("cuda_on_cpu"))


@pytest.fixture(autouse=True)
def on_cpu(builds: dict[str, ctypes.CDLL], monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hopper chip, and results that hold NaN until they are written."""
    monkeypatch.setattr(cuda, "library", lambda _: builds["sm_90"])
    monkeypatch.setattr(cuda, "target_of", lambda _: H200)
    poison_results(monkeypatch)


def inputs_of(setting: ProjectedCase) -> dict[str, Any]:
    return op.make(setting, CPU, torch.Generator().manual_seed(0))


def check(setting: ProjectedCase, way: Clustered, **changed: Any) -> Tensor:
    """The result and all that was written, beside the reference's."""
    run = {"run": DecodeRun(config=way)}
    found = op.with_pages(cuda.projected_attention, **inputs_of(setting) | changed | run)
    expected = op.defined(**inputs_of(setting) | changed)
    compare(found, expected, op.case(setting))
    return found[0]


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("head_dim", cuda.HEAD_DIMS)
def test_every_head_dim(head_dim: int, dtype: torch.dtype) -> None:
    check(
        ProjectedCase(replace(MIXED, head_dim=head_dim, dtype=dtype), normed=True),
        Clustered(2, 2, 1),
    )


AWKWARD = [
    (ProjectedCase(LONG, normed=True, gap=16), Clustered(8, 2, 1)),
    (ProjectedCase(replace(LONG, heads=(8, 1), page_size=64)), Clustered(4, 4, 2)),
    (
        ProjectedCase(replace(LONG, heads=(7, 1), head_dim=128, page_size=128), 32),
        Clustered(2, 1, 4),
    ),
    (
        ProjectedCase(replace(LONG, heads=(3, 3), head_dim=80, dtype=FP16), 16, normed=True),
        Clustered(1),
    ),
    (ProjectedCase(replace(LONG, head_dim=96, window=150, softcap=30.0), 36), Clustered(2, 3, 3)),
    (ProjectedCase(replace(LONG, window=1), None, normed=True), Clustered(4, 1, 1)),
    (ProjectedCase(replace(LONG, window=17, page_size=32), None), Clustered(2, 2, 2)),
    (ProjectedCase(replace(LONG, heads=(6, 1), head_dim=256), 64), Clustered(8, 1, 1)),
    (ProjectedCase(replace(LONG, lengths=(70, 1, 33, 16)), held=True), Clustered(2, 2, 1)),
]


@pytest.mark.parametrize(
    ("setting", "way"), [pytest.param(*pair, id=pair[0].label) for pair in AWKWARD]
)
def test_awkward_sizes(setting: ProjectedCase, way: Clustered) -> None:
    check(setting, way)


def test_many_steps_a_warp_read_their_pages_in_two_goes() -> None:
    """A lane holds the pages of 32 steps and of the 32 behind them."""
    check(ProjectedCase(replace(MIXED, lengths=(1200, 1039), heads=(2, 1))), Clustered(1, 1, 2))


def test_a_row_without_a_slot_writes_nothing() -> None:
    setting = ProjectedCase(replace(MIXED, lengths=(0, 1, 40)))
    inputs = inputs_of(setting)
    inputs["rows"].slots.fill_(-1)
    before = [pages.clone() for pages in inputs["pages"].tensors()]
    out = cuda.projected_attention(**inputs | {"run": DecodeRun(config=Clustered(2, 2, 1))})
    assert out.isfinite().all()
    assert out[0].abs().max() == 0
    for after, pages in zip(inputs["pages"].tensors(), before, strict=True):
        assert torch.equal(after.nan_to_num(7.0), pages.nan_to_num(7.0))


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("window", [None, 40])
def test_the_kernel_before_is_waited_for(
    settled: bool, window: int | None, builds: dict[str, ctypes.CDLL]
) -> None:
    """What it writes is NaN, or zero, until a block waits: all, or with `settled` the projection
    alone.
    """
    setting = ProjectedCase(replace(LONG, window=window), normed=True)
    run = DecodeRun(config=Clustered(2, 2, 2))
    plain = cuda.projected_attention(**inputs_of(setting) | {"run": run})
    inputs = inputs_of(setting) | {"run": run._replace(settled=settled)}
    rows, tables = inputs["rows"], inputs["tables"]
    late = [rows.qkv]
    if not settled:
        late += [*rows.angles, tables.lengths, rows.slots, tables.page_table]
    with still_written(builds["sm_90"], [(tensor, ...) for tensor in late]):
        found = cuda.projected_attention(**inputs)
    assert torch.equal(found, plain)


def test_what_is_refused_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    way = Clustered(1, 1, 1)
    for attention, said in [
        (replace(MIXED, dtype=torch.float32), r"projection in torch\.float32"),
        (replace(MIXED, cache=torch.int8), r"pages of torch\.int8"),
        (replace(MIXED, head_dim=48), "head dim 48"),
        (replace(MIXED, heads=(9, 1)), "9 query heads"),
    ]:
        with pytest.raises(UnsupportedError, match=said):
            check(ProjectedCase(attention), way)
    with pytest.raises(UnsupportedError, match="more shared memory"):
        check(ProjectedCase(replace(MIXED, head_dim=256)), Clustered(8, 8, 2))
    inputs = inputs_of(ProjectedCase(MIXED, normed=True))
    rows, run = inputs["rows"], DecodeRun(config=way)
    (cos, sin), norm = rows.angles, rows.norm
    for name, changed, message in [
        ("slots", rows.slots.long(), "int32"),
        ("angles", (cos.bfloat16(), sin), "fp32"),
        ("norm", norm._replace(k_weight=norm.k_weight.float()), "bfloat16"),
    ]:
        kind = ValueError if name == "slots" else UnsupportedError
        own = rows._replace(**{name: changed})
        with pytest.raises(kind, match=message):
            cuda.projected_attention(**inputs | {"rows": own, "run": run})
    monkeypatch.setattr(cuda, "library", lambda _: None)
    with pytest.raises(UnsupportedError, match="kernels build"):
        check(ProjectedCase(MIXED), way)
    monkeypatch.setattr(cuda, "target_of", lambda _: TARGETS["sm_80"])
    with pytest.raises(UnsupportedError, match="Hopper"):
        check(ProjectedCase(MIXED), way)


def test_cost_in_shared_memory_is_what_the_source_says(builds: dict[str, ctypes.CDLL]) -> None:
    exchange_bytes = builds["sm_90"].ridgeline_projected_attention_exchange_bytes
    for head_dim in cuda.HEAD_DIMS:
        assert cuda.exchange_bytes(head_dim) == exchange_bytes(head_dim)


def test_ways_start_at_once_and_fit() -> None:
    found = cuda.configs(8, 128, BF16, H200)
    assert Clustered(8, 8, 1) in found
    assert all(8 * way.blocks <= H200.num_units for way in found)
    assert {way.blocks for way in cuda.configs(64, 128, BF16, H200)} == {1, 2}
    assert not cuda.configs(512, 128, BF16, H200)
    assert all(way.num_warps * way.stages <= 12 for way in cuda.configs(8, 256, BF16, H200))


def test_what_serves_where_nothing_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few sequences that are not too long, and only where the kernel takes them."""
    found = [cuda.choose(rows, 1024, 128, BF16, H200) for rows in (8, 16, 32, 64, 128)]
    assert found == [
        Clustered(8, 8, 2),
        Clustered(8, 8, 2),
        *(Clustered(n, 8, 2) for n in (4, 2)),
        None,
    ]
    assert cuda.choose(8, 32768, 128, BF16, H200) is None
    assert cuda.choose(8, 1024, 256, BF16, H200) == Clustered(8, 8, 1)
    monkeypatch.setattr(public, "target_of", lambda _: H200)
    inputs = inputs_of(ProjectedCase(replace(MIXED, heads=(4, 1))))
    given = (inputs["rows"].qkv, inputs["pages"], inputs["tables"])
    assert public.choose_config(*given) == Clustered(8, 8, 2)
    assert public.choose_config(*given, 128) is None  # fixed splits: the same for any batch
    assert public.in_one_kernel(*given)
    for best in (asdict(Clustered(2, 4, 1)), asdict(Fused(64, 4, 2))):
        monkeypatch.setattr(public, "chosen", lambda *_, best=best: best)
        kind = Clustered if "blocks" in best else Fused
        assert public.choose_config(*given) == kind(**best)
    asked: list[Any] = []
    monkeypatch.setattr(public, "chosen", lambda *given: asked.append(given[3]))
    monkeypatch.setattr(cuda, "library", lambda _: None)
    assert public.choose_config(*given) is None
    assert not asked[0](asdict(Clustered()))  # what was not built cannot be chosen
    assert asked[0](asdict(Fused(64, 4, 2)))
