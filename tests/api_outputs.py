"""What an engine would give for texts that a test has thought of, and requests to go with them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tiny_tokenizers import demo

from ridgeline.data import Tokenizer
from ridgeline.engine import Completion, Delta, Output
from ridgeline.engine.requests.request import FinishReason
from ridgeline.engine.sampling.choosing import TokenLogprob
from ridgeline.engine.scheduling.state import Status
from ridgeline.server.protocol import (
    Asked,
    ParsedPrompt,
    Reply,
    RequestLimits,
    Route,
    parse,
    render,
    reply_for,
)

HELLO = [{"role": "user", "content": "Hello"}]
MODEL = "demo"


def limits_of(tokenizer: Tokenizer, **changes: Any) -> RequestLimits:
    return RequestLimits(
        **{"models": (MODEL,), "max_context": 2048, "vocab_size": 49152, **changes}
    )


def asked_for(route: Route, tokenizer: Tokenizer | None = None, **fields: Any) -> Asked:
    limits = limits_of(tokenizer or demo())
    return parse(route, json.dumps({"model": MODEL, **fields}).encode(), limits)


def rendered(asked: Asked, tokenizer: Tokenizer | None = None) -> list[ParsedPrompt]:
    tokenizer = tokenizer or demo()
    return render(asked, tokenizer, limits_of(tokenizer))


def reply_to(
    route: Route, tokenizer: Tokenizer | None = None, **fields: Any
) -> tuple[Reply, list[ParsedPrompt]]:
    tokenizer = tokenizer or demo()
    asked = asked_for(route, tokenizer, **fields)
    prompts = rendered(asked, tokenizer)
    return reply_for(asked, prompts, tokenizer, "r1", 1_700_000_000.5), prompts


def logprob_of(token: int, num_top: int) -> TokenLogprob:
    """Minus infinity is among them, as a grammar or a bias makes it."""
    tops = [(token, -0.25), (token + 1, float("-inf")), (token + 2, -7.5)]
    return TokenLogprob(token, -0.25, tuple(tops[:num_top]))


def deltas_of(
    prompt: ParsedPrompt, texts: Sequence[str], reason: FinishReason = "stop"
) -> tuple[list[Delta], Output]:
    """One delta a token for the texts of a prompt's samples, interleaved; the last token is a stop
    token unless the reason is `length`.
    """
    tokenizer, num_top = demo(), prompt.sampling.logprobs
    deltas: list[list[Delta]] = []
    made = []
    for sample, text in enumerate(texts):
        decoder = tokenizer.decoder()
        tokens = tokenizer.encode(text, add_special_tokens=False)
        pieces = [decoder.push(token) for token in tokens]
        if reason == "stop":
            tokens, pieces = [*tokens, tokenizer.eos_ids[0]], [*pieces, ""]
        entries = tuple(logprob_of(token, num_top or 0) for token in tokens)
        last = len(tokens) - 1
        deltas.append(
            [
                Delta(
                    "r",
                    sample,
                    piece,
                    (token,),
                    reason if index == last else None,
                    () if num_top is None else (entries[index],),
                )
                for index, (token, piece) in enumerate(zip(tokens, pieces, strict=True))
            ]
        )
        made.append(
            Completion(text, tuple(tokens), reason, entries if num_top is not None else None)
        )
    longest = max(len(row) for row in deltas)
    mixed = [row[index] for index in range(longest) for row in deltas if index < len(row)]
    return mixed, output_of(prompt, tuple(made))


def output_of(
    prompt: ParsedPrompt,
    made: tuple[Completion, ...] = (),
    status: Status = "finished",
    reason: str = "stop",
    **more: Any,
) -> Output:
    fields: dict[str, Any] = {
        "prompt_logprobs": None,
        "embedding": None,
        "first_token_s": 0.01,
        "total_s": 0.02,
        **more,
    }
    return Output("r", status, reason, len(prompt.ids), 1, made, **fields)


def streamed(reply: Reply, deltas: Sequence[Delta], outputs: Sequence[Output]) -> bytes:
    sent = [*reply.start(), *(reply.delta(delta) for delta in deltas), *reply.finish(outputs)]
    return b"".join(sent)


def events_in(stream: bytes) -> list[dict[str, Any]]:
    """The JSON of each event; the frame is checked on the way. `[DONE]` must be the last."""
    found = []
    blocks = stream.decode().split("\n\n")
    assert blocks.pop() == "", "the last event is whole"
    for number, block in enumerate(blocks):
        lines = block.splitlines()
        kind = lines.pop(0).removeprefix("event: ") if lines[0].startswith("event: ") else None
        (line,) = lines
        payload = line.removeprefix("data: ")
        assert payload != line
        if payload == "[DONE]":
            assert number == len(blocks) - 1
            break
        value = json.loads(payload)
        assert kind is None or kind == value["type"]
        found.append(value)
    return found
