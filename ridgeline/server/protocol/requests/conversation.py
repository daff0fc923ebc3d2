"""Messages of the chat route and items of the responses route become what chat templates take.

Templates know the roles system, user, assistant and tool, text as content, and calls whose
arguments are objects; most look for one system message, at the beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ridgeline.server.protocol.errors import ApiError
from ridgeline.server.protocol.requests.asked import Conversation
from ridgeline.server.protocol.requests.body import read_json
from ridgeline.server.protocol.requests.chat_request import (
    AssistantMessage,
    ChatMessage,
    ChatRequest,
    ToolMessage,
)
from ridgeline.server.protocol.requests.responses_request import (
    CallItem,
    CallOutputItem,
    MessageItem,
    ReasoningItem,
    ResponsesRequest,
)
from ridgeline.server.protocol.requests.thinking_fields import wish_of
from ridgeline.server.protocol.requests.tool_fields import choice_of, tools_of

# What templates are given by others.
RESERVED = ("self", "template", "messages", "tools", "documents", "add_generation_prompt")


def of_chat(request: ChatRequest, max_depth: int) -> Conversation:
    tools = tools_of(request.tools)
    return Conversation(
        tuple(chat_messages(request.messages, max_depth)),
        tools,
        choice_of(request.tool_choice, tools),
        request.parallel_tool_calls is not False,
        _variables(request.chat_template_kwargs),
        wish_of(request),
        is_prompted=request.add_generation_prompt is not False and not _continues(request),
        is_continued=_continues(request),
    )


def _continues(request: ChatRequest) -> bool:
    if not request.continue_final_message:
        return False
    if request.add_generation_prompt:
        raise ApiError(
            400,
            "continue_final_message and add_generation_prompt contradict each other; give one",
            param="continue_final_message",
        )
    last = request.messages[-1]
    if not isinstance(last, AssistantMessage) or last.tool_calls:
        raise ApiError(
            400,
            "continue_final_message needs a last message of the assistant, without calls",
            param="continue_final_message",
        )
    return True


def of_responses(request: ResponsesRequest, max_depth: int) -> Conversation:
    tools = tools_of(request.tools)
    messages: list[dict[str, Any]] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        messages.append({"role": "user", "content": request.input})
    else:
        _add_items(messages, request.input, max_depth)
    return Conversation(
        tuple(one_system(messages)),
        tools,
        choice_of(request.tool_choice, tools),
        request.parallel_tool_calls is not False,
        _variables(request.chat_template_kwargs),
        wish_of(request),
    )


def chat_messages(messages: Sequence[ChatMessage], max_depth: int) -> list[dict[str, Any]]:
    names: dict[str, str] = {}  # of functions, by the ids of their calls
    found = [
        _plain(message, f"messages[{index}]", names, max_depth)
        for index, message in enumerate(messages)
    ]
    return one_system(found)


def _plain(
    message: ChatMessage, place: str, names: dict[str, str], max_depth: int
) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": _role(message.role), "content": text_of(message.content)}
    if message.name is not None:
        plain["name"] = message.name
    if isinstance(message, ToolMessage):
        plain["tool_call_id"] = message.tool_call_id
        plain.setdefault("name", names.get(message.tool_call_id, ""))
    elif isinstance(message, AssistantMessage):
        plain["content"] = plain["content"] or message.refusal or ""
        if thought := message.thought():
            plain["reasoning_content"] = thought
        if message.tool_calls:
            plain["tool_calls"] = [
                _call(
                    call.id,
                    call.function.name,
                    call.function.arguments,
                    f"{place}.tool_calls[{number}].function.arguments",
                    max_depth,
                )
                for number, call in enumerate(message.tool_calls)
            ]
            names |= {call.id: call.function.name for call in message.tool_calls}
    return plain


def _add_items(messages: list[dict[str, Any]], items: Sequence[Any], max_depth: int) -> None:
    names: dict[str, str] = {}
    thought: dict[str, Any] = {}  # of the next message of the model
    for index, item in enumerate(items):
        if isinstance(item, ReasoningItem):
            text = "\n".join(part.text for part in item.content or item.summary or ())
            thought = {"reasoning_content": text} if text else {}
        elif isinstance(item, MessageItem):
            message = {"role": _role(item.role), "content": text_of(item.content)}
            messages.append({**message, **thought} if item.role == "assistant" else message)
            thought = {}
        elif isinstance(item, CallItem):
            names[item.call_id] = item.name
            if not messages or messages[-1]["role"] != "assistant" or thought:
                messages.append({"role": "assistant", "content": "", **thought})
                thought = {}
            place = f"input[{index}].arguments"
            call = _call(item.call_id, item.name, item.arguments, place, max_depth)
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            assert isinstance(item, CallOutputItem), f"an item is a {type(item).__name__}"
            answer = {"role": "tool", "content": text_of(item.output), "tool_call_id": item.call_id}
            messages.append({**answer, "name": item.name or names.get(item.call_id, "")})


def _call(call_id: str, name: str, arguments: str, place: str, max_depth: int) -> dict[str, Any]:
    try:
        values = read_json(arguments.encode() if arguments.strip() else b"{}", max_depth)
    except ApiError as error:
        raise ApiError(
            400, f"{place} must be a JSON object, as text: {error.message}", param=place
        ) from error
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": values}}


def _role(role: str) -> str:
    return "system" if role == "developer" else role


def text_of(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content)


def one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Several system messages at the beginning as one."""
    count = 0
    while count < len(messages) and messages[count]["role"] == "system":
        count += 1
    if count < 2:
        return messages
    text = "\n\n".join(message["content"] for message in messages[:count])
    return [{**messages[0], "content": text}, *messages[count:]]


def _variables(given: dict[str, Any] | None) -> dict[str, Any]:
    for name in given or ():
        if name in RESERVED or name.endswith("_token"):
            raise ApiError(
                400,
                f"chat_template_kwargs may not have {name!r}, which the server itself gives",
                param="chat_template_kwargs",
            )
    return dict(given or {})
