"""Cases for the fields of each route; those of the objects inside requests, and of what only one
kind of route has, are in other files field_cases_*.py. See tests/cpu/test_every_field.py.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from field_audit import DOCS, OPENAI, SEATS, TEXT, Api, case
from field_cases_objects import TOOL, flat
from tiny_tokenizers import no_blanks, no_end

RANDOM = {"temperature": 2.0, "seed": 11}
QUESTIONS = {"completions": "prompt"}  # what holds the question
QUESTIONS |= dict.fromkeys(("chat", "messages", "count_tokens"), "messages")
LIMITS = {"responses": "max_output_tokens"}  # what else limits the output


def no_effect(owners: tuple[str, ...], field: str, value: Any, wrong: Any = None) -> None:
    """A field that passes and changes nothing, as the docs say; `wrong` is a value that would mean
    something, and is refused.
    """

    @case(owners, field)
    def _(api: Api, owner: str) -> None:
        plain, given = api.ask(owner), api.ask(owner, **{field: value})
        if owner == "count_tokens":
            assert given.json == plain.json
        elif owner in TEXT:
            assert given.texts == plain.texts
        else:
            assert given.json["data"] == plain.json["data"]
        assert f"`{field}" in DOCS.read_text(), f"docs/serve.md does not name {field}"
        if wrong is not None:
            api.refused(owner, field, **{field: wrong})


BOTH = ("chat", "responses")
no_effect(("chat", "completions", "embeddings"), "user", "somebody")
no_effect(BOTH, "store", False, wrong=True)
no_effect(("chat",), "metadata", {"key": "value"})
no_effect(BOTH, "service_tier", "auto", wrong="flex")
no_effect(BOTH, "prompt_cache_key", "mine")
no_effect(BOTH, "prompt_cache_retention", "in_memory", wrong="24h")
no_effect(BOTH, "safety_identifier", "somebody")
no_effect(("chat",), "modalities", ["text"], wrong=["audio"])
no_effect(("chat",), "verbosity", "medium", wrong="high")
no_effect(("responses",), "background", False, wrong=True)
no_effect(("responses",), "truncation", "disabled", wrong="auto")
no_effect(("messages",), "metadata", {"user_id": "somebody"})
no_effect(("messages",), "service_tier", "auto", wrong="priority")
no_effect(("messages", "count_tokens"), "speed", "standard", wrong="fast")
no_effect(("messages", "count_tokens"), "cache_control", {"type": "ephemeral"})
no_effect(OPENAI, "guided_decoding_backend", "xgrammar")


@case(("responses",), "metadata", "user")
def _(api: Api, owner: str) -> None:
    answer = api.ask(owner, metadata={"key": "value"}, user="somebody").json
    assert (answer["metadata"], answer["user"]) == ({"key": "value"}, "somebody")


@case((*TEXT, "count_tokens", "embeddings", "tokenize", "detokenize"), "model")
def _(api: Api, owner: str) -> None:
    answer = api.ask(owner, model="another")
    assert answer.status == 404
    assert "model 'another'" in answer.error["message"]


# How tokens are chosen.


@case(TEXT, "temperature")
def _(api: Api, owner: str) -> None:
    greedy = api.ask(owner, temperature=0, seed=1).text
    assert greedy == api.ask(owner, temperature=0, seed=2).text
    assert greedy != api.ask(owner, temperature=2, seed=1).text
    assert greedy != api.ask(owner, temperature=None, seed=1).text  # 1, as OpenAI has it


@case(TEXT, "seed")
def _(api: Api, owner: str) -> None:
    drawn = [api.ask(owner, temperature=2, seed=seed).text for seed in (7, 7, 8)]
    assert drawn[0] == drawn[1] != drawn[2]


@case(TEXT, "top_p", "top_k", "min_p")
def _(api: Api, owner: str) -> None:
    greedy = api.ask(owner).text
    assert greedy != api.ask(owner, **RANDOM).text
    for strict in ({"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1.0}):
        assert greedy == api.ask(owner, **RANDOM, **strict).text
    for open_ in ({"top_p": 1.0}, {"top_k": 0}, {"min_p": 0.0}):
        assert greedy != api.ask(owner, **RANDOM, **open_).text


@case(TEXT, "presence_penalty", "frequency_penalty", "repetition_penalty")
def _(api: Api, owner: str) -> None:
    """Of twenty tokens that have a chance, more are in outputs where repeating costs more."""
    limit = {LIMITS.get(owner, "max_tokens"): 40}
    few = {"logit_bias": dict.fromkeys(map(str, range(70, 90)), 100), **RANDOM, **limit}

    def text(penalty: dict[str, float], seed: int) -> str:
        return api.ask(owner, **{**few, "seed": seed}, **penalty).text

    def count(**penalty: float) -> int:
        with ThreadPoolExecutor(4) as pool:  # a step makes a token for all of them
            return sum(len(set(each)) for each in pool.map(partial(text, penalty), range(4)))

    assert count(presence_penalty=2) > count(presence_penalty=-2)
    assert count(frequency_penalty=2) > count(frequency_penalty=-2)
    assert count(repetition_penalty=1.5) > count(repetition_penalty=0.7)


@case(TEXT, "logit_bias")
def _(api: Api, owner: str) -> None:
    assert api.ask(owner, logit_bias={"70": 100}).text == api.decoded(*[70] * 8)


@case(OPENAI, "stop")
@case(("messages",), "stop_sequences")
def _(api: Api, owner: str) -> None:
    text, field = api.ask(owner).text, "stop" if owner in OPENAI else "stop_sequences"
    stop = text[len(text) // 2 :][:2]
    cut = api.ask(owner, **{field: [stop]})
    assert cut.text == text[: text.index(stop)]
    assert not cut.is_cut
    if owner in OPENAI:
        assert api.ask(owner, stop=stop).text == cut.text


@case(TEXT, "stop_token_ids", "min_tokens")
def _(api: Api, owner: str) -> None:
    bias = {"logit_bias": {"70": 100}}
    assert api.ask(owner, **bias).num_output == 8
    stopped = api.ask(owner, **bias, stop_token_ids=[70])
    assert (stopped.num_output, stopped.is_cut) == (1, False)
    assert api.ask(owner, **bias, stop_token_ids=[70], min_tokens=4).num_output == 5


@case(TEXT, "ignore_eos")
def _(api: Api, owner: str) -> None:
    ending = {"logit_bias": {"0": 100}}
    assert api.ask(owner, **ending).num_output == 1
    assert api.ask(owner, **ending, ignore_eos=True).num_output == 8


@case(("chat", "completions", "messages"), "max_tokens")
@case(("chat",), "max_completion_tokens")
@case(("responses",), "max_output_tokens")
def _(api: Api, owner: str) -> None:
    names = {"chat": ("max_tokens", "max_completion_tokens")}.get(
        owner, (LIMITS.get(owner, "max_tokens"),)
    )
    for name in names:
        answer = api.ask(owner, **{**dict.fromkeys(names), name: 3}, ignore_eos=True)
        assert (answer.num_output, answer.is_cut) == (3, True)


@case(("chat", "completions"), "n")
def _(api: Api, owner: str) -> None:
    assert len(set(api.ask(owner, **RANDOM, n=3).texts)) == 3


@case(("chat", "completions"), "best_of")
def _(api: Api, owner: str) -> None:
    """The best of four, by mean log-probability, is the best of the four that `n` shows."""
    logprobs = {"logprobs": True if owner == "chat" else 0}
    answer = api.ask(owner, **RANDOM, **logprobs, n=SEATS, ignore_eos=True)
    means = [sum(values) / len(values) for values in map(_token_logprobs, answer.choices)]
    (best,) = api.ask(owner, **RANDOM, best_of=SEATS, ignore_eos=True).texts
    assert best == answer.texts[means.index(max(means))]
    assert best != answer.texts[means.index(min(means))]


def _token_logprobs(choice: dict[str, Any]) -> list[float]:
    logprobs = choice["logprobs"]
    if "content" in logprobs:
        return [entry["logprob"] for entry in logprobs["content"]]
    values: list[float] = logprobs["token_logprobs"]
    return values


@case(("chat",), "logprobs", "top_logprobs")
def _(api: Api, owner: str) -> None:
    assert api.ask(owner).choices[0]["logprobs"] is None
    for fields, num in (({}, 0), ({"top_logprobs": 3}, 3)):
        answer = api.ask(owner, logprobs=True, **fields)
        entries = answer.choices[0]["logprobs"]["content"]
        assert len(entries) == answer.num_output
        assert {len(entry["top_logprobs"]) for entry in entries} == {num}
    api.refused(owner, "top_logprobs", top_logprobs=3)


@case(("completions",), "logprobs")
def _(api: Api, owner: str) -> None:
    assert api.ask(owner).choices[0]["logprobs"] is None
    answer = api.ask(owner, logprobs=2)
    tops = answer.choices[0]["logprobs"]["top_logprobs"]
    assert len(tops) == answer.num_output
    assert {len(top) for top in tops} == {2}


@case(("responses",), "include", "top_logprobs")
def _(api: Api, owner: str) -> None:
    def entries(**fields: Any) -> list[Any]:
        (item,) = api.ask(owner, **fields).json["output"]
        logprobs: list[Any] = item["content"][0]["logprobs"]
        return logprobs

    assert entries() == []
    assert len(entries(include=["message.output_text.logprobs"])) == 8
    assert {len(entry["top_logprobs"]) for entry in entries(top_logprobs=2)} == {2}


# How a request stands among others.


@case((*TEXT, "embeddings"), "priority")
def _(api: Api, owner: str) -> None:
    assert not api.goes_before(owner)
    assert api.goes_before(owner, priority=5)


@case((*TEXT, "embeddings"), "deadline_s")
def _(api: Api, owner: str) -> None:
    with api.full():
        answer = api.ask(owner, deadline_s=0.05)
    assert answer.status == 408
    assert "deadline" in answer.error["message"]
    assert api.ask(owner, deadline_s=100).status == 200


@case(("embeddings",), "cache_salt")
def _(api: Api) -> None:
    """What was computed for an embedding is found by others with its salt alone."""
    text = "a text to embed, which is longer than a page of the cache: " * 3
    assert api.ask("embeddings", input=text, cache_salt="embedded").status == 200
    for salt, is_found in (("another", False), ("embedded", True)):
        before = api.hit_tokens
        assert api.ask("completions", prompt=text, cache_salt=salt).status == 200
        assert (api.hit_tokens - before > 16) == is_found


@case(TEXT, "cache_salt")
def _(api: Api, owner: str) -> None:
    """What one salt has computed is found again under it, and under no other."""
    text = f"a text of more than a page, for the route of {owner}: " * 3
    field = QUESTIONS.get(owner, "input")
    given = {field: [{"role": "user", "content": text}] if field == "messages" else text}
    hits = []
    for salt in ("one", "one", "two", "one"):
        before = api.hit_tokens
        assert api.ask(owner, **given, cache_salt=f"{salt} of {owner}").status == 200
        hits.append(api.hit_tokens - before > 16)
    assert hits == [False, True, False, True]


# How the answer is sent.


@case(TEXT, "stream")
def _(api: Api, owner: str) -> None:
    whole, stream = api.ask(owner), api.ask(owner, stream=True)
    assert stream.response.headers["content-type"].startswith("text/event-stream")
    assert len(stream.events) > 3
    if owner == "responses":
        pieces = [event.get("delta", "") for event in stream.events]
    elif owner == "messages":
        pieces = [event.get("delta", {}).get("text") for event in stream.events]
    else:
        choices = [choice for event in stream.events for choice in event["choices"]]
        pieces = [_piece(choice) for choice in choices]
    assert "".join(piece or "" for piece in pieces) == whole.text


def _piece(choice: dict[str, Any]) -> str | None:
    return choice["text"] if "text" in choice else choice["delta"].get("content")


@case(("chat", "completions"), "stream_options")
@case(("StreamOptions",), "include_usage")
def _(api: Api) -> None:
    for route in ("chat", "completions"):
        plain = api.ask(route, stream=True).events
        told = api.ask(route, stream=True, stream_options={"include_usage": True}).events
        assert "usage" not in plain[-1]
        assert told[-1]["usage"]["completion_tokens"] == 8
        api.refused(route, "stream_options", stream_options={"include_usage": True})
    api.refused("responses", "include_usage", stream=True, stream_options={"include_usage": True})


@case(("responses",), "stream_options")
@case(("StreamOptions",), "include_obfuscation")
def _(api: Api) -> None:
    """Nothing is padded, which is what false asks for."""
    for route in OPENAI:
        answer = api.ask(route, stream=True, stream_options={"include_obfuscation": False})
        assert "obfuscation" not in answer.response.text
        options = {"include_obfuscation": True}
        api.refused(route, "include_obfuscation", stream=True, stream_options=options)


@case(("completions",), "echo")
def _(api: Api, owner: str) -> None:
    assert api.ask(owner, echo=True).text == "hello" + api.ask(owner).text
    assert api.ask(owner, echo=True, max_tokens=0).text == "hello"


# What is asked.


@case(("chat", "messages", "count_tokens"), "messages")
@case(("completions",), "prompt")
@case(("responses", "embeddings"), "input")
def _(api: Api, owner: str) -> None:
    field = QUESTIONS.get(owner, "input")
    long = "a longer text than the other one"
    value: Any = [{"role": "user", "content": long}] if field == "messages" else long
    plain, longer = api.ask(owner), api.ask(owner, **{field: value})
    assert longer.num_prompt > plain.num_prompt
    if owner in ("completions", "embeddings"):
        ids = api.ask("tokenize", prompt=long).json["tokens"]
        entries = "choices" if owner == "completions" else "data"
        several = api.ask(owner, **{field: [ids, [70]]}).json[entries]
        assert len(several) == 2
        if owner == "completions":
            assert several[0] == longer.json[entries][0]
            return
        # Two in one step are rounded otherwise than one alone, and when they arrive decides that.
        (alone,) = api.ask(owner, **{field: [ids]}).json[entries]
        assert alone == longer.json[entries][0]
        other = api.ask(owner, **{field: [[70]]}).json[entries][0]["embedding"]
        for entry, own, wrong in zip(several, (alone["embedding"], other),
                                     (other, alone["embedding"]), strict=True):  # fmt: skip
            assert math.dist(entry["embedding"], own) < 1e-3 * math.dist(entry["embedding"], wrong)


@case(("responses",), "instructions")
def _(api: Api, owner: str) -> None:
    plain, told = api.ask(owner), api.ask(owner, instructions="be brief, and say nothing")
    assert told.num_prompt > plain.num_prompt
    assert told.text != plain.text


@case(BOTH, "chat_template_kwargs")
def _(api: Api, owner: str) -> None:
    given = api.ask(owner, chat_template_kwargs={"note": "a note for the template"})
    assert given.num_prompt > api.ask(owner).num_prompt


@case(("chat", "completions"), "response_format")
@case(("responses",), "text")
@case(("TextOptions",), "format")
def _(api: Api, owner: str) -> None:
    form = {"type": "choice", "choices": ["yes", "no"]}
    for route in ("responses",) if owner == "TextOptions" else (owner,):
        given = {"text": {"format": form}} if route == "responses" else {"response_format": form}
        assert api.ask(route, **given).text in ("yes", "no")


@case(("TextOptions",), "verbosity")
def _(api: Api) -> None:
    assert api.ask("responses", text={"verbosity": "medium"}).text == api.ask("responses").text
    api.refused("responses", "verbosity", text={"verbosity": "high"})


@case(BOTH, "tools", "tool_choice")
def _(api: Api, owner: str) -> None:
    tool = TOOL if owner == "chat" else flat(TOOL)
    long = {LIMITS.get(owner, "max_tokens"): 80}
    assert api.ask(owner).calls == []
    assert api.ask(owner, tools=[tool], tool_choice="none").num_prompt == api.ask(owner).num_prompt
    assert api.ask(owner, tools=[tool]).num_prompt > api.ask(owner).num_prompt
    (call,) = api.ask(owner, tools=[tool], tool_choice="required", **long).calls
    assert (call["name"], json.loads(call["arguments"])) == ("look", {"number": 5})


@case(BOTH, "parallel_tool_calls")
def _(api: Api, owner: str) -> None:
    """Where the model may not end, it calls again, if it may."""
    tool = TOOL if owner == "chat" else flat(TOOL)
    asked = {"tools": [tool], "tool_choice": "required"}
    asked["logit_bias"] = no_end() | no_blanks()
    asked[LIMITS.get(owner, "max_tokens")] = 120  # type: ignore[assignment]
    assert len(api.ask(owner, **asked).calls) > 1
    assert len(api.ask(owner, **asked, parallel_tool_calls=False).calls) == 1


# The other routes.


@case(("embeddings",), "encoding_format")
def _(api: Api, owner: str) -> None:
    (plain,), (packed,) = (
        api.ask(owner, encoding_format=name).json["data"] for name in ("float", "base64")
    )
    raw = base64.b64decode(packed["embedding"])
    assert list(struct.unpack(f"<{len(raw) // 4}f", raw)) == plain["embedding"]


@case(("embeddings",), "pooling")
def _(api: Api, owner: str) -> None:
    last, mean = (api.ask(owner, pooling=name).json["data"] for name in ("last", "mean"))
    assert api.ask(owner).json["data"] == last != mean


@case(("tokenize",), "prompt", "messages", "tools", "add_generation_prompt")
def _(api: Api, owner: str) -> None:
    def count(**fields: Any) -> int:
        return int(api.ask(owner, prompt=None, **fields).json["count"])

    messages = [{"role": "user", "content": "hello"}]
    conversation = count(messages=messages)
    assert conversation == api.ask("chat").num_prompt
    assert count(messages=messages, tools=[TOOL]) > conversation
    assert count(messages=messages, add_generation_prompt=False) < conversation
    assert api.decoded(*api.ask(owner, prompt="a b").json["tokens"]) == "<|im_start|>a b"


@case(("tokenize",), "add_special_tokens")
def _(api: Api, owner: str) -> None:
    """The tokenizer of this server puts <|im_start|> before a text."""
    plain = api.ask(owner, add_special_tokens=False).json["tokens"]
    assert api.ask(owner).json["tokens"] == [1, *plain]


@case(("detokenize",), "tokens", "skip_special_tokens")
def _(api: Api, owner: str) -> None:
    text = api.ask(owner, tokens=[1, 70]).json["prompt"]
    assert text == "<|im_start|>" + api.decoded(70)
    skipped = api.ask(owner, tokens=[1, 70], skip_special_tokens=True).json["prompt"]
    assert skipped == api.decoded(70)
