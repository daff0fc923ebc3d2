# %% [markdown]
# # Data at speed: Arrow, Parquet, deduplication
#
# A GPU that trains at 400 TFLOP/s on an 8B model eats 8,300 tokens a second, 33 kB of text: feeding
# it is easy. *Making* the corpus is not: 15 trillion tokens are 60 TB of text that has to be read,
# cleaned, deduplicated and tokenized, and there memory layout decides just as it does in kernels.
#
# %% [picture]
from ridgeline.learn.pictures import LessonPicture

picture = LessonPicture(250, "Rows against columns, and a string column as offsets and bytes")
picture.text(20, 32, "rows: one object after the other", "bold")
for at in range(3):
    picture.cells(30 + at * 200, 44, 60, ["text", "url", "score"], ["a", "n", "b"])
picture.text(
    20, 130, "columns (Arrow): each field side by side; strings as offsets into one buffer", "bold"
)
picture.cells(30, 142, 44, ["0", "5", "8", "21"], ["c"] * 4)
picture.box(230, 142, 250, 42, "helloskyridgelineroof", "a")
picture.cells(510, 142, 44, [".9", ".4", ".7"], ["b"] * 3)
picture.text(
    30,
    214,
    "offsets: text k is bytes offsets[k] to offsets[k + 1]; no object, no pointer, no copy",
    "soft",
)

# %% [markdown]
# ## Columns
#
# *Arrow* is the layout in memory: each column one buffer (strings: offsets and bytes), the same in
# every language and on the GPU, so handing data over copies nothing. *Parquet* is the file: columns
# in row groups, compressed, with the least and largest value of each, so that a reader skips what
# it does not need. Sum one field of a million records as objects, and as a column:
#
# %%
from ridgeline.learn.session import Session

here = Session("data")

# %%
import time

import torch

count = 300_000
records = [{"text": "x", "url": "y", "score": at * 0.5} for at in range(count)]
column = torch.tensor([record["score"] for record in records], dtype=torch.float64)
began = time.perf_counter()
by_rows = sum(record["score"] for record in records)
rows_s = time.perf_counter() - began
columns_s = here.seconds(column.sum)
assert abs(by_rows - float(column.sum())) < 1e-6 * by_rows
here.figure("rows", rows_s / count, "s", "a record, summed as objects")
here.figure("columns", columns_s / count, "s", "a record, summed as a column")
here.figure("columns_gain", rows_s / columns_s, "1", "times as fast")

# %% [markdown]
# ## Near duplicates
#
# Web text is full of copies. Two documents are *near duplicates* when the sets of their *shingles*
# (runs of five words) overlap: the Jaccard similarity |A ∩ B| / |A ∪ B| is at least 0.8, say. Of a
# billion documents there are 5e17 pairs, so nobody compares pairs.
#
# **MinHash**: hash every shingle with a random function and keep the least value. For one function
# the two least values are equal with probability |A ∩ B| / |A ∪ B|, since each element of the union
# is equally likely to be the least. With 208 functions the share of equal ones estimates it.
#
# **Bands**: cut the 208 values into 26 bands of 8 and look documents up by whole bands. A pair of
# similarity s shares a given band with probability s⁸, and at least one of 26 with 1 − (1 − s⁸)²⁶:
# 99.2% at 0.8, 10% at 0.5. Only pairs that share a band are compared.
#
# %%
for s in (0.5, 0.7, 0.8, 0.9):
    name = str(s).replace(".", "")
    here.figure(f"band_{name}", 1 - (1 - s**8) ** 26, "1", f"probability to be compared at s = {s}")

# %% [markdown]
# The project's own kernel, C++ on a CPU and Triton on a GPU, on text that lies end to end as Arrow
# holds it:
#
# %%
import random

from ridgeline.kernels.minhash import signatures

random.seed(0)
vocabulary = ["".join(random.choices("abcdefghijklmnop", k=6)) for _ in range(5000)]
words = random.choices(vocabulary, k=400)
copy = list(words)
for at in random.sample(range(400), 8):
    copy[at] = "changed"
other = random.choices(vocabulary, k=400)


