# %% [markdown]
# # Prefill and decode, in-flight batching, pages, shared prefixes
#
# A request has two lives. *Prefill* computes its whole prompt at once: thousands of rows, bound by
# arithmetic. *Decode* makes one token after the other: one row, bound by reading the weights. An
# engine's whole art is to put many requests' single rows together.
#
# %% [picture]
from ridgeline.learn.pictures import LessonPicture

picture = LessonPicture(
    260, "A static batch waits for its longest; in-flight batching refills at once"
)
picture.text(20, 30, "static batch of 3: the next ones wait for the longest", "bold")
for row, (length, look) in enumerate(((9, "a"), (3, "b"), (5, "c"))):
    picture.box(40, 42 + row * 24, length * 40, 20, "", look)
    if length < 9:
        picture.box(40 + length * 40, 42 + row * 24, (9 - length) * 40, 20, "idle", "w")
picture.text(20, 146, "in-flight: a finished request's place is taken in the next step", "bold")
rows = (((9, "a"), (6, "d")), ((3, "b"), (7, "d"), (5, "a")), ((5, "c"), (4, "b"), (6, "c")))
for row, parts in enumerate(rows):
    x = 40.0
    for length, look in parts:
        picture.box(x, 158 + row * 24, length * 40 - 2, 20, "", look)
        x += length * 40
picture.text(40, 248, "steps →", "soft")

# %% [markdown]
# ## Two kinds of work
#
# A model of 8.03 billion parameters in bf16, H200: a decode step reads 16 GB, 3.7 ms at least, for
# 1 row or for 100. A prompt of 2,000 tokens does 2 · 8.03e9 · 2000 = 32 TFLOP: 40 ms of 801
# TFLOP/s. So one prompt takes as long as eleven decode steps; that is why long prompts are cut into
# *chunks* that go along with the others' decode rows.
#
# %%
from ridgeline.learn.session import Session

here = Session("batching")

# %%
PARAMETERS = 8.03e9
bandwidth = here.ceiling("read_bandwidth")
rate = here.ceiling("matrix_bf16")
here.figure("decode_step", 2 * PARAMETERS / bandwidth, "s", "decode step of 8B in bf16, at least")
here.figure("prefill", 2 * PARAMETERS * 2000 / rate, "s", "a prompt of 2,000 tokens, at least")
here.figure("free_rows", rate / bandwidth, "1", "rows a decode step takes before arithmetic counts")

# %% [markdown]
# ## In-flight batching
#
# Take 200 requests with 10 to 300 tokens to make and room for 16. A static batch runs until its
# longest is done. In-flight batching decides anew at every step. Count steps: this is plain
# arithmetic, and the steps take the same time either way.
#
# %%
import random

random.seed(0)
lengths = [random.randint(10, 300) for _ in range(200)]
ROOM = 16

static = sum(max(lengths[at : at + ROOM]) for at in range(0, len(lengths), ROOM))


def in_flight(lengths: list[int], room: int) -> int:
    waiting, running, steps = list(reversed(lengths)), list[int](), 0
    while waiting or running:
        while waiting and len(running) < room:
            running.append(waiting.pop())
        running = [left - 1 for left in running if left > 1]
        steps += 1
    return steps


continuous = in_flight(lengths, ROOM)
here.figure("static_steps", static, "1", "steps with static batches of 16")
here.figure("in_flight_steps", continuous, "1", "steps in flight")
here.figure("in_flight_gain", static / continuous, "1", "times as many tokens a second")

