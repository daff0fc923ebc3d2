"""Documents that repeat evaluation sets: which are found, what is said of them, what is refused."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import Named, digest, vocabulary, write_table

from ridgeline.cli import main
from ridgeline.data.corpus.decontamination import (
    DecontaminationOptions,
    decontaminate,
    evaluation_task,
    grams,
)
from ridgeline.data.corpus.ledger.task import perform
from ridgeline.errors import UsageError

OPTIONS = DecontaminationOptions()
WORDS = vocabulary(random.Random(0), 400)
QUESTION = " ".join(WORDS[:20])


def write_lines(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"question": text, "label": 3}) + "\n" for text in texts))
    return path


def contaminated(
    folder: Path, documents: list[Named], sets: dict[str, Path], options: Any = OPTIONS
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    task, name = evaluation_task({each: str(path) for each, path in sets.items()})
    perform(folder, task, "")
    write_table(folder / "table.parquet", documents)
    counts = decontaminate(
        folder / "out.parquet", [folder / "table.parquet", folder / name], options=options
    )
    names = {digest(place): place for place, _ in documents}
    rows = pq.read_table(folder / "out.parquet").to_pylist()
    assert rows == sorted(rows, key=lambda row: row["id"])
    return {names[row.pop("id")]: row for row in rows}, counts


def within(text: str, seed: int = 1) -> str:
    """With as many other words before and behind it."""
    generator = random.Random(seed)
    return " ".join([*generator.choices(WORDS, k=50), text, *generator.choices(WORDS, k=50)])


def test_the_verdict_says_which_set_which_row_and_which_words(tmp_path: Path) -> None:
    sets = {
        "quiz": write_lines(tmp_path / "quiz.jsonl", ["another one", QUESTION]),
        "other": write_lines(tmp_path / "other.jsonl", [" ".join(WORDS[100:130])]),
    }
    documents = [
        ("clean", within("nothing of it")),
        ("whole", within(QUESTION)),
        ("shouted", within(QUESTION.upper().replace(" ", ",\n"))),
        ("part", within(" ".join(WORDS[4:17]))),
        ("too little", within(" ".join(WORDS[4:16]))),
        ("two", within(" ".join(WORDS[110:125])) + QUESTION),
    ]
    rows, counts = contaminated(tmp_path, documents, sets)
    assert set(rows) == {"whole", "shouted", "part", "two"}
    first = " ".join(WORDS[:13])
    assert rows["whole"] == rows["shouted"] == {"set": "quiz", "row": 2, "ngram": first}
    assert rows["part"]["ngram"] == " ".join(WORDS[4:17])
    assert (rows["two"]["set"], rows["two"]["row"]) == ("other", 1), "the first of a document"
    assert counts["contaminated"] == 4
    assert counts["contaminated_by_set"] == {"other": 1, "quiz": 3}
    assert counts["texts_too_short"] == 1


@pytest.mark.parametrize("length", [7, 8, 10, 12, 13])
def test_short_texts_are_looked_for_whole(length: int, tmp_path: Path) -> None:
    text, longer = " ".join(WORDS[:length]), " ".join(WORDS[:30])
    sets = {"quiz": write_lines(tmp_path / "quiz.jsonl", [text, " ".join(WORDS[:8]) + " x y"])}
    documents = [
        ("whole", within(text)),
        ("alone", text),
        ("but its last word", within(" ".join(WORDS[: length - 1]))),
        ("within a longer one", within(longer)),
    ]
    rows, _ = contaminated(tmp_path, documents, sets)
    expected = {"whole", "alone", "within a longer one"} if length >= OPTIONS.least else set()
    assert set(rows) == expected
    assert {row["ngram"] for row in rows.values()} <= {text}


def test_every_text_of_a_row_counts_in_each_kind_of_file(tmp_path: Path) -> None:
    texts = [" ".join(WORDS[20 * n : 20 * n + 15]) for n in range(6)]
    nested = [{"q": texts[0], "choices": {"text": [texts[1]]}}, {"answer": [{"a": texts[2]}]}]
    lines = "".join(json.dumps(row) + "\n" for row in nested)
    with gzip.open(tmp_path / "nested.jsonl.gz", "wt") as file:
        file.write(lines)
    pq.write_table(
        pa.table({"question": [texts[3], texts[4]], "options": [[texts[5]], []]}),
        tmp_path / "table.parquet.eval",
    )
    sets = {"nested": tmp_path / "nested.jsonl.gz", "table": tmp_path / "table.parquet.eval"}
    documents = [(f"{n}", within(text, n)) for n, text in enumerate(texts)]
    rows, _ = contaminated(tmp_path, documents, sets)
    assert {name: (row["set"], row["row"]) for name, row in rows.items()} == {
        "0": ("nested", 1), "1": ("nested", 1), "2": ("nested", 2),
        "3": ("table", 1), "4": ("table", 2), "5": ("table", 1),
    }  # fmt: skip


def test_scripts_without_spaces_are_compared_by_characters(tmp_path: Path) -> None:
    question = "日本の首都はどこですか、答えを選んでください"
    sets = {"quiz": write_lines(tmp_path / "quiz.jsonl", [question])}
    documents = [("with", "はじめに。" + question + "おわり"), ("without", "日本の首都は東京です")]
    rows, _ = contaminated(tmp_path, documents, sets)
    assert set(rows) == {"with"}


def test_runs_of_one_hash_are_told_apart_by_their_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every place of every document taken for a hit: only true ones are told."""
    monkeypatch.setattr(grams.Runs, "places", lambda self, hashes: np.arange(len(hashes)))
    sets = {"quiz": write_lines(tmp_path / "quiz.jsonl", [QUESTION, " ".join(WORDS[50:60])])}
    rows, _ = contaminated(tmp_path, [("with", within(QUESTION)), ("without", within(""))], sets)
    assert set(rows) == {"with"}


