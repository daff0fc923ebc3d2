"""Corpora on real text: the whole chain on two cores, each native kernel and the loader on one,
memory, how exact near duplicates are, and other libraries beside all that, in one record.

    PYTHONPATH=.:tests python -m corpus_speed prepare /usr/share/doc text     # once, not timed
    PYTHONPATH=.:tests python -m corpus_speed text --peers peers/bin/python --save results
    PYTHONPATH=.:tests python -m corpus_speed memory text 10                  # GB of input
    make corpus-speed TEXT=text PEERS=peers/bin/python

`prepare` reads whatever `ridgeline data build` reads and writes JSON lines, so that all take the
same text. Rates are bytes of text a CPU second, of one core; the chain's is by the clock. The peers
get a sample, for they take some 0.2 MB/s. The truth on near duplicates is every pair of documents
with a similarity of the threshold or more, found by prefix filtering and counted exactly.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow
import torch
from corpora import Found, Named
from soak.memory import children_of, pss_bytes

from ridgeline.data import Tokenizer
from ridgeline.data.corpus.duplicates import DuplicateOptions
from ridgeline.data.corpus.duplicates.in_memory import near_duplicates
from ridgeline.data.corpus.duplicates.planting import similarities
from ridgeline.data.corpus.duplicates.tables import packed
from ridgeline.data.corpus.recipe import ReadOptions
from ridgeline.data.corpus.sources.read import file_state, piece_documents
from ridgeline.data.corpus.tokens import CorpusTokenizer
from ridgeline.data.corpus.units.cutting import file_pieces
from ridgeline.data.corpus.units.files import input_files
from ridgeline.data.loading import DataState, Loader, split_data
from ridgeline.data.loading.corpora import open_corpus
from ridgeline.hardware import detect
from ridgeline.kernels.minhash import shingle_sets, signatures
from ridgeline.models.checkpoint import resolve_model
from ridgeline.records import Record, Value

FILE_BYTES = 32 << 20
KERNEL_BYTES = 96 << 20  # of text that the kernels are timed on
TRUTH_DOCUMENTS = 12_000  # whose pairs are all known
SAMPLE_BYTES = 24 << 20  # that the peers choose from
QUESTIONS = 2_000
WINDOW, SEQUENCES, BATCHES = 2048, 64, 400
Values = dict[str, Value]


def prepare(source: Path, target: Path) -> None:
    target.mkdir(parents=True)
    number, size, documents = 0, 0, 0
    file = (target / "000.jsonl").open("wb")
    for text in _raw_texts(source):
        if size > FILE_BYTES:
            file.close()
            number, size = number + 1, 0
            file = (target / f"{number:03}.jsonl").open("wb")
        size += file.write(orjson.dumps({"text": text}) + b"\n")
        documents += 1
    file.close()
    print(f"{documents:,} documents in {number + 1} files of {target}")


def _raw_texts(source: Path) -> Iterator[str]:
    options = ReadOptions()
    for file in input_files([str(source)]):
        if file.kind != "refused":
            for piece in file_pieces(file, file_state(file.name), options):
                for document in piece_documents(piece, options):
                    if document.text.strip():
                        yield document.text


def texts_of(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob("*.jsonl")):
        with path.open("rb") as file:
            for line in file:
                yield orjson.loads(line)["text"]


def some_texts(folder: Path, num_bytes: int) -> list[str]:
    """From all files, as many of each."""
    own = sum(path.stat().st_size for path in folder.glob("*.jsonl"))
    every = max(1, round(own / num_bytes))
    return list(islice(texts_of(folder), 0, None, every))


def write_questions(folder: Path, path: Path) -> None:
    """An evaluation set: a twentieth of it stands in the text."""
    generator = random.Random(26)
    texts = some_texts(folder, 8 << 20)
    with path.open("wb") as file:
        for number in range(QUESTIONS):
            words = generator.choice(texts).split()
            first = generator.randrange(max(1, len(words) - 40))
            chosen = words[first : first + 40]
            if number % 20:
                generator.shuffle(chosen)
            file.write(orjson.dumps({"question": " ".join(chosen), "answer": "yes"}) + b"\n")


class WatchedProcesses:
    """One and all below it, while they run: the most memory (proportional shares summed up), and
    CPU seconds, which a parent only knows of children that it has waited for.
    """

    def __init__(self, pid: int) -> None:
        self.most = 0  # bytes
        self._ticks: dict[int, int] = {}
        self._pid, self._stop = pid, threading.Event()
        self._thread = threading.Thread(target=self._watch)

    @property
    def cpu_s(self) -> float:
        return sum(self._ticks.values()) / os.sysconf("SC_CLK_TCK")

    def _watch(self) -> None:
        while not self._stop.wait(0.2):
            pids = [self._pid, *children_of(self._pid, deep=True)]
            self.most = max(self.most, sum(map(pss_bytes, pids)))
            self._ticks |= {pid: ticks for pid in pids if (ticks := cpu_ticks(pid))}

    def __enter__(self) -> WatchedProcesses:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def cpu_ticks(pid: int) -> int:
    """Of user and system; 0 of a process that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


