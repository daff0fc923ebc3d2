"""Chat templates: the text transformers renders, and an error where a template does harm."""

import time
from pathlib import Path
from typing import Any

import jinja2
import pytest
from tiny_tokenizers import byte_level_json, byte_level_metadata
from transformers import PreTrainedTokenizerFast

from ridgeline.data import Tokenizer, template_sandbox
from ridgeline.data.chat_template import render_chat
from ridgeline.errors import ConfigError, UsageError

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""

LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = "26 Jul 2024" %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{{- "Today Date: " + date_string + "\n\n" }}
{%- if tools is not none %}
    {{- "Respond with a call of one of these functions.\n\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}
"""

GEMMA = """\
{{ bos_token }}
{%- for message in messages if message.role != 'system' %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant') }}
    {%- endif %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' ~ role ~ '\n' ~ message['content'] | trim ~ '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}
"""

MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + message['content'] + ' [/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {%- generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}
    {%- else %}
        {%- continue %}
    {%- endif %}
{%- endfor %}
"""

PHI3 = """\
{% for message in messages %}
{% if message['role'] == 'system' %}
{{ '<|system|>\n' + message['content'] + '<|end|>\n' }}
{% else %}
{{ '<|%s|>\n%s<|end|>\n' % (message['role'], message['content']) }}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|assistant|>\n' }}
{% else %}
{{ eos_token }}
{% endif %}
"""

QWEN3 = """\
{%- macro thought(content) %}
    {{- content.split('</think>')[0].split('<think>')[-1].strip() }}
{%- endmacro %}
{%- set ns = namespace(last=messages | length - 1, seen=false) %}
{%- for message in messages[::-1] %}
    {%- if not ns.seen and message.role == "user" %}
        {%- set ns.seen = true %}{% set ns.last = messages | length - loop.index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' ~ message.role ~ '\n' }}
    {%- if message.role == 'assistant' and '</think>' in message.content %}
        {%- if loop.index0 > ns.last %}
            {{- '<think>\n' ~ thought(message.content) ~ '\n</think>\n' }}
        {%- endif %}
        {{- message.content.split('</think>')[-1].lstrip('\n') }}
    {%- else %}
        {{- message.content }}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""

STYLES = {
    "chatml": CHATML,
    "llama 3": LLAMA3,
    "gemma": GEMMA,
    "mistral": MISTRAL,
    "phi 3": PHI3,
    "qwen 3": QWEN3,
}
SPECIAL = {"bos_token": "<|im_start|>", "eos_token": "<|endoftext|>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "temperature",
            "description": "Wie warm <es> ist & mehr: été, 日本",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
        },
    }
]
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello  <b> & 'you' \"too\"\n"}],
    [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "日本 👩‍👧 été"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "<think>last</think>No."},
    ],
]
ONE = CONVERSATIONS[0]


@pytest.fixture(scope="module")
def peer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=byte_level_json(), **SPECIAL)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("options", [{}, {"tools": TOOLS}, {"enable_thinking": False}])
def test_the_text_and_ids_of_transformers(
    style: str, options: dict[str, Any], peer: PreTrainedTokenizerFast
) -> None:
    template = STYLES[style]
    metadata = byte_level_metadata(
        "gpt-2", **{"tokenizer.ggml.bos_token_id": 1, "tokenizer.chat_template": template}
    )
    tokenizer = Tokenizer.from_gguf(metadata)
    for messages in CONVERSATIONS:
        for prompt in (True, False):
            arguments = {"add_generation_prompt": prompt, **options}
            expected = peer.apply_chat_template(
                messages, chat_template=template, tokenize=False, **arguments
            )
            assert tokenizer.chat_text(messages, **arguments) == expected
            ids = peer.apply_chat_template(messages, chat_template=template, **arguments)
            assert tokenizer.chat(messages, **arguments) == ids["input_ids"]


def test_tool_calls_and_the_date() -> None:
    call = {"function": {"name": "temperature", "arguments": {"place": "Zürich"}}}
    messages = [*ONE, {"role": "assistant", "tool_calls": [call]}]
    text = render_chat(LLAMA3, messages, tools=TOOLS, date_string="1 May 2026", bos_token="<s>")
    assert text.startswith(
        "<s><|start_header_id|>system<|end_header_id|>\n\nToday Date: 1 May 2026"
    )
    assert '{"name": "temperature", "parameters": {"place": "Zürich"}}' in text
    year = render_chat("{{ strftime_now('%Y') }}", ONE)
    assert year == time.strftime("%Y")


def test_a_template_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    template, compiled = CHATML + " " * 100, []
    compile_one = jinja2.Environment.compile

    def noted(*args: Any, **options: Any) -> Any:
        compiled.append(args)
        return compile_one(*args, **options)

    monkeypatch.setattr(jinja2.Environment, "compile", noted)
    texts = {render_chat(template, ONE) for _ in range(20)}
    assert len(texts) == len(compiled) == 1


# What a template or a conversation can get wrong


def test_a_template_that_is_no_template() -> None:
    with pytest.raises(ConfigError, match="line 2"):
        render_chat("{{ messages }}\n{% if %}", ONE)


def test_a_template_that_refuses() -> None:
    with pytest.raises(UsageError, match="roles must alternate"):
        render_chat(GEMMA, [{"role": "assistant", "content": "x"}])


def test_a_conversation_that_does_not_fit() -> None:
    with pytest.raises(UsageError, match="fails on this conversation"):
        render_chat(CHATML, [{"role": "user", "content": None}])
    with pytest.raises(UsageError, match="empty"):
        render_chat(CHATML, [])
    with pytest.raises(UsageError, match="PosixPath"):
        render_chat(CHATML, [{"role": "user", "content": Path("x")}])


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
    ],
)
def test_a_template_that_reaches_out(template: str) -> None:
    with pytest.raises(ConfigError):
        render_chat(template, ONE)


@pytest.mark.parametrize(
    "template",
    ["{{ '{0.__class__}'.format(1) }}", "{{ '' | attr('__class__') }}", "{{ ''['__class__'] }}"],
)
def test_a_template_that_reaches_out_and_finds_nothing(template: str) -> None:
    try:
        text = render_chat(template, ONE)
    except ConfigError:
        return
    assert "class" not in text


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10**10 }}",
        "{{ 10**10 * 'a' }}",
        "{{ [1] * 10**10 }}",
        "{{ (9**9)**(9**9) }}",
        "{{ 'a'.ljust(10**10) }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{% for i in range(10**5) %}{{ 'a' * 10**4 }}{% endfor %}",
        "{% set n = namespace(s='a') %}"
        "{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% set n = namespace(s='a') %}"
        "{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "{% set n = namespace(s=3) %}{% for i in range(99) %}{% set n.s = n.s * n.s %}{% endfor %}",
        "{% for i in range(10**5) %}{% for j in range(10**5) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(99) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_would_take_everything(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.3)
    start = time.perf_counter()
    with pytest.raises(ConfigError, match="stopped"):
        render_chat(template, ONE)
    assert time.perf_counter() - start < 3


def test_large_numbers_in_a_conversation_are_not_refused() -> None:
    template = "{% macro f(x) %}{{ x + 1 }}{% endmacro %}{{ f(messages[0].limit) }}"
    assert render_chat(template, [{"role": "user", "limit": 2**40}]) == str(2**40 + 1)


def test_long_conversations_are_within_the_bounds() -> None:
    messages = [{"role": "user", "content": "word " * 20_000}] * 100  # 10 MB, two million tokens
    assert len(render_chat(QWEN3, messages)) > 10**7
    many = [{"role": "user", "content": "x"}] * 20_000
    assert render_chat(CHATML, many).count("<|im_end|>") == 20_000
