"""Files as documents: where a file is cut changes nothing, and what cannot be read has a reason and
a place, each by itself.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raw_files import files_of_every_kind, good_texts, json_lines, page, warc_record

from ridgeline.data.corpus.recipe import ReadOptions
from ridgeline.data.corpus.sources.document import RawDocument
from ridgeline.data.corpus.sources.lines import records
from ridgeline.data.corpus.sources.read import file_state, piece_documents
from ridgeline.data.corpus.units import cutting
from ridgeline.data.corpus.units.cutting import file_pieces
from ridgeline.data.corpus.units.files import as_input, input_files
from ridgeline.data.corpus.units.unit import FilePiece, units_of

TEXTS = list(good_texts()[:6])


def read(path: Path, options: ReadOptions | None = None) -> list[RawDocument]:
    options = options or ReadOptions()
    pieces = file_pieces(as_input(str(path)), file_state(str(path)), options)
    return [document for piece in pieces for document in piece_documents(piece, options)]


@settings(deadline=None)
@given(
    st.binary(max_size=60).map(lambda data: data.translate(bytes([10, 45, 97, 98] * 64))),
    st.sampled_from([b"\n", b"\n\n", b"--", b"-a-"]),
    st.lists(st.integers(0, 60), max_size=4),
    st.sampled_from([3, 1000]),
)
def test_where_a_file_is_cut_changes_no_record(
    data: bytes, mark: bytes, cuts: list[int], longest: int
) -> None:
    """Marks overlap, lie on cuts, and end the file or do not."""
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    whole = list(records(io.BytesIO(data), mark, 0, len(data), longest))
    parts = [
        record
        for begin, end in pairwise(edges)
        for record in records(io.BytesIO(data), mark, begin, end, longest)
    ]
    assert parts == whole
    assert sum(num_bytes for _, num_bytes, _ in whole) == len(data)
    begins = {0} | {place for place in range(1, len(data)) if data[:place].endswith(mark)}
    assert {offset for offset, _, _ in whole} == (begins if data else set())
    for offset, num_bytes, record in whole:
        own = data[offset : offset + num_bytes]
        assert record == (own if num_bytes <= longest else None)


def test_cut_files_have_the_documents_of_whole_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kind, cut as finely as it goes."""
    counts = files_of_every_kind(tmp_path)
    (tmp_path / "parts.txt").write_text("\n\n".join(TEXTS))
    options = ReadOptions(separator="\n\n")
    for name in [*counts, "parts.txt"]:
        path = tmp_path / name
        whole = read(path, options)
        with monkeypatch.context() as small:
            small.setattr(ReadOptions, "unit_bytes", 1000)
            pieces = file_pieces(as_input(str(path)), file_state(str(path)), options)
            assert len(pieces) > 1 or name == "page.html", name
            parts = [text for piece in pieces for text in piece_documents(piece, options)]
        assert [each for each in parts if each.reason != "no document in it"] == whole, name


def test_units_hold_small_files_together() -> None:
    pieces = [FilePiece(f"{number}", "text", num_bytes=30) for number in range(10)]
    units = units_of(pieces, 100)
    assert [unit.num_bytes for unit in units] == [90, 90, 90, 30]
    assert [piece for unit in units for piece in unit.pieces] == pieces


BAD_LINES = [
    (b'{"text": "\\ud800 alone"}', "surrogate"),
    (b'{"text": "a\\u0000b"}', "zero byte"),
    (b'{"text": 5}', "no text"),
    (b'{"text": null}', "has no text"),
    (b'{"body": "x"}', "has no text; it has body"),
    (b'["text"]', "not an object"),
    (b"{half", "not JSON"),
    (b'{"text": "\xff"}', "UTF-8"),
    (b"[" * 5000, "not JSON"),
]


