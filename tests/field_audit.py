"""Every field that a route of the server accepts, found by walking the models that check requests;
the cases that show what each of them does; and a server to show it on.

    @case(("chat", "completions"), "n")         # shows a field of a route
    def _(api: Api, owner: str) -> None: ...

    @case(("UserMessage",), "name")             # or of an object in a request, by its class
    def _(api: Api) -> None: ...
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import Any, get_args

import httpx
from live_server import RECIPE, LiveServer, until, write_model
from pydantic import BaseModel
from tiny_tokenizers import byte_level_json

from ridgeline.recipe import edited
from ridgeline.server.config import ServerConfig
from ridgeline.server.protocol.openapi import PATHS
from ridgeline.server.protocol.requests.parsing import REQUESTS

OPENAI = ("chat", "completions", "responses")
TEXT = (*OPENAI, "messages")  # routes that make text
TAGS = ("<think>", "</think>")
NEWER = ("responses", "messages")  # whose usage is told in other words
DOCS = Path(__file__).parent.parent / "docs" / "serve.md"
SEATS = 4  # that the server has
# Shows all that a message has, and whatever else it is given.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m | tojson }}<|im_end|>\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }} <tool_call>{# as tool_calls #}{% endif %}"
    "{% if note %}{{ note }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if enable_thinking %}<think>\n{% endif %}"
)
BASES: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8},
    "completions": {"prompt": "hello", "max_tokens": 8},
    "responses": {"input": "hello", "max_output_tokens": 8},
    "messages": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8},
    "count_tokens": {"messages": [{"role": "user", "content": "hello"}]},
    "embeddings": {"input": "hello"},
    "tokenize": {"prompt": "hello"},
    "detokenize": {"tokens": [70, 71]},
}

Shows = Callable[..., None]  # takes the server, and the owner if it makes a difference
CASES: dict[str, Shows] = {}


def case(owners: Sequence[str], *fields: str) -> Callable[[Shows], Shows]:
    def add(shows: Shows) -> Shows:
        for owner in owners:
            for field in fields:
                assert f"{owner}.{field}" not in CASES, f"{owner}.{field} has two cases"
                CASES[f"{owner}.{field}"] = shows
        return shows

    return add


def accepted_fields() -> Iterator[str]:
    """`chat.temperature` for the fields of routes, `UserMessage.name` for those of objects."""
    waiting: list[type[BaseModel]] = []
    for route, model in REQUESTS.items():
        yield from _fields(route, model, waiting)
    walked: set[type[BaseModel]] = set()
    while waiting:
        model = waiting.pop()
        if model not in walked:
            walked.add(model)
            yield from _fields(model.__name__, model, waiting)


def _fields(owner: str, model: type[BaseModel], inner: list[type[BaseModel]]) -> Iterator[str]:
    refused = getattr(model, "not_done", {})
    for name, field in model.model_fields.items():
        if name not in refused:
            inner += _models(field.annotation)
            yield f"{owner}.{field.alias or name}"


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)


@dataclass(frozen=True)
class Answer:
    """What came back, whichever route it came from."""

    route: str
    response: httpx.Response

    @property
    def status(self) -> int:
        return self.response.status_code

    @cached_property
    def json(self) -> dict[str, Any]:
        assert self.status == 200, self.response.text
        values: dict[str, Any] = self.response.json()
        return values

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """Of a stream."""
        lines = self.response.text.splitlines()
        return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]

    @property
    def choices(self) -> list[dict[str, Any]]:
        choices: list[dict[str, Any]] = self.json["choices"]
        return choices

    @property
    def texts(self) -> list[str]:
        if self.route == "chat":
            return [choice["message"]["content"] for choice in self.choices]
        if self.route == "completions":
            return [choice["text"] for choice in self.choices]
        if self.route == "messages":
            return ["".join(block.get("text", "") for block in self.json["content"])]
        items = [item for item in self.json["output"] if item["type"] == "message"]
        return ["".join(part["text"] for part in item["content"]) for item in items]

    @property
    def text(self) -> str:
        return self.texts[0]

    @property
    def is_cut(self) -> bool:
        """Whether it ended because it was long enough."""
        if self.route == "responses":
            return bool(self.json["status"] == "incomplete")
        if self.route == "messages":
            return bool(self.json["stop_reason"] == "max_tokens")
        return bool(self.choices[0]["finish_reason"] == "length")

    @property
    def num_prompt(self) -> int:
        if self.route == "count_tokens":
            return int(self.json["input_tokens"])
        usage = self.json["usage"]
        if self.route == "messages":  # which tells apart what was found in the cache
            return int(usage["input_tokens"] + usage["cache_read_input_tokens"])
        return int(usage["input_tokens" if self.route == "responses" else "prompt_tokens"])

    @property
    def num_output(self) -> int:
        usage = self.json["usage"]
        return int(usage["output_tokens" if self.route in NEWER else "completion_tokens"])

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Calls of tools: each with its name, and its arguments as text."""
        if self.route == "responses":
            return [item for item in self.json["output"] if item["type"] == "function_call"]
        if self.route == "messages":
            blocks = [block for block in self.json["content"] if block["type"] == "tool_use"]
            return [{**block, "arguments": json.dumps(block["input"])} for block in blocks]
        message = self.choices[0]["message"]
        return [call["function"] for call in message.get("tool_calls") or ()]

    @property
    def error(self) -> dict[str, Any]:
        assert self.status >= 400, self.response.text
        error: dict[str, Any] = self.response.json()["error"]
        return error


