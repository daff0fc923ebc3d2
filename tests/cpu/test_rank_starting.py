"""Ranks that a command starts itself: they die, hang, refuse their input or are interrupted, and
one line says so. The ranks are tests/rank_program.py, two of them over gloo.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rank_program
import torch
from clock import within
from command_line import make_folder, refused
from test_rank_processes import PACKAGE, is_running
from torch import distributed as dist
from train_runs import Capture, make_text, same_bytes, trained, words

from ridgeline.cli import main
from ridgeline.errors import HardwareError, NumericsError, UsageError
from ridgeline.parallel.layout import Layout
from ridgeline.parallel.mesh import join_mesh
from ridgeline.parallel.starting.meeting import meet
from ridgeline.parallel.starting.place import RankNumbers
from ridgeline.training.watching.metrics import read_metrics

PROGRAM = str(Path(rank_program.__file__))
Started = Callable[..., tuple[int, str, str]]


@pytest.fixture
def started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Started:
    """Starts two ranks with a plan: the exit code, what came to stdout and to stderr."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def start(**plan: Any) -> tuple[int, str, str]:
        code = rank_program.start(tmp_path, 2, {"steps": 4} | plan)
        return code, *capfd.readouterr()

    return start


def one_line(err: str) -> str:
    assert err.startswith("ridgeline: error: ")
    assert err.count("\n") == 1, err
    return err


def test_a_rank_that_is_killed_ends_the_other(started: Started, tmp_path: Path) -> None:
    with within(30):
        code, out, err = started(die={"1": 3})
    assert code == HardwareError.exit_code
    log = tmp_path / "logs" / "rank-1.log"
    assert f"rank 1 was killed by signal 9; its log {log}" in one_line(err)
    assert out == ""
    assert (tmp_path / "at-0").read_text() == "2"
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {"rank-0.log", "rank-1.log"}


def test_what_each_finds_is_said_once(started: Started) -> None:
    refusal = ["input", "x is 1; give 2"]
    code, _, err = started(refuse={"0": refusal, "1": refusal}, restarts=2)
    assert (code, err) == (UsageError.exit_code, "ridgeline: error: x is 1; give 2\n")


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_with_what_the_others_wait_for(
    started: Started, tmp_path: Path
) -> None:
    code, _, err = started(hang={"1": 2}, hang_after=2)
    assert code == HardwareError.exit_code
    line = one_line(err)
    assert re.search(
        r"no progress for \d s: rank 1 has not moved since step 1, it stands in "
        r"rank_program.py:\d+ in hang_here; rank 0 waits in all_reduce with ranks 0, 1 ",
        line,
    ), line
    log = tmp_path / "logs" / "rank-1.log"
    assert str(log) in line
    assert "in hang_here" in log.read_text()  # the whole stack


@pytest.mark.slow
def test_a_rank_that_is_stopped_gives_no_sign_of_life(started: Started) -> None:
    with within(90):
        code, _, err = started(hang={"0": 2}, how="stop", hang_after=25)
    assert code == HardwareError.exit_code
    # Its last beat may be from before the step that it ended last.
    assert re.search("rank 0 gives no sign of life since step [01], and", one_line(err)), err


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "raise", "exit"])
def test_a_restart_goes_on_from_the_checkpoint(started: Started, tmp_path: Path, how: str) -> None:
    code, out, err = started(steps=6, die={"1": 6}, how=how, restarts=1)
    assert code == 0, err
    assert json.loads(out) == [6, 2 * sum(range(1, 7))]
    assert err.startswith("again 1: rank 1 ")
    assert err.count("\n") == 1
    if how == "raise":
        assert "ended with code 70: internal error: the device fell off the bus" in err
    if how == "exit":
        assert "ended with code 3; its log" in err
        assert "ends with: last words" in err
    log = (tmp_path / "logs" / "rank-1.log").read_text()
    assert "--- rank 1 of 2, start 1\n" in log
    assert log.endswith("--- rank 1 of 2, start 2\n")


@pytest.mark.slow
def test_before_a_checkpoint_it_begins_again_and_bad_numbers_are_not_tried_again(
    started: Started,
) -> None:
    code, out, err = started(die={"0": 1}, restarts=1)
    assert (code, json.loads(out)) == (0, [4, 20])
    assert err == "again 1: rank 0 was killed by signal 9\n"
    code, _, err = started(refuse={"1": ["numbers", "NaN in step 3"]}, restarts=1)
    assert code == NumericsError.exit_code
    assert "rank 1 ended with code 14: NaN in step 3" in one_line(err)
    code, _, err = started(hang={"1": 6}, steps=8, restarts=1, hang_after=2)
    assert code == 0
    assert err.startswith("again 1: no progress for ")


