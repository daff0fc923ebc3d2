"""Answers of the server's API, read back with the types of OpenAI's own client."""

import base64
import json
from typing import Any

import numpy as np
import pytest
import torch
from api_outputs import (
    HELLO,
    asked_for,
    deltas_of,
    events_in,
    limits_of,
    output_of,
    rendered,
    reply_to,
    streamed,
)
from openai.types import Completion as TextCompletion
from openai.types import CompletionUsage, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.completion_usage import CompletionTokensDetails, PromptTokensDetails
from tiny_tokenizers import byte_level_metadata, demo

from ridgeline.data import Tokenizer
from ridgeline.engine import Completion, Delta, Grammar, Output
from ridgeline.engine.sampling.matching import Grammars, stuck_message
from ridgeline.errors import GrammarError
from ridgeline.server.protocol import ApiError, ParsedPrompt, answer_now, error_of, merged

TEXT = 'Say "née" 日本\u2028 👩‍👧\n\tand \\ done'
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},
]
CALLS = 'So:\n<tool_call>\n{"name": "add", "arguments": {"a": "é"}}\n</tool_call>\n' + (
    '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
)


def _reason_for(grammar: Grammar) -> str:
    """As the engine has it from where grammars are compiled."""
    with pytest.raises(GrammarError) as caught:
        Grammars(byte_level(), byte_level().vocab_size).compile(grammar).result()
    return str(caught.value)


def byte_level() -> Tokenizer:
    return Tokenizer.from_gguf(byte_level_metadata("smollm"))


BAD_GRAMMAR = _reason_for(Grammar.structural_tag({"type": "nothing"}))


def chat_chunks(stream: bytes) -> list[ChatCompletionChunk]:
    assert stream.endswith(b"data: [DONE]\n\n")
    return [ChatCompletionChunk.model_validate(event) for event in events_in(stream)]


def gathered(chunks: list[ChatCompletionChunk], index: int) -> dict[str, Any]:
    """A choice put together as clients do it."""
    made: dict[str, Any] = {"content": "", "calls": {}, "reasons": [], "logprobs": [], "role": None}
    for chunk in chunks:
        for choice in chunk.choices:
            if choice.index != index:
                continue
            assert not made["reasons"], "nothing follows the finish reason"
            made["role"] = made["role"] or choice.delta.role
            made["content"] += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                entry = made["calls"].setdefault(call.index, {"arguments": ""})
                if call.id:
                    entry |= {"id": call.id, "type": call.type}
                assert call.function is not None
                if call.function.name:
                    entry["name"] = call.function.name
                entry["arguments"] += call.function.arguments or ""
            if choice.logprobs is not None:
                made["logprobs"] += choice.logprobs.content or []
            if choice.finish_reason:
                made["reasons"].append(choice.finish_reason)
    return made


def whole_chat(texts: list[str], **fields: Any) -> ChatCompletion:
    reply, prompts = reply_to("chat", messages=HELLO, n=len(texts), **fields)
    _, output = deltas_of(prompts[0], texts)
    return ChatCompletion.model_validate(json.loads(reply.whole([output])))


def streamed_chat(
    texts: list[str], reason: Any = "stop", **fields: Any
) -> list[ChatCompletionChunk]:
    reply, prompts = reply_to("chat", messages=HELLO, n=len(texts), stream=True, **fields)
    deltas, output = deltas_of(prompts[0], texts, reason)
    return chat_chunks(streamed(reply, deltas, [output]))


def test_a_whole_chat() -> None:
    made = whole_chat([TEXT, "b"])
    assert (made.id, made.created, made.model) == ("chatcmpl-r1", 1_700_000_000, "demo")
    assert [choice.message.content for choice in made.choices] == [TEXT, "b"]
    assert [choice.finish_reason for choice in made.choices] == ["stop", "stop"]
    assert made.choices[0].message.tool_calls is None
    assert made.choices[0].logprobs is None
    assert made.usage is not None
    num = len(demo().encode(TEXT)) + 1 + 2  # with the stop tokens
    assert (made.usage.completion_tokens, made.usage.prompt_tokens) == (num, 31)
    assert made.usage.total_tokens == num + 31


