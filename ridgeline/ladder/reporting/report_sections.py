"""The sections of a climb's report: each takes the climb and returns what stands on the page, or
None where there is nothing to show. Drawings come from profiling/drawing, words from summary.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ridgeline.hardware.units import human, human_bytes, percent
from ridgeline.ladder.outcome import RoofPoint, RungOutcome, Side, Speedup
from ridgeline.ladder.reporting import summary
from ridgeline.ladder.reporting.losses_section import losses_section
from ridgeline.ladder.reporting.result import Climb, rate
from ridgeline.profiling.drawing import (
    Bar,
    BarPart,
    Column,
    Dot,
    Interval,
    Markup,
    Rise,
    Roofs,
    Section,
    Series,
    WaterfallStep,
    curves,
    element,
    intervals,
    join,
    roofline,
    stacked_bars,
    table,
    waterfall,
)

SIDES = ("before", "after")


def ladder_section(climb: Climb) -> Section | None:
    """From the plain loop to the answer: what each change is worth."""
    if not climb.ladder:
        return None
    plain = "fp32, one request, every op by its reference"
    if climb.is_training:
        plain = "fp32, one sequence at a time, autograd and torch's own AdamW"
    intro = (
        f"From the plain loop ({plain}) to the answer, one "
        "change after the other. Those with an achieved gain were measured in the time that was "
        "left; the others are predictions, and what follows begins where they end."
    )
    steps = [step_of(rung) for rung in climb.ladder]
    drawn = waterfall(steps, total=rise_of(climb.plain), total_name=summary.OVER_PLAIN)
    return Section("ladder", "The ladder", drawn, intro)


def moves_section(climb: Climb) -> Section:
    rungs = summary.measured(climb)
    name, title = ("moves", "What was tried") if climb.ladder else ("ladder", "The ladder")
    if not rungs:
        body = element("p", "No change was measured.", class_="soft")
        return Section(name, title, body)
    text = summary.predictions_in_words(climb)
    intro = (
        "Each bar starts where the last kept change ended. Gains were predicted from the roofline "
        "before the run, then measured in interleaved rounds. "
    )
    return Section(
        name,
        title,
        waterfall([step_of(rung) for rung in rungs], total=rise_of(climb.total)),
        join([intro, element("b", f"{text}.") if text else None]),
    )


def rise_of(speedup: Speedup | None) -> Rise | None:
    return None if speedup is None else Rise(speedup.value, speedup.low, speedup.high)


def step_of(rung: RungOutcome) -> WaterfallStep:
    """A row of the waterfall."""
    text, came = rung.predicted, rung.achieved
    return WaterfallStep(
        rung.title,
        rung.area,
        rung.status,
        rung.status == "kept",
        None if text is None else Rise(text.speedup, text.low, text.high),
        None if came is None else Rise(came.value, came.low, came.high),
        _detail(rung),
    )


def _detail(rung: RungOutcome) -> Markup:
    lines = [rung.reason]
    if rung.predicted is not None:
        lines.append(f"Predicted from: {rung.predicted.why}")
    if rung.edit:
        lines.append(f"Recipe: {summary.edit_in_words(rung)}")
    if rung.achieved is not None:
        lines.append(f"{len(rung.achieved.after)} rounds, {summary.duration(rung.seconds)}")
    return join(element("p", line) for line in lines if line)


def roofline_section(climb: Climb) -> Section | None:
    if climb.is_training:  # `profile --train` places a step's parts
        return None
    roofs = roofs_of(climb)
    text = "" if roofs is None else f" Limits are {roofs.source}."
    intro = (
        "Left of the ridge memory bandwidth is the limit, right of it the matrix units. Hollow "
        f"marks are before, filled ones after.{text}"
    )
    return Section(
        "roofline", "Roofline, before and after", roofline(roof_dots(climb), roofs), intro
    )


def roofs_of(climb: Climb) -> Roofs | None:
    """None where a ceiling is unknown."""
    if climb.bandwidth is None or not climb.matrix_rates:
        return None
    source = {"measured": "measured here", "datasheet": "from the datasheet"}
    words = source.get(climb.bandwidth_source or "", climb.bandwidth_source or "given")
    return Roofs(climb.bandwidth, climb.matrix_rates, words)


def roof_dots(climb: Climb) -> list[Dot]:
    return [
        dot
        for name, side in _sides(climb)
        for dot in _dots(side, is_before=name == "before", others=climb.after.roof)
    ]


def _dots(side: Side, *, is_before: bool, others: tuple[RoofPoint, ...]) -> list[Dot]:
    return [
        Dot(
            point.label, point.flops_per_byte, point.flops_per_s,
            f"{percent(point.share)} of the {_ceiling(point)}",
            series=_phase(point), hollow=is_before,
            after=_same_phase(point, others) if is_before else None,
        )
        for point in side.roof
    ]  # fmt: skip


def _ceiling(point: RoofPoint) -> str:
    return "bandwidth" if point.bound == "memory" else "matrix rate"


def _phase(point: RoofPoint) -> int:
    return 1 if "prefill" in point.label else 0


def _same_phase(point: RoofPoint, others: tuple[RoofPoint, ...]) -> str | None:
    """Labels are "decode, before" and "decode, after"."""
    phase = point.label.partition(",")[0]
    return next((each.label for each in others if each.label.partition(",")[0] == phase), None)


def curves_section(climb: Climb) -> Section | None:
    if not climb.before.curve and not climb.after.curve:
        return None
    speed = curves(
        _series(climb, "output_tokens_per_s"), "Throughput", "batch", "output tokens/s",
        read=rate,
    )  # fmt: skip
    wait = curves(
        _series(climb, "per_output_token_s"), "Latency", "batch", "per output token",
        read=lambda value: human(value, "s"),
    )  # fmt: skip
    intro = "Throughput and latency by the number of requests that run at once."
    return Section("batch", "Over the batch", element("div", speed, wait, class_="pair"), intro)


def _series(climb: Climb, key: str) -> list[Series]:
    return [
        Series(
            name, [(point.batch, getattr(point, key)) for point in side.curve],
            series=SIDES.index(name) ^ 1, hollow=name == "before",
        )
        for name, side in _sides(climb)
        if side.curve
    ]  # fmt: skip


def memory_section(climb: Climb) -> Section | None:
    bars = memory_bars(climb)
    if not bars:
        return None
    body = stacked_bars(bars, lambda value: human_bytes(round(value)), whole="in all")
    return Section("memory", "Memory plan", body, "How the device memory is used, by the plan.")


def memory_bars(climb: Climb) -> list[Bar]:
    return [
        Bar(name, [BarPart(item.name, item.num_bytes, item.meaning) for item in side.memory])
        for name, side in _sides(climb)
        if side.memory
    ]


def quality_section(climb: Climb) -> Section:
    if climb.is_training:
        return losses_section(climb)
    rungs = [rung for rung in climb.rungs if rung.quality is not None]
    if any(rung.difference is not None for rung in climb.rungs):
        return _differences_section(climb)
    if not rungs:
        words = summary.no_quality(climb)
        return Section("quality", "Quality", element("p", words, class_="soft"))
    body = join(
        [
            _interval_figure(climb, rungs, "mean_kl", "max_kl", "Mean KL divergence, nats a token",
                             lambda value: f"{value:.3g}"),
            _interval_figure(climb, rungs, "ppl_increase", "max_ppl_increase",
                             "Perplexity increase", _signed),
            _tasks(rungs),
        ]
    )  # fmt: skip
    intro = "Compared with the unmodified model, each change measured on the path it runs on."
    return Section("quality", "Quality", body, intro)


def _differences_section(climb: Climb) -> Section:
    """Of a module, whose outputs are compared."""
    rows: list[list[Markup | str]] = [
        [rung.title, f"{rung.difference.relative_error:.2e}", f"{rung.difference.cosine:.6f}",
         f"{rung.difference.changed_share:.2%}",
         summary.NONE if rung.difference.mean_kl is None else f"{rung.difference.mean_kl:.3g}",
         rung.difference.problem or "inside the bound"]
        for rung in climb.rungs
        if rung.difference is not None
    ]  # fmt: skip
    names = ("relative error", "cosine", "changed", "mean KL")
    columns = (Column("change"), *(Column(name, True) for name in names), Column("bound"))
    intro = "Outputs against the original module's, on the inputs given; the worst tensor."
    return Section("quality", "Outputs", table(columns, rows, "Differences"), intro)


def _interval_figure(
    climb: Climb,
    rungs: list[RungOutcome],
    key: str,
    bound: str,
    title: str,
    read: Callable[[float], str],
) -> Markup:
    rows = [
        Interval(
            rung.title, getattr(rung.quality, key), getattr(rung.quality, f"{key}_low"),
            getattr(rung.quality, f"{key}_high"), _measured_on(rung), _is_outside(rung),
        )
        for rung in rungs
    ]  # fmt: skip
    return intervals(rows, title, read=read, bound=climb.bounds.get(bound))


def _measured_on(rung: RungOutcome) -> str:
    assert rung.quality is not None
    return f"{rung.status}, {rung.quality.num_tokens:,} tokens"


def _is_outside(rung: RungOutcome) -> bool:
    return rung.quality is not None and rung.quality.problem is not None


def _tasks(rungs: list[RungOutcome]) -> Markup | None:
    result: list[list[Markup | str]] = [
        [rung.title, rung.quality.task, _score(rung.quality.task_score_before),
         _score(rung.quality.task_score)]
        for rung in rungs
        if rung.quality is not None and rung.quality.task is not None
    ]  # fmt: skip
    if not result:
        return None
    columns = (Column("change"), Column("task"), Column("before", True), Column("after", True))
    return table(columns, result, "Task scores", shows_caption=True)


def _score(value: float | None) -> str:
    return summary.NONE if value is None else f"{value:.1%}"


def dropped_section(climb: Climb) -> Section:
    rungs = summary.not_kept(climb)
    if not rungs:
        words = "Every change was kept." if climb.rungs else "No change was tried."
        body = element("p", words, class_="soft")
        return Section("dropped", "What was dropped, and why", body)
    apply = [rung for rung in rungs if rung.status != "not applicable"]
    others = [rung for rung in rungs if rung.status == "not applicable"]
    body = join([_reasons(apply) if apply else None, _folded(others) if others else None])
    return Section("dropped", "What was dropped, and why", body)


def _reasons(rungs: Sequence[RungOutcome]) -> Markup:
    items = [
        element(
            "li",
            element("div", element("b", rung.title), element("small", rung.area, class_="soft")),
            _word(rung),
            element("p", rung.reason),
        )
        for rung in rungs
    ]
    return element("ul", *items, class_="reasons")


def _folded(rungs: Sequence[RungOutcome]) -> Markup:
    """What does not apply is there for who asks."""
    count = "1 change does" if len(rungs) == 1 else f"{len(rungs)} changes do"
    head = element("summary", f"{count} not apply here; nothing was run for them")
    return element("details", head, _reasons(rungs), class_="folded")


def _word(rung: RungOutcome) -> Markup:
    look = f"outcome {rung.status.replace(' ', '-')}"
    return element("span", rung.status, class_=look)


def repeat_section(climb: Climb) -> Section:
    parts = [_command("Repeat this run", climb.command)]
    if climb.serve_command:
        word = "Serves" if "serve" in climb.serve_command else "Runs"
        parts.append(_command(f"{word} the result", climb.serve_command))
    changed: list[list[Markup | str]] = [
        [element("code", row.name), row.before, row.after] for row in summary.changed_fields(climb)
    ]
    if changed:
        columns = (Column("field"), Column("before"), Column("after"))
        parts.append(element("h3", "What changed in the recipe"))
        parts.append(table(columns, changed, "Fields of the recipe that changed"))
    parts.append(_circumstances(climb))
    return Section("repeat", "Repeat it", join(parts))


def _command(name: str, command: tuple[str, ...]) -> Markup:
    code = element("code", summary.shell(command))
    return element("p", name, class_="command-name") + element("div", code, class_="command")


def _circumstances(climb: Climb) -> Markup:
    hardware = climb.hardware
    rows = {
        "device": summary.device_in_words(hardware),
        "architecture": hardware.get("architecture"),
        "memory": _bytes(hardware.get("memory_bytes")),
        "driver": hardware.get("driver"),
        "memory bandwidth": _ceiling_text(climb),
        "workload": climb.workload,
        "goal": climb.goal,
        "bounds": summary.bounds_in_words(climb),
        "measured": f"{summary.when(climb)}, in {summary.duration(climb.seconds)}",
    }
    lists = [_facts("Setup", rows)]
    if times_spent := summary.time_rows(climb):
        spent = {name: summary.duration(seconds) for name, seconds in times_spent}
        lists.append(_facts("Where the time went", spent))
    if climb.versions:
        lists.append(_facts("Versions", climb.versions))
    return element("div", *lists, class_="pair")


def _facts(title: str, rows: Mapping[str, object]) -> Markup:
    known = [(name, value) for name, value in rows.items() if value]
    pairs = [element("dt", name) + element("dd", str(value)) for name, value in known]
    return element("div", element("h3", title), element("dl", *pairs, class_="facts-list"))


def _signed(share: float) -> str:
    text = f"{100 * share:+.3g}%" if share else "0%"
    return text.replace("-", "−")


def _bytes(value: object) -> str:
    return human_bytes(value) if isinstance(value, int) and value > 0 else ""


def _ceiling_text(climb: Climb) -> str:
    if climb.bandwidth is None:
        return "unknown"
    return f"{human(climb.bandwidth, 'B/s')}, {climb.bandwidth_source or 'source unknown'}"


def _sides(climb: Climb) -> tuple[tuple[str, Side], ...]:
    return (("before", climb.before), ("after", climb.after))
