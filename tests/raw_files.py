"""Raw files of every kind for tests of `ridgeline data`, made of Python's own documentation, and
what a corpus on disk consists of.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from functools import cache
from pathlib import Path

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
from tiny_tokenizers import byte_level_json
from written_text import documents

NUM_TEXTS = 24


@cache
def good_texts() -> tuple[str, ...]:
    """Long enough for every rule, and different from each other."""
    chosen = [text for text in documents() if 2000 < len(text) < 12000]
    return tuple(chosen[:NUM_TEXTS])


def json_lines(texts: tuple[str, ...] | list[str]) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def warc_record(url: str, body: bytes, kind: str = "text/html") -> bytes:
    http = (
        f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    head = (
        "WARC/1.0\r\nWARC-Type: response\r\nWARC-Date: 2026-01-01T00:00:00Z\r\n"
        f"WARC-Target-URI: {url}\r\nWARC-Record-ID: <urn:uuid:{url[-4:]}>\r\n"
        f"Content-Type: application/http; msgtype=response\r\nContent-Length: {len(http)}\r\n\r\n"
    )
    return head.encode() + http + b"\r\n\r\n"


def page(text: str) -> bytes:
    """With a menu, which is no part of its text."""
    paragraphs = "".join(f"<p>{line}</p>" for line in text.split("\n\n"))
    menu = "<nav><ul><li><a href='/'>Start</a></li><li><a href='/x'>Menu entry</a></li></ul></nav>"
    return f"<html><body>{menu}<main>{paragraphs}</main></body></html>".encode()


def tokenizer_folder(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    byte_level_json().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    (folder / "config.json").write_text("{}")
    return folder


def files_of_every_kind(folder: Path) -> dict[str, int]:
    """Two texts a file, other ones in each; how many documents each file has, by its name."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = iter(good_texts())
    counts = {}

    def two() -> list[str]:
        return [next(texts), next(texts)]

    def write(name: str, data: bytes, count: int = 2) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
        counts[name] = count

    write("plain.txt", next(texts).encode(), 1)
    write("page.html", page(next(texts)), 1)
    write("lines.jsonl", json_lines(two()))
    write("packed.jsonl.gz", gzip.compress(json_lines(two())))
    write("members.jsonl.gz", b"".join(gzip.compress(json_lines([text])) for text in two()))
    with pyarrow.CompressedOutputStream(str(folder / "zst.jsonl.zst"), "zstd") as file:
        file.write(json_lines(two()))
    counts["zst.jsonl.zst"] = 2
    table = pyarrow.table({"text": two(), "n": [1, 2]})
    pyarrow.parquet.write_table(table, folder / "table.parquet", row_group_size=1)
    counts["table.parquet"] = 2
    (folder / "dataset").mkdir()  # as `datasets` saves one
    (folder / "dataset" / "dataset_info.json").write_text("{}")
    table = pyarrow.table({"text": two()})
    with pyarrow.ipc.new_stream(folder / "dataset" / "data.arrow", table.schema) as stream:
        stream.write_table(table, max_chunksize=1)
    table = pyarrow.table({"text": two()})
    with pyarrow.ipc.new_file(folder / "file.arrow", table.schema) as stream:
        stream.write_table(table)
    counts |= {"dataset/data.arrow": 2, "file.arrow": 2}
    records = [warc_record(f"http://a/{n:04}", page(text)) for n, text in enumerate(two())]
    write("archive.warc", b"".join(records))
    records = [warc_record(f"http://b/{n:04}", page(text)) for n, text in enumerate(two())]
    write("archive2.warc.gz", b"".join(map(gzip.compress, records)))
    return counts


def corpus_hashes(corpus: Path) -> dict[str, str]:
    """Of every file but what only a builder needs."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(corpus.iterdir())
        if path.is_file()
    }
