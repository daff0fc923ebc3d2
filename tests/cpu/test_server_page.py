"""The page's routes and files, without a browser (test_page_browser.py has one)."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from posixpath import dirname, join, normpath

import pytest
from server_feed import Feed
from starlette.applications import Starlette
from starlette.testclient import TestClient

from ridgeline.profiling.drawing import PALETTE
from ridgeline.server.page import page_routes
from ridgeline.server.page.routes import FOLDER, is_file, page_files

FILES = page_files()


@pytest.fixture
def client() -> TestClient:
    feed = Feed()
    feed.run(3)
    return TestClient(Starlette(routes=page_routes(feed.meters, feed.cancel)))


def test_the_page_and_its_files_are_served(client: TestClient) -> None:
    page = client.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    names = {f"page/{name}" for name in FILES} - {"page/index.html"}
    assert set(re.findall(r'(?:src|href)="(page/[^"]+)"', page.text)) <= names
    for name in sorted(names):
        assert is_file(f"/{name}")
        reply = client.get(f"/{name}")
        assert reply.status_code == 200, name
        assert reply.headers["x-content-type-options"] == "nosniff"
    assert {"page/chat/chat.js", "page/live/requests.js", "page/theme.js"} <= names


def test_addresses_are_relative() -> None:
    """So that the page works under any path that a proxy gives it."""
    for name, path in FILES.items():
        text = path.read_text()
        assert not re.search(
            r"""["'`(]/[a-z]""", re.sub(r"/\*.*?\*/|^\s*//.*$", "", text, flags=re.M)
        ), name
        for target in re.findall(r'(?:from|import) "([^"]+)"', text):
            assert target.startswith("."), (name, target)
            assert normpath(join(dirname(name), target)) in FILES, (name, target)


@pytest.mark.parametrize(
    "name", ["routes.py", "..%2Fmetrics.py", "chat/..%2Froutes.py", "nothing.js", "%00", ""]
)
def test_nothing_else_is_served(client: TestClient, name: str) -> None:
    assert client.get(f"/page/{name}").status_code == 404


MARKUP = (
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|srcdoc|\beval\(|prompt\("
)


@pytest.mark.parametrize("name", sorted(FILES))
def test_files_name_nothing_outside_and_nothing_inline(name: str) -> None:
    text = FILES[name].read_text().replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"(https?:)?//[a-z]+\.", text)
    assert not re.search(MARKUP, text)  # a model's words never become markup
    assert not re.search(r"<script(?![^>]*src=)|<style|\son[a-z]+=|style=", text)


def test_live_tells_what_is_new(client: TestClient) -> None:
    whole = client.get("/live").json()
    times = [point["t"] for point in whole["points"]]
    assert len(times) == 3
    assert len(client.get(f"/live?after={times[1]}").json()["points"]) == 1
    for odd in ("nan", "inf", "x", ""):
        assert len(client.get("/live", params={"after": odd}).json()["points"]) == 3
    assert client.get("/live").headers["cache-control"] == "no-store"


def test_cancelling(client: TestClient) -> None:
    name = client.get("/live").json()["requests"]["live"][0]["id"]
    path = f"/live/cancel/{name}"
    assert client.post(path, data={"a": "b"}).status_code == 415  # what a form could send
    assert client.get(path).status_code == 405
    assert client.post(path, json={}).json() == {"id": name, "cancelled": True}
    again = client.post(path, json={})
    assert again.status_code == 404
    assert name in again.json()["error"]["message"]


def colours(which: int) -> dict[str, str]:
    pairs = re.findall(r"--([a-z-]+): light-dark\((#\w+), (#\w+)\)", PALETTE.read_text())
    return {pair[0]: pair[1 + which] for pair in pairs}


def luminance(colour: str) -> float:
    parts = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("which", [0, 1], ids=["light", "dark"])
def test_text_stands_out(which: int) -> None:
    palette = colours(which)
    for ground in ("ground", "raised", "mine"):
        for text in ("ink", "soft"):
            assert contrast(palette[text], palette[ground]) >= 4.5, (text, ground)
    for ground in ("ground", "raised"):
        for text in ("warn", "two", "one"):
            assert contrast(palette[text], palette[ground]) >= 4.5, (text, ground)
    assert contrast(palette["on-strong"], palette["strong"]) >= 4.5


class Controls(HTMLParser):
    """Ids, what labels name, and the controls with what surrounds them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.named: set[str] = set()  # by a label elsewhere
        self.unnamed: list[str] = []
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids += [values["id"] or ""] if "id" in values else []
        if tag == "label" and values.get("for"):
            self.named.add(values["for"] or "")
        if tag in ("input", "textarea", "select") and "label" not in self._open:
            self.unnamed.append(values.get("id") or "")
        if tag not in ("input", "meta", "link", "br", "path", "circle"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self._open:
            while self._open.pop() != tag:
                pass


def test_the_page_is_labelled_and_its_scripts_find_their_elements() -> None:
    controls = Controls((FOLDER / "index.html").read_text())
    assert len(controls.ids) == len(set(controls.ids))
    assert set(controls.unnamed) <= controls.named
    scripts = "\n".join(path.read_text() for name, path in FILES.items() if name.endswith(".js"))
    wanted = set(re.findall(r'(?:getElementById|\bget)\("([^"]+)"\)', scripts))
    assert len(wanted) > 20
    assert wanted <= set(controls.ids)
