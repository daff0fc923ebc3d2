"""Thinking in the protocol: tags of templates, beginnings of prompts, parts of outputs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from api_outputs import HELLO, MODEL, events_in, output_of
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from tiny_tokenizers import tagged_tokenizer

from ridgeline.engine import Completion, Delta, Thinking
from ridgeline.errors import UsageError
from ridgeline.server.config import ServerConfig
from ridgeline.server.protocol import (
    ApiError,
    ParsedPrompt,
    RequestLimits,
    parse,
    render,
    reply_for,
)
from ridgeline.server.protocol.limits import ThinkingTags
from ridgeline.server.protocol.replies.call_parser import CallStart, Text
from ridgeline.server.protocol.replies.output_parser import OutputParser, Thought
from ridgeline.server.protocol.requests.asked import Calls
from ridgeline.server.protocol.thinking import tags_for

TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
# As Qwen3's and SmolLM3's: thinking is on unless it is turned off.
SWITCHED = TURNS + (
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
OPENED = TURNS + "<think>\n"  # as DeepSeek-R1's and QwQ's: there is no other way
SILENT = TURNS + "{# the model itself writes <think> and </think> #}"
GRADED = TURNS + "effort {{ reasoning_effort }}<think>\n{# </think> #}"
TAGS = ThinkingTags("<think>", "</think>")
TWO = ("<think>", "</think>")


def prompt_of(template: str, **fields: Any) -> tuple[str, ParsedPrompt]:
    """What a request's prompt is, with a model that thinks."""
    tokenizer = tagged_tokenizer(TWO, template=template)
    limits = RequestLimits(
        (MODEL,), 2048, tokenizer.vocab_size, thinking_tags=tags_for("auto", tokenizer)
    )
    body = json.dumps({"model": MODEL, "messages": HELLO, **fields}).encode()
    (prompt,) = render(parse("chat", body, limits), tokenizer, limits)
    return tokenizer.decode(prompt.ids, skip_special_tokens=False), prompt


@pytest.mark.parametrize(
    ("template", "tags", "setting", "expected"),
    [
        (SWITCHED, (), "auto", TAGS),
        (SILENT, (), "auto", TAGS),
        (OPENED, (), "auto", None),  # nobody says how it ends
        (OPENED, TWO, "auto", TAGS),
        (TURNS, (), "auto", None),
        (TURNS, ("[THINK]", "[/THINK]"), "auto", ThinkingTags("[THINK]", "[/THINK]")),
        (SWITCHED, TWO, "off", None),
        (TURNS, (), "<a>, </a>", ThinkingTags("<a>", "</a>")),
    ],
)
def test_which_tags(
    template: str, tags: tuple[str, ...], setting: str, expected: ThinkingTags | None
) -> None:
    assert tags_for(setting, tagged_tokenizer(tags, template=template)) == expected


@pytest.mark.parametrize("setting", ["on", "<think>", "<think>,", "x,x"])
def test_a_wrong_setting_is_an_error_at_the_start(setting: str) -> None:
    with pytest.raises(UsageError, match="--reasoning is"):
        ServerConfig(reasoning=setting)


def test_the_prompt_tells_whether_a_thought_is_open() -> None:
    for template, is_open in ((SWITCHED, False), (OPENED, True), (SILENT, False)):
        text, prompt = prompt_of(template)
        assert text.endswith("<think>") is is_open
        assert prompt.thinking == prompt.sampling.thinking == Thinking(*TAGS, is_open=is_open)
        assert not prompt.sampling.is_matched  # it costs nothing


@pytest.mark.parametrize("template", [SWITCHED, OPENED, SILENT])
def test_off_is_off_for_every_template(template: str) -> None:
    text, prompt = prompt_of(template, reasoning_effort="none")
    assert text.endswith("<think>\n\n</think>\n\n")
    assert text.count("<think>") == 1
    assert prompt.sampling.thinking is None
    assert prompt.thinking == Thinking(*TAGS)


def test_what_a_user_writes_opens_no_thought() -> None:
    messages = [{"role": "user", "content": "What does <think> mean?"}]
    assert prompt_of(SILENT, messages=messages)[1].thinking == Thinking(*TAGS)


@pytest.mark.parametrize(
    ("template", "fields", "limit"),
    [
        (OPENED, {"reasoning_effort": "low"}, 2048),
        (OPENED, {"reasoning_effort": "high"}, None),
        (OPENED, {"reasoning_effort": "high", "thinking_budget": 7}, 7),
        (OPENED, {"reasoning": {"max_tokens": 9}}, 9),
        (GRADED, {"reasoning_effort": "low"}, None),  # the template knows what that means
    ],
)
def test_limits(template: str, fields: dict[str, Any], limit: int | None) -> None:
    text, prompt = prompt_of(template, **fields)
    assert prompt.sampling.thinking == Thinking(*TAGS, is_open=True, max_tokens=limit)
    assert ("effort low" in text) is (template == GRADED)


