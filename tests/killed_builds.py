"""Builds of a corpus that are killed at a write, in processes forked from this one, which has
imported all and computed nothing. Run by tests/cpu/test_corpus_kills.py:

    python killed_builds.py RAW OUT TOKENIZER EVERY

builds OUT/whole undisturbed, counting its writes; then for every EVERY-th of them OUT/kill-N,
killed (-9) there and built to its end; and OUT/full, which runs into a full disk first. It prints
JSON: how many writes there were, how each first process ended, and the exit code of the disk's.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ridgeline.data.corpus.build import BuildOrder, build
from ridgeline.data.corpus.engines.local import ThisProcess
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


def counted(kill_at: int | None, counter: Path) -> None:
    """Count calls of `os` that write, and die at one."""
    num_calls = 0

    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal num_calls
            for moment in ("before", "after"):
                if num_calls == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                num_calls += 1
                if moment == "before":
                    result = original(*args, **options)
            counter.write_text(str(num_calls))
            return result

        return call

    for name in WRITES:
        setattr(os, name, wrapped(getattr(os, name)))


def main(raw: str, out: Path, tokenizer: str, every: int) -> dict[str, Any]:
    recipe = CorpusRecipe(read=ReadOptions(unit_mb=1), tokens=TokenOptions(tokenizer=tokenizer))

    def run(name: str, kill_at: int | None = None, watched: bool = False) -> int:
        if watched:
            counted(kill_at, out / "writes")
        build(BuildOrder((raw,), out / name, recipe, resume=True), ThisProcess())
        return 0

    def run_full() -> int:
        """Files may not grow beyond what the documents table of one unit takes."""
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            return run("full")
        except OutputError as error:
            return error.exit_code

    status = in_fork(lambda: run("whole", watched=True))
    assert status == 0, status
    num_writes = int((out / "writes").read_text())
    ends = []
    for number in range(0, num_writes, every):
        name = f"kill-{number}"
        ends.append(in_fork(lambda name=name, number=number: run(name, number, watched=True)))
        assert in_fork(lambda name=name: run(name)) == 0, name
    code = os.waitstatus_to_exitcode(in_fork(run_full))
    assert in_fork(lambda: run("full")) == 0
    return {"writes": num_writes, "ends": ends, "full": code}


if __name__ == "__main__":
    raw, out, tokenizer, every = sys.argv[1:]
    print(json.dumps(main(raw, Path(out), tokenizer, int(every))))
