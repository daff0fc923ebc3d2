"""Cases for the fields of objects inside requests: messages and their parts, items of an input,
tools and what chooses among them, forms of the answer. See tests/cpu/test_every_field.py.
"""

from __future__ import annotations

import json
from typing import Any

from field_audit import Api, case

NUMBER = {"type": "object", "properties": {"number": {"const": 5}}, "required": ["number"]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": NUMBER}}
OTHER_TOOL = {"type": "function", "function": {"name": "listen", "parameters": NUMBER}}
LONG = "a text of such a length that it is longer than any other here"
USER: dict[str, Any] = {"role": "user", "content": "hello"}
CALL = {"id": "call-1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
CALL_ITEM = {"type": "function_call", "call_id": "call-1", "name": "look", "arguments": "{}"}
OUTPUT_ITEM = {"type": "function_call_output", "call_id": "call-1", "output": "5"}


def flat(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as the responses route has it."""
    return {"type": "function", **tool["function"]}


def changed(given: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy with another value at a path."""
    if not path:
        return value
    copy = list(given) if isinstance(given, list) else dict(given)
    inner = copy[path[0]] if len(path) > 1 else None
    copy[path[0]] = changed(inner, path[1:], value)
    return copy


def prompt_tokens(api: Api, messages: list[Any]) -> int:
    return api.in_chat(*messages).num_prompt


def grows(api: Api, messages: list[Any], path: tuple[Any, ...], value: Any = LONG) -> None:
    """What is there reaches the model: a longer value makes a longer prompt."""
    assert prompt_tokens(api, changed(messages, path, value)) > prompt_tokens(api, messages)


def is_fixed(api: Api, messages: list[Any], path: tuple[Any, ...]) -> None:
    """It says which kind of object this is: another value is refused, and it is named."""
    field = next(step for step in reversed(path) if isinstance(step, str))
    api.refused("chat", field, messages=changed(messages, path, "another"))


def passes_without_effect(
    api: Api, messages: list[Any], path: tuple[Any, ...], value: Any, wrong: Any = None
) -> None:
    """Clients send back what they got: it is taken, and changes nothing."""
    plain, given = api.in_chat(*messages), api.in_chat(*changed(messages, path, value))
    assert (given.text, given.num_prompt) == (plain.text, plain.num_prompt)
    if wrong is not None:
        api.refused("chat", str(path[-1]), messages=changed(messages, path, wrong))


# Messages.


@case(("SystemMessage", "UserMessage", "AssistantMessage", "ToolMessage"), "content", "name")
def _(api: Api, owner: str) -> None:
    role = owner.removesuffix("Message").lower()
    more = {"tool_call_id": "call-1"} if role == "tool" else {}
    messages = [USER, {"role": role, "content": "hello", **more}, USER]
    grows(api, messages, (1, "content"))
    grows(api, messages, (1, "content"), [{"type": "text", "text": LONG}])
    grows(api, messages, (1, "name"))


@case(("SystemMessage", "UserMessage", "AssistantMessage", "ToolMessage"), "role")
def _(api: Api) -> None:
    roles = ("system", "developer", "user", "assistant")
    texts = [api.in_chat(USER, {"role": role, "content": "hello"}).text for role in roles]
    assert texts[0] == texts[1]  # a developer is the system
    assert len(set(texts)) == 3
    is_fixed(api, [USER], (0, "role"))
    api.refused("chat", "tool_call_id", messages=[{"role": "tool", "content": "hello"}])


@case(("AssistantMessage",), "refusal")
def _(api: Api) -> None:
    grows(api, [USER, {"role": "assistant", "refusal": "no"}], (1, "refusal"))


@case(("AssistantMessage",), "tool_calls")
@case(("ToolCall",), "function", "id")
@case(("CalledFunction",), "name", "arguments")
def _(api: Api) -> None:
    messages = [USER, {"role": "assistant", "content": "hello"}]
    grows(api, messages, (1, "tool_calls"), [CALL])
    messages = [USER, {"role": "assistant", "tool_calls": [CALL]}]
    call = (1, "tool_calls", 0)
    grows(api, messages, (*call, "id"))
    grows(api, messages, (*call, "function", "name"))
    grows(api, messages, (*call, "function", "arguments"), '{"number": 5}')


@case(("ToolMessage",), "tool_call_id")
def _(api: Api) -> None:
    """Also tells which function it was."""
    messages = [
        USER,
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "content": "5", "tool_call_id": "call-2"},
    ]
    grows(api, messages, (2, "tool_call_id"))
    assert (
        api.in_chat(*messages).text
        != api.in_chat(*changed(messages, (2, "tool_call_id"), "call-1")).text
    )


@case(("ToolCall",), "type")
@case(("TextPart", "RefusalPart"), "type")
def _(api: Api) -> None:
    is_fixed(api, [USER, {"role": "assistant", "tool_calls": [CALL]}], (1, "tool_calls", 0, "type"))
    is_fixed(api, [{**USER, "content": [{"type": "text", "text": "x"}]}], (0, "content", 0, "type"))


@case(("TextPart",), "text")
@case(("RefusalPart",), "refusal")
def _(api: Api) -> None:
    for kind, field in (("text", "text"), ("refusal", "refusal")):
        content = [{"type": kind, field: "no"}]
        message = {"role": "assistant", "content": content}
        grows(api, [USER, message], (1, "content", 0, field))


@case(("AssistantMessage",), "audio", "function_call", "annotations", "parsed")
@case(("ToolCall",), "index")
@case(("CalledFunction",), "parsed_arguments")
def _(api: Api) -> None:
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    passes_without_effect(api, messages, (1, "audio"), None, wrong={"id": "x"})
    passes_without_effect(api, messages, (1, "function_call"), None, wrong={"name": "look"})
    passes_without_effect(api, messages, (1, "annotations"), [], wrong=[{}])
    passes_without_effect(api, messages, (1, "parsed"), {"number": 5})
    call = (1, "tool_calls", 0)
    passes_without_effect(api, messages, (*call, "index"), 0)
    passes_without_effect(api, messages, (*call, "function", "parsed_arguments"), {"number": 5})


@case(("SystemMessage", "UserMessage", "AssistantMessage", "ToolMessage"), "cache_control")
@case(("TextPart", "ChatTool"), "cache_control")
def _(api: Api) -> None:
    """Prefixes are cached without a mark."""
    mark = {"type": "ephemeral"}
    messages = [
        {"role": "system", "content": "hello"},
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "5", "tool_call_id": "call-1"},
    ]
    for path in (*((number,) for number in range(4)), (1, "content", 0)):
        passes_without_effect(api, messages, (*path, "cache_control"), mark)
    plain, marked = (api.ask("chat", tools=[t]) for t in (TOOL, {**TOOL, "cache_control": mark}))
    assert (marked.text, marked.num_prompt) == (plain.text, plain.num_prompt)


@case(("AssistantMessage",), "reasoning_details")
@case(("ReasoningDetail",), "type", "text", "summary")
@case(("ReasoningDetail",), "data", "signature", "id", "format", "index")
def _(api: Api) -> None:
    part = {"type": "reasoning.text", "text": "x"}
    messages = [USER, {"role": "assistant", "content": "x", "reasoning_details": [part]}, USER]
    path = (1, "reasoning_details", 0)
    grows(api, messages, (*path, "text"))
    grows(api, messages, path, {"type": "reasoning.summary", "summary": LONG})
    for field in ("data", "signature", "id", "format"):
        passes_without_effect(api, messages, (*path, field), LONG)
    passes_without_effect(api, messages, (*path, "index"), 1)
    assert api.in_chat(*changed(messages, (*path, "type"), "another")).status == 400


# Items of the responses route.


def item_tokens(api: Api, items: list[Any]) -> int:
    return api.ask("responses", input=items).num_prompt


def item_grows(api: Api, items: list[Any], path: tuple[Any, ...], value: Any = LONG) -> None:
    assert item_tokens(api, changed(items, path, value)) > item_tokens(api, items)


@case(("MessageItem",), "content", "role", "type")
@case(("InputText", "OutputText"), "text", "type")
def _(api: Api) -> None:
    items = [USER, {"type": "message", "role": "assistant", "content": "x"}]
    item_grows(api, items, (1, "content"))
    for kind in ("input_text", "output_text"):
        item_grows(api, changed(items, (1, "content"), [{"type": kind, "text": "x"}]),
                   (1, "content", 0, "text"))  # fmt: skip
    roles = ("system", "developer", "user", "assistant")
    texts = [api.ask("responses", input=changed(items, (1, "role"), role)).text for role in roles]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3
    api.refused("responses", "input[1]", input=changed(items, (1, "type"), "another"))
    part = [{"type": "another", "text": "x"}]
    api.refused("responses", "content", input=changed(items, (1, "content"), part))


@case(("CallItem",), "call_id", "name", "arguments", "type")
@case(("CallOutputItem",), "call_id", "name", "output", "type")
def _(api: Api) -> None:
    items = [USER, CALL_ITEM, OUTPUT_ITEM]
    item_grows(api, items, (1, "name"))
    item_grows(api, items, (1, "arguments"), '{"number": 5}')
    item_grows(api, items, (1, "call_id"))
    item_grows(api, items, (2, "output"))
    item_grows(api, items, (2, "output"), [{"type": "input_text", "text": LONG}])
    item_grows(api, items, (2, "name"))
    item_grows(api, items, (2, "call_id"))
    for number in (1, 2):
        wrong = changed(items, (number, "type"), "another")
        api.refused("responses", f"input[{number}]", input=wrong)


@case(("MessageItem",), "id", "status", "phase")
@case(("OutputText",), "annotations", "logprobs", "parsed")
@case(("CallItem", "CallOutputItem"), "id", "status", "caller", "namespace")
@case(("CallItem",), "parsed_arguments")
def _(api: Api) -> None:
    """Clients send back the items they got, with all that was in them."""
    part = {"type": "output_text", "text": "x"}
    items = [USER, {"role": "assistant", "content": [part]}, CALL_ITEM, OUTPUT_ITEM]
    extras = {"annotations": [], "logprobs": [], "parsed": None}
    got: Any = changed(items, (1, "content"), [{**part, **extras}])
    got = changed(got, (1,), {**got[1], "id": "m", "status": "completed", "phase": "commentary"})
    ends = {"id": "c", "status": "completed", "caller": None, "namespace": None}
    got = changed(got, (2,), {**CALL_ITEM, **ends, "parsed_arguments": {}})
    got = changed(got, (3,), {**OUTPUT_ITEM, **ends})
    plain, given = (api.ask("responses", input=each) for each in (items, got))
    assert (given.text, given.num_prompt) == (plain.text, plain.num_prompt)
    for field in ("caller", "namespace"):
        for number in (2, 3):
            wrong = changed(got, (number, field), "x")
            api.refused("responses", field, input=wrong)


# Tools.


def called(api: Api, owner: str, tools: list[Any], choice: Any = "required", **more: Any) -> Any:
    if owner.startswith("Flat"):
        more = {"max_output_tokens": 80, **more}
        answer = api.ask("responses", tools=list(map(flat, tools)), tool_choice=choice, **more)
    else:
        answer = api.ask("chat", tools=tools, tool_choice=choice, **{"max_tokens": 80, **more})
    return answer


@case(("ChatTool",), "function", "type")
@case(("FunctionObject", "FlatTool"), "name", "parameters", "description")
@case(("FlatTool",), "type")
def _(api: Api, owner: str) -> None:
    for tool in (TOOL, OTHER_TOOL):
        (call,) = called(api, owner, [tool]).calls
        assert call["name"] == tool["function"]["name"]  # type: ignore[index]
        assert json.loads(call["arguments"]) == {"number": 5}
    schema = changed(NUMBER, ("properties", "number"), {"const": 6})
    (call,) = called(api, owner, [changed(TOOL, ("function", "parameters"), schema)]).calls
    assert json.loads(call["arguments"]) == {"number": 6}
    described = changed(TOOL, ("function", "description"), LONG)
    plain, told = called(api, owner, [TOOL]), called(api, owner, [described])
    assert told.num_prompt > plain.num_prompt
    api.refused("chat", "type", tools=[changed(TOOL, ("type",), "another")])
    api.refused("responses", "type", tools=[{**flat(TOOL), "type": "another"}])


@case(("FunctionObject", "FlatTool"), "strict")
def _(api: Api, owner: str) -> None:
    """Calls of a strict tool are held to its schema even where none must be made, so that has to be
    one that can be held to.
    """
    impossible = changed(NUMBER, ("properties", "number"), {"type": "string", "pattern": "("})
    tool = changed(TOOL, ("function", "parameters"), impossible)
    assert called(api, owner, [tool], "auto").status == 200
    assert called(api, owner, [changed(tool, ("function", "strict"), True)], "auto").status == 400


@case(("ChatNamedChoice",), "function", "type")
@case(("FunctionName", "FlatNamedChoice"), "name")
@case(("FlatNamedChoice",), "type")
def _(api: Api, owner: str) -> None:
    for name in ("look", "listen"):
        choice: Any = {"type": "function", "function": {"name": name}}
        if owner == "FlatNamedChoice":
            choice = {"type": "function", "name": name}
        (call,) = called(api, owner, [TOOL, OTHER_TOOL], choice).calls
        assert call["name"] == name
        assert called(api, owner, [TOOL, OTHER_TOOL], {**choice, "type": "x"}).status == 400


# Forms of the answer.


def formed(api: Api, form: dict[str, Any], **more: Any) -> str:
    return api.ask("chat", response_format=form, **{"max_tokens": 60, **more}).text


@case(("TextFormat", "ObjectFormat", "SchemaFormat", "FlatSchemaFormat"), "type")
@case(("RegexFormat", "ChoiceFormat", "RulesFormat"), "type")
@case(("RegexFormat",), "pattern", "regex")
@case(("ChoiceFormat",), "choices")
@case(("RulesFormat",), "grammar")
def _(api: Api) -> None:
    assert formed(api, {"type": "text"}, max_tokens=8) == api.ask("chat").text
    assert formed(api, {"type": "json_object"}, max_tokens=8).lstrip().startswith("{")
    for text in ("abc", "xyz"):
        assert formed(api, {"type": "regex", "pattern": text}) == text
        assert formed(api, {"type": "regex", "regex": text}) == text
        assert formed(api, {"type": "choice", "choices": [text]}) == text
        assert formed(api, {"type": "grammar", "grammar": f'root ::= "{text}"'}) == text
    api.refused("chat", "response_format", response_format={"type": "another"})
    api.refused("responses", "text", text={"format": {"type": "another"}})


@case(("SchemaFormat",), "json_schema")
@case(("SchemaObject", "FlatSchemaFormat"), "schema", "strict", "name", "description")
def _(api: Api, owner: str) -> None:
    """The schema is kept to whether it is strict or not; name and description are the client's."""
    for number in (5, 6):
        schema = changed(NUMBER, ("properties", "number"), {"const": number})
        for more in ({}, {"strict": True}, {"strict": False}, {"description": "a number"}):
            given = {"name": "number", "schema": schema, **more}
            if owner == "FlatSchemaFormat":
                text = {"format": {"type": "json_schema", **given}}
                answer = api.ask("responses", text=text, max_output_tokens=60)
                assert answer.json["text"]["format"]["name"] == "number"
                answered = answer.text
            else:
                answered = formed(api, {"type": "json_schema", "json_schema": given})
            assert json.loads(answered) == {"number": number}
