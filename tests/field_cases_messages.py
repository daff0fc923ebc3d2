"""Cases for what only Anthropic's routes have: turns of blocks, their tools and choices. See
tests/cpu/test_every_field.py.
"""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

from field_audit import Answer, Api, case
from field_cases_objects import LONG, NUMBER, USER, changed
from tiny_tokenizers import no_blanks, no_end

from ridgeline.server.protocol.thinking import EFFORT_TOKENS

LOOK = {"name": "look", "input_schema": NUMBER}
LISTEN = {"name": "listen", "input_schema": NUMBER}
USE = {"type": "tool_use", "id": "use-1", "name": "look", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "use-1", "content": "5"}
TURNS: list[Any] = [
    USER,
    {"role": "assistant", "content": [{"type": "text", "text": "x"}, USE]},
    {"role": "user", "content": [RESULT]},
]
CACHED = {"type": "ephemeral", "ttl": "1h"}


def count(api: Api, **fields: Any) -> int:
    return api.ask("count_tokens", **fields).num_prompt


def turns_grow(api: Api, path: tuple[Any, ...], value: Any = LONG, turns: Any = TURNS) -> None:
    longer = changed(turns, path, value)
    assert count(api, messages=longer) > count(api, messages=turns)
    assert api.ask("messages", messages=longer).text != api.ask("messages", messages=turns).text


def called(api: Api, tools: list[Any], choice: Any, **more: Any) -> Answer:
    short = {"max_tokens": 80, "logit_bias": no_blanks()}
    return api.ask("messages", tools=tools, tool_choice=choice, **{**short, **more})


@case(("messages", "count_tokens"), "system")
def _(api: Api, owner: str) -> None:
    plain = api.ask(owner).num_prompt
    assert api.ask(owner, system=LONG).num_prompt > plain
    assert api.ask(owner, system=[{"type": "text", "text": LONG}]).num_prompt > plain


@case(("messages", "count_tokens"), "tools", "tool_choice")
def _(api: Api, owner: str) -> None:
    plain = api.ask(owner).num_prompt
    assert api.ask(owner, tools=[LOOK]).num_prompt > plain
    none = {"tools": [LOOK], "tool_choice": {"type": "none"}}
    assert api.ask(owner, **none).num_prompt == plain
    if owner == "messages":
        assert len(called(api, [LOOK], {"type": "any"}).calls) > 0


@case(("messages", "count_tokens"), "output_config")
@case(("OutputConfig",), "format")
@case(("OutputSchema",), "schema", "type")
def _(api: Api) -> None:
    """It does not change the prompt, so that it counts no tokens."""
    for number in (5, 6):
        schema = changed(NUMBER, ("properties", "number"), {"const": number})
        config = {"format": {"type": "json_schema", "schema": schema}}
        answer = api.ask("messages", output_config=config, max_tokens=60)
        assert json.loads(answer.text) == {"number": number}
        assert count(api, output_config=config) == count(api)
    wrong = {"format": {"type": "another", "schema": NUMBER}}
    for route in ("messages", "count_tokens"):
        api.refused(route, "type", output_config=wrong)


@case(("messages",), "inference_geo", "diagnostics")
def _(api: Api) -> None:
    for field in ("inference_geo", "diagnostics"):
        assert api.ask("messages", **{field: None}).status == 200
        api.refused("messages", field, **{field: "x"})


@case(("TurnMessage",), "role", "content")
@case(("TextBlock",), "text", "type")
@case(("ThinkingBlock",), "thinking", "type")
@case(("ToolUseBlock",), "id", "name", "input", "type")
@case(("ToolResultBlock",), "tool_use_id", "content", "is_error", "type")
def _(api: Api) -> None:
    turns_grow(api, (0, "content"))
    roles = ("user", "assistant", "system")
    turns = [[USER, {"role": role, "content": "hi"}] for role in roles]
    assert len({api.ask("messages", messages=each).text for each in turns}) == 3
    turns_grow(api, (1, "content", 0, "text"))
    thinking = changed(TURNS, (1, "content", 0), {"type": "thinking", "thinking": "x"})
    turns_grow(api, (1, "content", 0, "thinking"), turns=thinking)
    for field in ("id", "name"):
        turns_grow(api, (1, "content", 1, field))
    turns_grow(api, (1, "content", 1, "input"), {"number": 5})
    for field in ("tool_use_id", "content"):
        turns_grow(api, (2, "content", 0, field))
    turns_grow(api, (2, "content", 0, "content"), [{"type": "text", "text": LONG}])
    turns_grow(api, (2, "content", 0, "is_error"), True)
    for path in ((1, "content", 0), (1, "content", 1), (2, "content", 0)):
        wrong = changed(TURNS, (*path, "type"), "another")
        api.refused("messages", "another", messages=wrong)


@case(("ThinkingBlock",), "signature")
@case(("TextBlock",), "cache_control", "citations")
@case(("ToolUseBlock",), "cache_control", "caller")
@case(("ToolResultBlock",), "cache_control")
@case(("CacheControl",), "type", "ttl")
@case(("DirectCaller",), "type")
def _(api: Api) -> None:
    """Taken as clients send them, and of no effect."""
    turns = changed(
        TURNS, (1, "content"), [{"type": "thinking", "thinking": "x"}, *TURNS[1]["content"]]
    )
    marked = changed(turns, (1, "content", 0, "signature"), "signed")
    text = {**turns[1]["content"][1], "cache_control": CACHED, "citations": []}
    marked = changed(marked, (1, "content", 1), text)
    use = {**USE, "cache_control": CACHED, "caller": {"type": "direct"}}
    marked = changed(marked, (1, "content", 2), use)
    marked = changed(marked, (2, "content", 0, "cache_control"), CACHED)
    plain, given = (api.ask("messages", messages=each) for each in (turns, marked))
    assert (given.text, given.num_prompt) == (plain.text, plain.num_prompt)
    for path in ((1, "content", 1, "citations"), (1, "content", 2, "caller")):
        wrong = changed(marked, path, [{"type": "another"}])
        assert api.ask("messages", messages=wrong).status == 400
    for field in ("type", "ttl"):
        api.refused("messages", field, cache_control={**CACHED, field: "another"})