def test_what_cannot_be_is_refused() -> None:
    tokenizer = tagged_tokenizer((), template=TURNS)
    limits = RequestLimits((MODEL,), 2048, 1500)
    fields = {"model": MODEL, "messages": HELLO}
    for wish in ({"reasoning_effort": "high"}, {"thinking_budget": 5}):
        asked = parse("chat", json.dumps({**fields, **wish}).encode(), limits)
        assert render(asked, tokenizer, limits)[0].thinking is None
    asked = parse("chat", json.dumps({**fields, "enable_thinking": True}).encode(), limits)
    with pytest.raises(ApiError, match="does not think"):
        render(asked, tokenizer, limits)


def parsed(text: str, size: int, prompt: ParsedPrompt) -> list[Any]:
    parser = OutputParser(prompt)
    events: list[Any] = []
    for start in range(0, len(text), size):
        events += parser.push(text[start : start + size])
    events += parser.finish()
    joined: list[Any] = []
    for event in events:
        if joined and isinstance(event, Thought | Text) and type(event) is type(joined[-1]):
            joined[-1] = type(event)(joined[-1].text + event.text)
        else:
            joined.append(event)
    return joined


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_thoughts_answers_and_calls(size: int) -> None:
    prompt = prompt_of(SILENT)[1]
    text = "<think>\nOne, \n two. \n</think>\n\nThree </think>"
    assert parsed(text, size, prompt) == [Thought("One, \n two."), Text("Three </think>")]
    assert parsed("No thought", size, prompt) == [Text("No thought")]
    assert parsed("<think> cut", size, prompt) == [Thought("cut")]
    assert parsed("<think>\n\n</think>\n\nonly", size, prompt) == [Text("only")]
    calls = Calls("hermes", frozenset({"f"}), parallel=True)
    text = '<think>a <tool_call></think>\n<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    thought, start, *_ = parsed(
        text, size, ParsedPrompt((1,), prompt.sampling, calls=calls, thinking=prompt.thinking)
    )
    assert (thought, start) == (Thought("a <tool_call>"), CallStart(0, "f"))


def replies(route: Any, text: str, **fields: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The whole answer and the streamed events of an output, one token a delta."""
    tokenizer = tagged_tokenizer(TWO, template=SILENT)
    limits = RequestLimits((MODEL,), 2048, tokenizer.vocab_size, thinking_tags=TAGS)
    body = json.dumps({"model": MODEL, **fields}).encode()
    asked = parse(route, body, limits)
    prompts = render(asked, tokenizer, limits)
    tokens = tuple(tokenizer.encode(text))
    decoder = tokenizer.decoder()
    deltas = [Delta("r", 0, decoder.push(token), (token,), None) for token in tokens]
    deltas[-1] = deltas[-1]._replace(finish_reason="stop")
    output = output_of(prompts[0], (Completion(text, tokens, "stop", None),))
    made = [reply_for(asked, prompts, tokenizer, "r1", 1.0) for _ in range(2)]
    stream: Any = made[1]
    sent = [*stream.start(), *map(stream.delta, deltas), *stream.finish([output])]
    return json.loads(made[0].whole([output])), events_in(b"".join(sent))


def test_events_of_responses_are_openais() -> None:
    text = "<think>Two and two</think>\n\nFour"
    whole, events = replies("responses", text, input="Hello")
    assert [item.type for item in Response.model_validate(whole).output] == ["reasoning", "message"]
    assert whole["output"][0]["content"] == [{"type": "reasoning_text", "text": "Two and two"}]
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] == len(
        tagged_tokenizer(TWO).encode("<think>Two and two</think>")
    )
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    kinds = [adapter.validate_python(event).type for event in events]
    expected = [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert list(dict.fromkeys(kinds)) == list(dict.fromkeys(expected))
    assert [kind for kind in kinds if not kind.endswith(".delta")] == [
        kind for kind in expected if not kind.endswith(".delta")
    ]


def test_a_chat_without_a_thought_has_no_field_for_it() -> None:
    whole, events = replies("chat", "Four", messages=HELLO)
    assert whole["choices"][0]["message"] == {
        "role": "assistant",
        "content": "Four",
        "refusal": None,
    }
    assert "reasoning_content" not in json.dumps(events)


def test_echoed_thoughts_reach_the_template() -> None:
    template = TURNS.replace("{{ m.content }}", "{{ m.reasoning_content }}|{{ m.content }}")
    tokenizer = tagged_tokenizer((), template=template)
    limits = RequestLimits((MODEL,), 2048, 1500)
    for name in ("reasoning_content", "reasoning"):
        messages = [*HELLO, {"role": "assistant", "content": "Hi", name: "hm"}, *HELLO]
        body = json.dumps({"model": MODEL, "messages": messages}).encode()
        (prompt,) = render(parse("chat", body, limits), tokenizer, limits)
        assert "<assistant>hm|Hi" in tokenizer.decode(prompt.ids)
