"""What a real browser makes of the page."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from live_server import live_server, until
from page_server import FLAGS, PageServer, find_browser
from server_feed import Feed

pytestmark = pytest.mark.slow

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
    urls: list[str] = []
    contexts: list[Any] = []

    def show(url: str | None = None, **options: Any) -> Any:
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.set_default_timeout(8000)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda line: problems.append(line.text) if line.type == "error" else 0)
        page.on("request", lambda request: urls.append(request.url))
        page.goto(url or server.url)
        return page

    yield show
    for context in contexts:
        context.close()
    assert problems == []
    assert all(url.startswith("http://127.0.0.1:") for url in urls)


def ready(page: Any) -> Any:
    page.wait_for_selector("#figures dd")
    return page


def wait(page: Any, condition: str) -> None:
    """Until it holds. Playwright's own way needs `eval`, which the page's policy forbids."""
    for _ in range(400):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(20)
    raise AssertionError(f"it did not become so: {condition}")


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
    assert page.inner_text(".message.assistant .text").count("ridge") == 3
    assert "24 tokens" in page.inner_text(".message.assistant .note")
    page.fill("#chat-input", "And then?")
    page.click("#chat-send")
    page.wait_for_selector("#chat-log > .message:nth-child(4):not(.busy)")
    roles = [message["role"] for message in server.bodies[1]["messages"]]
    assert roles == ["user", "assistant", "user"]
    assert server.bodies[1]["model"] == "llama-3.1-8b-instruct"
    assert server.bodies[1]["stream"] is True


def test_a_refusal_is_shown(show: Open, server: PageServer) -> None:
    page = ready(show())
    page.fill("#chat-input", "break off")
    page.press("#chat-input", "Enter")
    page.wait_for_selector(".message.failed")
    assert "the engine was closed" in page.inner_text(".message.failed .note")
    page.fill("#chat-input", "Again")
    page.press("#chat-input", "Enter")
    page.wait_for_selector("#chat-log > .message:nth-child(4):not(.busy)")
    assert [message["content"] for message in server.bodies[1]["messages"]] == ["Again"]


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
        name, outline = page.evaluate(
            "(e => [e.id || e.textContent || e.tagName, getComputedStyle(e).outlineStyle])"
            "(document.activeElement)"
        )
        if page.evaluate("document.activeElement != document.body"):  # all round, and on
            assert outline != "none", name
            reached.add(name)
    wanted = {"theme", "chat-new", "chat-log", "chat-input", "chat-send", "requests-state"}
    assert wanted | {"requests-more", "requests-tenant", "Cancel"} <= reached
    assert any(name.startswith("Options") for name in reached)


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


def send(page: Any, text: str = "Go on") -> None:
    page.fill("#chat-input", text)
    page.press("#chat-input", "Enter")


def answered(page: Any) -> Any:
    page.wait_for_selector(".message.assistant:not(.busy)")
    return page.locator(".message.assistant").last


def test_a_chat_can_be_stopped(show: Open, server: PageServer) -> None:
    """And how fast it was is said all the same: by the server's count where it sends one."""
    server.pause_s = 0.1
    page = ready(show())
    for counts_each, stop in (
        (False, lambda: page.click("#chat-send")),
        (True, lambda: page.keyboard.press("Escape")),
    ):
        server.counts_each = counts_each
        send(page, "Tell me more")
        wait(
            page, "document.querySelector('.message.busy .text')?.textContent.split(' ').length > 3"
        )
        assert page.inner_text("#chat-send") == "Stop"
        stop()
        page.wait_for_selector(".message.busy", state="detached")
        assert page.inner_text("#chat-send") == "Send"
        note = page.locator(".message.assistant .note").last.inner_text()
        assert re.search(r"tokens/s · stopped$", note)
        assert note.startswith("about ") != counts_each
    page.wait_for_timeout(400)
    assert server.num_dropped == 2


ANSWER = """# Ridges

A **bold** and *slanted* word, `code`, [a link](https://example.org/a).

1. one
2. two
   - inner

| shape | FLOP/s |
|:------|------:|
| small | 12 |

```python
def f(x):
    return "<b>" + x
```

> quoted

"""


def pieces(text: str, size: int = 5) -> list[dict[str, str]]:
    return [{"content": text[at : at + size]} for at in range(0, len(text), size)]


