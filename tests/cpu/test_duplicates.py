"""Duplicates of a corpus, found by its tasks: each removal has a survivor that is kept and similar,
whatever the order, the units and the parts; and nearly all that there is to be found is found.
"""

from __future__ import annotations

import hashlib
import json
import random
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from corpora import (
    Found,
    Named,
    cut,
    digest,
    jaccard,
    run_stages,
    shingle_set,
    vocabulary,
    write_table,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.cli import main
from ridgeline.cli.data.duplicates import duplicate_lines
from ridgeline.data.corpus.duplicates import DuplicateOptions, duplicate_tasks, pairing, tasks
from ridgeline.data.corpus.duplicates.in_memory import near_duplicates, set_similarity
from ridgeline.data.corpus.duplicates.planting import changed, similarity_of
from ridgeline.data.corpus.duplicates.surviving import remove_near
from ridgeline.data.corpus.duplicates.verifying import PAIRS
from ridgeline.errors import UsageError

OPTIONS = DuplicateOptions()


def families(seed: int, count: int = 60) -> list[Named]:
    """Documents, some with changed copies, some with exact ones."""
    generator = random.Random(seed)
    words = vocabulary(generator)
    documents = []
    for number in range(count):
        base = generator.choices(words, k=generator.randint(30, 250))
        documents.append((f"{number}", " ".join(base)))
        for copy in range(generator.choice([0, 0, 1, 3])):
            other = list(base)
            for _ in range(generator.randint(0, len(base) // 18)):
                other[generator.randrange(len(other))] = generator.choice(words)
            documents.append((f"{number} copy {copy}", " ".join(other)))
    documents += [("marks", "..."), ("marks again", "..."), ("none", ""), ("none again", "")]
    documents += [("case", "Hello, world!"), ("other case", "hello WORLD"), ("one", "alone")]
    generator.shuffle(documents)
    return documents


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "PART_BYTES", 1 << 15)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("seed", range(3))
def test_each_removal_has_a_kept_survivor_that_is_similar(seed: int, tmp_path: Path) -> None:
    documents = families(seed)
    result = Found(tmp_path, cut(documents, 3), OPTIONS)
    assert len(result.steps.stages[1]) > 1, "more than one part"
    text_of = dict(documents)
    sets = {name: shingle_set(text) for name, text in documents}
    removed = {**result.near, **result.exact}
    assert len(removed) == len(result.near) + len(result.exact)
    for name, (survivor, similarity) in result.near.items():
        assert survivor not in removed
        assert similarity == jaccard(sets[name], sets[survivor]) >= OPTIONS.threshold
    for name, (survivor, similarity) in result.exact.items():
        assert survivor not in removed
        same = text_of[name] == text_of[survivor]
        assert similarity == (1.0 if same else jaccard(sets[name], sets[survivor]))
    kept = {name: text for name, text in documents if name not in removed}
    assert len(set(kept.values())) == len(kept), "a copy is left"
    left = [pair for pair in combinations(kept, 2) if jaccard(sets[pair[0]], sets[pair[1]]) >= 0.8]
    assert left == [], "of so few pairs each shares a band"
    report = result.report
    assert report.documents == len(documents)
    assert (report.near, report.exact) == (len(result.near), len(result.exact))
    assert report.least_near == min(similarity for _, similarity in result.near.values())
    assert report.candidates >= report.verified > 0
    assert report.left_out == 0


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_order_units_and_parts_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = families(7)
    hashes = set()
    for number, (num_units, part_bytes) in enumerate([(1, 1 << 28), (2, 1 << 14), (7, 1 << 16)]):
        monkeypatch.setattr(tasks, "PART_BYTES", part_bytes)
        random.Random(number).shuffle(documents)
        result = Found(tmp_path / str(number), cut(documents, num_units), OPTIONS)
        files = (result.steps.near, result.steps.exact)
        hashes.add(tuple(sha256(result.folder / file) for file in files))
        assert result.near
        assert result.exact
    assert len(hashes) == 1


def test_the_same_task_writes_the_same_bytes(tmp_path: Path) -> None:
    units = cut(families(8, count=20), 2)
    runs = [Found(tmp_path / name, units, OPTIONS) for name in ("first", "second")]
    for stage in runs[0].steps.stages:
        for task in stage:
            assert len({sha256(run.folder / task.output) for run in runs}) == 1


def test_what_a_rule_has_dropped_is_not_looked_at(tmp_path: Path) -> None:
    text = " ".join(vocabulary(random.Random(0), 50))
    write_table(tmp_path / "0.parquet", [("kept", text)], dropped=[("dropped", text)])
    steps = duplicate_tasks(["0.parquet"], 1000, 2, OPTIONS)
    counts = run_stages(tmp_path, steps.stages)
    assert counts[0]["documents"] == 1
    assert len(pq.read_table(tmp_path / steps.exact)) == 0


def test_no_documents_at_all(tmp_path: Path) -> None:
    result = Found(tmp_path, [[]], OPTIONS)
    assert (result.report.documents, result.near, result.exact) == (0, {}, {})
    assert Found(tmp_path / "units", [], OPTIONS).report.documents == 0


def test_large_buckets_cost_what_they_are_long(tmp_path: Path) -> None:
    """700 near copies, and 700 pages that share their first half: more than a bucket's heads."""
    generator = random.Random(3)
    words = vocabulary(generator)
    base = generator.choices(words, k=200)
    frame = generator.choices(words, k=150)
    copies = [(f"copy {n}", " ".join([*base, f"end{n}"])) for n in range(700)]
    pages = [(f"page {n}", " ".join(frame + generator.choices(words, k=150))) for n in range(700)]
    result = Found(tmp_path, cut([*copies, *pages], 2), OPTIONS)
    report = result.report
    assert report.near == 699
    assert {name.split()[0] for name in result.near} == {"copy"}
    assert len({survivor for survivor, _ in result.near.values()}) == 1
    assert report.left_out > 100_000
    each = pairing.HEADS + pairing.BEFORE
    assert report.candidates <= 26 * each * 1400


def test_pairs_of_a_bucket_are_all_of_them_or_the_heads_and_those_before() -> None:
    for size in (1, 2, pairing.HEADS + pairing.BEFORE + 1, 100):
        start = np.repeat([0, 3], [3, size])
        earlier, later = pairing.paired_places(start, np.arange(3 + size))
        pairs = list(zip(earlier.tolist(), later.tolist(), strict=True))
        assert len(set(pairs)) == len(pairs)
        bucket = range(3, 3 + size)
        expected = {
            (a, b)
            for a, b in combinations(bucket, 2)
            if a - 3 < pairing.HEADS or b - a <= pairing.BEFORE
        }
        assert set(pairs) == expected | {(0, 1), (0, 2), (1, 2)}


def pairs_file(path: Path, pairs: list[tuple[int, int, float]]) -> None:
    """Documents by their number, which is their rank."""
    columns: list[Any] = [
        *(
            pa.array([number.to_bytes(16, "big") for number in side], pa.binary(16))
            for side in ([a for a, _, _ in pairs], [b for _, b, _ in pairs])
        ),
        *(
            pa.array(side, pa.uint64())
            for side in ([a for a, _, _ in pairs], [b for _, b, _ in pairs])
        ),
        pa.array([similarity for _, _, similarity in pairs], pa.float64()),
    ]
    pq.write_table(pa.Table.from_arrays(columns, schema=PAIRS), path)


def removals(folder: Path, files: list[list[tuple[int, int, float]]]) -> dict[int, int]:
    paths = [folder / f"{number}.parquet" for number in range(len(files))]
    for path, pairs in zip(paths, files, strict=True):
        pairs_file(path, pairs)
    remove_near(folder / "near.parquet", paths)
    return {
        int.from_bytes(row["id"], "big"): int.from_bytes(row["duplicate_of"], "big")
        for row in pq.read_table(folder / "near.parquet").to_pylist()
    }


def test_who_survives(tmp_path: Path) -> None:
    chain = [(0, 1, 0.9), (1, 2, 0.9), (2, 3, 0.9)]
    assert removals(tmp_path, [chain]) == {1: 0, 3: 2}, "2 is like 1, which is not there any more"
    assert removals(tmp_path, [[(0, 1, 0.9)], [(0, 2, 0.9)]]) == {1: 0, 2: 0}
    most_similar = [(0, 2, 0.8), (1, 2, 0.9)]
    assert removals(tmp_path, [most_similar]) == {2: 1}
    assert removals(tmp_path, [[]]) == {}


@settings(max_examples=50, deadline=None)
@given(st.sets(st.tuples(st.integers(0, 15), st.integers(0, 15)), max_size=40))
def test_survivors_of_any_pairs(
    tmp_path_factory: pytest.TempPathFactory, drawn: set[tuple[int, int]]
) -> None:
    pairs = sorted({(min(pair), max(pair)) for pair in drawn if pair[0] != pair[1]})
    files: list[list[tuple[int, int, float]]] = [[], []]
    for number, (a, b) in enumerate(pairs):
        files[number % 2].append((a, b, 0.8 + (a * 7 + b) % 10 / 100))
    removed = removals(tmp_path_factory.mktemp("pairs"), files)
    for number in range(16):
        earlier = [a for a, b in pairs if b == number and a not in removed]
        assert (number in removed) == bool(earlier)
        if earlier:
            assert removed[number] in earlier


@pytest.mark.parametrize("threshold", [0.8, pytest.param(0.6, marks=pytest.mark.slow)])
def test_planted_duplicates_are_found_as_often_as_is_said(threshold: float) -> None:
    """Of 20 seeds, each within four deviations of the formula, and all of them together too."""
    options = DuplicateOptions(threshold=threshold)
    num, num_found, expected = 0, 0, 0.0
    for seed in range(20):
        generator = random.Random(seed)
        words = vocabulary(generator)
        originals = [" ".join(generator.choices(words, k=150)) for _ in range(25)]
        copies = [changed(text, seed + 1000 * n, options) for n, text in enumerate(originals)]
        assert all(threshold <= similarity < threshold + 0.08 for _, similarity in copies)
        pairs = near_duplicates(pa.array([*originals, *(text for text, _ in copies)]), options)
        found = set(zip(pairs.first.tolist(), pairs.second.tolist(), strict=True))
        assert found <= {(n, n + 25) for n in range(25)}
        shares = [options.share_of_pairs(similarity) for _, similarity in copies]
        deviation = sum(share * (1 - share) for share in shares) ** 0.5
        assert len(found) >= sum(shares) - 4 * deviation - 1
        num, num_found, expected = num + 25, num_found + len(found), expected + sum(shares)
    deviation = (expected * (1 - expected / num)) ** 0.5
    assert abs(num_found - expected) <= 4 * deviation + 1
    assert num_found / num >= 0.98


def test_recall_is_measured_on_the_run(tmp_path: Path) -> None:
    generator = random.Random(5)
    words = vocabulary(generator)
    documents = [(f"{n}", " ".join(generator.choices(words, k=150))) for n in range(40)]
    report = Found(tmp_path, cut(documents, 4), OPTIONS).report
    assert report.planted == 40
    assert report.planted_found >= 37
    assert 0.8 <= report.planted_similarity < 0.88
    assert report.near == report.exact == 0, "what was planted is in no result"
    fewer = DuplicateOptions(threshold=0.8, recall=0.2)
    assert (fewer.bands, OPTIONS.bands) == (2, 26)
    weak = Found(tmp_path / "weak", cut(documents, 4), fewer).report
    assert weak.planted_found < 26


def test_bands_follow_from_threshold_and_recall() -> None:
    assert OPTIONS.bands == 26
    assert OPTIONS.share_of_pairs(0.8) == pytest.approx(0.99156, abs=1e-5)
    assert DuplicateOptions(recall=0.98).bands == 22
    for threshold, recall, rows in ((0.5, 0.9, 3), (0.7, 0.99, 8), (0.95, 0.999, 16)):
        options = DuplicateOptions(threshold=threshold, recall=recall, rows=rows)
        assert options.share_of_pairs(threshold) >= recall
        assert 1 - (1 - threshold**rows) ** (options.bands - 1) < recall


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"threshold": 1.0}, "threshold is 1.0; give a number between 0 and 1"),
        ({"recall": 0}, "recall is 0; give a number between 0 and 1"),
        ({"rows": 0}, "rows is 0"),
        ({"ngram": 40}, "ngram is 40"),
        ({"threshold": 0.1}, "give fewer rows, or less recall"),
    ],
)
def test_settings_that_make_no_sense_are_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        DuplicateOptions(**setting)


