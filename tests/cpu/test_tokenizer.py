"""Token ids against independent definitions: pipelines built here by hand, transformers' classes,
and sentencepiece's algorithm written out naively."""

import json
import logging
import time
from inspect import signature
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import (
    TRAPS,
    byte_level_json,
    byte_level_metadata,
    byte_level_tokens,
    demo,
    sentencepiece_metadata,
    sentencepiece_pieces,
)
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from transformers import (
    AutoTokenizer,
    CohereTokenizer,
    GPT2Tokenizer,
    GPTNeoXTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
)
from transformers.convert_slow_tokenizer import TikTokenConverter
from written_text import TEXT
from yardstick import slowness

from ridgeline.data import Tokenizer
from ridgeline.data.pre_tokenizers import KNOWN_NAMES, split_rule
from ridgeline.errors import ConfigError, ModelNotFoundError, UnsupportedError, UsageError
from ridgeline.models.checkpoint import open_checkpoint, resolve_model

PARAGRAPHS = [*TEXT[:150_000].split("\n\n"), *TRAPS]


# The demo: every digit by itself, then GPT-2's words


@pytest.mark.smoke
def test_the_demo_splits_as_its_file_says() -> None:
    tokenizer = demo()
    backend = tokenizer._vocabulary.backend
    rule = tokenizers.Tokenizer(backend.model)
    rule.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    for text in PARAGRAPHS:
        assert tokenizer.encode(text) == rule.encode(text).ids
    assert tokenizer.encode("12") == tokenizer.encode("1") + tokenizer.encode("2")


@pytest.mark.smoke
def test_the_demo_s_special_tokens() -> None:
    tokenizer = demo()
    assert tokenizer.vocab_size == 49152
    assert (tokenizer.bos_id, tokenizer.add_bos) == (1, False)
    assert tokenizer.eos_ids == (2, 0)  # <|im_end|> by its metadata, <|endoftext|> as a known end
    assert tokenizer.encode("<|im_end|>") == [2]


@pytest.mark.slow
def test_the_demo_loads_quickly() -> None:
    demo()  # skips where the model is not to be had
    metadata = open_checkpoint(resolve_model("demo")).metadata
    seconds = []
    for _ in range(3):
        slow, start = slowness(), time.perf_counter()
        Tokenizer.from_gguf(metadata)
        seconds.append((time.perf_counter() - start) / slow)
    assert min(seconds) < 0.5


def test_a_chat_of_the_demo() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    expected = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert demo().chat_text(messages) == expected
    ids = demo().chat(messages)
    assert ids[0] == 1
    assert ids.count(1) == 3
    assert demo().decode(ids, skip_special_tokens=False) == expected


# Byte-level vocabularies of GGUF files

LLAMA3_REGEX = signature(TikTokenConverter).parameters["pattern"].default


def reference(pre: str) -> Any:
    """The same vocabulary in the tokenizer that transformers builds for the model family."""
    ids, lines = byte_level_tokens()
    merges = [tuple(line.split(" ")) for line in lines]
    classes = {
        "gpt-2": GPT2Tokenizer,
        "olmo": GPTNeoXTokenizer,
        "command-r": CohereTokenizer,
        "qwen2": Qwen2Tokenizer,
    }
    if pre in classes:
        return classes[pre](vocab=ids, merges=merges)._tokenizer
    backend = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_REGEX), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return backend


@pytest.mark.parametrize("pre", ["gpt-2", "olmo", "command-r", "qwen2", "llama-bpe"])
def test_ids_equal_those_of_the_model_s_own_tokenizer(pre: str) -> None:
    tokenizer, expected = Tokenizer.from_gguf(byte_level_metadata(pre)), reference(pre)
    for text in PARAGRAPHS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == expected.encode(text, add_special_tokens=False).ids, text[:80]


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "it's 1234  x\n\n", ["it", "'s", " 1234", " ", " x", "\n\n"]),
        ("default", "a1234-b", ["a", "123", "4", "-", "b"]),
        ("smollm", "a  12", ["a", "  ", "1", "2"]),
        ("llama-bpe", "it'S 1234.\n\nx", ["it", "'S", " ", "123", "4", ".\n\n", "x"]),
        ("qwen2", "a 12", ["a", " ", "1", "2"]),
        ("qwen35", "क्षि12", ["क्षि", "1", "2"]),
        ("tekken", "HelloWorld's 12", ["Hello", "World", "'s", " ", "1", "2"]),
        ("gpt-4o", "HelloWorld's 1234", ["Hello", "World's", " ", "123", "4"]),
        ("deepseek-v3", "日本go 1234!", ["日本", "go", " ", "123", "4", "!"]),
        ("falcon", "a,b 1234", ["a", ",", "b", " ", "123", "4"]),
    ],
)
def test_words(pre: str, text: str, pieces: list[str]) -> None:
    split = split_rule(pre).pre_tokenizer().pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in split] == pieces


