"""Which rank a run hangs on, which of several ended it, and what is started where: plain values."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ridgeline.errors import HardwareError, UsageError
from ridgeline.parallel.layout import Layout
from ridgeline.parallel.pulse import Pulse, line_of
from ridgeline.parallel.starting import order, telling
from ridgeline.parallel.starting.endings import Ending, RankEnd, judged, start_line
from ridgeline.parallel.starting.jobs.torchrun import read_hostfile
from ridgeline.parallel.starting.place import RankNumbers, numbers_in, rank_environment
from ridgeline.parallel.starting.supervisor import with_restarts
from ridgeline.parallel.starting.telling import RankError, read_error, show_error
from ridgeline.parallel.starting.watch import FIRST_S, LEAST_S, Beat, HangWatch

IN_TENSOR = "all_reduce over tensor with ranks 0, 1"
IN_DATA = "all_reduce over shard with ranks 0, 2"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def hang_of(
    beats: dict[int, Beat], ended: tuple[int, ...] = (), silent: tuple[int, ...] = ()
) -> str:
    """What is said of ranks that stand so for a minute; `silent` ones have no pulse any more."""
    clock = Clock()
    watch = HangWatch(len(beats), 60.0, clock=clock)
    number = 0
    while clock.now <= 160.0:
        living = {
            rank: replace(beat, number=0 if rank in silent else number)
            for rank, beat in beats.items()
        }
        hang = watch.look(living, ended)
        assert hang is None or clock.now >= 160.0
        clock.now += 1
        number += 1
    assert hang is not None
    return f"{hang.ranks} {hang.message}"


def test_the_rank_that_does_not_wait_is_the_one() -> None:
    stuck = Beat(step=12, line="ridgeline/data/loading/loader.py:80 in next")
    waits = [Beat(step=12, waiting=IN_TENSOR), Beat(step=12, waiting=IN_DATA)]
    assert hang_of({0: waits[0], 1: stuck, 2: waits[1], 3: waits[0]}) == (
        "(1,) no progress for 60 s: rank 1 has not moved since step 12, it stands in "
        "ridgeline/data/loading/loader.py:80 in next; ranks 0, 3 wait in all_reduce over tensor "
        "with ranks 0, 1; rank 2 waits in all_reduce over shard with ranks 0, 2"
    )
    beats = {0: waits[0], 1: replace(stuck, doing="a checkpoint")}
    assert "rank 1 has not moved since step 12 (a checkpoint), it" in hang_of(beats)


def test_a_rank_that_has_gone_or_gives_no_sign() -> None:
    beats = {0: Beat(step=3, waiting=IN_TENSOR), 1: Beat(step=3, waiting=IN_TENSOR)}
    assert "(1,) no progress for 60 s: rank 1 has ended its" in hang_of(beats, ended=(1,))
    assert f"() no progress for 60 s: all ranks 0, 1 wait in {IN_TENSOR};" in hang_of(beats)
    assert "(0, 1) no progress for 60 s: ranks 0, 1 give no sign" in hang_of(beats, silent=(0, 1))
    beats[2] = Beat(step=3, line="in a device's driver")  # behind which rank 2 may be stuck too
    assert "(1,) no progress for 60 s: rank 1 gives no sign" in hang_of(beats, silent=(1,))


@pytest.mark.parametrize("counts", [(5, 9, 9), (5, 9, 5)])
def test_of_those_that_all_wait_the_odd_one_is_behind(counts: tuple[int, ...]) -> None:
    names = (IN_DATA, IN_TENSOR, IN_TENSOR)
    beats = {
        rank: Beat(count=count, waiting=name)
        for rank, (count, name) in enumerate(zip(counts, names, strict=True))
    }
    stands = f"rank 0 has not moved since step 0, waiting in {IN_DATA}; ranks 1, 2 wait in"
    assert hang_of(beats).startswith(f"(0,) no progress for 60 s: {stands}")
    del beats[2]  # as many here as there: the one that has done less
    assert hang_of(beats).startswith("(0,)")


def test_how_long_nothing_may_move() -> None:
    clock = Clock()
    watch = HangWatch(2, None, clock=clock)
    first, second = Beat(step=1, slowest_s=2.0), Beat(step=1, slowest_s=50.0)
    assert watch.limit_s({0: first}) == FIRST_S
    assert watch.limit_s({0: first, 1: Beat()}) == FIRST_S
    assert watch.limit_s({0: first, 1: first}) == LEAST_S
    assert watch.limit_s({0: first, 1: second}) == 500.0
    assert HangWatch(2, 20.0).limit_s({0: first, 1: Beat()}) == 20.0
    assert HangWatch(2, 20.0).limit_s({0: first}) == FIRST_S
    for number in range(40):  # any rank that gets on is progress
        clock.now += LEAST_S - 1
        beats = {0: replace(first, count=number), 1: first}
        assert watch.look(beats) is None
    clock.now += FIRST_S
    assert watch.look({0: first}) is None  # another sign
    clock.now += FIRST_S
    hang = watch.look({0: first})
    assert hang is not None
    assert hang.ranks == (1,)
    assert "rank 1 did not begin" in hang.message


def test_a_later_watcher_waits_longer() -> None:
    clock = Clock()
    watches = [HangWatch(1, 60.0, later, clock=clock) for later in (1.0, 1.5)]
    clock.now += 61
    beats = {0: Beat()}
    for watch in watches:
        watch.look(beats)
    clock.now += 61
    assert [watch.look(beats) is None for watch in watches] == [False, True]


# --- a pulse --------------------------------------------------------------------------------------


def test_a_pulse_says_what_was_done_and_what_is_waited_for() -> None:
    threads = threading.active_count()
    pulse = Pulse()
    pulse.doing("loading")
    assert (pulse.beat(1).doing, pulse.beat(1).count) == ("loading", 1)
    with pulse.waiting(IN_DATA):
        with pulse.waiting(IN_TENSOR):
            assert pulse.beat(1).waiting == IN_TENSOR
        assert pulse.beat(1).waiting == IN_DATA
    with pytest.raises(ZeroDivisionError), pulse.waiting(IN_TENSOR):
        raise ZeroDivisionError
    pulse.step(7)
    beat = pulse.beat(2)
    assert (beat.number, beat.step, beat.count, beat.waiting, beat.doing) == (2, 7, 5, None, "")
    assert beat.slowest_s == 0.0  # the first step has no beginning that is known
    pulse.step(8)
    assert pulse.beat(3).slowest_s > 0
    assert threading.active_count() == threads  # nobody is told


def test_the_line_is_ours_even_below_others() -> None:
    lines: list[str] = []

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            lines.append(line_of(threading.get_ident()))
            return x

    Model()(torch.zeros(1))
    assert lines[0].startswith("test_rank_watch.py:")  # no code of the package on the stack

    class Watched(Layout):
        @property
        def size(self) -> int:
            lines.append(line_of(threading.get_ident()))
            return 1

    order.of_size(Watched(), 2)
    assert lines[1].startswith("ridgeline/parallel/starting/order.py:")
    assert lines[1].endswith(" in of_size")


# --- who ended it ---------------------------------------------------------------------------------


def test_the_cause_is_not_the_one_that_missed_it(tmp_path: Path) -> None:
    log = tmp_path / "rank-1.log"
    log.write_text("step 1\nstep 2\n\n")
    missed = RankEnd(0, 70, 5.0, RankError("internal error: connection closed", 5.0))
    aborted = RankEnd(2, -6, 4.0)
    killed = RankEnd(1, -9, 6.0, log=log)
    ending = judged([missed, aborted, killed])
    expected = f"rank 1 was killed by signal 9; its log {log} ends with: step 2"
    assert (ending.code, ending.message, ending.may_restart) == (8, expected, True)
    full = RankEnd(1, 9, 7.0, RankError("out of memory: 3 GiB", 4.5), log)
    ending = judged([missed, full])
    expected = f"rank 1 ended with code 9: out of memory: 3 GiB (its log: {log})"
    assert (ending.code, ending.message, ending.may_restart) == (9, expected, True)
    assert judged([missed, aborted]).message == "rank 2 was killed by signal 6"
    log.write_text("of before\n" + start_line(1, 2, 2))
    assert str(judged([killed]).message).endswith("has nothing more")


@pytest.mark.parametrize(
    ("code", "may_restart"),
    [(2, False), (4, False), (8, True), (10, False), (14, False), (70, True)],
)
def test_what_may_pass_is_tried_again(code: int, may_restart: bool) -> None:
    ends = [RankEnd(rank, code, 3.0 + rank, RankError("x is 1", 2.0)) for rank in (0, 1)]
    assert judged(ends)[:3] == (code, "x is 1", may_restart)
    assert judged([RankEnd(0, code, 3.0)])[:3] == (8, f"rank 0 ended with code {code}", True)


def test_restarts_are_counted() -> None:
    lines: list[str] = []
    endings = [Ending(8, "rank 1 died", True)] * 3 + [Ending(0)]

    def show(why: str, number: int) -> None:
        lines.append(f"{number}: {why}")

    assert with_restarts(endings.__getitem__, 3, show) == Ending(0)
    assert lines == ["1: rank 1 died", "2: rank 1 died", "3: rank 1 died"]
    assert with_restarts(endings.__getitem__, 2, show).message == (
        "rank 1 died; it was started again 2 times"
    )
    refusal = Ending(2, "x is 1", False)
    assert with_restarts(lambda number: refusal, 5, show) == refusal
    assert len(lines) == 5


def test_an_error_is_shown_where_somebody_reads_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telling, "LATER_S", 0.0)

    def shown(rank: int, **more: str) -> str:
        own = rank_environment(RankNumbers(rank, 2, rank, 2), "127.0.0.1", 1, 0, 0)
        show_error("x is 1", own | more)
        return capsys.readouterr().err

    file = tmp_path / "error.json"
    written = {"TORCHELASTIC_ERROR_FILE": str(file)}
    assert [shown(rank) for rank in (0, 1)] == [
        "ridgeline: error: x is 1\n", "ridgeline: error: rank 1: x is 1\n",
    ]  # fmt: skip
    assert [shown(rank, **written) for rank in (0, 1)] == ["ridgeline: error: x is 1\n", ""]
    error = read_error(file)
    assert error is not None
    assert error.message == "x is 1"
    ours = written | {"RIDGELINE_PARENT": "1"}
    assert [shown(rank, **ours) for rank in (0, 1)] == ["", "ridgeline: error: x is 1\n"]
    file.write_text('{"message": 3')
    assert read_error(file) is None
    assert read_error(tmp_path / "none") is None


# --- what is started where ------------------------------------------------------------------------


def test_a_layout_and_a_number_of_devices() -> None:
    assert order.layout_for(None, None) == Layout()
    assert order.layout_for(None, 4) == Layout(shard=4)
    assert order.layout_for(Layout(tensor=2), None) == Layout(tensor=2)
    with pytest.raises(UsageError, match=r"tensor=2 is one of 2 devices, and --devices is 8; give "
                       r"--devices 2, or a layout of 8, such as shard=4,tensor=2"):  # fmt: skip
        order.layout_for(Layout(tensor=2), 8)
    with pytest.raises(UsageError, match=r"such as shard=3"):
        order.layout_for(Layout(tensor=2), 3)
    with pytest.raises(UsageError, match=r"such as shard=2"):
        order.layout_for(Layout(shard=4, expert=4), 2)


def test_another_world_than_the_layouts() -> None:
    layout = Layout(shard=2, tensor=2)
    order.check_world(layout, RankNumbers(0, 4, 0, 4))
    with pytest.raises(UsageError, match=r"shard=2,tensor=2 is one of 4 ranks, and 8 were started; "
                       r"use torchrun --nproc-per-node 2 on each of 2 nodes, or give --layout "
                       r"shard=4,tensor=2"):  # fmt: skip
        order.check_world(layout, RankNumbers(0, 8, 0, 4))


def test_a_gpu_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    order.check_gpus(3, "cuda", "")
    order.check_gpus(64, "cpu", "")
    with pytest.raises(HardwareError, match=r"4 ranks on this .* there are 3; use --devices 3"):
        order.check_gpus(4, "cuda", "use --devices {num_gpus}")
    assert order.device_of("cuda", RankNumbers(5, 8, 1, 4)) == "cuda:1"
    monkeypatch.setattr(order, "num_cores", lambda: 7)
    assert [order.threads_each(size) for size in (1, 2, 8)] == [7, 3, 1]


def test_a_rank_is_told_as_torchrun_does() -> None:
    numbers = RankNumbers(5, 8, 1, 4)
    environment = rank_environment(numbers, "node-a", 29500, 1, 3)
    assert numbers_in(environment) == numbers
    assert environment["GROUP_RANK"] == "1"
    assert environment["TORCHELASTIC_RESTART_COUNT"] == "1"
    assert numbers_in({}) is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a\nb c\n", r"line 2 has 'c'; expected slots=NUMBER"),
        ("a\n-b\n", r"line 2 has '-b', which is no name of a machine"),
        ("a slots=2\nb slots=4\n", r"line 1 gives a 2 slots, and --devices is 4"),
        ("a\n# a\na\n", r"line 3 has a a second time"),
        ("", r"has 0 machines, and --nodes is 2; give --nodes 1"),
        ("a\nb\nc\n", r"has 3 machines, and --nodes is 2; give --nodes 3"),
        ("a;rm -rf /\nb\n", r"line 1 has 'a;rm'"),
        (b"\xff\xfe\x00", r"is not text"),
        (None, r"cannot read --hostfile .*: No such file"),
    ],
)
def test_a_hostfile_with_nonsense(text: str | bytes | None, says: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError, match=says) as raised:
        read_hostfile(path, nodes=2, devices=4)
    assert "\n" not in str(raised.value)


def test_a_hostfile(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# two\n\nnode-a.example slots=4  # the first\n10.0.0.2\n")
    assert read_hostfile(path, nodes=2, devices=4) == ["node-a.example", "10.0.0.2"]


def test_no_torch_comes_with_an_error() -> None:
    """`ridgeline --help` and its errors take milliseconds."""
    code = "import sys, ridgeline.parallel.starting.telling; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
