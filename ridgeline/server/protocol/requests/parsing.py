"""Bodies become `Asked`: read, checked field by field, then fields against each other.

asked = parse("chat", body, limits)         # raises ApiError, and nothing else
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ridgeline.engine import Grammar, Sampling
from ridgeline.engine.sampling.choosing import check_tokens
from ridgeline.errors import UsageError
from ridgeline.server.protocol.errors import ApiError
from ridgeline.server.protocol.limits import RequestLimits
from ridgeline.server.protocol.requests.asked import Asked, Conversation, Route
from ridgeline.server.protocol.requests.body import read_json
from ridgeline.server.protocol.requests.chat_request import ChatRequest
from ridgeline.server.protocol.requests.checking import checked, unknown_fields
from ridgeline.server.protocol.requests.completion_request import (
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from ridgeline.server.protocol.requests.conversation import chat_messages, of_chat, of_responses
from ridgeline.server.protocol.requests.fields import Body, SamplingFields
from ridgeline.server.protocol.requests.guided_fields import form_of
from ridgeline.server.protocol.requests.messages_conversation import of_messages
from ridgeline.server.protocol.requests.messages_request import CountTokensRequest, MessagesRequest
from ridgeline.server.protocol.requests.responses_request import ResponsesRequest
from ridgeline.server.protocol.requests.tool_fields import grammar_of, tools_of

MAX_IGNORED = 32  # unknown fields whose names are told
COMPLETION_TOKENS = 16  # OpenAI's default on the completions route
REQUESTS: dict[Route, type[Body]] = {
    "chat": ChatRequest,
    "completions": CompletionRequest,
    "responses": ResponsesRequest,
    "messages": MessagesRequest,
    "count_tokens": CountTokensRequest,
    "embeddings": EmbeddingRequest,
    "tokenize": TokenizeRequest,
    "detokenize": DetokenizeRequest,
}


def parse(route: Route, body: bytes, limits: RequestLimits) -> Asked:
    """The request in a body, checked. Quick for small bodies; in a thread for large ones."""
    values = read_json(body, limits.max_depth)
    request = checked(REQUESTS[route], values, limits.ignores_unknown)
    name = getattr(request, "model")  # noqa: B009 - all requests have it, their base does not
    check_model(limits.models[0] if name is None else name, limits.models)
    asked = _MAKERS[route](request, limits)
    if not limits.ignores_unknown:
        return asked
    return replace(asked, ignored=tuple(unknown_fields(request, values)[:MAX_IGNORED]))


def check_model(name: str, models: tuple[str, ...]) -> None:
    if name not in models:
        served = ", ".join(models)
        raise ApiError(
            404,
            f"the model {name[:100]!r} does not exist here; this server has {served}",
            param="model",
            code="model_not_found",
        )


def _chat(request: ChatRequest, limits: RequestLimits) -> Asked:
    if request.top_logprobs and not request.logprobs:
        raise _conflict("top_logprobs", "top_logprobs needs logprobs to be true")
    given = [limit for limit in (request.max_completion_tokens, request.max_tokens) if limit]
    grammar = _grammar(request, "response_format", request.response_format)
    conversation = of_chat(request, limits.max_depth)
    sampling = _sampling(
        request,
        limits,
        max_tokens=min(given, default=limits.max_context),
        n=request.n or 1,
        best_of=request.best_of,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        grammar=grammar,
    )
    _check_outputs(sampling, 1, request, limits)
    return Asked("chat", **_common(request), sampling=sampling, conversation=conversation)


def _completions(request: CompletionRequest, limits: RequestLimits) -> Asked:
    echo, limit = bool(request.echo), request.max_tokens
    limit = COMPLETION_TOKENS if limit is None else limit
    if limit == 0 and not echo:
        raise _conflict("max_tokens", "max_tokens is 0; give at least 1, or echo the prompt")
    if request.stream and echo and request.logprobs is not None:
        raise _conflict("echo", "echo with logprobs cannot be streamed; set stream to false")
    sampling = _sampling(
        request,
        limits,
        max_tokens=max(limit, 1),
        n=request.n or 1,
        best_of=request.best_of,
        logprobs=request.logprobs,
        prompt_logprobs=request.logprobs if echo else None,
        grammar=_grammar(request, "response_format", request.response_format),
    )
    check_ids(request.prompt, "prompt", limits)
    _check_outputs(sampling, num_prompts(request.prompt), request, limits)
    return Asked("completions", **_common(request), sampling=sampling)


def _responses(request: ResponsesRequest, limits: RequestLimits) -> Asked:
    for name in ("include_usage", "continuous_usage_stats"):
        if getattr(request.stream_options, name, None) is not None:
            raise _conflict(f"stream_options.{name}", "the responses route always tells usage")
    grammar = _grammar(request, "text.format", request.text and request.text.format)
    conversation = of_responses(request, limits.max_depth)
    included = request.include or ()
    wants_logprobs = "message.output_text.logprobs" in included or bool(request.top_logprobs)
    if wants_logprobs and conversation.usable_tools:  # calls have no place for theirs
        raise _conflict(
            "top_logprobs" if request.top_logprobs else "include",
            "log-probabilities and tools do not go together here; set tool_choice to none",
        )
    sampling = _sampling(
        request,
        limits,
        max_tokens=request.max_output_tokens or limits.max_context,
        logprobs=(request.top_logprobs or 0) if wants_logprobs else None,
        grammar=grammar,
    )
    return Asked("responses", **_common(request), sampling=sampling, conversation=conversation)


def _messages(request: MessagesRequest, limits: RequestLimits) -> Asked:
    output = request.output_config
    sampling = _sampling(
        request,
        limits,
        max_tokens=request.max_tokens,
        grammar=grammar_of(output and output.format, "output_config.format"),
    )
    conversation = of_messages(request)
    return Asked("messages", **_common(request), sampling=sampling, conversation=conversation)


def _count_tokens(request: CountTokensRequest, limits: RequestLimits) -> Asked:
    output = request.output_config
    grammar_of(output and output.format, "output_config.format")
    return Asked("count_tokens", request.model, request, conversation=of_messages(request))


def _embeddings(request: EmbeddingRequest, limits: RequestLimits) -> Asked:
    check_ids(request.input, "input", limits)
    return Asked(
        "embeddings",
        request.model,
        request,
        sampling=Sampling(max_tokens=1),
        priority=request.priority or 0,
        deadline_s=request.deadline_s,
        cache_salt=request.cache_salt or "",
    )


def _tokenize(request: TokenizeRequest, limits: RequestLimits) -> Asked:
    if (request.prompt is None) == (request.messages is None):
        raise _conflict("prompt", "give either prompt or messages")
    for name, other in (
        ("add_special_tokens", "prompt"),
        ("add_generation_prompt", "messages"),
        ("tools", "messages"),
    ):
        if getattr(request, name) is not None and getattr(request, other) is None:
            raise _conflict(name, f"{name} goes with {other}")
    conversation = None
    if request.messages is not None:
        messages = chat_messages(request.messages, limits.max_depth)
        conversation = Conversation(tuple(messages), tools_of(request.tools))
    return Asked("tokenize", request.model or limits.models[0], request, conversation=conversation)


def _detokenize(request: DetokenizeRequest, limits: RequestLimits) -> Asked:
    check_ids(request.tokens, "tokens", limits)
    return Asked("detokenize", request.model or limits.models[0], request)


_MAKERS: dict[Route, Callable[[Any, RequestLimits], Asked]] = {
    "chat": _chat,
    "completions": _completions,
    "responses": _responses,
    "messages": _messages,
    "count_tokens": _count_tokens,
    "embeddings": _embeddings,
    "tokenize": _tokenize,
    "detokenize": _detokenize,
}


def _common(request: Any) -> dict[str, Any]:
    """What the three routes that make text share."""
    options = request.stream_options
    if options is not None and not request.stream:
        raise _conflict("stream_options", "stream_options needs stream to be true")
    return {
        "model": request.model,
        "request": request,
        "stream": bool(request.stream),
        "include_usage": bool(options is not None and options.include_usage),
        "usage_in_chunks": bool(options is not None and options.continuous_usage_stats),
        "returns_ids": bool(getattr(request, "return_token_ids", None)),
        "priority": request.priority or 0,
        "deadline_s": request.deadline_s,
        "cache_salt": request.cache_salt or "",
    }


def _grammar(request: Any, format_name: str, format: Any) -> Grammar | None:
    form = form_of(request, format_name, format)
    return None if form is None else grammar_of(form, form.param)


def _sampling(request: SamplingFields, limits: RequestLimits, **more: Any) -> Sampling:
    given = {
        name: getattr(request, name)
        for name in (
            "temperature",
            "top_p",
            "top_k",
            "presence_penalty",
            "frequency_penalty",
            "min_p",
            "repetition_penalty",
            "min_tokens",
            "ignore_eos",
            "skip_special_tokens",
        )
        if getattr(request, name) is not None
    }
    try:
        values = {"temperature": 1.0, **limits.sampling, **given}
        values["top_k"] = max(values.get("top_k", 0), 0)
        sampling = Sampling(
            seed=None if request.seed is None else request.seed % 2**64,
            stop=request.stops(),
            stop_ids=tuple(request.stop_token_ids or ()),
            logit_bias=request.biases(),
            **values,
            **more,
        )
        check_tokens(sampling, limits.vocab_size)
    except UsageError as error:
        message = str(error).replace("stop_ids", "stop_token_ids", 1)
        param = message.split(maxsplit=1)[0]
        raise ApiError(400, message, param=param, code="invalid_value") from error
    return sampling


def _check_outputs(sampling: Sampling, prompts: int, request: Any, limits: RequestLimits) -> None:
    if request.stream and sampling.num_samples > sampling.n:
        raise _conflict(
            "best_of", "the best of several outputs cannot be streamed; leave out best_of"
        )
    count = prompts * sampling.num_samples
    if count > limits.max_outputs:
        raise ApiError(
            400,
            f"the request asks for {count} outputs; give at most {limits.max_outputs}",
            param="n" if prompts == 1 else "prompt",
            code="invalid_value",
        )


def num_prompts(prompts: Any) -> int:
    """How many there are: a text, and the ids of one, are one."""
    return 1 if isinstance(prompts, str) or isinstance(prompts[0], int) else len(prompts)


def check_ids(values: Any, name: str, limits: RequestLimits) -> None:
    """An error for token ids that the model does not have."""
    lists = values if values and isinstance(values[0], list) else [values]
    highest = max((max(ids) for ids in lists if ids and isinstance(ids[0], int)), default=-math.inf)
    if highest >= limits.vocab_size:
        raise ApiError(
            400,
            f"{name} has token id {highest}; the model's vocabulary has {limits.vocab_size}",
            param=name,
            code="invalid_value",
        )


def _conflict(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_value")
