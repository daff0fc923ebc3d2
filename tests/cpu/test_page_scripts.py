"""The page's own JavaScript without a browser, run by Node where there is one: Markdown, the
request's options, what is copied, counts, filters, scales.
"""

from __future__ import annotations

import ast
import json
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ridgeline.profiling.drawing.scales import decades
from ridgeline.server.page.routes import page_files

Run = Callable[..., Any]
LIMIT_S = 60
TAGS = {
    *("p", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "hr", "pre", "table", "thead"),
    *("tbody", "tr", "th", "td", "a", "em", "strong", "del", "code", "br", "span"),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs code beside the page's files and gives what it passes to `show`; `given` is there."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no Node here; the tests in a browser run these scripts too")
    folder = tmp_path_factory.mktemp("page")
    (folder / "package.json").write_text('{"type": "module"}')
    for name, path in page_files().items():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(path, folder / name)

    def run(code: str, given: Any = None) -> Any:
        values = f"const given = {json.dumps(given)};"
        show = "const show = (value) => console.log(JSON.stringify(value));"
        ended = subprocess.run(
            [node, "--experimental-vm-modules", "--input-type=module", "-"],
            input=f"{values}\n{show}\n{code}",
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout)

    return run


MARKDOWN = "import { parse, MarkdownStream } from './chat/markdown.js';"


def flat(nodes: list[Any]) -> str:
    """A tree as a line."""
    return "".join(node if isinstance(node, str) else _flat_element(node) for node in nodes)


def _flat_element(node: dict[str, Any]) -> str:
    details = [node.get("href"), node.get("language"), node.get("align")]
    details += [node["start"]] if node.get("start", 1) != 1 else []
    name = " ".join([node["tag"], *(str(detail) for detail in details if detail)])
    return f"<{name}>{flat(node['children'])}</>" if node["children"] else f"<{name}>"


CASES = {
    "# Title ##\ntext **bold** *it* `c<b>`": (
        "<h3>Title</><p>text <strong>bold</> <em>it</> <code>c<b></></>"
    ),
    "- a\n- b\n  - c\n- d": "<ul><li>a</><li>b<ul><li>c</></></><li>d</></>",
    "1. one\n\n```py\nx\n```\n\n2. two": ("<ol><li>one</></><pre py>x</><ol 2><li>two</></>"),
    "1. one\n   ```\n   x\n     y\n   ```\n2. two": ("<ol><li>one<pre>x\n  y</></><li>two</></>"),
    "- a\n\n  more\n- b\n\ntext": "<ul><li>a<p>more</></><li>b</></><p>text</>",
    "- [ ] open\n- [x] done": "<ul><li><span>☐ </>open</><li><span>☑ </>done</></>",
    "text\n| a | b |\n|---|--:|\n| x\\|y | `2` |\n| 3 |\n\nend": (
        "<p>text</><table><thead><tr><th>a</><th right>b</></></><tbody>"
        "<tr><td>x|y</><td right><code>2</></></><tr><td>3</><td right></></></><p>end</>"
    ),
    "> q\n> - a\n\nend": "<blockquote><p>q</><ul><li>a</></></><p>end</>",
    "***both*** **bold *it*** *a **b** c* ~~no~~ ~no~": (
        "<p><strong><em>both</></> <strong>bold <em>it</></> <em>a <strong>b</> c</>"
        " <del>no</> ~no~</>"
    ),
    "snake_case_name a * b * c \\*x\\* 3 < 4": "<p>snake_case_name a * b * c *x* 3 < 4</>",
    "one\ntwo  \nthree<br>four": "<p>one<br>two<br>three<br>four</>",
    "a\n\n---\n\nb\n***": "<p>a</><hr><p>b</><hr>",
    "```\nopen\n  <b>": "<pre>open\n  <b></>",
    "**open `code": "<p>**open `code</>",
    "[t **b**](https://a.b/c_(d) 'title') <https://g.h/> see https://i.j/k. (https://l.m)": (
        "<p><a https://a.b/c_(d)>t <strong>b</></> <a https://g.h/>https://g.h/</>"
        " see <a https://i.j/k>https://i.j/k</>. (<a https://l.m/>https://l.m</>)</>"
    ),
    "![alt](https://a.b/c.png)": "<p><a https://a.b/c.png>Image: alt</></>",
    "tabs:\n\t- x\r\n\t- y": "<p>tabs:</><ul><li>x</><li>y</></>",
}


def test_markdown(run: Run) -> None:
    trees = run(f"{MARKDOWN} show(given.map(parse));", list(CASES))
    for text, tree in zip(CASES, trees, strict=True):
        assert flat(tree) == CASES[text], text


HOSTILE = [
    "<script>alert(1)</script><img src=x onerror=alert(1)>",
    "<iframe srcdoc='<script>alert(1)</script>'></iframe>",
    "[a](javascript:alert(1)) [a](JaVaScRiPt:alert(1)) [a](java\tscript:alert(1))",
    "[a](<javascript:alert(1)>) [a](\x01javascript:alert(1)) [a](&#106;avascript:alert(1))",
    "[a](data:text/html,<script>alert(1)</script>) [a](vbscript:x) [a](file:///etc/passwd)",
    "[a](/live/cancel/x) [a](//evil.example) [a](blob:https://x/1) <javascript:alert(1)>",
    "![x](javascript:alert(1)) ![x](data:image/svg+xml,<svg onload=alert(1)>)",
    "[a](https://x.y/\"onmouseover=\"alert(1)) [a](https://x.y 'onclick=alert(1)')",
    "```<script>alert(1)</script>\n</code></pre><script>alert(1)</script>\n```",
    "| <b>a</b> | <script> |\n|---|---|\n| <img src=x onerror=alert(1)> | [x](javascript:1) |",
    "# <svg onload=alert(1)>\n> <body onload=alert(1)>\n- <a href=javascript:alert(1)>x</a>",
    "[<img src=x onerror=alert(1)>](https://x.y) **<b onclick=alert(1)>**",
    "`</code><script>alert(1)</script>` \\<script\\>",
]


def elements(nodes: list[Any]) -> Iterator[dict[str, Any]]:
    for node in nodes:
        if isinstance(node, dict):
            yield node
            yield from elements(node["children"])


def test_markdown_of_hostile_answers(run: Run) -> None:
    """Only known elements, links to the web alone, and all that looks like markup is text."""
    trees = run(f"{MARKDOWN} show(given.map(parse));", HOSTILE)
    for text, tree in zip(HOSTILE, trees, strict=True):
        for node in elements(tree):
            assert node["tag"] in TAGS, text
            assert set(node) <= {"tag", "children", "href", "language", "start", "align"}, text
            if node["tag"] == "a":
                assert node["href"].startswith("https://x"), text
            assert node.get("align", "") in ("", "right", "center")
            assert "<" not in node.get("language", "")
    joined = flat([node for tree in trees for node in tree])
    assert joined.count("<script>alert(1)</script>") == 5  # as text; a fence's info is not shown


STREAMED = """
let state = 7;
const draw = (count) => {
  state = (state * 1103515245 + 12345) % 2147483648;
  return Math.floor(state / 65536) % count;
};
const wrong = [];
for (let round = 0; round < 400; round += 1) {
  const text = Array.from({ length: 1 + draw(12) }, () => given[draw(given.length)]).join("\\n");
  const stream = new MarkdownStream();
  const closed = [];
  let open = [];
  for (let at = 0; at < text.length;) {
    const size = 1 + draw(9);
    const step = stream.add(text.slice(at, at + size));
    closed.push(...step.closed);
    open = step.open;
    at += size;
  }
  if (JSON.stringify([...closed, ...open]) !== JSON.stringify(parse(text))) wrong.push(text);
}
show(wrong);
"""


def test_a_stream_ends_as_the_whole_text(run: Run) -> None:
    """However it is cut: what was closed was final."""
    lines = ["text", "", "", "- item", "  - inner", "  more", "1. one", "2. two", "# Head", "> q"]
    lines += ["```py", "```", "~~~", "| a | b |", "|---|---|", "| 1 | 2 |", "---", "**b", "e**"]
    lines += ["    deep", "\tx", "-", "1.", "[l](http://a.b)", "`c", "d`"]
    assert run(MARKDOWN + STREAMED, lines) == []


def test_only_the_last_block_of_a_stream_is_read_again(run: Run) -> None:
    code = """
    const stream = new MarkdownStream();
    const steps = given.map((piece) => stream.add(piece));
    show(steps.map(({ closed, open }) => [closed.length, open.length]));
    """
    pieces = ["# T", "\n", "para", "\n\nnext", "\n\n```\n", "code\n\ncode", "\n```\n", "\nend"]
    counts = run(MARKDOWN + code, pieces)
    assert [closed for closed, _ in counts] == [0, 0, 0, 1, 2, 0, 0, 0]
    assert all(still_open <= 2 for _, still_open in counts)
    assert sum(closed for closed, _ in counts) + counts[-1][1] == 5


def test_long_hostile_text_ends(run: Run) -> None:
    """Each would take minutes if one mark cost a look at all that follows."""
    parts = ["[", "*a ", "**a _b ", " ` `` ", "[a](", "> ", "- ", "![](", "|", "#", " #", "http://"]
    parts += ["_a*", "<", ")", "[a](<", '[a](x "', "\\", "~~a ", "1. ", "\n- ", "\n> ", "`\n"]
    code = "show(given.map((part) => parse('http://a' + part.repeat(10000)).length));"
    assert len(run(MARKDOWN + code, parts)) == len(parts)


OPTIONS = "import { requestFields } from './chat/options.js'; show(given.map(requestFields));"


def test_options(run: Run) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    given: list[tuple[dict[str, str], Any]] = [
        ({"temperature": " ", "top_p": "", "seed": ""}, {}),
        ({"temperature": "0", "top_p": "0.9"}, {"temperature": 0, "top_p": 0.9}),
        ({"max_completion_tokens": "12", "seed": "0"}, {"max_completion_tokens": 12, "seed": 0}),
        (
            {"response_format": json.dumps(schema)},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "reply", "schema": schema, "strict": True},
                }
            },
        ),
        ({"temperature": "warm"}, "Temperature must be a number"),
        ({"temperature": "-1"}, "Temperature must be"),
        ({"top_p": "1.5"}, "Top p must be a number from 0 to 1"),
        ({"max_completion_tokens": "0"}, "Max tokens must be a whole number of at least 1"),
        ({"seed": "1.5"}, "Seed must be"),
        ({"response_format": "{a"}, "JSON schema is not JSON"),
        ({"response_format": "[1]"}, "JSON schema must be a JSON object"),
    ]
    results = run(OPTIONS, [values for values, _ in given])
    for (values, expected), result in zip(given, results, strict=True):
        if isinstance(expected, dict):
            assert result == {"fields": expected}, values
        else:
            assert result["problem"]["message"].startswith(expected), values
            assert result["problem"]["field"] in values


