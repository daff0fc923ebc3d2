"""Builds of a corpus that are killed at a write, in processes forked from this one, which has
imported all and computed nothing. Run by tests/cpu/test_corpus_kills.py:

    python killed_builds.py RAW OUT TOKENIZER EVERY

builds OUT/whole undisturbed, and OUT/counted, counting its writes; then for every EVERY-th of them
OUT/kill-N, killed (-9) there and built to its end; and OUT/full, which runs into a full disk first.
With an EVERY of 1 what each kill would leave is copied as OUT/counted is built, and gone on with: a
write that left what another did is done with it, and so is each file cut in half on its way.
It prints JSON: how many writes there were, how each first process ended, how many different states
were gone on with, which of them ended with other bytes, and the exit code of the disk's.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from raw_files import corpus_hashes

from ridgeline.data.corpus.build import BuildOrder, build
from ridgeline.data.corpus.engines.local import ThisProcess
from ridgeline.data.corpus.ledger.task import TEMPORARY
from ridgeline.data.corpus.recipe import CorpusRecipe, ReadOptions, TokenOptions
from ridgeline.errors import OutputError

WRITES = (
    "replace",
    "fsync",
    "write",
    "unlink",
)  # of `os`: each is a place to die, before and after


def in_fork(work: Callable[[], int]) -> int:
    """What `waitpid` says of a child that does this."""
    child = os.fork()
    if not child:
        code = 70
        try:
            code = work()
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


def counted(kill_at: int | None, counter: Path, on_write: Callable[[int], None]) -> None:
    """Count calls of `os` that write, and die at one."""
    num_calls = 0

    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal num_calls
            for moment in ("before", "after"):
                if num_calls == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                on_write(num_calls)
                num_calls += 1
                if moment == "before":
                    result = original(*args, **options)
            counter.write_text(str(num_calls))
            return result

        return call

    for name in WRITES:
        setattr(os, name, wrapped(getattr(os, name)))


class KeptStates:
    """Copies of a folder as it is at each write, one of each state."""

    def __init__(self, folder: Path, out: Path) -> None:
        self.folder, self.out = folder, out
        self._seen: set[str] = set()

    def keep(self, number: int) -> None:
        if not self.folder.exists():
            return
        if self._is_new(content_of(self.folder)):
            shutil.copytree(self.folder, self.out / f"kill-{number}")
        for half in self.folder.rglob(f".*{TEMPORARY}"):
            self._keep_cut(half, f"kill-{number}-{half.name}")

    def _keep_cut(self, path: Path, name: str) -> None:
        """As if it had been written up to its middle."""
        if path.is_dir() or not self._is_new(f"half of {path.name}"):
            return
        shutil.copytree(self.folder, self.out / name)
        copy = self.out / name / path.relative_to(self.folder)
        os.truncate(copy, copy.stat().st_size // 2)

    def _is_new(self, state: str) -> bool:
        is_new = state not in self._seen
        self._seen.add(state)
        return is_new


def content_of(folder: Path) -> str:
    """Of a folder; a builder's own number and what is random in names set aside."""
    digest = hashlib.sha256()
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        digest.update(f"{path.relative_to(folder)} {path.stat().st_size} ".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def main(raw: str, out: Path, tokenizer: str, every: int) -> dict[str, Any]:
    recipe = CorpusRecipe(read=ReadOptions(unit_mb=1), tokens=TokenOptions(tokenizer=tokenizer))
    states = KeptStates(out / "counted", out)

    def run(name: str) -> int:
        build(BuildOrder((raw,), out / name, recipe, resume=True), ThisProcess())
        return 0

    def run_watched(name: str, kill_at: int | None = None) -> int:
        is_kept = every == 1 and kill_at is None
        counted(kill_at, out / "writes", states.keep if is_kept else lambda number: None)
        return run(name)

    def run_full() -> int:
        """Files may not grow beyond half of what the largest one has."""
        limit = max(path.stat().st_size for path in (out / "whole").rglob("*")) // 2
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        try:
            return run("full")
        except OutputError as error:
            return error.exit_code

    def killed_at(numbers: Iterator[int]) -> Iterator[int]:
        for number in numbers:
            name = f"kill-{number}"
            yield in_fork(lambda name=name, number=number: run_watched(name, number))

    # What computing keeps for later (libraries, tables) is written by the first build of a home.
    assert in_fork(lambda: run("whole")) == 0
    assert in_fork(lambda: run_watched("counted")) == 0
    num_writes = int((out / "writes").read_text())
    ends = [] if every == 1 else list(killed_at(iter(range(0, num_writes, every))))
    whole, num_states = corpus_hashes(out / "whole"), 0
    different = [] if corpus_hashes(out / "counted") == whole else ["counted"]
    for folder in sorted(out.glob("kill-*")):
        assert in_fork(lambda name=folder.name: run(name)) == 0, folder
        num_states += 1
        if corpus_hashes(folder) != whole:
            different.append(folder.name)
        shutil.rmtree(folder)
    code = os.waitstatus_to_exitcode(in_fork(run_full))
    assert in_fork(lambda: run("full")) == 0
    if corpus_hashes(out / "full") != whole:
        different.append("full")
    return {
        "writes": num_writes,
        "ends": ends,
        "states": num_states,
        "different": different,
        "full": code,
    }


if __name__ == "__main__":
    raw, out, tokenizer, every = sys.argv[1:]
    print(json.dumps(main(raw, Path(out), tokenizer, int(every))))
