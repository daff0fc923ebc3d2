"""What `ridgeline explain` says: a term's meaning, this machine's figures, the lesson; and the page
docs/glossary.md.

    term = find_term("prefix sharing")            # by any of its names
    figures(term, measured(detect(), term))       # ["Llama-3.1-8B needs 131 kB a token …"]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ridgeline.errors import UsageError, near_matches
from ridgeline.hardware import Hardware
from ridgeline.hardware.units import human, human_bytes
from ridgeline.learn.source import Lesson, find_lesson
from ridgeline.learn.terms import FIELD, PROJECT, TERMS, GlossaryTerm

MODEL, PARAMETERS, KV_BYTES = "Llama-3.1-8B", 8.03e9, 131_072
DATASHEET_MFU = 0.4  # a usual one, for an example


class FigureKind(NamedTuple):
    needs: tuple[str, ...]  # ceilings
    lines: Callable[[Hardware], list[str]]


def find_term(word: str) -> GlossaryTerm:
    wanted = _plain(word)
    for term in TERMS:
        if wanted in map(_plain, (term.name, *term.also)):
            return term
    names = [_plain(name) for term in TERMS for name in (term.name, *term.also)]
    hint = near_matches(wanted, names)
    raise UsageError(f"{word!r} is not in the glossary{hint} (`ridgeline explain` lists all)")


def lesson_of(term: GlossaryTerm) -> Lesson | None:
    return find_lesson(term.lesson) if term.lesson else None


def needs(term: GlossaryTerm) -> tuple[str, ...]:
    return FIGURES[term.figures].needs if term.figures else ()


def figures(term: GlossaryTerm, hardware: Hardware) -> list[str]:
    """Lines about this machine; one without a ceiling that was needed says so."""
    if not term.figures:
        return []
    missing = [key for key in needs(term) if hardware.ceiling(key) is None]
    if missing:
        reasons = (f"{key}: {hardware.absent.get(key, 'not known')}" for key in missing)
        return [f"not measured here ({'; '.join(reasons)})"]
    return FIGURES[term.figures].lines(hardware)


def _value(hardware: Hardware, key: str) -> float:
    ceiling = hardware.ceiling(key)
    assert ceiling is not None, f"{key} was not checked for"
    return ceiling.value


def _ceilings(hardware: Hardware) -> list[str]:
    return [*_bandwidth(hardware), *_matrix(hardware)]


def _bandwidth(hardware: Hardware) -> list[str]:
    return [f"memory is read at {human(_value(hardware, 'read_bandwidth'), 'B/s')}"]


def _matrix(hardware: Hardware) -> list[str]:
    rates = (
        f"{human(_value(hardware, f'matrix_{name}'), 'FLOP/s')} in {name}"
        for name in ("fp32", "bf16")
    )
    return [f"matrix products: {', '.join(rates)}"]


def _ridge(hardware: Hardware) -> list[str]:
    ridge = _value(hardware, "matrix_bf16") / _value(hardware, "read_bandwidth")
    return [f"the ridge is at {ridge:.0f} FLOP/B in bf16: below it memory is the limit"]


def _free_rows(hardware: Hardware) -> list[str]:
    ridge = _value(hardware, "matrix_bf16") / _value(hardware, "read_bandwidth")
    return [f"up to about {ridge:.0f} rows of bf16 weights the arithmetic hides behind the reading"]


def _decode_limit(hardware: Hardware) -> list[str]:
    bandwidth = _value(hardware, "read_bandwidth")
    rates = (
        f"{bandwidth / (PARAMETERS * bits / 8):,.3g} in {name}"
        for name, bits in (("bf16", 16), ("int4", 4.25))
    )
    return [f"{MODEL}, one request: at most {', '.join(rates)} tokens/s (weights over bandwidth)"]


def _prefill_limit(hardware: Hardware) -> list[str]:
    taken = 2 * PARAMETERS * 1000 / _value(hardware, "matrix_bf16")
    return [
        f"{MODEL}, a prompt of 1,000 tokens: {human(taken, 's')} at least (2 · parameters · tokens "
        "over the rate)"
    ]


def _kv(hardware: Hardware) -> list[str]:
    left = hardware.memory_bytes - 2 * PARAMETERS
    line = f"{MODEL} needs 131 kB of keys and values a token in bf16"
    memory = human_bytes(hardware.memory_bytes)
    if left <= 0:
        return [f"{line}; its weights alone (16 GB) are more than the {memory} here"]
    return [f"{line}: beside its weights {left / KV_BYTES:,.0f} tokens fit into {memory}"]


def _launch(hardware: Hardware) -> list[str]:
    launch = _value(hardware, "eager_launch")
    moved = launch * _value(hardware, "read_bandwidth")
    line = (
        f"a tiny torch operation costs the host {human(launch, 's')}, in which memory could move "
        f"{human(moved, 'B')}"
    )
    graph = hardware.ceilings.get("graph_step")
    return (
        [line]
        if graph is None
        else [line, f"in a replayed graph a kernel takes {human(graph.value, 's')}"]
    )


def _units(hardware: Hardware) -> list[str]:
    if hardware.device_type == "cpu":
        return [f"this is a CPU with {hardware.num_units} cores: it has no SMs and no warps"]
    width = 64 if hardware.device_type == "rocm" else 32
    return [f"{hardware.name}: {hardware.num_units} processors, warps of {width} threads"]


def _mfu(hardware: Hardware) -> list[str]:
    rate = _value(hardware, "matrix_bf16")
    tokens = DATASHEET_MFU * rate / (6 * PARAMETERS)
    return [
        f"100% here is {human(rate, 'FLOP/s')}; {MODEL} at 40% would train {tokens:,.3g} tokens/s "
        "(6 · parameters · tokens)"
    ]


def _h2d(hardware: Hardware) -> list[str]:
    if hardware.device_type == "cpu":
        return ["this is a CPU: there is no copy to a device"]
    rates = (
        f"{human(_value(hardware, f'h2d_{name}'), 'B/s')} {name}" for name in ("pinned", "pageable")
    )
    return [f"host to device: {', '.join(rates)}"]


READ, BF16 = "read_bandwidth", "matrix_bf16"
FIGURES = {
    "ceilings": FigureKind((READ, "matrix_fp32", BF16), _ceilings),
    "bandwidth": FigureKind((READ,), _bandwidth),
    "matrix": FigureKind(("matrix_fp32", BF16), _matrix),
    "ridge": FigureKind((READ, BF16), _ridge),
    "free_rows": FigureKind((READ, BF16), _free_rows),
    "decode_limit": FigureKind((READ,), _decode_limit),
    "prefill_limit": FigureKind((BF16,), _prefill_limit),
    "kv": FigureKind((), _kv),
    "launch": FigureKind(("eager_launch", READ), _launch),
    "units": FigureKind((), _units),
    "mfu": FigureKind((BF16,), _mfu),
    "h2d": FigureKind((), _h2d),
}


def glossary_page() -> str:
    return PAGE.format(project=_table(PROJECT), field=_table(FIELD))


def _table(terms: Sequence[GlossaryTerm]) -> str:
    lines = ["| word | meaning | lesson |", "|---|---|---|"]
    for term in terms:
        lesson = lesson_of(term)
        link = f"[{lesson.number}](learn/{lesson.slug}.md)" if lesson else ""
        others = f" (also: {', '.join(term.also)})" if term.also else ""
        lines.append(f"| {term.name} | {term.meaning}{others} | {link} |")
    return "\n".join(lines)


PAGE = """<!-- made from ridgeline/learn/terms.py by `make learn`: edit that -->
# Glossary

`ridgeline explain page` prints an entry with this machine's figures.

## Words of this project

They mean something particular here.

{project}

## Words of the field

Those that the [course](learn/index.md) uses.

{field}
"""


def _plain(word: str) -> str:
    return " ".join(word.lower().replace("-", " ").replace("_", " ").replace("’", "'").split())
