"""Workloads: the named mixes are what the published figures were measured on, traces are read as
they stand, and equal blocks become equal token ids.

The files are made here in the form of the public traces; none of those is needed.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizers import sentencepiece_metadata

from ridgeline.data import Tokenizer
from ridgeline.data.traces import load_workload
from ridgeline.data.workload import MIXES, Workload, WorkloadRequest, named_workload
from ridgeline.errors import UsageError

pytestmark = pytest.mark.smoke

AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:17:00.0000000,91,16
"""
BURST_GPT = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45.5,GPT-4,1087,230,1317,API log
"""
MOONCAKE: list[dict[str, Any]] = [
    {"timestamp": 500, "input_length": 1300, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 1500, "input_length": 1100, "output_length": 7, "hash_ids": [0, 1, 3]},
    {"timestamp": 1500, "input_length": 600, "output_length": 9, "hash_ids": [4, 5]},
    {"timestamp": 9500, "input_length": 1250, "output_length": 1, "hash_ids": [0, 1, 2]},
]
PROMPTS: list[dict[str, Any]] = [
    {"question_id": 1, "category": "qa", "turns": ["def function(x)", "and then"]},
    {"prompt": "return x"},
]


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def mooncake(tmp_path: Path) -> Workload:
    return load_workload(write_lines(tmp_path / "mooncake.jsonl", MOONCAKE))


@pytest.mark.parametrize(
    ("name", "count", "prompt_tokens", "output_tokens", "temperature"),
    [
        ("throughput", 512, 291_939, 284_413, 0.6),
        ("batch-1", 1, 128, 256, 0.0),
        ("prefill", 16, 16 * 2048, 16, 0.0),
    ],
)
def test_mixes_are_the_published_ones(
    name: str, count: int, prompt_tokens: int, output_tokens: int, temperature: float
) -> None:
    workload = named_workload(name)
    assert len(workload.requests) == count
    assert workload.num_prompt_tokens == prompt_tokens
    assert workload.num_output_tokens == output_tokens
    assert workload.temperature == temperature
    assert workload.duration_s == 0
    assert workload == named_workload(name)


def test_the_cpu_mix_is_uniform_from_16_to_256() -> None:
    requests = named_workload("cpu").requests
    assert len(requests) == 32
    for lengths in (
        [request.num_prompt_tokens for request in requests],
        [request.num_output_tokens for request in requests],
    ):
        assert all(16 <= length <= 256 for length in lengths)
        assert max(lengths) > 200
        assert min(lengths) < 60
        assert len(set(lengths)) > 20


def test_mixes_give_their_own_ids_and_refuse_a_vocabulary_that_lacks_them() -> None:
    workload = named_workload("throughput")
    ids = workload.prompt_ids(3, vocab_size=128256)
    assert ids == list(workload.requests[3].prompt or ())
    assert 9000 < max(ids) <= 10000
    with pytest.raises(UsageError, match=r"token id .* the model's vocabulary has 1000"):
        workload.prompt_ids(3, vocab_size=1000)


@pytest.mark.parametrize("source", ["throughputs", "no/such/file.csv"])
def test_an_unknown_name_lists_the_known_ones(source: str) -> None:
    with pytest.raises(UsageError, match="throughput, batch-1, prefill, cpu"):
        load_workload(source)
    with pytest.raises(UsageError, match="throughput, batch-1, prefill, cpu"):
        named_workload(source)
    assert load_workload("prefill") == MIXES["prefill"]()


def test_a_burst_gpt_trace(tmp_path: Path) -> None:
    (tmp_path / "burst.csv").write_text(BURST_GPT)
    first, second = load_workload(tmp_path / "burst.csv").requests
    assert (first.num_prompt_tokens, first.num_output_tokens, first.arrival_s) == (472, 18, 0.0)
    assert (second.num_prompt_tokens, second.num_output_tokens) == (1087, 230)
    assert second.arrival_s == 40.5


def test_an_azure_trace(tmp_path: Path) -> None:
    (tmp_path / "azure.csv").write_text(AZURE)
    workload = load_workload(tmp_path / "azure.csv")
    assert [request.num_prompt_tokens for request in workload.requests] == [374, 396, 91]
    assert [request.num_output_tokens for request in workload.requests] == [44, 109, 16]
    assert workload.requests[0].arrival_s == 0
    assert workload.requests[1].arrival_s == pytest.approx(4.314579, abs=1e-5)
    assert workload.duration_s == pytest.approx(73.31941, abs=1e-5)
    assert workload.ideal_hit_rate() == 0


def test_a_mooncake_trace(mooncake: Workload) -> None:
    assert [request.arrival_s for request in mooncake.requests] == [0, 1, 1, 9]
    assert [request.num_prompt_tokens for request in mooncake.requests] == [1300, 1100, 600, 1250]
    assert mooncake.num_output_tokens == 22
    # 0 1 and then 0 1 2 came before, of 3 + 3 + 2 + 3 blocks
    assert mooncake.ideal_hit_rate() == pytest.approx(5 / 11)


def test_equal_blocks_are_equal_ids_and_others_are_not(mooncake: Workload) -> None:
    ids = [mooncake.prompt_ids(i, vocab_size=50_000) for i in range(4)]
    assert [len(row) for row in ids] == [1300, 1100, 600, 1250]
    assert ids[0][:1024] == ids[1][:1024]
    assert ids[0][1024:1100] != ids[1][1024:1100]
    assert ids[3] == ids[0][:1250]
    blocks = [tuple(row[i : i + 76]) for row in ids[:3] for i in range(0, len(row), 512)]
    assert len(set(blocks)) == 6  # of 8: two are shared
    assert ids == [mooncake.prompt_ids(i, vocab_size=50_000) for i in range(4)]
    assert mooncake.prompt_ids(0, vocab_size=50_000, seed=1) != ids[0]
    moved = mooncake.between(1, 10)
    assert moved.prompt_ids(0, vocab_size=50_000) == ids[1]  # the hash decides, not the place


def test_ids_are_pinned_and_spread_over_the_vocabulary(mooncake: Workload) -> None:
    """The same on every machine, and in every version."""
    plain = Workload("plain", (WorkloadRequest(20_000, 1), WorkloadRequest(20_000, 1)))
    first, second = (plain.prompt_ids(i, vocab_size=1000) for i in range(2))
    assert first != second
    assert mooncake.prompt_ids(0, vocab_size=100_000)[:3] == [98990, 23355, 14896]
    assert first[:3] == [553, 768, 116]
    counts = [first.count(token) for token in range(1000)]
    assert min(counts) > 2
    assert max(counts) < 50  # 20 are expected of each
    repeated = sum(a == b for a, b in pairwise(first))
    assert repeated < 50  # 20 are expected of independent draws


def test_prompts_from_a_file(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata())
    path = write_lines(tmp_path / "prompts.jsonl", PROMPTS)
    workload = load_workload(path, tokenizer=tokenizer, num_output_tokens=12)
    assert workload.prompt_ids(0, 10**6) == tokenizer.encode("def function(x)")
    assert workload.prompt_ids(1, 10**6) == tokenizer.encode("return x")
    assert [request.category for request in workload.requests] == ["qa", ""]
    assert workload.num_output_tokens == 24
    with pytest.raises(UsageError, match="holds text; give the tokenizer"):
        load_workload(path)


def test_prompts_go_through_the_chat_template(tmp_path: Path) -> None:
    template = "{% for m in messages %}user: {{ m['content'] }}{% endfor %}"
    metadata = sentencepiece_metadata(**{"tokenizer.chat_template": template})
    tokenizer = Tokenizer.from_gguf(metadata)
    path = write_lines(tmp_path / "prompts.jsonl", PROMPTS)
    ids = load_workload(path, tokenizer=tokenizer).prompt_ids(1, 10**6)
    assert ids == tokenizer.chat([{"role": "user", "content": "return x"}])
    assert ids != tokenizer.encode("return x")


def test_parts_of_a_workload(mooncake: Workload) -> None:
    assert mooncake.first(2).requests == mooncake.requests[:2]
    assert mooncake.first(99) == mooncake
    middle = mooncake.between(1, 9)
    assert [request.num_prompt_tokens for request in middle.requests] == [1100, 600]
    assert [request.arrival_s for request in middle.requests] == [0, 0]
    assert [request.num_tokens for request in mooncake.within(1251).requests] == [1107, 609, 1251]
    for call in (
        lambda: mooncake.first(0),
        lambda: mooncake.between(2, 3),
        lambda: mooncake.within(10),
    ):
        with pytest.raises(UsageError, match=r"at least 1|no requests"):
            call()


def test_the_rate_is_scaled(mooncake: Workload) -> None:
    assert [request.arrival_s for request in mooncake.sped_up(2).requests] == [0, 0.5, 0.5, 4.5]
    assert mooncake.sped_up(0.5).duration_s == 18
    assert mooncake.at_once().duration_s == 0
    assert mooncake.at_once().num_prompt_tokens == mooncake.num_prompt_tokens
    for factor in (0, -1, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="give a positive number"):
            mooncake.sped_up(factor)


def test_rows_out_of_order_are_put_in_order(tmp_path: Path) -> None:
    workload = load_workload(write_lines(tmp_path / "rows.jsonl", MOONCAKE[::-1]))
    assert [request.arrival_s for request in workload.requests] == [0, 1, 1, 9]
    assert workload.requests[0].num_prompt_tokens == 1300


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.csv", AZURE + "yesterday,1,1\n", "line 5: TIMESTAMP is 'yesterday'"),
        ("a.csv", AZURE + "2023-11-16 18:18:00,12\n", "line 5: 2 columns"),
        ("a.csv", AZURE + "2023-11-16 18:18:00,x,1\n", "line 5: ContextTokens is 'x'"),
        ("a.csv", AZURE + "\n2023-11-16 18:18:00,1,0\n", "line 6: GeneratedTokens is '0'"),
        ("a.csv", "time,size\n1,2\n", "has 'time, size'; a workload has TIMESTAMP"),
        ("a.csv", AZURE.splitlines()[0], "has no rows"),
        ("a.csv", BURST_GPT + "9,GPT-4,5,0,5,API log\n", "line 4: Response tokens is 0, a request"),
        ("a.csv", BURST_GPT + "soon,GPT-4,5,1,6,API log\n", "line 4: Timestamp is 'soon'"),
        ("a.jsonl", "", "has no rows"),
        ("a.jsonl", '{"timestamp": 0', "line 1 is not JSON"),
        ("a.jsonl", "[1]\n", "line 1 is '[1]'; expected an object"),
        ("a.jsonl", '{"timestamp": 0, "input_length": 1.5, "output_length": 1}', "line 1: input_l"),
        (
            "a.jsonl",
            '{"timestamp": -1, "input_length": 1, "output_length": 1}',
            "timestamp is '-1'",
        ),
        (
            "a.jsonl",
            '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}',
            "line 1: 600 tokens are 2 blocks, and hash_ids has 1",
        ),
        (
            "a.jsonl",
            '{"timestamp": 0, "input_length": 6, "output_length": 1, "hash_ids": ["a"]}',
            "line 1: hash_ids is",
        ),
        ("a.jsonl", '{"prompt": "x"}\n{"prompt": ""}\n', "line 2: the prompt is ''"),
        ("a.jsonl", '{"prompt": "x"}\n{"turns": []}\n', "line 2: the prompt is 'None'"),
    ],
)
def test_a_bad_row_is_named_by_its_line(name: str, content: str, says: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata())
    with pytest.raises(UsageError) as caught:
        load_workload(tmp_path / name, tokenizer=tokenizer)
    assert says in str(caught.value)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not UTF-8"):
        load_workload(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_prompt_tokens": 0},
        {"num_output_tokens": 0},
        {"arrival_s": -1.0},
        {"arrival_s": float("nan")},
        {"prompt": (1, 2)},
    ],
)
def test_wrong_requests_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        WorkloadRequest(**{"num_prompt_tokens": 3, "num_output_tokens": 1} | wrong)
