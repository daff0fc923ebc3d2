"""Fields that clients send, each pulled through the whole chain: what it promises is what comes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from live_server import LiveServer, chat, events_of, live_server

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("fields")) as made:
        yield made


@pytest.fixture(scope="module")
def lenient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("lenient"), unknown_fields="ignore") as made:
        yield made


def asked(server: LiveServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def refused(server: LiveServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = server.post(path, body)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def streamed(server: LiveServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with httpx.stream("POST", server.url + path, json={**body, "stream": True}, timeout=30) as made:
        assert made.status_code == 200, made.read()
        return list(events_of(made.iter_lines()))


def completion(prompt: str = "hello", **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "temperature": 0, **more}


def text_of(answer: dict[str, Any]) -> str:
    choice = answer["choices"][0]
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text


# Errors name what is wrong.


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"max_tokens": 0}, "max_tokens", "max_tokens is 0; "),
        ({"n": 0}, "n", "n is 0; "),
        ({"top_p": 1.5}, "top_p", "top_p is 1.5; "),
        ({"stream": 1}, "stream", "stream is 1; "),
        ({"stream": 0}, "stream", "stream is 0; "),
        ({"response_format": {"type": "regex"}}, "response_format", "give it as pattern or"),
        (
            {"response_format": {"type": "choice", "choice": ["a"]}},
            "response_format.choices",
            "response_format.choices is missing",
        ),
        (
            {"response_format": {"type": "grammar"}},
            "response_format.grammar",
            "response_format.grammar is missing",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]},
            "messages[0].content[0].x",
            "messages[0].content[0].x is not supported",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
            "messages[0].content[0].text is missing",
        ),
        ({"messages": [{"content": "a"}]}, "messages[0].role", "messages[0].role is missing"),
        ({"messages": ["a"]}, "messages[0]", "messages[0] is 'a'; it should be an object"),
        ({"messages": []}, "messages", "messages is a list of 0; give at least 1"),
        ({"reasoning": "high"}, "reasoning", "reasoning is 'high'; it should be an object"),
        (
            {"messages": [{"role": "user", "content": "a", "user": 1}]},
            "messages[0].user",
            "messages[0].user is not supported",
        ),
    ],
)
def test_errors_name_the_field(
    server: LiveServer, fields: dict[str, Any], param: str, message: str
) -> None:
    error = refused(server, CHAT, chat(**fields))
    assert error["param"] == param
    assert message in error["message"]


def test_an_input_item_is_named_by_its_field(server: LiveServer) -> None:
    item = {"type": "reasoning", "reasoning": "x"}
    error = refused(server, RESPONSES, {"model": "tiny", "input": [item]})
    assert error["param"] == "input[0].reasoning"


# What means "off" passes.


@pytest.mark.parametrize(
    "fields",
    [
        {"store": False},
        {"service_tier": "auto"},
        {"top_logprobs": 0},
        {"logprobs": False, "top_logprobs": 0},
        {"reasoning_effort": "high"},
        {"reasoning": {"effort": "low", "summary": "auto"}},
        {"guided_decoding_backend": "xgrammar"},
        {"stream_options": None},
    ],
)
def test_off_changes_nothing(server: LiveServer, fields: dict[str, Any]) -> None:
    plain = asked(server, CHAT, chat(max_tokens=6))
    assert text_of(asked(server, CHAT, chat(max_tokens=6, **fields))) == text_of(plain)


@pytest.mark.parametrize(
    "include", [[], ["reasoning.encrypted_content"], ["message.output_text.logprobs"]]
)
def test_include(server: LiveServer, include: list[str]) -> None:
    body = {"model": "tiny", "input": "hi", "max_output_tokens": 3, "include": include}
    (message,) = asked(server, RESPONSES, body)["output"]
    logprobs = message["content"][0]["logprobs"]
    assert len(logprobs) == (3 if "message.output_text.logprobs" in include else 0)


def test_marks_for_a_cache(server: LiveServer) -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    part = {"type": "text", "text": "hello"}
    plain = chat(max_tokens=6)
    marked = {**plain, "messages": [{"role": "user", "content": [{**part, **mark}], **mark}]}
    assert text_of(asked(server, CHAT, marked)) == text_of(asked(server, CHAT, plain))


# What can be honoured is.


def test_a_temperature_above_two(server: LiveServer) -> None:
    texts = {
        text_of(asked(server, CHAT, chat(max_tokens=60, seed=3, temperature=value)))
        for value in (0.5, 2, 50)
    }
    assert len(texts) == 3
    assert "100" in refused(server, CHAT, {**chat(), "temperature": 101})["message"]


def test_of_two_limits_the_smaller_holds(server: LiveServer) -> None:
    for limits in ((3, 9), (9, 3)):
        body = chat(max_tokens=limits[0], max_completion_tokens=limits[1], ignore_eos=True)
        assert asked(server, CHAT, body)["usage"]["completion_tokens"] == 3


FORMS: list[tuple[dict[str, Any], str]] = [
    ({"guided_regex": "[ab]{3}"}, "[ab]{3}"),
    ({"guided_choice": ["yes", "no"]}, "yes|no"),
    ({"guided_grammar": 'root ::= "x" [0-9]'}, "x[0-9]"),
    ({"guided_json": {"enum": ["u", "v"]}}, '"[uv]"'),
    ({"guided_json": '{"enum": ["u", "v"]}'}, '"[uv]"'),
    ({"structured_outputs": {"regex": "[ab]{3}"}}, "[ab]{3}"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
    ({"structured_outputs": {"grammar": 'root ::= "x" [0-9]'}}, "x[0-9]"),
    ({"structured_outputs": {"json": {"enum": ["u", "v"]}}}, '"[uv]"'),
    ({"response_format": {"type": "regex", "regex": "[ab]{3}"}}, "[ab]{3}"),
    ({"response_format": {"type": "regex", "pattern": "[ab]{3}"}}, "[ab]{3}"),
]


@pytest.mark.parametrize(("fields", "form"), FORMS)
def test_the_form_of_an_output(server: LiveServer, fields: dict[str, Any], form: str) -> None:
    assert re.fullmatch(form, text_of(asked(server, CHAT, chat(max_tokens=30, **fields))))
    assert re.fullmatch(
        form, text_of(asked(server, COMPLETIONS, completion(max_tokens=30, **fields)))
    )
    if "response_format" not in fields:
        body = {"model": "tiny", "input": "hi", "max_output_tokens": 30, **fields}
        (message,) = asked(server, RESPONSES, body)["output"]
        assert re.fullmatch(form, message["content"][0]["text"])


def test_any_json_object(server: LiveServer) -> None:
    body = chat(max_tokens=300, structured_outputs={"json_object": True}, logit_bias={"92": 5})
    choice = asked(server, CHAT, body)["choices"][0]
    assert choice["message"]["content"].startswith("{")


def test_two_forms_are_too_many(server: LiveServer) -> None:
    error = refused(server, CHAT, chat(guided_regex="a", guided_choice=["b"]))
    assert "guided_regex and guided_choice" in error["message"]


def test_a_message_is_continued(server: LiveServer) -> None:
    """The template has the mark of a turn's end behind each message: here it must not be."""
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Well, "}]
    body = {**chat(max_tokens=4), "messages": messages, "return_token_ids": True}

    def prompt_of(**fields: Any) -> str:
        ids = asked(server, CHAT, {**body, **fields})["prompt_token_ids"]
        text: str = server.post("/detokenize", {"tokens": ids}).json()["prompt"]
        return text

    assert prompt_of().endswith("Well, <|im_end|>\n<|im_start|>assistant")
    assert prompt_of(continue_final_message=True).endswith("<|im_start|>assistant\nWell, ")
    both = {"continue_final_message": True, "add_generation_prompt": False}
    assert prompt_of(**both).endswith("assistant\nWell, ")
    error = refused(
        server, CHAT, {**body, "continue_final_message": True, "add_generation_prompt": True}
    )
    assert error["param"] == "continue_final_message"
    assert (
        "last message of the assistant"
        in (refused(server, CHAT, chat(continue_final_message=True))["message"])
    )


