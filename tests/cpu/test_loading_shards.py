"""Token shards: what was saved is what is read, and a damaged folder is one clear line."""

import json
from pathlib import Path

import numpy as np
import pytest
from test_loading_packing import store_of
from tiny_tokenizers import byte_level_metadata, tagged_tokenizer

from ridgeline.data import Tokenizer
from ridgeline.data.loading import TokenStore, open_shards, read_tokens, save_shards
from ridgeline.data.vocabulary import token_dtype
from ridgeline.errors import OutputError, UsageError


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tagged_tokenizer(())


def contents(store: TokenStore) -> list[object]:
    every = np.arange(store.num_tokens)
    counted = store.counted_at(every)
    return [
        store.tokens_at(every).tolist(),
        store.offsets.tolist(),
        None if counted is None else counted.tolist(),
        [store.origin(number) for number in range(store.num_documents)],
        store.vocab_size,
        store.digest,
    ]


@pytest.mark.parametrize("is_marked", [False, True])
@pytest.mark.parametrize("shard_tokens", [1, 40, 1000])
def test_there_and_back(
    tmp_path: Path, tokenizer: Tokenizer, is_marked: bool, shard_tokens: int
) -> None:
    lengths = [30, 1, 5, 64, 12]
    counted = (np.arange(sum(lengths)) % 2 == 0).tolist() if is_marked else None
    store = store_of(lengths, counted=counted, cuts=2)
    save_shards(store, tmp_path / "tokens", tokenizer, shard_tokens)
    opened = open_shards(tmp_path / "tokens", tokenizer)
    assert contents(opened) == contents(store)
    head = json.loads((tmp_path / "tokens" / "tokens.json").read_text())
    assert head["digest"] == store.digest
    assert sum(shard["documents"] for shard in head["shards"]) == 5
    assert not opened.shards[0].tokens.flags.writeable  # mapped, not read


def test_the_data_of_a_run_can_be_shards(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "a.txt").write_text("Some words of text.")
    data = read_tokens([tmp_path / "a.txt"], tokenizer)
    save_shards(data.store, tmp_path / "tokens", tokenizer)
    assert contents(read_tokens([tmp_path / "tokens"], tokenizer).store) == contents(data.store)
    with pytest.raises(UsageError, match="has token shards; give it alone"):
        read_tokens([tmp_path / "a.txt", tmp_path / "tokens"], tokenizer)


def test_two_bytes_where_they_are_enough() -> None:
    assert [token_dtype(size) for size in (100, 2**16, 2**16 + 1)] == [
        np.uint16,
        np.uint16,
        np.uint32,
    ]


def test_another_tokenizer_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    save_shards(store_of([30]), tmp_path, tokenizer)
    other = Tokenizer.from_gguf(byte_level_metadata("llama-bpe"))
    with pytest.raises(UsageError, match="another tokenizer than the model's"):
        read_tokens([tmp_path], other)
    assert open_shards(tmp_path).num_tokens == 30


def test_damaged_folders(tmp_path: Path, tokenizer: Tokenizer) -> None:
    save_shards(store_of([30, 20]), tmp_path, tokenizer)
    tokens, head = tmp_path / "00000.tokens.npy", tmp_path / "tokens.json"
    whole, text = tokens.read_bytes(), head.read_text()
    for content, message in (
        (whole[:-7], "cut short"),
        (whole[:20], "cut short"),
        (b"", "cut short"),
        (whole.replace(b"(50,)", b"(49,)"), r"its head says \(50,\)"),
    ):
        tokens.write_bytes(content)
        check_refused(tmp_path, message)
    tokens.unlink()
    check_refused(tmp_path, "missing or cut short")
    tokens.write_bytes(whole)
    for wrong, message in (
        (text[:-30], "not the head of token shards"),
        ("[]", "not the head of token shards"),
        (text.replace('"vocab_size"', '"size"'), "'vocab_size' is missing"),
        (text.replace('"version": 1', '"version": 2'), "reads 'ridgeline-tokens' version 1"),
        (text.replace('"tokens": 50', '"tokens": "x"'), "makes no sense"),
    ):
        head.write_text(wrong)
        check_refused(tmp_path, message)
    head.write_text(text)
    np.save(tmp_path / "00000.offsets.npy", np.array([0, 60, 50]))
    check_refused(tmp_path, "offsets of shard 0 do not rise")


def check_refused(folder: Path, message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        open_shards(folder)
    assert "\n" not in str(error.value)


def test_a_writer_that_fails_leaves_no_head(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ridgeline.data.loading.shards.np.save", full)
    with pytest.raises(OutputError, match="No space left"):
        save_shards(store_of([30]), tmp_path, tokenizer)
    assert list(tmp_path.iterdir()) == []
