"""An original that the device has no room for: where it lies, and what it says from there."""

from __future__ import annotations

import pytest
import torch
from engines import engine_for, prompts_of, tiny
from torch import Tensor, nn

from ridgeline.errors import OutOfMemoryError
from ridgeline.ladder.quantizing import original_device
from ridgeline.ladder.quantizing.original_device import is_walked, work_bytes
from ridgeline.models.copies import on_device
from ridgeline.models.shapes import describe_shape
from ridgeline.quality.walked import Walked
from ridgeline.quantization.scheme import parse_scheme
from ridgeline.quantization.sizes import weight_bytes

INT4 = (parse_scheme("int4-g128"),)
GIB = 2**30


def logits(first: int, logits_RV: Tensor, tokens_R: Tensor) -> Tensor:
    """All of them, with the token and its position."""
    rows_R = torch.arange(first, first + len(tokens_R))
    return torch.cat([logits_RV, tokens_R[:, None], rows_R[:, None]], 1)


@pytest.mark.parametrize(
    "name", ["llama-tied", "mistral-sliding", "gemma2", "gemma3", "qwen3-moe", "granite"]
)
def test_it_scores_as_the_engine_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, windows = tiny(name), [tuple(prompt) for prompt in prompts_of([100, 61, 2, 100])]
    monkeypatch.setattr("ridgeline.quality.walked.ROWS_AT_ONCE", 48)
    walked = Walked(model, [*windows, windows[0]], "cpu")
    for found, expected in zip(
        walked.score(windows, [logits] * 4), engine_for(model).score(windows, logits), strict=True
    ):
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


def test_a_copy_on_another_device_leaves_the_model_and_stays_tied() -> None:
    model = tiny("llama-tied")
    there = on_device(model, "meta")
    assert all(value.is_meta for value in there.parameters())
    assert there.head.weight is there.embed.weight
    assert not any(value.is_meta for value in model.parameters())
    assert all(isinstance(value, nn.Parameter) for value in there.parameters())
    same = on_device(model, "cpu")
    assert [id(value) for value in same.parameters()] == [id(value) for value in model.parameters()]


def memory(monkeypatch: pytest.MonkeyPatch, device: float, host: float) -> None:
    room = {"cpu": int(host * GIB), "cuda:0": int(device * GIB)}
    monkeypatch.setattr(original_device, "available_memory", room.__getitem__)


def test_it_lies_on_the_host_where_the_device_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    config = describe_shape("llama-3.1-8b").config
    about = (config, torch.bfloat16, INT4, "cuda:0")
    assert 9.1 * GIB < work_bytes(config, torch.bfloat16) < 10 * GIB  # 9.1 GiB were measured
    memory(monkeypatch, 139, 20)
    assert not is_walked("auto", *about)
    assert is_walked("host", *about)
    memory(monkeypatch, 139, 100)  # room for it everywhere: the device is for what is at work
    assert is_walked("auto", *about)
    assert not is_walked("auto", *about, often=True)
    assert not is_walked("auto", describe_shape("qwen3-0.6b").config, *about[1:])
    memory(monkeypatch, 23, 100)  # the model alone has room
    assert weight_bytes(config, torch.bfloat16) < 23 * GIB
    assert is_walked("auto", *about)
    assert not is_walked("device", *about)
    assert not is_walked("auto", *about[:3], "cpu")


def test_what_has_room_nowhere_is_told_before_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    about = (describe_shape("llama-3.1-8b").config, torch.bfloat16, INT4, "cuda:0")
    memory(monkeypatch, 23, 10)
    with pytest.raises(OutOfMemoryError, match=r"15 GiB, and 10 GiB of host memory"):
        is_walked("auto", *about)
    memory(monkeypatch, 8, 100)
    with pytest.raises(OutOfMemoryError, match=r"of cuda:0 .* 8 GiB are free .*--device cpu"):
        is_walked("auto", *about)


def test_experts_are_carried_and_not_worked_on() -> None:
    """A block of Mixtral is 2.6 GiB, nearly all of it experts, which stay as they are."""
    config = describe_shape("mixtral-8x7b").config
    assert 7 * GIB < work_bytes(config, torch.bfloat16) < 8 * GIB