def write_more(text: Path, folder: Path, num_bytes: float) -> int:
    """Documents of lines that are drawn from those of one file: no two share many in a row."""
    generator, size = random.Random(26), 0
    for number, path in enumerate(cycle(sorted(text.glob("*.jsonl")))):
        if size >= num_bytes:
            return size
        texts = [orjson.loads(line)["text"].split("\n") for line in path.read_bytes().splitlines()]
        lines = [line for each in texts for line in each]
        generator.shuffle(lines)
        drawn = iter(lines)
        with (folder / f"{number:04}.jsonl").open("wb") as file:
            for each in texts:
                made = "\n".join(islice(drawn, len(each)))
                size += file.write(orjson.dumps({"text": made}) + b"\n")
    raise SystemExit(f"{text} has no *.jsonl; `prepare` writes them")


def memory_of_more(text: Path, gigabytes: float) -> None:
    """What `--memory 1` takes of an input that is larger than that."""
    with tempfile.TemporaryDirectory() as name:
        raw, questions = Path(name) / "raw", Path(name) / "questions.jsonl"
        raw.mkdir()
        size = write_more(text, raw, gigabytes * 1e9)
        write_questions(text, questions)
        report, (wall, used, memory) = whole_chain(
            raw, Path(name) / "out", questions, "--memory", "1"
        )
    print(f"{size / 1e9:.2f} GB in, {report['documents']}, {wall:.0f} s, {used:.0f} CPU seconds")
    print(f"the most memory of all processes: {memory / (1 << 30):.2f} GiB")


def whole_chain(text: Path, out: Path, questions: Path, *flags: str) -> tuple[dict[str, Any], Any]:
    """The report of `data build`, and what it took."""
    argv = [
        sys.executable, "-m", "ridgeline", "data", "build", "--in", str(text), "--out", str(out),
        "--evaluation", f"own={questions}", "--json", *flags,
    ]  # fmt: skip
    start = time.perf_counter()
    process = subprocess.Popen(argv, stdout=subprocess.PIPE)
    with process, WatchedProcesses(process.pid) as watched:
        output = process.communicate()[0]
    if process.returncode:
        raise SystemExit(f"{' '.join(argv)} ended with {process.returncode}")
    return json.loads(output), (time.perf_counter() - start, watched.cpu_s, watched.most)


def chain_values(text: Path, folder: Path, workers: int) -> tuple[Values, list[str], Path]:
    questions, out = folder / "questions.jsonl", folder / "corpus"
    write_questions(text, questions)
    num_bytes = sum(len(each.encode()) for each in texts_of(text))
    report, (wall, used, memory) = whole_chain(text, out, questions, "--workers", str(workers))
    values = {
        "text": Value(num_bytes, "B"),
        f"chain, {workers} workers, clock": Value(num_bytes / wall, "B/s"),
        f"chain, {workers} workers, of a CPU second": Value(num_bytes / used, "B/s"),
        f"chain, {workers} workers, memory": Value(memory, "B"),
    }
    for row in report["stages"]:
        if row["mb_per_core_s"]:
            values[f"stage {row['stage']}"] = Value(row["mb_per_core_s"] * 1e6, "B/s")
    own = report["duplicates"]
    values["planted copies"] = Value(own["planted"], "documents")
    values["planted copies found"] = Value(own["planted_found"], "documents")
    values["expected recall at the threshold"] = Value(own["expected_recall"], "")
    accounts = report["documents"]
    notes = [
        f"{accounts['in']:,} documents, {accounts['kept']:,} kept; dropped {accounts['dropped']}",
        f"stages per CPU second of one core, of {report['bytes']['in']:,} bytes of JSON lines",
        report["certificate"],
    ]
    _, (wall, used, memory) = whole_chain(text, folder / "one", questions, "--memory", "1")
    values["chain, --memory 1, memory"] = Value(memory, "B")
    values["chain, --memory 1, clock"] = Value(num_bytes / wall, "B/s")
    same = all(
        path.read_bytes() == (folder / "one" / path.name).read_bytes()
        for path in out.glob("tokens-*.arrow")
    )
    notes.append(f"the same tokens with {workers} workers and with --memory 1: {same}")
    return values, notes, out


@contextmanager
def timed(values: Values, name: str, num: float, unit: str) -> Iterator[None]:
    """By CPU seconds."""
    start = time.process_time()
    yield
    values[name] = Value(num / (time.process_time() - start), unit)
    print(f"  {name}: {values[name].value / 1e6:.1f} M{unit}", flush=True)


