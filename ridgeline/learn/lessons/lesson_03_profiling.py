# %% [markdown]
# # Profiling a step
#
# A profile answers three questions in this order: *is the device busy?* (if not, the host is the
# problem), *which kernels take the time?*, and *how far is each from its limit?* Most people start
# with the third.
#
# %% [picture]
from ridgeline.learn.pictures import LessonPicture

picture = LessonPicture(220, "Two timelines: kernels with gaps between them, and without")
picture.text(20, 40, "host", "soft")
picture.text(20, 90, "device", "soft")
for at in range(6):
    picture.box(90 + at * 95, 24, 80, 24, "launch", "n")
    picture.box(130 + at * 95, 74, 30, 24, "", "b")
picture.text(90, 124, "bound by launches: the device waits between kernels (gaps)", "soft")
picture.text(20, 170, "device", "soft")
x = 90.0
for width, look in ((150, "a"), (40, "b"), (130, "a"), (30, "b"), (170, "a")):
    picture.box(x, 152, width, 24, "", look)
    x += width + 2
picture.text(
    90, 202, "bound by kernels: no gaps; now look at each kernel's share of its limit", "soft"
)

# %% [markdown]
# ## A step to look at
#
# Two layers of a transformer's MLP with a norm, as eager torch runs them: each line is one kernel
# or several.
#
# %%
from ridgeline.learn.session import Session

here = Session("profiling")

# %%
import torch
from torch.nn import functional as F

width, rows = (4096, 16) if here.is_gpu else (1024, 16)
dtype = torch.bfloat16 if here.is_gpu else torch.float32
make = lambda *shape: torch.randn(*shape, device=here.device).to(dtype) * 0.02  # noqa: E731
gate, up, down = make(4 * width, width), make(4 * width, width), make(width, 4 * width)
scale = torch.ones(width, device=here.device, dtype=dtype)


def step(x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        normed = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5).to(dtype) * scale
        x = x + F.linear(F.silu(F.linear(normed, gate)) * F.linear(normed, up), down)
    return x


x = make(rows, width)
step_s = here.seconds(lambda: step(x))
here.figure("step", step_s, "s", "one step")

# %% [markdown]
# ## torch's profiler
#
# It notes every operation on the host and, on a GPU, every kernel on the device.
# `export_chrome_trace` writes a file that [Perfetto](https://ui.perfetto.dev) shows as a timeline:
# host threads above, streams below, an arrow from each launch to its kernel.
#
# %%
from torch.profiler import ProfilerActivity, profile

activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if here.is_gpu else [])
with profile(activities=activities) as trace:
    step(x)
    if here.is_gpu:
        torch.cuda.synchronize()
rows_of_trace = trace.key_averages()
if here.is_gpu:  # an operation's device time is its kernels', which have rows of their own
    own = "self_device_time_total"
    timed = [row for row in rows_of_trace if row.device_type.name == "CUDA"]
else:
    own = "self_cpu_time_total"
    timed = list(rows_of_trace)
total = sum(getattr(row, own) for row in timed)
for row in sorted(timed, key=lambda row: -getattr(row, own))[:5]:
    print(f"{row.key[:60]:60} {row.count:4} {getattr(row, own) / total:6.1%}")
names = ("aten::mm", "aten::addmm", "aten::linear")
products = sum(getattr(row, own) for row in rows_of_trace if row.key in names) / total
num_kernels = sum(row.count for row in timed)
here.figure("kernels", num_kernels, "1", "kernels (on a CPU: operations) in the step")
here.figure("products", products, "1", "share of the time in matrix products")

# %% [markdown]
# ## Each kernel beside its limit
#
# The six products read 2 · 3 · 4 · width² weights. Their bytes over the bandwidth is the least
# time of the step; the rest is what fusing and capturing can win.
#
# %%
moved = 2 * 3 * 4 * width * width * x.element_size()
limit_s = moved / here.ceiling("read_bandwidth")
here.figure("limit", limit_s, "s", "the step's limit: its weights over the bandwidth")
here.figure("share", limit_s / step_s, "1", "share of the limit reached")

