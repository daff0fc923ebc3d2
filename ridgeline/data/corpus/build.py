"""The chain: cut, read and judge, find duplicates, tokenize, index; tasks of the ledger, all.

    report = build(BuildOrder(("crawl/*.jsonl",), Path("corpus"), CorpusRecipe()), engine)

A build that was stopped goes on with `resume`, and ends with the bytes that it would have had.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ridgeline.data.corpus.decontamination import decontaminate, evaluation_task
from ridgeline.data.corpus.duplicates import DuplicateReport, duplicate_tasks
from ridgeline.data.corpus.engines.engine import TaskEngine
from ridgeline.data.corpus.ledger.ledger import BuildLedger
from ridgeline.data.corpus.ledger.lock import builder_lock
from ridgeline.data.corpus.ledger.task import WORK_FOLDER, CorpusTask, TaskNote
from ridgeline.data.corpus.names import INDEX_NAME
from ridgeline.data.corpus.recipe import FILE_NAME, CorpusRecipe, as_json
from ridgeline.data.corpus.report import accounts, stage_rates, summed
from ridgeline.data.corpus.shards import write_documents, write_index, write_tokens
from ridgeline.data.corpus.sources.read import file_state
from ridgeline.data.corpus.stages.documents import KEPT, documents
from ridgeline.data.corpus.stages.excluding import exclude
from ridgeline.data.corpus.stages.language import is_identified
from ridgeline.data.corpus.stages.quality import PolarsEngine
from ridgeline.data.corpus.units.cutting import cut_files, read_pieces
from ridgeline.data.corpus.units.files import InputFile, input_files
from ridgeline.data.corpus.units.unit import FileState, Unit, units_of
from ridgeline.data.tokenizer import Tokenizer
from ridgeline.errors import CorpusError, OutputError
from ridgeline.formats.files import atomic_write
from ridgeline.models.checkpoint import resolve_model
from ridgeline.progress import Progress

FILES_AT_ONCE = 256  # that one task cuts, where that takes no reading
REPORT_NAME = "report.json"
# As they are shown; copies come last, when it is known what else is left out.
DUPLICATE_STAGES = ("bands", "pairs", "shingles", "similarity", "near duplicates", "copies")
CONTAMINATED = "contaminated"
Removals = dict[str, str]  # by verdict, the file that lists the documents


@dataclass(frozen=True)
class BuildOrder:
    patterns: tuple[str, ...]
    out: Path
    recipe: CorpusRecipe
    resume: bool = False
    polars: PolarsEngine = "auto"


def build(
    order: BuildOrder, engine: TaskEngine, progress: Progress | None = None
) -> dict[str, Any]:
    """The report, which is also kept beside the corpus."""
    out = order.out
    if out.is_file():
        raise OutputError(f"{out} is a file; give a folder to write to")
    if not order.resume and out.is_dir() and any(out.iterdir()):
        raise OutputError(
            f"{out} is not empty; --resume goes on with what is in it, or give another"
        )
    is_identified(order.recipe.language)
    files = input_files(order.patterns)
    with builder_lock(out / WORK_FOLDER):
        return _CorpusBuilder(order, engine, progress).run(files)


class _CorpusBuilder:
    def __init__(self, order: BuildOrder, engine: TaskEngine, progress: Progress | None) -> None:
        self._order, self._recipe, self._out = order, order.recipe, order.out
        self._engine, self._progress = engine, progress
        self._ledger = BuildLedger(order.out)
        self._later: list[TaskNote] = []  # between documents and shards
        self._facts: dict[str, Any] = {}  # what they came to
        self._words: list[str] = []  # what a reader of the report has to know
        if not is_identified(self._recipe.language) and self._recipe.language.identify == "auto":
            self._words.append(
                "languages are not named: no model lid.176 (pip install 'ridgeline[language]')"
            )

    def run(self, files: Sequence[InputFile]) -> dict[str, Any]:
        states = [_state(file) for file in files]
        done = self._finished(files, states)
        if done is not None:
            return done
        tokenizer = Tokenizer.load(resolve_model(self._recipe.tokens.tokenizer))
        (self._out / INDEX_NAME).unlink(missing_ok=True)
        sets = self._evaluations()
        units = self._cut(files, states)
        judged = self._documents(units)
        cleared = self._clear(judged, sets)
        removals = self._duplicates(cleared)
        shards = self._shards(cleared, removals, tokenizer.digest)
        return self._finish(files, states, judged, shards)

    def _cut(self, files: Sequence[InputFile], states: Sequence[FileState]) -> list[Unit]:
        """Packed files and archives are read for it, each by a task of its own."""
        tasks = []
        for number, group in enumerate(_groups(files)):
            tasks.append(
                CorpusTask(
                    f"cut/{number:06d}",
                    cut_files,
                    f"{WORK_FOLDER}/cut/{number:06d}.json",
                    arguments={
                        "files": [files[index] for index in group],
                        "states": [states[index] for index in group],
                        "options": self._recipe.read,
                    },
                    num_bytes=max(1, sum(states[index].num_bytes for index in group)),
                )
            )
        notes = self._ledger.run("cut", tasks, self._engine, self._progress)
        pieces = [piece for note in notes for piece in read_pieces(self._out / note.output)]
        return units_of(pieces, self._recipe.read.unit_bytes)

    def _documents(self, units: Sequence[Unit]) -> list[TaskNote]:
        languages = is_identified(self._recipe.language)
        tasks = [
            CorpusTask(
                f"documents/{unit.name}",
                documents,
                f"{WORK_FOLDER}/documents/{unit.name}.parquet",
                arguments={
                    "unit": unit,
                    "recipe": _judging(self._recipe),
                    "languages": languages,
                    "engine": self._order.polars,
                },
                num_bytes=max(1, unit.num_bytes),
            )
            for unit in units
        ]
        notes = self._ledger.run("documents", tasks, self._engine, self._progress)
        if not any(note.counts["verdicts"].get("") for note in notes):
            raise CorpusError(_nothing_kept(notes))
        return [note for note in notes if note.counts["verdicts"]]

    def _evaluations(self) -> str | None:
        """The file with the texts of evaluation sets. They come first: what is wrong with them is
        known before the input is read.
        """
        files = self._recipe.evaluations.files
        if not files:
            return None
        task, sets = evaluation_task(files)
        self._ledger.run("evaluation sets", [task], self._engine, self._progress)
        return sets

    def _clear(self, judged: list[TaskNote], sets: str | None) -> list[TaskNote]:
        """Without documents that repeat an evaluation set. They go before duplicates are looked
        for: what is left out as a duplicate has one that stays.
        """
        if sets is None:
            return judged
        options = self._recipe.evaluations
        tasks = [
            CorpusTask(
                f"contaminated/{number:06d}",
                decontaminate,
                f"{WORK_FOLDER}/contaminated/{number:06d}.parquet",
                (note.output, sets),
                {"options": options},
                num_bytes=1 + note.counts["kept_bytes"],
            )
            for number, note in enumerate(judged)
        ]
        lists = self._ledger.run("contaminated", tasks, self._engine, self._progress)
        tasks = [
            CorpusTask(
                f"cleared/{number:06d}",
                exclude,
                f"{WORK_FOLDER}/cleared/{number:06d}.parquet",
                (note.output, repeated.output),
                {"verdict": CONTAMINATED},
                num_bytes=1 + note.counts["kept_bytes"],
            )
            for number, (note, repeated) in enumerate(zip(judged, lists, strict=True))
        ]
        cleared = self._ledger.run("cleared", tasks, self._engine, self._progress)
        self._later += [*lists, *cleared]
        self._facts["contaminated"] = dict(summed(lists, "contaminated_by_set"))
        return cleared

    def _duplicates(self, judged: Sequence[TaskNote]) -> Removals:
        """Verdicts, and for each the list of the whole corpus's documents."""
        options = self._recipe.duplicates
        if not options.remove:
            return {}
        num_bytes = sum(note.counts["kept_bytes"] for note in judged)
        num_documents = sum(note.counts["verdicts"].get(KEPT, 0) for note in judged)
        tables = [note.output for note in judged]
        steps = duplicate_tasks(tables, num_bytes, num_documents, options)
        notes = [
            note
            for stage, tasks in zip(DUPLICATE_STAGES, steps.stages, strict=True)
            for note in self._ledger.run(stage, tasks, self._engine, self._progress)
        ]
        report = DuplicateReport.of([note.counts for note in notes], options)
        self._facts["duplicates"] = report.to_json()
        self._later += notes
        return {"exact_duplicate": steps.exact, "near_duplicate": steps.near}

    def _shards(
        self, judged: Sequence[TaskNote], removals: Removals, digest: str
    ) -> list[TaskNote]:
        """Tokens of each unit, then the table of its documents."""
        options = self._recipe.tokens
        removed = tuple(removals.values())
        arguments = {
            "tokenizer": options.tokenizer,
            "digest": digest,
            "verdicts": list(removals),
            "certify": options.certify,
        }
        tasks = [
            CorpusTask(
                f"tokens/{number:06d}",
                write_tokens,
                f"tokens-{number:06d}.arrow",
                (note.output, *removed),
                arguments,
                num_bytes=1 + note.counts["kept_bytes"],
            )
            for number, note in enumerate(judged)
        ]
        tokens = self._ledger.run("tokens", tasks, self._engine, self._progress)
        tasks = [
            CorpusTask(
                f"tables/{number:06d}",
                write_documents,
                f"documents-{number:06d}.parquet",
                (table.output, *removed, shard.output),
                {"verdicts": list(removals)},
                num_bytes=1 + table.counts["kept_bytes"],
            )
            for number, (table, shard) in enumerate(zip(judged, tokens, strict=True))
        ]
        return [*tokens, *self._ledger.run("tables", tasks, self._engine, self._progress)]

    def _finish(
        self, files: Sequence[InputFile], states: Sequence[FileState], judged: Sequence[TaskNote],
        shards: Sequence[TaskNote],
    ) -> dict[str, Any]:  # fmt: skip
        for path in [*self._out.glob("tokens-*.arrow"), *self._out.glob("documents-*.parquet")]:
            if path.name not in {note.output for note in shards}:
                path.unlink()  # of an earlier recipe
        facts = accounts(judged, shards) | self._facts
        with atomic_write(self._out / FILE_NAME) as file:
            file.write(as_json(self._recipe))
        index = write_index(
            self._out, {"recipe": asdict(self._recipe)} | facts,
            {note.output: note.sha256 for note in shards},
        )  # fmt: skip
        report = facts | {
            "tokens": index.num_tokens,
            "certificate": index.certificate.words(),
            "notes": self._words,
            "stages": stage_rates(judged, [*self._later, *shards]),
        }
        with atomic_write(self._out / WORK_FOLDER / REPORT_NAME) as file:
            kept = {"inputs": _identity(files, states, self._recipe), "report": report}
            json.dump(kept, file, indent=1)
        self._ledger.forget()
        return report

    def _finished(
        self, files: Sequence[InputFile], states: Sequence[FileState]
    ) -> dict[str, Any] | None:
        """The report of a build of the same that is done."""
        path = self._out / WORK_FOLDER / REPORT_NAME
        if not (path.is_file() and (self._out / INDEX_NAME).is_file()):
            return None
        kept: dict[str, Any] = json.loads(path.read_text())
        is_same = kept["inputs"] == _identity(files, states, self._recipe)
        return kept["report"] if is_same else None


