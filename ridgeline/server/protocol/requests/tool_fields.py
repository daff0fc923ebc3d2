"""Tools and response formats, as the chat and the responses routes have them.

Both routes say the same with slightly different objects; here each form becomes a `Tool`, a
`ToolChoice` and a `Grammar`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

from pydantic import Field, model_validator

from ridgeline.engine import Grammar
from ridgeline.engine.requests.schema_keywords import strict_message, unenforced
from ridgeline.errors import UsageError
from ridgeline.server.protocol.errors import ApiError
from ridgeline.server.protocol.requests.body import describe
from ridgeline.server.protocol.requests.fields import Body, CacheControl, Json, Name

ChoiceWord = Literal["none", "auto", "required"]


@dataclass(frozen=True)
class Tool:
    name: str
    description: str | None
    parameters: dict[str, Any]  # a JSON schema
    strict: bool

    def for_template(self) -> dict[str, Any]:
        """As chat templates want it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": {**function, "parameters": self.parameters}}


@dataclass(frozen=True)
class ToolChoice:
    """What the model may do with its tools; `name` is the one it must call."""

    word: ChoiceWord = "auto"
    name: str | None = None

    @property
    def is_forced(self) -> bool:
        return self.word == "required" or self.name is not None


NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


class FunctionObject(Body):
    name: Name
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None

    def tool(self) -> Tool:
        given = self.parameters
        parameters = NO_PARAMETERS if given is None else {"type": "object", **given}
        return Tool(self.name, self.description, parameters, bool(self.strict))


class ChatTool(Body):
    type: Literal["function"]
    function: FunctionObject
    cache_control: CacheControl | None = None

    def tool(self) -> Tool:
        return self.function.tool()


class FlatTool(FunctionObject):
    """A tool of the responses route."""

    type: Literal["function"]


class FunctionName(Body):
    name: str


class ChatNamedChoice(Body):
    type: Literal["function"]
    function: FunctionName

    def choice(self) -> ToolChoice:
        return ToolChoice("required", self.function.name)


class FlatNamedChoice(FunctionName):
    type: Literal["function"]

    def choice(self) -> ToolChoice:
        return ToolChoice("required", self.name)


class TextFormat(Body):
    type: Literal["text"]

    def grammar(self) -> Grammar | None:
        return None


class ObjectFormat(Body):
    type: Literal["json_object"]

    def grammar(self) -> Grammar | None:
        return Grammar.json_object()


class SchemaObject(Body):
    name: Name
    description: str | None = None
    schema_: Json = Field(alias="schema")
    strict: bool | None = Field(
        None,
        description="refuse a schema of which parts cannot be enforced; otherwise the header "
        "x-ridgeline-unenforced names them",
    )

    def grammar(self) -> Grammar | None:
        return Grammar.json_schema(self.schema_, strict=bool(self.strict))


class SchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: SchemaObject

    def grammar(self) -> Grammar | None:
        return self.json_schema.grammar()


class FlatSchemaFormat(SchemaObject):
    """A schema of the responses route."""

    type: Literal["json_schema"]


Pattern = Annotated[str, Field(min_length=1, max_length=100_000)]
ChoiceTexts = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    Field(min_length=1, max_length=1024, fail_fast=True),
]


class RegexFormat(Body):
    """Beyond OpenAI's API: the whole output matches a pattern."""

    type: Literal["regex"]
    pattern: Pattern | None = None
    regex: Pattern | None = Field(None, description="the same")

    @model_validator(mode="after")
    def _has_one(self) -> RegexFormat:
        if (self.pattern is None) == (self.regex is None):
            raise ValueError("needs one pattern; give it as pattern or as regex")
        return self

    def grammar(self) -> Grammar | None:
        return Grammar.regex(self.pattern or self.regex or "")


class ChoiceFormat(Body):
    """Beyond OpenAI's API: the output is one of these texts."""

    type: Literal["choice"]
    choices: ChoiceTexts

    def grammar(self) -> Grammar | None:
        return Grammar.choice(self.choices)


class RulesFormat(Body):
    """Beyond OpenAI's API: the output follows rules as llama.cpp writes them (GBNF)."""

    type: Literal["grammar"]
    grammar_: Pattern = Field(alias="grammar")

    def grammar(self) -> Grammar | None:
        return Grammar.ebnf(self.grammar_)


_Extensions = RegexFormat | ChoiceFormat | RulesFormat
ResponseFormat = Annotated[
    TextFormat | ObjectFormat | SchemaFormat | _Extensions, Field(discriminator="type")
]
FlatFormat = Annotated[
    TextFormat | ObjectFormat | FlatSchemaFormat | _Extensions, Field(discriminator="type")
]


def grammar_of(format: Any, param: str) -> Grammar | None:
    """What a response format asks for. Raises ApiError."""
    if format is None:
        return None
    try:
        grammar: Grammar | None = format.grammar()
    except UsageError as error:
        raise ApiError(400, f"{param}: {error}", param=param, code="invalid_value") from error
    return grammar


def tools_of(tools: Any) -> tuple[Tool, ...]:
    """Tools in one form. Raises ApiError where two have one name, or one takes no object."""
    listed = tuple(each.tool() for each in tools or ())
    for tool in listed:
        if tool.parameters["type"] != "object":
            kind = describe(tool.parameters["type"])
            raise ApiError(
                400, f"the parameters of {tool.name} have type {kind}; give 'object'", param="tools"
            )
        lapses = unenforced(tool.parameters) if tool.strict else []
        if lapses:
            message = f"the parameters of {tool.name}: {strict_message(lapses)}"
            raise ApiError(400, message, param="tools", code="invalid_value")
    names = [tool.name for tool in listed]
    for name in names:
        if names.count(name) > 1:
            raise ApiError(400, f"tools has {name!r} twice; give each its own name", param="tools")
    return listed


def choice_of(given: Any, tools: tuple[Tool, ...]) -> ToolChoice:
    """What `tool_choice` means for these tools. Raises ApiError."""
    choice: ToolChoice
    if given is None or isinstance(given, str):
        choice = ToolChoice(cast(ChoiceWord, given or "auto"))
    else:
        choice = given.choice()
    if choice.is_forced and not tools:
        raise ApiError(
            400, "tool_choice asks for a call and there are no tools", param="tool_choice"
        )
    if choice.name is not None and choice.name not in {tool.name for tool in tools}:
        raise ApiError(
            400,
            f"tool_choice names {choice.name[:64]!r}, which is not in tools",
            param="tool_choice",
        )
    return choice
