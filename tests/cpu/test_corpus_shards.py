"""From documents tables to shards to training: the same bytes each time, every document accounted
for, damage seen, and runs that read what was built.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from command_line import make_folder
from test_loading_shards import contents
from tiny_tokenizers import demo
from train_runs import same_bytes, single_thread, trained, words
from written_text import TEXT

from ridgeline.cli import main
from ridgeline.data.corpus.shards import (
    open_token_file,
    read_index,
    write_documents,
    write_index,
    write_tokens,
)
from ridgeline.data.corpus.shards.checking import check_corpus
from ridgeline.data.loading import Loader, read_tokens
from ridgeline.data.loading.corpora import open_corpus, open_mixture
from ridgeline.data.loading.explaining import explain_batch
from ridgeline.data.loading.order import DataState
from ridgeline.data.loading.split import split_data
from ridgeline.data.tokenizer import Tokenizer
from ridgeline.errors import CorpusError

SCHEMA = pyarrow.schema(
    [
        ("id", pyarrow.binary(16)),
        ("file", pyarrow.string()),
        ("offset", pyarrow.int64()),
        ("verdict", pyarrow.string()),
        ("language", pyarrow.string()),
        ("text", pyarrow.large_string()),
    ]
)
PARAGRAPHS = [text for text in TEXT[:90_000].split("\n\n") if text.strip()]
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"), tie_word_embeddings=True)


def digest_of(model: Path) -> str:
    return Tokenizer.load(model).digest


def table_of(path: Path, texts: list[str], file: str = "book.txt", dropped: int = 7) -> Path:
    """Every `dropped`-th document is too short; the others are kept."""
    rows, place = [], 0
    for number, text in enumerate(texts):
        is_kept = number % dropped != 0
        rows.append(
            {
                "id": hashlib.sha256(f"{file} {place}".encode()).digest()[:16],
                "file": file,
                "offset": place,
                "verdict": "" if is_kept else "too_short",
                "language": "en",
                "text": text if is_kept else None,
            }
        )
        place += len(text.encode()) + 2
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, SCHEMA), path)
    return path


def removal(path: Path, table: Path, rows: list[int]) -> Path:
    ids = pyarrow.parquet.read_table(table, columns=["id"]).column("id")
    pyarrow.parquet.write_table(pyarrow.table({"id": ids.take(pyarrow.array(rows))}), path)
    return path


def build(
    folder: Path, model: Path, texts: list[str], units: int = 2, file: str = "book.txt"
) -> Path:
    """A corpus of several units, without near duplicates."""
    folder.mkdir()
    work = folder.parent / f"{folder.name}-work"
    work.mkdir()
    cuts = np.linspace(0, len(texts), units + 1).astype(int).tolist()
    for number in range(units):
        own = texts[cuts[number] : cuts[number + 1]]
        table = table_of(work / f"{number}.parquet", own, f"{number}-{file}")
        tokens = folder / f"tokens-{number:05d}.arrow"
        write_tokens(tokens, [table], tokenizer=str(model), digest=digest_of(model))
        write_documents(folder / f"documents-{number:05d}.parquet", [table, tokens])
    write_index(folder, {"recipe": {"tokens": {"tokenizer": str(model)}}})
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    return build(tmp_path_factory.mktemp("corpora") / "corpus", model, PARAGRAPHS)


def test_the_same_bytes_each_time(tmp_path: Path, model: Path, corpus: Path) -> None:
    again = build(tmp_path / "again", model, PARAGRAPHS)
    names = sorted(path.name for path in corpus.iterdir())
    assert names == sorted(path.name for path in again.iterdir())
    for name in names:
        assert (again / name).read_bytes() == (corpus / name).read_bytes(), name


def test_the_tokens_are_those_of_training(tmp_path: Path, model: Path, corpus: Path) -> None:
    """What a corpus holds is what training makes of the same texts as JSON lines."""
    tokenizer = Tokenizer.load(model)
    half = len(PARAGRAPHS) // 2
    kept = [text for part in (PARAGRAPHS[:half], PARAGRAPHS[half:]) for text in _kept(part)]
    lines = tmp_path / "kept.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in kept))
    own, usual = read_tokens([corpus], tokenizer).store, read_tokens([lines], tokenizer).store
    assert contents(own)[:3] == contents(usual)[:3]
    assert not own.shards[0].tokens.flags.writeable  # mapped, not read
    place = PARAGRAPHS[0].encode(), own.origin(0)
    assert str(place[1]) == f"0-book.txt byte {len(place[0]) + 2}"


def _kept(texts: list[str]) -> list[str]:
    return [text for number, text in enumerate(texts) if number % 7]


def test_removals_are_verdicts(tmp_path: Path, model: Path) -> None:
    """The first file that names a document gives its verdict; those dropped before keep theirs."""
    table = table_of(tmp_path / "table.parquet", PARAGRAPHS[:30])
    near = removal(tmp_path / "near.parquet", table, [0, 3, 5])
    eval_sets = removal(tmp_path / "sets.parquet", table, [5, 29])
    inputs, names = [table, near, eval_sets], ["near_duplicate", "contaminated"]
    tokens, documents = tmp_path / "tokens-00000.arrow", tmp_path / "documents-00000.parquet"
    digest = digest_of(model)
    notes = write_tokens(tokens, inputs, tokenizer=str(model), digest=digest, verdicts=names)
    counts = write_documents(documents, [*inputs, tokens], verdicts=names)["verdicts"]
    assert counts == {"": 22, "contaminated": 1, "near_duplicate": 2, "too_short": 5}
    rows = pyarrow.parquet.read_table(documents).to_pylist()
    assert [rows[n]["verdict"] for n in (0, 3, 5, 29)] == [
        "too_short", "near_duplicate", "near_duplicate", "contaminated",
    ]  # fmt: skip
    assert "text" not in rows[0]
    file, tokenizer = open_token_file(tokens), Tokenizer.load(model)
    assert notes["texts"] == len(file.places) == 22
    for row, text in zip(rows, PARAGRAPHS, strict=False):
        if row["verdict"]:
            assert row["first_token"] is row["num_tokens"] is None
        else:
            own = file.ids[row["first_token"] :][: row["num_tokens"]].tolist()
            assert tokenizer.decode(own) == text
    write_index(tmp_path, {})
    check = check_corpus(tmp_path)
    assert check.problems == ()
    assert check.verdicts == counts


def test_a_unit_of_which_nothing_is_left(tmp_path: Path, model: Path) -> None:
    table = table_of(tmp_path / "table.parquet", PARAGRAPHS[:5], dropped=1)
    tokens = tmp_path / "tokens-00000.arrow"
    write_tokens(tokens, [table], tokenizer=str(model), digest=digest_of(model))
    write_documents(tmp_path / "documents-00000.parquet", [table, tokens])
    assert write_index(tmp_path, {}).num_tokens == 0
    assert check_corpus(tmp_path).problems == ()
    with pytest.raises(ValueError, match="every document was dropped"):
        open_corpus(tmp_path)


@pytest.mark.parametrize("kind", ["tokens-00001.arrow", "documents-00000.parquet"])
def test_every_damage_is_seen(tmp_path: Path, corpus: Path, kind: str) -> None:
    draw = np.random.default_rng(5)
    whole = (corpus / kind).read_bytes()
    for place in draw.integers(0, len(whole), 12).tolist():
        copy = shutil.copytree(corpus, tmp_path / str(place), dirs_exist_ok=True)
        (copy / kind).write_bytes(
            whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :]
        )
        assert any(kind in problem for problem in check_corpus(copy).problems), place
        (copy / kind).write_bytes(whole[:place])
        assert any(kind in problem for problem in check_corpus(copy).problems), place
        (copy / kind).unlink()
        assert any("cannot read" in problem for problem in check_corpus(copy).problems)


def test_a_table_of_other_documents_is_seen(tmp_path: Path, corpus: Path) -> None:
    """Even where the index was written of it."""
    copy = shutil.copytree(corpus, tmp_path / "copy")
    shutil.copy(copy / "documents-00001.parquet", copy / "documents-00000.parquet")
    write_index(copy, {})
    assert any("does not describe" in problem for problem in check_corpus(copy).problems)


def test_another_tokenizer_is_refused(tmp_path: Path, corpus: Path, model: Path) -> None:
    with pytest.raises(ValueError, match="another tokenizer"):
        open_corpus(corpus, demo())
    table = table_of(tmp_path / "table.parquet", PARAGRAPHS[:5])
    with pytest.raises(CorpusError, match="changed while"):
        write_tokens(tmp_path / "out", [table], tokenizer=str(model), digest="0")


def test_the_index_says_what_is_wrong(tmp_path: Path, corpus: Path) -> None:
    copy = shutil.copytree(corpus, tmp_path / "copy")
    good = json.loads((copy / "index.json").read_text())
    for wrong in (
        {},
        good | {"version": 2},
        good | {"shards": [{"x": 1}]},
        [1],
        good | {"format": 1},
    ):
        (copy / "index.json").write_text(json.dumps(wrong))
        with pytest.raises(CorpusError, match=r"index\.json"):
            read_index(copy)


# Through the command line


def run(capsys: Capture, *argv: str, code: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*argv, "--json"]) == code
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_training_from_a_corpus_goes_on_with_the_same_samples(
    tmp_path: Path, model: Path, corpus: Path, capsys: Capture
) -> None:
    with single_thread():
        trained(capsys, *words(model, corpus, tmp_path / "whole", "--steps", "4"))
        trained(capsys, *words(model, corpus, tmp_path / "cut", "--steps", "2"))
        trained(capsys, *words(model, corpus, tmp_path / "cut", "--steps", "4", "--resume"))
    last = "checkpoints/step-00000004"
    same_bytes(tmp_path / "whole" / last, tmp_path / "cut" / last)


def test_check(tmp_path: Path, corpus: Path, capsys: Capture) -> None:
    document = run(capsys, "data", "check", str(corpus))
    assert document["problems"] == []
    assert sum(document["verdicts"].values()) == len(PARAGRAPHS)
    assert main(["data", "check", str(corpus)]) == 0
    assert "sound" in capsys.readouterr().out
    copy = shutil.copytree(corpus, tmp_path / "copy")
    with (copy / "tokens-00000.arrow").open("r+b") as file:
        file.seek(2000)
        file.write(b"\xff\xff")
    run(capsys, "data", "check", str(copy), code=13)
    assert main(["data", "check", str(tmp_path)]) == 18
    assert "build the corpus first" in capsys.readouterr().err


def test_explain_there_and_back(corpus: Path, model: Path, capsys: Capture) -> None:
    """A batch's pieces read as the texts do at the bytes named, and their documents' steps name the
    batch.
    """
    order = ["--sequence-length", "64", "--sequences", "3", "--seed", "9"]
    tokenizer = Tokenizer.load(model)
    document = run(capsys, "data", "explain", str(corpus), "--batch", "5", *order)
    assert sum(piece["num_tokens"] for piece in document["pieces"]) == 3 * 64
    texts = {}
    half = len(PARAGRAPHS) // 2
    for unit, part in enumerate((PARAGRAPHS[:half], PARAGRAPHS[half:])):
        place = 0
        for text in part:
            texts[f"{unit}-book.txt", place] = text.encode()
            place += len(text.encode()) + 2
    for piece in document["pieces"]:
        text = texts[piece["file"], piece["place"]]
        part = text[piece["first_byte"] :][: piece["num_bytes"]].decode(errors="replace")
        ids = tokenizer.encode_many([text.decode()])[0][piece["first_token"] :]
        assert part == tokenizer.decode(ids[: piece["num_tokens"]])
        assert part.startswith(piece["begins"][:8])
        back = run(
            capsys, "data", "explain", str(corpus), "--file", piece["file"],
            "--byte", str(piece["place"] + 1), *order,
        )  # fmt: skip
        assert back["document"]["place"] == piece["place"]
        assert 5 in back["document"]["steps"]
    dropped = run(capsys, "data", "explain", str(corpus), "--file", "1-book.txt", *order)
    assert dropped["document"]["verdict"] == "too_short"


def test_explained_batches_are_the_loader_s(corpus: Path) -> None:
    store = open_corpus(corpus)
    windows = split_data(store, sequence_length=32, vocab_size=store.vocab_size, held_out=0.1).train
    with Loader(windows, DataState(seed=4), sequences=3) as loader:
        for step in range(1, 6):
            batch = next(loader)
            pieces = explain_batch(windows, seed=4, step=step, sequences=3)
            lengths = [length for length in batch.lengths if length]
            assert [piece.num_tokens for piece in pieces] == lengths


def test_a_mixture_from_the_command_line(
    tmp_path: Path, model: Path, corpus: Path, capsys: Capture
) -> None:
    other = build(tmp_path / "other", model, PARAGRAPHS[:40], units=1, file="other.txt")
    mix = tmp_path / "mix"
    given = [f"{corpus}:0.7", f"{other}:0.3"]
    document = run(capsys, "data", "mix", *given, "--out", str(mix), "--skip", "6-8")
    assert [entry["samples_in_period"] for entry in document["corpora"]] == [7, 3]
    store = open_mixture(mix, Tokenizer.load(model))
    windows = split_data(store, sequence_length=32, vocab_size=store.vocab_size).train
    files = [
        {store.origin(store.document_of(first)).file for first in windows.pieces(one).first}
        for one in windows.order(3).samples(0, 97).reshape(-1, 1)
    ]
    is_other = [all("other" in name for name in names) for names in files]
    assert all(len({"other" in name for name in names}) == 1 for names in files)
    unskipped = [*is_other[:6], *[None] * 3, *is_other[6:]]
    quota = np.cumsum([bool(each) for each in unskipped])
    assert abs(quota[-1] - 0.3 * 100) <= 3  # what was left out counts for either
    usual = words(model, mix, tmp_path / "run", "--steps", "2")
    assert trained(capsys, *usual)["steps"] == 2
    explained = run(
        capsys, "data", "explain", str(mix), "--batch", "2", "--run", str(tmp_path / "run")
    )
    assert explained["run"]["sequence_length"] == 32


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["check", "nothing"], 18, "build the corpus first"),
        (["explain", "nothing", "--batch", "1"], 2, "is no corpus"),
        (["explain", "CORPUS"], 2, "give --batch N, or --file"),
        (["explain", "CORPUS", "--batch", "0"], 2, "numbered from 1 on"),
        (["explain", "CORPUS", "--file", "none.txt"], 2, "has no document of 'none.txt'"),
        (["mix", "CORPUS", "--out", "m"], 2, "has no weight"),
        (["mix", "CORPUS:0", "--out", "m"], 2, "no positive number"),
        (["mix", "nothing:1", "--out", "m"], 2, "no built corpus"),
        (["mix", "CORPUS:0.1234567", "CORPUS:1", "--out", "m"], 2, "fewer digits"),
        (["mix", "CORPUS:1", "--skip", "5-2", "--out", "m"], 2, "give ranges of samples"),
        (["mix", "CORPUS:1", "--skip", "1-5", "5-9", "--out", "m"], 2, "overlap at sample 5"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path, corpus: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch,
    argv: list[str], code: int, message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    given = [word.replace("CORPUS", str(corpus)) for word in argv]
    assert main(["data", *given]) == code
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
