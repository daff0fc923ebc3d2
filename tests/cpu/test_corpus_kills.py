"""A build that is killed at any write, or runs into a full disk, ends with the bytes of one that
was left alone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from raw_files import corpus_hashes, good_texts, json_lines, tokenizer_folder

from ridgeline.errors import OutputError

SCRIPT = Path(__file__).parent.parent / "killed_builds.py"


def killed(tmp_path: Path, every: int) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    texts = list(good_texts())
    for number in range(3):  # a unit each, and texts that stand in two
        own = [f"{text}\n\nPart {part} of file {number}. It has a sentence. It ends here."
               for part in range(14) for text in texts[number * 3 : number * 3 + 11]]  # fmt: skip
        (raw / f"{number}.jsonl").write_bytes(json_lines(own))
    command = [
        sys.executable, str(SCRIPT), str(raw), str(tmp_path),
        str(tokenizer_folder(tmp_path / "tokenizer")), str(every),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert document["writes"] > 60
    assert document["ends"] == [signal.SIGKILL] * len(document["ends"])
    assert document["full"] == OutputError.exit_code
    whole = corpus_hashes(tmp_path / "whole")
    assert sum(name.startswith("tokens-") for name in whole) >= 3
    for other in (*tmp_path.glob("kill-*"), tmp_path / "full"):
        assert corpus_hashes(other) == whole, other.name


def test_a_build_that_was_killed_ends_with_the_same_bytes(tmp_path: Path) -> None:
    killed(tmp_path, every=29)


@pytest.mark.slow
def test_at_every_write(tmp_path: Path) -> None:
    killed(tmp_path, every=1)
