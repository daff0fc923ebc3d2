"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from ridgeline.engine.requests.request import MAX_LOGPROBS, MAX_SAMPLES
from ridgeline.server.protocol.requests.fields import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ONLY_THESE,
    Body,
    CacheControl,
    CourseFields,
    SamplingFields,
    StreamOptions,
)
from ridgeline.server.protocol.requests.guided_fields import GuidedFields
from ridgeline.server.protocol.requests.thinking_fields import (
    ChatReasoning,
    Effort,
    ThinkingFields,
)
from ridgeline.server.protocol.requests.tool_fields import (
    ChatNamedChoice,
    ChatTool,
    ChoiceWord,
    ResponseFormat,
)

MESSAGES_HELP = "use messages with text"


class TextPart(Body):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


class RefusalPart(Body):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


# By their type, so that a part of another kind (an image, a sound, a file) is refused by name.
TextParts = Annotated[
    list[Annotated[TextPart | RefusalPart, Field(discriminator="type")]],
    Field(min_length=1, max_length=MAX_MESSAGES),
]
Content = str | TextParts


class SystemMessage(Body):
    role: Literal["system", "developer"]
    content: Content
    name: str | None = None
    cache_control: CacheControl | None = None


class UserMessage(Body):
    role: Literal["user"]
    content: Content
    name: str | None = None
    cache_control: CacheControl | None = None


class CalledFunction(Body):
    name: str
    arguments: str
    parsed_arguments: Any = None  # what OpenAI's own client leaves there


class ToolCall(Body):
    id: str
    type: Literal["function"]
    function: CalledFunction
    index: int | None = None  # left there by clients that gather a stream


class ReasoningDetail(Body):
    """A part of an earlier thought, as OpenRouter's clients keep it."""

    type: Literal["reasoning.text", "reasoning.summary", "reasoning.encrypted"]
    text: str | None = None
    summary: str | None = None
    data: str | None = None  # encrypted by somebody else: not looked at
    signature: str | None = None
    id: str | None = None
    format: str | None = None
    index: int | None = None


class AssistantMessage(Body):
    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    # Clients send the message they got: these are its empty fields.
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0, fail_fast=True)] | None = None
    parsed: Any = None
    reasoning_content: str | None = None  # for templates that repeat thoughts
    reasoning: str | None = None  # the same, under another name
    reasoning_details: (
        Annotated[list[ReasoningDetail], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None
    ) = None
    cache_control: CacheControl | None = None

    def thought(self) -> str:
        """What the model thought before, under whatever name."""
        details = [part.text or part.summary or "" for part in self.reasoning_details or ()]
        return self.reasoning_content or self.reasoning or "\n".join(filter(None, details))

    @model_validator(mode="after")
    def _says_something(self) -> AssistantMessage:
        texts = (self.content, self.refusal, self.reasoning_content, self.reasoning)
        if texts == (None,) * len(texts) and not self.tool_calls:
            raise ValueError("has neither content nor tool_calls; give one")
        return self


class ToolMessage(Body):
    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None
    cache_control: CacheControl | None = None


ChatMessage = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]
Messages = Annotated[
    list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
]
Variable = bool | int | float | Annotated[str, Field(max_length=1024)] | None
VariableName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
Variables = Annotated[
    dict[VariableName, Variable], Field(max_length=16, json_schema_extra=ONLY_THESE)
]


class ChatRequest(SamplingFields, CourseFields, ThinkingFields, GuidedFields):
    not_done: ClassVar[dict[str, str]] = {
        "audio": "this server makes text",
        "function_call": "use tool_choice",
        "functions": "use tools",
        "moderation": "nothing is moderated here",
        "prediction": "drafts are made by the server's own speculation",
        "prompt_cache_options": "use cache_salt",
        "web_search_options": "no page is ever fetched",
    }

    model: str
    messages: Messages
    n: int | None = Field(None, ge=1, le=MAX_SAMPLES)
    best_of: int | None = Field(None, ge=1, le=MAX_SAMPLES)
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[ChatTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ChoiceWord | ChatNamedChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Variables | None = Field(
        None, description="variables for the model's own chat template, as enable_thinking"
    )
    add_generation_prompt: bool | None = Field(
        None, description="false: the prompt ends with the last message"
    )
    continue_final_message: bool | None = Field(
        None, description="the output goes on from the last message, which is the assistant's"
    )
    return_token_ids: bool | None = Field(None, description="ids of the prompt and of the output")
    reasoning_effort: Effort | None = None
    reasoning: ChatReasoning | None = None
    # Sent as a matter of course.
    modalities: Annotated[list[Literal["text"]], Field(max_length=1, fail_fast=True)] | None = None
    verbosity: Literal["medium"] | None = None