def test_in_memory_finds_what_the_tasks_find(tmp_path: Path) -> None:
    documents = families(11)
    result = Found(tmp_path, cut(documents, 2), OPTIONS)
    pairs = near_duplicates(pa.array([text for _, text in documents]), OPTIONS)
    similar = {
        frozenset((documents[a][0], documents[b][0])): similarity
        for a, b, similarity in zip(*(part.tolist() for part in pairs[:3]), strict=True)
    }
    for name, (survivor, similarity) in result.near.items():
        if frozenset((name, survivor)) in similar:
            assert similar[frozenset((name, survivor))] == similarity
    sets = {name: shingle_set(text) for name, text in documents}
    expected = {
        frozenset(pair)
        for pair in combinations(sets, 2)
        if jaccard(sets[pair[0]], sets[pair[1]]) >= OPTIONS.threshold
    }
    assert set(similar) == expected


def test_similarity_counts_a_repeated_hash_once() -> None:
    hashes = torch.tensor([5, 5, 7, -9, 7, 5, 1])
    starts = torch.tensor([0, 4, 6, 7, 7])
    first, second = torch.tensor([0, 0, 1, 3, 2]), torch.tensor([1, 2, 1, 0, 3])
    expected = [2 / 3, 0.0, 1.0, 0.0, 0.0]
    assert set_similarity(hashes, starts, first, second).tolist() == expected


