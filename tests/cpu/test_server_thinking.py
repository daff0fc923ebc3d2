"""Thinking through the whole chain: a request's fields, the engine's tokens, what a client gets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from live_server import LiveServer, chat, events_of, live_server

# Opens a thought in the prompt, as DeepSeek-R1's does, and can be told not to, as Qwen3's can.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }} Call as <tool_call>{}</tool_call>{% endif %}"
    "<|im_start|>assistant\n<think>\n"
    "{% if enable_thinking is defined and not enable_thinking %}\n</think>\n\n{% endif %}"
)
TAGS = ("<think>", "</think>")
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"place": {"enum": ["Bern", "Rome"]}},
            "required": ["place"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("thinking")
    with live_server(folder, template=TEMPLATE, tags=TAGS) as made:
        yield made


def asked(server: LiveServer, path: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def streamed(server: LiveServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with httpx.stream("POST", server.url + path, json={**body, "stream": True}, timeout=30) as made:
        return list(events_of(made.iter_lines()))


def test_the_limit_ends_the_thought_and_the_answer_goes_on(server: LiveServer) -> None:
    body = chat(max_tokens=40, thinking_token_budget=12, ignore_eos=True)
    whole = asked(server, **body)
    message = whole["choices"][0]["message"]
    assert message["reasoning_content"]
    assert message["content"]
    assert "think>" not in message["reasoning_content"] + message["content"]
    assert whole["usage"]["completion_tokens"] == 40
    # Twelve tokens of thought, and the tag that ended it.
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == 13
    unlimited = asked(server, **chat(max_tokens=40, ignore_eos=True))["choices"][0]["message"]
    assert unlimited["content"] == ""
    assert unlimited["reasoning_content"].startswith(message["reasoning_content"])


def test_a_stream_says_the_same(server: LiveServer) -> None:
    body = chat(max_tokens=40, thinking_token_budget=12, ignore_eos=True)
    message = asked(server, **body)["choices"][0]["message"]
    events = streamed(
        server, "/v1/chat/completions", {**body, "stream_options": {"include_usage": True}}
    )
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    kinds = [next(iter(delta)) for delta in deltas if delta]
    assert kinds == sorted(kinds, key=["role", "reasoning_content", "content"].index)
    for name in ("reasoning_content", "content"):
        assert "".join(delta.get(name, "") for delta in deltas) == message[name]
    assert len([kind for kind in kinds if kind == "reasoning_content"]) > 3
    assert events[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 13}


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_effort": "none"},
        {"reasoning": {"effort": "none"}},
        {"reasoning": {"enabled": False}},
        {"enable_thinking": False},
        {"thinking_token_budget": 0},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
)
def test_off(server: LiveServer, fields: dict[str, Any]) -> None:
    whole = asked(server, **chat(max_tokens=8, ignore_eos=True, **fields))
    message = whole["choices"][0]["message"]
    assert message["content"]
    assert "reasoning_content" not in message
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_an_effort_is_a_limit(server: LiveServer) -> None:
    whole = asked(server, **chat(max_tokens=530, ignore_eos=True, reasoning_effort="minimal"))
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == 513
    assert whole["choices"][0]["message"]["content"]


def test_thoughts_may_be_left_out(server: LiveServer) -> None:
    body = chat(max_tokens=30, thinking_token_budget=12, ignore_eos=True)
    shown = asked(server, **body)
    hidden = asked(server, **body, include_reasoning=False)
    assert "reasoning_content" not in hidden["choices"][0]["message"]
    content = hidden["choices"][0]["message"]["content"]
    assert content == shown["choices"][0]["message"]["content"]
    assert hidden["usage"] == shown["usage"]


def test_stop_strings_are_for_the_answer(server: LiveServer) -> None:
    body = chat(max_tokens=40, thinking_token_budget=12, ignore_eos=True)
    message = asked(server, **body)["choices"][0]["message"]
    in_thought = message["reasoning_content"][3:6]
    again = asked(server, **body, stop=[in_thought])["choices"][0]["message"]
    assert again["reasoning_content"] == message["reasoning_content"]
    in_answer = message["content"][3:6]
    cut = asked(server, **body, stop=[in_answer])["choices"][0]
    assert cut["finish_reason"] == "stop"
    assert cut["message"]["content"] == message["content"].partition(in_answer)[0]


def test_a_schema_is_for_the_answer(server: LiveServer) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    format = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    body = chat(max_tokens=200, thinking_token_budget=12, response_format=format)
    choice = asked(server, **body)["choices"][0]
    assert choice["message"]["reasoning_content"]
    assert isinstance(json.loads(choice["message"]["content"])["ok"], bool)


def test_calls_follow_a_thought(server: LiveServer) -> None:
    body = chat(max_tokens=200, thinking_token_budget=12, tools=[TOOL], tool_choice="required")
    choice = asked(server, **body)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"]
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["place"] in ("Bern", "Rome")
    events = streamed(server, "/v1/chat/completions", body)
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    kinds = [next(iter(delta)) for delta in deltas if delta]
    assert kinds == sorted(kinds, key=["role", "reasoning_content", "tool_calls"].index)


def test_reasoning_items_of_responses(server: LiveServer) -> None:
    body = {
        "model": "tiny",
        "input": "hello",
        "temperature": 0,
        "max_output_tokens": 40,
        "thinking_token_budget": 12,
        "ignore_eos": True,
    }
    whole = asked(server, "/v1/responses", **body)
    thought, message = whole["output"]
    assert (thought["type"], message["type"]) == ("reasoning", "message")
    assert thought["content"][0]["type"] == "reasoning_text"
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": 13}
    slow = server.faults / "slow"  # so that tokens do not come in the same piece
    slow.touch()
    events = streamed(server, "/v1/responses", body)
    slow.unlink()
    told = [event["delta"] for event in events if event["type"] == "response.reasoning_text.delta"]
    assert "".join(told) == thought["content"][0]["text"]
    assert len(told) > 3
    assert events[-1]["response"]["output"][0]["content"] == thought["content"]
    # What came is sent back with the next question.
    again = [thought, message, {"role": "user", "content": "and?"}]
    more = asked(server, "/v1/responses", **{**body, "input": again})
    without = asked(server, "/v1/responses", **{**body, "input": again[1:]})
    assert more["usage"]["input_tokens"] > without["usage"]["input_tokens"]


def test_a_client_reads_the_stream_of_a_response(server: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any") as client:
        events = list(
            client.responses.create(
                model="tiny",
                input="hello",
                temperature=0,
                max_output_tokens=40,
                stream=True,
                extra_body={"thinking_token_budget": 12, "ignore_eos": True},
            )
        )
    assert "response.reasoning_text.done" in [event.type for event in events]
    final = events[-1]
    assert final.type == "response.incomplete"
    assert [item.type for item in final.response.output] == ["reasoning", "message"]
    assert final.response.usage is not None
    assert final.response.usage.output_tokens_details.reasoning_tokens == 13


def test_a_killed_engine_goes_on_with_its_thought(server: LiveServer) -> None:
    body = chat(max_tokens=120, thinking_token_budget=60, ignore_eos=True)
    expected = asked(server, **body)["choices"][0]["message"]
    deltas: list[dict[str, Any]] = []
    with httpx.stream(
        "POST", server.url + "/v1/chat/completions", json={**body, "stream": True}, timeout=60
    ) as response:
        for number, event in enumerate(events_of(response.iter_lines())):
            if number == 10:
                server.kill_engine()
            deltas += [choice["delta"] for choice in event["choices"]]
    for name in ("reasoning_content", "content"):
        assert "".join(delta.get(name, "") for delta in deltas) == expected[name]


def test_contradictions_are_named(server: LiveServer) -> None:
    response = server.post(
        "/v1/chat/completions", chat(reasoning_effort="high", enable_thinking=False)
    )
    assert response.status_code == 400
    error = response.json()["error"]
    assert "enable_thinking and reasoning_effort contradict" in error["message"]