SNIPPETS = """
import { asCurl, asPython } from './chat/snippets.js';
const base = "http://h:1/x/v1";
const both = (key) => [asCurl(`${base}/chat/completions`, given, key), asPython(base, given, key)];
show([false, true].map(both));
"""


def test_a_request_is_copied_as_it_is(run: Run) -> None:
    """Whatever was written, the shell and Python read the same request out of it."""
    text = "it's \"$(rm -rf /)\" `x` \\ \n'''\u2028\U0001f600 \t€ %s {x} \\u0041"
    body = {
        "model": "demo",
        "messages": [{"role": "system", "content": text}, {"role": "user", "content": "'" * 3}],
        "temperature": 0.5,
        "seed": None,
        "response_format": {"type": "json_schema", "json_schema": {"strict": True, "x": [1, []]}},
    }
    for needs_key, (curl, python) in zip((False, True), run(SNIPPETS, body), strict=True):
        words = [word for word in shlex.split(curl) if word != "\n"]
        assert words[:2] == ["curl", "http://h:1/x/v1/chat/completions"]
        assert json.loads(words[words.index("-d") + 1]) == body
        assert ("Authorization: Bearer $OPENAI_API_KEY" in words) == needs_key
        calls = [node for node in ast.walk(ast.parse(python)) if isinstance(node, ast.Call)]
        (create,) = (
            call for call in calls if ast.unparse(call.func).endswith("completions.create")
        )
        sent = {word.arg: ast.literal_eval(word.value) for word in create.keywords}
        assert sent == body
        (client,) = (call for call in calls if ast.unparse(call.func) == "OpenAI")
        names = {word.arg: ast.literal_eval(word.value) for word in client.keywords}
        assert names == {"base_url": "http://h:1/x/v1"} | (
            {} if needs_key else {"api_key": "unused"}
        )


