"""The clients that people have work unchanged, over a real socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from langchain_openai import ChatOpenAI
from live_server import LiveServer, live_server, until
from pydantic import BaseModel
from tiny_tokenizers import no_blanks

from ridgeline.cli.main import main

MESSAGES: Any = [{"role": "user", "content": "hello there"}]
SURE: Any = {"max_tokens": 200, "temperature": 0, "logit_bias": no_blanks()}  # it comes to an end
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a place",
        "parameters": {
            "type": "object",
            "properties": {"place": {"enum": ["Bern", "Rome"]}, "now": {"type": "boolean"}},
            "required": ["place", "now"],
            "additionalProperties": False,
        },
    },
}


class Verdict(BaseModel):
    kind: Literal["good", "bad"]
    sure: bool


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("clients"), api_key=("key-for-clients",)) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="key-for-clients") as found:
        yield found


def test_chat_whole_and_streamed_are_the_same(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 24
    stream = client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens  # by now
    same = {"prompt_tokens_details": whole.usage.prompt_tokens_details}
    assert usage.model_copy(update=same) == whole.usage
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"


def test_several_outputs_with_logprobs(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_completion_tokens=5,
        n=3,
        seed=4,
        temperature=1.0,
        logprobs=True,
        top_logprobs=2,
    )
    assert [choice.index for choice in found.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in found.choices}) > 1
    for choice in found.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert len(choice.logprobs.content) == 5
        assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)


def test_many_at_once(server: LiveServer, client: openai.OpenAI) -> None:
    """Asynchronously, streamed, each as it is alone."""
    texts = [f"number {number}" for number in range(24)]

    async def answers() -> list[str]:
        key = "key-for-clients"
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key) as many:

            async def answer(text: str) -> str:
                stream = await many.completions.create(
                    model="tiny", prompt=text, max_tokens=16, temperature=0, stream=True
                )
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*(answer(text) for text in texts))

    found = asyncio.run(answers())
    alone = client.completions.create(model="tiny", prompt=texts, max_tokens=16, temperature=0)
    assert found == [choice.text for choice in alone.choices]
    until(server.is_idle)


def test_tools(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": MESSAGES, "tools": [WEATHER], **SURE}
    whole = client.chat.completions.create(**asked, tool_choice="required")
    (choice,) = whole.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls
    for call in choice.message.tool_calls:
        assert call.type == "function"
        assert call.function.name == "weather"
        assert set(json.loads(call.function.arguments)) == {"place", "now"}
    named = {"type": "function", "function": {"name": "weather"}}
    with client.chat.completions.stream(**asked, tool_choice=named) as stream:  # type: ignore[arg-type]
        final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls
    arguments = json.loads(final.choices[0].message.tool_calls[0].function.arguments)
    assert arguments["place"] in ("Bern", "Rome")


def test_structured_output(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=Verdict, **SURE
    )
    assert isinstance(parsed.choices[0].message.parsed, Verdict)
    answer = client.responses.parse(
        model="tiny", input="hello", text_format=Verdict, max_output_tokens=200, temperature=0
    )
    assert isinstance(answer.output_parsed, Verdict)


def test_responses_embeddings_and_models(client: openai.OpenAI) -> None:
    whole = client.responses.create(model="tiny", input="hello", max_output_tokens=8, temperature=0)
    assert whole.usage is not None
    assert whole.usage.output_tokens == 8
    with client.responses.stream(
        model="tiny", input="hello", max_output_tokens=8, temperature=0
    ) as stream:
        last = list(stream)[-1]
    assert last.type == "response.incomplete"  # 8 tokens were all it was given
    assert last.response.output_text == whole.output_text
    found = client.embeddings.create(model="tiny", input=["one text", "another"])
    assert len(found.data) == 2
    for entry in found.data:
        assert sum(value * value for value in entry.embedding) == pytest.approx(1.0, abs=1e-4)
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_errors_are_the_clients_own(client: openai.OpenAI, server: LiveServer) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=-1)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="word " * 5000)
    assert caught.value.code == "context_length_exceeded"
    wrong = openai.OpenAI(base_url=f"{server.url}/v1", api_key="another-key", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        wrong.models.list()


def test_a_slash_at_the_end_changes_nothing(server: LiveServer) -> None:
    headers = {"authorization": "Bearer key-for-clients"}
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 2}
    assert server.post("/v1/chat/completions/", body, headers=headers).status_code == 200
    assert server.get("/v1/models/", headers=headers).json()["object"] == "list"
    assert server.get("/v1/models/tiny/", headers=headers).json()["id"] == "tiny"
    assert server.get("/health/").status_code == 200
    assert server.get("/ready/").status_code == 401  # and opens no door


def test_bench_serve_has_keys_from_the_servers_file_and_the_environment(
    server: LiveServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\n\nkey-for-clients\nanother-key-there\n")
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,x,4,2,6,x\n"
    )
    command = ["bench", "serve", "--url", server.url, "--workload", str(trace), "--json"]

    def exit_code(*flags: str) -> int:
        return main([*command, *flags])

    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert exit_code() != 0
    assert "OPENAI_API_KEY" in capsys.readouterr().err
    assert exit_code(f"--api-key-file={file}") == 0
    monkeypatch.setenv("OPENAI_API_KEY", "key-for-clients")
    assert exit_code() == 0


def test_langchain(server: LiveServer) -> None:
    model = ChatOpenAI(
        model="tiny",
        base_url=f"{server.url}/v1",
        api_key="key-for-clients",  # type: ignore[arg-type]
        temperature=0,
        max_completion_tokens=12,
    )
    whole = model.invoke("hello there")
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] == 12
    assert "".join(str(chunk.content) for chunk in model.stream("hello there")) == whole.content
    judge = ChatOpenAI(
        model="tiny",
        base_url=f"{server.url}/v1",
        api_key="key-for-clients",  # type: ignore[arg-type]
        temperature=0,
        max_completion_tokens=200,
    )
    assert isinstance(judge.with_structured_output(Verdict).invoke("hello"), Verdict)
    calls = judge.bind_tools([WEATHER], tool_choice="weather").invoke("hello").tool_calls
    assert calls[0]["args"]["place"] in ("Bern", "Rome")
