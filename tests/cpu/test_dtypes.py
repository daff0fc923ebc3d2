"""Element types: every word a user may type, and the sizes behind them."""

import pytest
import torch

from ridgeline.errors import UsageError
from ridgeline.formats.dtypes import (
    ELEMENT_TYPES,
    dtype_bytes,
    dtype_name,
    from_safetensors,
    parse_dtype,
)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("word", "dtype"),
    [
        ("fp32", torch.float32),
        ("float32", torch.float32),
        ("float", torch.float32),
        ("fp16", torch.float16),
        ("half", torch.float16),
        ("bf16", torch.bfloat16),
        ("bfloat16", torch.bfloat16),
        ("torch.bfloat16", torch.bfloat16),
        (" BF16 ", torch.bfloat16),
        ("fp8_e4m3", torch.float8_e4m3fn),
        ("float8_e5m2", torch.float8_e5m2),
        ("int8", torch.int8),
    ],
)
def test_words_users_type(word: str, dtype: torch.dtype) -> None:
    assert parse_dtype(word) is dtype


@pytest.mark.parametrize("row", ELEMENT_TYPES, ids=lambda row: row.name)
def test_names_go_both_ways(row) -> None:
    assert parse_dtype(row.name) is row.torch_dtype
    assert parse_dtype(str(row.torch_dtype)) is row.torch_dtype
    assert dtype_name(row.torch_dtype) == row.name
    assert from_safetensors(row.safetensors) is row.torch_dtype
    assert dtype_bytes(row.torch_dtype) == torch.empty(1, dtype=row.torch_dtype).nbytes


def test_no_word_means_two_types() -> None:
    words = [word for row in ELEMENT_TYPES for word in (row.name, *row.aliases)]
    assert len(words) == len(set(words))


def test_safetensors_codes_are_the_librarys() -> None:
    from safetensors.torch import _TYPES

    for row in ELEMENT_TYPES:
        assert _TYPES.get(row.safetensors, row.torch_dtype) is row.torch_dtype


def test_a_wrong_word_is_answered_with_the_right_ones() -> None:
    with pytest.raises(UsageError, match=r"'fp31' is not known; use one of .*bf16.*did you mean"):
        parse_dtype("fp31")
    with pytest.raises(UsageError):
        parse_dtype("")
    assert from_safetensors("F6_E2M3") is None