PROGRESS = """
import { Progress } from './chat/events.js';
let now = 0;
const progress = new Progress(() => now);
const lines = [progress.summary("stopped")];
for (const [time, event] of given) {
  now = time;
  progress.take(event);
  lines.push(progress.summary("stopped"));
}
show({ lines, end: progress.summary(), text: progress.text, reasoning: progress.reasoning });
"""


def piece(text: str, **more: Any) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}, **more}]}


def test_speed_is_known_when_an_answer_is_stopped(run: Run) -> None:
    """By the server's count where it sends one, else about, by the pieces that came."""
    thinking = {"choices": [{"delta": {"reasoning_content": "hm"}}]}
    events = [[200, {"choices": [{"delta": {"role": "assistant"}}]}], [500, thinking]]
    events += [[1000, piece("a")], [1500, piece("b")], [1600, piece("", finish_reason="length")]]
    result = run(PROGRESS, events)
    assert result["text"] == "ab"
    assert result["reasoning"] == "hm"
    assert result["lines"][0] == "stopped"
    assert result["lines"][-1] == (
        "about 3 tokens · first token after 500\u202fms · about 2 tokens/s · stopped"
    )
    assert result["end"].endswith("cut off: max tokens reached")
    counted = run(PROGRESS, [*events, [1700, {"choices": [], "usage": {"completion_tokens": 9}}]])
    assert counted["lines"][-1].startswith("9 tokens · first token after 500\u202fms · 8 tokens/s")


