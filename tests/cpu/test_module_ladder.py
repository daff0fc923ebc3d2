"""The ladder for any nn.Module: what is kept, dropped and recorded, and that the original stays as
it is. Rates come from a fake clock: how fast this machine is decides nothing here.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from module_climbs import Rate, Wide, look_briefly, optimized, set_rates, statuses
from test_module_profile import Mlp
from torch import Tensor, nn

import ridgeline
from ridgeline.errors import UsageError
from ridgeline.ladder.modules import bench, climb, optimize
from ridgeline.ladder.modules.first_answer import ModuleFirstAnswer
from ridgeline.ladder.modules.forms import linears
from ridgeline.ladder.modules.forms.building import Built, Example, build, tf32
from ridgeline.ladder.modules.forms.copies import copied, weight_bytes
from ridgeline.ladder.modules.outputs import OutputBounds, difference
from ridgeline.ladder.reporting.result import Climb
from ridgeline.profiling.modules import gains
from ridgeline.profiling.modules.form import ModuleForm
from ridgeline.profiling.predicting.accuracy import known_errors
from ridgeline.quantization.scheme import parse_scheme


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look_briefly(tmp_path, monkeypatch)


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> Callable[[Rate], None]:
    return partial(set_rates, monkeypatch)


def test_what_is_faster_and_right_is_kept(rates: Callable[[Rate], None]) -> None:
    rates(lambda form: 100.0 * (1 if form.grad else 1.5) * (2 if form.scheme == "int8" else 1))
    module, x = Wide(), torch.randn(4, 128)
    expected = module(x).detach()
    result = optimized(module, x)
    assert statuses(result)["inference"] == statuses(result)["int8"] == "kept"
    assert statuses(result)["bf16"] == "dropped"
    assert (result.form.grad, result.form.scheme, result.form.dtype) == (False, "int8", None)
    assert result.speedup is not None
    assert result.speedup.value == pytest.approx(3.0)
    error = (result(x) - expected).norm() / expected.norm()
    assert 0 < error < 0.02
    kept = {rung.name: rung for rung in result.rungs}["int8"]
    assert kept.difference is not None
    assert kept.difference.relative_error == pytest.approx(error.item(), rel=1e-3)
    assert kept.predicted is not None
    assert kept.edit == {"scheme": "int8"}
    assert result.climb.after.figures.weight_bytes < 0.5 * result.climb.before.figures.weight_bytes


def test_the_original_is_left_as_it_was(rates: Callable[[Rate], None]) -> None:
    rates(lambda form: 100.0 + 50 * sum(bool(v) for v in form.edit_from(ModuleForm()).values()))
    layers = (nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.Flatten(), nn.Linear(576, 8))
    module, x = nn.Sequential(*layers), torch.randn(2, 8, 8, 8)
    before = copy.deepcopy(module.state_dict())
    kinds = [type(part) for part in module.modules()]
    strides = [parameter.stride() for parameter in module.parameters()]
    pointers = [parameter.data_ptr() for parameter in module.parameters()]
    result = optimized(module, x, max_error=0.2)
    assert statuses(result)["channels-last"] == "kept"
    assert statuses(result)["bf16"] == "kept"
    assert result(x).dtype == torch.float32
    assert module.training
    assert kinds == [type(part) for part in module.modules()]
    assert strides == [parameter.stride() for parameter in module.parameters()]
    assert pointers == [parameter.data_ptr() for parameter in module.parameters()]
    for name, tensor in module.state_dict().items():  # running statistics too: it was never called
        assert torch.equal(tensor, before[name]), name
        assert tensor.dtype == before[name].dtype


def test_a_climb_is_written_and_read_again(rates: Callable[[Rate], None], tmp_path: Path) -> None:
    rates(lambda form: 100.0 if form.grad else 150.0)
    result = optimized(Wide(), torch.randn(1, 128))
    text = json.dumps(result.climb.to_json(), allow_nan=False)
    assert Climb.from_json(json.loads(text)) == result.climb
    assert result.climb.unit == "calls/s"
    assert result.climb.workload == "Wide([1, 128])"
    shown = str(result)
    assert "1.50× the speed: 150 calls/s instead of 100" in shown
    assert "1.50× in 5 paired rounds, 95% interval 1.50 to 1.50×" in shown
    assert str(result.climb) == shown
    assert "1.50× the speed" in repr(result)
    html = result.report(tmp_path / "report.html").read_text()
    assert "Wide" in html
    assert "calls/s" in html
    assert "tokens/s" not in html
    assert "relative error at most 0.02" in html
    remembered = known_errors().outcomes
    assert {each.rung for each in remembered} >= {"inference", "int8"}
    assert {each.area for each in remembered} == {
        "overhead of modules", "tensor cores of modules", "quantize of modules",
    }  # fmt: skip


def test_nothing_kept_is_the_module_as_it_was(rates: Callable[[Rate], None]) -> None:
    rates(lambda form: 100.0)
    module, x = Wide(), torch.randn(1, 128)
    result = optimized(module, x)
    assert result.speedup is None
    assert result.form == ModuleForm()
    assert torch.equal(result(x), module(x))
    reasons = {rung.name: rung.reason for rung in result.rungs}
    assert "not faster beyond noise: 1.00×" in reasons["bf16"]


def test_a_gain_inside_the_noise_is_not_kept(rates: Callable[[Rate], None]) -> None:
    noise = cycle([85.0, 150.0, 80.0, 140.0, 90.0, 130.0])
    rates(lambda form: 100.0 if form.grad else next(noise))
    result = optimized(Wide(), torch.randn(1, 128))
    rung = {rung.name: rung for rung in result.rungs}["inference"]
    assert rung.achieved is not None
    assert rung.achieved.value > 1.1
    assert rung.status == "dropped"
    assert "not faster beyond noise" in rung.reason


def test_what_a_noisy_machine_made_of_it_is_told_and_not_remembered(
    rates: Callable[[Rate], None],
) -> None:
    noise = cycle([80.0, 190.0, 85.0, 200.0, 90.0, 210.0, 100.0])
    rates(lambda form: next(noise) * (1 if form.grad else 3))
    result = optimized(Wide(), torch.randn(1, 128))
    assert any("noisy machine" in note and "not remembered" in note for note in result.climb.notes)
    assert not known_errors().outcomes
    rates(lambda form: 100.0 if form.grad else 300.0)
    result = optimized(Wide(), torch.randn(1, 128))
    assert not any("noisy machine" in note for note in result.climb.notes)
    assert known_errors().outcomes


def test_a_gain_that_is_sure_and_tiny_is_not_worth_it(rates: Callable[[Rate], None]) -> None:
    rates(lambda form: 100.0 if form.grad else 100.5)
    result = optimized(Wide(), torch.randn(1, 128))
    assert {rung.name: rung.reason for rung in result.rungs}["inference"].startswith(
        "not faster by 1%"
    )


def test_outputs_outside_the_bound_are_not_timed(rates: Callable[[Rate], None]) -> None:
    timed = []
    rates(lambda form: (timed.append(form), 100.0)[1])
    result = optimized(Wide(), torch.randn(4, 128), max_error=1e-4)
    rung = {rung.name: rung for rung in result.rungs}["bf16"]
    assert rung.status == "dropped"
    assert rung.achieved is None
    assert "relative error is" in rung.reason
    assert "allowed is 0.0001" in rung.reason
    assert all(form.dtype is None and form.scheme is None for form in timed)
    assert statuses(result)["autocast-bf16"] == "dropped"  # tried, since bf16 was outside


def test_what_raises_is_recorded_and_the_climb_goes_on(rates: Callable[[Rate], None]) -> None:
    class Particular(Wide):
        def forward(self, x: Tensor) -> Tensor:
            if x.dtype != torch.float32:
                raise TypeError("only fp32 here")
            return super().forward(x)

    rates(lambda form: 100.0 if form.grad else 150.0)
    result = optimized(Particular(), torch.randn(1, 128))
    rungs = {rung.name: rung for rung in result.rungs}
    assert (rungs["bf16"].status, rungs["bf16"].reason) == ("failed", "TypeError: only fp32 here")
    assert rungs["autocast-bf16"].status == "dropped"
    assert rungs["int8"].achieved is not None


def test_memory_that_runs_out_is_recorded(
    rates: Callable[[Rate], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(module: nn.Module, form: ModuleForm, *rest: Any) -> Built:
        if form.dtype is not None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return build(module, form, *rest)

    monkeypatch.setattr(bench, "build", short)
    rates(lambda form: 100.0)
    result = optimized(Wide(), torch.randn(1, 128))
    assert statuses(result)["bf16"] == "failed"
    assert statuses(result)["int8"] == "dropped"


def test_randomness_is_refused_with_what_to_do() -> None:
    module = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5))
    with pytest.raises(UsageError, match=r"two calls .* differ .* call \.eval\(\) first"):
        optimized(module, torch.randn(2, 16))

    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.randn_like(x)

    with pytest.raises(UsageError, match="take randomness out of forward"):
        optimized(Noisy().eval(), torch.randn(2, 16))


def test_little_randomness_inside_the_bound_is_told(rates: Callable[[Rate], None]) -> None:
    class Trembling(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1e-5 * torch.randn_like(x)

    rates(lambda form: 100.0)
    result = optimized(Trembling(), torch.randn(4, 16))
    assert any("differs between two calls" in note for note in result.climb.notes)


def test_inputs_that_are_changed_in_place_are_refused() -> None:
    class Writing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.add_(1.0)

    class Growing(nn.Module):
        def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
            seen.append(x)
            return x + len(seen)

    with pytest.raises(UsageError, match="changes its inputs in place"):
        optimized(Writing(), torch.zeros(3))
    with pytest.raises(UsageError, match="changes its inputs in place"):
        optimized(Growing(), (torch.zeros(3), []))


def test_what_gave_nothing_alone_is_tried_again_later(
    rates: Callable[[Rate], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a first answer, and with a prediction that is wrong about which comes first."""
    monkeypatch.setattr(climb, "first_answer", lambda *_: ModuleFirstAnswer(()))
    monkeypatch.setattr(gains, "channels_last_s", lambda *_: 0.0)
    timed: list[ModuleForm] = []

    def rate(form: ModuleForm) -> float:
        timed.append(form)
        return 150.0 if form.dtype and form.layout else 120.0 if form.dtype else 100.0

    rates(rate)
    module = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU())
    result = optimized(module, torch.randn(1, 8, 8, 8), max_error=0.1)
    assert (timed[1].layout, timed[1].dtype) == ("channels_last", None)  # the first that was tried
    assert statuses(result)["channels-last"] == statuses(result)["bf16"] == "kept"
    assert (result.form.layout, result.form.dtype) == ("channels_last", "bf16")


