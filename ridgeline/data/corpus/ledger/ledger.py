"""The ledger of a build: which tasks are done, and what they gave.

A task's note is a line of `ledger.jsonl`, added after its output has its name and is on the disk.
A task that was killed before is done again; it writes the same bytes.

    ledger = BuildLedger(corpus)
    notes = ledger.run("documents", tasks, engine, progress)      # in the order of the tasks
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ridgeline.data.corpus.engines.engine import TaskEngine
from ridgeline.data.corpus.ledger.task import (
    WORK_FOLDER,
    CorpusTask,
    TaskNote,
    file_hash,
    remove_leftovers,
)
from ridgeline.formats.line_store import append_lines, read_lines
from ridgeline.progress import Progress

NAME = "ledger.jsonl"


class BuildLedger:
    """Of a folder: outputs lie in it, and the ledger itself among what is removed at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / WORK_FOLDER / NAME
        remove_leftovers(folder)
        self._notes = {note.name: note for line in read_lines(self._path) if (note := _note(line))}
        self._hashes: dict[str, str] = {}  # of outputs of this run

    def forget(self) -> None:
        """The build is done: notes, and all that only its tasks needed."""
        self._path.unlink(missing_ok=True)
        for path in (self.folder / WORK_FOLDER).iterdir():
            if path.is_dir():
                shutil.rmtree(path)

    def run(
        self,
        stage: str,
        tasks: Sequence[CorpusTask],
        engine: TaskEngine,
        progress: Progress | None = None,
    ) -> list[TaskNote]:
        """Every task done, and their notes in the order of the tasks."""
        keys = {task.name: task.key(self._hashes) for task in tasks}
        assert len(keys) == len(tasks), f"{stage}: two tasks of one name"
        notes = {task.name: self._done(task, keys[task.name]) for task in tasks}
        left = [task for task in tasks if notes[task.name] is None]
        total = sum(task.num_bytes for task in tasks)
        sizes = {task.name: task.num_bytes for task in tasks}
        finished = total - sum(task.num_bytes for task in left)
        for note in engine.run(self.folder, [(task, keys[task.name]) for task in left]):
            append_lines(self._path, [json.dumps(asdict(note))], keep_all=True)
            notes[note.name] = self._notes[note.name] = note
            finished += sizes[note.name]
            if progress is not None:
                progress(stage, finished, total)
        done = [each for task in tasks if (each := notes[task.name]) is not None]
        assert len(done) == len(tasks), f"{stage}: the engine left tasks out"
        self._hashes |= {note.output: note.sha256 for note in done}
        return done

    def _done(self, task: CorpusTask, key: str) -> TaskNote | None:
        """The note of an earlier run, if what it tells of is there."""
        note = self._notes.get(task.name)
        if note is None or note.key != key:
            return None
        path = self.folder / note.output
        if not path.is_file() or path.stat().st_size != note.num_bytes:
            return None
        return note if file_hash(path) == note.sha256 else None


def _note(line: bytes) -> TaskNote | None:
    """None for half a line, left by a writer that was killed."""
    try:
        return TaskNote(**json.loads(line))
    except (ValueError, TypeError):
        return None