def _groups(files: Sequence[InputFile]) -> list[list[int]]:
    """Numbers of files: those that are read to be cut alone, others together."""
    groups: list[list[int]] = [[]]
    for number, file in enumerate(files):
        is_read = (bool(file.packing) and file.kind != "html") or file.kind in ("warc", "arrow")
        if is_read or len(groups[-1]) == FILES_AT_ONCE:
            groups.append([])
        groups[-1].append(number)
        if is_read:
            groups.append([])
    return [group for group in groups if group]


def _judging(recipe: CorpusRecipe) -> CorpusRecipe:
    """Without what comes later: another tokenizer does not judge documents anew."""
    return CorpusRecipe(recipe.read, recipe.clean, recipe.quality, recipe.language, recipe.pii)


def _state(file: InputFile) -> FileState:
    return FileState() if file.kind == "refused" else file_state(file.name)


def _identity(
    files: Sequence[InputFile], states: Sequence[FileState], recipe: CorpusRecipe
) -> list[Any]:
    """JSON-ready, to be compared with that of another run."""
    own = [[file.name, state.num_bytes, state.modified_ns]
           for file, state in zip(files, states, strict=True)]  # fmt: skip
    return [json.loads(json.dumps(asdict(recipe))), own]


def _nothing_kept(notes: Sequence[TaskNote]) -> str:
    verdicts = [(name, count) for note in notes for name, count in note.counts["verdicts"].items()]
    total = sum(count for _, count in verdicts)
    words = f"no document is left of {total:,}"
    refused = [each for note in notes for each in note.counts["quarantined"]]
    if refused:
        file, offset, reason = refused[0]
        return f"{words}; the first that was quarantined: {file} at {offset}: {reason}"
    most = max(verdicts, key=lambda each: each[1])[0] if verdicts else "no document"
    return f"{words}; most by the rule {most}: `data build --show` has the recipe's rules"
