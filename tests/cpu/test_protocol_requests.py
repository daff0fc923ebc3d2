"""Requests of the server's API: what passes, what is refused and by which name."""

import json
import time
from contextlib import suppress
from typing import Any

import pytest
from api_outputs import HELLO, MODEL, asked_for, limits_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import demo

from ridgeline.engine import Grammar
from ridgeline.server.protocol import ROUTES, ApiError, Asked, Route, error_body, parse, render
from ridgeline.server.protocol.requests.parsing import REQUESTS

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
FLAT_TOOL = {"type": "function", "name": "add"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TURN_OF_CALL = {
    "role": "user",
    "content": [{"type": "tool_use", "id": "t", "name": "add", "input": {}}],
}
ASKED: dict[Route, dict[str, Any]] = {
    "chat": {"messages": HELLO},
    "completions": {"prompt": "Hello"},
    "responses": {"input": "Hello"},
    "messages": {"messages": HELLO, "max_tokens": 9},
    "count_tokens": {"messages": HELLO},
    "embeddings": {"input": "Hello"},
    "tokenize": {"prompt": "Hello"},
    "detokenize": {"tokens": [5, 6]},
}


def refused(route: Route, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        asked_for(route, **{**ASKED[route], **fields})
    assert caught.value.type == "invalid_request_error"
    return caught.value


def refused_body(body: bytes, route: Route = "chat") -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(route, body, limits_of(demo()))
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize("route", ROUTES)
def test_the_least_request_passes(route: Route) -> None:
    asked = asked_for(route, **ASKED[route])
    assert (asked.route, asked.model, asked.stream) == (route, MODEL, False)
    assert (asked.priority, asked.deadline_s, asked.cache_salt) == (0, None, "")


def test_openai_defaults() -> None:
    chat = asked_for("chat", **ASKED["chat"]).sampling
    assert chat is not None
    assert (chat.temperature, chat.top_p, chat.top_k, chat.seed, chat.n) == (1.0, 1.0, 0, None, 1)
    assert chat.max_tokens == 2048  # all that the context leaves
    completion = asked_for("completions", **ASKED["completions"]).sampling
    assert completion is not None
    assert completion.max_tokens == 16


def test_sampling_fields_reach_the_engine() -> None:
    asked = asked_for(
        "chat",
        messages=HELLO,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=-1,
        frequency_penalty=2,
        seed=-1,
        stop=["a", "b"],
        stop_token_ids=[5],
        logit_bias={"12": -100},
        min_tokens=3,
        ignore_eos=True,
        max_completion_tokens=9,
        n=2,
        best_of=3,
        logprobs=True,
        top_logprobs=4,
        priority=5,
        deadline_s=2.5,
        cache_salt="me",
        response_format={"type": "json_object"},
    )
    sampling = asked.sampling
    assert sampling is not None
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-1, 2)
    assert (sampling.seed, sampling.stop, sampling.stop_ids) == (2**64 - 1, ("a", "b"), (5,))
    assert (sampling.logit_bias, sampling.min_tokens, sampling.ignore_eos) == ({12: -100}, 3, True)
    assert (sampling.max_tokens, sampling.n, sampling.best_of, sampling.logprobs) == (9, 2, 3, 4)
    assert sampling.grammar == Grammar.json_object()
    assert (asked.priority, asked.deadline_s, asked.cache_salt) == (5, 2.5, "me")


@pytest.mark.parametrize(
    ("format", "grammar"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, Grammar.json_object()),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
            Grammar.json_schema(SCHEMA),
        ),
        ({"type": "regex", "pattern": "[0-9]+"}, Grammar.regex("[0-9]+")),
        ({"type": "choice", "choices": ["a", "b"]}, Grammar.choice(["a", "b"])),
        ({"type": "grammar", "grammar": 'root ::= "a"'}, Grammar.ebnf('root ::= "a"')),
    ],
)
def test_response_formats(format: dict[str, Any], grammar: Grammar | None) -> None:
    sampling = asked_for("chat", messages=HELLO, response_format=format).sampling
    assert sampling is not None
    assert sampling.grammar == grammar