def test_markdown_is_shown_and_copied(show: Open, server: PageServer) -> None:
    server.deltas = pieces(ANSWER)
    page = ready(show(permissions=["clipboard-read", "clipboard-write"]))
    send(page)
    answer = answered(page)
    for selector, text in (
        ("h3", "Ridges"),
        ("strong", "bold"),
        ("em", "slanted"),
        ("p code", "code"),
        ("ol > li:nth-child(2) li", "inner"),
        ("table td.right", "12"),
        ("blockquote", "quoted"),
    ):
        assert answer.locator(f".text {selector}").inner_text() == text
    link = answer.locator(".text a")
    assert link.get_attribute("href") == "https://example.org/a"
    assert link.get_attribute("rel") == "noopener noreferrer nofollow"
    code = 'def f(x):\n    return "<b>" + x'
    assert answer.locator("pre").inner_text() == code
    for button, copied in (("Copy this code (python)", code), ("Copy this answer", ANSWER)):
        answer.get_by_label(button).click()
        wait(page, "document.getElementById('announcement').textContent == 'Copied'")
        assert page.evaluate("navigator.clipboard.readText()") == copied


def test_copying_without_a_clipboard(show: Open, server: PageServer) -> None:
    """As on plain HTTP from another machine, where browsers give pages none."""
    server.deltas = pieces("```\nx = 1\n```\n")
    page = ready(show(permissions=["clipboard-read"]))
    page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    send(page)
    answered(page).get_by_label("Copy this code").click()
    wait(page, "document.getElementById('announcement').textContent == 'Copied'")
    page.fill("#chat-input", "")
    page.keyboard.press("Control+V")
    assert page.input_value("#chat-input") == "x = 1"


HOSTILE = """<script>document.title = "run"</script><img src=x onerror="document.title='run'">

[click](javascript:document.title='run') ![pixel](https://evil.example/p.png?secret)

<iframe src="https://evil.example"></iframe> <style>body { display: none }</style>

```</code><script>document.title = "run"</script>
</pre><img src=https://evil.example/x.png>
```

| <img src=https://evil.example/y.png> | b |
|---|---|
| <a href="javascript:alert(1)">x</a> | <base href=https://evil.example> |
"""


def test_a_hostile_answer_stays_text(show: Open, server: PageServer) -> None:
    """That nothing was fetched from elsewhere is seen where the page is closed."""
    server.deltas = [*pieces(HOSTILE, 3), {"reasoning_content": HOSTILE}]
    page = ready(show())
    send(page, HOSTILE.replace("\n", " "))
    answer = answered(page)
    assert page.locator(".log :is(script, img, iframe, style, base)").count() == 0
    for link in answer.locator("a").all():  # for whoever wants to follow them
        assert link.get_attribute("href").startswith("https://evil.example/")
    assert page.title() != "run"
    assert '<img src=x onerror="document.title=' in answer.inner_text()


def test_a_stream_changes_only_its_end(show: Open, server: PageServer) -> None:
    server.deltas = pieces("# First\n\nSecond paragraph\n\n```js\n" + "line();\n" * 30, 9)
    server.pause_s = 0.03
    page = ready(show())
    send(page)
    page.wait_for_selector(".message.busy pre")
    page.evaluate(
        "window.kept = ['h3', 'p', 'pre', '.code button'].map((name) =>"
        " document.querySelector(`.message.busy .text ${name}`))"
    )
    page.evaluate("getSelection().selectAllChildren(window.kept[1])")
    answered(page)
    assert page.evaluate("window.kept.every((element) => element.isConnected)")
    assert page.evaluate("getSelection().toString().trim()") == "Second paragraph"
    assert page.locator(".message.assistant pre").inner_text().count("line();") == 30


def test_the_reader_may_scroll_up_while_it_streams(show: Open, server: PageServer) -> None:
    server.deltas = pieces("A line.\n\n" * 80, 9)
    page = ready(show())
    send(page)
    wait(page, "document.getElementById('chat-log').scrollTop > 200")
    page.evaluate("document.getElementById('chat-log').scrollTop = 0")
    answered(page)
    assert page.evaluate("document.getElementById('chat-log').scrollTop") == 0
    server.deltas = pieces("Short.")
    send(page)
    page.wait_for_selector(".message:nth-child(4):not(.busy)")
    log = "document.getElementById('chat-log')"
    assert page.evaluate(f"{log}.scrollHeight - {log}.scrollTop - {log}.clientHeight") < 40


def test_reasoning_is_folded(show: Open, server: PageServer) -> None:
    thoughts = [{"reasoning_content": "Let me "}, {"reasoning_content": "think."}]
    server.deltas = [*thoughts, {"content": "**42**"}]
    page = ready(show())
    send(page)
    answer = answered(page)
    summary = answer.locator("summary")
    assert summary.inner_text().startswith("Thought for ")
    assert not answer.get_by_text("Let me think.").is_visible()
    summary.click()
    assert answer.get_by_text("Let me think.").is_visible()
    assert answer.locator(".text").inner_text() == "42"
    send(page, "Why?")
    page.wait_for_selector(".message:nth-child(4):not(.busy)")
    assert server.bodies[1]["messages"][1] == {"role": "assistant", "content": "**42**"}