EVENTS = """
import { events } from './chat/events.js';
const bytes = new TextEncoder().encode(given.text);
const start = (stream) => {
  for (let at = 0; at < bytes.length; at += given.size) {
    stream.enqueue(bytes.slice(at, at + given.size));
  }
  stream.close();
};
const all = [];
for await (const event of events(new ReadableStream({ start }))) all.push(event);
show(all);
"""


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_events_however_they_are_cut(run: Run, size: int) -> None:
    text = 'data: {"a": "ü"}\r\n\r\n: comment\n\ndata:{"b": 2}\n\ndata: [DONE]\n\n'
    assert run(EVENTS, {"text": text, "size": size}) == [{"a": "ü"}, {"b": 2}]


def test_filters(run: Run) -> None:
    rows = [
        {"id": "req-1", "route": "/v1/completions", "tenant": "team-b", "state": "running"},
        {"id": "req-2", "route": "/v1/chat/completions", "tenant": "team-a", "state": "arrived"},
        {"id": "req-3", "route": "/v1/embeddings", "tenant": "", "state": "refused"},
    ]
    wanted: list[tuple[dict[str, str], list[int]]] = [
        ({}, [1, 2, 3]),
        ({"state": "live"}, [1, 2]),
        ({"state": "waiting"}, [2]),
        ({"state": "failed"}, [3]),
        ({"tenant": "team-b"}, [1]),
        ({"text": " CHAT "}, [2]),
        ({"text": "team"}, [1, 2]),
        ({"state": "live", "text": "embed"}, []),
    ]
    code = """
    import { matches, tenantsOf } from './live/filters.js';
    show({ tenants: tenantsOf(given.rows), ids: given.filters.map((filter) =>
      given.rows.filter((row) => matches(row, filter)).map(({ id }) => Number(id.slice(4)))) });
    """
    result = run(code, {"rows": rows, "filters": [filters for filters, _ in wanted]})
    assert result["tenants"] == ["team-a", "team-b"]
    assert result["ids"] == [ids for _, ids in wanted]


