"""Cases for the fields that say how a model thinks, and for thoughts that are sent back. The
server's template opens a thought where it is told to. See tests/cpu/test_every_field.py.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

from field_audit import Answer, Api, case
from field_cases_objects import LONG, USER, grows, item_grows

from ridgeline.server.protocol.thinking import EFFORT_TOKENS

ON = {"enable_thinking": True, "ignore_eos": True}


def num_thought(answer: Answer) -> int:
    """Tokens of thoughts."""
    name = "output_tokens_details" if answer.route == "responses" else "completion_tokens_details"
    return int(answer.json["usage"].get(name, {}).get("reasoning_tokens", 0))


def shows_thought(answer: Answer) -> bool:
    if answer.route == "responses":
        return any(item["type"] == "reasoning" for item in answer.json["output"])
    return bool(answer.choices[0]["message"].get("reasoning_content"))


@case(("chat", "responses"), "enable_thinking", "thinking_token_budget", "thinking_budget")
@case(("chat", "responses"), "include_reasoning")
def _(api: Api, owner: str) -> None:
    assert num_thought(api.ask(owner, ignore_eos=True)) == 0
    assert num_thought(api.ask(owner, **ON)) == 8
    for name in ("thinking_token_budget", "thinking_budget"):
        answer = api.ask(owner, **ON, **{name: 3})
        assert (num_thought(answer), answer.num_output) == (4, 8)  # with the closing tag
        assert shows_thought(answer)
    hidden = api.ask(owner, **ON, thinking_token_budget=3, include_reasoning=False)
    assert (num_thought(hidden), shows_thought(hidden)) == (4, False)


@case(("chat",), "reasoning_effort")
@case(("chat", "responses"), "reasoning")
@case(("ReasoningOptions", "ChatReasoning"), "effort")
def _(api: Api) -> None:
    """An effort turns it on, with a limit for the least ones; `none` turns it off."""
    with mock.patch.dict(EFFORT_TOKENS, {"minimal": 3, "low": 5}):
        for route, field in (("chat", "reasoning_effort"), ("chat", ""), ("responses", "")):
            for effort, num in (("none", 0), ("minimal", 4), ("low", 6), ("high", 8)):
                wish: Any = {field: effort} if field else {"reasoning": {"effort": effort}}
                assert num_thought(api.ask(route, **wish, ignore_eos=True)) == num


@case(("chat", "responses"), "thinking")
@case(("ThinkingSwitch",), "type", "budget_tokens")
def _(api: Api) -> None:
    for route in ("chat", "responses"):
        for thinking, num in (
            ({"type": "disabled"}, 0),
            ({"type": "enabled"}, 8),
            ({"type": "enabled", "budget_tokens": 3}, 4),
        ):
            assert num_thought(api.ask(route, thinking=thinking, ignore_eos=True)) == num


@case(("ChatReasoning",), "enabled", "max_tokens", "exclude")
def _(api: Api) -> None:
    def ask(**reasoning: Any) -> Answer:
        return api.ask("chat", reasoning=reasoning, ignore_eos=True)

    assert num_thought(ask(enabled=True)) == 8
    assert num_thought(ask(enabled=False)) == 0
    assert num_thought(ask(enabled=True, max_tokens=3)) == 4
    assert not shows_thought(ask(enabled=True, exclude=True))
    assert shows_thought(ask(enabled=True, exclude=False))


@case(("ReasoningOptions", "ChatReasoning"), "summary", "generate_summary")
def _(api: Api) -> None:
    """There are no summaries: thoughts are told as they are, whichever was asked for."""
    for route in ("chat", "responses"):
        plain = api.ask(route, **ON, thinking_token_budget=3)
        for field in ("summary", "generate_summary"):
            given = {"reasoning": {field: "concise"}}
            assert api.ask(route, **ON, **given, thinking_token_budget=3).texts == plain.texts
            api.refused(route, field, reasoning={field: "another"})


@case(("AssistantMessage",), "reasoning_content", "reasoning")
def _(api: Api) -> None:
    messages = [USER, {"role": "assistant", "content": "hello"}, USER]
    for field in ("reasoning_content", "reasoning"):
        grows(api, messages, (1, field))


@case(("ReasoningItem",), "type", "content", "summary", "id", "encrypted_content", "status")
@case(("ReasoningText", "SummaryText"), "type", "text")
def _(api: Api) -> None:
    """The thought itself reaches the template; what a client got around it is taken."""
    items: list[Any] = [USER, {"type": "reasoning"}, {"role": "assistant", "content": "x"}, USER]
    for field, kind in (("content", "reasoning_text"), ("summary", "summary_text")):
        item_grows(api, items, (1, field), [{"type": kind, "text": "why"}])
        one = [*items[:1], {**items[1], field: [{"type": kind, "text": "x"}]}, *items[2:]]
        item_grows(api, one, (1, field, 0, "text"))
        wrong = [*items[:1], {**items[1], field: [{"type": "another", "text": "x"}]}, *items[2:]]
        api.refused("responses", field, input=wrong)
    around = {"id": "r", "encrypted_content": LONG, "status": "completed"}
    got = [*items[:1], {**items[1], **around}, *items[2:]]
    plain, given = (api.ask("responses", input=each) for each in (items, got))
    assert (given.text, given.num_prompt) == (plain.text, plain.num_prompt)
