# %% [markdown]
# # Launch overhead, streams, pinned memory, CUDA graphs
#
# A GPU does what the host tells it, one launch after the other. A launch through torch costs the
# host some 7 µs. A decode step of a small model is 300 kernels of 2 µs: the host needs 2.1 ms for
# what the device does in 0.6. The cures, in order: fewer kernels, launches ahead of time, graphs.
#
# %% [picture]
from ridgeline.learn.pictures import LessonPicture

picture = LessonPicture(230, "Launches one by one, and a graph that is launched once")
picture.text(20, 38, "host", "soft")
picture.text(20, 78, "device", "soft")
for at in range(5):
    picture.box(90 + at * 115, 24, 110, 22, "launch 7 µs", "n")
    picture.box(200 + at * 115, 64, 32, 22, "2 µs", "b")
picture.text(20, 148, "host", "soft")
picture.text(20, 188, "device", "soft")
picture.box(90, 134, 110, 22, "replay graph", "n")
for at in range(12):
    picture.box(200 + at * 37, 174, 32, 22, "", "a")
picture.text(210, 150, "one launch for all of them; 0.8 µs from kernel to kernel (H200)", "soft")

# %% [markdown]
# ## Asynchronous, and what breaks it
#
# `x @ y` on a GPU returns before it is computed: it puts the work into a *stream*, a queue whose
# entries run in order. The host runs ahead as long as it needs no result. `.item()`, `.cpu()`,
# `print(tensor)`, `if tensor:` and indexing by a mask make it wait: then host and device take turns
# instead of working side by side.
#
# %%
from ridgeline.learn.session import Session

here = Session("launches")

# %%
import time

import torch
from torch import Tensor

x = torch.randn(64, 64, device=here.device)


def steps(reads: bool, count: int = 200) -> float:
    """Seconds for each tiny operation, with its result read each time or never."""
    if here.is_gpu:
        torch.cuda.synchronize()
    began = time.perf_counter()
    y = x
    for _ in range(count):
        y = y * 0.5
        if reads:
            y[0, 0].item()
    if here.is_gpu:
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / count


steps(True)
here.figure("apart", steps(False), "s", "a tiny operation, results never read")
here.figure("read", steps(True), "s", "the same, one number read by the host each time")

# %% [markdown]
# ## Overlap is a subtraction
#
# With host time h and device time d for each step, taking turns costs h + d and overlapping costs
# max(h, d). What follows needs no GPU: a queue between two threads is all that a stream is. The
# "device" sleeps 2 ms a step, the "host" 1 ms.
#
# %%
import queue
import threading


def run(ahead: int, count: int = 20) -> float:
    """Seconds a step with at most `ahead` steps in the queue; 0 means that they take turns."""
    work: queue.Queue[bool] = queue.Queue()
    room = threading.Semaphore(max(1, ahead))

    def device() -> None:
        while work.get():
            time.sleep(0.002)
            room.release()

    thread = threading.Thread(target=device)
    thread.start()
    began = time.perf_counter()
    for _ in range(count):
        if ahead:
            time.sleep(0.001)  # the host's work, done while the device is busy
            room.acquire()
        else:
            room.acquire()
            time.sleep(0.001)  # the host's work, after the device has finished
        work.put(True)
    work.put(False)
    thread.join()
    return (time.perf_counter() - began) / count


here.figure("turns", run(0), "s", "host 1 ms and device 2 ms, taking turns (h + d = 3 ms)")
here.figure("overlap", run(2), "s", "the same, two steps ahead (max(h, d) = 2 ms)")

# %% [markdown]
# ## Graphs
#
# A CUDA graph records the launches of a whole step once and replays them with one call. Conditions:
# the same addresses each time (so inputs are copied *into* fixed buffers), the same shapes (so one
# graph for each batch size, and smaller batches padded), and nothing that waits or allocates
# inside. In torch: `torch.cuda.graph`, or `mode="reduce-overhead"` of torch.compile.
#
# %%


def chain(x: Tensor) -> Tensor:
    for _ in range(100):
        x = x * 0.999
    return x


if here.is_gpu:
    eager_s = here.seconds(lambda: chain(x))
    from ridgeline.timing import time_graph, time_host

    host_s = time_host(lambda: chain(x), device=here.device, target_s=0.2).median_s
    graph_s = time_graph(lambda: chain(x), num_calls=1, target_s=0.2).median_s
    here.figure("launched", host_s / 100, "s", "a tiny kernel, launched one by one")
    here.figure("captured", graph_s / 100, "s", "the same in a replayed graph")
    here.figure("graph_gain", host_s / graph_s, "1", "times as fast")
    for name, pinned in (("pageable", False), ("pinned", True)):
        source = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=pinned)
        target = torch.empty_like(source, device=here.device)
        taken = here.seconds(lambda s=source, t=target: t.copy_(s, non_blocking=True))
        here.figure(f"h2d_{name}", source.nbytes / taken, "B/s", f"host to device, {name}")
else:
    here.figure("chain", here.seconds(lambda: chain(x)) / 100, "s", "an operation on 64×64 here")
    here.missing("a GPU", "7 µs a launch, 0.8 µs in a graph, and 53 GB/s from pinned memory")


# %% [markdown]
# **Pinned memory**: the GPU's copy engine can only read pages that the system will not move.
# Ordinary (pageable) memory is first copied by the CPU into a pinned buffer, and the call waits. On
# the H200: 53.1 GB/s pinned, 8.4 pageable. Two streams overlap only if both copies and kernels are
# asynchronous; events (`record_event`, `wait_event`) order what has to be ordered.
#
# ## Take along
#
# - Count launches: kernels × launch time is the least a step takes on the host.
# - Reading one number from the device costs more than computing it: let sampling stay there.
# - Graphs want fixed addresses and shapes; design for that from the start.
# - Pin what is copied often, in one piece: a step's metadata goes over in one copy.
#
# ## In the tree
#
# - `ridgeline/capture.py`: graphs captured; `ridgeline/engine/execution/`: one for each batch size.
# - `ridgeline/engine/local/`: the loop that launches step N+1 before step N's tokens are known.
# - `ridgeline/engine/steps/`: a step's integers in one pinned copy.
#
# ## Exercise
#
# A graph exists for each of some batch sizes. Which one does a batch of n take, and which share of
# its rows is padding? Without a graph large enough, return None.
#
# %% [exercise]
def graph_for(n: int, sizes: list[int]) -> tuple[int, float] | None:
    """(size of the graph, share of its rows that is padding)"""
    # your code
    large_enough = [size for size in sizes if size >= n]
    if not large_enough:
        return None
    size = min(large_enough)
    return size, (size - n) / size
    # end of your code


# %% [check]
from collections.abc import Callable, Iterator

from ridgeline.learn.trials import AnswerTrial


def trials(answer: Callable[..., tuple[int, float] | None]) -> Iterator[AnswerTrial]:
    yield AnswerTrial.of(answer, 4, [1, 2, 4, 8], want=(4, 0.0), hint="an exact fit")
    yield AnswerTrial.of(answer, 5, [1, 2, 4, 8], want=(8, 3 / 8), hint="the next larger")
    yield AnswerTrial.of(answer, 3, [8, 4, 1], want=(4, 1 / 4), hint="sizes come in any order")
    yield AnswerTrial.of(answer, 9, [1, 2, 4, 8], want=None, hint="no graph: run without one")
