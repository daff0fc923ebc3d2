"""`Asked` becomes prompts: templates and tokenizers at work, so all of this blocks.

prompts = render(asked, tokenizer, limits)          # in a thread; raises ApiError
body = answer_now(asked, tokenizer, limits)         # for /tokenize and the like
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ridgeline.data import Tokenizer
from ridgeline.engine import Sampling
from ridgeline.engine.sampling.extras import Pooling
from ridgeline.errors import RidgelineError
from ridgeline.server.protocol.errors import TOO_LONG, ApiError, refusal
from ridgeline.server.protocol.limits import RequestLimits
from ridgeline.server.protocol.requests.asked import Asked, Calls, Conversation, ParsedPrompt
from ridgeline.server.protocol.thinking import begun, continued, template_variables
from ridgeline.server.protocol.tools import (
    CLOSE_TAG,
    call_grammar,
    calls_of,
    takes_tools,
    with_tools_in_text,
)

# No text has so long tokens on average: one that would need them is refused unread, because
# splitting megabytes takes seconds.
CHARACTERS_A_TOKEN = 64
MARK = (
    "\ue000ridgeline:here\ue000"  # behind a message that is to be continued, while it is rendered
)


def render(asked: Asked, tokenizer: Tokenizer, limits: RequestLimits) -> list[ParsedPrompt]:
    """The prompts of a request and how each is sampled: none where nothing is run."""
    if asked.sampling is None:
        return []
    if asked.conversation is not None:
        field = "input" if asked.route == "responses" else "messages"
        prompts = [_chat_prompt(asked.conversation, asked.sampling, tokenizer, field, limits)]
    else:
        field = "input" if asked.route == "embeddings" else "prompt"
        prompts = _plain(asked, getattr(asked.request, field), tokenizer, field, limits)
    for prompt in prompts:
        _check_length(prompt, field, limits)
    return prompts


def _chat_prompt(
    conversation: Conversation,
    sampling: Sampling,
    tokenizer: Tokenizer,
    field: str,
    limits: RequestLimits,
) -> ParsedPrompt:
    text, calls, template = _chat_text(
        conversation, tokenizer, field, conversation.is_prompted, conversation.is_continued
    )
    if conversation.is_continued:
        last = conversation.messages[-1]["content"]
        thinking = continued(last, conversation.thinking, limits.thinking_tags)
    else:
        text, thinking = begun(text, conversation.thinking, limits.thinking_tags, template)
        text += conversation.opening
    _check_characters(text, field, limits)
    ids = tuple(_encoded(tokenizer, text, field, add_special_tokens=False))
    sampling = _with_calls(sampling, conversation, calls)
    if conversation.thinking.is_on is not False:
        sampling = replace(sampling, thinking=thinking)
    return ParsedPrompt(ids, sampling, calls=calls, thinking=thinking)


def answer_now(asked: Asked, tokenizer: Tokenizer, limits: RequestLimits) -> bytes:
    """The JSON that answers a request for which nothing is run."""
    request = asked.request
    if asked.route == "detokenize":
        skip = bool(request.skip_special_tokens)
        answer: dict[str, Any] = {
            "prompt": tokenizer.decode(request.tokens, skip_special_tokens=skip)
        }
    elif asked.route == "count_tokens":
        assert asked.conversation is not None, "it is what is counted"
        nothing = Sampling(max_tokens=1)
        prompt = _chat_prompt(asked.conversation, nothing, tokenizer, "messages", limits)
        answer = {"input_tokens": len(prompt.ids)}
    else:
        ids = _tokenized(asked, tokenizer)
        answer = {"tokens": ids, "count": len(ids)}
    return json.dumps(answer).encode()


def _tokenized(asked: Asked, tokenizer: Tokenizer) -> list[int]:
    request = asked.request
    if asked.conversation is None:
        adds = request.add_special_tokens is not False
        return _encoded(tokenizer, request.prompt, "prompt", add_special_tokens=adds)
    adds = request.add_generation_prompt is not False
    text = _chat_text(asked.conversation, tokenizer, "messages", adds).text
    return _encoded(tokenizer, text, "messages", add_special_tokens=False)


def _with_calls(sampling: Sampling, conversation: Conversation, calls: Calls | None) -> Sampling:
    """The sampling with what makes calls come, keeps them to their schemas, or to one."""
    if calls is None:
        return sampling
    try:
        grammar = call_grammar(conversation, calls.format, sampling.grammar)
    except RidgelineError as error:
        raise refusal(error, "tools") from error
    if grammar is None and calls.format == "hermes" and not calls.parallel:
        return replace(sampling, stop=(*sampling.stop, CLOSE_TAG))
    return replace(sampling, grammar=grammar)


class ChatText(NamedTuple):
    """A conversation as the model's template writes it, and how calls will look."""

    text: str
    calls: Calls | None
    template: str