def test_a_streamed_chat() -> None:
    chunks = streamed_chat([TEXT, "other words"])
    for index, text in enumerate([TEXT, "other words"]):
        made = gathered(chunks, index)
        assert (made["role"], made["content"], made["reasons"]) == ("assistant", text, ["stop"])
    assert {(chunk.id, chunk.created, chunk.model) for chunk in chunks} == {
        ("chatcmpl-r1", 1_700_000_000, "demo")
    }
    assert all(len(chunk.choices) == 1 for chunk in chunks)
    assert "usage" not in chunks[0].model_fields_set


def test_lines_end_only_where_events_do() -> None:
    """Some clients split at every character that Unicode calls a line end."""
    reply, prompts = reply_to("chat", messages=HELLO, stream=True)
    deltas, output = deltas_of(prompts[0], ["a\u2028b\u2029c\x85d\x0be\x1cf\r\ng"])
    stream = streamed(reply, deltas, [output]).decode()
    assert stream.splitlines() == stream.split("\n")[:-1]
    assert (
        gathered(chat_chunks(stream.encode()), 0)["content"]
        == "a\u2028b\u2029c\x85d\x0be\x1cf\r\ng"
    )


def test_usage_comes_last_where_it_is_asked_for() -> None:
    chunks = streamed_chat(["a b c"], stream_options={"include_usage": True})
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert all("usage" in chunk.model_fields_set for chunk in chunks)
    assert chunks[-1].choices == []
    assert chunks[-1].usage == CompletionUsage(
        completion_tokens=4,
        prompt_tokens=31,
        total_tokens=35,
        completion_tokens_details=CompletionTokensDetails(reasoning_tokens=0),
        prompt_tokens_details=PromptTokensDetails(cached_tokens=0),
    )


def test_an_output_that_was_cut() -> None:
    assert gathered(streamed_chat(["a b"], "length"), 0)["reasons"] == ["length"]


def test_merged_deltas_say_the_same() -> None:
    reply, prompts = reply_to("chat", messages=HELLO, stream=True, logprobs=True)
    deltas, output = deltas_of(prompts[0], [TEXT])
    one = deltas[0]
    for delta in deltas[1:]:
        one = merged(one, delta)
    made = gathered(chat_chunks(streamed(reply, [one], [output])), 0)
    assert (made["content"], made["reasons"]) == (TEXT, ["stop"])
    assert len(made["logprobs"]) == len(deltas)


def test_a_stream_whose_last_delta_was_lost_ends_all_the_same() -> None:
    reply, prompts = reply_to("chat", messages=HELLO, stream=True)
    deltas, output = deltas_of(prompts[0], ["a b c"])
    made = gathered(chat_chunks(streamed(reply, deltas[:-1], [output])), 0)
    assert made["reasons"] == ["stop"]


def test_logprobs_of_a_chat() -> None:
    made = whole_chat([TEXT], logprobs=True, top_logprobs=2)
    logprobs = made.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert made.usage is not None
    assert len(logprobs.content) == made.usage.completion_tokens
    text = b"".join(bytes(entry.bytes or []) for entry in logprobs.content[:-1]).decode()
    assert text == TEXT
    assert logprobs.content[-1].token == "<|im_end|>"
    assert logprobs.content[0].logprob == -0.25
    assert [top.logprob for top in logprobs.content[0].top_logprobs] == [-0.25, -9999.0]
    chunks = streamed_chat([TEXT], logprobs=True, top_logprobs=2)
    assert gathered(chunks, 0)["logprobs"] == logprobs.content
    assert whole_chat(["a"], logprobs=True).choices[0].logprobs.content[0].top_logprobs == []


