"""Triton kernels run under its interpreter here: decided before the first kernel is imported.

Tests are in two tiers. `make test` runs all but those marked `slow`; `make test-all` runs all. Of
a test with many parameters `@pytest.mark.sweep(keep=3)` leaves three in the first tier, spread over
the list; with `each="op"`, three for each value of that parameter.

With several processes the files that take longest are handed out first, so that none of them runs
at the end while another process has nothing left. xdist's own order, most tests first, begins with
thousands of quick ones.
"""

import os

import pytest

os.environ["TRITON_INTERPRET"] = "1"

import interpreter

interpreter.install()

# Each takes 8 s of CPU or more, or waits as long (2026-11-19).
LONGEST = (
    *("test_compile.py", "test_kernels.py", "test_corpus_kills.py", "test_rank_saving.py"),
    *("test_skinny_cuda.py", "test_cli.py", "test_train_layout.py", "test_speculation.py"),
    *("test_engine.py", "test_server_command.py", "test_replicas.py", "test_documents.py"),
    *("test_demo.py", "test_supervisor.py", "test_rank_processes.py", "test_rank_starting.py"),
    *("test_tune_command.py", "test_layout_steps.py", "test_layout_scale.py"),
    *("test_rank_adapters.py", "test_deterministic.py", "test_sample_rows.py", "test_grammar.py"),
    *("test_server_page.py", "test_server_life.py", "test_bench_serve.py", "test_bench_engine.py"),
    *("test_decode_cuda.py", "test_server_soak.py", "test_report_page.py"),
    *("test_ladder_workers.py", "test_scheduler_random.py"),
)


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False


@pytest.hookimpl(tryfirst=True)  # before pytest drops what `-m "not slow"` does not want
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path.name, len(LONGEST)))
    for group in swept(items).values():
        for item in slow_ones(group):
            item.add_marker(pytest.mark.slow)


def swept(items: list[pytest.Item]) -> dict[tuple[object, ...], list[pytest.Item]]:
    """The items of each test that is a sweep, and of each value of its parameter `each`."""
    groups: dict[tuple[object, ...], list[pytest.Item]] = {}
    for item in items:
        mark = item.get_closest_marker("sweep")
        if mark is not None and isinstance(item, pytest.Function):
            each = mark.kwargs.get("each")
            value = id(item.callspec.params[each]) if each else None
            groups.setdefault((item.path, item.originalname, value), []).append(item)
    return groups


def slow_ones(group: list[pytest.Item]) -> list[pytest.Item]:
    mark = group[0].get_closest_marker("sweep")
    assert mark is not None
    keep = mark.kwargs["keep"]
    kept = {number * len(group) // keep for number in range(keep)}
    return [item for number, item in enumerate(group) if number not in kept]
