"""Service levels and a peer's figures in words, the same for the page, the terminal and climb.json.

levels_headline(climb.levels)   # "Holds 3.1 requests/s within TTFT 500 ms …"
"""

from __future__ import annotations

from typing import NamedTuple

from ridgeline.bench.serve.bound import LatencyBound
from ridgeline.hardware.units import human
from ridgeline.ladder.outcome import Figures, HeldRate, PeerFigures, RateProof, ServiceLevels
from ridgeline.profiling.drawing import times

DEFAULTS = "the defaults"
NONE = "–"
LEVEL_COLUMNS = (
    "", "holds", "not", "shown", "within", "first token p50, p99", "per token p50, p99",
)  # fmt: skip


class LevelRow(NamedTuple):
    """One recipe in the table of service levels, as text."""

    name: str
    searched: str  # the highest rate that was held
    failed: str  # the lowest that was not
    proved: str  # at which rate, for how long
    kept: str  # share of requests inside the bound
    first_token: str  # p50 and p99
    per_token: str


def levels_headline(levels: ServiceLevels) -> str:
    bound, chosen = bound_words(levels.bound), levels.of(levels.chosen)
    if chosen is None:
        return f"No rate was found that keeps {bound}"
    rate = levels.rate_of(chosen)
    if rate is None:
        assert chosen.proof is not None, "what has no rate was not proved"
        return (
            f"No rate was proved within {bound}: at {chosen.proof.rate:.3g} requests/s "
            f"{chosen.proof.share:.0%} of requests keep it"
        )
    shown = "not shown in a longer run"
    if chosen.proof is not None:
        shown = f"{chosen.proof.seconds:.0f} s shown"
    least = "" if chosen.failed_rate is not None else "at least "  # no higher one was tried
    return f"Holds {least}{rate:.3g} requests/s within {bound} ({shown}){defaults_words(levels)}"


def defaults_words(levels: ServiceLevels) -> str:
    defaults = levels.of(DEFAULTS)
    if defaults is None:
        return ""
    if levels.chosen == DEFAULTS:
        return ", with the defaults"
    rate = levels.rate_of(defaults)
    return "; the defaults none" if rate is None else f"; the defaults {rate:.3g}"


def bound_words(bound: LatencyBound) -> str:
    """`TTFT 500 ms and TPOT 50 ms`."""
    named = (("TTFT", bound.ttft_s), ("TPOT", bound.tpot_s))
    return " and ".join(f"{name} {1000 * value:g} ms" for name, value in named if value is not None)


def level_rows(levels: ServiceLevels) -> list[LevelRow]:
    return [_row(held) for held in levels.tried]


def _row(held: HeldRate) -> LevelRow:
    proof = held.proof
    if proof is None:
        proved, kept, first, later = NONE, NONE, NONE, NONE
    else:
        proved = f"{_rate(proof.rate)} for {proof.seconds:.0f} s"
        kept = f"{proof.num_kept} of {proof.num_requests} ({proof.share:.1%})"
        first = _times(proof, "first_token")
        later = _times(proof, "per_token")
    return LevelRow(
        held.name, _rate(held.rate), _rate(held.failed_rate), proved, kept, first, later
    )


def _rate(rate: float | None) -> str:
    return NONE if rate is None else f"{rate:.3g}/s"


def _times(proof: RateProof, name: str) -> str:
    middle, high = (getattr(proof, f"{name}_{share}_s") for share in ("p50", "p99"))
    return NONE if middle is None or high is None else f"{human(middle, 's')}, {human(high, 's')}"


def levels_words(levels: ServiceLevels) -> str:
    """How it was measured."""
    return (
        f"The highest rate at which {levels.target:.0%} of requests keep "
        f"{bound_words(levels.bound)}; requests arrive {levels.arrivals}"
    )


def peer_words(peer: PeerFigures, after: Figures, levels: ServiceLevels | None) -> str:
    """`peer at http://…: 812 tokens/s, ours 1.31×`."""
    name = f"peer at {peer.url} ({peer.model})"
    ratio = over_peer(peer, after, levels)
    ours = "" if ratio is None else f", ours {ratio}"
    if peer.rate is not None:
        return f"{name}: {peer.rate:.3g} requests/s within the bound{ours}"
    if peer.output_tokens_per_s is not None:
        return f"{name}: {peer.output_tokens_per_s:,.4g} output tokens/s{ours}"
    return f"{name}: no figure"


def over_peer(peer: PeerFigures, after: Figures, levels: ServiceLevels | None) -> str | None:
    """`1.31×`, by the rate of requests where a bound was given, else by that of tokens."""
    ours: float | None = after.output_tokens_per_s
    theirs = peer.output_tokens_per_s
    if levels is not None:
        chosen = levels.of(levels.chosen)
        ours, theirs = None if chosen is None else levels.rate_of(chosen), peer.rate
    return times(ours / theirs) if ours and theirs else None


def peer_notes(peer: PeerFigures | None) -> list[str]:
    return [] if peer is None else [f"peer: {note}" for note in peer.notes]


def peer_cells(peer: PeerFigures | None) -> dict[str, str]:
    """The peer's figures, by the names of the rows that ours have in `summary.figure_pairs`."""
    if peer is None:
        return {}
    known = {
        "output tokens/s": None
        if peer.output_tokens_per_s is None
        else f"{peer.output_tokens_per_s:,.4g}",
        "to the first token": _seconds(peer.first_token_s),
        "per output token": _seconds(peer.per_output_token_s),
    }
    return {name: text for name, text in known.items() if text is not None}


def _seconds(value: float | None) -> str | None:
    return None if value is None else human(value, "s")
