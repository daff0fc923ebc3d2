"""Stop strings over a stream, however it is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.engine.requests.stop import StopWatcher


def run(stops: tuple[str, ...], pieces: list[str]) -> tuple[str, bool]:
    watcher = StopWatcher(stops)
    shown = "".join(watcher.push(piece) for piece in pieces)
    return shown + watcher.finish(), watcher.stopped


@pytest.mark.smoke
def test_text_before_the_first_stop_is_shown() -> None:
    assert run(("END", "EN1"), ["one E", "ND two END"]) == ("one ", True)
    assert run(("END",), ["one E", "N"]) == ("one EN", False)
    assert run((), ["anything"]) == ("anything", False)


def test_which_stop_string_it_was() -> None:
    watcher = StopWatcher(("two", "END"))
    watcher.push("one E")
    assert watcher.match is None
    watcher.push("ND two")
    assert watcher.match == "END"


def test_nothing_is_held_back_longer_than_needed() -> None:
    watcher = StopWatcher(("abc",))
    assert watcher.push("xab") == "x"
    assert watcher.push("d") == "abd"


TEXT = st.text("ab", max_size=12)


@given(st.lists(TEXT, max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_the_cuts_do_not_matter(pieces: list[str], stops: list[str]) -> None:
    text = "".join(pieces)
    shown, stopped = run(tuple(stops), pieces)
    assert run(tuple(stops), list(text)) == (shown, stopped)
    assert stopped == any(stop in text for stop in stops)
    assert text.startswith(shown)
    assert not any(stop in shown for stop in stops)
    if not stopped:
        assert shown == text