def test_options_are_sent(show: Open, server: PageServer) -> None:
    page = ready(show())
    send(page)
    answered(page)
    plain = server.bodies[0]
    assert set(plain) == {
        *("model", "messages", "max_completion_tokens", "stream", "stream_options"),
    }  # what is left empty is the server's to choose
    page.click("#chat-options summary")
    page.get_by_label("Temperature").fill("0.3")
    page.get_by_label("Top p").fill("0.9")
    page.get_by_label("Max tokens").fill("77")
    page.get_by_label("Seed").fill("5")
    page.get_by_label("System prompt").fill("Be brief.\nVery.")
    page.get_by_label("JSON schema").fill("{oops")
    send(page, "Again")
    assert "JSON schema is not JSON" in page.inner_text("#chat-problem")
    assert page.evaluate("document.activeElement.dataset.field") == "response_format"
    assert page.input_value("#chat-input") == "Again"
    assert len(server.bodies) == 1
    page.get_by_label("JSON schema").fill('{"type": "object"}')
    assert page.inner_text("#chat-problem") == ""
    assert page.inner_text("#chat-options-count") == "(6 set)"
    page.click("#chat-send")
    page.wait_for_selector(".message:nth-child(4):not(.busy)")
    body = server.bodies[1]
    assert body["messages"][0] == {"role": "system", "content": "Be brief.\nVery."}
    sent = [body[name] for name in ("temperature", "top_p", "max_completion_tokens", "seed")]
    assert sent == [0.3, 0.9, 77, 5]
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}


def test_requests_are_filtered(show: Open) -> None:
    page = ready(show())
    rows = page.locator("#requests-rows tr")
    page.select_option("#requests-tenant", "batch")
    wait(page, "!document.getElementById('requests-count').textContent.endsWith('live')")
    assert set(page.locator("#requests-rows td.tenant").all_inner_texts()) == {"batch"}
    page.select_option("#requests-state", "finished")
    assert rows.count() > 0
    assert all(
        "finished" in text for text in page.locator("#requests-rows .state").all_inner_texts()
    )
    page.fill("#requests-text", "no such request")
    assert rows.count() == 0
    assert page.inner_text("#requests-none") == "No request matches these filters."
    page.fill("#requests-text", "")
    page.select_option("#requests-state", "")
    page.select_option("#requests-tenant", "")
    assert rows.count() > 8


def test_a_key_is_asked_for_and_kept_in_the_tab(browser: Any) -> None:
    feed = Feed()
    feed.run(3)
    with PageServer(feed, key="secret").running() as guarded:
        page = browser.new_page()
        page.goto(guarded.url)
        page.wait_for_selector("#key-dialog[open]")
        page.keyboard.press("Escape")  # not now
        page.wait_for_selector("#link:has-text('API key required')")
        page.wait_for_timeout(1500)
        assert not page.locator("#key-dialog[open]").count()  # it does not come back by itself
        assert page.inner_text("#bound").startswith("Enter an API key")
        send(page, "Without a key")
        assert "enter its API key" in page.inner_text("#chat-problem")
        page.click("#key-change")
        for key, problem in (("wrong", "does not accept this key"), ("a b", "without spaces")):
            page.fill("#key-input", key)
            page.press("#key-input", "Enter")
            page.wait_for_selector(f"#key-problem:has-text('{problem}')")
            assert page.get_attribute("#key-input", "aria-invalid") == "true"
        assert page.evaluate("sessionStorage.length") == 0
        page.fill("#key-input", " secret ")
        page.press("#key-input", "Enter")
        ready(page)
        assert page.inner_text("#link") == ""
        assert page.inner_text("#key-change") == "Change key"
        assert page.evaluate("sessionStorage.getItem('ridgeline-key')") == "secret"
        assert page.evaluate("Object.values(localStorage).includes('secret')") is False
        send(page, "With the key")
        assert answered(page).locator(".text").inner_text()
        guarded.key = "another"
        page.wait_for_selector("#key-problem:has-text('no longer accepts')")
        assert page.evaluate("sessionStorage.length") == 0
        page.close()


