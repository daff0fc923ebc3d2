"""JSON values become checked requests: what pydantic finds wrong is told as one error by its field.

A field that a request may not have is refused by name. Fields of OpenAI's API that are not done
here are known, so that null passes for them and the error can say what to use instead.

    request = checked(ChatRequest, {"model": "demo", "messages": [...]})
"""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ridgeline.errors import near_matches
from ridgeline.server.protocol.errors import ApiError
from ridgeline.server.protocol.requests.body import describe, path_text
from ridgeline.server.protocol.requests.fields import Body

RequestBody = TypeVar("RequestBody", bound=Body)
TYPE_ERRORS = ("_type", "_required", "literal_error")


def checked(kind: type[RequestBody], values: dict[str, Any]) -> RequestBody:
    """The request, or an ApiError that names the field."""
    given = {
        name: value
        for name, value in values.items()
        if value is not None or name not in kind.not_done
    }
    for name in given:
        if name in kind.not_done:
            raise _unsupported(name, f"{name} is not supported; {kind.not_done[name]}")
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        details = error.errors(include_url=False)
        raise _told(details, given, kind) from None


def _unsupported(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="unsupported_parameter")


def _told(details: list[ErrorDetails], given: dict[str, Any], kind: type[Body]) -> ApiError:
    """Of all errors the most telling: a `type` that is not known, something other than a wrong
    type, the one deepest in the request. Where one of several forms was meant, the others fail
    earlier.
    """
    paths = [_path(detail, given) for detail in details]

    def weight(number: int) -> tuple[bool, bool, int, int]:
        kind, path = details[number]["type"], paths[number]
        is_tag = kind == "literal_error" and path[-1:] == ["type"]
        return is_tag, not kind.endswith(TYPE_ERRORS), len(path), -number

    index = max(range(len(details)), key=weight)
    detail, path = details[index], paths[index]
    name = path_text(path) or "the body"
    match detail["type"]:
        case "missing":
            return ApiError(400, f"{name} is missing", param=name, code="missing_parameter")
        case "extra_forbidden":
            close = near_matches(str(path[-1])[:64], kind.model_fields) if len(path) == 1 else ""
            return _unsupported(name, f"{name} is not supported here{close}")
        case "union_tag_invalid":
            tag, tags = detail["ctx"]["tag"], detail["ctx"]["expected_tags"]
            tag_name = str(detail["ctx"]["discriminator"]).strip("'")
            tag_name = "type" if "(" in tag_name else tag_name
            message = f"{name} has the {tag_name} {describe(tag)}; it may have {tags}"
            return ApiError(400, message, param=name, code="unsupported_value")
    return _wrong_value(name, detail)


def _wrong_value(name: str, detail: ErrorDetails) -> ApiError:
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "value_error":  # a check of ours, which says all
        return ApiError(400, f"{name} {message}", param=name, code="invalid_value")
    wish = message[:1].lower() + message[1:]
    wish = wish.replace("input should", "it should", 1).replace("False", "false")
    given = describe(detail["input"])
    return ApiError(400, f"{name} is {given}; {wish}", param=name, code="invalid_value")


def _path(detail: ErrorDetails, values: Any) -> list[str | int]:
    """The steps that are in the request: pydantic names the forms it tried in between."""
    path: list[str | int] = []
    for number, step in enumerate(detail["loc"]):
        is_missing = detail["type"] == "missing" and number == len(detail["loc"]) - 1
        if isinstance(values, dict) and isinstance(step, str) and (step in values or is_missing):
            path.append(step)
            values = values.get(step)
        elif isinstance(values, list) and isinstance(step, int) and step < len(values):
            path.append(step)
            values = values[step]
    return path
