"""Tools on their way into a prompt: in which form a model writes calls, and what forces one.

A template that takes tools decides the form: `<tool_call>` tags (Qwen, Hermes) or bare JSON with
"parameters" (Llama 3). One that takes none gets them in the system message, in the tagged form, and
earlier calls and answers as plain text. A call that must be made is forced by a grammar: the prompt
ends with what comes before its JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from ridgeline.engine import Grammar
from ridgeline.server.protocol.asked import Calls, Conversation, ToolFormat
from ridgeline.server.protocol.errors import ApiError
from ridgeline.server.protocol.tool_fields import Tool

OPEN_TAG, CLOSE_TAG = "<tool_call>", "</tool_call>"
ARGUMENTS: dict[ToolFormat, str] = {"hermes": "arguments", "llama3": "parameters"}
# What stands in a prompt before the JSON of a call that is forced.
OPENINGS: dict[ToolFormat, str] = {"hermes": f"{OPEN_TAG}\n", "llama3": ""}

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
    if OPEN_TAG in template or not takes_tools(template):
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
    return Calls(format_of(template), names, conversation.choice.is_forced, conversation.parallel)


def forcing_grammar(conversation: Conversation, format: ToolFormat) -> Grammar:
    """JSON of one call, of the tool that is named or of any."""
    named, key = conversation.choice.name, ARGUMENTS[format]
    tools = [tool for tool in conversation.tools if named is None or tool.name == named]
    calls = [_call_schema(tool.name, key, f"#/$defs/{index}") for index, tool in enumerate(tools)]
    schema: dict[str, Any] = dict(calls[0]) if len(calls) == 1 else {"anyOf": calls}
    schema["$defs"] = {
        str(index): _rebased(tool.parameters, f"#/$defs/{index}")
        for index, tool in enumerate(tools)
    }
    return Grammar.json_schema(schema)


def _call_schema(name: str, key: str, parameters: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, key: {"$ref": parameters}},
        "required": ["name", key],
        "additionalProperties": False,
    }


def _rebased(schema: Any, base: str) -> Any:
    """The schema for a place inside another one: its references are counted from there."""
    if isinstance(schema, list):
        return [_rebased(item, base) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: base + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _rebased(value, base)
        for key, value in schema.items()
    }


def with_tools_in_text(
    messages: Sequence[dict[str, Any]], tools: Sequence[Tool]
) -> list[dict[str, Any]]:
    """The conversation for a template that knows nothing of tools."""
    plain = [_as_text(message) for message in messages]
    if not tools:
        return plain
    lines = "\n".join(json.dumps(tool.for_template(), ensure_ascii=False) for tool in tools)
    about = _INSTRUCTIONS.format(tools=lines)
    if plain[0]["role"] != "system":
        return [{"role": "system", "content": about}, *plain]
    return [{**plain[0], "content": f"{plain[0]['content']}\n\n{about}"}, *plain[1:]]


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