def test_a_schema_of_the_responses_route() -> None:
    format = {"type": "json_schema", "name": "n", "schema": SCHEMA}
    sampling = asked_for("responses", input="x", text={"format": format}).sampling
    assert sampling is not None
    assert sampling.grammar == Grammar.json_schema(SCHEMA)


# What clients send as a matter of course, with the values that pass.
COURSE = {
    "user": "me",
    "store": False,
    "metadata": {"a": "b"},
    "service_tier": "auto",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "in_memory",
    "safety_identifier": "s",
    "parallel_tool_calls": True,
}


def test_what_is_sent_as_a_matter_of_course_passes() -> None:
    chat = {"modalities": ["text"], "reasoning_effort": "none", "verbosity": "medium"}
    plain = asked_for("chat", messages=HELLO)
    assert asked_for("chat", messages=HELLO, **COURSE, **chat).sampling == plain.sampling
    more = {"background": False, "reasoning": {"effort": None}, "truncation": "disabled"}
    assert asked_for("responses", input="x", **COURSE, **more).sampling == plain.sampling


@pytest.mark.parametrize("route", ROUTES)
def test_null_is_as_good_as_nothing(route: Route) -> None:
    needed = {"model", *ASKED[route]}
    kind = REQUESTS[route]
    empty = {name: None for name in (*kind.model_fields, *kind.not_done) if name not in needed}
    assert asked_for(route, **ASKED[route], **empty) == asked_for(route, **ASKED[route])


REFUSED: list[tuple[Route, str, Any]] = [
    ("chat", "audio", {"voice": "x"}),
    ("chat", "function_call", "auto"),
    ("chat", "functions", []),
    ("chat", "moderation", {}),
    ("chat", "prediction", {"type": "content"}),
    ("chat", "web_search_options", {}),
    ("chat", "chat_template", "{{ messages }}"),
    ("chat", "temprature", 1),
    ("completions", "suffix", "end"),
    ("completions", "messages", HELLO),
    ("responses", "conversation", "c"),
    ("responses", "previous_response_id", "resp_1"),
    ("responses", "prompt", {"id": "p"}),
    ("responses", "max_tool_calls", 1),
    ("messages", "stop", "x"),
    ("messages", "user", "me"),
    ("messages", "n", 2),
    ("messages", "container", "c"),
    ("messages", "mcp_servers", []),
    ("count_tokens", "max_tokens", 5),
    ("embeddings", "dimensions", 12),
    ("tokenize", "chat_template", "x"),
    ("detokenize", "extra", 1),
]


@pytest.mark.parametrize(("route", "name", "value"), REFUSED)
def test_what_is_not_supported_is_refused_by_name(route: Route, name: str, value: Any) -> None:
    error = refused(route, **{name: value})
    assert (error.status, error.param, error.code) == (400, name, "unsupported_parameter")
    assert name in error.message


def test_an_error_says_what_to_use_instead() -> None:
    assert "use tools" in refused("chat", functions=[]).message
    assert "send the whole conversation" in refused("responses", conversation="c").message


def test_a_misspelt_field_is_told_what_it_may_be() -> None:
    assert "did you mean 'temperature'?" in refused("chat", temprature=1).message