@pytest.mark.parametrize("pre", KNOWN_NAMES)
def test_no_rule_loses_text(pre: str) -> None:
    pre_tokenizer = split_rule(pre).pre_tokenizer()
    for text in TRAPS:
        spans = [span for _, span in pre_tokenizer.pre_tokenize_str(text)]
        assert "".join(text[start:end] for start, end in spans) == text


@pytest.mark.parametrize("pre", ["smollm", "llama-bpe", "tekken", "gpt-4o", "deepseek-v3"])
def test_byte_level_text_comes_back(pre: str) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(pre))

    @settings(max_examples=100, deadline=None)
    @given(st.text())
    def round_trip(text: str) -> None:
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        assert tokenizer.decode(ids) == text

    round_trip()


@pytest.mark.parametrize(("pre", "ids"), [("llama-bpe", [2]), ("tekken", [2]), ("dbrx", [0, 1])])
def test_some_rules_take_a_word_that_is_a_token_whole(pre: str, ids: list[int]) -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": ["a", "b", "ab"],
        "tokenizer.ggml.merges": [],
    }
    assert Tokenizer.from_gguf(metadata).encode("ab") == ids


def test_an_unknown_rule_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        UnsupportedError, match=r"'qwen9'.*did you mean 'qwen2'.*supported: .*smollm"
    ):
        Tokenizer.from_gguf(byte_level_metadata("qwen9"))


def test_a_missing_rule_is_said_aloud(caplog: pytest.LogCaptureFixture) -> None:
    metadata = byte_level_metadata("default")
    del metadata["tokenizer.ggml.pre"]
    with caplog.at_level(logging.WARNING):
        tokenizer = Tokenizer.from_gguf(metadata)
    assert "tokenizer.ggml.pre is missing" in caplog.text
    expected = Tokenizer.from_gguf(byte_level_metadata("default")).encode("a1234-b")
    assert tokenizer.encode("a1234-b") == expected


# Sentencepiece vocabularies of GGUF files


def naive_sentencepiece(text: str, *, prefix: bool) -> list[int]:
    """Join the neighbours whose union scores best, leftmost first, until none is a piece."""
    ranks = {piece: rank for rank, piece in enumerate(sentencepiece_pieces())}
    symbols = list((" " * prefix + text).replace(" ", "▁")) if text else []
    while True:
        unions = [left + right for left, right in pairwise(symbols)]
        known = [(ranks[union], at) for at, union in enumerate(unions) if union in ranks]
        if not known:
            break
        at = min(known)[1]
        symbols[at : at + 2] = [unions[at]]
    ids: list[int] = []
    for symbol in symbols:
        ids += [261 + ranks[symbol]] if symbol in ranks else [5 + byte for byte in symbol.encode()]
    return ids


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_ids(prefix: bool) -> None:
    metadata = sentencepiece_metadata(**{"tokenizer.ggml.add_space_prefix": prefix})
    tokenizer = Tokenizer.from_gguf(metadata)
    for text in [*TEXT[:40_000].split("\n\n"), *TRAPS]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == naive_sentencepiece(text, prefix=prefix)
        if "▁" not in text:
            assert tokenizer.decode(ids) == text


def test_sentencepiece_special_tokens() -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata())
    assert (tokenizer.bos_id, tokenizer.add_bos) == (1, True)
    assert tokenizer.eos_ids == (2, 4)  # <end_of_turn> is a control token that ends a turn
    first = tokenizer.encode("ab")
    assert first[0] == 1
    assert tokenizer.encode("<s>ab") == first
    assert 3 in tokenizer.encode("x<table>y", parse_special=False)  # user-defined, not control
    plain = tokenizer.encode("<s>ab</s>", parse_special=False)
    assert plain[0] == 1
    assert not {1, 2} & set(plain[1:])
    assert tokenizer.decode(plain) == "<s>ab</s>"


def test_text_never_merges_into_a_control_token() -> None:
    metadata = sentencepiece_metadata(**{"tokenizer.ggml.add_space_prefix": False})
    metadata["tokenizer.ggml.tokens"] += ["s>", "</"]
    metadata["tokenizer.ggml.token_type"] += [1, 1]
    metadata["tokenizer.ggml.scores"] += [-1e4, -1e5]
    tokenizer = Tokenizer.from_gguf(metadata)
    for text in ("<s>", "</s>"):
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        assert len(ids) == 2
        assert not {1, 2} & set(ids)


