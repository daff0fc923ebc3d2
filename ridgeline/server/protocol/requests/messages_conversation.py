"""Messages of Anthropic's API become what chat templates take.

There a turn holds blocks: results of tools stand in a user's turn, calls in an assistant's. Here
each result is a message of its own, and turns of one role in a row are one message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ridgeline.server.protocol.errors import ApiError
from ridgeline.server.protocol.requests.asked import Conversation, ThinkingWish
from ridgeline.server.protocol.requests.conversation import one_system, text_of
from ridgeline.server.protocol.requests.messages_request import (
    CountTokensRequest,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    TurnMessage,
)
from ridgeline.server.protocol.requests.tool_fields import choice_of, tools_of

# Which blocks a turn may hold, beside text.
ALLOWED: dict[str, tuple[type, ...]] = {
    "user": (ToolResultBlock,),
    "assistant": (ThinkingBlock, ToolUseBlock),
    "system": (),
}


def of_messages(request: CountTokensRequest) -> Conversation:
    tools = tools_of(request.tools)
    choice = request.tool_choice
    messages: list[dict[str, Any]] = []
    if request.system:
        messages.append({"role": "system", "content": text_of(request.system)})
    names: dict[str, str] = {}  # of tools, by the ids of their calls
    for index, turn in enumerate(request.messages):
        for message in _of_turn(turn, f"messages[{index}]", names):
            _add(messages, message)
    wish = request.wish()
    opening = _opening(messages, wish)
    return Conversation(
        tuple(one_system(messages)),
        tools,
        choice_of(choice, tools),
        not (choice is not None and choice.disable_parallel_tool_use),
        thinking=wish,
        opening=opening,
    )


def _opening(messages: list[dict[str, Any]], wish: ThinkingWish) -> str:
    """The last message, where the assistant's: it is taken off, for the answer to begin with."""
    last = messages[-1]
    if last["role"] != "assistant" or "tool_calls" in last or len(messages) == 1:
        return ""
    if wish.is_on is not False:
        raise ApiError(
            400,
            "the last message is the assistant's, and thinking is not off; an answer that has "
            "begun leaves no room for a thought: set thinking to disabled",
            param="thinking",
            code="invalid_value",
        )
    messages.pop()
    opening: str = last["content"]
    return opening


def _of_turn(turn: TurnMessage, path: str, names: dict[str, str]) -> list[dict[str, Any]]:
    """The messages of one turn, in the order of its blocks."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    _check_blocks(turn.role, turn.content, path)
    if turn.role == "assistant":
        return [_of_assistant(turn.content, names)]
    messages: list[dict[str, Any]] = []
    for block in turn.content:
        if isinstance(block, ToolResultBlock):
            messages.append(_result(block, names))
        else:
            assert isinstance(block, TextBlock), f"a user's block is a {type(block).__name__}"
            _add(messages, {"role": turn.role, "content": block.text})
    return messages


def _check_blocks(role: str, blocks: Sequence[Any], path: str) -> None:
    for index, block in enumerate(blocks):
        if not isinstance(block, (TextBlock, *ALLOWED[role])):
            param = f"{path}.content[{index}]"
            raise ApiError(
                400,
                f"{param} is a {block.type} block in a message of the {role}; it belongs to "
                f"another role",
                param=param,
            )


def _of_assistant(blocks: Sequence[Any], names: dict[str, str]) -> dict[str, Any]:
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = [_call(block) for block in calls]
        names |= {block.id: block.name for block in calls}
    return message


def _call(block: ToolUseBlock) -> dict[str, Any]:
    function = {"name": block.name, "arguments": block.input}
    return {"id": block.id, "type": "function", "function": function}


def _result(block: ToolResultBlock, names: dict[str, str]) -> dict[str, Any]:
    text = text_of(block.content)
    return {
        "role": "tool",
        "content": f"Error: {text}" if block.is_error else text,
        "tool_call_id": block.tool_use_id,
        "name": names.get(block.tool_use_id, ""),
    }


def _add(messages: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Turns of one role in a row are one, as that API has it; what holds calls stands alone."""
    last = messages[-1] if messages else None
    is_same = last is not None and last["role"] == message["role"] != "tool"
    if last is None or not is_same or set(last) | set(message) != {"role", "content"}:
        messages.append(message)
    else:
        last["content"] = "\n".join(text for text in (last["content"], message["content"]) if text)
