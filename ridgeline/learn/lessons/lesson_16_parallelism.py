# %% [markdown]
# # Parallelism: what is split, and what is sent
#
# More devices bring more memory, more bandwidth and more arithmetic, and take something back by
# talking. Each kind of parallelism splits something else and sends something else; choosing is
# counting bytes over the slowest link.
#
# %% [picture]
from ridgeline.learn.pictures import LessonPicture

picture = LessonPicture(
    280, "Two devices: what each holds under data, tensor, pipeline, context parallel"
)
names = ("replicate", "shard (FSDP)", "tensor", "pipeline", "context")
held = (
    "all weights,\nhalf the batch",
    "half of each,\nfetched when used",
    "half of each\nmatrix",
    "half of the\nlayers",
    "half of each\nsequence",
)
sent = (
    "gradients",
    "weights, gradients",
    "activations",
    "activations at the cut",
    "keys and values",
)
for at, name in enumerate(names):
    x = 18 + at * 139
    picture.text(x + 62, 34, name, "mid bold")
    picture.box(x, 48, 124, 70, held[at], "a")
    picture.arrow(x + 62, 150, x + 62, 120)
    picture.arrow(x + 62, 122, x + 62, 152)
    picture.box(x, 152, 124, 70, held[at], "b")
    picture.text(x + 62, 244, sent[at], "mid soft")
picture.text(20, 268, "below: what the two send each other in a step", "soft")

# %% [markdown]
# ## What each kind sends
#
# | kind | splits | sends in a step, each device | use it |
# |---|---|---|---|
# | replicate (data) | the batch | 2 × gradients (all-reduce) | model fits one device |
# | shard (FSDP, ZeRO-3) | weights, gradients, moments | weights twice, gradients | too large |
# | tensor | each matrix | 4 all-reduces of activations a layer | inside a node |
# | sequence | norms' activations, along tokens | the same bytes as tensor | together with tensor |
# | pipeline | layers | activations at cuts | between nodes |
# | context | each sequence | keys and values | long contexts |
# | expert | a mixture's experts | tokens, twice all-to-all | mixtures |
#
# A ring all-reduce over n devices sends 2·(n − 1)/n times the bytes from each: nearly twice,
# whatever n is. An all-gather or reduce-scatter is half of it.
#
# ## Links
#
# NVLink on an H100 or H200 is 900 GB/s for both directions, 450 each way; a DGX joins 8 GPUs
# through switches at that rate. Between nodes each GPU has a 400 Gbit/s card: 50 GB/s, nine times
# less. A SuperPOD's unit is 32 such nodes, 256 GPUs. So: tensor inside the node, the rest across.
#
# %%
from ridgeline.learn.session import Session

here = Session("parallelism")

# %%
gradients = 2 * 8.03e9  # bytes, bf16
for name, link in (("nvlink", 450e9), ("network", 50e9)):
    here.figure(
        f"all_reduce_{name}",
        2 * 7 / 8 * gradients / link,
        "s",
        f"all-reduce of 8B's gradients, {name}",
    )
layer = 8192 * 4096 * 2  # bytes: 8,192 tokens of width 4,096 in bf16
for name, link in (("nvlink", 450e9), ("network", 50e9)):
    here.figure(
        f"tensor_{name}",
        32 * 4 * 2 * 7 / 8 * layer / link,
        "s",
        f"tensor=8, 8B, 8,192 tokens, {name}",
    )

# %% [markdown]
# The step's own work, 6 · 8.03e9 · 8192 / 8 devices at 600 TFLOP/s, is 82 ms: 33 ms of NVLink
# beside it can be borne and partly hidden, 300 ms of network cannot.
#
# ## Tensor parallel is exact algebra
#
# Split the first matrix by its outputs and the second by its inputs. Each device has half of the
# middle, activation included, and the two results are *added*: one all-reduce for two matrices.
#
# %%
import torch
from torch.nn import functional as F

torch.manual_seed(0)
x, up, down = torch.randn(5, 64), torch.randn(256, 64) * 0.1, torch.randn(64, 256) * 0.1
whole = F.linear(F.silu(F.linear(x, up)), down)
halves = [
    F.linear(F.silu(F.linear(x, up[part])), down[:, part])
    for part in (slice(0, 128), slice(128, 256))
]
here.figure(
    "tensor_error", float((sum(halves) - whole).abs().max()), "1", "tensor=2 against one device"
)

# %% [markdown]
# ## Two ranks that really talk
#
# Two processes on this machine, joined by gloo (NCCL on NVIDIA, RCCL on AMD: the same calls). Each
# has half a batch; the mean of their gradients is the gradient of the whole.
#
# %%
from ridgeline.learn.elsewhere import run_python