# %% [markdown]
# Two layers of three matrices of 4·width² each: 24 · 1024² · 4 bytes = 101 MB on a CPU, 24 · 4096²
# · 2 = 805 MB on a GPU, where 4.38 TB/s give 184 µs. A share above 1 would say that the ceiling is
# the wrong one (weights that stayed in a cache), never that the code is too good.
#
# ## The tools for one kernel
#
# When the timeline shows no gaps and one kernel leads, look inside it:
#
# | tool | command | read |
# |---|---|---|
# | Nsight Systems | `nsys profile -t cuda,nvtx python run.py` | gaps, copies, streams |
# | Nsight Compute | `ncu --set full -k regex:NAME -c 1 python run.py` | one kernel's counters |
# | rocprofv3 (AMD) | `rocprofv3 --kernel-trace --stats -- python run.py` | times by kernel |
#
# In Nsight Compute four numbers say nearly all:
#
# - **DRAM and SM throughput** ("speed of light"): the larger is what bounds it. Both below 60%:
#   latency, so look at occupancy and stalls.
# - **Occupancy**: warps resident over the most an SM holds (64 on Hopper). Registers decide: a
#   kernel of 128 registers × 256 threads takes 32,768 of 65,536, so two blocks fit: 16 warps, 25%.
#   A good matrix kernel runs at 12 to 25%; low occupancy is no fault by itself.
# - **Stalls**: `long scoreboard` waits for memory (more loads in flight), `barrier` waits for other
#   warps, `mio throttle` is shared memory, `math pipe throttle` means that arithmetic is full:
#   good.
# - **Tensor-core use** (`sm__inst_executed_pipe_tensor`): zero in a kernel of matrix products means
#   that it runs on the ordinary units, at a sixteenth of the rate.
#
# %%
if not here.is_gpu:
    here.missing("a GPU", "kernels on the device with the gaps between them, and ncu's counters")


# %% [markdown]
# ## Take along
#
# - Busy first, then which kernels, then how far each is from its limit.
# - Warm up, profile few steps, and check that the profiled time is the unprofiled one.
# - Gaps are cured on the host: fewer kernels, graphs, no `.item()`, no `print(tensor)`.
# - Occupancy is a means to hide latency. Full bandwidth at 25% occupancy needs no more.
#
# ## In the tree
#
# - `ridgeline/profiling/tracing/`: steps watched while they run; `ridgeline profile demo`.
# - `ridgeline/profiling/roofline.py`: from counted work to a verdict, without counters.
# - `ridgeline/profiling/predicting/`: what a change would give.
#
# ## Exercise
#
# From a list of kernels as (start, end) in µs on one stream, sorted by start, return the share of
# the time from the first start to the last end in which the device was busy. Kernels may overlap.
#
# %% [exercise]
def busy_share(kernels: list[tuple[float, float]]) -> float:
    """1.0 means no gaps."""
    # your code
    busy, until = 0.0, kernels[0][0]
    for start, end in kernels:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy / (until - kernels[0][0])
    # end of your code


# %% [check]
from collections.abc import Callable, Iterator

from ridgeline.learn.trials import AnswerTrial


def trials(answer: Callable[..., float]) -> Iterator[AnswerTrial]:
    yield AnswerTrial.of(answer, [(0.0, 5.0)], want=1.0)
    yield AnswerTrial.of(answer, [(0.0, 5.0), (10.0, 15.0)], want=2 / 3)
    yield AnswerTrial.of(answer, [(7.0, 9.0), (8.0, 11.0)], want=1.0, hint="overlap counts once")
    yield AnswerTrial.of(
        answer, [(0.0, 10.0), (2.0, 3.0), (12.0, 16.0)], want=14 / 16, hint="one inside another"
    )
