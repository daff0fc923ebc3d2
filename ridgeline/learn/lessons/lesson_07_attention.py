# %% [markdown]
# # Attention, from the formula to FlashAttention
#
# For one head with T queries and keys of width D: softmax(Q Kᵀ / √D) V. The two products do 4·T²·D
# operations. The matrix of scores in between has T² entries, and writing it to memory and reading
# it back is what makes plain attention slow: not the arithmetic, the scores.
#
# %% [picture]
from ridgeline.learn.pictures import LessonPicture

picture = LessonPicture(270, "A block of queries stays; blocks of keys and values pass by it")
picture.box(30, 60, 110, 60, "block of Q\nstays in registers", "a")
for at in range(4):
    look = "b" if at == 1 else "n"
    picture.box(230 + at * 110, 40, 100, 40, f"K block {at}", look)
    picture.box(230 + at * 110, 100, 100, 40, f"V block {at}", look)
picture.arrow(140, 90, 335, 90)
picture.box(230, 180, 190, 50, "m, s, and acc\nrescaled by exp(m − m′)", "c")
picture.arrow(385, 142, 330, 180)
picture.arrow(420, 205, 540, 205, "at the end: acc / s")
picture.box(540, 185, 110, 40, "output rows", "a")
picture.text(30, 256, "The T×T scores exist one block at a time and never reach memory.", "soft")

# %% [markdown]
# ## Count
#
# T = 8192, D = 128, one head, bf16. Q, K, V and the output are 4 · 8192 · 128 · 2 = 8.4 MB. The
# scores are 8192² · 2 = 134 MB, written and read twice (scores, then probabilities): 537 MB, 64
# times as much. The operations, 4 · 8192² · 128 = 34 GFLOP, take 43 µs of an H200's tensor cores;
# the scores' traffic takes 126 µs of its memory. Without the scores it is bound by arithmetic.
#
# %%
from ridgeline.learn.session import Session

here = Session("attention")

# %%
import torch
from torch.nn import functional as F
from torch import Tensor

T, D = 8192, 128
inputs_bytes, scores_bytes = 4 * T * D * 2, 4 * T * T * 2
here.figure(
    "scores_over_inputs", scores_bytes / inputs_bytes, "1", "traffic of scores over Q, K, V, O"
)


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.T * q.shape[1] ** -0.5, -1) @ v


# %% [markdown]
# ## The loop
#
# Take a block of queries. For each block of keys: scores, the new largest value m' of each row, and
# the three things that are kept, moved to the new scale as in the softmax lesson:
#
#     p   = exp(scores − m')
#     s   = s · exp(m − m') + Σ p
#     acc = acc · exp(m − m') + p V
#
# The accumulated output is a sum weighted by exponentials, so it is rescaled like the sum is. That
# one line is FlashAttention.
#
# %%


def flash(q: Tensor, k: Tensor, v: Tensor, block: int = 64) -> Tensor:
    largest = torch.full((q.shape[0], 1), float("-inf"), device=q.device)
    total = torch.zeros_like(largest)
    out = torch.zeros(q.shape[0], v.shape[1], device=q.device)
    for start in range(0, k.shape[0], block):
        scores = (q @ k[start : start + block].T).float() * q.shape[1] ** -0.5
        new = torch.maximum(largest, scores.max(-1, keepdim=True).values)
        p, kept = (scores - new).exp(), (largest - new).exp()
        total = total * kept + p.sum(-1, keepdim=True)
        out = out * kept + p @ v[start : start + block].float()
        largest = new
    return out / total


q, k, v = (torch.randn(200, 64, device=here.device) for _ in range(3))
here.figure(
    "error", float((flash(q, k, v) - plain(q, k, v)).abs().max()), "1", "largest difference"
)

# %% [markdown]
# ## The kernel
#
# A program has one block of queries of one head. It is the loop above with masks; `causal` also
# stops at the diagonal, which halves the work.
#
# %%
import triton
import triton.language as tl


@triton.jit
def flash_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, T, scale, D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * T * D
    rows = tl.program_id(0) * BQ + tl.arange(0, BQ)
    width = tl.arange(0, D)
    places = head + rows[:, None].to(tl.int64) * D + width[None, :]
    q = tl.load(q_ptr + places, mask=rows[:, None] < T, other=0.0)
    largest = tl.full((BQ,), float("-inf"), tl.float32)
    total = tl.zeros((BQ,), tl.float32)
    out = tl.zeros((BQ, D), tl.float32)
    end = tl.minimum(T, (tl.program_id(0) + 1) * BQ) if CAUSAL else T
    for start in range(0, end, BK):
        keys = start + tl.arange(0, BK)
        at = head + keys[:, None].to(tl.int64) * D + width[None, :]
        k = tl.load(k_ptr + at, mask=keys[:, None] < T, other=0.0)
        v = tl.load(v_ptr + at, mask=keys[:, None] < T, other=0.0)
        seen_by = keys[None, :] < T
        if CAUSAL:
            seen_by = seen_by & (keys[None, :] <= rows[:, None])
        scores = tl.where(seen_by, tl.dot(q, tl.trans(k)) * scale, float("-inf"))
        new = tl.maximum(largest, tl.max(scores, 1))
        p, kept = tl.exp(scores - new[:, None]), tl.exp(largest - new)
        total = total * kept + tl.sum(p, 1)
        out = tl.dot(p.to(v.dtype), v, out * kept[:, None])
        largest = new
    tl.store(o_ptr + places, (out / total[:, None]).to(q.dtype), mask=rows[:, None] < T)


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, block: int = 64) -> Tensor:
    """Of heads × T × D, contiguous."""
    heads, length, width = q.shape
    out = torch.empty_like(q)
    flash_kernel[(triton.cdiv(length, block), heads)](
        q, k, v, out, length, width**-0.5, D=width, BQ=block, BK=block, CAUSAL=causal
    )
    return out