def kernel_values(text: Path) -> Values:
    values: Values = {}
    column = pyarrow.array(some_texts(text, KERNEL_BYTES), pyarrow.large_string())
    text_N, offsets = packed(column)
    encoder = CorpusTokenizer(Tokenizer.load(resolve_model("demo")))
    encoder.encode(column[:64])
    with timed(values, "tokenize", len(text_N), "B/s"):
        encoder.encode(column)
    options = DuplicateOptions()
    shape = {"bands": options.bands, "rows": options.rows, "ngram": options.ngram}
    signatures(text_N[: int(offsets[64])], offsets[:65].contiguous(), **shape)
    with timed(values, f"signatures {options.bands} x {options.rows}", len(text_N), "B/s"):
        signatures(text_N, offsets, **shape)
    with timed(values, "signatures 14 x 8", len(text_N), "B/s"):
        signatures(text_N, offsets, bands=14, rows=8, ngram=options.ngram)
    return values


def loader_values(corpus: Path) -> Values:
    values: Values = {}
    store = open_corpus(corpus)
    windows = split_data(
        store, sequence_length=WINDOW, vocab_size=store.vocab_size, held_out=0.0
    ).train
    with Loader(windows, DataState(seed=7), sequences=SEQUENCES) as loader:
        for _ in range(windows.num_windows // SEQUENCES + 1):  # an epoch: every page was read
            next(loader)
        with timed(values, "loader, random windows", BATCHES * WINDOW * SEQUENCES, "tokens/s"):
            for _ in range(BATCHES):
                next(loader)
    return values


def true_pairs(texts: list[str], options: DuplicateOptions) -> dict[tuple[int, int], float]:
    """Every pair that is similar enough. Two such sets share one of the rarest hashes of each: of
    the first n - ceil(t n) + 1 of n (prefix filtering).
    """
    column = pyarrow.array(texts, pyarrow.large_string())
    hashes_S, starts = shingle_sets(*packed(column), ngram=options.ngram)
    hashes, sizes = hashes_S.numpy(), starts.diff().numpy()
    owner = np.repeat(np.arange(len(sizes)), sizes)
    _, number, counts = np.unique(hashes, return_inverse=True, return_counts=True)
    order = np.lexsort((number, counts[number], owner))
    place = np.arange(len(order)) - np.repeat(starts[:-1].numpy(), sizes)
    prefix = sizes - np.ceil(options.threshold * sizes - 1e-9).astype(np.int64) + 1
    chosen = order[place < prefix[owner]]
    chosen = chosen[np.lexsort((owner[chosen], number[chosen]))]
    found = set[int]()
    bounds = np.flatnonzero(np.diff(number[chosen])) + 1
    for group in np.split(owner[chosen], bounds):
        if len(group) > 1:
            first, second = np.triu_indices(len(group), 1)
            found.update((group[first] * len(sizes) + group[second]).tolist())
    pairs = np.array([divmod(key, len(sizes)) for key in sorted(found)], np.int64).reshape(-1, 2)
    similarity = similarities(hashes_S, starts, torch.from_numpy(pairs))
    return {
        (int(one), int(other)): float(own)
        for (one, other), own in zip(pairs, similarity, strict=True)
        if own >= options.threshold
    }


def accuracy_values(text: Path, folder: Path) -> Values:
    options = DuplicateOptions()
    texts = list(dict.fromkeys(each for each in texts_of(text) if len(each.split()) >= 50))
    texts = random.Random(3).sample(texts, min(TRUTH_DOCUMENTS, len(texts)))
    truth = true_pairs(texts, options)
    own = near_duplicates(pyarrow.array(texts, pyarrow.large_string()), options)
    found = set(zip(own.first.tolist(), own.second.tolist(), strict=True))
    near = {pair for pair, similarity in truth.items() if similarity < options.threshold + 0.02}
    named: list[Named] = [(str(number), each) for number, each in enumerate(texts)]
    removed = Found(folder / "accuracy", [named], options).near
    lost = [
        name
        for name, (survivor, _) in removed.items()
        if survivor in removed
        or truth.get(tuple(sorted((int(name), int(survivor)))), 0) < options.threshold  # type: ignore[call-overload]
    ]
    loose = unverified(texts, options)
    alone = [
        number for number in loose
        if not any(_is_pair(truth, number, other) for other in _partners(truth, number, loose))
    ]  # fmt: skip
    values = {
        "documents compared exactly": Value(len(texts), "documents"),
        "true pairs at 0.8 or above": Value(len(truth), "pairs"),
        "recall of true pairs": Value(len(found & truth.keys()) / max(1, len(truth)), ""),
        "true pairs at 0.80 to 0.82": Value(len(near), "pairs"),
        "recall of true pairs at 0.80 to 0.82": Value(len(found & near) / max(1, len(near)), ""),
        "pairs found that are none": Value(len(found - truth.keys()), "pairs"),
        "removed": Value(len(removed), "documents"),
        "removed without a survivor": Value(len(lost), "documents"),
        "removed by unverified bands 14 x 8": Value(len(loose), "documents"),
        "of these without a survivor at 0.8": Value(len(alone), "documents"),
    }
    for name, value in values.items():
        print(f"  {name}: {value.value:g}", flush=True)
    return values


def _is_pair(truth: dict[tuple[int, int], float], one: int, other: int) -> bool:
    return (min(one, other), max(one, other)) in truth


def _partners(truth: dict[tuple[int, int], float], number: int, removed: set[int]) -> list[int]:
    """Documents that are kept and similar to this one."""
    both = [pair for pair in truth if number in pair]
    return [other for pair in both for other in pair if other != number and other not in removed]


def unverified(texts: list[str], options: DuplicateOptions) -> set[int]:
    """What goes where documents that share a band are one cluster, of which the first stays: how
    datatrove and text-dedup do it.
    """
    column = pyarrow.array(texts, pyarrow.large_string())
    bands = signatures(*packed(column), bands=14, rows=8, ngram=options.ngram).bands.numpy()
    parent = list(range(len(texts)))

    def root(number: int) -> int:
        while parent[number] != number:
            parent[number] = parent[parent[number]]
            number = parent[number]
        return number

    for band in range(bands.shape[1]):
        first: dict[int, int] = {}
        for number, value in enumerate(bands[:, band].tolist()):
            one, other = root(first.setdefault(value, number)), root(number)
            parent[max(one, other)] = min(one, other)
    return {number for number in range(len(texts)) if root(number) != number}


def peer_values(text: Path, folder: Path, python: str) -> tuple[Values, list[str]]:
    sample = folder / "sample.jsonl"
    with sample.open("wb") as file:
        for each in some_texts(text, SAMPLE_BYTES):
            file.write(orjson.dumps({"text": each}) + b"\n")
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(Tokenizer.load(resolve_model("demo")).plain_backend.to_str())
    argv = [python, str(Path(__file__).with_name("corpus_peers.py")), str(sample), str(tokenizer)]
    environment = os.environ | {"PYTHONPATH": "", "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
    done = subprocess.run(argv, stdout=subprocess.PIPE, env=environment, check=True)
    values, notes = {}, []
    for name, result in json.loads(done.stdout.splitlines()[-1]).items():
        if "failed" in result:
            notes.append(f"peer {name} did not run: {result['failed']}")
            continue
        values[f"peer {name}"] = Value(result["bytes"] / result["cpu_s"], "B/s")
        notes.append(f"peer {name}: on a sample of {result['bytes'] / 1e6:.1f} MB of the same text")
        print(f"  {name}: {values[f'peer {name}'].value / 1e6:.2f} MB/s", flush=True)
    return values, notes


def section(name: str, work: Callable[[], Any]) -> Any:
    start = time.perf_counter()
    print(name, flush=True)
    result = work()
    print(f"  ({time.perf_counter() - start:.0f} s)", flush=True)
    return result


def main() -> None:
    if sys.argv[1:2] == ["prepare"]:
        prepare(Path(sys.argv[2]), Path(sys.argv[3]))
        return
    if sys.argv[1:2] == ["memory"]:
        memory_of_more(Path(sys.argv[2]), float(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(prog="corpus_speed", description=__doc__)
    parser.add_argument("text", type=Path, help="folder that `prepare` wrote")
    parser.add_argument("--peers", metavar="PYTHON", help="one that has datatrove and tokenizers")
    parser.add_argument("--workers", type=int, default=2, help="of the chain (default: 2)")
    parser.add_argument("--save", type=Path, metavar="DIR", help="write the record there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        values, notes, corpus = section(
            "chain", lambda: chain_values(args.text, folder, args.workers)
        )
        values |= section("kernels, one core", lambda: kernel_values(args.text))
        values |= section("loader, one core", lambda: loader_values(corpus))
        values |= section("near duplicates", lambda: accuracy_values(args.text, folder))
        if args.peers:
            of_peers, more = section("peers", lambda: peer_values(args.text, folder, args.peers))
            values, notes = values | of_peers, [*notes, *more]
    for key, value in values.items():
        print(f"{key}: {value.value:,.4g} {value.unit}")
    for note in notes:
        print(note)
    if args.save:
        command = ("corpus_speed", *sys.argv[1:])
        print(Record.create("corpus", detect("cpu"), values, command, notes).save(args.save))


if __name__ == "__main__":
    main()
