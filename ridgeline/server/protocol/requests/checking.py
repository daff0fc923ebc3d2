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
# What is wanted, where pydantic's words are of its own things.
_WISHES = {
    "model_type": "it should be an object",
    "model_attributes_type": "it should be an object",
    "dict_type": "it should be an object",
    "list_type": "it should be a list",
}
_LENGTHS = {"too_short": "give at least {min_length}", "too_long": "give at most {max_length}"}
TYPE_ERRORS = ("_type", "_required", "literal_error")


def checked(
    kind: type[RequestBody], values: dict[str, Any], ignores_unknown: bool = False
) -> RequestBody:
    """The request, or an ApiError that names the field; of one that `ignores_unknown`, fields that
    nobody knows are left out.
    """
    given = {
        name: value
        for name, value in values.items()
        if value is not None or name not in kind.not_done
    }
    for name in given:
        if name in kind.not_done:
            raise _unsupported(name, f"{name} is not supported; {kind.not_done[name]}")
    try:
        return kind.model_validate(given, extra="ignore" if ignores_unknown else None)
    except ValidationError as error:
        details = error.errors(include_url=False)
        raise _told(details, given, kind) from None


def unknown_fields(request: Any, values: Any) -> list[str]:
    """Names of what a request has and its model does not, objects in it included."""
    if isinstance(request, list) and isinstance(values, list):
        pairs = enumerate(zip(request, values, strict=False))
        return [f"[{index}]{name}" for index, (one, own) in pairs for name in _below(one, own)]
    if not isinstance(request, Body) or not isinstance(values, dict):
        return []
    fields = {info.alias or name: name for name, info in type(request).model_fields.items()}
    known = {**fields, **dict.fromkeys(type(request).not_done, "")}
    names = [path_text([name]) for name in values if name not in known]
    for alias, name in fields.items():
        if alias in values:
            inner = unknown_fields(getattr(request, name), values[alias])
            names += [f"{alias}{part}" if part[0] == "[" else f"{alias}.{part}" for part in inner]
    return names


def _below(request: Any, values: Any) -> list[str]:
    return [name if name[0] == "[" else f".{name}" for name in unknown_fields(request, values)]


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
        case "union_tag_not_found":
            tag_name = str(detail["ctx"]["discriminator"]).strip("'")
            name = path_text([*path, tag_name])
            return ApiError(400, f"{name} is missing", param=name, code="missing_parameter")
    return _wrong_value(name, detail)


def _wrong_value(name: str, detail: ErrorDetails) -> ApiError:
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "value_error":  # a check of ours, which says all
        return ApiError(400, f"{name} {message}", param=name, code="invalid_value")
    wish = _WISHES.get(detail["type"])
    if detail["type"] in _LENGTHS:
        wish = _LENGTHS[detail["type"]].format(**detail.get("ctx", {}))
    elif wish is None:
        wish = message[:1].lower() + message[1:]
        wish = wish.replace("input should", "it should", 1).replace("False", "false")
    given = describe(detail["input"])
    return ApiError(400, f"{name} is {given}; {wish}", param=name, code="invalid_value")


def _path(detail: ErrorDetails, values: Any) -> list[str | int]:
    """The steps that are in the request: pydantic names the forms it tried in between."""
    names_field = detail["type"] in ("missing", "extra_forbidden")
    steps = _steps(detail["loc"], values, detail["type"] == "missing", names_field)
    return steps if steps is not None else _steps(detail["loc"], values, False, False) or []


def _steps(
    loc: tuple[str | int, ...], values: Any, is_missing: bool, takes_last: bool
) -> list[str | int] | None:
    """Those of `loc` that lead into the values. A form may be called as a field beside it is (a
    part of type `text` has a `text`): where the last step must be one, that tells them apart; None
    if it cannot be.
    """
    if not loc:
        return []
    step, rest = loc[0], loc[1:]
    is_key = isinstance(values, dict) and isinstance(step, str)
    is_index = isinstance(values, list) and isinstance(step, int) and step < len(values)
    if is_index or (is_key and (step in values or (is_missing and not rest))):
        inner = values[step] if is_index else values.get(step)
        steps = _steps(rest, inner, is_missing, takes_last)
        if steps is not None:
            return [step, *steps]
    if takes_last and not rest:
        return None
    return _steps(rest, values, is_missing, takes_last)
