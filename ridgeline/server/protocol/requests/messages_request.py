"""The bodies of POST /v1/messages and /v1/messages/count_tokens, as Anthropic's clients send them.

Content is a text or blocks; blocks of other kinds (images, documents, what that company's own
servers make) are refused by name. `cache_control` passes without effect: computed prefixes are
reused anyway, unmarked ones too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ridgeline.engine import Grammar
from ridgeline.server.protocol.requests.asked import ThinkingWish
from ridgeline.server.protocol.requests.fields import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Body,
    CacheControl,
    Json,
    SamplingFields,
    StopTexts,
)
from ridgeline.server.protocol.requests.tool_fields import Tool, ToolChoice

LongName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]
NoEntries = Annotated[list[Any], Field(max_length=0, fail_fast=True)]


class TextBlock(Body):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: NoEntries | None = None


class ThinkingBlock(Body):
    """What the model thought earlier; the signature is not looked at."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class DirectCaller(Body):
    type: Literal["direct"]


class ToolUseBlock(Body):
    type: Literal["tool_use"]
    id: str
    name: str
    input: Json
    cache_control: CacheControl | None = None
    caller: DirectCaller | None = None


TextBlocks = Annotated[list[TextBlock], Field(max_length=MAX_MESSAGES, fail_fast=True)]


class ToolResultBlock(Body):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | TextBlocks | None = None
    is_error: bool | None = Field(None, description="the model reads `Error: ` before the content")
    cache_control: CacheControl | None = None


ContentBlock = Annotated[
    TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]
ContentBlocks = Annotated[
    list[ContentBlock], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
]


class TurnMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: str | ContentBlocks


class ClientTool(Body):
    type: Literal["custom"] | None = Field(None, description="tools of the client alone")
    name: LongName
    description: str | None = None
    input_schema: Json
    strict: bool | None = Field(None, description="calls follow the schema by a grammar")
    cache_control: CacheControl | None = None
    # Sent as a matter of course: calls are streamed as they are written.
    eager_input_streaming: Literal[True] | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None

    def tool(self) -> Tool:
        parameters = {"type": "object", **self.input_schema}
        return Tool(self.name, self.description, parameters, bool(self.strict))


class AnyChoice(Body):
    """`auto` leaves it to the model, `any` asks for a call."""

    type: Literal["auto", "any"]
    disable_parallel_tool_use: bool | None = Field(None, description="at most one call")

    def choice(self) -> ToolChoice:
        return ToolChoice("auto" if self.type == "auto" else "required")


class OneToolChoice(Body):
    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None

    def choice(self) -> ToolChoice:
        return ToolChoice("required", self.name)


class NoToolChoice(Body):
    type: Literal["none"]
    disable_parallel_tool_use: None = None

    def choice(self) -> ToolChoice:
        return ToolChoice("none")


TurnToolChoice = Annotated[AnyChoice | OneToolChoice | NoToolChoice, Field(discriminator="type")]


class ThinkingOff(Body):
    type: Literal["disabled"]

    def wish(self, effort: str | None) -> ThinkingWish:
        return ThinkingWish(is_on=False)


class ThinkingFreely(Body):
    """`adaptive`: how much is the model's choice, and one that does not think need not."""

    type: Literal["adaptive"]
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="omitted: thoughts are not in the reply; else they are told in full"
    )

    def wish(self, effort: str | None) -> ThinkingWish:
        # That API's own default. An effort is taken by models that do not think, too.
        return ThinkingWish(True, effort or "high", is_shown=self.display != "omitted")


class ThinkingWithin(ThinkingFreely):
    type: Literal["enabled"]  # type: ignore[assignment]
    budget_tokens: int = Field(ge=1, lt=2**31, description="most tokens of a thought")

    def wish(self, effort: str | None) -> ThinkingWish:
        return replace(super().wish(effort), effort=effort, max_tokens=self.budget_tokens)


ThinkingMode = Annotated[ThinkingOff | ThinkingFreely | ThinkingWithin, Field(discriminator="type")]


class OutputSchema(Body):
    type: Literal["json_schema"]
    schema_: Json = Field(alias="schema")

    def grammar(self) -> Grammar | None:
        return Grammar.json_schema(self.schema_)


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="of thinking, where that is on"
    )
    format: OutputSchema | None = None


class UserMetadata(Body):
    user_id: str | None = Field(None, max_length=512)


class CountTokensRequest(Body):
    """What a prompt is made of: the same on both routes."""

    not_done: ClassVar[dict[str, str]] = {
        "container": "nothing is executed here",
        "context_management": "nothing is compacted here",
        "mcp_servers": "no other server is called from here",
    }

    model: str
    messages: Annotated[
        list[TurnMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    ]
    system: str | TextBlocks | None = None
    tools: Annotated[list[ClientTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: TurnToolChoice | None = None
    thinking: ThinkingMode | None = Field(None, description="none where it is not given")
    output_config: OutputConfig | None = None
    # Sent as a matter of course.
    cache_control: CacheControl | None = None
    speed: Literal["standard"] | None = None

    def wish(self) -> ThinkingWish:
        """Thinking is off unless it is asked for, as that API has it."""
        effort = None if self.output_config is None else self.output_config.effort
        effort = "high" if effort in ("xhigh", "max") else effort  # the most that templates know
        return ThinkingWish(is_on=False) if self.thinking is None else self.thinking.wish(effort)


class MessagesRequest(CountTokensRequest, SamplingFields):
    not_done: ClassVar[dict[str, str]] = {
        **CountTokensRequest.not_done,
        "stop": "use stop_sequences",
        "user": "use metadata.user_id",
    }
    stream_options: ClassVar[None] = None  # usage is told in every stream

    max_tokens: int = Field(ge=1, lt=2**31)
    stop_sequences: StopTexts | None = None
    # Sent as a matter of course.
    metadata: UserMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    inference_geo: None = None
    diagnostics: None = None

    def stops(self) -> tuple[str, ...]:
        return tuple(self.stop_sequences or ())
