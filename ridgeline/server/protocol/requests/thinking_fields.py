"""What requests say about thinking, in the words of several APIs, as one `ThinkingWish`.

OpenAI's have an effort, vLLM's and Qwen's a number of tokens and a switch, and templates variables
of their own. Those that contradict each other are refused.

    wish_of(request)        # ThinkingWish(is_on=True, effort="low", max_tokens=None)
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from ridgeline.server.protocol.errors import ApiError
from ridgeline.server.protocol.requests.asked import ThinkingWish
from ridgeline.server.protocol.requests.fields import Body

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
SummaryWord = Literal["auto", "concise", "detailed"]
SWITCHES = ("enable_thinking", "thinking")  # variables with which templates turn it on and off


class ReasoningOptions(Body):
    """As the responses route has it."""

    effort: Effort | None = None
    # Thoughts are told as they are: there are no summaries to choose from.
    summary: SummaryWord | None = None
    generate_summary: SummaryWord | None = None


class ChatReasoning(ReasoningOptions):
    """As OpenRouter's clients send it to the chat route."""

    enabled: bool | None = None
    max_tokens: int | None = Field(None, ge=0, lt=2**31)
    exclude: bool | None = Field(None, description="thoughts are not part of the reply")


class ThinkingSwitch(Body):
    """As Anthropic's API has it, and others after it."""

    type: Literal["enabled", "disabled"]
    budget_tokens: int | None = Field(None, ge=0, lt=2**31)


class ThinkingFields(Body):
    """Beyond OpenAI's API."""

    thinking: ThinkingSwitch | None = None
    enable_thinking: bool | None = None
    thinking_token_budget: int | None = Field(
        None, ge=0, lt=2**31, description="most tokens of a thought; 0: none"
    )
    thinking_budget: int | None = Field(None, ge=0, lt=2**31, description="the same")
    include_reasoning: bool | None = Field(None, description="false: thoughts are not in the reply")


def wish_of(request: Any) -> ThinkingWish:
    """Raises ApiError where fields contradict each other."""
    options = request.reasoning
    efforts = {
        "reasoning_effort": getattr(request, "reasoning_effort", None),
        "reasoning.effort": options and options.effort,
    }
    budgets = {
        "thinking_token_budget": request.thinking_token_budget,
        "thinking_budget": request.thinking_budget,
        "reasoning.max_tokens": getattr(options, "max_tokens", None),
        "thinking.budget_tokens": getattr(request.thinking, "budget_tokens", None),
    }
    effort, budget = _agreed(efforts), _agreed(budgets)
    variables = request.chat_template_kwargs or {}
    switches: dict[str, Any] = {
        name: value != "none" for name, value in efforts.items() if value is not None
    }
    switches |= {name: False for name, value in budgets.items() if value == 0}
    switches["enable_thinking"] = request.enable_thinking
    switches["reasoning.enabled"] = getattr(options, "enabled", None)
    if request.thinking is not None:
        switches["thinking"] = request.thinking.type == "enabled"
    for name in SWITCHES:
        if isinstance(variables.get(name), bool):
            switches[f"chat_template_kwargs.{name}"] = variables[name]
    is_shown = request.include_reasoning is not False and not getattr(options, "exclude", None)
    return ThinkingWish(_agreed(switches), effort, budget or None, is_shown)


def _agreed(given: dict[str, Any]) -> Any:
    """The one value that is given, under whatever names."""
    values = {name: value for name, value in given.items() if value is not None}
    for name, value in values.items():
        first = next(iter(values))
        if value != values[first]:
            raise ApiError(
                400,
                f"{name} and {first} contradict each other; give one of them",
                param=name,
                code="invalid_value",
            )
    return next(iter(values.values()), None)