def test_attention_weights_that_are_used_are_not_taken_away(rates: Callable[[Rate], None]) -> None:
    class Looking(nn.Module):
        def __init__(self, returns: bool) -> None:
            super().__init__()
            self.attention, self.returns = nn.MultiheadAttention(16, 2, batch_first=True), returns

        def forward(self, x: Tensor) -> Any:
            out, weights = self.attention(x, x, x)
            return (out, weights) if self.returns else out

    rates(lambda form: 200.0 if form.attention else 100.0)
    x = torch.randn(2, 5, 16)
    unused = optimized(Looking(False), x)
    assert statuses(unused)["sdpa"] == "kept"
    used = optimized(Looking(True), x)
    rung = {rung.name: rung for rung in used.rungs}["sdpa"]
    assert rung.status == "dropped"
    assert "1 is a NoneType, not a Tensor" in rung.reason


def test_models_of_transformers_with_named_inputs(rates: Callable[[Rate], None]) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=64, n_layer=2, n_head=2, n_positions=32, attn_implementation="eager"
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    rates(lambda form: 100.0 * (2 if form.attention else 1) * (2 if form.dtype else 1))
    inputs = {"input_ids": torch.arange(12).view(1, 12), "use_cache": True}
    expected = model(**inputs)
    result = optimized(model, inputs, max_error=0.05, max_kl=0.01)
    assert result.form.attention == "sdpa"
    assert result.form.dtype == "bf16"
    assert model.config._attn_implementation == "eager"
    out = result(**inputs)
    assert type(out) is type(expected)
    assert out.logits.dtype == torch.float32
    torch.testing.assert_close(out.logits, expected.logits, rtol=0.05, atol=0.05)
    rung = {rung.name: rung for rung in result.rungs}["bf16"]
    assert rung.difference is not None
    assert rung.difference.num_tensors == 1 + 2 * 2  # logits, keys and values of two layers
    assert rung.difference.mean_kl is not None
    assert 0 < rung.difference.mean_kl < 1e-3
    assert result.config is not model.config  # attributes are the copy's