@pytest.mark.parametrize(("line", "reason"), BAD_LINES)
def test_a_bad_line_stays_alone(line: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(json_lines(TEXTS[:1]) + line + b"\n\n" + json_lines(TEXTS[1:2]))
    first, bad, last = read(path)
    assert (first.text, last.text) == (TEXTS[0], TEXTS[1])
    assert reason in bad.reason
    assert bad.offset == len(json_lines(TEXTS[:1]))


def test_the_last_of_two_keys_counts(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one", "text": "two"}')
    assert [document.text for document in read(path)] == ["two"]


def broken_files() -> dict[str, tuple[Callable[[Path], object], str, int]]:
    """How each is made, what is said of it, and how many of its documents are read still."""
    table = pyarrow.table({"text": TEXTS, "n": range(6)})

    def parquet(path: Path) -> bytes:
        pyarrow.parquet.write_table(
            table, path, row_group_size=2, write_page_checksum=True, use_dictionary=False
        )
        return path.read_bytes()

    def flipped(path: Path) -> None:
        data = bytearray(parquet(path))
        start = pyarrow.parquet.ParquetFile(path).metadata.row_group(1).column(0)
        data[start.data_page_offset + start.total_compressed_size // 2] ^= 255
        path.write_bytes(bytes(data))

    def stream(path: Path) -> None:
        with pyarrow.ipc.new_stream(path, table.schema) as file:
            file.write_table(table, max_chunksize=2)

    twice = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, names=["text", "text"])
    numbers = pyarrow.table({"text": [1, 2]})
    packed = gzip.compress(json_lines(TEXTS), 1)
    records = b"".join(warc_record(f"http://a/{n:04}", page(text)) for n, text in enumerate(TEXTS))
    return {
        "empty.jsonl": (lambda path: path.write_bytes(b""), "empty", 0),
        "blank.jsonl": (lambda path: path.write_bytes(b"\n\n \n"), "no document in it", 0),
        "latin.txt": (lambda path: path.write_bytes(b"caf\xe9"), "not UTF-8", 0),
        "nul.txt": (lambda path: path.write_bytes(b"a\0b"), "zero byte", 0),
        "long.jsonl": (
            lambda path: path.write_bytes(
                b'{"text": "' + b"word " * 500_000 + b'"}\n' + json_lines(TEXTS)
            ),
            "longer than 1 MB", 6,
        ),
        "long.txt": (lambda path: path.write_bytes(b"word " * 500_000), "separator", 0),
        "bomb.jsonl.gz": (
            lambda path: path.write_bytes(gzip.compress(b"\0" * 60_000_000)), "a bomb?", 0
        ),
        "short.jsonl.gz": (lambda path: path.write_bytes(packed[:-400]), "ends too early", 5),
        "other.jsonl.gz": (lambda path: path.write_bytes(b"no gzip"), "broken", 0),
        "other.jsonl.zst": (lambda path: path.write_bytes(b"no zstd at all"), "broken", 0),
        "short.parquet": (
            lambda path: path.write_bytes(parquet(path)[:-100]), "broken Parquet", 0
        ),
        "flipped.parquet": (flipped, "broken from row 2 on", 4),
        "twice.parquet": (
            lambda path: pyarrow.parquet.write_table(twice, path), "2 columns named text", 0
        ),
        "drifting.parquet": (
            lambda path: pyarrow.parquet.write_table(table.rename_columns(["body", "n"]), path),
            "has no column text; it has body, n", 0,
        ),
        "numbers.parquet": (
            lambda path: pyarrow.parquet.write_table(numbers, path), "int64, no text", 0
        ),
        "short.arrow": (
            lambda path: (stream(path), os.truncate(path, path.stat().st_size // 2)),
            "broken Arrow", 2,
        ),
        "short.warc": (lambda path: path.write_bytes(records[:-200]), "ends too early", 5),
        "whole.warc.gz": (
            lambda path: path.write_bytes(gzip.compress(records)), "packed as one", 0
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", list(broken_files()))
def test_a_broken_file_says_so(name: str, tmp_path: Path) -> None:
    make, reason, num_read = broken_files()[name]
    make(tmp_path / name)
    documents = read(tmp_path / name, ReadOptions(max_document_mb=1))
    assert sum(not document.reason for document in documents) == num_read
    reasons = [document.reason for document in documents if document.reason]
    assert reasons
    assert all(reason in each for each in reasons), reasons
    if name == "flipped.parquet":
        assert [document.offset for document in documents] == list(range(6))


def test_a_long_line_is_not_held(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        for _ in range(64):
            file.write(b"x" * (1 << 20))
        file.write(b"\n" + json_lines(TEXTS[:1]))
    tracemalloc.start()
    long, good = read(path, ReadOptions(max_document_mb=1))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "longer than" in long.reason
    assert good.text == TEXTS[0]
    assert peak < 16 << 20


def test_links_are_refused_and_loops_end(tmp_path: Path) -> None:
    folder = tmp_path / "raw"
    (folder / "inner").mkdir(parents=True)
    (folder / "a.txt").write_text("text")
    (folder / "loop").symlink_to(folder)
    (folder / "inner" / "self.txt").symlink_to("self.txt")
    (tmp_path / "secret.txt").write_text("outside")
    (folder / "out.txt").symlink_to(tmp_path / "secret.txt")
    files = {Path(file.name).name: file for file in input_files([str(folder)])}
    assert {name: bool(file.reason) for name, file in files.items()} == {
        "a.txt": False, "loop": True, "self.txt": True, "out.txt": True,
    }  # fmt: skip
    assert "back to itself" in files["self.txt"].reason
    # what a user names is read
    assert not input_files([str(folder / "out.txt")])[0].reason


def test_what_cannot_be_opened_is_quarantined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test that runs as root may read everything."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(json_lines(TEXTS[:1]))
    monkeypatch.setattr(cutting.os, "access", lambda *_: False)
    (piece,) = file_pieces(as_input(str(path)), file_state(str(path)), ReadOptions())
    assert (piece.kind, piece.reason) == ("refused", "cannot be read: permission denied")
    (document,) = piece_documents(replace(piece), ReadOptions())
    assert document.reason == piece.reason


def test_other_fields_and_separators(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"body": "words"}))
    assert read(path, ReadOptions(text_field="body"))[0].text == "words"
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo<|end|>three<|end|><|end|>\n")
    texts = [document.text for document in read(path, ReadOptions(separator="<|end|>"))]
    assert texts == ["one\ntwo", "three"]