def test_phi_3_drops_spaces_after_special_tokens() -> None:
    plain = Tokenizer.from_gguf(sentencepiece_metadata())
    phi = Tokenizer.from_gguf(sentencepiece_metadata(**{"general.name": "Phi-3 mini"}))
    assert phi.encode("a<end_of_turn>\n b") == plain.encode("a<end_of_turn>b")
    assert phi.encode("<s> b") == plain.encode("<s> b")


def test_equal_scores_are_refused_or_replaced_by_merges() -> None:
    metadata = sentencepiece_metadata()
    metadata["tokenizer.ggml.scores"] = [-1000.0] * len(metadata["tokenizer.ggml.scores"])
    with pytest.raises(UnsupportedError, match="same score"):
        Tokenizer.from_gguf(metadata)
    metadata["tokenizer.ggml.merges"] = ["t h", "th e"]
    ids = Tokenizer.from_gguf(metadata).encode("the", add_special_tokens=False)
    assert ids[-1] == metadata["tokenizer.ggml.tokens"].index("the")


# What a file can get wrong


@pytest.mark.parametrize(
    ("key", "value", "error", "words"),
    [
        ("model", "bert", UnsupportedError, "'bert'"),
        ("model", None, ConfigError, "no tokenizer"),
        ("tokens", None, ConfigError, r"tokenizer\.ggml\.tokens"),
        ("tokens", ["a", "a"], ConfigError, "'a' twice"),
        ("token_type", [1], ConfigError, "1 entries for 1500"),
        ("merges", None, ConfigError, "merges"),
        ("merges", ["ab"], ConfigError, "'ab', which is not a pair"),
        ("merges", ["zq qz"], ConfigError, "'zq' and 'qz'"),
        ("eos_token_id", 1500, ConfigError, "is 1500, but there are 1500"),
    ],
)
def test_broken_metadata(key: str, value: object, error: type[Exception], words: str) -> None:
    metadata = byte_level_metadata("gpt-2", **{f"tokenizer.ggml.{key}": value})
    with pytest.raises(error, match=words):
        Tokenizer.from_gguf(metadata)


def test_text_that_is_no_text() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata("gpt-2"))
    with pytest.raises(UsageError, match="surrogate"):
        tokenizer.encode("\ud800")
    with pytest.raises(UsageError, match="bytes"):
        tokenizer.encode(b"x")  # type: ignore[arg-type]


# BOS and EOS


def test_bos_is_never_doubled() -> None:
    metadata = byte_level_metadata(
        "llama-bpe",
        **{"tokenizer.ggml.bos_token_id": 1, "tokenizer.chat_template": "{{ bos_token }}hi"},
    )
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.add_bos  # the rule's default, where the file does not say
    bare = tokenizer.encode("hi", add_special_tokens=False)
    assert tokenizer.encode("hi") == [1, *bare]
    assert tokenizer.encode("<|im_start|>hi") == [1, *bare]
    assert tokenizer.encode("") == [1]
    assert tokenizer.chat([{"role": "user", "content": ""}]) == [1, *bare]
    plain = tokenizer.encode("<|im_start|>hi", parse_special=False)
    assert plain[0] == 1
    assert 1 not in plain[1:]


def test_eos_is_added_where_the_file_asks() -> None:
    tokenizer = Tokenizer.from_gguf(
        byte_level_metadata("gpt-2", **{"tokenizer.ggml.add_eos_token": True})
    )
    bare = tokenizer.encode("hi", add_special_tokens=False)
    assert tokenizer.encode("hi") == [*bare, 0]
    assert tokenizer.encode("hi<|endoftext|>") == [*bare, 0]


def test_end_tokens_of_a_gguf() -> None:
    tokens = ["<|return|>", "<|call|>", "<|end|>", "a", "</s>"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-4o",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3, 1, 1],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.eot_token_id": 3,
    }
    # <|end|> closes one of several messages there, and a normal token that reads </s> ends nothing
    assert Tokenizer.from_gguf(metadata).eos_ids == (0, 3, 1)


# Hugging Face folders


def write_folder(folder: Path, *, bos: str | None = None, **files: object) -> Path:
    byte_level_json(bos=bos).save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def test_a_folder_gives_the_ids_transformers_gives(tmp_path: Path) -> None:
    eos = {"__type": "AddedToken", "content": "<|endoftext|>", "special": True}
    config = {"bos_token": "<|im_start|>", "eos_token": eos}
    write_folder(tmp_path, bos="<|im_start|>", tokenizer_config=config)
    tokenizer = Tokenizer.load(tmp_path)
    peer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert tokenizer.add_bos
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, (0,))
    for text in PARAGRAPHS:
        ids = tokenizer.encode(text)
        assert ids == peer.encode(text)
        assert tokenizer.decode(ids) == peer.decode(ids, skip_special_tokens=True)
    assert tokenizer.encode("<|im_start|>x") == tokenizer.encode("x")