def test_a_changed_copy_is_just_above_the_threshold() -> None:
    text = " ".join(vocabulary(random.Random(2), 300))
    copy, similarity = changed(text, 1, OPTIONS)
    assert similarity == similarity_of(text, copy, OPTIONS.ngram)
    assert similarity == jaccard(shingle_set(text), shingle_set(copy))
    assert 0.8 <= similarity < 0.83
    assert changed(text, 1, OPTIONS) == (copy, similarity)
    assert digest(changed(text, 2, OPTIONS)[0]) != digest(copy)


def test_the_command_leaves_duplicates_out_and_says_how_sure_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generator = random.Random(13)
    words = vocabulary(generator)
    pages = [" ".join(generator.choices(words, k=150)) for _ in range(20)]
    near = [page.replace(page.split()[70], "other") for page in pages[:4]]
    source = tmp_path / "pages.jsonl"
    rows = [*pages, *near, pages[5], pages[6]]
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    out = tmp_path / "corpus"
    order = ["data", "build", "--in", str(source), "--out", str(out)]
    assert main([*order, "--rules", "none", "--workers", "1"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "2 copies and 4 near duplicates of 26 documents are left out" in said
    assert "26 bands of 8 rows compare 1 - (1 - 0.8^8)^26 = 99.2% of the pairs at 0.8" in said
    assert "precision: 1" in said
    verdicts = pq.read_table(out / "documents-000000.parquet")["verdict"].to_pylist()
    assert [verdicts.count(each) for each in ("exact_duplicate", "near_duplicate", "")] == [
        2,
        4,
        20,
    ]


def test_what_is_said_where_nothing_was_measured_or_removed(tmp_path: Path) -> None:
    documents = [("one", "some words"), ("two", "other words")]
    report = Found(tmp_path, [documents], OPTIONS).report.to_json()
    removed, recall, compared = duplicate_lines(json.loads(json.dumps(report)))
    assert removed == "duplicates: 0 copies and 0 near duplicates of 2 documents are left out"
    assert recall.endswith("not measured, as no document is long enough to be changed a little")
    assert compared.endswith("of 0 pairs that were compared 0 are near duplicates")
    (_, _, left_out) = duplicate_lines({**report, "left_out": 5000})
    assert left_out.endswith("and 5,000 pairs of large buckets were not compared")
