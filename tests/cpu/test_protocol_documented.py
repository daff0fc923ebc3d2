"""docs/serve.md lists every field of every route: what its tables name is what requests take."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ridgeline.server.protocol import PATHS, ROUTES, Route
from ridgeline.server.protocol.requests.parsing import REQUESTS

PAGE = (Path(__file__).parents[2] / "docs" / "serve.md").read_text()
ANTHROPIC: tuple[Route, ...] = ("messages", "count_tokens")  # in a section of their own


def section(title: str) -> str:
    """The text under a heading, up to the next one."""
    level = title.split()[0]
    start = PAGE.index(f"\n{title}\n")
    end = re.search(rf"\n#{{2,{len(level)}}} ", PAGE[start + 2 :])
    return PAGE[start:] if end is None else PAGE[start : start + 2 + end.start()]


def table_names(text: str) -> set[str]:
    """Fields in the first column of a section's table, and those it says are refused."""
    names: set[str] = set()
    for row in re.findall(r"^\| (.+?) \| (.*) \|$", text, re.MULTILINE):
        first, meaning = row
        names |= set(re.findall(r"`(\w+)`", meaning if first == "refused" else first))
    return names


def accepted(route: Route) -> set[str]:
    """But for those that may only be null."""
    fields = REQUESTS[route].model_fields.items()
    names = {info.alias or name for name, info in fields if info.annotation is not type(None)}
    return names | set(REQUESTS[route].not_done)


@pytest.mark.parametrize("route", [route for route in ROUTES if route not in ANTHROPIC])
def test_the_page_lists_what_a_route_takes(route: Route) -> None:
    own = section(f"### `{PATHS[route]}`")
    groups = re.findall(r"\[([^]]+)\]\(#[\w-]+\)", own)
    names = table_names(own)
    for group in groups:
        names |= table_names(section(f"### {' '.join(group.split()).capitalize()}"))
    assert names == accepted(route)


@pytest.mark.parametrize("route", ANTHROPIC)
def test_the_page_names_what_messages_take(route: Route) -> None:
    named = set(re.findall(r"`(\w+)", section("## Anthropic's messages")))
    refused = set(REQUESTS[route].not_done)
    assert accepted(route) - refused - named == set()
