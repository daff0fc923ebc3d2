# %% [markdown]
# # The machine and its ceilings
#
# Whatever you optimize, three speeds of the machine decide how fast it can get: how quickly memory
# is read, how quickly matrices are multiplied, and how long it takes to start a piece of work. They
# are the *ceilings*. A vendor's datasheet promises them; this lesson measures yours, because a
# share of a promise tells you little.
#
# %% [picture]
from ridgeline.learn.pictures import LessonPicture

picture = LessonPicture(230, "A processor between its memory and the host, with three speeds")
picture.box(30, 60, 130, 90, "host (CPU)\nstarts the work", "n")
picture.box(300, 40, 170, 130, "processor\nSMs, or cores", "a")
picture.box(560, 40, 130, 130, "memory\nweights, KV cache", "b")
picture.arrow(160, 105, 300, 105)
picture.text(230, 92, "a launch: 7 µs", "mid soft")
picture.arrow(560, 85, 470, 85)
picture.arrow(470, 125, 560, 125)
picture.text(515, 60, "4.3 TB/s", "mid soft")
picture.text(385, 195, "801 TFLOP/s of matrix products in bf16", "mid soft")
picture.text(30, 215, "Figures of an H200, measured (results/hardware-nvidia-h200-….json).", "soft")

# %% [markdown]
# ## Bandwidth
#
# Copy a large buffer and divide the bytes by the time. Large means larger than every cache, or you
# measure the cache. A copy of *n* bytes reads *n* and writes *n*, so it moves 2*n*.
#
# %%
from ridgeline.learn.session import Session

here = Session("machine")

# %%
import torch

size = (1 << 30) if here.is_gpu else (256 << 20)  # bytes
source = torch.empty(size, dtype=torch.uint8, device=here.device).random_()
target = torch.empty_like(source)
copy_s = here.seconds(lambda: target.copy_(source))
here.figure("copy", 2 * size / copy_s, "B/s", "memory: copy, read and written")

small = torch.empty(128 << 10, dtype=torch.uint8, device=here.device)
small_target = torch.empty_like(small)
small_s = here.seconds(lambda: small_target.copy_(small))
here.figure(
    "small_copy", 2 * small.nbytes / small_s, "B/s", "the same with 128 KiB: cache, or overhead"
)

# %% [markdown]
# The small copy shows what goes wrong when one measures carelessly. On a CPU it comes from the
# cache and looks several times as fast. On a GPU it looks *slow*: 128 KiB take 0.06 µs at 4.3 TB/s,
# but a launch takes a few µs whatever it does.
#
# ## Matrix rate
#
# A product of an M×K with a K×N matrix takes 2·M·N·K operations: a multiplication and an addition
# for each of the M·N·K triples. For 2048³ that is 17.2 GFLOP.
#
# %%
n = 8192 if here.is_gpu else 768
rates = {}
for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
    a = torch.randn(n, n, device=here.device).to(dtype)
    b = torch.randn(n, n, device=here.device).to(dtype)
    rates[name] = 2 * n**3 / here.seconds(lambda a=a, b=b: a @ b)
    here.figure(f"matrix_{name}", rates[name], "FLOP/s", f"matrix product {n}³ in {name}")

# %% [markdown]
# ## Starting work
#
# Last, something that does nothing: add one to a single number. All you see is the cost of asking.
#
# %%
tiny = torch.zeros(1, device=here.device)


def many() -> None:
    for _ in range(100):
        tiny.add_(1)


here.figure("eager_op", here.seconds(many) / 100, "s", "one tiny torch operation")
here.figure(
    "bytes_lost", 2 * size / copy_s * here.seconds(many) / 100, "B", "bytes movable in that time"
)
if not here.is_gpu:
    here.missing("a GPU", "that a launch costs the host 7 µs, in which an H200 could move 30 MB")


# %% [markdown]
# ## What the figures mean
#
# - An H200 (132 SMs, 141 GB) was measured at 4.27 TB/s for a copy, 801 TFLOP/s in bf16, 51 in fp32
#   and 7.0 µs a launch. The datasheet says 4.8 TB/s and 989 TFLOP/s: nobody gets those.
# - For one byte it fetches, it can do 801e12 / 4.27e12 = 188 operations in bf16. That ratio is the
#   *ridge*, and the next lesson is about it.
# - A model of 8 billion parameters in bf16 is 16 GB. Generating one token reads all of it: 16e9 /
#   4.38e12 (the read bandwidth) = 3.7 ms, so no H200 generates more than some 270 tokens a
#   second for one request in bf16, whatever the code.
#
# ## Take along
#
# - Measure before you compare: a share of a measured ceiling tells you when to stop.
# - Buffers larger than every cache, several samples, the median on a GPU; state what was moved.
# - Random data: constant data draws less power and flatters a GPU.
# - Three numbers of your machine are worth knowing by heart: bytes/s, FLOP/s, seconds a launch.
#
# ## In the tree
#
# - `ridgeline/hardware/probes.py`: how each ceiling is measured; `ridgeline hardware` shows them.
# - `ridgeline/kernels/ceilings.py`: on a CPU, our own kernels beside torch; the best counts.
# - `ridgeline/timing.py`: the one timer.
#
# ## Exercise
#
# Given a model's bytes, a bandwidth in B/s and the launches of a step with the seconds each costs
# the host, how many tokens a second can one request get at most? The device works while the host
# launches, so the longer of the two counts.
#
# %% [exercise]
def most_tokens_per_s(
    model_bytes: float, bandwidth: float, num_launches: int, launch_s: float
) -> float:
    """The upper limit on tokens/s of one request."""
    # your code
    reading_s = model_bytes / bandwidth
    launching_s = num_launches * launch_s
    return 1 / max(reading_s, launching_s)
    # end of your code


# %% [check]
from collections.abc import Callable, Iterator

from ridgeline.learn.trials import AnswerTrial


def trials(answer: Callable[..., float]) -> Iterator[AnswerTrial]:
    yield AnswerTrial.of(answer, 16e9, 4e12, 0, 0.0, want=250.0, hint="bytes over bandwidth")
    yield AnswerTrial.of(
        answer, 0.27e9, 4e12, 300, 7e-6, want=1 / 2.1e-3, hint="300 launches take 2.1 ms: the host"
    )
    yield AnswerTrial.of(answer, 16e9, 4e12, 300, 7e-6, want=250.0, hint="they overlap: no sum")