def start_program(run: Path, **plan: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, PROGRAM, str(run), "2", json.dumps({"steps": 1000, "pause": 0.05} | plan)],
        env=os.environ | {"PYTHONPATH": PACKAGE, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def children_of(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_for(is_there: Callable[[], bool], seconds: float = 600) -> None:
    end = time.monotonic() + seconds
    while not is_there():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.02)


@pytest.mark.slow
def test_ctrl_c_lets_every_rank_end_its_step(tmp_path: Path) -> None:
    process = start_program(tmp_path)
    wait_for((tmp_path / "at-1").exists)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=600)
    assert (process.returncode, err) == (130, "")
    steps, total = json.loads(out)
    assert total == 2 * sum(range(1, steps + 1))
    assert json.loads((tmp_path / "checkpoint.json").read_text()) == [steps, total]
    assert [(tmp_path / f"at-{rank}").read_text() for rank in (0, 1)] == [str(steps)] * 2


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    process = start_program(tmp_path, hang={"0": 3})
    wait_for((tmp_path / "at-1").exists)
    ranks = children_of(process.pid)
    assert len(ranks) == 2
    for _ in range(2):
        time.sleep(1)
        process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 130
    assert err == "ridgeline: error: interrupted\n"
    assert not any(map(is_running, ranks))


@pytest.mark.slow
def test_ctrl_c_before_the_ranks_have_begun(tmp_path: Path) -> None:
    process = start_program(tmp_path)
    wait_for((tmp_path / "logs" / "rank-1.log").exists)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=600)
    assert (process.returncode, err) == (130, "ridgeline: error: interrupted\n")
    assert not (tmp_path / "at-0").exists()


@pytest.mark.slow
@pytest.mark.parametrize("has_begun", [True, False])
@pytest.mark.parametrize("how", ["sleep", "stop"])
def test_nothing_outlives_the_command(tmp_path: Path, has_begun: bool, how: str) -> None:
    """Killed so that it cannot clean up, with a rank that hangs, or cannot run at all."""
    process = start_program(tmp_path, hang={"1": 2}, how=how)
    wait_for((tmp_path / ("at-1" if has_begun else "logs/rank-1.log")).exists)
    wait_for(lambda: len(children_of(process.pid)) == 2)
    ranks = children_of(process.pid)
    time.sleep(0.5)
    process.kill()
    process.communicate()
    wait_for(lambda: not any(map(is_running, ranks)))


