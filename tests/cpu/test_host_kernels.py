"""The CPU kernels in C++ against their references, how they are built, and the engine with and
without them.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from allocations import allocations
from engines import assert_exact, engine_for, prompts_of, tiny
from kernel_checks import check_forward, make_inputs, poisoned_memory
from test_memory_plan import PagedSequence, small_config
from torch import Tensor

from ridgeline.cli import main
from ridgeline.engine import Sampling
from ridgeline.engine.attention.host_sequences import HostSequences
from ridgeline.engine.attention.kv_cache import KVCache
from ridgeline.engine.attention.paged import CpuSequences
from ridgeline.engine.loading.host_model import HostLinear, HostNorm, on_host
from ridgeline.engine.memory.activations import peak
from ridgeline.engine.steps.batch import StepInputs, StepShape
from ridgeline.engine.steps.rope_tables import RopeTables
from ridgeline.errors import UnsupportedError, UsageError
from ridgeline.formats.dtypes import parse_dtype
from ridgeline.kernels import host_library
from ridgeline.kernels.attention import AttentionSpec
from ridgeline.kernels.attention.inputs import rows_of
from ridgeline.kernels.gated_activation import cpu as gated_cpu
from ridgeline.kernels.op import Case
from ridgeline.kernels.pages import Pages, PageTables
from ridgeline.kernels.prefill_attention import cpu as attention_cpu
from ridgeline.kernels.prefill_attention.reference import Packing
from ridgeline.kernels.registry import get_op
from ridgeline.kernels.rms_norm import cpu as norm_cpu
from ridgeline.kernels.rotary_pages import cpu as rotary_cpu
from ridgeline.kernels.skinny_linear import cpu as linear_cpu
from ridgeline.kernels.skinny_linear import reference as linear_reference
from ridgeline.kernels.skinny_linear.fused import FusedParts
from ridgeline.kernels.tolerance import check
from ridgeline.models import Transformer, build_model, fill_random
from ridgeline.models.transformer import Linear

CPU = torch.device("cpu")
BF16 = torch.bfloat16
needs_compiler = pytest.mark.skipif(host_library.find_compiler() is None, reason="no C++ compiler")


@pytest.fixture(scope="module", autouse=True)
def built() -> bool:
    return host_library.find_compiler() is not None and host_library.prepare()


def norm(**inputs: Any) -> Any:
    return norm_cpu.rms_norm(**inputs)


def gated(gate_up_T2F: Tensor, activation: Any, **_: Any) -> Tensor:
    return gated_cpu.gated_activation(gate_up_T2F, activation)


NOT_OURS = ("run",)  # a GPU's


def prefill(**inputs: Any) -> Tensor:
    known = {name: value for name, value in inputs.items() if name not in NOT_OURS}
    tables = known["tables"]
    known["packing"] = Packing(known["packing"].starts.int())
    known["tables"] = PageTables(tables.page_table.int(), tables.lengths.int())
    return attention_cpu.prefill_attention(**known)


def decode(**inputs: Any) -> Tensor:
    """A step of single tokens is a step of prompts with one token each."""
    for name in NOT_OURS:
        inputs.pop(name, None)
    q_TNH = inputs.pop("q_BNH")
    return prefill(q_TNH=q_TNH, packing=Packing(torch.arange(len(q_TNH) + 1)), **inputs)


WAYS = {
    "rms_norm": norm,
    "gated_activation": gated,
    "prefill_attention": prefill,
    "decode_attention": decode,
}


def cases_of(name: str) -> list[Any]:
    """Those whose inputs the kernel takes: not the ways a GPU cuts it, not 8-bit results."""
    found = []
    for case in get_op(name).small_cases:
        inputs = make_inputs(case, CPU)
        odd = inputs.get("config") is not None or inputs.get("quantized") is not None
        if odd or ("q_TNH" in inputs and "pages" not in inputs):
            continue
        if any(getattr(x, "dtype", None) == torch.float8_e4m3fnuz for x in inputs.values()):
            continue
        found.append(pytest.param(name, case, id=f"{name}-{case.label}"))
    return found


@needs_compiler
@pytest.mark.parametrize(("name", "case"), [case for name in WAYS for case in cases_of(name)])
def test_kernels_are_their_references(name: str, case: Case) -> None:
    """Odd sizes, strides, every dtype, NaN where no token lies and in fresh memory."""
    check_forward(get_op(name), case, CPU, WAYS[name])


# --- what the cases of the registry do not hold ---------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("case", get_op("rotary_pages").small_cases, ids=lambda case: case.label)
def test_tokens_are_placed_as_by_the_reference(case: Case) -> None:
    found, expected = make_inputs(case, CPU), make_inputs(case, CPU)
    for inputs in (found, expected):
        inputs["slots_T"] = inputs["slots_T"].int()
        inputs.pop("config", None)
    with poisoned_memory():
        q_TNH = rotary_cpu.rotary_pages(**found)
    check(q_TNH, get_op("rotary_pages").reference(**expected)[0], case.dtype, case.reduction)
    for name in ("k_pages", "v_pages"):
        pages, wanted = (getattr(x["pages"], name).float() for x in (found, expected))
        assert torch.equal(pages.isnan(), wanted.isnan())  # written where it should be, only there
        torch.testing.assert_close(pages, wanted, rtol=0.01, atol=1e-5, equal_nan=True)


@needs_compiler
@pytest.mark.parametrize("window", [None, 1500])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_many_keys_are_cut_and_put_together(window: int | None, dtype: torch.dtype) -> None:
    """A sequence's result is the same bits whatever else is in the batch."""
    generator = torch.Generator().manual_seed(2)
    lengths = [3000, 1025, 40]
    pages = [torch.randn(120, 2, 64, 20, generator=generator).to(dtype) for _ in range(2)]
    table = torch.randperm(120, generator=generator).int()[: 3 * 47].view(-1)
    table = torch.cat([table, table])[: 3 * 47].view(3, 47)
    q = torch.randn(3, 6, 20, generator=generator).to(dtype)
    spec = AttentionSpec(0.2, window)
    tables = PageTables(table, torch.tensor(lengths))
    inputs: dict[str, Any] = {"q_BNH": q, "tables": tables, "spec": spec}
    inputs["pages"] = Pages(pages[0], pages[1], None, None)
    found = decode(**inputs)
    check(found, get_op("decode_attention").reference(**inputs), dtype, 3000)
    for row in range(3):
        alone = inputs | rows_of(inputs, "q_BNH", slice(row, row + 1))
        assert torch.equal(decode(**alone)[0], found[row])


