"""Methods on single matrices: what each promises, against references and exact cases."""

from __future__ import annotations

import pytest
import torch
from calibrated import correlated, random_weight, statistics_of

from ridgeline.errors import NumericsError, UsageError
from ridgeline.quantization.methods import (
    Awq,
    Gptq,
    Rtn,
    SmoothQuant,
    SparseGpt,
    Wanda,
    compensation,
    parse_sparsity,
)
from ridgeline.quantization.methods.rtn import find_clipped_grid
from ridgeline.quantization.scheme import Codes, decode, encode, find_grid, parse_scheme
from ridgeline.quantization.statistics import SILENT_DB, error_db

SCHEMES = ["int8", "int4-g32", "int4-g32-asym", "fp8", "fp8-tensor", "fp8-block"]


def codes_of(made: Codes | torch.Tensor) -> Codes:
    assert isinstance(made, Codes)
    return made


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("method", [Gptq(), Gptq(act_order=False), Gptq(clip=False)], ids=repr)
def test_gptq_beats_rounding_on_correlated_inputs(name: str, method: Gptq) -> None:
    scheme, weight_OD = parse_scheme(name), random_weight(128, 256)
    statistics = statistics_of(correlated(1024, 256))
    errors = []
    for used in (Rtn(), method):
        codes = codes_of(used.apply(weight_OD, statistics, scheme))
        errors.append(error_db(weight_OD, decode(codes, scheme), statistics, None))
    assert errors[1] < errors[0] - 2.0


def test_gptq_is_the_greedy_optimum_column_by_column() -> None:
    """Against the definition in float64: after each column the inverse loses that column."""
    scheme, weight_OD = parse_scheme("int8"), random_weight(6, 40)
    statistics = statistics_of(correlated(200, 40))
    grid = find_grid(weight_OD, scheme)
    hessian = statistics.hessian_DD.double()
    inverse = torch.linalg.inv(hessian + 0.01 * hessian.diagonal().mean() * torch.eye(40))
    left = weight_OD.double().clone()
    expected = torch.empty(6, 40)
    for column in range(40):
        codes = torch.floor(left[:, 0] / grid.scale[:, 0] + 0.5).clamp(-127, 127)
        expected[:, column] = codes
        error = (left[:, 0] - codes * grid.scale[:, 0]) / inverse[0, 0]
        left = (left - error[:, None] * inverse[0])[:, 1:]
        inverse = (inverse - inverse[:, :1] @ inverse[:1] / inverse[0, 0])[1:, 1:]
    method = Gptq(act_order=False, clip=False)
    made = codes_of(method.apply(weight_OD, statistics, scheme)).values.float()
    assert (made == expected).float().mean() > 0.99  # fp32 may tip a tie
    assert (made - expected).abs().max() <= 1
    rounded = encode(weight_OD, grid, scheme).values.float()
    assert (rounded == expected).float().mean() < 0.9  # rounding alone is something else


def test_blocks_of_the_sweep_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    scheme, weight_OD = parse_scheme("int4-g32"), random_weight(16, 96)
    statistics = statistics_of(correlated(300, 96))
    whole = codes_of(Gptq().apply(weight_OD, statistics, scheme))
    monkeypatch.setattr(compensation, "BLOCK_COLUMNS", 32)
    parts = codes_of(Gptq().apply(weight_OD, statistics, scheme))
    assert (whole.values == parts.values).float().mean() > 0.99


def test_act_order_is_the_sweep_over_sorted_columns() -> None:
    scheme, weight_OD = parse_scheme("int8"), random_weight(8, 64)
    x_TD = correlated(300, 64)
    order = statistics_of(x_TD).hessian_DD.diagonal().argsort(descending=True)
    sorted_codes = codes_of(
        Gptq(act_order=False).apply(weight_OD[:, order], statistics_of(x_TD[:, order]), scheme)
    )
    codes = codes_of(Gptq().apply(weight_OD, statistics_of(x_TD), scheme))
    assert (codes.values[:, order] == sorted_codes.values).float().mean() > 0.98
    assert not torch.equal(order, torch.arange(64))


@pytest.mark.parametrize("name", SCHEMES)
def test_what_can_be_met_exactly_is(name: str) -> None:
    """Weights that lie on their grid stay, whatever the method; inputs that do not go together
    leave nothing to make up for.
    """
    scheme = parse_scheme(name)
    statistics = statistics_of(correlated(500, 128))
    weight_OD = random_weight(128, 128)
    exact = decode(encode(weight_OD, find_grid(weight_OD, scheme), scheme), scheme)
    codes = codes_of(Gptq(clip=False).apply(exact, statistics, scheme))
    if scheme.symmetric and scheme.weight != "int4":  # whose largest weight may move the grid
        assert error_db(exact, decode(codes, scheme), statistics, None) < -100
    apart = statistics_of(3.0 * torch.eye(128))
    made = codes_of(Gptq(clip=False).apply(weight_OD, apart, scheme)).values
    rounded = codes_of(Rtn().apply(weight_OD, apart, scheme)).values
    assert torch.equal(made.float(), rounded.float())


