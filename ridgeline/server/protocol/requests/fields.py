"""What all requests share: strictness, bounds, and the fields that say how tokens are chosen.

Types are exact (`"1"` is no number, `true` no 1), null stands for a field that is not given, and
there is no field without an effect but those under "sent as a matter of course". The meaning and
the defaults of sampling are engine/requests/request.py's.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from ridgeline.engine.requests.request import MAX_BIASED

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_MESSAGES = 4096  # of a conversation, or items of an input
MAX_PROMPTS = 2048  # of a request, or texts to embed
MAX_TOOLS = 128
MAX_IDS = 4_000_000  # token ids of a prompt
DAY_S = 86_400
MAX_TEMPERATURE = 100  # by then all tokens are about as likely


class Body(BaseModel):
    """A request, or an object in one."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    # Fields of OpenAI's API that are not done, with what to do instead: null passes.
    not_done: ClassVar[dict[str, str]] = {}


TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_IDS, fail_fast=True)]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
StopTexts = Annotated[list[StopText], Field(max_length=MAX_STOPS, fail_fast=True)]
BiasKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
ONLY_THESE = {"additionalProperties": False}  # keys that do not match their pattern
Biases = Annotated[dict[BiasKey, Bias], Field(max_length=MAX_BIASED, json_schema_extra=ONLY_THESE)]
LabelField = Annotated[str, Field(max_length=512)]
Metadata = Annotated[dict[Annotated[str, Field(max_length=64)], LabelField], Field(max_length=16)]
# A text, its token ids, or several of either.
Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
IdLists = Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
PromptField = str | TokenIds | Texts | IdLists


class CacheControl(Body):
    """A mark behind which a prefix is to be cached: it is anyway."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(None, description="usage so far in every chunk")
    include_obfuscation: Literal[False] | None = None  # nothing is padded


class SamplingFields(Body):
    """How tokens are chosen, and how a request stands among others."""

    temperature: float | None = Field(None, ge=0, le=MAX_TEMPERATURE)
    top_p: float | None = Field(None, gt=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1)
    stop: StopText | StopTexts | None = None
    logit_bias: Biases | None = None
    stream: bool | None = None
    # Beyond OpenAI's API.
    top_k: int | None = Field(None, ge=-1, lt=2**31, description="0 and -1: all tokens")
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    ignore_eos: bool | None = Field(None, description="end-of-text tokens end nothing")
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64, fail_fast=True)] | None = None
    skip_special_tokens: bool | None = Field(
        None, description="false: special tokens of the output have text"
    )
    priority: int | None = Field(None, ge=-(2**31), lt=2**31, description="higher runs first")
    deadline_s: float | None = Field(
        None, gt=0, le=DAY_S, description="seconds from its arrival after which it is given up"
    )
    cache_salt: Annotated[str, Field(max_length=256)] | None = Field(
        None, description="computed prefixes are shared only among requests with the same salt"
    )
    # Sent as a matter of course: no effect.
    user: str | None = None

    def stops(self) -> tuple[str, ...]:
        stop = self.stop or ()
        return (stop,) if isinstance(stop, str) else tuple(stop)

    def biases(self) -> dict[int, float]:
        return {int(token): bias for token, bias in (self.logit_bias or {}).items()}


class CourseFields(Body):
    """What clients send to the chat and responses routes as a matter of course: these values pass
    and have no effect, others are refused.
    """

    store: Literal[False] | None = None  # nothing is kept
    metadata: Metadata | None = None
    service_tier: Literal["auto", "default"] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory"] | None = None
    safety_identifier: str | None = None


Json = dict[str, Any]
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