def test_scales(run: Run) -> None:
    """The report's ticks and the page's are of one rule."""
    spans = [(1, 1000), (0.5, 90), (3e9, 7e14), (1e-6, 1e6), (2, 5), (1, 1e5), (1, 1e6)]
    code = """
    import * as scales from './live/scales.js';
    show({
      inside: given.map(([low, high]) => scales.decadesInside(low, high)),
      around: scales.decadesAround(0.003, 0.2),
      steps: [10, 37, 1, 4321].map(scales.roundSteps),
      log: [1, 10, 100, 0.1].map(scales.logScale(1, 100, 0, 50)),
      linear: [0, 5].map(scales.linearScale(0, 10, 100, 0)),
    });
    """
    result = run(code, spans)
    assert result["inside"] == [decades(low, high) for low, high in spans]
    assert result["around"] == [0.001, 0.01, 0.1, 1]
    assert result["steps"][0] == [0, 5, 10]
    assert result["steps"][1] == [0, 20, 40]
    assert [steps[-1] for steps in result["steps"]] == [10, 40, 1, 6000]
    assert result["log"] == [0, 25, 50, 0]
    assert result["linear"] == [100, 50]


def test_nothing_is_drawn_over_the_live_roof(run: Run) -> None:
    code = """
    import { Roofline } from './live/roofline.js';
    const roofline = Object.create(Roofline.prototype);
    roofline.roof = { memory: { value: 1e12, source: 'measured' }, matrix: { value: 1e14 } };
    const texts = [];
    globalThis.document = { createElement: () => ({ append: (...parts) => texts.push(...parts) }) };
    roofline.legend = { replaceChildren() {} };
    roofline.svg = { setAttribute: (_, text) => { roofline.label = text; } };
    roofline.phases = given.map((phase) => ({ name: 'Decode', phase }));
    roofline.showValues();
    show({ drawn: given.map((phase) => roofline.drawn(phase)), label: roofline.label });
    """
    phases = [
        {"intensity": 2, "flops_per_s": 1.5e12, "memory_share": 0.75, "matrix_share": 0.015},
        {"intensity": 2, "flops_per_s": 3e12, "memory_share": 1.5, "matrix_share": 0.03},
        {"intensity": 500, "flops_per_s": 3e14, "memory_share": 0.6, "matrix_share": 3.0},
    ]
    result = run(code, phases)
    assert result["drawn"] == [1.5e12, 2e12, 1e14]
    first, *others = result["label"].split(", Decode ")
    assert "above 100%" not in first
    assert len(others) == 2
    assert all("above 100%, so this limit was measured too low" in text for text in others)


LINKED = """
import { readFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { SourceTextModule } from 'node:vm';
const modules = new Map();
const load = (name) => {
  const read = () => new SourceTextModule(readFileSync(name, 'utf8'), { identifier: name });
  if (!modules.has(name)) modules.set(name, read());
  return modules.get(name);
};
await load('main.js').link((name, from) => load(join(dirname(from.identifier), name)));
load('theme.js');
show([...modules.keys()]);
"""


def test_the_scripts_fit_together(run: Run) -> None:
    """Each is JavaScript, imports what there is, and is used."""
    scripts = {name for name in page_files() if name.endswith(".js")}
    assert set(run(LINKED)) == scripts