kind = torch.bfloat16 if here.is_gpu else torch.float32
q, k, v = (torch.randn(2, 75, 32, device=here.device).to(kind) for _ in range(3))
for causal in (False, True):
    want = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=causal)[0]
    error = float((attend(q, k, v, causal, 32) - want).abs().max())
    assert error < (0.05 if here.is_gpu else 1e-4), error

# %%
length, heads, width = (8192, 16, 128) if here.is_gpu else (1024, 2, 64)
q, k, v = (torch.randn(heads, length, width, device=here.device).to(kind) for _ in range(3))
work = 4 * heads * length**2 * width
ways = {"plain": lambda: torch.softmax(q @ k.mT * width**-0.5, -1) @ v}
ways["library"] = lambda: F.scaled_dot_product_attention(q[None], k[None], v[None])
if here.is_gpu:
    ways["ours"] = lambda: attend(q, k, v, False, 64)
for name, words in {
    "plain": "scores in memory",
    "library": "torch's fused",
    "ours": "this kernel",
}.items():
    if name in ways:
        here.figure(name, work / here.seconds(ways[name]), "FLOP/s", f"attention, {words}")
if not here.is_gpu:
    here.missing("a GPU", "the kernel above beside torch's fused attention")

# %% [markdown]
# ## Decoding is another problem
#
# With one query there are no scores to save: 4·T·D operations on 4·T·D bytes of keys and values in
# bf16, an intensity of 1 (times the query heads that share a KV head). It is bound by reading the
# cache. One query block per head also leaves most SMs idle, so the *keys* are split over programs,
# and the parts are joined by their (m, s): the exercise of the softmax lesson.
#
# ## Take along
#
# - The scores never go to memory: that is the gain; the arithmetic is the same.
# - Output and sum are rescaled by exp(m − m') when the largest value moves.
# - Causal masks: skip whole blocks, mask only those on the diagonal.
# - Prefill attention is bound by arithmetic, decode attention by reading keys and values.
#
# ## In the tree
#
# - `ridgeline/kernels/attention/reference.py`: the definition.
# - `ridgeline/kernels/prefill_attention/`: queries in blocks, keys in pages.
# - `ridgeline/kernels/decode_attention/`: keys split over programs, parts joined.
# - `ridgeline/kernels/document_attention/`: with gradients, for training.
#
# ## Exercise
#
# Write one step of the loop: from (m, s, acc) and a block of scores (rows × keys) with its values
# (keys × D), the new (m, s, acc). m and s are of shape rows × 1.
#
# %% [exercise]
from torch import Tensor


def step(
    largest: Tensor, total: Tensor, out: Tensor, scores: Tensor, values: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    # your code
    new = largest.maximum(scores.max(-1, keepdim=True).values)
    p, kept = (scores - new).exp(), (largest - new).exp()
    return new, total * kept + p.sum(-1, keepdim=True), out * kept + p @ values
    # end of your code


# %% [check]
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ridgeline.learn.trials import AnswerTrial


def whole(
    answer: Callable[..., tuple[Tensor, Tensor, Tensor]], scores: Tensor, values: Tensor
) -> Tensor:
    largest = torch.full((scores.shape[0], 1), float("-inf"))
    total, out = torch.zeros_like(largest), torch.zeros(scores.shape[0], values.shape[1])
    for start in range(0, scores.shape[1], 4):
        part = slice(start, start + 4)
        largest, total, out = answer(largest, total, out, scores[:, part], values[part])
    return out / total


def trials(answer: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> Iterator[AnswerTrial]:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(12, 3, generator=generator)
    for keys, shift, hint in (
        (4, 0.0, "one block: p V / Σ p"),
        (12, 0.0, "three blocks: is the old output rescaled?"),
        (12, 200.0, "large scores: is the new largest subtracted before exp?"),
    ):
        scores = torch.randn(2, keys, generator=generator) * 3 + shift
        want = torch.softmax(scores, -1) @ values[:keys]
        yield AnswerTrial(
            f"scores of 2×{keys} in blocks of 4",
            lambda scores=scores, keys=keys: whole(answer, scores, values[:keys]),
            want,
            hint,
        )
