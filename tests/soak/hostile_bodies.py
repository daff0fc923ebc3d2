"""Requests that nobody should send. Each kind is a function of a random generator that gives what
to put on the wire; those of a kind differ from each other.

    kind, request = draw_hostile(random.Random(7), "demo")
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

from soak.raw_http import post

PATHS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/tokenize",
    "/detokenize",
)  # fmt: skip
FIELDS = (
    "model", "messages", "prompt", "input", "tokens", "max_tokens", "max_completion_tokens",
    "temperature", "top_p", "top_k", "min_p", "n", "best_of", "stop", "stream", "stream_options",
    "logprobs", "top_logprobs", "echo", "suffix", "seed", "user", "logit_bias", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids",
    "response_format", "tools", "tool_choice", "parallel_tool_calls", "priority", "deadline_s",
    "cache_salt", "metadata", "store", "encoding_format", "dimensions", "pooling", "instructions",
    "text", "audio", "modalities", "prediction", "web_search_options", "functions", "__proto__",
    "chat_template", "images",
)  # fmt: skip
HUGE = ("1e999", "-1e999", "NaN", "Infinity", "-Infinity", "1" + "0" * 400, "-" + "9" * 5000,
        "1e-400", "0.1e+", "01", "9223372036854775808", "1.7976931348623157e309")  # fmt: skip
TEXTS = (
    "", "\0", "\ud800", "\udfff\ud800", "a" * 100_000, "\u202e" * 50, "🦙" * 500,
    "../../etc/passwd", "{{ 7 * 7 }}{% for x in y %}", "<|im_end|>" * 40, "%s%n%x", "' OR 1=1 --",
    "\r\n\r\nGET / HTTP/1.1",
)  # fmt: skip
SCHEMAS: tuple[Any, ...] = (
    {"type": "nothing"}, {"$ref": "#/x"}, {"$ref": "http://127.0.0.1:1/x"}, {"$ref": "file:///x"},
    {"pattern": "(" * 500}, {"type": "string", "pattern": "(a+)+$" * 40}, {"enum": []},
    {"type": "array", "minItems": 10**12}, {"type": "object", "required": ["a"] * 5000},
    {"type": "integer", "minimum": 5, "maximum": -5}, {"anyOf": []}, {"allOf": [False]}, 17, [],
    "x",
    {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, {"type": ["string", 4]},
    {"type": "string", "minLength": 10**9}, {"const": {"a": [1] * 2000}},
    {"properties": {str(number): {"type": "object"} for number in range(800)}}, {"not": {}},
    {"type": "object", "patternProperties": {"[": {}}}, True, False, None,
)  # fmt: skip


LARGEST: dict[str, dict[str, Any]] = {  # requests that are in order
    "/tokenize": {"prompt": "word " * 200_000},
    "/detokenize": {"tokens": [3] * 250_000},
    "/v1/completions": {"prompt": [1] * 1500, "max_tokens": 1},
}


class Hostile(NamedTuple):
    parts: list[bytes]
    pause_s: float = 0.0  # between the parts
    half_close: bool = False
    stop_after: int | None = None  # bytes of the answer; None: it must answer


def base(draw: random.Random, model: str) -> tuple[str, dict[str, Any]]:
    """A small request that is in order."""
    path = draw.choice(PATHS)
    body: dict[str, Any] = {"model": model}
    if path == "/v1/chat/completions":
        body |= {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    elif path == "/v1/completions":
        body |= {"prompt": "Hi", "max_tokens": 1}
    elif path == "/v1/responses":
        body |= {"input": "Hi", "max_output_tokens": 1}
    else:
        name = {"/v1/embeddings": "input", "/tokenize": "prompt", "/detokenize": "tokens"}[path]
        body[name] = [5, 6] if name == "tokens" else "Hi"
    return path, body


def bad_json(draw: random.Random, model: str) -> Hostile:
    path, body = base(draw, model)
    text = json.dumps(body)
    cut = draw.randint(0, len(text) - 1)
    forms = (
        text[:cut], text + text, text.replace('"', "'"), text.replace(":", "=", 1),
        text[:-1] + ",}",
        "\ufeff" + text, text + "\0", "[" + text, "/*" + text, text.replace("{", "{" * 3, 1),
        text[:-1] + ', "model": 3}', "", " ", "true",
    )  # fmt: skip
    return Hostile([post(path, draw.choice(forms).encode())])


def random_bytes(draw: random.Random, model: str) -> Hostile:
    return Hostile([post(draw.choice(PATHS), draw.randbytes(draw.choice((1, 40, 5000))))])


def invalid_utf8(draw: random.Random, model: str) -> Hostile:
    path, body = base(draw, model)
    data = bytearray(json.dumps(body).encode())
    wrong = draw.choice((b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"\x80"))
    at = draw.randint(0, len(data))
    return Hostile([post(path, bytes(data[:at] + wrong + data[at:]))])


def wrong_value(draw: random.Random) -> Any:
    simple: list[Any] = [
        None, True, False, 0, -1, 2**31, -(2**63) - 1, 10**30, 0.5, -0.0, 1e308, "", "1", "auto",
        [], {}, [None], [[]], [{}], {"a": 1}, {"type": "x"}, [1, "a"], [-1], ["a"] * 3000,
        {str(number): number for number in range(2000)},
    ]  # fmt: skip
    return draw.choice([*simple, draw.choice(TEXTS)])


def wrong_types(draw: random.Random, model: str) -> Hostile:
    path, body = base(draw, model)
    for _ in range(draw.randint(1, 3)):
        body[draw.choice(FIELDS)] = wrong_value(draw)
    return Hostile([post(path, body)])


def wrong_messages(draw: random.Random, model: str) -> Hostile:
    """Values that make no sense inside a conversation."""
    message: dict[str, Any] = {"role": "user", "content": "Hi"}
    message[draw.choice(("role", "content", "name", "tool_calls", "refusal", "x"))] = wrong_value(
        draw
    )
    many = min(5000, 500_000 // len(str(message)))
    parts = draw.choice((
        [message], [message] * many, message, [[message]],
        [{"role": "user", "content": [{"type": "image_url",
                                       "image_url": {"url": "http://127.0.0.1:1/x.png"}}]}],
        [{"role": "tool", "content": "x", "tool_call_id": "no"}],
        [{"role": "assistant", "tool_calls": [{"id": 1, "function": {"arguments": "{"}}]}],
    ))  # fmt: skip
    return Hostile([post(PATHS[0], {"model": model, "messages": parts, "max_tokens": 1})])


def huge_numbers(draw: random.Random, model: str) -> Hostile:
    """Numbers that JSON writes and a computer does not hold, NaN among them."""
    path, body = base(draw, model)
    name = draw.choice(FIELDS)
    body[name] = "@"
    text = json.dumps(body).replace('"@"', draw.choice(HUGE))
    return Hostile([post(path, text.encode())])


def deep_nesting(draw: random.Random, model: str) -> Hostile:
    path, body = base(draw, model)
    depth = draw.choice((70, 1000, 100_000))
    opening, closing = draw.choice((("[", "]"), ('{"a":', "}")))
    deep = opening * depth + "1" + closing * draw.choice((depth, 0))
    body[draw.choice(FIELDS)] = "@"
    return Hostile([post(path, json.dumps(body).replace('"@"', deep, 1).encode())])


def bad_grammar(draw: random.Random, model: str) -> Hostile:
    schema = draw.choice(SCHEMAS)
    if draw.random() < 0.3:
        for _ in range(draw.choice((5, 60))):
            schema = {"type": "object", "properties": {"a": schema}}
    form = draw.choice((
        {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}},
        {"type": "json_schema", "json_schema": schema}, {"type": "json_schema"},
        {"type": "regex", "regex": "(" * 100}, schema,
    ))  # fmt: skip
    body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    if draw.random() < 0.3:
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        return Hostile([post(PATHS[0], body | {"tools": [tool], "tool_choice": "required"})])
    return Hostile([post(PATHS[0], body | {"response_format": form})])


def huge_lists(draw: random.Random, model: str) -> Hostile:
    """A megabyte of stop strings, of biases, of prompts."""
    path, body = base(draw, model)
    name, value = draw.choice((
        ("stop", ["x" * 250] * 4000), ("stop", ["x" * 1_000_000]), ("stop", [""] * 200_000),
        ("logit_bias", {str(number): -100 for number in range(70_000)}),
        ("prompt", ["a"] * 100_000), ("prompt", [[1]] * 100_000), ("prompt", [1] * 400_000),
        ("input", ["b"] * 100_000), ("tokens", [3] * 400_000), ("tools", [{}] * 100_000),
        ("stop_token_ids", list(range(100_000))), ("prompt", "word " * 200_000),
        ("metadata", {str(number): "x" for number in range(60_000)}),
    ))  # fmt: skip
    return Hostile([post(path, body | {name: value})])


def bad_http(draw: random.Random, model: str) -> Hostile:
    """Lines and headers that are out of order."""
    path, body = base(draw, model)
    data = json.dumps(body).encode()
    forms = (
        b"GARBAGE\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        post(path, data, "x: " + "y" * 100_000), post(path, data, *["a: b"] * 5000),
        post(path, data, length=10**18), post(path, data, "content-length: 3"),
        post(path, data, "transfer-encoding: chunked"), post(path, data, "bad header"),
        post("/" + "a" * 100_000, data), post("/v1/nothing", data), post(path + "/../..", data),
        post("//", data), post(path, data, "content-encoding: gzip"),
        post(path, data, "expect: 200-maybe"), post(path, data, "content-type: text/xml"),
        post(path, data).replace(b"POST", draw.choice((b"PUT", b"GET", b"BREW", b"OPTIONS")), 1),
        post(path, data).replace(b"host", b"ho\x00st", 1), post(path, data, "authorization: x\xff"),
        b"POST " + path.encode() + b" HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        b"ffffffffffffffffff\r\n", b"\r\n" * 3000, post(path, data, "upgrade: websocket",
                                                        "connection: upgrade"),
    )  # fmt: skip
    return Hostile([draw.choice(forms)], stop_after=1)


def slow_loris(draw: random.Random, model: str) -> Hostile:
    """Bytes that come one by one, for longer than anybody has patience."""
    path, body = base(draw, model)
    data = post(path, body)
    cut = draw.randint(10, len(data) - 10)
    return Hostile([data[:cut], *(data[at : at + 1] for at in range(cut, cut + 3))], pause_s=1.0,
                   stop_after=1)  # fmt: skip


def half_closed(draw: random.Random, model: str) -> Hostile:
    """The client ends its side: in the middle of a request, or behind a whole one."""
    path, body = base(draw, model)
    data = post(path, body)
    cut = len(data) if draw.random() < 0.5 else draw.randint(1, len(data) - 1)
    return Hostile([data[:cut]], half_close=True, stop_after=1)


def gone(draw: random.Random, model: str) -> Hostile:
    """All is sent, and nobody is there to read the answer."""
    path, body = base(draw, model)
    return Hostile([post(path, body)], stop_after=0)


KINDS: dict[Callable[[random.Random, str], Hostile], int] = {
    bad_json: 16, random_bytes: 6, invalid_utf8: 8, wrong_types: 22, wrong_messages: 8,
    huge_numbers: 10, deep_nesting: 8, bad_grammar: 6, huge_lists: 3, bad_http: 7, slow_loris: 2,
    half_closed: 4, gone: 2,
}  # fmt: skip  # how many of a hundred or so


def draw_hostile(draw: random.Random, model: str) -> tuple[str, Hostile]:
    make = draw.choices(list(KINDS), list(KINDS.values()))[0]
    return make.__name__, make(draw, model)
