"""`ridgeline data build`, from raw files to a corpus: every document is accounted for, and the
bytes are the same for any order and any number of workers.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import polars
import pyarrow.parquet
import pytest
from command_line import refused
from raw_files import (
    corpus_hashes,
    files_of_every_kind,
    good_texts,
    json_lines,
    tokenizer_folder,
)

from ridgeline.cli import main
from ridgeline.data.corpus.build import BuildOrder, build
from ridgeline.data.corpus.engines.local import ThisProcess
from ridgeline.data.corpus.ledger.ledger import WORK_FOLDER
from ridgeline.data.corpus.ledger.lock import builder_lock
from ridgeline.data.corpus.recipe import CleanOptions, CorpusRecipe, TokenOptions
from ridgeline.data.corpus.shards import open_token_file, read_index
from ridgeline.data.corpus.stages.clean import clean
from ridgeline.data.tokenizer import Tokenizer
from ridgeline.errors import CorpusError, OutputError, UsageError
from ridgeline.models.checkpoint import resolve_model

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_folder(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("raw")
    files_of_every_kind(folder)
    return folder


def built(capsys: Capture, *argv: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["data", "build", *argv, "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def rows_of(corpus: Path) -> list[dict[str, Any]]:
    files = sorted(corpus.glob("documents-*.parquet"))
    return [row for file in files for row in pyarrow.parquet.read_table(file).to_pylist()]


@pytest.fixture(scope="module")
def whole(
    raw: Path, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """A corpus of all kinds of files, built in this process, and the report."""
    corpus = tmp_path_factory.mktemp("whole") / "corpus"
    recipe = CorpusRecipe(tokens=TokenOptions(tokenizer=str(tokenizer)))
    return corpus, build(BuildOrder((str(raw),), corpus, recipe), ThisProcess())


def test_every_kind_of_file_gives_its_documents(
    raw: Path, whole: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    corpus, report = whole
    expected = files_of_every_kind(tmp_path / "again")
    counts = Counter(str(Path(row["file"]).relative_to(raw)) for row in rows_of(corpus))
    assert counts == expected
    documents = report["documents"]
    assert documents["in"] == sum(expected.values())
    assert documents["quarantined"] == 0
    assert documents["kept"] + sum(documents["dropped"].values()) == documents["in"]
    assert documents["kept"] >= 16, "rules that drop good texts"


def test_tokens_are_those_of_the_kept_texts(
    whole: tuple[Path, dict[str, Any]], tokenizer: Path
) -> None:
    corpus, report = whole
    library = Tokenizer.load(resolve_model(str(tokenizer)))
    (path,) = corpus.glob("tokens-*.arrow")
    file = open_token_file(path)
    assert read_index(corpus).num_tokens == len(file.ids) == report["tokens"]
    texts = [library.decode(file.ids[begin : end - 1].tolist())
             for begin, end in zip(file.offsets[:-1], file.offsets[1:], strict=True)]  # fmt: skip
    assert len(texts) == report["documents"]["kept"]
    own = set(clean(polars.Series(good_texts()), CleanOptions()))
    assert sum(text in own for text in texts) >= 10  # pages are laid out anew


@pytest.mark.parametrize("workers", ["1", "2", pytest.param("7", marks=pytest.mark.slow)])
def test_order_and_workers_change_no_byte(
    workers: str,
    raw: Path,
    tokenizer: Path,
    whole: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    capsys: Capture,
) -> None:
    """Named one by one, backwards, and by pattern."""
    names = sorted((str(path) for path in raw.rglob("*.*") if path.is_file()), reverse=True)
    names = [name for name in names if "dataset" not in name]
    out = tmp_path / "corpus"
    report = built(
        capsys, "--in", *names, f"{raw}/data*/*.arrow", "--out", str(out), "--workers", workers,
        "--tokenizer", str(tokenizer),
    )  # fmt: skip
    assert corpus_hashes(out) == corpus_hashes(whole[0])
    assert report["documents"] == whole[1]["documents"]


@pytest.mark.slow
def test_ray_gives_the_same_bytes(
    raw: Path, tokenizer: Path, whole: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    import ray

    from ridgeline.data.corpus.engines.ray import RayTasks

    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20)
    recipe = CorpusRecipe(tokens=TokenOptions(tokenizer=str(tokenizer)))
    engine = RayTasks("local")
    try:
        assert engine.workers == 2
        build(BuildOrder((str(raw),), tmp_path / "corpus", recipe), engine)
    finally:
        engine.close()
    assert corpus_hashes(tmp_path / "corpus") == corpus_hashes(whole[0])


def test_duplicates_and_evaluation_sets_are_left_out(
    tokenizer: Path, tmp_path: Path, capsys: Capture
) -> None:
    texts = list(good_texts()[:8])
    near = texts[0].replace("The", "Thee", 1)
    lines = [*texts, texts[1], near]
    (tmp_path / "a.jsonl").write_bytes(json_lines(lines))
    words = texts[2].split()
    (tmp_path / "eval.jsonl").write_text(json.dumps({"question": " ".join(words[20:60])}))
    out = tmp_path / "corpus"
    report = built(
        capsys, "--in", str(tmp_path / "a.jsonl"), "--out", str(out), "--workers", "1",
        "--tokenizer", str(tokenizer), "--evaluation", f"quiz={tmp_path / 'eval.jsonl'}",
        "--rules", "none",
    )  # fmt: skip
    documents = report["documents"]
    dropped = {"contaminated": 1, "exact_duplicate": 1, "near_duplicate": 1}
    assert documents == {"in": 10, "kept": 7, "dropped": dropped, "quarantined": 0}
    assert report["contaminated"] == {"quiz": 1}
    assert report["duplicates"]["least_near"] >= 0.8
    verdicts = [row["verdict"] for row in rows_of(out)]
    assert verdicts[2] == "contaminated"
    assert {verdicts[1], verdicts[8]} == {"", "exact_duplicate"}
    assert {verdicts[0], verdicts[9]} == {"", "near_duplicate"}


def test_a_finished_build_is_not_done_again(
    raw: Path, tokenizer: Path, tmp_path: Path, capsys: Capture
) -> None:
    argv = ["--in", str(raw / "lines.jsonl"), "--out", str(tmp_path / "corpus"), "--workers", "1",
            "--tokenizer", str(tokenizer)]  # fmt: skip
    first = built(capsys, *argv)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "corpus").iterdir()}
    assert built(capsys, *argv, "--resume") == first
    assert before == {path: path.stat().st_mtime_ns for path in before}
    refused(capsys, OutputError, "not empty --resume", "data", "build", *argv)
    # another recipe is another corpus, in place of the old one
    other = built(capsys, *argv, "--resume", "--rules", "none", "--no-emails")
    assert other["tokens"] >= first["tokens"]
    assert read_index(tmp_path / "corpus").facts["recipe"]["quality"]["rules"] == ["none"]


def test_a_second_builder_is_told_of_the_first(
    raw: Path, tokenizer: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "corpus"
    argv = ["data", "build", "--in", str(raw / "lines.jsonl"), "--out", str(out), "--resume",
            "--workers", "1", "--tokenizer", str(tokenizer)]  # fmt: skip
    with builder_lock(out / WORK_FOLDER):
        refused(capsys, CorpusError, "is being built by process on wait", *argv)
    assert main([*argv, "--json"]) == 0


class ChangingInput(ThisProcess):
    """A file grows once it is cut."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def run(self, folder: Path, tasks: Any) -> Any:
        yield from super().run(folder, tasks)
        if any(task.name.startswith("cut") for task, _ in tasks):
            with self.path.open("ab") as file:
                file.write(json_lines(["one more"]))