class Api:
    """The server, and the shortest request to each of its routes."""

    def __init__(self, server: LiveServer) -> None:
        self.server, self._client = server, httpx.Client(base_url=server.url, timeout=30)
        self._shown: set[tuple[Any, ...]] = set()
        self._no_thought: dict[str, float] = {}  # keeps a random model from opening a thought
        tag = {"prompt": TAGS[0], "add_special_tokens": False}
        (token,) = self.ask("tokenize", **tag).json["tokens"]
        if token < server.engine.config.vocab_size:
            self._no_thought = {str(token): -100}
        self.ends: list[str] = []  # ids of requests, in the order in which they ended
        meters = server.serving.meters
        self._ended, meters.ended = meters.ended, self._note_end  # type: ignore[method-assign]

    def show(self, key: str) -> None:
        """Run the case of a field; one that shows several fields is run once."""
        shows, owner = CASES[key], key.partition(".")[0]
        arguments = (owner,) if len(signature(shows).parameters) > 1 else ()
        done = (shows, *arguments)
        if done not in self._shown:
            shows(self, *arguments)
            self._shown.add(done)

    def body(self, route: str, fields: dict[str, Any]) -> dict[str, Any]:
        if route not in TEXT:
            return {"model": "tiny", **BASES[route], **fields}
        biases = {**self._no_thought, **fields.get("logit_bias", {})}
        body = {"model": "tiny", **BASES[route], "temperature": 0, **fields}
        return {**body, "logit_bias": biases} if biases else body

    def ask(self, route: str, request_id: str = "", /, **fields: Any) -> Answer:
        path = PATHS[route]  # type: ignore[index]
        headers = {"x-request-id": request_id} if request_id else {}
        return Answer(
            route, self._client.post(path, json=self.body(route, fields), headers=headers)
        )

    def refused(self, route: str, field: str, **fields: Any) -> None:
        """The request is refused with one line that names the field."""
        answer = self.ask(route, **fields)
        assert answer.status == 400, answer.response.text
        error = answer.error
        assert field in f"{error.get('param')} {error['message']}", error

    def in_chat(self, *messages: dict[str, Any], **fields: Any) -> Answer:
        return self.ask("chat", messages=list(messages), **fields)

    def decoded(self, *tokens: int) -> str:
        return str(self.ask("detokenize", tokens=list(tokens)).json["prompt"])

    @property
    def hit_tokens(self) -> int:
        return self.server.engine.stats.hit_tokens

    @property
    def num_held(self) -> int:
        """Requests that have reached the engine and not ended."""
        return len(self.server.engine._backend._held)  # type: ignore[attr-defined]

    @contextmanager
    def full(self) -> Iterator[None]:
        """Every seat is taken meanwhile, by a request that nothing makes way."""
        until(lambda: self.num_held == 0)
        fields = {"n": SEATS, "max_tokens": 2000, "priority": 2**31 - 1, "ignore_eos": True}
        body = {**self.body("chat", fields), "stream": True}
        with self._client.stream("POST", PATHS["chat"], json=body) as answer:
            assert answer.status_code == 200
            yield

    def goes_before(self, route: str, **fields: Any) -> bool:
        """Whether a request starts before one that takes all seats and came first."""
        first = {"n": SEATS, "max_tokens": 20, "ignore_eos": True}
        sent: list[Future[Answer]] = []
        del self.ends[:]
        with ThreadPoolExecutor(2) as threads:
            with self.full():
                sent.append(threads.submit(self.ask, "chat", "first", **first))
                until(lambda: self.num_held == 2)
                sent.append(threads.submit(self.ask, route, "second", **fields))
                until(lambda: self.num_held == 3)
            assert [answer.result().status for answer in sent] == [200, 200]
        order = [name for name in self.ends if name in ("first", "second")]
        return order == ["second", "first"]

    def _note_end(self, request_id: str, status: Any, reason: str) -> None:
        if request_id not in self.ends:
            self.ends.append(request_id)
        self._ended(request_id, status, reason)


@contextmanager
def audited_server(folder: Path) -> Iterator[Api]:
    write_model(folder, TEMPLATE, TAGS)
    tokenizer = byte_level_json(bos="<|im_start|>")
    tokenizer.add_tokens(list(TAGS))
    tokenizer.save(str(folder / "tokenizer.json"))
    recipe = edited(RECIPE, "limits.max_batch", SEATS)
    server = LiveServer(folder, ServerConfig(port=0), recipe)
    server.start()
    try:
        yield Api(server)
    finally:
        server.stop()
