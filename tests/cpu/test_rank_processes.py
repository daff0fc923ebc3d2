"""Ranks that are processes, two of them over gloo: started by the engine, by torchrun, or not at
all, and what is left of them afterwards.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from clock import within
from engines import naive_outputs, prompts_of, tiny
from thread_ranks import run_ranks
from tiny_models import save_model
from tiny_tokenizers import byte_level_json

import ridgeline
from ridgeline.engine import Engine, Sampling
from ridgeline.engine.loading.loading import load_from
from ridgeline.engine.local import ranks
from ridgeline.errors import HardwareError, UnsupportedError, UsageError
from ridgeline.parallel.inference.group import Group
from ridgeline.parallel.inference.launch import Ranks
from ridgeline.parallel.starting.meeting import RankProcess, torchrun_process
from ridgeline.recipe import KV, Limits, Parallel, Recipe, Speculation

GREEDY = Sampling(max_tokens=16, ignore_eos=True)
RECIPE = Recipe(
    dtype="fp32",
    kv=KV(page_size=16),
    limits=Limits(max_batch=4, token_budget=24),
    parallel=Parallel(tensor=2),
)
COMMAND = [sys.executable, "-m", "ridgeline"]
PACKAGE = str(Path(ridgeline.__file__).parents[1])


def save_checkpoint(name: str, folder: Path) -> None:
    save_model(name, folder)
    byte_level_json().save(str(folder / "tokenizer.json"))


def test_an_engine_starts_its_ranks_and_misses_one_that_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint("llama-wide-heads", tmp_path)
    started: list[Ranks] = []

    def noted(*arguments: Any) -> Ranks:
        started.append(Ranks(*arguments))
        return started[-1]

    monkeypatch.setattr(ranks, "Ranks", noted)
    prompts = prompts_of([20, 33, 25])
    num_threads = torch.get_num_threads()
    with Engine(tmp_path, RECIPE, device="cpu", num_pages=5) as engine:
        assert torch.get_num_threads() == max(1, num_threads // 2)
        for prompt, output in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
            assert output.status == "finished", output.reason
            assert [output.tokens] == naive_outputs(tiny("llama-wide-heads"), prompt, GREEDY)
        assert engine.stats.num_preemptions > 0
        (process,) = started[0].processes
        assert process.poll() is None
        with within(1):  # it is asked while a device is waited for
            engine.runner.group.check()  # type: ignore[attr-defined]
        process.kill()
        with (
            within(5),
            pytest.raises(HardwareError, match="rank 1 was killed by signal 9") as raised,
        ):
            engine.generate(prompts, GREEDY)
        assert "\n" not in str(raised.value)
    assert process.poll() is not None
    assert torch.get_num_threads() == num_threads


ALL_OF_IT = {
    "codes, drafts and a CPU's kernels": {
        "scheme": "int8",
        "quantize_all": True,
        "kernels": "fused",
        "speculation": Speculation("prompt-lookup", max_draft_tokens=3),
    },
    "deterministic": {"deterministic": True},
    "two stages": {"parallel": Parallel(pipeline=2)},
    "two stages of two": {"parallel": Parallel(tensor=2, pipeline=2), "head": "int8"},
}


@pytest.mark.parametrize(
    "what",
    [
        pytest.param("codes, drafts and a CPU's kernels", marks=pytest.mark.slow),
        pytest.param("two stages", marks=pytest.mark.slow),
        pytest.param("deterministic", marks=pytest.mark.slow),
        pytest.param("two stages of two", marks=pytest.mark.slow),
    ],
)
def test_processes_do_together_what_one_does(what: str, tmp_path: Path) -> None:
    save_checkpoint("llama-wide-heads", tmp_path)
    recipe, prompts = replace(RECIPE, **ALL_OF_IT[what]), prompts_of([20, 33])
    alone = replace(recipe, parallel=Parallel())
    expected = Engine(tmp_path, alone, device="cpu", num_pages=12).generate(prompts, GREEDY)
    with Engine(tmp_path, recipe, device="cpu", num_pages=12) as engine:
        found = engine.generate(prompts, GREEDY)
    assert [each.tokens for each in found] == [each.tokens for each in expected]


@pytest.mark.slow
def test_generate_on_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line's text is that of one rank."""
    monkeypatch.setitem(tiny_models.MODELS, "many-words", ("Llama", {"vocab_size": 2048}))
    save_checkpoint("many-words", tmp_path)
    flags = ["--scheme", "int8", "--quantize-all", "--max-tokens", "12", "--device", "cpu"]
    texts = []
    for ranks_flag in ([], ["--tensor-parallel", "2"]):
        ended = subprocess.run(
            [*COMMAND, "generate", str(tmp_path), "abc", *flags, *ranks_flag, "--json"],
            env=os.environ | {"PYTHONPATH": PACKAGE, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert ended.returncode == 0, ended.stderr[-2000:]
        texts.append(json.loads(ended.stdout)["text"])
    assert texts[0] == texts[1]


SCRIPT = """
import json, sys
from pathlib import Path
from ridgeline.engine import Engine, Sampling
from ridgeline.recipe import recipe_from

folder, prompts = Path(sys.argv[1]), json.loads(sys.argv[2])
recipe = recipe_from(json.loads(sys.argv[3]))
engine = Engine(folder, recipe, device="cpu", num_pages=12)
outputs = engine.generate(prompts, Sampling(max_tokens=16, ignore_eos=True))
print(json.dumps([output.tokens for output in outputs]))
"""


@pytest.mark.slow
def test_torchrun_starts_the_ranks_and_the_script_goes_on_in_one(tmp_path: Path) -> None:
    """The script does not close its engine: its end does."""
    folder = tmp_path / "model"
    save_checkpoint("qwen3-moe-mixed", folder)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    prompts = prompts_of([20, 33])
    RECIPE.save(tmp_path)
    recipe = (tmp_path / "recipe.json").read_text()
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [*run, str(script), str(folder), json.dumps(prompts), recipe],
        env=os.environ | {"PYTHONPATH": PACKAGE, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    (line,) = ended.stdout.strip().splitlines()  # printed once
    for prompt, tokens in zip(prompts, json.loads(line), strict=True):
        assert [tuple(tokens)] == naive_outputs(tiny("qwen3-moe-mixed"), prompt, GREEDY)


def test_a_rank_that_cannot_start_is_an_error() -> None:
    with within(10):
        started = Ranks(3, "os:abort", None)
        with pytest.raises(HardwareError, match=r"could not start: rank \d was killed by signal 6"):
            started.wait_until_here()
    assert all(process.poll() is not None for process in started.processes)


PARENT = """
import time
from ridgeline.parallel.inference.launch import Ranks
ranks = Ranks(2, "ridgeline.parallel.inference.launch:started", None)
ranks.wait_until_here()
print(ranks.processes[0].pid, flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_ranks_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    """Killed so that it cannot clean up. The rank would otherwise wait for as long as it is let."""
    waits = "import time, ridgeline.parallel.inference.launch as launch\n\ndef wait():\n"
    waits += "    launch.started()\n    time.sleep(60)\n"
    (tmp_path / "waiting_rank.py").write_text(waits)
    code = PARENT.replace("ridgeline.parallel.inference.launch:started", "waiting_rank:wait")
    path = os.pathsep.join([PACKAGE, str(tmp_path)])
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert is_running(pid)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    end = time.monotonic() + 5
    while is_running(pid) and time.monotonic() < end:
        time.sleep(0.02)
    assert not is_running(pid)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # ended, and nobody has asked how


def test_a_model_that_rank_0_has_is_sent() -> None:
    """As to ranks that were started for it, which have no model."""
    model = tiny("llama-tied")
    task = ranks.Task(model.config, RECIPE, "cpu", torch.float32)

    def load(group: Group) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        whole = model if group.rank == 0 else None
        sent = load_from(task.source_for(group, 2, whole, is_sent=True), RECIPE)
        cut = load_from(task.source_for(group, 2, model), RECIPE)
        return sent.model.state_dict(), cut.model.state_dict()

    for sent, cut in run_ranks(2, load):
        assert sent.keys() == cut.keys()
        assert all(torch.equal(sent[name], cut[name]) for name in cut)


# --- what is refused, before anything is started --------------------------------------------


@pytest.fixture
def _no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "Ranks", None)  # must not be reached


@pytest.mark.usefixtures("_no_start")
@pytest.mark.parametrize(
    ("name", "recipe", "says"),
    [
        ("llama-mha", {"tensor": 3}, "tensor_parallel is 3; 4 query heads .*; try one of 1, 2, 4"),
        ("qwen3", {"tensor": 2}, "tensor_parallel is 2; 5 query heads .*; try one of 1, 5"),
        ("llama-mha", {"dtype": "bf16"}, "dtype is bf16, and the model is in fp32"),
    ],
)
def test_what_cannot_be_shared_is_refused(name: str, recipe: dict[str, Any], says: str) -> None:
    changes = dict(recipe)
    parallel = Parallel(changes.pop("tensor", 2))
    with pytest.raises((UsageError, UnsupportedError), match=says) as raised:
        Engine(tiny(name), Recipe(parallel=parallel, **changes))
    assert "\n" not in str(raised.value)


@pytest.mark.usefixtures("_no_start")
def test_fewer_gpus_than_ranks_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    task = ranks.Task(tiny("llama-mha").config, RECIPE, "cuda")
    with pytest.raises(
        HardwareError, match="2 ranks on this machine need a GPU each, and there are 1"
    ):
        ranks._load_and_start(task, tiny("llama-mha"), None, None)


def test_one_gpu_by_number_is_refused(tmp_path: Path) -> None:
    save_model("llama-mha", tmp_path)
    with pytest.raises(
        UsageError, match=r"device is cuda:1, and each of 2 ranks takes a GPU of its own"
    ):
        Engine(tmp_path, RECIPE, device="cuda:1")
    with pytest.raises(UsageError, match="device 'gpu' is not known"):
        Engine(tmp_path, RECIPE, device="gpu")


def test_torchrun_with_another_number_of_ranks_is_refused() -> None:
    place = RankProcess(0, 4, 0, 4, None)
    with pytest.raises(UsageError, match="tensor_parallel is 2 and torchrun has started 4 ranks"):
        ranks._check_process(place, RECIPE, "cpu")
    assert torchrun_process({}) is None
    names = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE")
    assert (
        torchrun_process(dict.fromkeys(names, "0") | {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"})
        is None
    )
