"""What must be known of an endpoint before it is measured: that it answers, which model it serves,
and which optional request fields it accepts.

    meet(Endpoint.parse("http://127.0.0.1:8000"), "completions", None, None)
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass

from ridgeline.bench.serve.client import Answer, Client
from ridgeline.bench.serve.http import Endpoint
from ridgeline.bench.serve.prompts import OPTIONS, PATHS, Api, BodyMaker
from ridgeline.data import Tokenizer
from ridgeline.data.workload import Workload, WorkloadRequest
from ridgeline.errors import OfflineError, RequestError

HELLO = Workload("hello", (WorkloadRequest(4, 2),))
HELLO_S = 120.0  # a server may compile or load something for its first request


@dataclass(frozen=True)
class Met:
    """An endpoint that has answered."""

    endpoint: Endpoint
    maker: BodyMaker

    @property
    def path(self) -> str:
        return PATHS[self.maker.api]

    @property
    def notes(self) -> list[str]:
        """What its figures mean, where that is not the usual."""
        results = {
            "ignore_eos": "it does not know ignore_eos: answers may be shorter than asked",
            "stream_options": "it does not count tokens in streams: an event is taken for one",
        }
        return [text for name, text in results.items() if name in self.maker.without]


def meet(
    endpoint: Endpoint,
    api: Api,
    model: str | None,
    tokenizer: Tokenizer | None,
    flag_prefix: str = "",
) -> Met:
    """Ask for its models where none is named, then for two tokens, with fewer and fewer options
    until it says yes. Errors name the flags that would help, with this prefix.
    """
    return asyncio.run(_meet(endpoint, api, model, tokenizer, flag_prefix))


async def _meet(
    endpoint: Endpoint, api: Api, model: str | None, tokenizer: Tokenizer | None, prefix: str
) -> Met:
    client = Client(endpoint)
    try:
        name = model if model is not None else await _first_model(client, endpoint, prefix)
        maker = BodyMaker(api, name, tokenizer)
        refused: Answer | None = None
        for count in range(len(OPTIONS) + 1):
            fewer = maker.but_without(*list(OPTIONS)[:count])
            answer = await client.ask(PATHS[api], fewer.body(HELLO, 0), timeout_s=HELLO_S)
            if answer.error is None:
                return Met(endpoint, fewer)
            refused = refused or answer  # the first says most
            if answer.error not in ("http 400", "http 422"):
                break
        assert refused is not None, "it was asked at least once"
        _raise(endpoint, refused.error or "", refused.detail, prefix)
    finally:
        client.close()
    raise AssertionError("one of the two has happened")


async def _first_model(client: Client, endpoint: Endpoint, prefix: str) -> str:
    try:
        status, body = await client.get("/models")
    except OSError as error:
        raise OfflineError(f"{endpoint.url} does not answer: {error}") from error
    if status != 200:
        _raise(endpoint, f"http {status}", body[:200].decode("utf-8", "replace"), prefix)
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError):
        hint = f"give one with --{prefix}model"
        raise RequestError(f"{endpoint.url}/models names no model; {hint}") from None


def _raise(endpoint: Endpoint, kind: str, detail: str, prefix: str) -> None:
    if kind in ("connect", "timeout"):
        raise OfflineError(f"{endpoint.url} does not answer: {detail}")
    hint = (
        f"; give its key with --{prefix}api-key-file or OPENAI_API_KEY"
        if kind in ("http 401", "http 403")
        else ""
    )
    raise RequestError(f"{endpoint.url} refuses a request of two tokens: {kind}: {detail}{hint}")
