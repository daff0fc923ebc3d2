"""The page: its routes, and what a real browser makes of it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from live_server import live_server, until
from page_server import FLAGS, PageServer, find_browser
from server_feed import Feed
from starlette.applications import Starlette
from starlette.testclient import TestClient

from ridgeline.profiling.drawing import PALETTE
from ridgeline.server.page import page_routes
from ridgeline.server.page.routes import FOLDER, TYPES

pytestmark = pytest.mark.slow

FILES = sorted([PALETTE, *(path for path in FOLDER.iterdir() if path.suffix in TYPES)])


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
    named = re.findall(r'(?:src|href)="(/page/[^"]+)"', page.text)
    assert named
    for path in FILES:
        named += re.findall(r'from "(/page/[^"]+)"', path.read_text())
    for name in named:
        found = client.get(name)
        assert found.status_code == 200, name
        assert found.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("name", ["routes.py", "..%2Fmetrics.py", "nothing.js", "%00"])
def test_nothing_else_is_served(client: TestClient, name: str) -> None:
    assert client.get(f"/page/{name}").status_code == 404


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_files_name_nothing_outside_and_nothing_inline(path: Path) -> None:
    text = path.read_text().replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"(https?:)?//[a-z]+\.", text)
    assert "innerHTML" not in text
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
    found = colours(which)
    for ground in ("ground", "raised", "mine"):
        for text in ("ink", "soft"):
            assert contrast(found[text], found[ground]) >= 4.5, (text, ground)
    for text in ("warn", "two", "one"):
        assert contrast(found[text], found["ground"]) >= 4.5, text
    assert contrast(found["on-strong"], found["strong"]) >= 4.5


# In a browser.

Open = Callable[..., Any]
WIDE = {"width": 1440, "height": 1000}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = find_browser()
    if path is None:
        pytest.skip("no Chromium here; `make browser` installs one where it can")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as running:
        started = running.chromium.launch(executable_path=path, args=list(FLAGS))
        yield started
        started.close()


@pytest.fixture
def server() -> Iterator[PageServer]:
    feed = Feed()
    feed.run(60)
    with PageServer(feed).running() as running:
        yield running


@pytest.fixture
def show(browser: Any, server: PageServer) -> Iterator[Open]:
    """Opens the page; at the end nothing may have gone wrong, or gone anywhere else."""
    problems: list[str] = []
    asked: list[str] = []
    contexts: list[Any] = []

    def show(url: str | None = None, **options: Any) -> Any:
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.set_default_timeout(8000)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda line: problems.append(line.text) if line.type == "error" else 0)
        page.on("request", lambda request: asked.append(request.url))
        page.goto(url or server.url)
        return page

    yield show
    for context in contexts:
        context.close()
    assert problems == []
    assert all(url.startswith("http://127.0.0.1:") for url in asked)


def ready(page: Any) -> Any:
    page.wait_for_selector("#figures dd")
    return page


def picture(page: Any, name: str) -> None:
    """Kept where RIDGELINE_PICTURES names a folder, for people to look at; drawn in any case."""
    folder = os.environ.get("RIDGELINE_PICTURES")
    path = {"path": Path(folder) / f"page-{name}.png"} if folder else {}
    assert len(page.screenshot(**path)) > 20_000  # an empty page has a few


def test_what_is_seen(show: Open) -> None:
    page = ready(show())
    assert page.inner_text("#bound").startswith("Decode is limited by weight bandwidth, at 7")
    assert "ridgeline quantize" in page.inner_text("#next code")
    assert "NVIDIA H200" in page.inner_text("#served")
    assert page.locator("#figures dd").count() == 5
    for chart, num_lines in (("throughput", 2), ("latency", 4), ("occupancy", 3)):
        assert page.locator(f"#{chart} > svg path.line").count() == num_lines
        assert page.locator(f"#{chart} > svg text").count() > 4  # of the axes
    label = page.get_attribute("#throughput > svg", "aria-label")
    assert re.search(r"Throughput, tokens per second. output [\d.]+", label)
    assert page.locator("#roofline .dot:not(.trail)").count() == 2
    assert "Decode" in page.inner_text("#roofline .legend")
    assert page.locator("#requests-rows tr").count() > 8


def test_values_under_the_pointer(show: Open) -> None:
    page = ready(show())
    now = page.inner_text("#throughput .legend")
    box = page.locator("#throughput > svg").bounding_box()
    page.mouse.move(box["x"] + 60, box["y"] + 60)
    page.wait_for_selector("#throughput .cursor", state="attached")
    assert page.inner_text("#throughput .legend") != now


def test_a_chat_streams_and_goes_on(show: Open, server: PageServer) -> None:
    page = ready(show())
    page.fill("#chat-input", "What is a ridge?")
    page.press("#chat-input", "Enter")
    page.wait_for_selector(".message.assistant:not(.busy)")
    assert page.inner_text(".message.assistant .said").count("ridge") == 3
    assert "24 tokens" in page.inner_text(".message.assistant .note")
    page.fill("#chat-input", "And then?")
    page.click("#chat-send")
    page.wait_for_selector("#chat-log > .message:nth-child(4):not(.busy)")
    roles = [message["role"] for message in server.asked[1]["messages"]]
    assert roles == ["user", "assistant", "user"]
    assert server.asked[1]["model"] == "llama-3.1-8b-instruct"
    assert server.asked[1]["stream"] is True


def test_a_chat_can_be_stopped(show: Open, server: PageServer) -> None:
    server.word_s = 0.2
    page = ready(show())
    for stop in (lambda: page.click("#chat-send"), lambda: page.keyboard.press("Escape")):
        page.fill("#chat-input", "Tell me more")
        page.press("#chat-input", "Enter")
        page.wait_for_selector(".message.busy .said:not(:empty)")
        assert page.inner_text("#chat-send") == "Stop"
        stop()
        page.wait_for_selector(".message.busy", state="detached")
        assert page.inner_text("#chat-send") == "Send"
    assert page.locator(".note", has_text="stopped").count() == 2
    page.wait_for_timeout(300)
    assert server.num_dropped == 2


def test_a_refusal_is_shown(show: Open, server: PageServer) -> None:
    page = ready(show())
    page.fill("#chat-input", "break off")
    page.press("#chat-input", "Enter")
    page.wait_for_selector(".message.failed")
    assert "the engine was closed" in page.inner_text(".message.failed .note")
    page.fill("#chat-input", "Again")
    page.press("#chat-input", "Enter")
    page.wait_for_selector("#chat-log > .message:nth-child(4):not(.busy)")
    assert [message["content"] for message in server.asked[1]["messages"]] == ["Again"]


def test_requests_are_cancelled(show: Open, server: PageServer) -> None:
    page = ready(show())
    row = page.locator("#requests-rows tr").first
    name = row.locator("td").first.inner_text()
    page.get_by_label(f"Cancel request {name}").click()
    page.wait_for_selector(f"tr:has-text('{name}') .state.cancelled")
    assert server.cancelled == [name]
    shown = page.locator("#requests-rows tr").count()
    page.click("#requests-more")
    assert page.locator("#requests-rows tr").count() > shown


def test_a_key_is_asked_for_and_kept_in_the_tab(browser: Any) -> None:
    feed = Feed()
    feed.run(3)
    with PageServer(feed, key="secret").running() as guarded:
        page = browser.new_page()
        page.goto(guarded.url)
        page.wait_for_selector("#key-dialog[open]")
        for given in ("wrong", "secret"):
            page.wait_for_selector("#key-dialog[open]")
            page.fill("#key-input", given)
            page.press("#key-input", "Enter")
        ready(page)
        assert page.evaluate("sessionStorage.getItem('ridgeline-key')") == "secret"
        assert page.evaluate("Object.values(localStorage).includes('secret')") is False
        page.fill("#chat-input", "With the key")
        page.press("#chat-input", "Enter")
        page.wait_for_selector(".message.assistant:not(.busy) .said:not(:empty)")
        page.close()


def test_light_and_dark(show: Open) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = ready(show(color_scheme="dark", viewport=WIDE))
    light = ready(show(color_scheme="light", viewport=WIDE))
    assert dark.evaluate(ground) == "rgb(19, 21, 25)"
    assert light.evaluate(ground) == "rgb(251, 250, 247)"
    picture(dark, "dark")
    picture(light, "light")
    light.click("#theme")
    light.click("#theme")
    assert light.inner_text("#theme") == "Theme: dark"
    assert light.evaluate(ground) == dark.evaluate(ground)
    light.reload()
    assert light.inner_text("#theme") == "Theme: dark"


@pytest.mark.parametrize("width", [320, 390, 768, 1024])
def test_narrow_screens(show: Open, width: int) -> None:
    page = ready(show(viewport={"width": width, "height": 800}))
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.locator("#chat-send").is_visible()
    assert page.locator("td.act button").first.is_visible()
    picture(page, f"{width}")


def test_the_keyboard_reaches_everything(show: Open) -> None:
    """Each control gets the focus by Tab, and shows it."""
    page = ready(show())
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        found = page.evaluate(
            "(e => [e.id || e.textContent || e.tagName, getComputedStyle(e).outlineStyle])"
            "(document.activeElement)"
        )
        if page.evaluate("document.activeElement != document.body"):  # all round, and on
            assert found[1] != "none", found
            reached.add(found[0])
    wanted = {"theme", "chat-new", "chat-log", "chat-input", "chat-send", "Options", "Cancel"}
    assert wanted | {"requests-more"} <= reached


def test_a_server_that_is_gone_is_told(browser: Any) -> None:
    feed = Feed()
    feed.run(3)
    page = browser.new_page()
    with PageServer(feed).running() as running:
        page.goto(running.url)
        ready(page)
        assert page.inner_text("#link") == ""
    page.wait_for_selector("#link:has-text('not reachable')")
    page.close()


def test_with_the_real_server(browser: Any, tmp_path: Path) -> None:
    """Its routes and its engine, with a key that the browser gives as a password."""
    with live_server(tmp_path, api_key=("page-key-1",)) as real:
        context = browser.new_context(http_credentials={"username": "me", "password": "page-key-1"})
        page = context.new_page()
        page.goto(real.url)
        ready(page)
        page.click("summary")
        page.fill("#chat-tokens", "9")
        page.fill("#chat-input", "hello")
        page.press("#chat-input", "Enter")
        page.wait_for_selector(".message.assistant:not(.busy)")
        assert page.locator(".message.failed").count() == 0
        assert "9 tokens" in page.inner_text(".message.assistant .note")
        page.wait_for_selector("#requests-rows .state.finished")
        assert "/v1/chat/completions · key-" in page.inner_text("#requests-rows td.route")
        context.close()

        def told() -> str:
            return real.get("/metrics", headers={"authorization": "Bearer page-key-1"}).text

        def num_steps() -> float:
            found = re.search(r'ridgeline:steps_total{.*phase="decode"} ([0-9.]+)', told())
            return float(found[1]) if found is not None else 0.0

        until(lambda: num_steps() >= 8)  # the engine shows its totals a little later
        assert told().startswith("# Verdict: ")
        assert 'vllm:generation_tokens_total{engine="0",model_name="tiny"} 9.0' in told()
