"""llama.cpp as a peer: what it is asked for, against a package that only writes that down, and the
line that says how to install it.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ridgeline.bench.llama_cpp import BATCH, LlamaCpp, check_gguf
from ridgeline.bench.peers import llama_cpp_runs
from ridgeline.data.workload import Workload, WorkloadRequest
from ridgeline.errors import UnsupportedError

VOCABULARY = 40


class Package:
    """Tokens follow their number: 7 comes after 6."""

    def __init__(self) -> None:
        self.steps: list[list[tuple[int, int, int, bool]]] = []
        self.logits = (ctypes.c_float * VOCABULARY)()

    def __getattr__(self, name: str) -> Any:
        return lambda *_: SimpleNamespace() if name.endswith("params") else 1

    def llama_vocab_n_tokens(self, _: object) -> int:
        return VOCABULARY

    def llama_print_system_info(self) -> bytes:
        return b" AVX2 = 1 "

    def llama_batch_init(self, size: int, *_: int) -> Any:
        ids = [[0] for _ in range(size)]
        lists = {name: [0] * size for name in ("token", "pos", "n_seq_id", "logits")}
        return SimpleNamespace(n_tokens=0, seq_id=ids, **lists)

    def llama_decode(self, _: object, batch: Any) -> int:
        rows = range(batch.n_tokens)
        assert all(batch.n_seq_id[row] == 1 for row in rows)
        self.steps.append(
            [
                (batch.token[r], batch.pos[r], batch.seq_id[r][0], bool(batch.logits[r]))
                for r in rows
            ]
        )
        return 0

    def llama_get_logits_ith(self, _: object, row: int) -> Any:
        token, _, _, wanted = self.steps[-1][row]
        assert wanted, "logits that were not asked for"
        for number in range(VOCABULARY):
            self.logits[number] = float(number == (token + 1) % VOCABULARY)
        return ctypes.cast(self.logits, ctypes.POINTER(ctypes.c_float))


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Package:
    made = Package()
    monkeypatch.setitem(sys.modules, "llama_cpp", made)  # type: ignore[arg-type]
    return made


def test_one_request_by_itself(package: Package) -> None:
    peer = LlamaCpp(Path("model.gguf"), num_threads=2)
    assert peer.build == "AVX2 = 1"
    peer.alone([3, 9, 5], 3)
    assert package.steps == [
        [(3, 0, 0, False), (9, 1, 0, False), (5, 2, 0, True)],
        [(6, 3, 0, True)],
        [(7, 4, 0, True)],
    ]


def test_long_prompts_come_in_batches(package: Package) -> None:
    LlamaCpp(Path("model.gguf"), num_threads=2).alone([1] * (BATCH + 2), 1)
    assert [len(step) for step in package.steps] == [BATCH, 2]
    assert [row[3] for row in package.steps[1]] == [False, True]


def test_requests_of_different_lengths_together(package: Package) -> None:
    peer = LlamaCpp(Path("model.gguf"), num_threads=2, num_requests=3)
    peer.together([[1, 2], [5], [8]], [3, 1, 2])
    assert package.steps[3:] == [[(3, 2, 0, True), (9, 1, 2, True)], [(4, 3, 0, True)]]


def test_a_workload_is_run_both_ways(package: Package) -> None:
    workload = Workload("two", (WorkloadRequest(4, 3), WorkloadRequest(2, 2)))
    peer = LlamaCpp(Path("model.gguf"), num_threads=2, num_requests=2)
    runs = list(llama_cpp_runs(peer, workload))
    assert [(run.name, run.num_output_tokens) for run in runs] == [
        ("one by one", 5),
        ("all at once", 5),
    ]
    assert runs[0].decode_tokens_per_s is not None
    assert runs[1].decode_tokens_per_s is None


def test_without_the_package_one_line_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(UnsupportedError, match="pip install llama-cpp-python"):
        LlamaCpp(Path("model.gguf"), num_threads=2)


@pytest.mark.parametrize("given", [Path("folder"), "llama-3.1-8b"])
def test_only_a_gguf_file_is_the_same_model(given: object) -> None:
    with pytest.raises(UnsupportedError, match="runs a GGUF file on a CPU"):
        check_gguf(given)
