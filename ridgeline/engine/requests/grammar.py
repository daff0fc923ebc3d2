"""Grammar: the form that an output must have, as a request asks for it.

Here it is a kind and a text, checked as far as that needs nobody's help; matching.py makes masks of
it. A grammar that only turns out to be wrong there fails its request and no other.

    Sampling(grammar=Grammar.json_schema({"type": "object", "properties": {...}}))
    Sampling(grammar=Grammar.choice(["yes", "no"]))
    Sampling(grammar=Grammar.regex(r"[0-9]{4}-[0-9]{2}-[0-9]{2}"))
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ridgeline.engine.requests.repetitions import check_repetitions, check_schema_repetitions
from ridgeline.engine.requests.schema_keywords import strict_message, unenforced
from ridgeline.errors import UsageError, near_matches

GrammarKind = Literal["json_schema", "json_object", "regex", "ebnf", "choice", "structural_tag"]

MAX_CHARACTERS = 1_000_000  # of a grammar's text


@dataclass(frozen=True)
class Grammar:
    kind: GrammarKind
    # JSON for a json_schema and a structural_tag, a JSON list for a choice, none for a json_object.
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            close = near_matches(str(self.kind), get_args(GrammarKind))
            kinds = ", ".join(get_args(GrammarKind))
            raise UsageError(f"a grammar's kind is {self.kind!r}; give one of {kinds}{close}")
        if not isinstance(self.text, str):
            kind = type(self.text).__name__
            raise UsageError(f"the text of a grammar is a {kind}; use Grammar.{self.kind}(…)")
        if len(self.text) > MAX_CHARACTERS:
            raise UsageError(
                f"the {self.kind} has {len(self.text)} characters; give at most {MAX_CHARACTERS}"
            )
        self._check_text()

    @classmethod
    def json_schema(
        cls, schema: Mapping[str, Any] | bool | str, *, strict: bool = False
    ) -> Grammar:
        """JSON that a schema allows. Properties come in the schema's order, and only those it names
        (where it names any), unless it allows others in so many words. What cannot be enforced
        (schema_keywords.py) is left out; with `strict` it is an error.
        """
        grammar = cls("json_schema", schema if isinstance(schema, str) else json.dumps(schema))
        if strict:
            lapses = unenforced(json.loads(grammar.text))
            if lapses:
                raise UsageError(strict_message(lapses))
        return grammar

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls("json_object")

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """The whole output matches the pattern."""
        return cls("regex", pattern)

    @classmethod
    def ebnf(cls, rules: str) -> Grammar:
        """Rules as llama.cpp writes them (GBNF); `root` is the one that is followed."""
        return cls("ebnf", rules)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """One of these texts."""
        if isinstance(texts, str):
            raise UsageError(f"choice is the text {texts!r}; give a list of texts")
        return cls("choice", json.dumps(list(texts), ensure_ascii=False))

    @classmethod
    def structural_tag(cls, format: Mapping[str, Any]) -> Grammar:
        """Text of which parts have a form of their own, as xgrammar's structural tags say it: calls
        of tools between free text, for one.
        """
        return cls("structural_tag", json.dumps({"type": "structural_tag", "format": format}))

    @property
    def choices(self) -> list[str]:
        assert self.kind == "choice", f"a {self.kind} has no choices"
        choices: list[str] = json.loads(self.text)
        return choices

    def _check_text(self) -> None:
        if self.kind == "json_object":
            if self.text:
                raise UsageError("a json_object has no text; for a schema use json_schema")
        elif not self.text:
            raise UsageError(f"the {self.kind} is empty; give one")
        if self.kind in ("json_schema", "choice", "structural_tag"):
            self._check_json()
        if self.kind in ("regex", "ebnf"):
            check_repetitions(self.kind, self.text)

    def _check_json(self) -> None:
        try:
            value = json.loads(self.text)
        except ValueError as error:
            raise UsageError(f"the {self.kind} is not JSON: {error}") from error
        if self.kind == "json_schema" and not isinstance(value, (dict, bool)):
            raise UsageError(f"the json_schema is {self.text[:60]}; expected a JSON object")
        if self.kind == "structural_tag" and not isinstance(value, dict):
            raise UsageError(f"the structural_tag is {self.text[:60]}; expected a JSON object")
        if self.kind in ("json_schema", "structural_tag"):
            check_schema_repetitions(value)
        if self.kind == "choice" and not _are_texts(value):
            raise UsageError(f"the choice is {self.text[:60]}; give a list of texts, none empty")


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(_is_text(entry) for entry in value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)
