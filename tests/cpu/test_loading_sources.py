"""From files to tokens: every kind of file, and every way in which one can be broken."""

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_tokenizers import (
    byte_level_json,
    byte_level_metadata,
    demo,
    sentencepiece_metadata,
    tagged_tokenizer,
)
from written_text import TEXT

from ridgeline.data import Tokenizer
from ridgeline.data.loading import TokenStore, read_tokens, sources, tokenizing
from ridgeline.data.loading.sources import Origin, Quarantine
from ridgeline.errors import UsageError

END = 0  # <|endoftext|>
CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
CHAT = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Yes."}]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tagged_tokenizer((), template=CHATML)


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


def documents(store: TokenStore) -> list[list[int]]:
    ids = store.tokens_at(np.arange(store.num_tokens)).tolist()
    bounds = store.offsets.tolist()
    return [ids[begin:end] for begin, end in pairwise(bounds)]


def learned(store: TokenStore) -> list[bool]:
    counted = store.counted_at(np.arange(store.num_tokens))
    assert counted is not None
    return counted.tolist()


def test_text_files_plain_and_packed(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("Two words\n")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("Zürich 日本".encode()))
    for name in ("notes.pdf", "README.md", "dataset_infos.json"):
        (tmp_path / name).write_text("not data")
    data = read_tokens([tmp_path], tokenizer)
    texts = [tokenizer.decode(ids[:-1]) for ids in documents(data.store)]
    assert texts == ["Zürich 日本", "Two words\n"]
    assert [ids[-1] for ids in documents(data.store)] == [END, END]
    assert data.store.counted_at(np.arange(3)) is None
    assert str(data.store.origin(1)) == f"{tmp_path / 'b.txt'} line 1"
    assert data.quarantine.summary() == "no row quarantined"


def test_what_a_tokenizer_puts_before_a_text(tmp_path: Path) -> None:
    from dataclasses import replace

    plain = tagged_tokenizer(())
    tokenizer = Tokenizer(replace(plain._vocabulary, bos_id=1, prefix_ids=(1,)))
    (tmp_path / "a.txt").write_text("Two words")
    (ids,) = documents(read_tokens([tmp_path / "a.txt"], tokenizer).store)
    assert ids == [1, *tokenizer.encode("Two words", add_special_tokens=False), END]


@pytest.mark.parametrize(
    ("specials", "config", "stops", "expected"),
    [
        # A chat model ends its turns with a token that pre-training did not have.
        (["<|endoftext|>", "<|im_end|>"], {"eos_token": "<|im_end|>"}, [], "<|endoftext|>"),
        (["<|im_end|>", "</s>"], {"eos_token": "<|im_end|>"}, [], "</s>"),
        # Which of two ends is the model's, its files say.
        (["<|endoftext|>", "</s>"], {"eos_token": "</s>"}, [], "</s>"),
        (["<|endoftext|>", "</s>", "<|im_end|>"], {"eos_token": "<|im_end|>"}, ["</s>"], "</s>"),
        (["<|im_end|>"], {"eos_token": "<|im_end|>"}, [], "<|im_end|>"),
        (
            ["<|endoftext|>", "<|im_end|>"],
            {"eos_token": "<|im_end|>", "add_eos_token": True},
            [],
            "<|im_end|>",
        ),
    ],
)
def test_a_text_ends_as_texts_did_in_pre_training(
    specials: list[str], config: dict[str, Any], stops: list[str], expected: str, tmp_path: Path
) -> None:
    backend = byte_level_json(special=specials)
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ids = [backend.token_to_id(text) for text in stops]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    tokenizer = Tokenizer.load(tmp_path)
    rows = [{"text": "Two words"}, {"prompt": "2 + 2 =", "completion": " four"}]
    data = write_lines(tmp_path / "a.jsonl", rows)
    last = [ids[-1] for ids in documents(read_tokens([data], tokenizer).store)]
    # A completion ends where generation stops.
    assert tokenizer.decode(last, skip_special_tokens=False) == expected + config["eos_token"]


def test_the_demo_ends_texts_as_it_was_pre_trained(tmp_path: Path) -> None:
    tokenizer = demo()
    data = write_lines(tmp_path / "a.jsonl", [{"text": "Two words"}])
    (ids,) = documents(read_tokens([data], tokenizer).store)
    assert tokenizer.decode(ids, skip_special_tokens=False) == "Two words<|endoftext|>"


def test_long_texts_are_one_document(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "PIECE_CHARACTERS", 1000)
    monkeypatch.setattr(tokenizing, "BATCH_CHARACTERS", 5000)
    text = TEXT[:60_000] + " ünï" * 3000  # and no line end for long
    (tmp_path / "a.txt").write_text(text)
    write_lines(tmp_path / "b.jsonl", [{"text": text}, {"text": "short"}])
    store = read_tokens([tmp_path], tokenizer).store
    rows = documents(store)
    assert [tokenizer.decode(ids) for ids in rows] == [text, text, "short"]
    assert [ids.count(END) for ids in rows] == [1, 1, 1]


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "smollm", "gpt-4o", "tekken"])
def test_pieces_have_the_tokens_of_the_whole(
    pre: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "PIECE_CHARACTERS", 3000)
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(pre))
    (tmp_path / "a.txt").write_text(TEXT[:60_000])
    (ids,) = documents(read_tokens([tmp_path / "a.txt"], tokenizer).store)
    assert ids[:-1] == tokenizer.encode_many([TEXT[:60_000]])[0]


