"""Tools: how calls are found in outputs, how tools reach a template, and what forces a call."""

import json
import random
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from api_outputs import HELLO, asked_for, output_of, rendered, reply_to
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import byte_level_metadata, demo

from ridgeline.data import Tokenizer
from ridgeline.engine import Completion, Grammar
from ridgeline.engine.sampling.matching import Grammars, Matcher
from ridgeline.errors import GrammarError, UsageError
from ridgeline.server.protocol import ApiError, ParsedPrompt
from ridgeline.server.protocol.replies.call_parser import (
    CallEnd,
    CallParser,
    CallPart,
    CallStart,
    Text,
)
from ridgeline.server.protocol.replies.call_scanner import CallScanner
from ridgeline.server.protocol.requests.asked import Calls, ToolFormat

NAMES = frozenset({"add", "get_time"})
Found = tuple[str, list[tuple[str, str]]]

HERMES = """\
{%- if tools %}<|im_start|>system
<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools> Use <tool_call>.<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>{{ call.function.name }} {{ call.function.arguments | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"""

LLAMA3 = """\
{%- for t in tools or [] %}{{ t | tojson }} as {"name": name, "parameters": object}
{% endfor %}
{%- for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>
{{ message.content }}{{ message.tool_calls }}{% endfor %}"""

ADD = {
    "name": "add",
    "description": "Adds.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/number"}, "b": {"enum": [3, 4]}},
        "required": ["a", "b"],
        "additionalProperties": False,
        "$defs": {"number": {"type": "integer", "minimum": 0, "maximum": 99}},
    },
}
TOOLS = [
    {"type": "function", "function": ADD},
    {"type": "function", "function": {"name": "get_time"}},
]
STRICT = [{"type": "function", "function": {**ADD, "strict": True}}, TOOLS[1]]


def found_in(pieces: list[str], format: ToolFormat, parallel: bool = True) -> Found:
    """Content and calls, gathered as a client would; the order of the events is checked."""
    parser = CallParser(Calls(format, NAMES, parallel))
    events = [event for piece in pieces for event in parser.push(piece)] + parser.finish()
    content, calls, is_open = "", [], False
    for event in events:
        match event:
            case Text(text):
                assert text
                assert not is_open
                content += text
            case CallStart(number, name):
                assert not is_open
                assert number == len(calls)
                calls.append([name, ""])
                is_open = True
            case CallPart(number, arguments):
                assert is_open
                assert number == len(calls) - 1
                calls[-1][1] += arguments
            case CallEnd(number):
                assert is_open
                assert number == len(calls) - 1
                is_open = False
    assert not is_open
    assert parser.num_calls == len(calls)
    return content, [(name, arguments) for name, arguments in calls]