WRONG: list[tuple[Route, str, Any, str]] = [
    ("chat", "temperature", 100.5, "temperature"),
    ("chat", "temperature", "1", "temperature"),
    ("chat", "temperature", True, "temperature"),
    ("chat", "top_p", 0, "top_p"),
    ("chat", "n", 0, "n"),
    ("chat", "n", 1.5, "n"),
    ("chat", "n", 129, "n"),
    ("chat", "max_tokens", 0, "max_tokens"),
    ("chat", "max_tokens", 2**40, "max_tokens"),
    ("chat", "seed", 2**64, "seed"),
    ("chat", "stop", "", "stop"),
    ("chat", "stop", ["x"] * 17, "stop"),
    ("chat", "stop", ["x" * 257], "stop[0]"),
    ("chat", "stop", ["x", 5], "stop[1]"),
    ("chat", "logit_bias", {"a": 1}, "logit_bias.a"),
    ("chat", "logit_bias", {"49152": 1}, "logit_bias"),
    ("chat", "logit_bias", {"5": 101}, "logit_bias.5"),
    ("chat", "logit_bias", {str(token): 1 for token in range(1025)}, "logit_bias"),
    ("chat", "stop_token_ids", [49152], "stop_token_ids"),
    ("chat", "top_logprobs", 3, "top_logprobs"),
    ("chat", "stream", "yes", "stream"),
    ("chat", "stream_options", {"include_usage": True}, "stream_options"),
    ("chat", "store", True, "store"),
    ("chat", "service_tier", "flex", "service_tier"),
    ("chat", "modalities", ["text", "audio"], "modalities"),
    ("chat", "modalities", ["audio"], "modalities[0]"),
    ("chat", "reasoning_effort", "some", "reasoning_effort"),
    ("chat", "deadline_s", 0, "deadline_s"),
    ("chat", "priority", 2**31, "priority"),
    ("chat", "cache_salt", "s" * 257, "cache_salt"),
    ("chat", "metadata", {"a": 1}, "metadata.a"),
    ("chat", "messages", [], "messages"),
    ("chat", "messages", "Hello", "messages"),
    ("chat", "messages", HELLO * 4097, "messages"),
    ("chat", "messages", [{"role": "user"}], "messages[0].content"),
    ("chat", "messages", [{"role": "user", "content": None}], "messages[0].content"),
    ("chat", "messages", [{"role": "robot", "content": "x"}], "messages[0]"),
    ("chat", "messages", [{"role": "assistant"}], "messages[0]"),
    ("chat", "messages", [{"role": "user", "content": "x", "y": 1}], "messages[0].y"),
    ("chat", "messages", [{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
    ("chat", "response_format", {"type": "xml"}, "response_format"),
    ("chat", "response_format", {"type": "json_schema"}, "response_format.json_schema"),
    ("chat", "tools", [TOOL] * 129, "tools"),
    ("chat", "tools", [TOOL, TOOL], "tools"),
    ("chat", "tools", [{"type": "web_search"}], "tools[0].type"),
    (
        "chat",
        "tools",
        [{"type": "function", "function": {"name": "a b"}}],
        "tools[0].function.name",
    ),
    ("chat", "tool_choice", "required", "tool_choice"),
    ("chat", "tool_choice", "any", "tool_choice"),
    ("chat", "chat_template_kwargs", {"messages": "x"}, "chat_template_kwargs"),
    ("chat", "chat_template_kwargs", {"bos_token": "x"}, "chat_template_kwargs"),
    ("chat", "chat_template_kwargs", {"a": [1]}, "chat_template_kwargs.a"),
    ("completions", "prompt", [], "prompt"),
    ("completions", "prompt", [1, "x"], "prompt[1]"),
    ("completions", "prompt", [49152], "prompt"),
    ("completions", "prompt", [[1], [49152]], "prompt"),
    ("completions", "prompt", [-1], "prompt[0]"),
    ("completions", "prompt", ["x"] * 129, "prompt"),
    ("completions", "max_tokens", 0, "max_tokens"),
    ("completions", "logprobs", 101, "logprobs"),
    ("completions", "best_of", 0, "best_of"),
    ("responses", "input", [{"type": "item_reference", "id": "x"}], "input[0]"),
    (
        "responses",
        "input",
        [{"role": "user", "content": [{"type": "input_file"}]}],
        "input[0].content[0]",
    ),
    ("responses", "store", True, "store"),
    ("responses", "truncation", "auto", "truncation"),
    ("responses", "include", ["everything"], "include[0]"),
    ("messages", "max_tokens", 0, "max_tokens"),
    ("messages", "messages", [], "messages"),
    ("messages", "messages", [{"role": "user", "content": []}], "messages[0].content"),
    ("messages", "messages", [{"role": "tool", "content": "x"}], "messages[0].role"),
    ("messages", "messages", [TURN_OF_CALL], "messages[0].content[0]"),
    ("messages", "tool_choice", {"type": "tool"}, "tool_choice.name"),
    ("messages", "tool_choice", {"type": "any"}, "tool_choice"),
    ("messages", "tool_choice", {"type": "required"}, "tool_choice"),
    ("messages", "tools", [{"name": "a b", "input_schema": {}}], "tools[0].name"),
    ("messages", "tools", [{"name": "a"}], "tools[0].input_schema"),
    ("messages", "stop_sequences", ["x" * 257], "stop_sequences[0]"),
    ("messages", "thinking", {"type": "sometimes"}, "thinking"),
    ("messages", "thinking", {"type": "enabled"}, "thinking.budget_tokens"),
    ("messages", "metadata", {"user": "me"}, "metadata.user"),
    ("messages", "service_tier", "priority", "service_tier"),
    ("messages", "system", [{"type": "image"}], "system[0].type"),
    ("count_tokens", "messages", [], "messages"),
    ("embeddings", "input", [""] * 2049, "input"),
    ("embeddings", "encoding_format", "hex", "encoding_format"),
    ("embeddings", "pooling", "first", "pooling"),
    ("tokenize", "messages", HELLO, "prompt"),
    ("detokenize", "tokens", [49152], "tokens"),
    ("detokenize", "tokens", "5", "tokens"),
]


@pytest.mark.parametrize(("route", "name", "value", "param"), WRONG)
def test_wrong_values_are_refused_by_name(route: Route, name: str, value: Any, param: str) -> None:
    error = refused(route, **{name: value})
    assert error.status == 400
    assert error.param == param
    assert len(error.message) < 500


CONFLICTS: list[tuple[Route, dict[str, Any], str]] = [
    ("chat", {"top_logprobs": 1}, "top_logprobs"),
    ("chat", {"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
    ("chat", {"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.regex"),
    ("chat", {"min_tokens": 9, "max_tokens": 5}, "min_tokens"),
    ("chat", {"n": 3, "best_of": 2}, "best_of"),
    ("chat", {"stream": True, "best_of": 2}, "best_of"),
    ("completions", {"stream": True, "echo": True, "logprobs": 1}, "echo"),
    ("completions", {"prompt": ["a"] * 70, "n": 2}, "prompt"),
    ("tokenize", {"add_generation_prompt": True}, "add_generation_prompt"),
    ("responses", {"top_logprobs": 1, "tools": [FLAT_TOOL]}, "top_logprobs"),
    ("responses", {"include": ["message.output_text.logprobs"], "tools": [FLAT_TOOL]}, "include"),
    ("responses", {"stream": True, "stream_options": {"include_usage": True}}, "stream_options"),
]


@pytest.mark.parametrize(("route", "fields", "param"), CONFLICTS)
def test_fields_that_do_not_go_together(route: Route, fields: dict[str, Any], param: str) -> None:
    error = refused(route, **fields)
    assert error.status == 400
    assert error.param is not None
    assert error.param.startswith(param)


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_other_media_are_refused_by_name(kind: str) -> None:
    part = {"type": kind, kind: {"url": "https://example.com/x.png"}}
    error = refused("chat", messages=[{"role": "user", "content": [part]}])
    assert error.param == "messages[0].content[0]"
    assert kind in error.message


def test_a_model_that_is_not_served() -> None:
    error = refused("chat", model="gpt-4o")
    assert (error.status, error.param, error.code) == (404, "model", "model_not_found")
    assert MODEL in error.message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"x"',
        b'{"model": NaN}',
        b'{"model": -Infinity}',
        b"\xff\xfe{}",
        b'{"model": "\xff"}',
        b'{"model": "\\ud800"}',
        b'{"model": "\x00"}',
        b'{"model": "a"} {"model": "b"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"model": ' + b"9" * 100_000 + b"}",
    ],
)
def test_bodies_that_are_no_json_object(body: bytes) -> None:
    error = refused_body(body)
    assert error.message.startswith("the body is")
    assert len(error.message) < 300


def test_numbers_and_nesting_are_bounded_by_name() -> None:
    start = f'{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "x"}}], '.encode()
    assert refused_body(start + b'"seed": 1e999}').param == "seed"
    assert refused_body(start + b'"seed": ' + b"9" * 30 + b"}").param == "seed"
    assert refused_body(start + b'"tools": [{"a": [2, -1e400]}]}').param == "tools[0].a[1]"
    deep = start + b'"tools": ' + b"[" * 70 + b"]" * 70 + b"}"
    assert "nested too deeply" in refused_body(deep).message
    fine = start + b'"tools": ' + b"[" * 60 + b"]" * 60 + b"}"
    assert "nested" not in refused_body(fine).message


@pytest.mark.parametrize(
    "value", [["x"] * 300_000, [[]] * 300_000, {"a" * 9 + str(n): 1 for n in range(5000)}]
)
def test_many_wrong_values_are_one_error(value: Any) -> None:
    """Each must not be looked at, kept and told."""
    body = json.dumps({"model": MODEL, "messages": HELLO, "prompt": value, "stop": value}).encode()
    started = time.process_time()
    assert refused_body(body, "completions").status == 400
    assert refused_body(body, "chat").status == 400
    assert time.process_time() - started < 1.5


def test_brackets_in_texts_are_no_lists() -> None:
    text = '[{"\\' * 30_000
    asked = asked_for("completions", prompt=text)
    assert asked.request.prompt == text


def test_whole_numbers_may_be_written_as_floats() -> None:
    asked = asked_for("completions", prompt=[5.0, 6], max_tokens=9.0, seed=1e3, temperature=1.0)
    assert asked.request.prompt == [5, 6]
    assert asked.sampling is not None
    assert (asked.sampling.max_tokens, asked.sampling.seed) == (9, 1000)
    assert refused("completions", max_tokens=9.5).param == "max_tokens"


def test_names_of_fields_are_told_on_one_line() -> None:
    error = refused("chat", **{"a\r\nb\x82" + "c" * 100: 1})
    assert error.param == "a??b?" + "c" * 59


def test_an_error_has_openais_shape() -> None:
    body = json.loads(error_body(ApiError(400, "é is wrong", param="n", code="invalid_value")))
    assert body == {
        "error": {
            "message": "é is wrong",
            "type": "invalid_request_error",
            "param": "n",
            "code": "invalid_value",
        }
    }


# Fuzzing: nothing but an ApiError is ever raised, and it is one line with a status below 500.
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=True)
    | st.text(max_size=8)
    | st.sampled_from(["auto", "required", "user", "assistant", "tool", "text", "function", MODEL])
)
NAMES = sorted(
    {name for kind in REQUESTS.values() for name in (*kind.model_fields, *kind.not_done)}
    | {"role", "content", "type", "text", "function", "name", "arguments", "schema", "json_schema"}
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)


def only_api_errors(route: Route, body: bytes) -> Asked | None:
    try:
        return parse(route, body, limits_of(demo()))
    except ApiError as caught:
        error = caught
    assert error.status in (400, 404)
    assert error.message
    assert len(error.message.splitlines()) == 1
    json.loads(error_body(error))
    return None


@settings(max_examples=150, deadline=None)
@given(route=st.sampled_from(ROUTES), body=st.binary(max_size=60) | VALUES)
def test_arbitrary_bodies_raise_nothing_else(route: Route, body: Any) -> None:
    only_api_errors(route, body if isinstance(body, bytes) else json.dumps(body).encode())


@settings(max_examples=300, deadline=None)
@given(
    route=st.sampled_from(ROUTES),
    changes=st.dictionaries(st.sampled_from(NAMES), VALUES, min_size=1, max_size=3),
)
def test_arbitrary_fields_raise_nothing_else(route: Route, changes: dict[str, Any]) -> None:
    body = json.dumps({"model": MODEL, **ASKED[route], **changes}).encode()
    asked = only_api_errors(route, body)
    if asked is not None:
        with suppress(ApiError):
            prompts = render(asked, demo(), limits_of(demo()))
            assert bool(prompts) == (route not in ("tokenize", "detokenize", "count_tokens"))
