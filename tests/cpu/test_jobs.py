"""Jobs that others start: exactly what is written, and that what is written runs."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import make_folder, refused
from test_rank_processes import PACKAGE
from train_runs import Capture, make_text, words

from ridgeline.cli import main
from ridgeline.cli.training.launching import job_layout, write_job
from ridgeline.configs.named import named_run
from ridgeline.errors import HardwareError, MissingPackageError, UsageError
from ridgeline.parallel.layout import Layout
from ridgeline.parallel.starting.jobs.job import Job
from ridgeline.parallel.starting.jobs.ray import ray_job
from ridgeline.parallel.starting.jobs.slurm import slurm_job
from ridgeline.parallel.starting.jobs.torchrun import torchrun_job
from ridgeline.parallel.starting.options import StartOptions
from ridgeline.parallel.starting.ray_ranks import RayOrder, run_on_ray
from ridgeline.training.config import (
    DataOptions,
    OptimizerOptions,
    RunLength,
    TrainConfig,
    with_auto,
)
from ridgeline.training.methods.options import LoraOptions

JOB = Job(
    name="run 1",
    words=("-m", "ridgeline", "train", "/data/run 1-job/train.json", "--out", "/data/run 1"),
    out=Path("/data/run 1"),
    folder=Path("/data/run 1-job"),
    nodes=2,
    devices=8,
    on_gpus=True,
    restarts=3,
    port=29400,
    python="/opt/python",
    package=Path("/opt/package"),
)
PREAMBLE = """\
# Nothing in the current folder may stand in for a module.
export PYTHONSAFEPATH=1
export PYTHONPATH=/opt/package${PYTHONPATH:+:$PYTHONPATH}
threads=$(( $(nproc) / 8 ))  # cores for each rank
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(( threads > 0 ? threads : 1 ))}

# A job that is started again goes on with its run.
resume=; [ -f '/data/run 1/train.json' ] && resume=--resume
"""
TORCHRUN = "/opt/python -m torch.distributed.run --nnodes=2 --nproc-per-node=8 --max-restarts=3"
TRAIN = "-m ridgeline train '/data/run 1-job/train.json' --out '/data/run 1' $resume"


def test_a_script_for_slurm() -> None:
    file = slurm_job(JOB, "gpu", "8:00:00", None)
    assert (
        file.text
        == f"""\
#!/bin/bash
#SBATCH --exclusive
#SBATCH --job-name=ridgeline-run-1
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --partition=gpu
#SBATCH --time=8:00:00
#SBATCH --output="/data/run 1-job/job-%j.log"

# A training run of Ridgeline on 2 nodes with 8 GPUs each. The run's folder must be one that all see.
set -eu
{PREAMBLE}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --cpu-bind=none --kill-on-bad-exit=1 {TORCHRUN} --rdzv-backend=c10d \
--rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$first:29400" \\
  {TRAIN}
"""  # noqa: E501
    )
    assert file.commands == ("sbatch '/data/run 1-job/job.sh'",)


def test_a_script_for_torchrun_on_two_nodes() -> None:
    file = torchrun_job(JOB, ["node-a", "node-b"])
    assert (
        file.text
        == f"""\
#!/bin/bash
# A training run of Ridgeline on 2 nodes with 8 GPUs each.
# To be started on every node; the run's folder must be one that all see.
set -eu
: ${{1:?give the number of this node, from 0}}
{PREAMBLE}
exec {TORCHRUN} --node-rank="$1" --master-addr=node-a --master-port=29400 \\
  {TRAIN}
