# %% [markdown]
# # Training: memory and time
#
# A training step does three times the work of a forward pass and holds several times its memory.
# Both can be counted before anything runs; then every technique is a trade between the two.
#
# %% [picture]
from ridgeline.learn.pictures import LessonPicture

picture = LessonPicture(240, "Memory of training 8 billion parameters with Adam, by what holds it")
picture.text(
    20, 32, "8.03 billion parameters, bf16 with fp32 master weights, Adam: 18 bytes each", "bold"
)
rows = (
    ("weights, bf16", 16 / 70, "16 GB", "a"),
    ("gradients, fp32", 32 / 70, "32 GB", "b"),
    ("master weights", 32 / 70, "32 GB", "c"),
    ("two moments", 64 / 70, "64 GB", "d"),
)
picture.bars(10, 48, rows)
picture.text(20, 190, "144 GB before a single activation: more than an H200's 141. Hence sharding,")
picture.text(
    20, 210, "8-bit moments, gradients in bf16, or adapters (LoRA), which train 0.1 to 1% of it."
)

# %% [markdown]
# ## Work
#
# Forward: 2 operations a parameter and token. Backward: 4 (the gradient of the input, and of the
# weight). So 6·N·D for N parameters and D tokens: 8e9 · 15e12 · 6 = 7.2e23 for Llama-3-8B's 15
# trillion tokens. At 400 TFLOP/s a GPU, 1,000 GPUs need 21 days. *MFU* (model FLOPs utilization) is
# that count over what the chip could do: 400 / 989 = 40% of an H100's datasheet.
#
# %%
from ridgeline.learn.session import Session

here = Session("training")

# %%
import torch
from torch.nn import functional as F
from torch import Tensor

here.figure(
    "days", 6 * 8e9 * 15e12 / (400e12 * 1000) / 86400, "1", "days for 8B on 15T, 1,000 GPUs"
)
layers, width, rows = (12, 2048, 8192) if here.is_gpu else (6, 512, 1024)
kind = torch.bfloat16 if here.is_gpu else torch.float32
torch.manual_seed(0)
weights = [
    [(torch.randn(shape, device=here.device) * 0.02).to(kind).requires_grad_() for shape in pair]
    for pair in [((4 * width, width), (width, 4 * width))] * layers
]
num_parameters = sum(w.numel() for pair in weights for w in pair)


