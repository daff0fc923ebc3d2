"""The responses route: its object and its events, read back with OpenAI's own types."""

import json
from typing import Any

import pytest
from api_outputs import asked_for, deltas_of, events_in, rendered, reply_to, streamed
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from tiny_tokenizers import demo

from ridgeline.server.protocol import ApiError

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
CREATED = ["response.created", "response.in_progress"]
MESSAGE = [
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]
FUNCTION = [
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
]


def whole(made: str, reason: Any = "stop", **fields: Any) -> Response:
    reply, prompts = reply_to("responses", input="Hello", **fields)
    _, output = deltas_of(prompts[0], [made], reason)
    return Response.model_validate(json.loads(reply.whole([output])))


def events_of(text: str, reason: Any = "stop", **fields: Any) -> list[Any]:
    reply, prompts = reply_to("responses", input="Hello", stream=True, **fields)
    deltas, output = deltas_of(prompts[0], [text], reason)
    events = events_in(streamed(reply, deltas, [output]))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return [EVENT.validate_python(event) for event in events]


def kinds_of(events: list[Any]) -> list[str]:
    """Deltas in a row are one."""
    kinds = [event.type for event in events]
    return [
        kind
        for index, kind in enumerate(kinds)
        if not (index and kind == kinds[index - 1] and kind.endswith(".delta"))
    ]


def same(first: Response, second: Response) -> bool:
    """But for the second in which they were completed."""
    return first.model_copy(update={"completed_at": None}) == second.model_copy(
        update={"completed_at": None}
    )


def test_a_whole_response() -> None:
    made = whole('née "x"', instructions="Be brief.", temperature=0.5, metadata={"a": "b"})
    assert made.output_text == 'née "x"'
    assert (made.id, made.status, made.model) == ("resp_r1", "completed", "demo")
    assert (made.instructions, made.temperature, made.metadata) == ("Be brief.", 0.5, {"a": "b"})
    assert made.usage is not None
    assert made.usage.output_tokens == len(demo().encode('née "x"')) + 1
    assert made.usage.total_tokens == made.usage.input_tokens + made.usage.output_tokens


def test_a_streamed_response() -> None:
    text = 'née\u2028 "日本" and more'
    events = events_of(text)
    assert kinds_of(events) == [*CREATED, *MESSAGE, "response.completed"]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 3
    assert "".join(event.delta for event in deltas) == text
    done = {event.type: event for event in events}
    assert done["response.output_text.done"].text == text
    assert done["response.content_part.done"].part.text == text
    item = done["response.output_item.done"].item
    assert {event.item_id for event in deltas} == {item.id}
    assert done["response.output_item.added"].item.id == item.id
    assert done["response.created"].response.output == []
    assert same(done["response.completed"].response, whole(text))


@pytest.mark.parametrize("before", ["", "So:\n"])
def test_calls_are_items(before: str) -> None:
    text = before + CALL + "\n" + CALL
    made = whole(text, tools=[TOOL])
    kinds = [item.type for item in made.output]
    assert kinds == (["message"] if before else []) + ["function_call"] * 2
    calls = made.output[-2:]
    assert [call.arguments for call in calls] == ['{"a": 1}'] * 2
    assert len({call.call_id for call in calls}) == 2
    assert all(item.status == "completed" for item in made.output)
    events = events_of(text, tools=[TOOL])
    message = MESSAGE if before else []
    assert kinds_of(events) == [*CREATED, *message, *FUNCTION, *FUNCTION, "response.completed"]
    assert same(events[-1].response, made)
    arguments = "".join(
        event.delta for event in events if event.type == "response.function_call_arguments.delta"
    )
    assert arguments == '{"a": 1}' * 2
    places = [event.output_index for event in events if event.type == "response.output_item.added"]
    assert places == list(range(len(made.output)))


def test_what_was_cut_is_incomplete() -> None:
    for text in ("a b c", '<tool_call>{"name": "add", "arguments": {"a"'):
        made = whole(text, "length", tools=[TOOL])
        assert made.status == "incomplete"
        assert made.incomplete_details is not None
        assert made.incomplete_details.reason == "max_output_tokens"
        assert made.output[0].status == "incomplete"
        events = events_of(text, "length", tools=[TOOL])
        assert events[-1].type == "response.incomplete"
        assert same(events[-1].response, made)


def test_nothing_is_an_empty_message() -> None:
    assert whole("").output_text == ""
    kinds = kinds_of(events_of(""))
    assert kinds == [*CREATED, *MESSAGE[:2], *MESSAGE[3:], "response.completed"]


def test_logprobs() -> None:
    made = whole("a b née", top_logprobs=1)
    (content,) = made.output[0].content
    assert made.usage is not None
    assert len(content.logprobs) == made.usage.output_tokens
    assert content.logprobs[0].top_logprobs[0].logprob == -0.25
    events = events_of("a b née", top_logprobs=1)
    assert same(events[-1].response, made)
    shown = [
        entry.token for event in events if event.type == MESSAGE[2] for entry in event.logprobs
    ]
    assert shown == [entry.token for entry in content.logprobs[:-1]]
    plain = whole("a b", include=["message.output_text.logprobs"])
    assert plain.output[0].content[0].logprobs[0].top_logprobs == []


def test_a_failed_stream_ends_with_a_failed_response() -> None:
    reply, _ = reply_to("responses", input="Hello", stream=True)
    start = events_in(b"".join(reply.start()))
    (event,) = events_in(reply.failed(ApiError(503, "the engine died")))
    failed = EVENT.validate_python(event)
    assert failed.type == "response.failed"
    assert failed.sequence_number == len(start)
    assert (failed.response.status, failed.response.error.message) == ("failed", "the engine died")


def test_items_become_a_conversation() -> None:
    """What a client gets can be its next input."""
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Add."}]},
        *[item.model_dump() for item in whole("So:\n" + CALL, tools=[TOOL]).output],
    ]
    call_id = items[-1]["call_id"]
    items.append({"type": "function_call_output", "call_id": call_id, "output": "4"})
    (prompt,) = rendered(asked_for("responses", input=items, instructions="Be brief."))
    text = demo().decode(prompt.ids, skip_special_tokens=False)
    assert "<|im_start|>system\nBe brief.<|im_end|>" in text
    assert "<|im_start|>user\nAdd.<|im_end|>" in text
    assert "<|im_start|>assistant\nSo:\n<tool_call>" in text
    assert "<tool_response>\n4\n</tool_response>" in text


def test_the_response_says_what_was_asked() -> None:
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    made = whole("{}", text={"format": schema}, tools=[TOOL], tool_choice="required")
    assert made.text is not None
    assert made.text.format is not None
    assert made.text.format.model_dump(by_alias=True, exclude_none=True) == schema
    assert made.tool_choice == "required"
    assert made.tools[0].name == "add"
    named = whole(CALL, tools=[TOOL], tool_choice={"type": "function", "name": "add"})
    assert named.tool_choice.name == "add"