# %% [markdown]
# The least possible is the sum of lengths over 16; compare that with what you see.
#
# ## Pages
#
# A token's keys and values stay in the *KV cache*: 2 (K and V) · layers · KV heads · head width ·
# bytes. Llama-3.1-8B: 2 · 32 · 8 · 128 · 2 = 131 kB a token; 8,192 tokens are 1.07 GB. Reserving
# the longest possible context for each request wastes nearly all of it. Pages of 16 tokens waste at
# most 15 tokens a request, half a page on average.
#
# %%
PAGE, LONGEST = 16, 8192
contexts = [random.randint(100, 2000) for _ in range(1000)]
used = sum(contexts)
paged = sum(-(-context // PAGE) * PAGE for context in contexts)
here.figure("kv_token", 2 * 32 * 8 * 128 * 2, "B", "KV cache of a token, Llama-3.1-8B in bf16")
here.figure(
    "reserved_use", used / (len(contexts) * LONGEST), "1", "share used, 8,192 reserved each"
)
here.figure("paged_use", used / paged, "1", "share used, in pages of 16")

# %% [markdown]
# ## Prefixes
#
# A system prompt of 1,000 tokens is the same in every request: its keys and values are the same
# too. Full pages are kept under their tokens and the page before them; a request that begins alike
# holds the same pages. This is the engine's own prefix cache, integers only:
#
# %%
from array import array

from ridgeline.engine.scheduling.prefix_cache import PrefixCache

cache = PrefixCache(num_pages=256, page_size=PAGE)
system = list(range(1000))
tokens = array("i", [*system, 5000, 5001])
node = cache.match("tenant", tokens).node
for at in range(0, len(tokens) - PAGE + 1, PAGE):  # the first request's full pages
    page = cache.take()
    assert page is not None
    node = cache.insert(node, tokens[at : at + PAGE].tobytes(), page)
match = cache.match("tenant", array("i", [*system, 6000, 6001]))
second = len(match.pages) * PAGE
here.figure("shared", second, "1", "tokens of the second request (1,002) that are already there")


# %% [markdown]
# 62 whole pages of 16 are 992; the page that holds tokens 993 to 1,002 differs at its end. What is
# shared is never computed again, so the time to the first token falls with it.
#
# ## Take along
#
# - Prefill is bound by arithmetic, decode by memory; batch the decode rows of everybody.
# - Decide at every step, not at every batch.
# - Cache memory in pages: no reservation, little waste, sharing for nothing.
# - What limits the batch in the end is the KV cache: fewer bytes (fp8 keys and values, fewer KV
#   heads) are more requests.
#
# ## In the tree
#
# - `ridgeline/engine/scheduling/scheduler.py`: what runs in the next step.
# - `ridgeline/engine/scheduling/prefix_cache.py`, `ridgeline/engine/scheduling/pages.py`: pages.
# - `ridgeline/engine/memory/plan.py`: how many pages there are.
# - `docs/walkthrough.md`: one request through all files.
#
# ## Exercise
#
# Admission: given the free pages and the waiting requests as (prompt tokens, tokens already cached
# in full pages), admit in order while their pages fit. A request needs pages for its prompt and one
# token more, less the cached ones. Stop at the first that does not fit (no overtaking). Return how
# many are admitted.
#
# %% [exercise]
def admitted(free: int, waiting: list[tuple[int, int]], page: int) -> int:
    # your code
    count = 0
    for prompt, cached in waiting:
        need = -(-(prompt + 1) // page) - cached // page
        if need > free:
            break
        free, count = free - need, count + 1
    return count
    # end of your code


# %% [check]
from collections.abc import Callable, Iterator

from ridgeline.learn.trials import AnswerTrial


def trials(answer: Callable[..., int]) -> Iterator[AnswerTrial]:
    yield AnswerTrial.of(answer, 10, [(15, 0)], 16, want=1, hint="16 tokens: one page")
    yield AnswerTrial.of(answer, 1, [(16, 0)], 16, want=0, hint="17 tokens need two pages")
    yield AnswerTrial.of(answer, 1, [(16, 16)], 16, want=1, hint="one of the two is cached")
    yield AnswerTrial.of(answer, 3, [(20, 0), (20, 0), (1, 0)], 16, want=1, hint="no overtaking")
    yield AnswerTrial.of(answer, 4, [(20, 0), (20, 0), (1, 0)], 16, want=2)