@needs_compiler
def test_tokens_that_are_no_numbers_reach_only_those_that_see_them() -> None:
    generator = torch.Generator().manual_seed(3)
    k_pages, v_pages = (torch.randn(2, 1, 16, 64, generator=generator) for _ in range(2))
    q_TNH = torch.randn(6, 2, 64, generator=generator)
    inputs: dict[str, Any] = {"q_TNH": q_TNH, "packing": Packing(torch.tensor([0, 6]))}
    inputs["tables"] = PageTables(torch.tensor([[1, 0]]), torch.tensor([20]))
    inputs["spec"] = AttentionSpec(0.1)
    whole = Pages(k_pages, v_pages, None, None)
    expected = prefill(pages=whole, **inputs)
    for name in ("k_pages", "v_pages"):
        poisoned = getattr(whole, name).clone()
        poisoned[0, 0, 1] = float("nan")  # position 17: the fourth of the six tokens
        found = prefill(pages=whole._replace(**{name: poisoned}), **inputs)
        assert torch.equal(found[:3], expected[:3])
        assert found[3:].isnan().any(-1).all()


def random_linear(num_rows: int, num_outputs: int, depth: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(num_rows)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(BF16)

    return {
        "x_MD": normal(num_rows, depth + 8)[:, :depth],
        "weight_OD": normal(num_outputs, depth, scale=depth**-0.5),
        "bias_O": normal(num_outputs),
        "residual_MO": normal(num_rows, num_outputs + 8)[:, :num_outputs],
        "norm_weight_D": normal(depth),
    }


@needs_compiler
@pytest.mark.parametrize("name", ["llama-mha", "gemma3"])
def test_codes_in_pages_are_the_references_but_for_their_edges(name: str) -> None:
    """A value at the edge between two codes may fall on either side, and later tokens follow it:
    2026-11-15 one code of Llama's, and of Gemma's V of token 9 in layer 1 and 408 that follow.
    """
    caches = []
    for kernels in ("reference", "fused"):
        engine = engine_for(tiny(name), kv_dtype="int8", budget=16, kernels=kernels)
        engine.generate(prompts_of([40, 23]), Sampling(max_tokens=4))
        caches.append([page.int() for layer in engine.runner.kv.layers for page in layer[:2]])
    gaps = [(one - other).abs() for one, other in zip(*caches, strict=True)]
    assert max(int(gap.max()) for gap in gaps) <= 1
    assert not any(gap.any() for gap in gaps[:2])  # the first layer's come before any attention
    num_codes = sum(int((page != 0).sum()) for page in caches[0])
    assert sum(int(gap.sum()) for gap in gaps) < 0.02 * num_codes


SHAPES = [(32, 32), (96, 160), (1056, 64), (50, 33)]  # the last fills neither tiles nor registers


@needs_compiler
@pytest.mark.parametrize("num_rows", [1, 2, 15, 16, 17, 32, 33, 70])
@pytest.mark.parametrize(("num_outputs", "depth"), SHAPES)
@pytest.mark.parametrize("parts", ["", "bias", "residual norm", "bias activation norm"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_products_are_the_references(
    num_rows: int, num_outputs: int, depth: int, parts: str, dtype: torch.dtype
) -> None:
    """In tiles where the processor has them, in registers otherwise."""
    inputs = {
        name: value.to(dtype) for name, value in random_linear(num_rows, num_outputs, depth).items()
    }
    x, weight = inputs.pop("x_MD"), inputs.pop("weight_OD")
    around: dict[str, Any] = {
        name: value for name, value in inputs.items() if name.split("_")[0] in parts.split()
    }
    if "activation" in parts:
        around["activation"] = "gelu_tanh"
    with poisoned_memory():
        found = linear_cpu.skinny_linear(x, weight, FusedParts(**around))
    gain = around.pop("norm_weight_D", None)
    if gain is not None:
        x = norm_cpu.rms_norm(x, gain, 1e-6)
    check(found, linear_reference.skinny_linear(x, weight, FusedParts(**around)), dtype, depth)
    others = torch.cat([torch.full_like(x[:-1], 3.0), x[-1:]])
    beside = linear_cpu.skinny_linear(others, weight, FusedParts(**around))
    if gain is None:
        assert torch.equal(beside[-1], found[-1])  # whatever the other rows are


@needs_compiler
def test_torch_multiplies_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, odd = torch.zeros(32, 32, dtype=BF16), torch.zeros(48, 33, dtype=BF16)
    monkeypatch.setattr(linear_cpu, "has_tiles", lambda: True)
    monkeypatch.setattr(linear_cpu, "few_rows_are_slow", lambda dtype: False)
    assert [linear_cpu.most_rows(weight) for weight in (whole, odd, whole.float())] == [127, 0, 0]
    monkeypatch.setattr(linear_cpu, "few_rows_are_slow", lambda dtype: True)
    most = linear_cpu.MOST_IN_REGISTERS
    assert [linear_cpu.most_rows(weight) for weight in (odd, whole.float())] == [most, most]
    assert linear_cpu.most_rows(odd.t()) == 0


@needs_compiler
def test_what_is_no_number_stays_none() -> None:
    """The engine finds the request whose logits are NaN: no kernel may hide it."""
    for dtype in (torch.float32, BF16, torch.float16):
        x = torch.zeros(3, 40, dtype=dtype)
        x[1, 7] = float("nan")
        normed = norm_cpu.rms_norm(x, torch.ones(40, dtype=dtype), 1e-6)
        assert normed.isnan().all(1).tolist() == [False, True, False]  # type: ignore[union-attr]
        assert gated_cpu.gated_activation(x, "silu").isnan().sum() == 1


# --- building -------------------------------------------------------------------------------------


@needs_compiler
def test_one_openmp_serves_torch_and_the_kernels() -> None:
    maps = Path("/proc/self/maps")
    if not maps.is_file():
        pytest.skip("no list of libraries here")
    names = set(re.findall(r"\S*/lib(?:gomp|omp|iomp)\S*", maps.read_text()))
    assert len(names) == 1, names


@pytest.mark.slow
@needs_compiler
def test_two_processes_build_at_the_same_time(tmp_path: Path) -> None:
    code = "from ridgeline.kernels.host_library import build; print(build('rms_norm'))"
    environment = {**os.environ, "RIDGELINE_CACHE": str(tmp_path)}
    started = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    said = {process.communicate()[0].decode().strip() for process in started}
    assert [process.returncode for process in started] == [0, 0]
    (path,) = said
    assert [file.name for file in Path(path).parent.iterdir()] == [Path(path).name]


@needs_compiler
def test_the_command_line_builds_and_lists_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    assert main(["kernels", "build", "--op", "gated_activation"]) == 0
    assert re.search(r"gated_activation +cpu.cpp +\d+\.\d s", capsys.readouterr().out)
    assert [path.suffix for path in tmp_path.rglob("*.so")] == [".so"]
    assert main(["kernels", "build", "--op", "move_rows"]) == UsageError.exit_code
    words = "move_rows has no C++ to build here; these do: adamw, document_attention, gated_act"
    assert words in capsys.readouterr().err
    assert main(["kernels", "list", "--op", "gated_activation"]) == 0
    assert "triton cpu" in capsys.readouterr().out


@pytest.fixture
def unprepared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """As in a process that has built nothing, with nothing in the cache."""
    monkeypatch.setattr(host_library, "_loaded", {})
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    return monkeypatch


def broken_compiler(folder: Path) -> str:
    path = folder / "c++"
    path.write_text(
        "#!/bin/sh\n[ $1 = --version ] && exit 0\necho 'x.cpp:1: error: no' >&2\nexit 1"
    )
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("there", [False, True])
def test_without_a_compiler_that_works_the_references_serve(
    there: bool, unprepared: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = broken_compiler(tmp_path) if there else None
    unprepared.setattr(host_library, "find_compiler", lambda: compiler)
    with caplog.at_level(logging.WARNING):
        engine = engine_for(tiny("qwen3"))
    said = [record.message for record in caplog.records if "CPU kernels" in record.message]
    assert len(said) == 1
    assert ("x.cpp:1: error: no" if there else "no C++ compiler here") in said[0]
    assert "\n" not in said[0]
    assert (engine.recipe.kernels, engine.runner.passes.sequences) == ("reference", CpuSequences)
    prompts = prompts_of([5, 21, 40])
    assert_exact(engine, prompts, [Sampling(max_tokens=6)] * 3)
    with pytest.raises(UnsupportedError, match="kernels is fused, and on a CPU they could not"):
        engine_for(tiny("qwen3"), kernels="fused")


def test_the_cache_cannot_be_written(unprepared: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    unprepared.setenv("RIDGELINE_CACHE", str(file / "below"))
    assert not host_library.prepare()


# --- the engine -----------------------------------------------------------------------------------


@needs_compiler
def test_an_engine_uses_them_and_leaves_the_model_as_it_is() -> None:
    model = tiny("llama-tied")
    engine = engine_for(model)
    assert (engine.recipe.kernels, engine.runner.passes.sequences) == ("fused", HostSequences)
    assert engine.model is model
    down = model.layers[0].mlp.down
    assert type(down) is Linear
    own = engine.runner.model.layers[0].mlp.down
    assert isinstance(own, HostLinear)
    assert isinstance(engine.runner.model.norm, HostNorm)
    assert own.weight is down.weight  # no memory of its own
    assert engine.runner.model.head.weight is model.embed.weight


@needs_compiler
def test_references_serve_where_they_are_asked_for() -> None:
    engine = engine_for(tiny("llama-tied"), kernels="reference")
    assert (engine.recipe.kernels, engine.runner.passes.sequences) == ("reference", CpuSequences)
    assert engine.runner.model is engine.model
    experts = engine_for(tiny("qwen3-moe"))
    assert experts.recipe.kernels == "reference"
    with pytest.raises(UnsupportedError, match="experts"):
        engine_for(tiny("qwen3-moe"), kernels="fused")


@needs_compiler
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8", "fp32"])
def test_pages_of_every_kind_give_the_references_tokens(kv_dtype: str) -> None:
    """Codes and values: the same tokens as through the references, in fp32."""
    prompts = prompts_of([3, 17, 40])
    samplings = [Sampling(max_tokens=8)] * 3
    found, expected = (
        [
            output.tokens
            for output in engine_for(tiny("gemma3"), kv_dtype=kv_dtype, kernels=kernels).generate(
                prompts, samplings
            )
        ]
        for kernels in ("auto", "reference")
    )
    assert found == expected


@needs_compiler
@pytest.mark.parametrize("num_rows", [20, linear_cpu.MOST_IN_TILES + 20])
def test_a_model_in_bf16_stays_near_its_references(num_rows: int) -> None:
    """All layers through tiles and, with many rows, through torch."""
    model = fill_random(build_model(small_config("gemma-2-9b"), BF16, "cpu"))
    host = on_host(model)
    tokens = torch.arange(num_rows)

    def hidden(which: Transformer) -> Tensor:
        sequence = PagedSequence(model.config, "bf16", -(-num_rows // 64), 64)
        sequence.begin(0, num_rows)
        return which(tokens, sequence)

    with torch.inference_mode():
        found, expected = hidden(host).float(), hidden(model).float()
        exact = hidden(model.float()).float()
    error, reference_error = (found - exact).norm(), (expected - exact).norm()
    assert error < 1.1 * reference_error < 0.1 * exact.norm()


@needs_compiler
@pytest.mark.parametrize("name", ["llama-3.1-8b", "gemma-2-9b"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_memory_plan_holds_for_them(name: str, dtype: str) -> None:
    """A step at the budget allocates what is planned for fused kernels."""
    config, num_tokens = small_config(name), 256
    model = on_host(fill_random(build_model(config, parse_dtype(dtype), "cpu")))
    kv = KVCache(config, parse_dtype(dtype), 4, 64, CPU)
    positions = torch.arange(num_tokens, dtype=torch.int32)
    known = dict.fromkeys(StepInputs._fields, torch.zeros(0, dtype=torch.int32))
    known |= {"positions": positions, "lengths": positions + 1, "slots": positions}
    for field, values in (("seats", [0]), ("totals", [num_tokens]), ("starts", [0, num_tokens])):
        known[field] = torch.tensor(values, dtype=torch.int32)
    about = (kv, RopeTables(config, num_tokens, CPU), StepInputs(**known))
    table = torch.arange(4, dtype=torch.int32).view(1, 4)
    sequences = HostSequences(*about, StepShape(num_tokens, 0, 1, 0), table, 0)
    with torch.inference_mode():
        used = allocations(lambda: model(positions, sequences)).peak_bytes
    planned = peak(config, dtype, "fused", num_tokens=num_tokens, num_keys=num_tokens)
    assert planned.num_bytes == pytest.approx(used, rel=0.02), planned
