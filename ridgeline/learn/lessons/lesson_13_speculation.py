# %% [markdown]
# # Speculative decoding, and why it can be exact
#
# A decode step reads all weights for one token. Checking five tokens reads them once too: below the
# ridge, more rows are free. So let something cheap *draft* a few tokens and let the model check
# them in one pass. Done right, the result has exactly the distribution that the model alone would
# have.
#
# %% [picture]
from ridgeline.learn.pictures import LessonPicture

picture = LessonPicture(220, "Four drafted tokens, three accepted, the fourth replaced")
picture.text(30, 36, "draft (cheap)", "soft")
for at, word in enumerate(("the", "sky", "is", "green")):
    picture.box(140 + at * 110, 20, 96, 28, word, "n")
    picture.arrow(188 + at * 110, 50, 188 + at * 110, 86)
picture.text(30, 106, "one pass", "soft")
for at, word in enumerate(("yes", "yes", "yes", "no → blue")):
    picture.box(140 + at * 110, 88, 96, 28, word, "w" if at == 3 else "c")
picture.text(30, 166, "result", "soft")
for at, word in enumerate(("the", "sky", "is", "blue")):
    picture.box(140 + at * 110, 148, 96, 28, word, "a")
picture.text(140, 202, "4 tokens from one reading of the weights", "soft")

# %% [markdown]
# ## The rule
#
# The draft has distribution q, the model p. The draft's token x came from q.
#
# 1. Accept x with probability min(1, p(x) / q(x)).
# 2. If it is rejected, draw from the *residual*: max(0, p − q), made to sum to 1. Stop there.
#
# Why the result is p: token x is produced by acceptance with probability q(x) · min(1, p(x)/q(x)) =
# min(q(x), p(x)). All rejections together have probability 1 − Σ min(p, q) = Σ max(0, p − q), which
# is just what the residual was divided by. So x comes by rejection with max(0, p(x) − q(x)). The
# sum of the two is p(x). It holds for *any* q; a bad draft costs time, never correctness.
#
# %%
from ridgeline.learn.session import Session

here = Session("speculation")

# %%
import torch

p = torch.tensor([0.5, 0.3, 0.2, 0.0])
q = torch.tensor([0.2, 0.2, 0.2, 0.4])
generator = torch.Generator().manual_seed(0)
count = 400_000
drafted = torch.multinomial(q, count, replacement=True, generator=generator)
accepted = torch.rand(count, generator=generator) < (p / q)[drafted]
residual = (p - q).clamp(min=0)
replaced = torch.multinomial(residual, count, replacement=True, generator=generator)
result = torch.where(accepted, drafted, replaced)
shares = torch.bincount(result, minlength=4) / count
here.figure("accepted", float(accepted.float().mean()), "1", "accepted (Σ min(p, q) = 0.6)")
here.figure(
    "furthest", float((shares - p).abs().max()), "1", "largest distance from p, 400,000 draws"
)
wrong = torch.multinomial(p, count, replacement=True, generator=generator)
shortcut = torch.where(accepted, drafted, wrong)
off = (torch.bincount(shortcut, minlength=4) / count - p).abs().max()
here.figure(
    "shortcut", float(off), "1", "the same if rejections draw from p instead of the residual"
)

# %% [markdown]
# Drawing from p after a rejection looks harmless and is wrong: accepted tokens favour what both
# like, so the rest has to make up for it.
#
# With greedy decoding p is 1 at one token: accept while the draft is the model's best token.
#
# ## What it brings
#
# If each draft is accepted with probability α, k drafts give on average 1 + α + α² + … + αᵏ = (1 −
# αᵏ⁺¹) / (1 − α) tokens a pass: the accepted ones and one of the model's own. With α = 0.8 and k =
# 4: 3.36. A pass over k + 1 rows and k draft steps of cost c (a share of a pass) take 1 + k·c: 3.36
# / (1 + 4 · 0.1) = 2.4 times as fast. Simulated and by the formula:
#
# %%


def tokens_a_pass(alpha: float, k: int) -> float:
    return (1 - alpha ** (k + 1)) / (1 - alpha)