def test_wrong_uses_say_what_to_do() -> None:
    module, x = Wide(), torch.randn(1, 128)
    for options, words in (
        ({"for_": "speed"}, "for_ is 'speed'; use latency or throughput"),
        ({"rounds": 3}, "rounds is 3; give at least 5"),
        ({"budget_s": 0.0}, "budget_s is 0.0; give a positive number"),
        ({"max_error": -1.0}, "max_error is -1.0; give 0 or a positive"),
        ({"skip": ("compil",)}, "did you mean 'compile'"),
        ({"workload": "chat"}, "unknown option 'workload' for a module"),
    ):
        with pytest.raises(UsageError, match=words):
            optimized(module, x, **options)
    with pytest.raises(UsageError, match=r"expected an nn\.Module or a model name, got function"):
        optimized(lambda x: x, x)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="inputs are missing"):
        optimize(module, None)
    with pytest.raises(UsageError, match=r"input 0.0 is on meta but the module is on cpu"):
        optimized(module, x.to("meta"))


def test_a_models_name_goes_to_its_own_ladder(monkeypatch: pytest.MonkeyPatch) -> None:
    from ridgeline.ladder.climbing import climb as models

    orders: list[models.ClimbOrder] = []
    monkeypatch.setattr(models, "climb_model", lambda order, progress: orders.append(order))
    optimize("demo", for_="throughput", budget_s=60.0, max_kl=0.5, workload="chat", rounds=7)
    (order,) = orders
    assert (order.model, order.goal, order.budget_s) == ("demo", "throughput", 60.0)
    assert (order.workload, order.rounds, order.bounds.max_kl) == ("chat", 7, 0.5)
    with pytest.raises(UsageError, match="skip and hardware apply to modules only"):
        optimize("demo", skip=("compile",))
    with pytest.raises(UsageError, match="did you mean 'workload'"):
        optimize("demo", workloads="chat")


