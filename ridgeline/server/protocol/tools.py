"""Tools on their way into a prompt: in which form a model writes calls, and what forces one.

A template that takes tools decides the form: `<tool_call>` tags (Qwen, Hermes) or bare JSON with
"parameters" (Llama 3). One that takes none gets them in the system message, in the tagged form, and
earlier calls and answers as plain text. Calls that must be made, and those of strict tools, are
held to their schemas by a grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from ridgeline.engine import Grammar
from ridgeline.engine.sampling.matching import MAX_WHITESPACE
from ridgeline.server.protocol.errors import ApiError
from ridgeline.server.protocol.requests.asked import Calls, Conversation, ToolFormat
from ridgeline.server.protocol.requests.tool_fields import Tool

OPEN_TAG, CLOSE_TAG = "<tool_call>", "</tool_call>"
ARGUMENTS: dict[ToolFormat, str] = {"hermes": "arguments", "llama3": "parameters"}
AROUND: dict[ToolFormat, tuple[str, str]] = {
    "hermes": (f"{OPEN_TAG}\n", f"\n{CLOSE_TAG}"),
    "llama3": ("", ""),
}
SEPARATORS: dict[ToolFormat, str] = {"hermes": "\n", "llama3": "; "}
TRIGGERS: dict[ToolFormat, str] = {"hermes": OPEN_TAG, "llama3": '{"name": "'}
ANY_OBJECT = {"type": "object"}

_INSTRUCTIONS = """\
You can call these functions:
<tools>
{tools}
</tools>
To call one, write its name and its arguments as JSON between tags:
<tool_call>
{{"name": "the function's name", "arguments": {{}}}}
</tool_call>"""


def takes_tools(template: str) -> bool:
    return re.search(r"\btools\b", template) is not None


def format_of(template: str) -> ToolFormat:
    """The form in which the model was taught to write calls. Raises ApiError for other forms."""
    if not takes_tools(template):
        return "hermes"
    if OPEN_TAG in template and "<function=" not in template:  # which has XML between the tags
        return "hermes"
    if "<|start_header_id|>" in template and "parameters" in template:
        return "llama3"
    raise ApiError(
        400,
        "tools are not supported for this model: its chat template writes calls in a form that is "
        "not read here (Hermes and Llama 3 are)",
        param="tools",
        code="unsupported_parameter",
    )


def calls_of(conversation: Conversation, template: str) -> Calls | None:
    """How calls are to be found in the outputs; None where there can be none."""
    tools = conversation.usable_tools
    if not tools:
        return None
    named = conversation.choice.name
    names = frozenset([named] if named is not None else [tool.name for tool in tools])
    return Calls(format_of(template), names, conversation.parallel)


def call_grammar(
    conversation: Conversation, format: ToolFormat, answer: Grammar | None
) -> Grammar | None:
    """What an output with tools must look like, where anything is asked of it: calls that must be
    made, calls that keep to a strict schema, or an `answer` of a form of its own.
    """
    choice = conversation.choice
    tools = [tool for tool in conversation.tools if choice.name in (None, tool.name)]
    is_held = choice.is_forced or answer is not None  # there is a grammar in any case
    tags = [_tag(tool, format, tool.strict or is_held) for tool in tools]
    is_one = choice.name is not None or not conversation.parallel
    calls = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": SEPARATORS[format],
        "at_least_one": True,
        "stop_after_first": is_one,
    }
    if choice.is_forced:
        return Grammar.structural_tag(calls)
    if answer is not None:
        return Grammar.structural_tag({"type": "or", "elements": [_element(answer), calls]})
    if any(tool.strict for tool in tools):
        trigger = {"type": "triggered_tags", "triggers": [TRIGGERS[format]], "tags": tags}
        return Grammar.structural_tag({**trigger, "stop_after_first": is_one})
    return None


def _tag(tool: Tool, format: ToolFormat, is_strict: bool) -> dict[str, Any]:
    """A call, as models write it."""
    schema = tool.parameters if is_strict else ANY_OBJECT
    name = json.dumps(tool.name)
    opening, closing = AROUND[format]
    return {
        "type": "tag",
        "begin": f'{opening}{{"name": {name}, "{ARGUMENTS[format]}": ',
        "content": _schema_element(schema),
        "end": f"}}{closing}",
    }


def _element(grammar: Grammar) -> dict[str, Any]:
    """A grammar as a part of another one."""
    match grammar.kind:
        case "json_schema":
            return _schema_element(json.loads(grammar.text))
        case "json_object":
            return _schema_element(ANY_OBJECT)
        case "regex":
            return {"type": "regex", "pattern": grammar.text}
        case "ebnf":
            return {"type": "grammar", "grammar": grammar.text}
        case "choice":
            texts = [{"type": "const_string", "value": text} for text in grammar.choices]
            return texts[0] if len(texts) == 1 else {"type": "or", "elements": texts}
    raise AssertionError(f"no response format makes a {grammar.kind}")


def _schema_element(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_WHITESPACE}


def with_tools_in_text(
    messages: Sequence[dict[str, Any]], tools: Sequence[Tool]
) -> list[dict[str, Any]]:
    """The conversation for a template that knows nothing of tools."""
    plain = [_as_text(message) for message in messages]
    if not tools:
        return plain
    lines = "\n".join(json.dumps(tool.for_template(), ensure_ascii=False) for tool in tools)
    instructions = _INSTRUCTIONS.format(tools=lines)
    if plain[0]["role"] != "system":
        return [{"role": "system", "content": instructions}, *plain]
    return [{**plain[0], "content": f"{plain[0]['content']}\n\n{instructions}"}, *plain[1:]]


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {
            "role": "user",
            "content": f"<tool_response>\n{message['content']}\n</tool_response>",
        }
    calls = message.get("tool_calls", ())
    if not calls:
        return message
    written = [
        f"{OPEN_TAG}\n{json.dumps(call['function'], ensure_ascii=False)}\n{CLOSE_TAG}"
        for call in calls
    ]
    text = "\n".join([message["content"], *written] if message["content"] else written)
    return {"role": message["role"], "content": text}
