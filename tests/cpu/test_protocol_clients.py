"""OpenAI's own client on the other side, without a socket: what it sends is understood, and what it
is sent it understands.
"""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from api_outputs import HELLO, MODEL, deltas_of, limits_of, output_of, streamed
from openai import BadRequestError, OpenAI, pydantic_function_tool
from openai.types.responses import ResponseTextDeltaEvent
from pydantic import BaseModel
from tiny_tokenizers import demo
from torch import tensor

from ridgeline.engine import Grammar
from ridgeline.server.protocol import (
    PATHS,
    ApiError,
    Asked,
    ParsedPrompt,
    error_body,
    parse,
    render,
    reply_for,
)


class Add(BaseModel):
    """Adds."""

    a: int
    b: int


CALL = '<tool_call>\n{"name": "Add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


class Server:
    """Says the same to everyone, and keeps what it was asked."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.asked: list[Asked] = []
        self.prompts: list[ParsedPrompt] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        routes = {path: route for route, path in PATHS.items()}
        try:
            return self._answer(routes[request.url.path], request.content)
        except ApiError as error:
            return httpx.Response(error.status, content=error_body(error))

    def _answer(self, route: Any, body: bytes) -> httpx.Response:
        tokenizer = demo()
        limits = limits_of(tokenizer)
        asked = parse(route, body, limits)
        prompts = render(asked, tokenizer, limits)
        self.asked.append(asked)
        self.prompts += prompts
        reply = reply_for(asked, prompts, tokenizer, "r1")
        if route == "embeddings":
            outputs = [output_of(prompt, embedding=tensor([0.6, 0.8])) for prompt in prompts]
            return httpx.Response(200, content=reply.whole(outputs))
        deltas, output = deltas_of(prompts[0], [self.text])
        if not asked.stream:
            return httpx.Response(200, content=reply.whole([output]))
        headers = {"content-type": "text/event-stream"}
        return httpx.Response(200, content=streamed(reply, deltas, [output]), headers=headers)


@pytest.fixture
def client() -> Callable[[Server], OpenAI]:
    def connected(server: Server) -> OpenAI:
        transport = httpx.MockTransport(server)
        http = httpx.Client(transport=transport)
        return OpenAI(api_key="k", base_url="http://server/v1", http_client=http, max_retries=0)

    return connected


Connect = Callable[[Server], OpenAI]


def test_chats(client: Connect) -> None:
    server = Server("Hello née")
    chats = client(server).chat.completions
    made = chats.create(model=MODEL, messages=HELLO, seed=1, user="me")
    assert made.choices[0].message.content == "Hello née"
    options = {"stream_options": {"include_usage": True}, "extra_body": {"top_k": 5}}
    chunks = list(chats.create(model=MODEL, messages=HELLO, stream=True, **options))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello née"
    assert chunks[-1].usage == made.usage
    assert server.prompts[1].sampling.top_k == 5


def test_structured_output(client: Connect) -> None:
    server = Server('{"a": 1, "b": 2}')
    made = client(server).chat.completions.parse(
        model=MODEL,
        messages=HELLO,
        response_format=Add,
    )
    assert made.choices[0].message.parsed == Add(a=1, b=2)
    grammar = server.prompts[0].sampling.grammar
    assert grammar is not None
    assert grammar.kind == "json_schema"
    assert json.loads(grammar.text)["required"] == ["a", "b"]
    response = client(server).responses.parse(model=MODEL, input="Hello", text_format=Add)
    assert response.output_parsed == Add(a=1, b=2)
    assert server.prompts[1].sampling.grammar == Grammar.json_schema(json.loads(grammar.text))


def test_tools_and_the_way_back(client: Connect) -> None:
    server = Server(CALL)
    chats = client(server).chat.completions
    tools = [pydantic_function_tool(Add)]
    made = chats.parse(model=MODEL, messages=HELLO, tools=tools)
    message = made.choices[0].message
    assert message.tool_calls is not None
    assert message.tool_calls[0].function.parsed_arguments == Add(a=1, b=2)
    assert server.prompts[0].sampling.grammar is not None  # the client asks for strict tools
    answer = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}
    chats.create(model=MODEL, messages=[*HELLO, message, answer], tools=tools)
    text = demo().decode(server.prompts[-1].ids, skip_special_tokens=False)
    assert text.count('{"name": "Add", "arguments": {"a": 1, "b": 2}}') == 1
    with chats.stream(model=MODEL, messages=HELLO, tools=tools) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls[0].function.parsed_arguments == Add(a=1, b=2)


def test_responses(client: Connect) -> None:
    server = Server("Hello née")
    responses = client(server).responses
    made = responses.create(model=MODEL, input="Hello", instructions="Be brief.", store=False)
    assert made.output_text == "Hello née"
    with responses.stream(model=MODEL, input="Hello") as stream:
        events = list(stream)
        final = stream.get_final_response()
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == final.output_text == "Hello née"
    assert any(isinstance(event, ResponseTextDeltaEvent) for event in events)
    again = [
        {"role": "user", "content": "Hello"},
        *made.output,
        {"role": "user", "content": "Go on"},
    ]
    responses.create(model=MODEL, input=again)
    text = demo().decode(server.prompts[-1].ids, skip_special_tokens=False)
    assert "<|im_start|>assistant\nHello née<|im_end|>" in text


def test_calls_of_responses(client: Connect) -> None:
    tools = [{"type": "function", "name": "Add", "parameters": Add.model_json_schema()}]
    responses = client(Server(CALL)).responses
    made = responses.create(model=MODEL, input="Hello", tools=tools)
    call = made.output[0]
    assert (call.name, json.loads(call.arguments)) == ("Add", {"a": 1, "b": 2})
    answer = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
    responses.create(model=MODEL, input=[call, answer], tools=tools)


def test_embeddings(client: Connect) -> None:
    """The client asks for base64 by itself."""
    server = Server("")
    made = client(server).embeddings.create(model=MODEL, input=["a", "b"])
    assert server.asked[0].request.encoding_format == "base64"
    assert [entry.embedding for entry in made.data] == [pytest.approx([0.6, 0.8])] * 2


def test_errors(client: Connect) -> None:
    with pytest.raises(BadRequestError) as caught:
        client(Server("")).chat.completions.create(model=MODEL, messages=HELLO, n=0)
    assert (caught.value.param, caught.value.code) == ("n", "invalid_value")