def torchrun(*command: str, size: int = 2, **more: str) -> subprocess.CompletedProcess[str]:
    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    return subprocess.run(
        [sys.executable, *words, *command],
        env=os.environ | {"PYTHONPATH": PACKAGE, "OMP_NUM_THREADS": "1"} | more,
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.slow
def test_the_same_program_under_torchrun(tmp_path: Path) -> None:
    """A rank sees no difference; rank 0 watches there, and stacks come in the output."""
    done = torchrun(PROGRAM, str(tmp_path), "2", json.dumps({"steps": 4}))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [4, 20]
    plan = {"steps": 4, "hang": {"1": 2}, "hang_after": 2}
    done = torchrun(PROGRAM, str(tmp_path), "2", json.dumps(plan))
    assert done.returncode != 0
    assert "rank 1 has not moved since step 1, it stands in rank_program.py" in done.stderr
    assert "hang_here" in done.stderr.partition("most recent call first")[2]  # faulthandler's


@pytest.mark.slow
def test_torchrun_with_another_world_is_one_line(tmp_path: Path) -> None:
    command = ["-m", "ridgeline", "train", "demo", "--data", "x", "--steps", "1", "--device", "cpu"]
    done = torchrun(*command, "--out", str(tmp_path / "run"))
    lines = [line for line in done.stderr.splitlines() if line.startswith("ridgeline: error:")]
    assert lines == [
        "ridgeline: error: the layout replicate=1 is one of 1 ranks, and 2 were started; start "
        "one, without torchrun, or give --layout shard=2"
    ], done.stderr
    assert done.stdout == ""


# --- `ridgeline train`, with what one rank can show -----------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"), tie_word_embeddings=True)


def test_bad_input_in_a_rank_leaves_nothing(model: Path, tmp_path: Path, capfd: Capture) -> None:
    missing = tmp_path / "no.txt"
    argv = words(model, missing, tmp_path / "run", "--restarts", "3")
    refused(capfd, UsageError, f"{missing}", *argv)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_bit_for_bit(
    model: Path, tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    text, out = make_text(tmp_path), tmp_path / "run"
    usual = ["--save-every", "25", "--steps", "150", "--schedule", "constant"]
    argv = [*words(model, text, out, *usual), "--restarts", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "ridgeline", *argv], stderr=subprocess.PIPE, text=True
    )
    wait_for(lambda: any(row["step"] > 30 for row in read_metrics(out)))
    (rank,) = children_of(process.pid)
    os.kill(rank, signal.SIGKILL)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    (line,) = [line for line in err.splitlines() if line.startswith("ridgeline:")]
    assert re.fullmatch(
        r"ridgeline: rank 0 was killed by signal 9; going on from step-\d+ \(restart 1 of 1\)", line
    )
    whole = tmp_path / "whole"
    trained(capfd, *words(model, text, whole, *usual, "--restarts", "1"))
    same_bytes(*(each / "checkpoints" / "step-00000150" for each in (out, whole)))


@pytest.mark.slow
def test_ctrl_c_at_a_supervised_run_saves(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    argv = words(model, make_text(tmp_path), out, "--minutes", "10", "--restarts", "1")
    process = subprocess.Popen(
        [sys.executable, "-m", "ridgeline", *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(lambda: any("loss" in row for row in read_metrics(out)))
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=600)
    assert process.returncode == 130, stderr
    assert "--resume" in stdout
    assert "error" not in stderr
    (folder,) = (out / "checkpoints").iterdir()
    steps = [row["step"] for row in read_metrics(out) if "loss" in row]
    assert folder.name == f"step-{steps[-1]:08d}"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--devices", "0"], "devices is 0 at least 1"),
        (["--devices", "2", "--device", "cuda:1"], "cuda:1 each of 2 ranks CUDA_VISIBLE_DEVICES"),
        (["--nodes", "2"], "--nodes goes with --launch"),
        (["--submit"], "--submit goes with --launch"),
        (["--partition", "gpu"], "--partition goes with --launch slurm"),
        (["--hostfile", "x", "--launch", "ray"], "--hostfile goes with --launch torchrun"),
        (["--launch", "pbs"], "launch is 'pbs' slurm ray torchrun"),
        (["--launch", "torchrun", "--submit"], "--submit slurm ray"),
        (["--launch", "slurm", "--time", "1 day"], "time is '1 day' one word"),
        (["--hang-after", "nan"], "hang_after is nan"),
        (["--launch", "slurm", "--device", "cuda:1"], "cuda:1 give cuda"),
    ],
)
def test_what_cannot_be_started(
    more: list[str], says: str, tmp_path: Path, capsys: Capture
) -> None:
    argv = words(tmp_path, tmp_path / "x.txt", tmp_path / "run")
    refused(capsys, UsageError, says, *argv, *more)
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "run-job").exists()


def test_nonsense_in_the_environment(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in (usual | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    argv = words(tmp_path, tmp_path / "x.txt", tmp_path / "run")
    monkeypatch.setenv("RANK", "one")
    refused(capsys, UsageError, "RANK='one' whole number torchrun", *argv)
    monkeypatch.setenv("RANK", "2")
    refused(capsys, UsageError, "RANK=2 WORLD_SIZE=1 torchrun", *argv)
    monkeypatch.setenv("RANK", "0")
    refused(capsys, UsageError, "--restarts --max-restarts 2", *argv, "--restarts", "2")
    refused(capsys, UsageError, "--devices is 4 torchrun 1 ranks", *argv, "--devices", "4")


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        with pytest.raises(HardwareError, match=r"port is in use .* --master-port") as raised:
            meet(RankNumbers(0, 2, 0, 2), place)
    assert "\n" not in str(raised.value)


def test_a_gpu_for_each_rank(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    argv = words(tmp_path, tmp_path / "x.txt", tmp_path / "run", "--device", "cuda")
    says = "2 ranks need a GPU each there are 1 --devices 1"
    refused(capsys, HardwareError, says, *argv, "--devices", "2")


@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL")
def test_a_torch_without_nccl_is_named() -> None:
    device = torch.device("cuda", 0)
    with pytest.raises(HardwareError, match=r"has no NCCL .* --device cpu"):
        join_mesh(Layout(replicate=2), dist.HashStore(), 0, 2, device)


def test_a_single_device_is_trained_here(model: Path, tmp_path: Path, capsys: Capture) -> None:
    """No process is started for it, and no logs are left."""
    out = tmp_path / "run"
    document = trained(capsys, *words(model, make_text(tmp_path), out, "--devices", "1"))
    assert document["steps"] == 6
    assert not (out / "logs").exists()
    shutil.rmtree(out)
    (out / "logs").mkdir(parents=True)  # of ranks that did not come so far
    assert main(words(model, make_text(tmp_path), out)) == 0