"""
    )
    script = "bash '/data/run 1-job/job.sh'"
    assert file.commands == (f"node-a: {script} 0", f"node-b: {script} 1")
    unnamed = torchrun_job(JOB)
    assert unnamed.commands[1] == f"node 1: {script} 1 ADDRESS_OF_NODE_0"
    assert '--master-addr="$2"' in unnamed.text
    assert ": ${2:?and the address of node 0}" in unnamed.text


def test_a_script_for_ray() -> None:
    file = ray_job(JOB)
    assert file.commands == ("ray job submit -- /opt/python '/data/run 1-job/job.py'",)
    there: dict[str, object] = {"__name__": "job"}
    exec(compile(file.text.replace("/opt/package", PACKAGE), "job.py", "exec"), there)
    assert there["ORDER"] == RayOrder(
        words=list(JOB.words), out="/data/run 1", nodes=2, devices=8, on_gpus=True, restarts=3
    )
    sys.path.remove(PACKAGE)


@pytest.mark.parametrize("launcher", ["slurm", "torchrun"])
def test_the_shell_reads_it(launcher: str, tmp_path: Path) -> None:
    job = torchrun_job(JOB) if launcher == "torchrun" else slurm_job(JOB, None, None, None)
    path = tmp_path / "job.sh"
    path.write_text(job.text)
    assert subprocess.run(["bash", "-n", path], capture_output=True).stderr == b""


def test_a_config_with_unusual_values_survives(tmp_path: Path) -> None:
    odd = tmp_path / 'a folder\'s "name" $HOME é'
    odd.mkdir()
    make_text(odd)
    config = TrainConfig(
        model=str(make_folder(odd / "model")),
        data=DataOptions(str(odd / "book.txt"), sequence_length=33, held_out=0.0),
        optimizer=OptimizerOptions(lr=1.2345e-7, max_norm=None, eps=1e-30),
        end=RunLength(tokens=10**15),
        lora=LoraOptions(rank=3, targets="q,v"),
        seed=2**40,
        tensorboard=True,
    )
    options = StartOptions(launch="torchrun", devices=2, nodes=2, restarts=1, hang_after=77.5)
    document = write_job(config, options, Layout(shard=4), odd / "run", "cpu")
    assert named_run(document["config"]) == config
    assert document["title"] == "2 nodes with 2 ranks each"
    script = Path(document["job"]).read_text()
    # The shell gives the words as they were.
    line = next(line for line in script.splitlines() if line.startswith("  -m ridgeline"))
    printed = subprocess.run(
        ["bash", "-c", f"resume=; printf '%s\\n' {line}"], capture_output=True, text=True
    )
    assert printed.stdout.splitlines() == [
        *("-m", "ridgeline", "train", document["config"], "--out", str(odd / "run")),
        *("--device", "cpu", "--hang-after", "77.5"),
    ]
    again = Path(document["config"]).read_text()
    assert json.loads(again)["seed"] == 2**40
    assert with_auto(config, "cpu").seed == 2**40


def test_the_layout_of_a_job() -> None:
    slurm = StartOptions(launch="slurm", nodes=2)
    assert job_layout(None, slurm) == Layout(shard=2)
    assert job_layout(None, StartOptions(launch="slurm", nodes=2, devices=8)) == Layout(shard=16)
    assert job_layout(Layout(tensor=4), slurm) == Layout(tensor=4)
    with pytest.raises(UsageError, match="tensor=3 is one of 3 devices, which 2 nodes cannot"):
        job_layout(Layout(tensor=3), slurm)
    with pytest.raises(UsageError, match="--nodes × --devices is 8"):
        job_layout(Layout(tensor=4), StartOptions(launch="slurm", nodes=2, devices=4))


# --- through the command --------------------------------------------------------------------------


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    model = make_folder(tmp_path / "model", tie_word_embeddings=True)
    return words(model, make_text(tmp_path), tmp_path / "run")


def test_a_job_is_written_and_shown(argv: list[str], tmp_path: Path, capsys: Capture) -> None:
    assert main([*argv, "--launch", "slurm", "--account", "lab-7"]) == 0
    out = capsys.readouterr().out
    assert f"  sbatch {tmp_path / 'run-job' / 'job.sh'}\n" in out
    assert "#SBATCH --account=lab-7\n" in (tmp_path / "run-job" / "job.sh").read_text()
    assert main([*argv, "--launch", "ray", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["submitted"] is None
    assert document["job"] == str(tmp_path / "run-job" / "job.py")
    assert not (tmp_path / "run").exists()


def test_a_job_is_submitted_where_it_can_be(
    argv: list[str], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = [*argv, "--launch", "slurm", "--submit"]
    monkeypatch.setenv("PATH", "/nowhere")
    refused(capsys, MissingPackageError, "--submit needs sbatch --submit", *submit)
    assert not (tmp_path / "run-job").exists()
    programs = tmp_path / "programs"
    programs.mkdir()
    sbatch = programs / "sbatch"
    sbatch.write_text('#!/bin/sh\necho "Submitted batch job 17: $1"\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    assert main(submit) == 0
    assert f"Submitted batch job 17: {tmp_path / 'run-job' / 'job.sh'}\n" in capsys.readouterr().out
    sbatch.write_text("#!/bin/sh\necho 'sbatch: error: no such partition' >&2; exit 1\n")
    refused(capsys, HardwareError, "sbatch refused no such partition", *submit)


@pytest.mark.slow
def test_a_job_for_torchrun_trains_and_goes_on(argv: list[str], tmp_path: Path) -> None:
    """Here, as on a node; a second start goes on with the run."""
    assert main([*argv, "--launch", "torchrun", "--save-every", "2"]) == 0
    script, out = tmp_path / "run-job" / "job.sh", tmp_path / "run"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for _ in range(2):
        done = subprocess.run(
            ["bash", script], env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
        assert "trained 6 steps" in done.stdout
        shutil.rmtree(out / "checkpoints" / "step-00000006")
    assert (out / "checkpoints" / "step-00000004").is_dir()


NODES = {
    "scontrol": """#!/bin/bash
