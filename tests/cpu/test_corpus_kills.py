"""A build that is killed at any write, or runs into a full disk, ends with the bytes of one that
was left alone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from raw_files import corpus_hashes, good_texts, json_lines, tokenizer_folder

from ridgeline.errors import OutputError

SCRIPT = Path(__file__).parent.parent / "killed_builds.py"


def killed(tmp_path: Path, every: int, parts: int) -> dict[str, Any]:
    raw = tmp_path / "raw"
    raw.mkdir()
    texts = list(good_texts())
    for number in range(3):  # a unit each, and texts that stand in two
        chosen = texts[number * 3 : number * 3 + 11]
        own = [f"{text}\n\nPart {part} of file {number}. It has a sentence. It ends here."
               for part in range(parts) for text in chosen]  # fmt: skip
        (raw / f"{number}.jsonl").write_bytes(json_lines(own))
    command = [
        sys.executable, str(SCRIPT), str(raw), str(tmp_path),
        str(tokenizer_folder(tmp_path / "tokenizer")), str(every),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert document["writes"] > 60
    assert document["ends"] == [signal.SIGKILL] * len(document["ends"])
    assert document["full"] == OutputError.exit_code
    assert not document["different"]
    return document


@pytest.mark.slow
def test_a_build_that_was_killed_ends_with_the_same_bytes(tmp_path: Path) -> None:
    assert killed(tmp_path, every=53, parts=14)["states"] > 2
    assert sum(name.startswith("tokens-") for name in corpus_hashes(tmp_path / "whole")) >= 3


@pytest.mark.slow
def test_at_every_write(tmp_path: Path) -> None:
    """What each kill leaves on the disk, by a copy of it; the test above kills."""
    document = killed(tmp_path, every=1, parts=3)
    assert document["states"] > document["writes"] / 8


LONELY = """
import os, time
from ridgeline.data.corpus.engines.local import LocalProcesses

if __name__ == "__main__":
    engine = LocalProcesses(2)
    pids = [engine._pool.submit(os.getpid).result() for _ in range(2)]
    print(*pids, flush=True)
    engine._pool.submit(time.sleep, 600)
    time.sleep(600)
"""


@pytest.mark.slow  # it imports all that workers have
def test_workers_end_with_a_builder_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "lonely.py"
    script.write_text(LONELY)
    builder = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    with builder:
        assert builder.stdout is not None
        pids = {int(pid) for pid in builder.stdout.readline().split()}
        builder.kill()
    for pid in pids:
        for _ in range(600):
            if not is_running(pid):
                break
            time.sleep(0.1)
        assert not is_running(pid)


def is_running(pid: int) -> bool:
    """Nobody may wait for a process whose parent has gone: what has ended is no more."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