def _chat_text(
    conversation: Conversation,
    tokenizer: Tokenizer,
    field: str,
    add_generation_prompt: bool = True,
    is_continued: bool = False,
) -> ChatText:
    tools, messages = conversation.usable_tools, list(conversation.messages)
    template = tokenizer.template_for(has_tools=bool(tools)) or ""
    calls = calls_of(conversation, template)
    if "tool_calls" not in template:
        messages = with_tools_in_text(messages, () if takes_tools(template) else tools)
    if is_continued:
        messages[-1] = {**messages[-1], "content": messages[-1]["content"] + MARK}
    given = [tool.for_template() for tool in tools] if tools and takes_tools(template) else None
    try:
        text = tokenizer.chat_text(
            messages,
            tools=given,
            add_generation_prompt=add_generation_prompt,
            **{**template_variables(conversation.thinking, template), **conversation.variables},
        )
    except RidgelineError as error:
        raise refusal(error, field) from error
    if is_continued:
        text, mark, _ = text.rpartition(MARK)
        if not mark:
            message = "the model's chat template leaves out the last message, so that it cannot be "
            raise ApiError(400, f"{message}continued", param="continue_final_message")
    return ChatText(text, calls, template)


def _plain(
    asked: Asked, given: Any, tokenizer: Tokenizer, field: str, limits: RequestLimits
) -> list[ParsedPrompt]:
    """Texts or token ids, one or several."""
    assert asked.sampling is not None, "routes with prompts have a sampling"
    several: Sequence[Any] = (
        [given] if isinstance(given, str) or isinstance(given[0], int) else given
    )
    pooling: Pooling | None = (
        (asked.request.pooling or "last") if asked.route == "embeddings" else None
    )
    is_completion = asked.route == "completions"
    echo = is_completion and asked.request.echo
    adds = not is_completion or asked.request.add_special_tokens is not False
    prompts = []
    for each in several:
        ids = each
        if isinstance(each, str):
            _check_characters(each, field, limits)
            ids = _encoded(tokenizer, each, field, add_special_tokens=adds)
        text = ""
        if echo:
            text = each if isinstance(each, str) else tokenizer.decode(ids)
        prompts.append(ParsedPrompt(tuple(ids), asked.sampling, text, pooling))
    return prompts


def _encoded(tokenizer: Tokenizer, text: str, field: str, *, add_special_tokens: bool) -> list[int]:
    try:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except RidgelineError as error:
        raise refusal(error, field) from error


def _check_characters(text: str, field: str, limits: RequestLimits) -> None:
    most = limits.max_context * CHARACTERS_A_TOKEN
    if len(text) > most:
        raise ApiError(
            400,
            f"{field} has {len(text)} characters; give at most {most}: the maximum context length "
            f"here is {limits.max_context} tokens",
            param=field,
            code=TOO_LONG,
        )


def _check_length(prompt: ParsedPrompt, field: str, limits: RequestLimits) -> None:
    length = len(prompt.ids)
    if not length:
        raise ApiError(400, f"{field} has no tokens; give some text", param=field)
    if length >= limits.max_context:
        raise ApiError(
            400,
            f"{field} has {length} tokens; the maximum context length here is "
            f"{limits.max_context}, output included; give less",
            param=field,
            code=TOO_LONG,
        )
