"""Workloads from files: traces of real traffic, and prompts one to a line.

| file | columns or keys |
|---|---|
| Azure's LLM traces, `.csv` | TIMESTAMP (a date), ContextTokens, GeneratedTokens |
| BurstGPT's traces, `.csv` | Timestamp (s), Request tokens, Response tokens |
| Mooncake's traces, `.jsonl` | timestamp (ms), input_length, output_length, hash_ids (of 512) |
| prompts, `.jsonl` | prompt, or turns (the first is taken); category, where there is one |

A row that cannot be read is an error with its line number; nothing is skipped.

    workload = load_workload("trace.csv")
    workload = load_workload("prompts.jsonl", tokenizer=tokenizer, num_output_tokens=256)
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any

from ridgeline.data.text_files import json_object
from ridgeline.data.tokenizer import Tokenizer
from ridgeline.data.workload import MIXES, Workload, WorkloadRequest, named_workload
from ridgeline.errors import UsageError, near_matches

TraceRow = tuple[int, Mapping[str, Any]]  # line number, values
MAX_LENGTH = 10_000_000  # tokens of a prompt or output; beyond it a column was misread

AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURST_GPT = ("Timestamp", "Request tokens", "Response tokens")
MOONCAKE = ("timestamp", "input_length", "output_length", "hash_ids")
MOONCAKE_BLOCK_TOKENS = 512


def load_workload(
    source: str | Path, *, tokenizer: Tokenizer | None = None, num_output_tokens: int = 256
) -> Workload:
    """A named mix, or a file of one of the forms above. Prompts are text: they need the model's
    tokenizer (and its chat template, if it has one), and the number of output tokens.
    """
    if isinstance(source, str) and source in MIXES:
        return named_workload(source)
    path = Path(source)
    if not path.is_file():
        hint = near_matches(str(source), MIXES)
        raise UsageError(
            f"workload {str(source)!r} is neither a file nor one of {', '.join(MIXES)}{hint}"
        )
    rows = _csv_rows(path) if path.suffix == ".csv" else _json_rows(path)
    first = next(rows, None)
    if first is None:
        raise UsageError(f"workload {path} has no rows")
    read = _reader(path, first[1], tokenizer, num_output_tokens)
    return _workload(path, chain([first], rows), read)


def _reader(
    path: Path, row: Mapping[str, Any], tokenizer: Tokenizer | None, num_output_tokens: int
) -> Callable[[Mapping[str, Any]], WorkloadRequest]:
    """How rows with these columns are read."""
    if set(AZURE) <= row.keys():
        return _azure_request
    if set(BURST_GPT) <= row.keys():
        return _burst_gpt_request
    if {"timestamp", "input_length", "output_length"} <= row.keys():
        return _mooncake_request
    if {"prompt", "turns"} & row.keys():
        if tokenizer is None:
            raise UsageError(f"{path} holds text; give the tokenizer of the model that reads it")
        return lambda row: _prompt_request(row, tokenizer, num_output_tokens)
    tables = "; ".join(", ".join(names) for names in (AZURE, BURST_GPT, MOONCAKE))
    forms = f"{tables}; or prompt, or turns"
    raise UsageError(f"{path} has {', '.join(map(str, row))[:80]!r}; a workload has {forms}")


def _workload(
    path: Path, rows: Iterable[TraceRow], read: Callable[[Mapping[str, Any]], WorkloadRequest]
) -> Workload:
    """Requests in the order they arrive, the first one at zero."""
    requests = []
    for line, row in rows:
        try:
            requests.append(read(row))
        except UsageError as error:
            raise UsageError(f"{path} line {line}: {error}") from error
    requests.sort(key=lambda request: request.arrival_s)
    start = requests[0].arrival_s
    moved = (replace(request, arrival_s=request.arrival_s - start) for request in requests)
    return Workload(path.stem, tuple(moved), MOONCAKE_BLOCK_TOKENS)


def _azure_request(row: Mapping[str, Any]) -> WorkloadRequest:
    try:
        arrival = datetime.fromisoformat(str(row["TIMESTAMP"])).replace(tzinfo=None)
    except ValueError:
        wanted = "expected a date as 2023-11-16 18:15:46.68"
        raise UsageError(f"TIMESTAMP is {row['TIMESTAMP']!r}; {wanted}") from None
    return WorkloadRequest(
        _count(row, "ContextTokens"),
        _count(row, "GeneratedTokens"),
        (arrival - datetime(1970, 1, 1)).total_seconds(),
    )


def _burst_gpt_request(row: Mapping[str, Any]) -> WorkloadRequest:
    try:
        arrival = float(row["Timestamp"])
    except ValueError:
        raise UsageError(f"Timestamp is {row['Timestamp']!r}; expected seconds") from None
    if str(row["Response tokens"]) == "0":
        without = "give the trace without failures, as its authors publish it too"
        raise UsageError(f"Response tokens is 0, a request that failed; {without}")
    return WorkloadRequest(_count(row, "Request tokens"), _count(row, "Response tokens"), arrival)


def _mooncake_request(row: Mapping[str, Any]) -> WorkloadRequest:
    tokens, hashes = _count(row, "input_length"), row.get("hash_ids", [])
    if not isinstance(hashes, list) or not all(type(value) is int for value in hashes):
        raise UsageError(f"hash_ids is {str(hashes)[:60]!r}; expected a list of whole numbers")
    blocks = -(-tokens // MOONCAKE_BLOCK_TOKENS)
    if hashes and len(hashes) != blocks:
        raise UsageError(f"{tokens} tokens are {blocks} blocks, and hash_ids has {len(hashes)}")
    return WorkloadRequest(
        tokens,
        _count(row, "output_length"),
        _count(row, "timestamp", minimum=0, maximum=10**15) / 1000,
        block_hashes=tuple(hashes),
    )


def _prompt_request(
    row: Mapping[str, Any], tokenizer: Tokenizer, num_output_tokens: int
) -> WorkloadRequest:
    turns = row.get("turns") or [None]
    text = row.get("prompt", turns[0] if isinstance(turns, list) else None)
    if not isinstance(text, str) or not text:
        raise UsageError(f"the prompt is {str(text)[:60]!r}; expected some text")
    if tokenizer.chat_template is None:
        ids = tokenizer.encode(text)
    else:
        ids = tokenizer.chat([{"role": "user", "content": text}])
    category = str(row.get("category", ""))
    return WorkloadRequest(len(ids), num_output_tokens, prompt=tuple(ids), category=category)


def _count(row: Mapping[str, Any], name: str, minimum: int = 1, maximum: int = MAX_LENGTH) -> int:
    """A whole number from a row, written as one or as text."""
    value = row.get(name)
    try:
        number = int(value) if isinstance(value, str) else value
    except ValueError:
        number = None
    if type(number) is not int or not minimum <= number <= maximum:
        allowed = f"a whole number from {minimum} to {maximum}"
        raise UsageError(f"{name} is {str(value)[:60]!r}; expected {allowed}")
    return number


def _csv_rows(path: Path) -> Iterator[TraceRow]:
    lines = _lines(path)
    header = next(lines, None)
    if header is None:
        return
    columns = next(csv.reader([header[1]]))
    for number, line in lines:
        values = next(csv.reader([line]))
        if len(values) != len(columns):
            raise UsageError(
                f"{path} line {number}: {len(values)} columns; the first line names {len(columns)}"
            )
        yield number, dict(zip(columns, values, strict=True))


def _json_rows(path: Path) -> Iterator[TraceRow]:
    for number, line in _lines(path):
        yield number, json_object(line, f"{path} line {number}")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines that are not empty, numbered from 1."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line.strip()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
