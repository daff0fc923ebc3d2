"""Chat templates: a list of messages becomes the text that a model was tuned on.

A template comes with the checkpoint and is untrusted code, so it runs in template_sandbox.py's
environment and gets only plain JSON values. It may call what transformers gives templates:
`raise_exception`, `strftime_now`, `tojson`, loop controls and the `generation` tag.

    text = render_chat(template, [{"role": "user", "content": "Hello"}], bos_token="<s>")
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser

from ridgeline.data.template_sandbox import (
    TemplateEnvironment,
    TemplateTooLargeError,
    render_bounded,
)
from ridgeline.errors import ConfigError, UsageError


class _Refusal(jinja2.TemplateError):
    """What a template raises with `raise_exception`."""


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks the model's words: here just its body."""

    tags = {"generation"}  # noqa: RUF012 - the name and type are jinja2's

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


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


def _environment() -> TemplateEnvironment:
    environment = TemplateEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


@lru_cache(maxsize=32)
def _compile(template: str) -> jinja2.Template:
    try:
        return _environment().from_string(template)
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
    if not messages:
        raise UsageError("the conversation is empty; give at least one message")
    compiled = _compile(template)
    values = _plain(
        {
            "documents": None,  # what transformers passes too
            **variables,
            "messages": list(messages),
            "tools": list(tools) if tools is not None else None,
            "add_generation_prompt": add_generation_prompt,
        }
    )
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