def test_special_tokens_in_a_text_stay_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [{"text": "a<|im_end|>b<|endoftext|>"}])
    (ids,) = documents(read_tokens([tmp_path / "a.jsonl"], tokenizer).store)
    assert not {0, 1, 2} & set(ids[:-1])
    assert tokenizer.decode(ids[:-1]) == "a<|im_end|>b<|endoftext|>"


def test_a_completion_is_learned_and_its_prompt_is_not(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    rows = [{"prompt": "2 + 2 =", "completion": " four"}, {"prompt": "wor", "completion": "ld"}]
    store = read_tokens([write_lines(tmp_path / "a.jsonl", rows)], tokenizer).store
    for ids, row, marks in zip(
        documents(store), rows, np.split(learned(store), store.offsets[1:-1]), strict=True
    ):
        kept = [token for token, mark in zip(ids, marks, strict=True) if mark]
        rest = [token for token, mark in zip(ids, marks, strict=True) if not mark]
        assert kept[-1] == END
        assert tokenizer.decode(kept[:-1]) == row["completion"]
        assert rest == tokenizer.encode(row["prompt"])  # as the engine will give it


def test_rows_of_every_kind_keep_their_order(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = [
        {"text": "first"},
        {"messages": CHAT, "text": "ignored where there are messages"},
        {"prompt": "a", "completion": "b"},
        {"text": "U+2028 is \u2028 no line end"},
    ]
    store = read_tokens([write_lines(tmp_path / "a.jsonl", rows)], tokenizer).store
    texts = [tokenizer.decode(ids) for ids in documents(store)]
    assert texts == ["first", "user\nHello?\nassistant\nYes.\n", "ab", rows[3]["text"]]
    assert [store.origin(n).line for n in range(4)] == [1, 2, 3, 4]
    begin, end = store.offsets[:2]
    assert all(learned(store)[begin:end])


BROKEN: list[tuple[str | bytes, str]] = [
    ('{"text": "cut off', "not JSON"),
    ("[1, 2]", "expected an object"),
    ('{"body": "x"}', "has body; expected text, messages, or prompt and completion"),
    ("{}", "has no field"),
    ('{"text": 5}', "text is '5'; expected a text"),
    ('{"text": "  "}', "text is empty"),
    ('{"text": "\\ud800"}', "half of a surrogate pair"),
    (b'{"text": "\xff"}', "not UTF-8"),
    ('{"prompt": "x"}', "completion is 'None'; expected a text"),
    ('{"messages": []}', "expected a list of objects"),
    ('{"messages": "hi"}', "expected a list of objects"),
    ('{"messages": [{"content": "x"}]}', "message 1 has no role"),
    ('{"messages": [{"role": "user", "content": "x"}]}', "no message of the assistant"),
    ('{"messages": [{"role": "assistant", "content": "x"}]}', "begins with a message of the"),
    ('{"messages": [{"role": "user"}, {"role": "assistant", "content": "x"}]}', "fails on this"),
    (
        '{"messages": [{"role": "user", "content": "<|im_end|>"},'
        ' {"role": "assistant", "content": "x"}]}',
        "message 1 has the special token '<|im_end|>' as text",
    ),
    (
        '{"messages": [{"role": "user", "content": "\\udfff"},'
        ' {"role": "assistant", "content": "x"}]}',
        "message 1 has half of a surrogate pair",
    ),
    ('{"messages": [{"role": "user", "content": "x"}], "tools": 3}', "tools is '3'"),
    ("[" * 4000, "recursion"),
    ('{"text": "' + "x" * 5000 + '"}', "longer than 4096 bytes"),
]


def test_broken_lines_are_quarantined(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [line.encode() if isinstance(line, str) else line for line, _ in BROKEN]
    good = b'{"text": "good"}'
    path = tmp_path / "a.jsonl.gz"
    content = b"\n".join(part for line in lines for part in (good, b"", line)) + b"\n" + good
    path.write_bytes(gzip.compress(content))
    monkeypatch.setattr(sources, "MAX_LINE_BYTES", 4096)
    data = read_tokens([path], tokenizer)
    assert data.store.num_documents == len(lines) + 1
    assert data.quarantine.count == len(lines)
    reasons = {origin.line: reason for origin, reason in data.quarantine.rows}
    assert sorted(reasons) == [3 * number + 3 for number in range(len(lines))]
    for number, (_, reason) in enumerate(BROKEN):
        assert reason in reasons[3 * number + 3]
    summary = data.quarantine.summary()
    assert summary.startswith(f"{len(lines)} rows quarantined, the first is {path} line 3: ")
    data.quarantine.write(tmp_path / "quarantine.jsonl")
    written = [
        json.loads(line) for line in (tmp_path / "quarantine.jsonl").read_text().split("\n")[:-1]
    ]
    assert len(written) == len(lines)
    assert written[0]["line"] == 3


def test_many_broken_lines_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_NAMED", 3)
    quarantine = Quarantine()
    for number in range(10):
        quarantine.add(Origin("a.jsonl", number), "why")
    assert (quarantine.count, len(quarantine.rows)) == (10, 3)
    quarantine.write(tmp_path / "q.jsonl")
    assert json.loads((tmp_path / "q.jsonl").read_text().split("\n")[3]) == {"not_listed": 7}


def test_parquet(tokenizer: Tokenizer, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    rows = [{"text": "first", "messages": None, "score": 1.0}] * 300 + [
        {"text": None, "messages": CHAT, "score": 1.0},
        {"text": None, "messages": None, "score": 1.0},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    data = read_tokens([tmp_path], tokenizer)
    texts = [tokenizer.decode(ids) for ids in documents(data.store)]
    assert texts == ["first"] * 300 + ["user\nHello?\nassistant\nYes.\n"]
    assert str(data.store.origin(300)) == f"{path} row 301"
    assert data.quarantine.rows[0][0].line == 302
    parquet.write_table(pyarrow.Table.from_pylist([{"body": "x"}]), path)
    with pytest.raises(UsageError, match="has the columns body; expected messages, prompt"):
        read_tokens([path], tokenizer)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UsageError, match="broken Parquet file"):
        read_tokens([path], tokenizer)


def test_parquet_without_its_package(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    (tmp_path / "a.parquet").write_bytes(b"PAR1....PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match="needs the package pyarrow"):
        read_tokens([tmp_path / "a.parquet"], tokenizer)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"  \n", r"the data has no text in .*a.txt; 1 row quarantined: .*empty"),
        ("a.txt", b"", "the data has no text"),
        ("a.jsonl", b"{}\n{}\n", r"no text in .*2 rows quarantined, the first is .* line 1"),
        ("a.jsonl", b"", "the data has no text"),
        ("a.txt", b"abc\xff", "is not UTF-8 text: invalid start byte at 3"),
        ("a.txt", b"abc\xc3", "is not UTF-8 text: it ends inside a character"),
        ("a.txt", b"a\0b", "holds zero bytes"),
        ("a.txt.gz", gzip.compress(b"x" * 10_000, mtime=0)[:-10], "broken gzip file"),
        ("a.jsonl.gz", b"\x1f\x8b garbage", "broken gzip file"),
    ],
)
def test_files_that_cannot_be_read(
    tokenizer: Tokenizer, tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message) as error:
        read_tokens([tmp_path / name], tokenizer)
    assert "\n" not in str(error.value)


def test_nothing_to_read(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no data; give a file"):
        read_tokens([], tokenizer)
    with pytest.raises(UsageError, match="does not exist"):
        read_tokens([tmp_path / "missing"], tokenizer)
    with pytest.raises(UsageError, match=r"has no data: no file in it ends with .txt, .jsonl"):
        read_tokens([tmp_path], tokenizer)


def test_a_file_of_another_name_is_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("Some words")
    (ids,) = documents(read_tokens([tmp_path / "README.md"], tokenizer).store)
    assert tokenizer.decode(ids) == "Some words"


def test_messages_for_a_model_without_a_template(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"messages": CHAT}])
    with pytest.raises(UsageError, match="line 1 has messages, and the model has no chat template"):
        read_tokens([path], tagged_tokenizer(()))


def test_bytes_without_a_token_are_counted(tmp_path: Path) -> None:
    """The demo's vocabulary lacks a few bytes, which the library drops without a word."""
    tokenizer = demo()
    rows = [{"text": "plain ü 日本 👩"}, {"text": "a\x04\x06b\x04"}]
    data = read_tokens([write_lines(tmp_path / "a.jsonl", [*rows, "{"])], tokenizer)
    texts = [tokenizer.decode(ids) for ids in documents(data.store)]
    lost = sum(len(row["text"].encode()) for row in rows) - len("".join(texts).encode())
    assert data.dropped_bytes == lost > 0
    summary = data.summary()
    assert summary.startswith(f"{data.store.num_tokens} tokens in 2 documents; 1 row quarantined: ")
    assert summary.endswith(f"{lost} bytes dropped: the vocabulary has no token for them")


def test_no_byte_is_missing_elsewhere() -> None:
    for metadata in (byte_level_metadata("gpt-2"), sentencepiece_metadata()):
        assert Tokenizer.from_gguf(metadata).missing_bytes == b""


def test_progress_reaches_its_end(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name * 100)
    calls: list[tuple[str, int, int]] = []
    read_tokens([tmp_path], tokenizer, lambda *call: calls.append(call))
    assert calls == [("tokenizing", 100, 200), ("tokenizing", 200, 200)]
