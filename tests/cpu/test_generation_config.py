"""A model's generation_config.json: its values are the defaults of requests, and its end-of-text
ids end outputs, tokenizer or not.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer, chat, live_server, write_model

from ridgeline.cli.main import main
from ridgeline.engine import Engine, Sampling
from ridgeline.engine.loading.saved import generation_of
from ridgeline.errors import ConfigError
from ridgeline.server.logs import FACTS

PROMPT = [5, 9, 30, 77]
ONLY_THE_LIKELIEST = {"temperature": 0.9, "top_k": 1}


def write_config(folder: Path, **values: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps(values))


@pytest.fixture(scope="module")
def greedy_by_default(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("model")
    write_config(folder, **ONLY_THE_LIKELIEST)
    with live_server(folder) as server:
        yield server


def text_for(server: LiveServer, path: str = "/v1/chat/completions", **fields: Any) -> str:
    body = {**chat(), "max_tokens": 12, "seed": 3, **fields}
    answer = server.post(path, {name: body[name] for name in body if body[name] is not None})
    (choice,) = answer.json()["choices"]
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text


def test_requests_have_the_models_values_unless_they_say_otherwise(
    greedy_by_default: LiveServer,
) -> None:
    greedy = text_for(greedy_by_default, temperature=0)
    assert text_for(greedy_by_default, temperature=None) == greedy
    assert text_for(greedy_by_default, temperature=None, top_k=-1) != greedy
    prompt = {"messages": None, "prompt": "hello"}
    routed = [
        text_for(greedy_by_default, "/v1/completions", **prompt, temperature=temperature)
        for temperature in (0, None)
    ]
    assert routed[0] == routed[1]


def test_they_can_be_turned_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, greedy_by_default: LiveServer
) -> None:
    write_config(tmp_path, **ONLY_THE_LIKELIEST)
    with caplog.at_level(logging.INFO), live_server(tmp_path, generation_config="none") as server:
        free = text_for(server, temperature=None)
        assert free == text_for(server, temperature=1.0, top_k=-1)
    assert free != text_for(greedy_by_default, temperature=None)
    assert "sampling defaults" not in caplog.text


def test_the_server_tells_them_when_it_starts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_config(tmp_path, repetition_penalty=1.1, eos_token_id=[0])
    with caplog.at_level(logging.INFO), live_server(tmp_path):
        pass
    (line,) = [line for line in caplog.records if "sampling defaults" in line.getMessage()]
    assert getattr(line, FACTS)["repetition_penalty"] == 1.1


def test_generate_and_chat_use_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path)
    command = ["generate", str(tmp_path), "hello", "--max-tokens=8", "--seed=3", "--json"]
    command += ["--device=cpu", "--dtype=fp32"]

    def generated(*flags: str) -> dict[str, Any]:
        assert main([*command, *flags]) == 0
        result: dict[str, Any] = json.loads(capsys.readouterr().out)
        return result

    greedy = generated()["tokens"]
    write_config(tmp_path, temperature=5.0)
    drawn = generated()
    assert drawn["tokens"] != greedy
    assert drawn["sampling"] == {"temperature": 5.0}
    assert generated("--temperature=0")["tokens"] == greedy
    assert generated("--generation-config=none")["tokens"] == greedy
    with Engine(tmp_path, device="cpu", num_pages=8) as engine:
        messages = [{"role": "user", "content": "hello"}]
        outputs = [engine.chat(messages)[0].tokens[:8] for _ in range(4)]
        assert len(set(outputs)) > 1  # drawn, each with a seed of its own
        plain = {engine.chat(messages, Sampling())[0].tokens for _ in range(2)}
    assert len(plain) == 1


@pytest.mark.parametrize(
    ("name", "is_list"), [("config.json", False), ("generation_config.json", True)]
)
def test_without_a_tokenizer_the_end_ids_of_the_files_count(
    tmp_path: Path, name: str, is_list: bool
) -> None:
    write_model(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").unlink()
    change_file(tmp_path / "config.json", eos_token_id=None)
    sampling = Sampling(max_tokens=12)
    with Engine(tmp_path, device="cpu", num_pages=8) as engine:
        whole = engine.generate([PROMPT], sampling)[0]
    assert whole.finish_reason == "length"
    end = whole.tokens[4]
    change_file(tmp_path / name, eos_token_id=[end, 1] if is_list else end)
    with Engine(tmp_path, device="cpu", num_pages=8) as engine:
        ended = engine.generate([PROMPT], sampling)[0]
        ignored = engine.generate([PROMPT], Sampling(max_tokens=12, ignore_eos=True))[0]
    assert ended.finish_reason == "stop"
    assert ended.tokens == whole.tokens[: whole.tokens.index(end) + 1]
    assert ignored.tokens == whole.tokens


def change_file(path: Path, **values: Any) -> None:
    document = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**document, **values}))


def test_values_that_make_no_sense_are_named(tmp_path: Path) -> None:
    for values, message in (
        ({"temperature": "hot"}, "temperature 'hot'; expected a number"),
        ({"top_k": 1.5}, "top_k 1.5"),
        ({"top_p": 7}, "top_p is 7"),
        ({"eos_token_id": "x"}, "eos_token_id 'x'"),
    ):
        write_config(tmp_path, **values)
        with pytest.raises(ConfigError, match=message):
            generation_of(tmp_path)
    write_config(tmp_path, temperature=1, top_k=-1, min_p=None, do_sample=True)
    assert generation_of(tmp_path).sampling == {"temperature": 1.0, "top_k": 0}