[ "$1 $2 $3" = "show hostnames node-[a-b]" ] || exit 9
printf '127.0.0.1\\nnode-b\\n'
""",
    # A task on each node, at the same time; the first that fails ends all, with its code.
    "srun": """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for node in 0 1; do SLURM_PROCID=$node "$@" & done
wait -n && wait -n
""",
    "sbatch": """#!/bin/bash
grep -q '^#SBATCH --nodes=2$' "$1" && grep -q '^#SBATCH --ntasks-per-node=1$' "$1" || exit 8
SLURM_JOB_ID=17 SLURM_JOB_NODELIST='node-[a-b]' bash "$1"
""",
}


@pytest.mark.slow
def test_a_job_for_slurm_trains_and_goes_on(argv: list[str], tmp_path: Path) -> None:
    """Two nodes are two processes here; all else is what the script says."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in NODES.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    job = ["--launch", "slurm", "--nodes", "2", "--layout", "replicate=2", "--port", port]
    assert main([*argv, *job, "--save-every", "2"]) == 0
    script, out = tmp_path / "run-job" / "job.sh", tmp_path / "run"
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    for _ in range(2):
        done = subprocess.run(
            ["sbatch", script], env=environment, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("trained 6 steps") == 1
        shutil.rmtree(out / "checkpoints" / "step-00000006")
    assert (out / "checkpoints" / "step-00000004").is_dir()


@pytest.fixture
def ray() -> object:
    ray = pytest.importorskip("ray")
    yield ray
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.usefixtures("ray")
def test_two_ranks_through_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They meet and sum, one is killed, and all go on from the checkpoint."""
    monkeypatch.setenv("PYTHONPATH", f"{PACKAGE}:{PACKAGE}/tests")
    program = str(Path(__file__).parents[1] / "rank_program.py")
    (tmp_path / "train.json").write_text("{}")  # as of a run that has begun
    plan = json.dumps({"steps": 6, "die": {"1": 4}, "how": "kill"})
    order = RayOrder([program, str(tmp_path), "2", plan], str(tmp_path), 1, 2, on_gpus=False)
    ending = run_on_ray(order)
    assert ending.code == HardwareError.exit_code
    assert str(ending.message).startswith("rank 1 was killed by signal 9; its log ")
    assert json.loads((tmp_path / "checkpoint.json").read_text()) == [2, 6]
    again = RayOrder(order.words, order.out, 1, 2, on_gpus=False, restarts=1)
    assert run_on_ray(again).code == 0
    assert json.loads((tmp_path / "checkpoint.json").read_text()) == [6, 42]
    with pytest.raises(HardwareError, match="ranks need 64 CPUs and the Ray cluster has"):
        run_on_ray(RayOrder(order.words, order.out, 1, 64, on_gpus=False))


@pytest.mark.slow
def test_a_job_for_ray_trains(argv: list[str], tmp_path: Path) -> None:
    pytest.importorskip("ray")
    assert main([*argv, "--launch", "ray"]) == 0
    done = subprocess.run(
        [sys.executable, tmp_path / "run-job" / "job.py"],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "trained 6 steps" in done.stdout + done.stderr
    assert (tmp_path / "run" / "checkpoints" / "step-00000006").is_dir()
