"""Thinking on its way into a prompt: which tags a model thinks between, and how a request turns
that on, off, or limits it.

Tags are known by the model's chat template, or by tokens of their own. Off is told to the template
where it listens (`enable_thinking`, `thinking`); where it does not, an empty thought is written
into the prompt. What came of it is replies/output_parser.py's.

    tags = tags_for("auto", tokenizer)                       # ThinkingTags("<think>", "</think>")
    variables = template_variables(wish, template)           # {"enable_thinking": False}
    text, thinking = begun(text, wish, tags, template)       # of a rendered conversation
"""

from __future__ import annotations

import re
from typing import Any

from ridgeline.data import Tokenizer
from ridgeline.engine import Thinking
from ridgeline.errors import UsageError
from ridgeline.server.protocol.errors import ApiError
from ridgeline.server.protocol.limits import ThinkingTags
from ridgeline.server.protocol.requests.asked import ThinkingWish
from ridgeline.server.protocol.requests.thinking_fields import SWITCHES

EFFORT = "reasoning_effort"  # the variable of templates that know several efforts
# Most tokens of a thought by effort, for templates that know none; without a limit where not named.
EFFORT_TOKENS = {"minimal": 512, "low": 2048}


KNOWN_TAGS = (
    ThinkingTags("<think>", "</think>"),  # Qwen3, SmolLM3, DeepSeek-R1, QwQ, GLM-4.5, …
    ThinkingTags("[THINK]", "[/THINK]"),  # Magistral
    ThinkingTags("<seed:think>", "</seed:think>"),  # Seed-OSS
    ThinkingTags("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
)


def tags_for(setting: str, tokenizer: Tokenizer) -> ThinkingTags | None:
    """What `--reasoning` says: auto, off, or two tags with a comma between them."""
    if setting == "off":
        return None
    if setting != "auto":
        return check_tags(setting)
    template = tokenizer.chat_template or ""
    for tags in KNOWN_TAGS:
        if all(tag in template or _is_token(tag, tokenizer) for tag in tags):
            return tags
    return None


def check_tags(setting: str) -> ThinkingTags:
    opening, _, closing = setting.partition(",")
    if not opening.strip() or not closing.strip() or opening == closing:
        raise UsageError(
            f"--reasoning is {setting!r}; give auto, off, or two tags: '<think>,</think>'"
        )
    return ThinkingTags(opening.strip(), closing.strip())


def _is_token(tag: str, tokenizer: Tokenizer) -> bool:
    return len(tokenizer.encode(tag, add_special_tokens=False)) == 1


def template_variables(wish: ThinkingWish, template: str) -> dict[str, Any]:
    """What the template is told of a request's wish, as far as it asks."""
    variables: dict[str, Any] = {}
    if wish.is_on is not None:
        variables = {name: wish.is_on for name in SWITCHES if _names(template, name)}
    if wish.effort is not None and _names(template, EFFORT):
        variables[EFFORT] = wish.effort
    return variables


def begun(
    text: str, wish: ThinkingWish, tags: ThinkingTags | None, template: str
) -> tuple[str, Thinking | None]:
    """The prompt with an empty thought where one is needed to turn thinking off, and how its
    outputs think; None where they do not.
    """
    is_switched = any(_names(template, name) for name in SWITCHES)
    if tags is None:
        if wish.is_on and wish.effort is None and not is_switched:
            raise ApiError(
                400, "this model does not think, so thinking cannot be turned on", param="reasoning"
            )
        return text, None
    is_open = text.rstrip().endswith(tags.open_tag)
    if wish.is_on is False:
        if is_open:
            text = f"{text.rstrip()}\n\n{tags.close_tag}\n\n"
        elif not is_switched and tags.open_tag in template:
            text = f"{text}{tags.open_tag}\n\n{tags.close_tag}\n\n"
        return text, Thinking(tags.open_tag, tags.close_tag)
    limit = wish.max_tokens
    if limit is None and wish.effort is not None and not _names(template, EFFORT):
        limit = EFFORT_TOKENS.get(wish.effort)
    return text, Thinking(tags.open_tag, tags.close_tag, is_open, limit)


def continued(text: str, wish: ThinkingWish, tags: ThinkingTags | None) -> Thinking | None:
    """How an output thinks that goes on from a message: only where that ends inside a thought."""
    if tags is None or text.rfind(tags.open_tag) <= text.rfind(tags.close_tag):
        return None
    return Thinking(tags.open_tag, tags.close_tag, is_open=True, max_tokens=wish.max_tokens)


def _names(template: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", template) is not None