def test_calls_of_a_chat() -> None:
    made = whole_chat([CALLS, "No call"], tools=TOOLS)
    message = made.choices[0].message
    assert message.tool_calls is not None
    assert message.content == "So:"
    assert made.choices[0].finish_reason == "tool_calls"
    calls = [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls]
    assert calls == [("call_r1-0-0", "add", '{"a": "é"}'), ("call_r1-0-1", "add", "{}")]
    assert made.choices[1].message.tool_calls is None
    assert made.choices[1].finish_reason == "stop"
    chunks = streamed_chat([CALLS, "No call"], tools=TOOLS)
    first = gathered(chunks, 0)
    assert (first["content"], first["reasons"]) == ("So:", ["tool_calls"])
    assert [
        (call["id"], call["name"], call["arguments"]) for call in first["calls"].values()
    ] == calls
    second = gathered(chunks, 1)
    assert (second["content"], second["calls"], second["reasons"]) == ("No call", {}, ["stop"])


def test_arguments_are_streamed_in_parts() -> None:
    chunks = streamed_chat([CALLS], tools=TOOLS)
    parts = [chunk for chunk in chunks for choice in chunk.choices if choice.delta.tool_calls]
    assert len(parts) > 6


def test_a_call_that_was_cut() -> None:
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 1'
    made = gathered(streamed_chat([text], "length", tools=TOOLS), 0)
    assert made["reasons"] == ["length"]
    assert made["calls"][0]["arguments"] == '{"a": 1'


def test_a_failed_stream_tells_why() -> None:
    reply, _ = reply_to("chat", messages=HELLO, stream=True)
    stream = reply.failed(ApiError(503, "the engine died", type="server_error", code="engine"))
    assert events_in(stream)[0]["error"]["message"] == "the engine died"
    assert stream.endswith(b"data: [DONE]\n\n")


# Completions.


def text_outputs(
    prompts: list[ParsedPrompt], texts: list[list[str]]
) -> tuple[list[Any], list[Output]]:
    pairs = [deltas_of(prompt, row) for prompt, row in zip(prompts, texts, strict=True)]
    deltas = [(delta, index) for index, (row, _) in enumerate(pairs) for delta in row]
    return deltas, [output for _, output in pairs]