@pytest.mark.parametrize("name", ["int8", "int4-g32", "int4-g32-asym", "fp8-tensor"])
def test_clipping_lowers_the_error_of_every_part(name: str) -> None:
    scheme, weight_OD = parse_scheme(name), random_weight(32, 128) ** 3
    plain, clipped = find_grid(weight_OD, scheme), find_clipped_grid(weight_OD, scheme)
    errors = [
        (decode(encode(weight_OD, grid, scheme), scheme) - weight_OD).square().sum()
        for grid in (plain, clipped)
    ]
    assert errors[1] <= errors[0]
    if scheme.weight == "int4":
        assert errors[1] < 0.95 * errors[0]


def test_importance_decides_what_is_clipped() -> None:
    """A large weight that meets no input is given up."""
    scheme = parse_scheme("int4-g32")
    weight_OD = random_weight(4, 32) * 0.1
    weight_OD[:, 0] = 1.0
    importance = torch.ones(32)
    importance[0] = 0.0
    assert find_clipped_grid(weight_OD, scheme, importance).scale.max() < 0.7 * 1.0 / 7.5
    importance[0] = 100.0
    assert find_clipped_grid(weight_OD, scheme, importance).scale.min() > 0.9 * 1.0 / 7.5


@pytest.mark.parametrize("method", [SparseGpt(), Wanda()], ids=repr)
@pytest.mark.parametrize("name", [None, "int4-g32", "int4-g32-asym", "fp8"])
def test_two_of_four_are_zero(method: SparseGpt | Wanda, name: str | None) -> None:
    scheme = None if name is None else parse_scheme(name)
    made = method.apply(random_weight(24, 160), statistics_of(correlated(400, 160)), scheme)
    kept = made if scheme is None else decode(codes_of(made), scheme)
    zeros = (kept.view(24, 40, 4) == 0).sum(-1)
    assert (zeros >= 2).all()
    assert (zeros == 2).float().mean() > (0.9 if scheme is None else 0.4)
    bare = method.without_data(random_weight(24, 160), None)
    assert isinstance(bare, torch.Tensor)
    assert ((bare.view(24, 40, 4) == 0).sum(-1) == 2).all()


@pytest.mark.parametrize("sparsity", ["2:4", "0.5", "0.3"])
def test_sparsegpt_makes_up_for_what_goes(sparsity: str) -> None:
    asked = parse_sparsity(sparsity)
    weight_OD, statistics = random_weight(48, 256), statistics_of(correlated(1024, 256))
    errors = []
    for method in (Wanda(asked), SparseGpt(asked)):
        kept = method.apply(weight_OD, statistics, None)
        assert isinstance(kept, torch.Tensor)
        assert (kept == 0).float().mean() == pytest.approx(asked.share, abs=0.003)
        errors.append(error_db(weight_OD, kept, statistics, None))
    assert errors[1] < errors[0] - 2.0


def test_wanda_by_hand() -> None:
    weight_OD = torch.tensor([[1.0, -2.0, 3.0, 4.0], [4.0, 3.0, 2.0, -1.0]])
    statistics = statistics_of(torch.diag(torch.tensor([10.0, 1.0, 1.0, 1.0])))
    kept = Wanda().apply(weight_OD, statistics, None)
    assert isinstance(kept, torch.Tensor)
    assert kept.tolist() == [[1.0, 0.0, 0.0, 4.0], [4.0, 3.0, 0.0, 0.0]]


def test_silent_inputs_and_few_tokens_can_be_swept() -> None:
    """Channels that are always zero, and fewer tokens than columns."""
    scheme, weight_OD = parse_scheme("int4-g32"), random_weight(8, 64)
    x_TD = correlated(10, 64)
    x_TD[:, 5] = 0.0
    codes = codes_of(Gptq(clip=False).apply(weight_OD, statistics_of(x_TD), scheme))
    rounded = encode(weight_OD, find_grid(weight_OD, scheme), scheme)
    assert torch.equal(codes.values[:, 5], rounded.values[:, 5])
    with pytest.raises(NumericsError, match="more calibration text"):
        compensation.inverse_factor(torch.full((4, 4), float("nan")), 0.01)


def test_the_error_is_that_of_the_outputs() -> None:
    x_TD, weight_OD = correlated(100, 32), random_weight(8, 32)
    changed = weight_OD + 0.01 * random_weight(8, 32, seed=2)
    right, wrong = (x_TD.double() @ w.double().t() for w in (weight_OD, changed))
    expected = 10 * torch.log10((wrong - right).square().sum() / right.square().sum())
    statistics = statistics_of(x_TD)
    assert error_db(weight_OD, changed, statistics, None) == pytest.approx(
        float(expected), abs=0.01
    )
    assert error_db(weight_OD, weight_OD, statistics, None) == SILENT_DB
    rounding = error_db(weight_OD, weight_OD, statistics, parse_scheme("w8a8-int8"))
    assert -60 < rounding < -20  # the inputs are rounded where the scheme says so


@pytest.mark.parametrize(
    "make",
    [
        lambda: Gptq(damping=0.0),
        lambda: Awq(points=0),
        lambda: SmoothQuant(alpha=1.5),
        lambda: parse_sparsity("3:4"),
        lambda: parse_sparsity("1.5"),
        lambda: parse_sparsity("half"),
    ],
)
def test_options_that_make_no_sense(make: object) -> None:
    assert callable(make)
    with pytest.raises(UsageError):
        make()
