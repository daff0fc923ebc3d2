"""The sweep over widths: the same network at two widths or more, at each the same rates and seeds,
short runs in memory. Heads keep their size, so that a wider network has more of them; the MLP keeps
its ratio. Batches are swept at equal tokens.

    runs = sweep_widths(config, WidthOptions((64, 128)), device="cpu")
    transfer_of(runs)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from ridgeline.errors import UsageError
from ridgeline.models.shapes import describe_shape, shape_name
from ridgeline.progress import Progress
from ridgeline.training.config import RunLength, TrainConfig
from ridgeline.training.prepare import PlannedRun
from ridgeline.tuning.scaling.sweep_runs import SweepKey, SweepRuns
from ridgeline.tuning.scaling.transfer import SweepRun
from ridgeline.tuning.short_run import ShortRun, num_steps, plan_short

GIVEN_UP = 2.0  # times the first loss: it has diverged
LEAST_RATES, LEAST_SEEDS, LEAST_WIDTHS = 4, 2, 2


@dataclass(frozen=True)
class WidthOptions:
    widths: tuple[int, ...]
    batches: tuple[int, ...] = ()  # none: the config's own
    low: float = 1e-4
    high: float = 1e-1
    num_rates: int = 7
    seeds: int = 3

    def __post_init__(self) -> None:
        if len(set(self.widths)) < max(LEAST_WIDTHS, len(self.widths)):
            words = ",".join(map(str, self.widths))
            raise UsageError(f"--widths is {words}; give two or more that differ, such as 64,128")
        if len(set(self.batches)) < len(self.batches):
            raise UsageError("--batches has one of them twice; give each once")
        if not (0 < self.low < self.high < math.inf):
            raise UsageError(
                f"--range is {self.low:g}..{self.high:g}; give two rates above zero, the smaller "
                "one first"
            )
        if self.num_rates < LEAST_RATES:
            raise UsageError(f"--rates is {self.num_rates}; give at least {LEAST_RATES}")
        if self.seeds < LEAST_SEEDS:
            raise UsageError(f"--seeds is {self.seeds}, which gives no interval; give at least 2")

    @property
    def rates(self) -> list[float]:
        ratio = self.high / self.low
        powers = [step / (self.num_rates - 1) for step in range(self.num_rates)]
        return [float(f"{self.low * ratio**power:.4g}") for power in powers]


def wider(base: str, width: int) -> str:
    """The shape at a width: heads of the same size, an MLP of the same ratio."""
    config = describe_shape(base).config
    heads, rest = divmod(width * config.num_heads, config.hidden_size)
    if rest or not heads:
        step = config.hidden_size // math.gcd(config.hidden_size, config.num_heads)
        raise UsageError(
            f"a width of {width} leaves no whole number of heads of {config.head_dim}, as {base} "
            f"has them; give multiples of {step}"
        )
    mlp = round(config.mlp_size / config.hidden_size * width)
    name = shape_name(base, {"width": width, "heads": heads, "mlp": mlp})
    describe_shape(name)
    return name


def at_width(config: TrainConfig, width: int, batch: int | None = None) -> TrainConfig:
    """The run at a width, and at a batch with as many tokens as the run's own."""
    assert config.shape is not None, "check_sweep"
    result = replace(config, shape=wider(config.shape, width))
    if batch is None or batch == config.batch.size:
        return result
    steps = max(1, round(num_steps(config) * config.batch.size / batch))
    options = replace(config.batch, sequences=batch, micro=None)
    return replace(result, batch=options, end=RunLength(steps=steps))


def check_sweep(config: TrainConfig, options: WidthOptions) -> None:
    """Before anything is run."""
    if config.shape is None:
        raise UsageError("widths are of a network with random weights; give --shape, no model")
    if config.data.held_out == 0:
        raise UsageError("--held-out is 0: rates are judged by held-out loss; give a share")
    if not config.end.is_given:
        raise UsageError("how long is a run? give --steps or --tokens")
    for width in options.widths:
        wider(config.shape, width)


def sweep_widths(
    config: TrainConfig,
    options: WidthOptions,
    *,
    device: str = "auto",
    progress: Progress | None = None,
    finished: SweepRuns | None = None,
) -> list[SweepRun]:
    """Runs that are `finished` are not done again, and others are noted there."""
    check_sweep(config, options)
    finished = finished or SweepRuns()
    runs, rates, batches = list[SweepRun](), options.rates, options.batches or (config.batch.size,)
    total = len(options.widths) * len(batches) * len(rates) * options.seeds
    for width in options.widths:
        for batch in batches:
            plan = plan_short(at_width(config, width, batch), device=device, progress=progress)
            for lr in rates:
                for seed in range(config.seed, config.seed + options.seeds):
                    if progress is not None:
                        progress("runs of the sweep", len(runs), total)
                    loss = finished.loss_of(
                        SweepKey(width, batch, lr, seed), partial(final_loss, plan, lr, seed)
                    )
                    runs.append(SweepRun(width, batch, lr, seed, loss))
    return runs


def final_loss(plan: PlannedRun, lr: float, seed: int) -> float:
    """Held out, of a whole run; inf where it diverged."""
    optimizer = replace(plan.config.optimizer, lr=lr)
    plan = replace(plan, config=replace(plan.config, optimizer=optimizer))
    steps, first = num_steps(plan.config), math.inf
    with ShortRun(plan, seed) as run:
        for number in range(steps):
            loss = run.scheduled_step(steps)
            first = loss if number == 0 else first
            if not loss < GIVEN_UP * first:
                return math.inf
        held_out = run.held_out_loss()
    assert held_out is not None, "check_sweep"
    return held_out if math.isfinite(held_out) else math.inf


RateOf = Callable[[int], float]  # the learning rate of a width