@pytest.mark.parametrize("width", [360, 390, 430])
def test_the_chat_is_first_on_a_phone(show: Open, server: PageServer, width: int) -> None:
    """With its whole form on the first screen, and nothing wider than the screen."""
    long = "https://example.org/" + "x" * 300
    server.deltas = pieces(f"{long} {'y' * 300}\n\n```\n{'z' * 300}\n```\n\n{ANSWER}", 200)
    page = ready(show(viewport={"width": width, "height": 844}, is_mobile=True, has_touch=True))
    send(page, "w" * 300)
    answered(page)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    log = "document.getElementById('chat-log')"
    assert page.evaluate(f"{log}.scrollWidth - {log}.clientWidth") == 0
    button = page.locator("#chat-send").bounding_box()
    assert button["y"] + button["height"] <= 844
    assert page.locator(".chat").bounding_box()["y"] < page.locator(".verdict").bounding_box()["y"]
    picture(page, f"phone-{width}")
    page.click("#chat-options summary")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    picture(page, f"phone-options-{width}")


def test_below_a_path(browser: Any) -> None:
    """As a proxy mounts it: nothing is asked for outside."""
    feed = Feed()
    feed.run(3)
    urls: list[str] = []
    with PageServer(feed, root="/models/one").running() as mounted:
        page = browser.new_page()
        page.on("request", lambda request: urls.append(request.url))
        page.goto(mounted.url)
        send(ready(page))
        answered(page)
        page.locator("td.act button").first.click()
        page.wait_for_selector(".state.cancelled")
        page.close()
        assert all(url.startswith(mounted.url) for url in urls)
        assert mounted.cancelled


def copied(page: Any, button: str) -> str:
    page.click(button)
    page.wait_for_selector(f"{button}:has-text('Copied')")
    text = page.evaluate("navigator.clipboard.readText()")
    assert isinstance(text, str)
    return text


def test_with_the_real_server(browser: Any, tmp_path: Path) -> None:
    """Its routes and its engine, with a key that the page asks for; what is copied works."""
    with live_server(tmp_path, api_key=("page-key-1",)) as real:
        context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
        page = context.new_page()
        page.goto(real.url)
        page.fill("#key-input", "page-key-1")
        page.press("#key-input", "Enter")
        ready(page)
        page.click("#chat-options summary")
        page.get_by_label("Max tokens").fill("9")
        page.get_by_label("Temperature").fill("0")
        send(page, 'it\'s "hello"')
        answer = answered(page)
        assert page.locator(".message.failed").count() == 0
        assert "9 tokens" in answer.locator(".note").inner_text()
        page.wait_for_selector("#requests-rows .state.finished")
        tenant = page.inner_text("#requests-rows td.tenant")
        assert tenant.startswith("key-")
        assert page.inner_text("#requests-count").endswith(f"of your key ({tenant}) only")
        page.get_by_label("Max tokens").fill("900")
        send(page, "more")
        wait(page, "document.querySelectorAll('.message.busy .text p').length > 0")
        page.keyboard.press("Escape")
        page.wait_for_selector(".message:nth-child(4):not(.busy)")
        note = page.locator(".note").last.inner_text()
        assert re.match(r"[0-9]+ tokens? · first token after .* stopped$", note)  # not "about"
        page.click("#chat-new")
        page.get_by_label("Max tokens").fill("9")
        send(page, 'it\'s "hello"')
        answered(page)
        texts = [copied(page, button) for button in ("#copy-curl", "#copy-python")]
        page.fill("#chat-input", "and then?")
        assert "and then?" in copied(page, "#copy-curl")
        shown = page.evaluate("document.querySelector('.message.assistant .text').textContent")
        context.close()
        for text, command in zip(texts, (["sh", "-c"], ["python", "-c"]), strict=True):
            assert "page-key-1" not in text
            run_copied(text, command, shown)

        def metrics() -> str:
            return real.get("/metrics", headers={"authorization": "Bearer page-key-1"}).text

        def num_steps() -> float:
            match = re.search(r'ridgeline:steps_total{.*phase="decode"} ([0-9.]+)', metrics())
            return float(match[1]) if match is not None else 0.0

        until(lambda: num_steps() >= 8)  # the engine shows its totals a little later
        assert metrics().startswith("# Verdict: ")
        assert 'vllm:generation_tokens_total{engine="0",model_name="tiny"}' in metrics()


def run_copied(text: str, command: list[str], shown: str) -> None:
    """It gives the answer that the page shows: the request is greedy."""
    program = sys.executable if command[0] == "python" else command[0]
    environment = {**os.environ, "OPENAI_API_KEY": "page-key-1"}
    ended = subprocess.run(
        [program, *command[1:], text], env=environment, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    answer = ended.stdout
    if command[0] == "sh":
        answer = json.loads(answer)["choices"][0]["message"]["content"]
    assert "".join(answer.split()) == "".join(shown.split())