def test_a_sentencepiece_folder(tmp_path: Path) -> None:
    source = Tokenizer.from_gguf(sentencepiece_metadata())
    source._vocabulary.backend.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.load(tmp_path)
    for text in TRAPS:
        assert tokenizer.encode(text) == source.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == source.decode(source.encode(text))


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [2, 7]}, {"eos_token_id": 9}, (0, 2, 7, 9)),
        ({"eos_token_id": 2}, {}, (0, 2)),
        ({}, {"text_config": {"eos_token_id": [5]}}, (0, 5)),
        ({"eos_token_id": None}, {"eos_token_id": None}, (0,)),
    ],
)
def test_end_tokens_of_a_folder(
    tmp_path: Path, generation: object, config: object, expected: tuple[int, ...]
) -> None:
    write_folder(
        tmp_path,
        tokenizer_config={"eos_token": "<|endoftext|>"},
        generation_config=generation,
        config=config,
    )
    assert Tokenizer.load(tmp_path).eos_ids == expected


def test_a_template_s_turn_end_is_an_end(tmp_path: Path) -> None:
    config = {"eos_token": "<|endoftext|>", "chat_template": "{{ messages[0].content }}<|im_end|>"}
    assert Tokenizer.load(write_folder(tmp_path, tokenizer_config=config)).eos_ids == (0, 2)


def test_the_flag_in_tokenizer_config_wins(tmp_path: Path) -> None:
    config = {"bos_token": "<|im_start|>", "add_bos_token": False}
    tokenizer = Tokenizer.load(write_folder(tmp_path, bos="<|im_start|>", tokenizer_config=config))
    assert not tokenizer.add_bos
    assert 1 not in tokenizer.encode("hi")


def test_truncation_and_padding_saved_in_the_file_are_undone(tmp_path: Path) -> None:
    backend = byte_level_json()
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    ids = Tokenizer.load(tmp_path).encode("one two three four five six seven eight nine ten")
    assert len(ids) > 8


def test_which_template_is_used(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "tools"}]
    write_folder(tmp_path, tokenizer_config={"chat_template": named})
    messages = [{"role": "user", "content": "x"}]
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.chat_template == "one"
    assert tokenizer.chat_text(messages) == "one"
    assert tokenizer.chat_text(messages, tools=[{"type": "function"}]) == "tools"
    (tmp_path / "chat_template.jinja").write_text("two")
    assert Tokenizer.load(tmp_path).chat_text(messages) == "two"
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == "two"


def test_templates_that_cannot_be_read(tmp_path: Path) -> None:
    write_folder(tmp_path, tokenizer_config={"chat_template": [{"name": "default"}]})
    with pytest.raises(
        ConfigError, match=r"tokenizer_config\.json has a chat_template of type list"
    ):
        Tokenizer.load(tmp_path)
    write_folder(tmp_path, tokenizer_config={})
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja"):
        Tokenizer.load(tmp_path)


def test_named_special_tokens_are_special(tmp_path: Path) -> None:
    ids, lines = byte_level_tokens()
    backend = byte_level_json()
    pairs = [tuple(line.split(" ")) for line in lines]
    bare = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=pairs))
    bare.pre_tokenizer, bare.decoder = backend.pre_tokenizer, backend.decoder
    bare.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<|im_end|>"}')
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.eos_ids == (2,)
    assert tokenizer.encode("<|im_end|>") == [2]
    assert tokenizer.decode([2]) == ""


def test_a_model_without_a_template(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no chat template"):
        Tokenizer.load(write_folder(tmp_path)).chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    "name", ["tokenizer", "tokenizer_config", "generation_config", "special_tokens_map", "config"]
)
def test_a_corrupt_file_is_named(tmp_path: Path, name: str) -> None:
    write_folder(tmp_path)
    (tmp_path / f"{name}.json").write_text('{"eos_token": ')
    with pytest.raises(ConfigError, match=rf"{name}\.json"):
        Tokenizer.load(tmp_path)


def test_a_wrong_end_token_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path, generation_config={"eos_token_id": "</s>"})
    with pytest.raises(ConfigError, match=r"generation_config\.json has eos_token_id '</s>'"):
        Tokenizer.load(tmp_path)


def test_folders_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no tokenizer: tokenizer\.json is missing"):
        Tokenizer.load(tmp_path)
    with pytest.raises(ModelNotFoundError, match="neither"):
        Tokenizer.load(tmp_path / "absent")
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(UnsupportedError, match="save_pretrained"):
        Tokenizer.load(tmp_path)


def test_a_decoder_that_is_not_understood(tmp_path: Path) -> None:
    backend = byte_level_json()
    backend.decoder = decoders.WordPiece()
    backend.normalizer = normalizers.NFC()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UnsupportedError, match="WordPiece"):
        Tokenizer.load(tmp_path)
