"""Convolutions of 3 × 3 by Winograd's products: the same outputs, and a rung of the climb where a
CPU runs them.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from module_climbs import hardware, look_briefly, optimized, set_rates, statuses
from torch import Tensor, nn
from vision_models import SmallConvNet

from ridgeline.ladder.modules.forms.building import Example, build
from ridgeline.ladder.modules.forms.winograd import (
    WinogradConv,
    replaceable_convolutions,
    to_winograd,
)
from ridgeline.profiling.modules.changes import CHANGES
from ridgeline.profiling.modules.convolutions import work_share
from ridgeline.profiling.modules.form import ModuleForm
from ridgeline.profiling.modules.gains import predict
from ridgeline.profiling.modules.run import profiled

Square = partial(nn.Conv2d, kernel_size=3)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look_briefly(tmp_path, monkeypatch)


@pytest.mark.parametrize("shape", [(1, 16, 8, 8), (2, 16, 7, 13), (3, 16, 1, 30), (16, 9, 5)])
@pytest.mark.parametrize("padding", [1, (2, 1), "same"])
@torch.inference_mode()
def test_outputs_are_the_convolutions(
    shape: tuple[int, ...], padding: int | tuple[int, int] | str
) -> None:
    torch.manual_seed(0)
    for bias in (True, False):
        conv = Square(16, 24, padding=padding, bias=bias).double()
        x = torch.randn(shape, dtype=torch.float64)
        torch.testing.assert_close(WinogradConv(conv)(x), conv(x), rtol=1e-9, atol=1e-9)
    conv, x = conv.float(), x.float()
    out, expected = WinogradConv(conv)(x), conv(x)
    assert (out - expected).norm() / expected.norm() < 1e-5
    last = x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x
    assert torch.equal(WinogradConv(conv)(last), out)


def test_without_padding() -> None:
    conv = Square(16, 16, padding="valid")
    x = torch.randn(1, 16, 10, 11)
    torch.testing.assert_close(WinogradConv(conv)(x), conv(x), rtol=1e-4, atol=1e-4)


def test_only_squares_of_three_with_stride_one_are_replaced() -> None:
    class Own(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    hooked = Square(16, 16)
    hooked.register_forward_hook(lambda *_: None)
    parts = {
        "plain": Square(16, 16),
        "strided": Square(16, 16, stride=2),
        "apart": Square(16, 16, dilation=2),
        "groups": Square(16, 16, groups=2),
        "mirrored": Square(16, 16, padding=1, padding_mode="reflect"),
        "large": nn.Conv2d(16, 16, 5),
        "few": Square(3, 16),
        "own": Own(16, 16, 3),
        "hooked": hooked,
    }
    assert list(replaceable_convolutions(nn.ModuleDict(parts))) == ["plain"]
    assert isinstance(to_winograd(parts["plain"]), WinogradConv)


def test_a_net_in_this_form_leaves_the_original_alone() -> None:
    net, x = SmallConvNet().eval(), torch.randn(1, 3, 32, 32)
    expected = net(x)
    example = Example((x,), {})
    for layout in (None, "channels_last"):
        built = build(net, ModuleForm(winograd=True, grad=False, layout=layout), example)  # type: ignore[arg-type]
        assert sum(isinstance(part, WinogradConv) for part in built.module.modules()) == 4
        torch.testing.assert_close(built(x), expected, rtol=1e-4, atol=1e-4)
    assert not any(isinstance(part, WinogradConv) for part in net.modules())


def test_it_is_a_rung_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    set_rates(monkeypatch, lambda form: 130.0 if form.winograd else 100.0)
    net, x = SmallConvNet().eval(), torch.randn(1, 3, 32, 32)
    result = optimized(net, x)
    assert result.form.winograd
    assert statuses(result)["winograd"] == "kept"
    torch.testing.assert_close(result(x), net(x), rtol=1e-4, atol=1e-4)
    linear = optimized(nn.Linear(64, 64), torch.randn(4, 64))
    assert statuses(linear)["winograd"] == "not applicable"


def test_the_gain_is_in_the_products() -> None:
    """A quarter of the multiplications where channels are many; carrying eats it where few."""
    assert work_share(2048, 2048) == pytest.approx(0.25, rel=0.05)
    assert work_share(16, 16) > 0.9
    net, x = SmallConvNet(64).eval(), torch.randn(1, 3, 64, 64)
    _, work = profiled(net, (x,), {}, hardware(), torch.device("cpu"))
    assert set(work.squares) == {f"blocks.{i}.conv{j}" for i in (0, 1) for j in (1, 2)}
    assert work.squares["blocks.0.conv1"] == (64, 64)
    form = ModuleForm(winograd=True)
    assert 1.0 < predict(work, ModuleForm(), form, CHANGES["winograd"]).speedup < 3.0