ONE = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "}"]}}\n</tool_call>'
ARGUMENTS = '{"a": 1, "b": [2, "}"]}'
HERMES_CASES: list[tuple[str, Found]] = [
    ("Hello there", ("Hello there", [])),
    (" \n Hello \n ", (" \n Hello \n ", [])),
    ("", ("", [])),
    (ONE, ("", [("add", ARGUMENTS)])),
    ("Let me see.\n" + ONE, ("Let me see.", [("add", ARGUMENTS)])),
    (ONE + "\n" + ONE, ("", [("add", ARGUMENTS)] * 2)),
    (ONE + "\n\n and text \n", ("\n\n and text", [("add", ARGUMENTS)])),
    (ONE.removesuffix("\n</tool_call>"), ("", [("add", ARGUMENTS)])),
    # An output that ends in the middle.
    ('<tool_call>\n{"name": "add", "arguments": {"a": 1', ("", [("add", '{"a": 1')])),
    ('<tool_call>\n{"name": "add", "argum', ('<tool_call>\n{"name": "add", "argum', [])),
    ("a < b <tool_ca", ("a < b <tool_ca", [])),
    # Other ways to write one.
    (
        '<tool_call>{"arguments":{"a":1},"id":"x","name":"add"}</tool_call>',
        ("", [("add", '{"a":1}')]),
    ),
    (
        '<tool_call>{"name":"add","parameters":"{\\"a\\": 1}"}</tool_call>',
        ("", [("add", '{"a": 1}')]),
    ),
    ('<tool_call>{"name":"get_time"}</tool_call>', ("", [("get_time", "{}")])),
    ('<tool_call>{"name":"get_time","arguments":null}</tool_call>', ("", [("get_time", "{}")])),
    ('<tool_call>{"name":"get_\\u0074ime"}</tool_call>', ("", [("get_time", "{}")])),
    ('<tool_call>{"n": 12.5, "name":"add", "arguments": {}, "z": true }</tool_call>',
     ("", [("add", "{}")])),
    # What is no call stays as it is.
    ('<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
     ('<tool_call>{"name": "rm", "arguments": {}}</tool_call>', [])),
    ("So: \n<tool_call>add</tool_call>", ("So: \n<tool_call>add</tool_call>", [])),
    ("<tool_call>add(1)</tool_call>", ("<tool_call>add(1)</tool_call>", [])),
    ('<tool_call>{"arguments": {}}</tool_call>', ('<tool_call>{"arguments": {}}</tool_call>', [])),
    ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
     ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', [])),
    ('<tool_call>{"name" "add"}</tool_call>', ('<tool_call>{"name" "add"}</tool_call>', [])),
    ('{"name": "add", "arguments": {}}', ('{"name": "add", "arguments": {}}', [])),
    ('<tool_call>{}</tool_call>' + ONE, ("<tool_call>{}</tool_call>", [("add", ARGUMENTS)])),
]  # fmt: skip
LLAMA_CASES: list[tuple[str, Found]] = [
    ("Hello there", ("Hello there", [])),
    (" \n", (" \n", [])),
    ('{"name": "add", "parameters": {"a": 1}}', ("", [("add", '{"a": 1}')])),
    ('<|python_tag|>{"name": "add", "parameters": {"a": 1}}', ("", [("add", '{"a": 1}')])),
    ("<|python_tag|>print(1)", ("<|python_tag|>print(1)", [])),
    (
        ' {"name": "add", "parameters": {}}; {"name": "get_time"}\n',
        ("", [("add", "{}"), ("get_time", "{}")]),
    ),
    ('{"name": "add", "parameters": {}} and more', ("and more", [("add", "{}")])),
    ('{"answer": 42}', ('{"answer": 42}', [])),
    ('{"name": "Ann", "age": 3}', ('{"name": "Ann", "age": 3}', [])),
    ('Text {"name": "add", "parameters": {}}', ('Text {"name": "add", "parameters": {}}', [])),
]
CASES = [("hermes", *case) for case in HERMES_CASES] + [("llama3", *case) for case in LLAMA_CASES]


@pytest.mark.parametrize(("format", "text", "expected"), CASES)
def test_calls_are_found(format: ToolFormat, text: str, expected: Found) -> None:
    assert found_in([text], format) == expected


@pytest.mark.parametrize(("format", "text", "expected"), CASES)
def test_calls_are_found_letter_by_letter(format: ToolFormat, text: str, expected: Found) -> None:
    assert found_in(list(text), format) == expected


@settings(max_examples=250, deadline=None)
@given(
    parts=st.lists(
        st.sampled_from([case[1] for case in CASES]) | st.text('<tol_ca>{}"n: \n;', max_size=12),
        max_size=4,
    ),
    cuts=st.lists(st.integers(0, 200), max_size=12),
    format=st.sampled_from(["hermes", "llama3"]),
    parallel=st.booleans(),
)
def test_how_text_is_cut_changes_nothing(
    parts: list[str], cuts: list[int], format: ToolFormat, parallel: bool
) -> None:
    text = "".join(parts)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end] for start, end in pairwise(places)]
    whole = found_in([text], format, parallel)
    assert found_in(pieces, format, parallel) == whole
    if not whole[1]:
        assert whole[0] == text  # nothing is lost where there is no call
    assert parallel or len(whole[1]) <= 1


def test_one_call_where_one_is_wanted() -> None:
    assert found_in([ONE + "\n" + ONE + "text"], "hermes", parallel=False) == (
        "",
        [("add", ARGUMENTS)],
    )


def test_arguments_go_out_while_they_are_written() -> None:
    scanner = CallScanner(NAMES)
    assert scanner.push('{"name": "add", "argum') == ""
    assert scanner.name is None
    assert scanner.push('ents": {"a": "x') == '{"a": "x'
    assert scanner.name == "add"
    assert scanner.push('}", "b": {}') == '}", "b": {}'
    assert scanner.push("} }rest") == "}"
    assert (scanner.phase, scanner.rest) == ("done", "rest")


# How tools reach a template.


@cache
def tokenizer_with(template: str) -> Tokenizer:
    return Tokenizer.from_gguf(
        byte_level_metadata("smollm", **{"tokenizer.chat_template": template})
    )


def text_of(tokenizer: Tokenizer, **fields: Any) -> str:
    fields = {"messages": HELLO, **fields}
    (prompt,) = rendered(asked_for("chat", tokenizer, **fields), tokenizer)
    return tokenizer.decode(prompt.ids, skip_special_tokens=False)


CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    ],
}
ANSWER = {"role": "tool", "tool_call_id": "c1", "content": "It is 4."}


def test_a_template_gets_tools_and_calls_as_objects() -> None:
    text = text_of(tokenizer_with(HERMES), tools=TOOLS, messages=[*HELLO, CALL, ANSWER])
    assert '"name": "get_time", "parameters": {"type": "object", "properties": {}}' in text
    assert '<tool_call>add {"a": 1}</tool_call>' in text
    assert "<|im_start|>tool\nIt is 4." in text


def test_a_template_without_tools_gets_them_as_text() -> None:
    text = text_of(demo(), tools=TOOLS, messages=[*HELLO, CALL, ANSWER])
    assert text.count("<|im_start|>system") == 1
    assert '"description": "Adds."' in text
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>' in text
    assert "<|im_start|>user\n<tool_response>\nIt is 4.\n</tool_response>" in text
    with_system = [{"role": "system", "content": "Be brief."}, *HELLO]
    text = text_of(demo(), tools=TOOLS, messages=with_system)
    assert "Be brief.\n\nYou can call" in text


def test_no_tools_with_tool_choice_none() -> None:
    assert text_of(demo(), tools=TOOLS, tool_choice="none") == text_of(demo())
    (prompt,) = rendered(asked_for("chat", messages=HELLO, tools=TOOLS, tool_choice="none"))
    assert prompt.calls is None


def test_the_template_decides_the_form() -> None:
    for template, format in ((HERMES, "hermes"), (LLAMA3, "llama3"), ("{{messages}}", "hermes")):
        tokenizer = tokenizer_with(template)
        (prompt,) = rendered(asked_for("chat", messages=HELLO, tools=TOOLS), tokenizer)
        assert prompt.calls is not None
        assert prompt.calls.format == format
        assert prompt.sampling.grammar is None


@pytest.mark.parametrize(
    "template",
    [
        "{{ tools }}[TOOL_CALLS]{{ messages }}",
        "{{ tools }}<tool_call><function=f>{{ messages }}",
    ],
)
def test_other_forms_are_refused(template: str) -> None:
    with pytest.raises(ApiError, match="tools are not supported for this model") as caught:
        rendered(asked_for("chat", messages=HELLO, tools=TOOLS), tokenizer_with(template))
    assert (caught.value.status, caught.value.param) == (400, "tools")


def test_variables_reach_the_template() -> None:
    tokenizer = tokenizer_with(HERMES)
    text = text_of(tokenizer, chat_template_kwargs={"enable_thinking": False})
    assert text.endswith("<think></think>")


