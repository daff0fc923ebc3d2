"""What a build will take, before anything runs: a few megabytes of the input go through every stage
into a temporary folder, are timed, and stand for the rest.

    plan(("crawl/*.jsonl.gz",), CorpusRecipe(), workers=2)["hours"]
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ridgeline.data.corpus.decontamination import decontaminate, evaluation_task
from ridgeline.data.corpus.duplicates import duplicate_tasks
from ridgeline.data.corpus.engines.local import ThisProcess
from ridgeline.data.corpus.ledger.ledger import BuildLedger
from ridgeline.data.corpus.ledger.task import CorpusTask, TaskNote, Work
from ridgeline.data.corpus.recipe import CorpusRecipe
from ridgeline.data.corpus.report import stage_rates
from ridgeline.data.corpus.resources import BUILDER_BYTES, WORKER_BYTES
from ridgeline.data.corpus.shards import write_tokens
from ridgeline.data.corpus.sources.packed import BrokenInput, packing_ratio
from ridgeline.data.corpus.sources.read import file_state
from ridgeline.data.corpus.stages.documents import documents
from ridgeline.data.corpus.stages.excluding import exclude
from ridgeline.data.corpus.stages.language import is_identified
from ridgeline.data.corpus.units.cutting import file_pieces
from ridgeline.data.corpus.units.files import InputFile, input_files
from ridgeline.data.corpus.units.unit import FilePiece, Unit
from ridgeline.data.tokenizer import Tokenizer
from ridgeline.errors import CorpusError
from ridgeline.models.checkpoint import resolve_model

LEAST_FILES, MOST_FILES = 8, 512  # of a sample
SAMPLE_BYTES = 1 << 20  # of each, at most
# of all: what a stage does once, not for each byte, then counts little
WANTED_BYTES = 8 << 20
TAIL = 1.1  # units end at different times, and the last ones leave workers idle


def plan(patterns: Sequence[str], recipe: CorpusRecipe, out: Path, workers: int) -> dict[str, Any]:
    files = [file for file in input_files(patterns) if file.kind != "refused"]
    if not files:
        raise CorpusError("none of the files can be read; `data build` says why of each")
    sizes = [file_state(file.name).num_bytes for file in files]
    chosen = _chosen(files, sizes)
    ratio = _ratio(chosen, recipe)
    num_bytes = round(sum(sizes) * ratio)
    with TemporaryDirectory() as folder:
        judged, later = _sample(Path(folder), chosen, recipe)
    tokens = later[-1]
    counts = judged.counts
    read_bytes = max(1, counts["num_bytes"])
    stages = stage_rates([judged], later)
    rate = read_bytes / max(1e-9, judged.cpu_s + sum(note.cpu_s for note in later))  # of one core
    bandwidth = _read_bandwidth(chosen)
    needed = rate * workers / ratio
    slowest = max(stages, key=lambda row: float(row["cpu_s"]))
    seconds = num_bytes / (rate * workers) * TAIL
    scale = num_bytes / read_bytes
    return {
        "files": len(files),
        "units": max(1, -(-num_bytes // recipe.read.unit_bytes)),
        "input_bytes": sum(sizes),
        "text_bytes": num_bytes,
        "workers": workers,
        "memory_bytes": BUILDER_BYTES + workers * WORKER_BYTES,
        "work_bytes": round(judged.num_bytes * scale),
        "corpus_bytes": round(tokens.num_bytes * scale),
        "free_bytes": shutil.disk_usage(_existing(out)).free,
        "kept_share": counts["verdicts"].get("", 0) / max(1, sum(counts["verdicts"].values())),
        "hours": seconds / 3600,
        "mb_per_s": rate * workers / 1e6,
        "read_mb_per_s": bandwidth / 1e6,
        "read_share": needed / bandwidth,
        "bound": "reading the input" if needed > bandwidth else f"{slowest['stage']}, on the cores",
        "stages": stages,
        "sample_bytes": read_bytes,
    }


def _chosen(files: Sequence[InputFile], sizes: Sequence[int]) -> Sequence[InputFile]:
    """Some of all, more where they are small."""
    mean = max(1, sum(min(size, SAMPLE_BYTES) for size in sizes) // len(sizes))
    count = min(MOST_FILES, max(LEAST_FILES, WANTED_BYTES // mean))
    return files[:: -(-len(files) // count)]


def _ratio(files: Sequence[InputFile], recipe: CorpusRecipe) -> float:
    """Unpacked bytes for each of the input's, the sample's mean."""
    ratios = []
    for file in files:
        try:
            ratios.append(
                packing_ratio(file.name, file.packing, recipe.read.max_ratio, SAMPLE_BYTES)
                if file.packing
                else 1.0
            )
        except BrokenInput:
            continue
    return sum(ratios) / len(ratios) if ratios else 1.0


def _sample(
    folder: Path, files: Sequence[InputFile], recipe: CorpusRecipe
) -> tuple[TaskNote, list[TaskNote]]:
    """Their first megabytes through all stages: the notes of documents, and of what follows, tokens
    last.
    """
    pieces = tuple(_beginning(file, recipe) for file in files)
    run = _SampleRun(folder)
    arguments = {
        "unit": Unit(0, pieces),
        "recipe": recipe,
        "languages": is_identified(recipe.language),
    }
    judged = run.warm("documents", documents, (), arguments)  # loads the language model
    if not judged.counts["verdicts"].get(""):
        raise CorpusError(
            f"of a sample of {sum(judged.counts['verdicts'].values())} documents the recipe keeps "
            "none; `data build` on some of them says why"
        )
    later = [*_evaluations(run, judged, recipe), *_duplicates(run, judged, recipe)]
    name = recipe.tokens.tokenizer
    digest = Tokenizer.load(resolve_model(name)).digest
    arguments = {"tokenizer": name, "digest": digest, "certify": recipe.tokens.certify}
    return judged, [*later, run.warm("tokens", write_tokens, (judged.output,), arguments)]


class _SampleRun:
    """Tasks in this process."""

    def __init__(self, folder: Path) -> None:
        self._ledger, self._engine = BuildLedger(folder), ThisProcess()

    def tasks(self, stage: str, tasks: Sequence[CorpusTask]) -> list[TaskNote]:
        return self._ledger.run(stage, tasks, self._engine)

    def warm(
        self, stage: str, work: Work, inputs: tuple[str, ...], arguments: dict[str, Any]
    ) -> TaskNote:
        """Of the second of two runs: the first loads what a worker loads once."""
        for name in (f"cold/{stage}", f"{stage}/sample"):
            (note,) = self.tasks(name, [CorpusTask(name, work, name, inputs, arguments)])
        return note


def _evaluations(run: _SampleRun, judged: TaskNote, recipe: CorpusRecipe) -> list[TaskNote]:
    files = recipe.evaluations.files
    if not files:
        return []
    task, sets = evaluation_task(files)
    run.tasks("evaluation sets", [task])
    options = {"options": recipe.evaluations}
    repeated = run.warm("contaminated", decontaminate, (judged.output, sets), options)
    inputs = (judged.output, repeated.output)
    return [repeated, run.warm("cleared", exclude, inputs, {"verdict": "contaminated"})]


def _duplicates(run: _SampleRun, judged: TaskNote, recipe: CorpusRecipe) -> list[TaskNote]:
    """Work of a stage grows with the text, that on pairs with how many are alike: a sample has few
    of those.
    """
    if not recipe.duplicates.remove:
        return []
    counts = judged.counts
    steps = duplicate_tasks(
        [judged.output], counts["kept_bytes"], counts["verdicts"][""], recipe.duplicates
    )
    return [note for stage in steps.stages for note in run.tasks(stage[0].name, stage)]


def _beginning(file: InputFile, recipe: CorpusRecipe) -> FilePiece:
    state = file_state(file.name)
    if file.packing:  # cutting it would read it
        return FilePiece(file.name, file.kind, file.packing, 0, SAMPLE_BYTES, SAMPLE_BYTES, state)
    if file.kind == "warc":
        return FilePiece(file.name, file.kind, "", 0, SAMPLE_BYTES, SAMPLE_BYTES, state)
    first = file_pieces(file, state, recipe.read)[0]
    if first.kind in ("parquet", "arrow"):
        rows = max(1, (first.end - first.begin) * SAMPLE_BYTES // max(1, first.num_bytes))
        return replace(first, end=min(first.end, first.begin + rows))
    return replace(first, end=min(first.end, SAMPLE_BYTES))


def _read_bandwidth(files: Sequence[InputFile]) -> float:
    """Bytes a second, of the disk or of memory where the files are there already."""
    num_bytes, start = 0, time.perf_counter()
    for file in files:
        with open(file.name, "rb") as handle:
            num_bytes += len(handle.read(16 * SAMPLE_BYTES))
    return max(1, num_bytes) / max(1e-9, time.perf_counter() - start)


def _existing(path: Path) -> Path:
    return next(each for each in (path, *path.resolve().parents) if each.exists())
