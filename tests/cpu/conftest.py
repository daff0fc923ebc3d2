"""Triton kernels run under its interpreter here: decided before the first kernel is imported.

With several processes the files that take longest are handed out first, so that none of them runs
at the end while another process has nothing left. xdist's own order, most tests first, begins with
thousands of quick ones.
"""

import os

import pytest

os.environ["TRITON_INTERPRET"] = "1"

import interpreter

interpreter.install()

# Each takes 8 s of CPU or more, or waits as long (2026-11-15).
LONGEST = (
    *(
        "test_compile.py",
        "test_demo.py",
        "test_kernels.py",
        "test_replicas.py",
        "test_server_page.py",
    ),
    *("test_skinny_cuda.py", "test_sample_rows.py", "test_supervisor.py", "test_rank_processes.py"),
    *("test_bench_serve.py", "test_deterministic.py", "test_server_life.py", "test_cli.py"),
    *("test_bench_engine.py", "test_server_soak.py", "test_report_page.py", "test_speculation.py"),
    *("test_ladder_workers.py", "test_scheduler_random.py", "test_engine.py", "test_grammar.py"),
)


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(LONGEST)))