draws = torch.rand(100_000, 4, generator=generator) < 0.8
simulated = 1 + draws.int().cumprod(1).sum(1).float().mean()
here.figure("formula", tokens_a_pass(0.8, 4), "1", "tokens a pass, α = 0.8, k = 4, by the formula")
here.figure("simulated", float(simulated), "1", "the same, simulated")
best = max(range(1, 17), key=lambda k: tokens_a_pass(0.8, k) / (1 + 0.1 * k))
here.figure("best_k", best, "1", "best k at α = 0.8 and drafts of a tenth of a pass")

# %% [markdown]
# ## Checking is free, until it is not
#
# Rows are free only below the ridge. With 64 requests at once and four drafts each, a step has 320
# rows and is bound by arithmetic on an H200 (ridge 188): then drafts slow it down. An engine has to
# measure that as it runs. Here: one weight with one row and with five.
#
# %%
n = 16384 if here.is_gpu else 4096
kind = torch.bfloat16 if here.is_gpu else torch.float32
weight = torch.randn(n, n, device=here.device).to(kind)
times = {}
for rows in (1, 5, 320):
    x = torch.randn(rows, n, device=here.device).to(kind)
    times[rows] = here.seconds(lambda x=x: x @ weight.T)
here.figure("five_rows", times[5] / times[1], "1", "time of 5 rows over that of one")
here.figure("many_rows", times[320] / times[1], "1", "time of 320 rows over that of one")


# %% [markdown]
# ## Who drafts
#
# - a small model of the same tokenizer: α of 0.6 to 0.8, at the cost of another model;
# - the prompt itself (*n-gram* or prompt lookup): the last few tokens are looked up in what is
#   there already, and what followed is the draft. Nothing to compute; great for editing and
#   quoting;
# - extra heads on the model (Medusa, EAGLE, multi-token prediction): trained for it.
#
# ## Take along
#
# - Accept with min(1, p/q), else draw from max(0, p − q): exact for any draft.
# - Tokens a pass: (1 − αᵏ⁺¹) / (1 − α); choose k by that over 1 + k·c.
# - It lives on idle arithmetic: gains at small batches, losses at large ones. Measure while
#   running.
# - Test it by the distribution with sampling, and token by token with greedy decoding.
#
# ## In the tree
#
# - `ridgeline/engine/speculation/`: who drafts, and whether it pays (`pace.py` measures).
# - `ridgeline/kernels/prompt_lookup/`: n-grams looked up on the device.
# - `ridgeline/kernels/sampling/`: acceptance and residual, on the device.
#
# ## Exercise
#
# For distributions p and q over the same tokens, return (probability that a draft is accepted, the
# residual distribution as a list). If p and q are equal the residual is never needed: return p.
#
# %% [exercise]
def speculate(p: list[float], q: list[float]) -> tuple[float, list[float]]:
    # your code
    accepted = sum(min(a, b) for a, b in zip(p, q, strict=True))
    left = [max(0.0, a - b) for a, b in zip(p, q, strict=True)]
    total = sum(left)
    return accepted, [each / total for each in left] if total else list(p)
    # end of your code


# %% [check]
from collections.abc import Callable, Iterator

from ridgeline.learn.trials import AnswerTrial


def trials(answer: Callable[..., tuple[float, list[float]]]) -> Iterator[AnswerTrial]:
    yield AnswerTrial.of(
        answer, [1.0, 0.0], [0.5, 0.5], want=(0.5, [1.0, 0.0]), hint="greedy: all mass on one"
    )
    yield AnswerTrial.of(
        answer,
        [0.5, 0.3, 0.2, 0.0],
        [0.2, 0.2, 0.2, 0.4],
        want=(0.6, [0.75, 0.25, 0.0, 0.0]),
        hint="max(0, p - q) sums to 0.4: divide by it",
    )
    yield AnswerTrial.of(answer, [0.5, 0.5], [0.5, 0.5], want=(1.0, [0.5, 0.5]), hint="p = q")
