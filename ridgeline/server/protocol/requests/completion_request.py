"""The bodies of POST /v1/completions, /v1/embeddings, /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ridgeline.engine.requests.request import MAX_LOGPROBS, MAX_SAMPLES
from ridgeline.engine.sampling.extras import Pooling
from ridgeline.server.protocol.requests.chat_request import Messages
from ridgeline.server.protocol.requests.fields import (
    MAX_IDS,
    MAX_TOOLS,
    Body,
    PromptField,
    SamplingFields,
    StreamOptions,
    TokenId,
)
from ridgeline.server.protocol.requests.guided_fields import GuidedFields
from ridgeline.server.protocol.requests.tool_fields import ChatTool, ResponseFormat


class CompletionRequest(SamplingFields, GuidedFields):
    not_done: ClassVar[dict[str, str]] = {"suffix": "text cannot be filled in before one"}

    model: str
    prompt: PromptField
    n: int | None = Field(None, ge=1, le=MAX_SAMPLES)
    best_of: int | None = Field(None, ge=1, le=MAX_SAMPLES)
    max_tokens: int | None = Field(None, ge=0, lt=2**31, description="16 where it is not given")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = Field(None, description="beyond OpenAI's API")
    add_special_tokens: bool | None = Field(
        None, description="false: nothing is put around a prompt"
    )
    return_token_ids: bool | None = Field(None, description="ids of the prompt and of the output")


class EmbeddingRequest(Body):
    not_done: ClassVar[dict[str, str]] = {"dimensions": "embeddings have the model's own size"}

    model: str
    input: PromptField
    encoding_format: Literal["float", "base64"] | None = None
    pooling: Pooling | None = Field(None, description="of the last token (default) or the mean")
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    deadline_s: float | None = Field(None, gt=0, le=86_400)
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    user: str | None = None


class TokenizeRequest(Body):
    """A text, or a conversation as its template writes it."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Annotated[list[ChatTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    add_special_tokens: bool | None = Field(None, description="for a prompt; true if not given")
    add_generation_prompt: bool | None = Field(None, description="for messages; true if not given")


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MAX_IDS, fail_fast=True)]
    skip_special_tokens: bool | None = Field(None, description="false if not given")