@case(("ClientTool",), "name", "input_schema", "description", "type")
def _(api: Api) -> None:
    for tool in (LOOK, LISTEN):
        (call, *_) = called(api, [tool], {"type": "any"}).calls
        assert (call["name"], call["input"]) == (tool["name"], {"number": 5})
    schema = changed(NUMBER, ("properties", "number"), {"const": 6})
    (call, *_) = called(api, [{**LOOK, "input_schema": schema}], {"type": "any"}).calls
    assert call["input"] == {"number": 6}
    assert count(api, tools=[{**LOOK, "description": LONG}]) > count(api, tools=[LOOK])
    assert count(api, tools=[{**LOOK, "type": "custom"}]) == count(api, tools=[LOOK])
    api.refused("messages", "type", tools=[{**LOOK, "type": "another"}])


@case(("ClientTool",), "strict")
def _(api: Api) -> None:
    """Its calls are held to its schema, which therefore has to be one that can be held to."""
    impossible = changed(NUMBER, ("properties", "number"), {"type": "string", "pattern": "("})
    tool = {**LOOK, "input_schema": impossible}
    assert called(api, [tool], {"type": "auto"}).status == 200
    assert called(api, [{**tool, "strict": True}], {"type": "auto"}).status == 400


@case(("ClientTool",), "cache_control", "eager_input_streaming", "defer_loading", "allowed_callers")
def _(api: Api) -> None:
    """Taken as clients send them, and of no effect; what would have one is refused."""
    given = {"eager_input_streaming": True, "defer_loading": False, "allowed_callers": ["direct"]}
    plain = api.ask("messages", tools=[LOOK])
    same = api.ask("messages", tools=[{**LOOK, **given, "cache_control": CACHED}])
    assert (same.text, same.num_prompt) == (plain.text, plain.num_prompt)
    wrong = {"eager_input_streaming": False, "defer_loading": True, "allowed_callers": ["code"]}
    for field, value in wrong.items():
        api.refused("messages", field, tools=[{**LOOK, field: value}])


@case(("AnyChoice", "OneToolChoice", "NoToolChoice"), "type", "disable_parallel_tool_use")
@case(("OneToolChoice",), "name")
def _(api: Api) -> None:
    for name in ("look", "listen"):
        (call,) = called(api, [LOOK, LISTEN], {"type": "tool", "name": name}).calls
        assert call["name"] == name
    assert called(api, [LOOK], {"type": "none"}).calls == []
    endless = {"logit_bias": no_end() | no_blanks(), "max_tokens": 120}
    assert len(called(api, [LOOK], {"type": "any"}, **endless).calls) > 1
    one = {"type": "any", "disable_parallel_tool_use": True}
    assert len(called(api, [LOOK], one, **endless).calls) == 1
    named = {"type": "tool", "name": "look", "disable_parallel_tool_use": True}
    assert len(called(api, [LOOK], named, **endless).calls) == 1
    none = {"type": "none", "disable_parallel_tool_use": True}
    api.refused("messages", "disable_parallel_tool_use", tools=[LOOK], tool_choice=none)
    api.refused("messages", "tool_choice", tools=[LOOK], tool_choice={"type": "another"})


@case(("UserMetadata",), "user_id")
def _(api: Api) -> None:
    given = api.ask("messages", metadata={"user_id": "somebody"})
    assert given.text == api.ask("messages").text
    api.refused("messages", "user_id", metadata={"user_id": "x" * 600})


@case(("messages", "count_tokens"), "thinking")
@case(("ThinkingOff", "ThinkingFreely", "ThinkingWithin"), "type")
@case(("ThinkingFreely", "ThinkingWithin"), "display")
@case(("ThinkingWithin",), "budget_tokens")
@case(("OutputConfig",), "effort")
def _(api: Api) -> None:
    """Eight tokens: all of them are a thought, unless that is off or has a limit."""

    def kinds(thinking: Any, **more: Any) -> list[str]:
        answer = api.ask("messages", thinking=thinking, ignore_eos=True, **more)
        return [block["type"] for block in answer.json["content"]]

    within = {"type": "enabled", "budget_tokens": 3}
    assert kinds({"type": "disabled"}) == kinds(None) == ["text"]
    assert kinds({"type": "adaptive"}) == ["thinking"]
    assert kinds(within) == ["thinking", "text"]
    with mock.patch.dict(EFFORT_TOKENS, {"low": 3}):
        assert kinds({"type": "adaptive"}, output_config={"effort": "low"}) == ["thinking", "text"]
    shown = api.ask("messages", thinking=within, ignore_eos=True).json["content"][0]["thinking"]
    for mode in (within, {"type": "adaptive"}):
        hidden = api.ask("messages", thinking={**mode, "display": "omitted"}, ignore_eos=True)
        assert shown
        assert shown not in hidden.response.text
    assert count(api, thinking={"type": "adaptive"}) > count(api, thinking={"type": "disabled"})
    assert api.ask("messages", thinking={"type": "another"}).status == 400