def test_input_that_changes_is_refused_and_read_anew(tokenizer: Path, tmp_path: Path) -> None:
    path, out = tmp_path / "a.jsonl", tmp_path / "corpus"
    path.write_bytes(json_lines(list(good_texts()[:3])))
    recipe = CorpusRecipe(tokens=TokenOptions(tokenizer=str(tokenizer)))
    with pytest.raises(CorpusError, match="changed while the corpus was built"):
        build(BuildOrder((str(path),), out, recipe), ChangingInput(path))
    report = build(BuildOrder((str(path),), out, recipe, resume=True), ThisProcess())
    assert report["documents"]["in"] == 4


@pytest.mark.parametrize(
    ("argv", "kind", "words"),
    [
        (["--in", "nowhere.jsonl", "--out", "{tmp}/c"], UsageError, "'nowhere.jsonl' exist"),
        (["--in", "{tmp}/*.nothing", "--out", "{tmp}/c"], UsageError, "matches no file"),
        (["--in", "{tmp}/empty.jsonl", "--out", "{tmp}/c"], CorpusError, "no document empty"),
        (["--in", "{tmp}/short.jsonl", "--out", "{tmp}/c"], CorpusError, "gopher_few_words"),
        (["--in", "{tmp}/short.jsonl", "--out", "{tmp}/empty.jsonl"], OutputError, "is a file"),
        (["--in", "{tmp}/short.jsonl", "--out", "{tmp}/empty.jsonl/c"], OutputError, "write"),
        (["--out", "{tmp}/c"], UsageError, "needs --in"),
        (["--in", "{tmp}/short.jsonl"], UsageError, "needs --out"),
        (["webb", "--in", "x", "--out", "c"], UsageError, "'webb' 'web'"),
        (["--in", "{tmp}/short.jsonl", "--out", "{tmp}/c", "--workers", "0"], UsageError, "1"),
        (["--in", "{tmp}/short.jsonl", "--out", "{tmp}/c", "--memory", "0.1"], UsageError, "0.95"),
        (["--in", "{tmp}/short.jsonl", "--out", "{tmp}/c", "--rules", "goffer"], UsageError, "c4"),
        (["--in", "{tmp}/a.jsonl", "--out", "{tmp}/c", "--evaluation", "x"], UsageError, "NAME"),
        (["--in", "{tmp}/a.jsonl", "--out", "{tmp}/c", "--evaluation", "x=no"], UsageError, "no"),
    ],
)  # fmt: skip
def test_what_cannot_be_built_is_one_line(
    argv: list[str], kind: Any, words: str, tokenizer: Path, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "empty.jsonl").write_bytes(b"")
    (tmp_path / "a.jsonl").write_bytes(json_lines(list(good_texts()[:2])))
    (tmp_path / "short.jsonl").write_bytes(json_lines(["few words"]))
    filled = [word.format(tmp=tmp_path) for word in argv]
    filled += [] if "--workers" in argv or "--memory" in argv else ["--workers", "1"]
    refused(capsys, kind, words, "data", "build", *filled, "--tokenizer", str(tokenizer))


def test_a_plan_says_what_a_build_takes(
    raw: Path, tokenizer: Path, tmp_path: Path, capsys: Capture
) -> None:
    argv = ["data", "plan", "--in", str(raw), "--workers", "3", "--out", str(tmp_path / "c"),
            "--tokenizer", str(tokenizer)]  # fmt: skip
    assert main([*argv, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["files"], document["workers"]) == (11, 3)
    assert document["units"] == 1
    assert document["text_bytes"] >= document["input_bytes"] > 0
    assert {row["stage"] for row in document["stages"]} >= {"read", "quality", "tokens"}
    assert not (tmp_path / "c").exists()
    assert main(argv) == 0
    assert "bound by" in capsys.readouterr().out
