"""Decode and prefill attention beyond the registry's cases: what must not change a result, what is
never read, how work is cut, what is refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ridgeline.errors import UnsupportedError
from ridgeline.kernels.agreement import compare
from ridgeline.kernels.attention import AttentionSpec
from ridgeline.kernels.attention.decode_run import DecodeRun
from ridgeline.kernels.attention.inputs import NO_PAGE, rows_of
from ridgeline.kernels.attention.reference import hidden_from
from ridgeline.kernels.decode_attention import decode_attention
from ridgeline.kernels.decode_attention import op as decode_op
from ridgeline.kernels.decode_attention import triton as decode
from ridgeline.kernels.launch import recording
from ridgeline.kernels.prefill_attention import Packing, prefill_attention, prompt_attention, sdpa
from ridgeline.kernels.prefill_attention import op as prefill_op
from ridgeline.kernels.targets import TARGETS

CPU = torch.device("cpu")
H200 = TARGETS["sm_90"]
DECODE = decode_op.DecodeCase((300, 17), heads=(4, 2), head_dim=64, page_size=16, split_tokens=128)
PREFILL = prefill_op.PrefillCase((70, 5), (200, 90), heads=(4, 2), head_dim=64, page_size=16)


def decode_inputs(setting: decode_op.DecodeCase) -> dict[str, Any]:
    return decode_op.make(setting, CPU, torch.Generator().manual_seed(0))


def prefill_inputs(setting: prefill_op.PrefillCase) -> dict[str, Any]:
    return prefill_op.make(setting, CPU, torch.Generator().manual_seed(0))


def check_prompts(cache: torch.dtype, **changed: Any) -> None:
    setting = replace(PREFILL, cache=cache)
    inputs = prefill_inputs(setting) | changed
    compare(prefill_op.launch(**inputs), prefill_op.reference(**inputs), prefill_op.case(setting))


@pytest.mark.parametrize(
    "cache", [pytest.param(torch.int8, marks=pytest.mark.slow), torch.float8_e4m3fn]
)
def test_prompts_over_codes_beyond_the_range_of_fp16(cache: torch.dtype) -> None:
    """Codes are multiplied in fp16: queries of any size must fit, and V scales far apart both
    count, whichever come first.
    """
    inputs = prefill_inputs(replace(PREFILL, cache=cache))
    for size in (1e30, 1e-30):
        check_prompts(cache, q_TNH=inputs["q_TNH"] * size, spec=AttentionSpec(0.125 / size))
    pages = inputs["tables"].page_table[0, :17].long()  # of the first sequence, 270 tokens
    for exponents in (torch.linspace(-4, 4, 272), torch.linspace(4, -4, 272)):
        scales = inputs["pages"].v_scale.clone()
        scales[pages] *= (10.0**exponents).view(17, 1, 16)
        check_prompts(cache, pages=inputs["pages"]._replace(v_scale=scales))


def test_a_sequence_is_the_same_bits_in_any_batch() -> None:
    inputs = decode_inputs(replace(DECODE, lengths=(300, 17, 211)))
    together = decode_op.launched(**inputs)
    alone = decode_op.launched(**inputs | rows_of(inputs, "q_BNH", slice(1, 2)))
    assert torch.equal(alone, together[1:2])


def test_splits_change_rounding_only() -> None:
    inputs = decode_inputs(replace(DECODE, dtype=torch.float32))
    whole = decode_op.launched(**inputs | {"run": DecodeRun(512)})
    torch.testing.assert_close(decode_op.launched(**inputs), whole, rtol=1e-5, atol=1e-5)


def test_max_length_narrows_the_grid() -> None:
    inputs = decode_inputs(replace(DECODE, lengths=(100, 17)))
    table = inputs["tables"].page_table
    wide = torch.nn.functional.pad(table, (0, 1000 - table.shape[1]), value=NO_PAGE)
    tables = inputs["tables"]._replace(page_table=wide, max_length=128)
    out = decode_op.launched(**inputs | {"tables": tables})
    assert torch.equal(out, decode_op.launched(**inputs))


@pytest.mark.parametrize("page_size", [16, 128])
def test_pages_behind_the_window_are_not_read(page_size: int) -> None:
    setting = replace(DECODE, window=40, page_size=page_size)
    inputs = decode_inputs(setting)
    expected = decode_op.launched(**inputs)
    inputs["tables"].page_table[0, : (300 - 40) // page_size] = NO_PAGE
    assert torch.equal(decode_op.launched(**inputs), expected)

    chunk = prefill_inputs(replace(PREFILL, window=40, page_size=page_size))
    expected = prefill_op.launch(**chunk)
    chunk["tables"].page_table[0, : (200 - 39) // page_size] = NO_PAGE
    assert torch.equal(prefill_op.launch(**chunk), expected)


def test_padding_after_the_last_prompt_does_no_harm() -> None:
    inputs = prefill_inputs(PREFILL)
    padded = torch.nn.functional.pad(inputs["q_TNH"], (0, 0, 0, 0, 0, 60), value=float("nan"))
    out = prefill_op.launch(
        **inputs | {"q_TNH": padded, "packing": Packing(inputs["packing"].starts)}
    )
    torch.testing.assert_close(out[:75], prefill_op.launch(**inputs))


@pytest.mark.parametrize("window", [None, 1, 7, 100])
def test_pairs_are_counted_as_the_definition_sees_them(window: int | None) -> None:
    setting = replace(PREFILL, window=window)
    cost = prefill_op.cost(**prefill_inputs(setting))
    pairs = 0
    for new, before in zip((70, 5), (200, 90), strict=True):
        hidden = hidden_from(new, new + before, before, window, CPU)
        assert hidden is not None
        pairs += int((~hidden).sum())
    assert cost.flops == 4 * 4 * 64 * pairs


def test_splits_fill_the_chip_and_are_not_too_short() -> None:
    alone = decode.choose_split(8, 32768, H200)
    assert 8 * decode.count_splits(32768, alone, None) >= 1.9 * H200.num_units
    assert decode.choose_split(8, 512, H200) == 256
    assert decode.count_splits(1024, decode.choose_split(64 * 8, 1024, H200), None) == 1
    assert decode.count_splits(32768, 1024, window=1) == 1
    assert decode.count_splits(32768, 1024, window=1025) == 2
    assert decode.count_splits(32768, 1024, window=1026) == 3


def test_decoding_is_one_kernel() -> None:
    with recording(H200) as calls:
        decode_op.launched(**decode_inputs(replace(DECODE, lengths=(3000, 17), split_tokens=256)))
    assert [call.kernel.__name__ for call in calls] == ["decode_attention_kernel"]


def test_cudnn_is_chosen_for_long_plain_prompts_of_equal_length() -> None:
    spec = AttentionSpec(0.1)
    q = torch.empty(8192, 32, 128, dtype=torch.bfloat16)
    with recording(H200):
        assert sdpa.choose_path(q, 2, spec, 4096) == "cudnn"
        assert sdpa.choose_path(q, 2, spec, None) == "triton"
        assert sdpa.choose_path(q, 3, spec, 4096) == "triton"  # not of equal length
        assert sdpa.choose_path(q, 2, replace(spec, window=64), 4096) == "triton"
        assert sdpa.choose_path(q.float(), 2, spec, 4096) == "triton"
    with recording(TARGETS["gfx942"]):
        assert sdpa.choose_path(q, 2, spec, 4096) == "triton"


def test_torch_paths_agree_with_the_definition() -> None:
    """What the dispatch and the baselines hand to torch, on its CPU kernels."""
    inputs = prefill_inputs(replace(PREFILL, before=None, new=(33, 33), dtype=torch.float32))
    packed = (inputs["q_TNH"], inputs["k_TKH"], inputs["v_TKH"])
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        sdpa_out = sdpa.equal_prompts(*packed, 2, inputs["spec"], None)
    torch.testing.assert_close(sdpa_out, prefill_op.reference(**inputs), rtol=1e-4, atol=1e-4)


def test_compiled_graphs_hold_the_ops() -> None:
    inputs = decode_inputs(DECODE)
    compiled = torch.compile(decode_attention, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(**inputs), decode_attention(**inputs))
    chunk = prefill_inputs(PREFILL)
    compiled = torch.compile(prefill_attention, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(**chunk), prefill_attention(**chunk))
    fresh = prefill_inputs(replace(PREFILL, before=None))
    compiled = torch.compile(prompt_attention, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(**fresh), prompt_attention(**fresh))


def test_what_is_refused_says_why() -> None:
    inputs = decode_inputs(DECODE)
    with pytest.raises(ValueError, match="not a multiple of 128"):
        decode_op.launched(**inputs | {"run": DecodeRun(100)})
    codes = decode_inputs(replace(DECODE, cache=torch.int8))
    with pytest.raises(ValueError, match="need scales"):
        decode_op.launched(**codes | {"pages": codes["pages"]._replace(v_scale=None)})
    parts = {name: getattr(inputs["pages"], name)[:, :1] for name in ("k_pages", "v_pages")}
    with pytest.raises(ValueError, match="contiguous"):
        decode_op.launched(**inputs | {"pages": inputs["pages"]._replace(**parts)})
    with pytest.raises(UnsupportedError, match="heads of 300 dims"):
        decode_op.launched(**decode_inputs(replace(DECODE, head_dim=300)))
    with pytest.raises(UnsupportedError, match="do not divide"):
        decode_op.launched(**decode_inputs(replace(DECODE, heads=(3, 2))))
