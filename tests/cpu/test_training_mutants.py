"""The tests of training bite: each of these mistakes, made in a copy of the package, fails one.

make test-all, or pytest tests/cpu/test_training_mutants.py -m slow
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEP = "tests/cpu/test_training_step.py"
PACKING = "tests/cpu/test_loading_packing.py"
MIXTURE = "tests/cpu/test_loading_mixture.py"


@dataclass(frozen=True)
class Mutant:
    file: str  # of the package
    right: str
    wrong: str
    tests: str  # of which one fails
    only: str = ""  # pytest's -k


GRADIENTS = "gradients_of_a_batch and not kernels"
MUTANTS = {
    "norm-without-its-mean": Mutant(
        "training/stepping/ops.py",
        "(grad * weight).sub_(normed.mul_(mean)).mul_(scale)",
        "(grad * weight).mul_(scale)",
        STEP,
        GRADIENTS,
    ),
    "norm-without-the-residuals-gradient": Mutant(
        "training/stepping/ops.py", "grad_x += grad_hidden_TD", "pass", STEP, GRADIENTS
    ),
    "norm-weight-from-one-row": Mutant(
        "training/stepping/ops.py",
        "along.flatten(0, -2).sum(0)",
        "along.flatten(0, -2)[0]",
        STEP,
        GRADIENTS,
    ),
    "labels-shifted-in-the-step": Mutant(
        "training/stepping/forward.py",
        "return head_loss(model, hidden_TD, batch.targets)",
        "return head_loss(model, hidden_TD, batch.targets.roll(1))",
        STEP,
        GRADIENTS,
    ),
    "labels-shifted-in-the-data": Mutant(
        "kernels/token_windows/cpu.cpp",
        "targets[i] = static_cast<int32_t>(from[i + 1]);",
        "targets[i] = static_cast<int32_t>(from[i]);",
        PACKING,
    ),
    "labels-shifted-in-its-definition": Mutant(
        "data/loading/packing.py", "tokens[follows]\n", "tokens[follows - 1]\n", MIXTURE, "numpy_s"
    ),
    "mean-of-means": Mutant(
        "training/stepping/step.py",
        "self._pass(batch, seed)\n",
        "self._pass(batch, seed * batches[0].num_targets / batch.num_targets)\n",
        STEP,
        GRADIENTS,
    ),
    "tied-gradient-doubled": Mutant(
        "training/stepping/gradients.py",
        "gradients[name], parameter.grad = local_tensor(parameter.grad), None",
        "gradients[name] = local_tensor(parameter.grad) * (1 + ('embed' in name))",
        STEP,
        GRADIENTS,
    ),
    "tied-table-updated-twice": Mutant(
        "training/stepping/step.py",
        "dict(model.named_parameters())",
        "dict(model.named_parameters(remove_duplicate=False))",
        STEP,
        "tied or plain_loop",
    ),
}


def run_tests(folder: Path, mutant: Mutant) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=line", "-p", "no:cacheprovider"]
    command += [mutant.tests, *(["-k", mutant.only] if mutant.only else [])]
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mutants")
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("ridgeline", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_fails_a_test(name: str, copy: Path) -> None:
    mutant = MUTANTS[name]
    path = copy / "ridgeline" / mutant.file
    right = path.read_text(encoding="utf-8")
    assert right.count(mutant.right) == 1, "the line has changed: change the mutant too"
    path.write_text(right.replace(mutant.right, mutant.wrong), encoding="utf-8")
    try:
        done = run_tests(copy, mutant)
    finally:
        path.write_text(right, encoding="utf-8")
    assert done.returncode == 1, done.stdout[-2000:]  # 1: tests ran, and some failed
    assert "AssertionError" in done.stdout or "assert" in done.stdout, done.stdout[-2000:]


@pytest.mark.slow
def test_without_a_mutant_they_pass(copy: Path) -> None:
    for mutant in (MUTANTS["mean-of-means"], MUTANTS["labels-shifted-in-the-data"]):
        done = run_tests(copy, mutant)
        assert done.returncode == 0, done.stdout[-2000:]