def text_stream(reply: Any, deltas: list[tuple[Delta, int]], outputs: list[Output]) -> list[Any]:
    parts = [*reply.start(), *(reply.delta(*delta) for delta in deltas), *reply.finish(outputs)]
    stream = b"".join(parts)
    assert stream.endswith(b"data: [DONE]\n\n")
    for event in events_in(stream):  # in a chunk the reason may be null, which the type forbids
        for choice in event["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        TextCompletion.model_validate(event)
    return events_in(stream)


def test_prompts_and_samples_are_numbered() -> None:
    texts = [["a 1", "a 2"], ["b 1", TEXT]]
    reply, prompts = reply_to("completions", prompt=["a", "b"], n=2)
    _, outputs = text_outputs(prompts, texts)
    made = TextCompletion.model_validate(json.loads(reply.whole(outputs)))
    flat = [text for row in texts for text in row]
    assert [(choice.index, choice.text) for choice in made.choices] == list(enumerate(flat))
    assert made.usage is not None
    assert made.usage.prompt_tokens == 2
    options = {"stream": True, "stream_options": {"include_usage": True}}
    reply, prompts = reply_to("completions", prompt=["a", "b"], n=2, **options)
    deltas, outputs = text_outputs(prompts, texts)
    events = text_stream(reply, deltas, outputs)
    found = ["", "", "", ""]
    for event in events[:-1]:
        (choice,) = event["choices"]
        found[choice["index"]] += choice["text"]
        assert event["usage"] is None
    assert found == flat
    assert events[-1]["usage"] == made.usage.model_dump(exclude_none=True)


def test_logprobs_of_a_completion() -> None:
    reply, prompts = reply_to("completions", prompt="a", logprobs=2)
    _, outputs = text_outputs(prompts, [[TEXT]])
    answer = json.loads(reply.whole(outputs))
    TextCompletion.model_validate(answer)
    logprobs = answer["choices"][0]["logprobs"]
    num = answer["usage"]["completion_tokens"]
    assert {name: len(column) for name, column in logprobs.items()} == dict.fromkeys(
        ("tokens", "token_logprobs", "top_logprobs", "text_offset"), num
    )
    assert logprobs["token_logprobs"] == [-0.25] * num
    assert logprobs["text_offset"][-1] == len(TEXT)
    places = zip(logprobs["tokens"], logprobs["text_offset"], strict=True)
    for token, offset in list(places)[:-1]:
        assert TEXT[offset:].startswith(token) or "\ufffd" in token
    reply, prompts = reply_to("completions", prompt="a", logprobs=2, stream=True)
    deltas, outputs = text_outputs(prompts, [[TEXT]])
    columns: dict[str, list[Any]] = {name: [] for name in logprobs}
    for event in text_stream(reply, deltas, outputs):
        for name, column in event["choices"][0]["logprobs"].items():
            columns[name] += column
    assert columns == logprobs


def test_echo_repeats_the_prompt_with_its_logprobs() -> None:
    reply, prompts = reply_to("completions", prompt="The sky", echo=True, logprobs=0)
    assert prompts[0].sampling.prompt_logprobs == 0
    _, (output,) = text_outputs(prompts, [[" is blue"]])
    known = output.completions[0].logprobs
    assert known is not None
    before = (None, *(known[0]._replace(token=token) for token in prompts[0].ids[1:]))
    output = output_of(prompts[0], output.completions, prompt_logprobs=before)
    (choice,) = json.loads(reply.whole([output]))["choices"]
    assert choice["text"] == "The sky is blue"
    assert choice["logprobs"]["tokens"][:4] == ["The", " sky", " is", " blue"]
    assert choice["logprobs"]["token_logprobs"][:2] == [None, -0.25]
    assert choice["logprobs"]["top_logprobs"][:2] == [None, {" sky": -0.25}]
    assert choice["logprobs"]["text_offset"][:4] == [0, 3, 7, 10]


def test_echo_alone_makes_nothing() -> None:
    """What evaluation tools ask for: the log-probabilities of a text."""
    reply, prompts = reply_to("completions", prompt=[5, 6, 7], echo=True, max_tokens=0, logprobs=1)
    assert prompts[0].sampling.max_tokens == 1
    _, (output,) = text_outputs(prompts, [["x"]])
    known = output.completions[0].logprobs
    assert known is not None
    before = (None, known[0], known[0])
    output = output_of(prompts[0], output.completions, prompt_logprobs=before)
    answer = json.loads(reply.whole([output]))
    (choice,) = answer["choices"]
    assert choice["text"] == demo().decode([5, 6, 7])
    assert len(choice["logprobs"]["tokens"]) == 3
    assert (choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 0)
    reply, prompts = reply_to("completions", prompt="ab", echo=True, max_tokens=0, stream=True)
    deltas, outputs = text_outputs(prompts, [["x"]])
    events = text_stream(reply, deltas, outputs)
    assert "".join(event["choices"][0]["text"] for event in events) == "ab"
    assert events[-1]["choices"][0]["finish_reason"] == "length"


# Embeddings, tokens.


def test_embeddings_as_numbers_and_as_bytes() -> None:
    vectors = [torch.nn.functional.normalize(torch.randn(7), dim=0) for _ in range(2)]
    found = []
    for format in ("float", "base64"):
        reply, prompts = reply_to("embeddings", input=["a b", "c"], encoding_format=format)
        assert [prompt.pooling for prompt in prompts] == ["last", "last"]
        outputs = [
            output_of(prompt, embedding=vector)
            for prompt, vector in zip(prompts, vectors, strict=True)
        ]
        answer = json.loads(reply.whole(outputs))
        if format == "base64":
            for entry in answer["data"]:
                data = base64.b64decode(entry["embedding"])
                entry["embedding"] = np.frombuffer(data, dtype="<f4").tolist()
        made = CreateEmbeddingResponse.model_validate(answer)
        assert [entry.index for entry in made.data] == [0, 1]
        assert (made.usage.prompt_tokens, made.usage.total_tokens) == (3, 3)
        found.append([entry.embedding for entry in made.data])
    assert found[0] == found[1] == [vector.tolist() for vector in vectors]


def test_an_embedding_without_numbers() -> None:
    reply, prompts = reply_to("embeddings", input="a", pooling="mean")
    assert prompts[0].pooling == "mean"
    with pytest.raises(ApiError, match="not numbers") as caught:
        reply.whole([output_of(prompts[0], embedding=torch.tensor([1.0, float("nan")]))])
    assert caught.value.status == 503


def test_tokenize_and_back() -> None:
    asked = asked_for("tokenize", prompt="The sky<|im_end|>")
    answer = json.loads(answer_now(asked, demo(), limits_of(demo())))
    assert answer == {"tokens": demo().encode("The sky<|im_end|>"), "count": 3}
    back = json.loads(
        answer_now(asked_for("detokenize", tokens=answer["tokens"]), demo(), limits_of(demo()))
    )
    assert back == {"prompt": "The sky<|im_end|>"}
    skipped = asked_for("detokenize", tokens=answer["tokens"], skip_special_tokens=True)
    assert json.loads(answer_now(skipped, demo(), limits_of(demo()))) == {"prompt": "The sky"}
    chat = json.loads(answer_now(asked_for("tokenize", messages=HELLO), demo(), limits_of(demo())))
    (prompt,) = rendered(asked_for("chat", messages=HELLO))
    assert chat["tokens"] == list(prompt.ids)
    shorter = asked_for("tokenize", messages=HELLO, add_generation_prompt=False)
    assert json.loads(answer_now(shorter, demo(), limits_of(demo())))["count"] < chat["count"]


# Ends that are no answers.


@pytest.mark.parametrize(
    ("status", "reason", "expected"),
    [
        (
            "failed",
            "the json_schema cannot be followed: no text matches it",
            (400, "invalid_grammar"),
        ),
        ("failed", stuck_message(3), (400, "invalid_grammar")),
        ("failed", BAD_GRAMMAR, (400, "invalid_grammar")),
        ("failed", "the model's logits are not numbers (NaN)", (503, "engine_failed")),
        ("failed", "the engine died each time this request was running", (503, "engine_failed")),
        ("cancelled", "its deadline of 5.0 passed", (408, "deadline_exceeded")),
        ("cancelled", "cancelled", (503, "cancelled")),
        ("refused", "it needs 9 pages", (400, "context_length_exceeded")),
    ],
)
def test_why_there_is_no_answer(status: Any, reason: str, expected: tuple[int, str]) -> None:
    reply, prompts = reply_to("chat", messages=HELLO)
    output = output_of(prompts[0], (Completion("", (), None, None),), status, reason)
    error = error_of(output)
    assert error is not None
    assert (error.status, error.code) == expected
    with pytest.raises(ApiError) as caught:
        reply.whole([output])
    assert caught.value.message == error.message


def test_prompts_that_do_not_fit() -> None:
    with pytest.raises(ApiError, match="maximum context length") as caught:
        rendered(asked_for("completions", prompt="word " * 3000))
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    with pytest.raises(ApiError, match="maximum context length") as caught:
        rendered(asked_for("responses", input="word " * 100_000))
    assert (caught.value.param, caught.value.code) == ("input", "context_length_exceeded")
    assert "characters" in caught.value.message  # it was not split into tokens
    with pytest.raises(ApiError, match="no tokens"):
        rendered(asked_for("embeddings", input=["a", ""]))


def test_developers_and_parts_become_one_system_message() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [
        {"role": "developer", "content": "A"},
        {"role": "system", "content": "B"},
        {"role": "user", "content": parts},
    ]
    (prompt,) = rendered(asked_for("chat", messages=messages))
    text = demo().decode(prompt.ids, skip_special_tokens=False)
    assert "<|im_start|>system\nA\n\nB<|im_end|>" in text
    assert "<|im_start|>user\none\ntwo<|im_end|>" in text


def test_a_message_that_was_answered_can_be_sent_back() -> None:
    """With all the empty fields that OpenAI's client gives it."""
    message = whole_chat([CALLS], tools=TOOLS).choices[0].message.model_dump()
    (prompt,) = rendered(asked_for("chat", messages=[*HELLO, message]))
    text = demo().decode(prompt.ids, skip_special_tokens=False)
    assert '<tool_call>\n{"name": "add", "arguments": {"a": "é"}}\n</tool_call>' in text