def test_sets_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"quiz is to be in nowhere\.jsonl, which is no file"):
        evaluation_task({"quiz": "nowhere.jsonl"})
    path = tmp_path / "quiz.jsonl"
    path.write_text('{"question": "a"}\nnot JSON\n')
    task, _ = evaluation_task({"quiz": str(path)})
    with pytest.raises(UsageError, match=r"quiz\.jsonl:2 is not JSON"):
        perform(tmp_path, task, "")
    task, _ = evaluation_task({"quiz": str(write_lines(path, ["one"]))})
    write_lines(path, ["another"])
    with pytest.raises(UsageError, match="has changed since the build began"):
        perform(tmp_path, task, "")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"sets": ("mmlu",)}, "give NAME=FILE"),
        ({"ngram": 4}, "least no more than ngram"),
        ({"ngram": 40}, "give 2 to 32 words"),
    ],
)
def test_settings_that_make_no_sense_are_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        DecontaminationOptions(**setting)


def test_the_command_leaves_them_out_and_says_how_many(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generator = random.Random(9)
    pages = [" ".join(generator.choices(WORDS, k=120)) for _ in range(6)]
    pages.append(f"{pages[0]} {QUESTION}")
    lines = tmp_path / "pages.jsonl"
    lines.write_text("".join(json.dumps({"text": page}) + "\n" for page in pages))
    quiz = write_lines(tmp_path / "quiz.jsonl", [QUESTION])
    out = tmp_path / "corpus"
    order = ["data", "build", "--in", str(lines), "--out", str(out), "--workers", "1", "--json"]
    code = main([*order, "--rules", "none", "--evaluation", f"quiz={quiz}"])
    assert code == 0
    report = json.loads(capsys.readouterr().out)
    assert report["contaminated"] == {"quiz": 1}
    assert report["duplicates"]["documents"] == 6
