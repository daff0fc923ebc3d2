"""Chat templates: a list of messages becomes the text that a model was tuned on.

A template comes with the checkpoint and is untrusted code, so it runs in template_sandbox.py's
environment and gets only plain JSON values. It may call what transformers gives templates:
`raise_exception`, `strftime_now`, `tojson`, loop controls and the `generation` tag.

    text = render_chat(template, [{"role": "user", "content": "Hello"}], bos_token="<s>")

For training, `render_for_training` also says which characters a template marks as the model's own
(between `generation` tags), and has the same date on every day.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node, Output, TemplateData
from jinja2.parser import Parser

from ridgeline.data.template_sandbox import (
    TemplateEnvironment,
    TemplateTooLargeError,
    render_bounded,
)
from ridgeline.errors import ConfigError, UsageError

# Unicode's noncharacters, which stand for nothing: around the body of a `generation` tag.
BEGIN_MARK, END_MARK = "\ufdd0", "\ufdd1"
# What `strftime_now` says in training: the tokens of a conversation must not depend on the day.
TRAINING_DATE = datetime(2025, 1, 1)
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@dataclass(frozen=True)
class TrainingText:
    """A conversation as its template writes it."""

    text: str
    generated: tuple[tuple[int, int], ...] | None  # begin and end of what is between `generation`
    # tags, in characters; None: the template has none


class _Refusal(jinja2.TemplateError):
    """What a template raises with `raise_exception`."""


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks the model's words: here just its body."""

    tags = {"generation"}  # noqa: RUF012 - the name and type are jinja2's

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _MarkedGenerationTag(_GenerationTag):
    """The same with a mark on each side of the body."""

    def parse(self, parser: Parser) -> list[Node]:
        body = super().parse(parser)
        begin, end = (Output([TemplateData(mark)]) for mark in (BEGIN_MARK, END_MARK))
        return [begin, *body, end]


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _training_date(form: str) -> str:
    return TRAINING_DATE.strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as the models saw it in training: no HTML escapes, characters as they are."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment(tag: type[_GenerationTag]) -> TemplateEnvironment:
    environment = TemplateEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[tag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


@lru_cache(maxsize=32)
def _compile(template: str, tag: type[_GenerationTag] = _GenerationTag) -> jinja2.Template:
    try:
        return _environment(tag).from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template is not valid Jinja: line {error.lineno}: {error.message}"
        ) from error
    except (RecursionError, MemoryError, SyntaxError) as error:
        raise ConfigError(f"the chat template cannot be compiled: {error}") from error


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    **variables: Any,
) -> str:
    """The text of a conversation; UsageError with the template's message where it rejects it."""
    values = _values(messages, tools, add_generation_prompt, variables)
    return _rendered(_compile(template), values)


def render_for_training(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    **variables: Any,
) -> TrainingText:
    """The text of a conversation on `TRAINING_DATE`, and what in it the template marks."""
    values = _values(messages, tools, add_generation_prompt, variables)
    values["strftime_now"] = _training_date
    if not _GENERATION.search(template):
        return TrainingText(_rendered(_compile(template), values), None)
    marked = _rendered(_compile(template, _MarkedGenerationTag), values)
    texts, spans, length = [], [], 0
    for part in marked.split(BEGIN_MARK):
        inside, mark, behind = part.partition(END_MARK)
        if mark:
            spans.append((length, length + len(inside)))
        texts += [inside, behind]
        length += len(inside) + len(behind)
    return TrainingText("".join(texts), tuple(spans))


def _values(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    variables: Mapping[str, Any],
) -> dict[str, Any]:
    """What a template gets."""
    if not messages:
        raise UsageError("the conversation is empty; give at least one message")
    values: dict[str, Any] = _plain(
        {
            "documents": None,  # what transformers passes too
            **variables,
            "messages": list(messages),
            "tools": list(tools) if tools is not None else None,
            "add_generation_prompt": add_generation_prompt,
        }
    )
    return values


def _rendered(compiled: jinja2.Template, values: Mapping[str, Any]) -> str:
    try:
        return render_bounded(compiled, values)
    except _Refusal as error:
        raise UsageError(f"the chat template rejects this conversation: {error.message}") from error
    except jinja2.exceptions.SecurityError as error:
        raise ConfigError(
            f"the chat template attempts an operation the sandbox forbids: {error}"
        ) from error
    except (TemplateTooLargeError, OverflowError, RecursionError, MemoryError) as error:
        raise ConfigError(f"the chat template was stopped: {error}") from error
    except Exception as error:  # a template can raise anything that an expression on its values can
        raise UsageError(
            f"the chat template fails on this conversation: {type(error).__name__}: {error}"
        ) from error


def _plain(value: Any) -> Any:
    """The value rebuilt from JSON types, so that a template cannot reach a caller's objects."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)
    raise UsageError(
        f"a message has a value of type {type(value).__name__};"
        " templates take text, numbers, lists and objects"
    )
