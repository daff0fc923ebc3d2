"""Anthropic's own client on the other side of a real socket: messages whole and streamed, tools and
the way back, thoughts, tokens counted, errors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from api_outputs import asked_for, rendered
from live_server import LiveServer, live_server
from test_server_thinking import TAGS, TEMPLATE
from tiny_tokenizers import demo, no_blanks

KEY = "key-for-clients"
HELLO: Any = [{"role": "user", "content": "hello there"}]
GREEDY: Any = {"extra_body": {"temperature": 0, "logit_bias": no_blanks()}}
WEATHER: Any = {
    "name": "weather",
    "description": "of a place",
    "input_schema": {
        "type": "object",
        "properties": {"place": {"enum": ["Bern", "Rome"]}, "now": {"type": "boolean"}},
        "required": ["place", "now"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("messages"), api_key=(KEY,)) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[anthropic.Anthropic]:
    """It sends its key as `x-api-key`."""
    with anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0) as client:
        yield client


def request_of(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": HELLO, "max_tokens": 24, **GREEDY, **fields}


def post(server: LiveServer, **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 4, "temperature": 0, **fields}
    return server.post("/v1/messages", body, headers={"x-api-key": KEY})


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_whole_and_streamed_are_the_same(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**request_of())
    assert (whole.type, whole.role, whole.model) == ("message", "assistant", "tiny")
    assert (whole.stop_reason, whole.stop_sequence) == ("max_tokens", None)
    assert whole.usage.output_tokens == 24
    assert whole._request_id
    assert whole.id == f"msg_{whole._request_id}"
    with client.messages.stream(**request_of()) as stream:
        assert "".join(stream.text_stream) == text_of(whole)
        final = stream.get_final_message()
    assert final.stop_reason == "max_tokens"
    assert final.usage.output_tokens == 24
    assert final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0) == (
        whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    )


def test_the_order_of_events(server: LiveServer) -> None:
    response = post(server, stream=True)
    lines = response.text.split("\n")
    kinds = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert set(kinds[3:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert [event["type"] for event in events] == kinds
    assert events[0]["message"]["stop_reason"] is None
    assert response.headers["request-id"] == response.headers["x-request-id"]


def test_system_prompts_and_turns_reach_the_prompt(client: anthropic.Anthropic) -> None:
    """The same prompt has the same answer, however it is written."""
    turns = [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]
    block: Any = {"type": "text", "text": "one\ntwo", "cache_control": {"type": "ephemeral"}}
    plain = text_of(client.messages.create(**request_of()))
    several = text_of(client.messages.create(**request_of(messages=turns, system="Be brief.")))
    system: Any = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    message = {"role": "user", "content": [block]}
    one = text_of(client.messages.create(**request_of(messages=[message], system=system)))
    assert one == several != plain


def test_stop_sequences(client: anthropic.Anthropic) -> None:
    text = text_of(client.messages.create(**request_of()))
    stop = text[5:8]
    made = client.messages.create(**request_of(stop_sequences=["never there", stop]))
    assert text_of(made) == text[: text.index(stop)]
    assert (made.stop_reason, made.stop_sequence) == ("stop_sequence", stop)
    with client.messages.stream(**request_of(stop_sequences=[stop])) as stream:
        final = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", stop)


def test_the_end_of_a_turn_and_of_the_context(server: LiveServer) -> None:
    ended = post(server, max_tokens=200, output_config={"format": schema_format("yes")}).json()
    assert ended["stop_reason"] == "end_turn"
    assert json.loads(ended["content"][0]["text"]) == "yes"
    long = post(server, messages=[{"role": "user", "content": "a " * 2000}], max_tokens=4000)
    assert long.json()["stop_reason"] == "model_context_window_exceeded"


def schema_format(text: str) -> dict[str, Any]:
    return {"type": "json_schema", "schema": {"enum": [text]}}


def test_tools_and_the_way_back(client: anthropic.Anthropic) -> None:
    options = request_of(tools=[WEATHER], tool_choice={"type": "any"}, max_tokens=200)
    made = client.messages.create(**options)
    assert made.stop_reason == "tool_use"
    calls = [block for block in made.content if block.type == "tool_use"]
    assert calls
    for call in calls:
        assert call.name == "weather"
        assert set(call.input) == {"place", "now"}
    with client.messages.stream(**options) as stream:
        final = stream.get_final_message()
    streamed = [block for block in final.content if block.type == "tool_use"]
    assert [call.input for call in streamed] == [call.input for call in calls]
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"} for call in calls
    ]
    again = [*HELLO, made.to_param(), {"role": "user", "content": results}]
    none: Any = {"type": "none"}
    answer = client.messages.create(**request_of(messages=again, tools=[WEATHER], tool_choice=none))
    assert answer.stop_reason == "max_tokens"
    assert all(block.type == "text" for block in answer.content)


def test_one_call_at_most(client: anthropic.Anthropic) -> None:
    one: Any = {"type": "any", "disable_parallel_tool_use": True}
    made = client.messages.create(**request_of(tools=[WEATHER], tool_choice=one, max_tokens=200))
    assert [block.type for block in made.content] == ["tool_use"]
    named: Any = {"type": "tool", "name": "weather"}
    made = client.messages.create(**request_of(tools=[WEATHER], tool_choice=named, max_tokens=200))
    assert [block.type for block in made.content] == ["tool_use"]


def test_a_call_that_is_cut_off_holds_what_there_is(client: anthropic.Anthropic) -> None:
    options = request_of(tools=[WEATHER], tool_choice={"type": "any"}, max_tokens=24)
    made = client.messages.create(**options)
    assert made.stop_reason == "max_tokens"
    with client.messages.stream(**options) as stream:
        final = stream.get_final_message()
    assert [block.to_dict() for block in final.content] == [
        block.to_dict() for block in made.content
    ]


def test_errors_of_tools_are_told_to_the_model(client: anthropic.Anthropic) -> None:
    call = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"place": "Bern"}}
    counts = {}
    for is_error in (False, True):
        result = {"type": "tool_result", "tool_use_id": "t1", "content": "x", "is_error": is_error}
        turns: Any = [
            *HELLO,
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ]
        counts[is_error] = client.messages.count_tokens(model="tiny", messages=turns).input_tokens
    assert counts[True] > counts[False]


def test_tokens_are_counted_as_they_are_used(client: anthropic.Anthropic) -> None:
    prompt: Any = {"model": "tiny", "messages": HELLO, "system": "Be brief.", "tools": [WEATHER]}
    counted = client.messages.count_tokens(**prompt).input_tokens
    used = client.messages.create(**prompt, max_tokens=1).usage
    assert counted == used.input_tokens + (used.cache_read_input_tokens or 0)
    assert counted > client.messages.count_tokens(model="tiny", messages=HELLO).input_tokens


def test_what_the_prefix_cache_had_is_told(client: anthropic.Anthropic) -> None:
    prompt: Any = {"model": "tiny", "messages": [{"role": "user", "content": "never said " * 40}]}
    counted = client.messages.count_tokens(**prompt).input_tokens
    first, second = (client.messages.create(**prompt, max_tokens=1).usage for _ in range(2))
    for usage in (first, second):
        assert usage.cache_read_input_tokens is not None
        assert usage.input_tokens + usage.cache_read_input_tokens == counted
    assert first.input_tokens > counted - 16  # others begin in the same way
    assert second.input_tokens <= 16  # all but the last page, at most
    with client.messages.stream(**prompt, max_tokens=1) as stream:
        streamed = stream.get_final_message().usage
    assert streamed.cache_read_input_tokens == second.cache_read_input_tokens
    assert streamed.input_tokens == second.input_tokens


def test_other_fields_are_taken(client: anthropic.Anthropic) -> None:
    cache: Any = {"type": "ephemeral", "ttl": "1h"}
    made = client.messages.create(
        model="tiny",
        messages=HELLO,
        max_tokens=4,
        metadata={"user_id": "somebody"},
        cache_control=cache,
        service_tier="auto",
        thinking={"type": "disabled"},
        extra_body={"temperature": 0.5, "top_k": 1, "top_p": 0.9},
        extra_headers={"anthropic-beta": "something-2025-01-01"},
    )
    greedy = client.messages.create(**request_of(max_tokens=4))
    assert text_of(made) == text_of(greedy)  # of the likeliest one token


def test_errors_are_the_clients_own(client: anthropic.Anthropic, server: LiveServer) -> None:
    with pytest.raises(anthropic.BadRequestError, match="max_tokens") as caught:
        client.messages.create(**request_of(max_tokens=0))
    body: Any = caught.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert body["request_id"] == caught.value.request_id
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**request_of(model="other"))
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    image: Any = {"type": "image", "source": {"type": "url", "url": "https://example.com/x.png"}}
    with pytest.raises(anthropic.BadRequestError, match="image"):
        client.messages.create(**request_of(messages=[{"role": "user", "content": [image]}]))
    search: Any = {"type": "web_search_20250305", "name": "web_search", "max_uses": 1}
    with pytest.raises(anthropic.BadRequestError, match="web_search"):
        client.messages.create(**request_of(tools=[search]))
    wrong = anthropic.Anthropic(base_url=server.url, api_key="another-key", max_retries=0)
    with wrong, pytest.raises(anthropic.AuthenticationError) as refused:
        wrong.messages.create(**request_of())
    assert refused.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]


def test_an_error_in_a_stream(client: anthropic.Anthropic, server: LiveServer) -> None:
    """Its status was 200 already."""
    options = request_of(max_tokens=2000, extra_body={"deadline_s": 0.3, "ignore_eos": True})
    with (
        server.fault("slow"),
        client.messages.stream(**options) as stream,
        pytest.raises(anthropic.APIStatusError) as caught,
    ):
        stream.until_done()
    assert caught.value.body["error"]["type"] == "timeout_error"  # type: ignore[index]


def test_models(client: anthropic.Anthropic) -> None:
    (model,) = client.models.list()
    assert (model.id, model.type, model.display_name) == ("tiny", "model", "tiny")
    assert client.models.retrieve("tiny").created_at == model.created_at


def test_bearer_keys_work_too(server: LiveServer) -> None:
    with anthropic.Anthropic(base_url=server.url, auth_token=KEY, max_retries=0) as client:
        assert client.messages.count_tokens(model="tiny", messages=HELLO).input_tokens


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[anthropic.Anthropic]:
    """Of a server whose model thinks unless it is told not to."""
    folder = tmp_path_factory.mktemp("thinking")
    with (
        live_server(folder, template=TEMPLATE, tags=TAGS) as server,
        anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0) as client,
    ):
        yield client


BODY = {"temperature": 0, "ignore_eos": True}


def thinking_request(**fields: Any) -> dict[str, Any]:
    mode = {"type": "enabled", "budget_tokens": 12}
    return request_of(**{"max_tokens": 40, "thinking": mode, "extra_body": BODY, **fields})


def test_thoughts_are_blocks_of_their_own(thinking: anthropic.Anthropic) -> None:
    whole = thinking.messages.create(**thinking_request())
    assert [block.type for block in whole.content] == ["thinking", "text"]
    assert whole.usage.output_tokens == 40
    assert whole.usage.output_tokens_details is not None
    assert whole.usage.output_tokens_details.thinking_tokens == 13  # the budget, and the tag
    with thinking.messages.stream(**thinking_request()) as stream:
        final = stream.get_final_message()
    assert [block.to_dict() for block in final.content] == [
        block.to_dict() for block in whole.content
    ]
    turns = [*HELLO, whole.to_param(), {"role": "user", "content": "go on"}]
    again = thinking.messages.count_tokens(model="tiny", messages=turns)
    assert again.input_tokens > whole.usage.input_tokens + 40 - 5


def test_no_thoughts_unless_they_are_asked_for(
    thinking: anthropic.Anthropic, client: anthropic.Anthropic
) -> None:
    off = thinking.messages.create(**thinking_request(thinking={"type": "disabled"}))
    silent = thinking.messages.create(**request_of(max_tokens=40, extra_body=BODY))
    assert [block.type for block in off.content] == ["text"]
    assert text_of(silent) == text_of(off)
    mode = {"type": "enabled", "budget_tokens": 12, "display": "omitted"}
    hidden = thinking.messages.create(**thinking_request(thinking=mode))
    shown = thinking.messages.create(**thinking_request())
    assert [block.type for block in hidden.content] == ["text"]
    assert text_of(hidden) == text_of(shown)
    with pytest.raises(anthropic.BadRequestError, match="does not think"):
        client.messages.create(**thinking_request())
    freely = client.messages.create(**thinking_request(thinking={"type": "adaptive"}))
    assert [block.type for block in freely.content] == ["text"]  # it does not think
    adaptive = thinking.messages.create(**thinking_request(thinking={"type": "adaptive"}))
    assert [block.type for block in adaptive.content] == ["thinking"]  # it comes to no end


def test_stop_sequences_are_those_of_the_answer(thinking: anthropic.Anthropic) -> None:
    stop = text_of(thinking.messages.create(**thinking_request()))[4:7]
    made = thinking.messages.create(**thinking_request(stop_sequences=[stop]))
    assert (made.stop_reason, made.stop_sequence) == ("stop_sequence", stop)
    assert [block.type for block in made.content] == ["thinking", "text"]


def test_tokens_are_counted_with_what_turns_thinking_off(thinking: anthropic.Anthropic) -> None:
    for mode in ({"type": "disabled"}, {"type": "enabled", "budget_tokens": 5}):
        prompt: Any = {"model": "tiny", "messages": HELLO, "thinking": mode}
        counted = thinking.messages.count_tokens(**prompt).input_tokens
        used = thinking.messages.create(**prompt, max_tokens=1).usage
        assert counted == used.input_tokens + (used.cache_read_input_tokens or 0)


def test_the_answer_goes_on_from_the_assistants_last_message(
    thinking: anthropic.Anthropic,
) -> None:
    turns: Any = [
        {"role": "user", "content": "Which?"},
        {"role": "assistant", "content": "It is ("},
    ]
    (prompt,) = rendered(asked_for("messages", messages=turns, max_tokens=9))
    text = demo().decode(prompt.ids, skip_special_tokens=False)
    assert text.endswith("<|im_start|>assistant\nIt is (")
    with pytest.raises(anthropic.BadRequestError, match="thinking"):
        thinking.messages.create(**thinking_request(messages=turns))