def joined(documents: list[list[str]]) -> tuple[torch.Tensor, torch.Tensor]:
    texts = [" ".join(document).encode() for document in documents]
    offsets = torch.tensor([0, *torch.tensor([len(text) for text in texts]).cumsum(0).tolist()])
    return torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8), offsets


text, offsets = joined([words, copy, other])
minima = signatures(text, offsets, bands=26, rows=8)[0]


def shingles(document: list[str]) -> set[tuple[str, ...]]:
    return {tuple(document[at : at + 5]) for at in range(len(document) - 4)}


exact = len(shingles(words) & shingles(copy)) / len(shingles(words) | shingles(copy))
here.figure("jaccard", exact, "1", "similarity of a text and its copy with 8 of 400 words changed")
here.figure("estimate", float((minima[0] == minima[1]).float().mean()), "1", "… by MinHash of 208")
here.figure("unlike", float((minima[0] == minima[2]).float().mean()), "1", "… of two unlike texts")

many, at_many = joined([random.choices(vocabulary, k=400) for _ in range(1500)])
if here.is_gpu:
    many, at_many = many.to(here.device), at_many.to(here.device)
taken = here.seconds(lambda: signatures(many, at_many, bands=26, rows=8))
here.figure("signatures", many.numel() / taken, "B/s", "text through MinHash")


# %% [markdown]
# The estimate is a count of 208 draws, so its standard error at s = 0.8 is √(0.8 · 0.2 / 208) =
# 0.028: good enough to choose candidates, which are then compared exactly.
#
# ## On GPUs
#
# *cuDF* and Polars' GPU engine run filters, joins and sums on columns in GPU memory; *Theseus* and
# Spark-RAPIDS spread queries over many GPUs. The gain is that of bandwidth, 4.3 TB/s against some
# 0.3 of a server's CPU, as long as the data is on the card or comes over a link that keeps up: PCIe
# at 53 GB/s feeds an eightieth of that. So keep data on the device through several steps. Here
# `ridgeline data build --engine gpu` is written for it and was *not run* on a GPU; cuDF and Theseus
# are not wrapped.
#
# **Loading while training**: shards of token ids mapped from disk, an order that depends on seed
# and position alone (so that a run resumes exactly), packed to full windows with document borders.
#
# ## Take along
#
# - Columns for whatever is scanned; offsets and bytes for text.
# - MinHash and bands turn pairs into look-ups; choose bands and rows by 1 − (1 − sʳ)ᵇ.
# - Keep one of each group of duplicates, and check that one survives.
# - Every dropped document has a reason that is written down.
#
# ## In the tree
#
# - `ridgeline/kernels/minhash/`: shingles and signatures.
# - `ridgeline/data/corpus/duplicates/`: bands, comparing, who survives.
# - `ridgeline/data/loading/`: order, mixture, windows; `docs/data.md`, `docs/data-loading.md`.
#
# ## Exercise
#
# The probability that a pair of similarity s shares at least one of `bands` bands of `rows` rows,
# and the fewest bands of `rows` rows for which that is at least `wanted`.
#
# %% [exercise]
def compared(s: float, bands: int, rows: int) -> float:
    """Probability to share a band."""
    # your code
    return 1 - (1 - s**rows) ** bands
    # end of your code


def fewest_bands(s: float, rows: int, wanted: float) -> int:
    """Uses `compared`."""
    # your code
    bands = 1
    while compared(s, bands, rows) < wanted:
        bands += 1
    return bands
    # end of your code


# %% [check]
from collections.abc import Callable, Iterator

from ridgeline.learn.trials import AnswerTrial


def trials(answer: Callable[..., int]) -> Iterator[AnswerTrial]:
    yield AnswerTrial.of(answer, 1.0, 8, 0.99, want=1, hint="equal documents share every band")
    yield AnswerTrial.of(answer, 0.5, 1, 0.75, want=2, hint="1 - (1 - 0.5)² = 0.75")
    yield AnswerTrial.of(answer, 0.8, 8, 0.99, want=26, hint="1 - (1 - 0.8⁸)²⁶ = 0.992")
    yield AnswerTrial.of(answer, 0.8, 4, 0.99, want=9, hint="fewer rows, fewer bands")