def test_the_name_is_lazy() -> None:
    assert ridgeline.optimize is optimize


@pytest.mark.slow
def test_a_real_climb_with_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timed and compiled for real: whatever is kept, the outputs are right."""
    module, x = Mlp().eval(), torch.randn(8, 32)
    expected = module(x).detach()
    skip = ("bf16", "autocast-bf16", "int8", "int4", "sdpa", "autotune")
    result = optimized(module, x, skip=skip, round_s=0.002)
    assert statuses(result)["compile"] in ("kept", "dropped", "failed")
    if statuses(result)["compile"] == "failed":
        pytest.skip(f"no C++ compiler: {[rung.reason for rung in result.rungs]}")
    rung = {rung.name: rung for rung in result.rungs}["compile"]
    assert rung.achieved is not None
    assert len(rung.achieved.before) == 5
    torch.testing.assert_close(result(x), expected, rtol=1e-4, atol=1e-5)


# Copies and forms.


def test_copies_share_weights_and_keep_ties() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("table", torch.ones(4), persistent=False)
            self.register_buffer("mean", torch.ones(4))

    module = Tied()
    shared, half = copied(module), copied(module, torch.bfloat16)
    assert shared.head.weight is shared.embed.weight is module.embed.weight
    assert shared.mean is not module.mean
    assert half.head.weight is half.embed.weight
    assert half.head.weight.dtype == half.mean.dtype == torch.bfloat16
    assert half.table.dtype == module.head.weight.dtype == torch.float32
    assert weight_bytes(half) == 8 * 4 * 2 + 4 * 2 + 4 * 4


def test_codes_take_inputs_of_any_dimensions() -> None:
    module, x = Wide(), torch.randn(2, 3, 128)
    for scheme, bound in (("int8", 0.01), ("int4-g128", 0.15)):
        changed = build(module, ModuleForm(scheme=scheme), Example((x,), {}))
        rows: list[torch.Size] = []
        changed.module.first.inner.register_forward_pre_hook(
            lambda _, given, rows=rows: rows.append(given[0].shape)
        )
        changed(x)
        assert rows == [torch.Size([6, 128])]  # the kernels take rows
        assert {type(part).__name__ for part in changed.module.children()} == {"CodedLinear"}
        error = (changed(x) - module(x)).norm() / module(x).norm()
        assert 0 < error < bound, scheme
    assert not linears.replaceable(
        nn.Linear(8, 8), parse_scheme("int8")
    )  # too small to be worth it
    assert linears.largest_group(nn.Linear(96, 8)) == 32
    assert linears.largest_group(nn.Linear(65, 8)) is None


def test_an_encoder_layer_with_codes_reads_no_plain_weights() -> None:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
    x = torch.randn(2, 5, 64)
    changed = build(layer, ModuleForm(grad=False, scheme="int8"), Example((x,), {}))
    with torch.no_grad():
        torch.testing.assert_close(changed(x).clone(), layer(x), rtol=0.02, atol=0.05)
    assert type(layer.linear1) is nn.Linear
    assert layer.activation_relu_or_gelu == 1


def test_tf32_is_put_back() -> None:
    def known() -> tuple[str, str]:
        cudnn: Any = torch.backends.cudnn
        return torch.backends.cuda.matmul.fp32_precision, cudnn.conv.fp32_precision

    def inside() -> None:
        with tf32():
            seen.append(known())
            raise KeyError

    before, seen = known(), list[tuple[str, str]]()
    with pytest.raises(KeyError):
        inside()
    assert seen == [("tf32", "tf32")]
    assert known() == before


# Outputs.


def test_differences_of_nested_outputs() -> None:
    class Pair(NamedTuple):
        a: Tensor
        b: Any

    @dataclass
    class Held:
        logits: Tensor
        more: dict[str, Any]

    def made(shift: float, flip: bool = False) -> Any:
        ids = torch.tensor([1, 2, 3, 5 if flip else 4])
        return Held(torch.eye(4) + shift, {"pair": Pair(torch.ones(3), [ids, None, "x"])})

    same = difference(made(0.0), made(0.0), OutputBounds())
    assert (same.relative_error, same.changed_share, same.mean_kl, same.num_tensors) == (0, 0, 0, 3)
    assert same.cosine == pytest.approx(1.0)
    shifted = difference(made(0.0), made(0.1), OutputBounds(max_error=0.3, max_kl=1e-6))
    assert shifted.relative_error == pytest.approx(0.1 * 4 / 2)
    assert shifted.mean_kl == pytest.approx(0.0, abs=1e-12)  # softmax does not see a shift
    assert shifted.problem is None
    flipped = difference(made(0.0), made(0.0, flip=True), OutputBounds())
    assert flipped.changed_share == 0.25
    assert flipped.problem == "25.00% of outputs changed, allowed is 2.00%"


def test_kl_is_that_of_the_definition() -> None:
    p = torch.tensor([[0.5, 0.5], [0.5, 0.5]]).log()
    q = torch.tensor([[0.9, 0.1], [0.5, 0.5]]).log()
    expected = 0.5 * (0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1))
    result = difference(p, q, OutputBounds(max_error=10.0, max_kl=0.1))
    assert result.mean_kl == pytest.approx(expected, rel=1e-5)
    assert result.problem is not None
    assert result.problem.startswith("mean KL is 0.26, allowed is 0.1")
    assert difference(p, q, OutputBounds(max_error=10.0)).mean_kl is None  # not said to be logits


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (torch.tensor([1.0, torch.nan]), "is NaN or infinite where the original is not"),
        (torch.tensor([1.0, torch.inf]), "is NaN or infinite"),
        (torch.ones(3), "has the shape (3,), not (2,)"),
        ((torch.ones(2),), "another structure"),
        (None, "the output is a NoneType, not a Tensor"),
        (-torch.ones(2), "relative error is 2, allowed is 0.02"),
    ],
)
def test_outputs_that_are_wrong_are_seen(changed: Any, words: str) -> None:
    result = difference(torch.ones(2), changed, OutputBounds())
    assert result.problem is not None
    assert words in result.problem


def test_infinities_of_the_original_may_stay() -> None:
    masked = torch.tensor([[0.0, -torch.inf], [1.0, 2.0]])
    assert difference(masked, masked.clone(), OutputBounds()).problem is None
    assert difference(masked, -masked, OutputBounds()).problem is not None