def block(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return x + F.linear(F.gelu(F.linear(x, up)), down)


def forward(x: Tensor, recompute: bool = False) -> Tensor:
    for up, down in weights:
        if recompute:
            from torch.utils.checkpoint import checkpoint

            x = checkpoint(block, x, up, down, use_reentrant=False)
        else:
            x = block(x, up, down)
    return x.float().square().mean()


def step(x: Tensor, recompute: bool = False) -> None:
    for pair in weights:
        for weight in pair:
            weight.grad = None
    forward(x, recompute).backward()


x = torch.randn(rows, width, device=here.device).to(kind)
with torch.no_grad():
    forward_s = here.seconds(lambda: forward(x))
step_s = here.seconds(lambda: step(x))
here.figure("ratio", step_s / forward_s, "1", "forward and backward over forward (3 by count)")
rate = here.ceiling("matrix_bf16" if here.is_gpu else "matrix_fp32")
here.figure(
    "mfu", 6 * num_parameters * rows / step_s / rate, "1", "MFU of it, of the measured rate"
)

# %% [markdown]
# ## Activations, and recomputation
#
# Backward needs what forward computed: here for each layer x (width), the product (4·width) and its
# GELU (4·width), 9·width numbers a token. *Recomputation* (gradient checkpointing) keeps x alone
# and computes the rest again: a ninth of the memory, a third more work (4 passes instead of 3).
#
# %%


def kept_bytes(recompute: bool) -> int:
    """What autograd saves for backward, parameters aside, each storage once."""
    own = {w.untyped_storage().data_ptr() for pair in weights for w in pair}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = forward(x, recompute)
    del loss
    return sum(sizes.values())


plain_bytes, small_bytes = kept_bytes(False), kept_bytes(True)
here.figure("kept", plain_bytes, "B", "activations kept for backward")
here.figure("kept_recomputed", small_bytes, "B", "the same with recomputation")
again_s = here.seconds(lambda: step(x, True))
here.figure("recompute_cost", again_s / step_s, "1", "a step's time with it over without (4/3)")

# %% [markdown]
# ## Batches
#
# - *Micro-batch*: the tokens in one pass; memory decides. Large enough to be above the ridge.
# - *Global batch*: micro-batch · accumulation steps · data-parallel ranks; optimization decides.
# - *Accumulating* gradients over k micro-batches gives the gradient of the whole: with a mean over
#   all tokens, not a mean of means. With unequal lengths those differ:
#
# %%
losses = [torch.tensor([4.0, 4.0, 4.0, 4.0]), torch.tensor([1.0])]
means = sum(float(each.mean()) for each in losses) / 2
whole = float(torch.cat(losses).mean())
here.figure(
    "mean_of_means", means, "1", "mean of micro-batches' means (4 tokens at 4.0, one at 1.0)"
)
here.figure("whole_mean", whole, "1", "mean over all tokens: what is meant")


# %% [markdown]
# ## fp8, and hyperparameters
#
# fp8 doubles the matrix rate (1,465 against 801 TFLOP/s on an H200), for the products alone:
# forward in e4m3, gradients in e5m2 or e4m3, a scale for each tensor or block, sums and master
# weights as before. Attention, norms and the optimizer stay, so a step gains less than its products
# do.
#
# The learning rate matters more than all of it. Find it by a range test (raise it over a few
# hundred steps and look where the loss turns), warm up, decay by cosine or linearly; scale it by
# about the square root of the batch. `ridgeline tune lr` does the test and gives a verdict.
#
# ## Take along
#
# - 6·N·D operations; 18 bytes a parameter with Adam; activations by tokens · width · layers.
# - Recomputation: a third more work for a fraction of the activations.
# - Micro-batch by memory, global batch by optimization; mean over tokens.
# - A checkpoint is weights, moments, step, data position and random states, or it does not resume.
#
# ## In the tree
#
# - `ridgeline/training/naive.py`: the plain loop; `ridgeline/training/stepping/step.py`: the fast
#   one.
# - `ridgeline/training/memory/`: the plan before anything is loaded (`ridgeline train --dry-run`).
# - `ridgeline/training/saving/`: checkpoints; `ridgeline/training/stepping/fp8.py`: fp8.
# - `ridgeline/configs/training.py`: named runs as functions that return a config.
# - `ridgeline/tuning/rates/`: range tests; `docs/tuning.md`.
#
# ## Exercise
#
# Bytes a device needs for weights, gradients, master weights and moments: bf16 weights (2), fp32
# gradients (4), fp32 master (4), two fp32 moments (8), over `shard` devices. Stage 0 shards
# nothing, 1 the optimizer's state (master and moments), 2 gradients too, 3 weights too (ZeRO's
# stages).
#
# %% [exercise]
def device_bytes(parameters: float, shard: int, stage: int) -> float:
    # your code
    weights, gradients, optimizer = 2 * parameters, 4 * parameters, 12 * parameters
    return (
        weights / (shard if stage >= 3 else 1)
        + gradients / (shard if stage >= 2 else 1)
        + optimizer / (shard if stage >= 1 else 1)
    )
    # end of your code


# %% [check]
from collections.abc import Callable, Iterator

from ridgeline.learn.trials import AnswerTrial


def trials(answer: Callable[..., float]) -> Iterator[AnswerTrial]:
    yield AnswerTrial.of(answer, 1e9, 8, 0, want=18e9, hint="18 bytes a parameter")
    yield AnswerTrial.of(answer, 1e9, 4, 1, want=9e9, hint="6 + 12 / 4")
    yield AnswerTrial.of(answer, 1e9, 4, 2, want=6e9, hint="2 + 16 / 4")
    yield AnswerTrial.of(answer, 1e9, 8, 3, want=2.25e9, hint="all of it over 8")