@pytest.mark.parametrize("arguments", ["[1]", "{", '{"a": 1e999}', "[" * 500])
def test_arguments_that_are_no_object(arguments: str) -> None:
    function = {"name": "add", "arguments": arguments}
    call = {**CALL, "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    with pytest.raises(ApiError) as caught:
        asked_for("chat", messages=[*HELLO, call])
    assert caught.value.param == "messages[1].tool_calls[0].function.arguments"


# What a grammar holds calls to.


def matcher_of(prompt: ParsedPrompt, tokenizer: Tokenizer) -> Matcher:
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    assert prompt.sampling.grammar is not None
    compiled = grammars.compile(prompt.sampling.grammar).result()
    return grammars.matcher(compiled, prompt.sampling, tokenizer.eos_ids)


def written(prompt: ParsedPrompt, tokenizer: Tokenizer, seed: int) -> str:
    """What a model without any sense would write."""
    matcher, draw, tokens = matcher_of(prompt, tokenizer), random.Random(seed), []
    while not matcher.is_complete:
        bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
        tokens.append(int(draw.choice(np.flatnonzero(bits))))
        matcher.accept(tokens[-1])
        assert len(tokens) < 2000
    return tokenizer.decode(tokens)


def messages_of(format: ToolFormat, **fields: Any) -> list[dict[str, Any]]:
    """The answers to a request whose calls are forced."""
    tokenizer = tokenizer_with(HERMES if format == "hermes" else LLAMA3)
    found = []
    for seed in range(12):
        reply, (prompt,) = reply_to("chat", tokenizer, messages=HELLO, tools=TOOLS, **fields)
        text = written(prompt, tokenizer, seed)
        output = output_of(prompt, (Completion(text, (), "stop", None),))
        (choice,) = json.loads(reply.whole([output]))["choices"]
        assert choice["finish_reason"] == "tool_calls", text
        assert choice["message"]["content"] is None
        found.append(choice["message"])
    return found


@pytest.fixture
def _little_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ridgeline.server.protocol.tools.MAX_WHITESPACE", 1)


@pytest.mark.usefixtures("_little_space")
@pytest.mark.parametrize("format", ["hermes", "llama3"])
def test_a_named_tool_is_called_once_by_its_schema(format: ToolFormat) -> None:
    named = {"type": "function", "function": {"name": "add"}}
    for message in messages_of(format, tool_choice=named):
        (call,) = message["tool_calls"]
        values = json.loads(call["function"]["arguments"])
        assert call["function"]["name"] == "add"
        assert list(values) == ["a", "b"]
        assert 0 <= values["a"] <= 99
        assert values["b"] in (3, 4)


@pytest.mark.usefixtures("_little_space")
@pytest.mark.parametrize("format", ["hermes", "llama3"])
def test_some_tool_is_called_where_one_is_required(format: ToolFormat) -> None:
    names, counts = set(), set()
    for message in messages_of(format, tool_choice="required"):
        calls = [call["function"] for call in message["tool_calls"]]
        names |= {call["name"] for call in calls}
        counts.add(len(calls))
        assert all(isinstance(json.loads(call["arguments"]), dict) for call in calls)
    assert names == {"add", "get_time"}
    assert min(counts) == 1
    assert max(counts) > 1
    one = messages_of(format, tool_choice="required", parallel_tool_calls=False)
    assert all(len(message["tool_calls"]) == 1 for message in one)


def accepts(prompt: ParsedPrompt, text: str) -> bool:
    """Whether an output may be this text, token by token, and end there."""
    tokenizer = tokenizer_with(HERMES)
    matcher, end = matcher_of(prompt, tokenizer), tokenizer.eos_ids[0]
    try:
        for token in (*tokenizer.encode(text, add_special_tokens=False), end):
            if matcher.is_complete:
                return token == end
            matcher.accept(token)
    except GrammarError:
        return False
    return True


def prompt_of(format: ToolFormat, **fields: Any) -> ParsedPrompt:
    tokenizer = tokenizer_with(HERMES if format == "hermes" else LLAMA3)
    (prompt,) = rendered(asked_for("chat", messages=HELLO, **fields), tokenizer)
    return prompt


RIGHT = '<tool_call>\n{"name": "add", "arguments": {"a": 7, "b": 3}}\n</tool_call>'
LLAMA_RIGHT = '{"name": "add", "parameters": {"a": 7, "b": 3}}'


def test_strict_tools_keep_to_their_schemas_where_calls_are_free() -> None:
    prompt = prompt_of("hermes", tools=STRICT)
    assert accepts(prompt, "Just words, no call.")
    assert accepts(prompt, f"First:\n{RIGHT}\n{RIGHT}")
    assert not accepts(prompt, RIGHT.replace("7", "100"))
    assert not accepts(prompt, RIGHT.replace("add", "sub"))
    assert accepts(prompt, RIGHT.replace("add", "get_time"))  # which is not strict
    prompt = prompt_of("llama3", tools=STRICT)
    assert accepts(prompt, "Just words.")
    assert accepts(prompt, LLAMA_RIGHT)
    assert not accepts(prompt, LLAMA_RIGHT.replace("7", '"7"'))


def test_an_answer_of_a_form_or_a_call() -> None:
    format = {"type": "json_schema", "json_schema": {"name": "n", "schema": ADD["parameters"]}}
    prompt = prompt_of("hermes", tools=TOOLS, response_format=format)
    assert accepts(prompt, '{"a": 7, "b": 3}')
    assert accepts(prompt, RIGHT)
    assert not accepts(prompt, "Just words.")
    choice = {"type": "choice", "choices": ["yes", "no"]}
    prompt = prompt_of("hermes", tools=TOOLS, response_format=choice)
    assert accepts(prompt, "no")
    assert accepts(prompt, f"{RIGHT}\n{RIGHT}")
    assert not accepts(prompt, "maybe")


def test_a_structural_tag_is_an_object() -> None:
    with pytest.raises(UsageError, match="expected a JSON object"):
        Grammar("structural_tag", "[]")
    with pytest.raises(UsageError, match="not JSON"):
        Grammar("structural_tag", "{")


def test_several_calls_only_where_they_are_allowed() -> None:
    fields = {"tools": TOOLS, "tool_choice": "required"}
    assert accepts(prompt_of("hermes", **fields), f"{RIGHT}\n{RIGHT}")
    one = prompt_of("hermes", **fields, parallel_tool_calls=False)
    assert accepts(one, RIGHT)
    assert not accepts(one, f"{RIGHT}\n{RIGHT}")
    (prompt,) = rendered(asked_for("chat", messages=HELLO, tools=TOOLS, parallel_tool_calls=False))
    assert prompt.sampling.stop == ("</tool_call>",)
