"""The body of POST /v1/responses, for text and function calls."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from ridgeline.engine.requests.request import MAX_LOGPROBS
from ridgeline.server.protocol.requests.chat_request import RefusalPart, Variables
from ridgeline.server.protocol.requests.fields import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Body,
    CourseFields,
    SamplingFields,
    StreamOptions,
)
from ridgeline.server.protocol.requests.guided_fields import GuidedFields
from ridgeline.server.protocol.requests.thinking_fields import ReasoningOptions, ThinkingFields
from ridgeline.server.protocol.requests.tool_fields import (
    ChoiceWord,
    FlatFormat,
    FlatNamedChoice,
    FlatTool,
)


class InputText(Body):
    type: Literal["input_text"]
    text: str


class OutputText(Body):
    """What a client got and sends back."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0, fail_fast=True)] | None = None
    logprobs: list[Any] | None = None
    parsed: Any = None


ContentPart = Annotated[InputText | OutputText | RefusalPart, Field(discriminator="type")]
ContentParts = Annotated[
    list[ContentPart], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class MessageItem(Body):
    type: Literal["message"] | None = None
    role: Literal["user", "system", "developer", "assistant"]
    content: str | ContentParts
    id: str | None = None
    status: ItemStatus | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class CallItem(Body):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: ItemStatus | None = None
    parsed_arguments: Any = None
    caller: None = None
    namespace: None = None


class CallOutputItem(Body):
    type: Literal["function_call_output"]
    call_id: str
    output: str | ContentParts
    id: str | None = None
    name: str | None = None
    status: ItemStatus | None = None
    caller: None = None
    namespace: None = None


class ReasoningText(Body):
    type: Literal["reasoning_text"]
    text: str


class SummaryText(Body):
    type: Literal["summary_text"]
    text: str


class ReasoningItem(Body):
    """What a client got and sends back, for templates that repeat thoughts."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: Annotated[list[SummaryText], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = (
        None
    )
    content: (
        Annotated[list[ReasoningText], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None
    ) = None
    encrypted_content: str | None = None  # none was sent: nothing is in it
    status: ItemStatus | None = None


def _item_type(item: Any) -> str:
    kind = item.get("type", "message") if isinstance(item, dict) else "message"
    return kind if isinstance(kind, str) else "message"


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_item_type),
]
InputItems = Annotated[
    list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
]


# What an answer may have besides. But for the first nothing here makes it, and there is none.
Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class TextOptions(Body):
    format: FlatFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesRequest(SamplingFields, CourseFields, ThinkingFields, GuidedFields):
    not_done: ClassVar[dict[str, str]] = {
        "context_management": "nothing is compacted here",
        "conversation": "nothing is kept: send the whole conversation as input",
        "max_tool_calls": "the server calls no tools itself",
        "moderation": "nothing is moderated here",
        "previous_response_id": "nothing is kept: send the whole conversation as input",
        "prompt": "templates are not taken from requests; use input",
        "prompt_cache_options": "use cache_salt",
    }

    model: str
    input: str | InputItems
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=2**31)
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    include: Annotated[list[Included], Field(max_length=16, fail_fast=True)] | None = None
    stream_options: StreamOptions | None = None
    text: TextOptions | None = None
    tools: Annotated[list[FlatTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ChoiceWord | FlatNamedChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Variables | None = None
    reasoning: ReasoningOptions | None = None
    # Sent as a matter of course.
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