def test_special_tokens_are_shown_where_that_is_asked_for(server: LiveServer) -> None:
    mark = server.post("/tokenize", {"prompt": "<|im_start|>"}).json()["tokens"]
    body = completion(max_tokens=3, logit_bias={str(mark[0]): 100})
    assert text_of(asked(server, COMPLETIONS, body)) == ""
    shown = asked(server, COMPLETIONS, {**body, "skip_special_tokens": False})
    assert text_of(shown) == "<|im_start|>" * 3


def test_ids_are_returned(server: LiveServer) -> None:
    prompt = server.post("/tokenize", {"prompt": "hello"}).json()["tokens"]
    body = completion(max_tokens=5, return_token_ids=True, ignore_eos=True)
    choice = asked(server, COMPLETIONS, body)["choices"][0]
    assert choice["prompt_token_ids"] == prompt
    assert len(choice["token_ids"]) == 5
    text = server.post("/detokenize", {"tokens": choice["token_ids"]}).json()["prompt"]
    assert text == choice["text"]
    events = streamed(server, COMPLETIONS, body)
    assert events[0]["choices"][0]["prompt_token_ids"] == prompt
    told = [token for event in events for token in event["choices"][0]["token_ids"]]
    assert told == choice["token_ids"]
    whole = asked(server, CHAT, chat(max_tokens=5, return_token_ids=True, ignore_eos=True))
    assert len(whole["prompt_token_ids"]) == whole["usage"]["prompt_tokens"]
    events = streamed(server, CHAT, chat(max_tokens=5, return_token_ids=True, ignore_eos=True))
    assert events[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    told = [token for event in events for token in event["choices"][0]["token_ids"]]
    assert told == whole["choices"][0]["token_ids"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_usage_goes_along_with_each_chunk(server: LiveServer, path: str) -> None:
    """It counts the tokens that have come so far, however many came together."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = (chat if path == CHAT else completion)(
        max_tokens=6, stream_options=options, ignore_eos=True, logprobs=True if path == CHAT else 1
    )
    events, total = streamed(server, path, body), 0
    for event in events:
        for choice in event["choices"]:
            logprobs = choice["logprobs"] or {"content": [], "tokens": []}
            total += len(logprobs["content" if path == CHAT else "tokens"])
        assert event["usage"]["completion_tokens"] == total
    assert total == 6
    assert {event["usage"]["prompt_tokens"] for event in events} == {
        events[-1]["usage"]["prompt_tokens"]
    }


# Which tokens came from the prefix cache.


def test_cached_tokens(server: LiveServer) -> None:
    text = "a long text that is the same each time it is asked " * 8
    first = asked(server, CHAT, chat(text, max_tokens=2))["usage"]
    assert first["prompt_tokens_details"]["cached_tokens"] < 32
    again = asked(server, CHAT, chat(text, max_tokens=2))["usage"]
    cached = again["prompt_tokens_details"]["cached_tokens"]
    assert 64 <= cached < again["prompt_tokens"]
    salted = asked(server, CHAT, chat(text, max_tokens=2, cache_salt="other"))["usage"]
    assert salted["prompt_tokens_details"]["cached_tokens"] == 0
    events = streamed(
        server, CHAT, chat(text, max_tokens=2, stream_options={"include_usage": True})
    )
    assert events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
    prompts = [asked(server, COMPLETIONS, completion(text, max_tokens=2)) for _ in range(2)]
    assert prompts[1]["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64
    body = {"model": "tiny", "input": text, "max_output_tokens": 2}
    response = [asked(server, RESPONSES, body) for _ in range(2)][1]
    assert response["usage"]["input_tokens_details"]["cached_tokens"] >= 64


# Fields that nobody knows.


def test_unknown_fields_are_refused(server: LiveServer) -> None:
    error = refused(server, CHAT, chat(tempratur=1))
    assert error["param"] == "tempratur"
    assert "temperature" in error["message"]


def test_unknown_fields_may_be_ignored(lenient: LiveServer) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "hello", "mood": 1}], "at": 3}
    body = {**chat(max_tokens=4), "messages": [message], "chat_id": "x", "stream_options": {"y": 1}}
    response = lenient.post(CHAT, {**body, "stream": True})
    assert response.status_code == 200, response.text
    names = set(response.headers["x-ridgeline-ignored-fields"].split(", "))
    assert names == {
        "chat_id",
        "messages[0].at",
        "messages[0].content[0].mood",
        "stream_options.y",
    }
    plain = lenient.post(CHAT, chat(max_tokens=4))
    assert "x-ridgeline-ignored-fields" not in plain.headers
    # What is known and not done would change the answer: it is refused all the same.
    assert refused(lenient, CHAT, chat(functions=[]))["param"] == "functions"
    assert refused(lenient, CHAT, chat(top_p=7, chat_id="x"))["param"] == "top_p"
    response = lenient.post("/tokenize", {"prompt": "a", "\u00e9": 1})
    assert response.headers["x-ridgeline-ignored-fields"] == "?"