RANKS = """
import datetime, json, os, sys, time
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
import torch, torch.distributed as dist
torch.set_num_threads(1)
store_path = sys.argv[1]
def main(rank):
    store = dist.FileStore(store_path, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2,
                            timeout=datetime.timedelta(seconds=60))
    torch.manual_seed(0)
    w, x = torch.randn(8, 8, requires_grad=True), torch.randn(6, 8)
    (x @ w).square().mean().backward()
    want = w.grad.clone()
    w.grad = None
    (x[3 * rank : 3 * rank + 3] @ w).square().mean().backward()
    dist.all_reduce(w.grad)
    error = float((w.grad / 2 - want).abs().max())
    times = []
    for _ in range(5):
        data = torch.ones(1 << 20)
        dist.barrier(); began = time.perf_counter()
        dist.all_reduce(data)
        times.append(time.perf_counter() - began)
    if rank == 0:
        print(json.dumps([error, 4 * (1 << 20) / sorted(times)[2]]), flush=True)
    dist.destroy_process_group()
if os.fork() == 0:
    main(1); os._exit(0)
main(0); os.wait()
"""
import json
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    printed = run_python(RANKS, str(Path(folder) / "store"))
error, all_reduce_rate = json.loads(printed.splitlines()[-1])
here.figure("gradient_error", error, "1", "gradients of two ranks against one device's")
here.figure("gloo", all_reduce_rate, "B/s", "all-reduce of 4 MiB between two processes (gloo)")
here.missing("several GPUs", "NCCL over NVLink; `ridgeline bench collectives` times it by size")

# %% [markdown]
# ## The pipeline's bubble
#
# p stages and m micro-batches: the first device waits for the last. Filling and draining cost (p −
# 1) of m + p − 1 slots: with 4 stages and 8 micro-batches 27%. Interleaving v stages a device
# divides the fill by v; zero-bubble schedules fill it with the weights' gradients, which nobody
# waits for. These are simulated by the same code that orders a run:
#
# %%
from ridgeline.parallel.bubbles import bubble_share
from ridgeline.parallel.layout import Layout

for schedule, stages in (("1f1b", 1), ("interleaved", 2), ("zero-bubble", 2)):
    layout = Layout(pipeline=4, stages=stages, schedule=schedule)
    here.figure(
        f"bubble_{schedule.replace('-', '_')}", bubble_share(layout, 8), "1",
        f"bubble, 4 devices, 8 micro-batches, {schedule}",
    )  # fmt: skip


# %% [markdown]
# ## Choose in this order
#
# 1. Does a step fit one device (recomputation, 8-bit moments)? Then replicate, and stop.
# 2. Shard inside the node, then across: it is the simplest, as long as the batch is large enough to
#    hide fetching 2 bytes a parameter behind 6 operations a parameter and token.
# 3. Tensor (with sequence) inside the node when the batch gets too small for each device, or when
#    serving: it alone shortens one request's time.
# 4. Pipeline across nodes when networks are slow; context for sequences that do not fit; expert for
#    mixtures.
#
# `ridgeline plan MODEL --gpus 2048xH100 --for train` searches all of them and says why not
# otherwise.
#
# ## Take along
#
# - Count bytes over the slowest link, beside the work that can hide them.
# - Ring all-reduce: 2(n − 1)/n of the bytes; FSDP: weights twice and gradients once, 1.5 times
#   that.
# - Tensor parallel stays inside NVLink; pipelines cross nodes.
# - Any layout is held to the one-device result before it is timed.
#
# ## In the tree
#
# - `ridgeline/parallel/layout.py`: the layout, integers only; `docs/parallel.md`.
# - `ridgeline/training/ranks/`: training over ranks; `ridgeline/parallel/inference/`: serving.
# - `ridgeline/hardware/fabrics.py`: nodes, links and SuperPODs with their documents.
# - `ridgeline/planning/training/`: a step's time under a layout.
#
# ## Exercise
#
# The share of a pipeline's time that is bubble, with p devices, m micro-batches and v stages a
# device (interleaved): filling and draining take (p − 1)/v slots where the work takes m.
#
# %% [exercise]
def bubble(p: int, m: int, v: int = 1) -> float:
    # your code
    fill = (p - 1) / v
    return fill / (m + fill)
    # end of your code


# %% [check]
from collections.abc import Callable, Iterator

from ridgeline.learn.trials import AnswerTrial


def trials(answer: Callable[..., float]) -> Iterator[AnswerTrial]:
    yield AnswerTrial.of(answer, 1, 8, want=0.0, hint="one device waits for nobody")
    yield AnswerTrial.of(answer, 4, 8, want=3 / 11)
    yield AnswerTrial.of(answer, 4, 8, 2, want=1.5 / 9.5, hint="fill is divided by v, work is not")
    yield AnswerTrial.of(answer, 8, 64, want=7 / 71, hint="more micro-batches, less bubble")
