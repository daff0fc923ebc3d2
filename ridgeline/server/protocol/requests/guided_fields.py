"""The form of an output in vLLM's words: `guided_…` and `structured_outputs`, beside OpenAI's
`response_format`. One of them may be given.

    form_of(request)        # OutputForm("guided_regex", …), whose grammar() is what is followed
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from ridgeline.engine import Grammar
from ridgeline.server.protocol.errors import ApiError
from ridgeline.server.protocol.requests.fields import Body, Json
from ridgeline.server.protocol.requests.tool_fields import ChoiceTexts, Pattern

Schema = Json | bool | Annotated[str, Field(min_length=1)]  # a text holds the JSON of one


class OutputForm(NamedTuple):
    """What a request asks of its output's form, and the field that says so."""

    param: str
    make: Callable[[], Grammar | None]

    def grammar(self) -> Grammar | None:
        return self.make()


class StructuredOutputs(Body):
    json_: Schema | None = Field(None, alias="json")
    regex: Pattern | None = None
    choice: ChoiceTexts | None = None
    grammar: Pattern | None = None
    json_object: bool | None = None
    disable_fallback: bool | None = None  # there is one way to follow a grammar here


class GuidedFields(Body):
    guided_json: Schema | None = Field(None, description="a JSON schema")
    guided_regex: Pattern | None = None
    guided_choice: ChoiceTexts | None = None
    guided_grammar: Pattern | None = Field(None, description="rules as llama.cpp writes them")
    guided_decoding_backend: str | None = Field(None, description="no effect: there is one")
    structured_outputs: StructuredOutputs | None = None


def form_of(request: Any, format_name: str, format: Any) -> OutputForm | None:
    """The form that is asked for, if any; ApiError where several are. `format` is the value of the
    field in which OpenAI's API has it.
    """
    forms = _guided(request, "guided_")
    if format is not None:
        forms.append(OutputForm(format_name, format.grammar))
    options = request.structured_outputs
    if options is not None:
        values = {
            "json": options.json_,
            **options.model_dump(include={"regex", "choice", "grammar"}),
        }
        forms += [
            OutputForm(f"structured_outputs.{name}", _maker(name, value))
            for name, value in values.items()
            if value is not None
        ]
        if options.json_object:
            forms.append(OutputForm("structured_outputs.json_object", Grammar.json_object))
    if len(forms) > 1:
        names = " and ".join(form.param for form in forms[:2])
        raise ApiError(
            400,
            f"{names} both say how the output looks; give one of them",
            param=forms[1].param,
            code="invalid_value",
        )
    return forms[0] if forms else None


def _guided(request: Any, prefix: str) -> list[OutputForm]:
    names = ("json", "regex", "choice", "grammar")
    given = {name: getattr(request, prefix + name) for name in names}
    return [
        OutputForm(prefix + name, _maker(name, value))
        for name, value in given.items()
        if value is not None
    ]


def _maker(name: str, value: Any) -> Callable[[], Grammar | None]:
    makers: dict[str, Callable[[Any], Grammar]] = {
        "json": Grammar.json_schema,
        "regex": Grammar.regex,
        "choice": Grammar.choice,
        "grammar": Grammar.ebnf,
    }
    return lambda: makers[name](value)
