# %% [markdown]
# # Serving: TTFT, TPOT, Little's law, goodput
#
# A server's speed is not one number. A user waits for the first token (*TTFT*, time to first token:
# queue and prefill), then for each further one (*TPOT*, time per output token). The operator pays
# for tokens a second. The two pull against each other, and the batch is where they meet.
#
# %% [picture]
from ridgeline.learn.pictures import LessonPicture

picture = LessonPicture(220, "A request in time: waiting, prefill, tokens one by one")
picture.box(60, 60, 130, 34, "waiting", "w")
picture.box(192, 60, 130, 34, "prefill", "b")
for at in range(8):
    picture.box(324 + at * 44, 60, 42, 34, "token", "a")
picture.arrow(60, 125, 322, 125, "TTFT")
picture.arrow(324, 125, 674, 125, "output tokens × TPOT")
picture.arrow(60, 180, 674, 180, "end-to-end latency = TTFT + (output tokens − 1) · TPOT")

# %% [markdown]
# ## Little's law
#
# In any system that neither loses nor hoards, over any long time:
#
#     requests in the system = arrivals a second × seconds each stays       (L = λ · W)
#
# No assumption about distributions. 5 requests a second that stay 4 s are 20 at once: the batch you
# must have room for. Read backwards: with KV cache for 20 requests and 4 s each, more than 5 a
# second cannot be served, whatever the scheduler.
#
# ## A server in forty lines
#
# A step's time grows with its rows: t = a + b · rows, with a the reading of the weights. Take a = 4
# ms and b = 0.05 ms, prompts of 20 ms, answers of 100 tokens, arrivals at random (Poisson).
#
# %%
from ridgeline.learn.session import Session

here = Session("serving")

# %%
import random
from typing import NamedTuple

A, B, PREFILL, TOKENS, ROOM = 0.004, 0.00005, 0.020, 100, 128


class ServedRequest(NamedTuple):
    arrived: float
    first: float
    last: float

    @property
    def ttft(self) -> float:
        return self.first - self.arrived

    @property
    def tpot(self) -> float:
        return (self.last - self.first) / (TOKENS - 1)


def simulate(rate: float, count: int = 1500) -> list[ServedRequest]:
    random.seed(0)
    arrivals, clock = [], 0.0
    for _ in range(count):
        clock += random.expovariate(rate)
        arrivals.append(clock)
    arrivals.reverse()
    running: list[list[float]] = []  # arrived, first, tokens left
    done, now = list[ServedRequest](), 0.0
    while arrivals or running:
        if arrivals and not running and arrivals[-1] > now:
            now = arrivals[-1]
        if arrivals and arrivals[-1] <= now and len(running) < ROOM:
            now += PREFILL  # one prompt before each decode step
            running.append([arrivals.pop(), now, TOKENS - 1])
        now += A + B * len(running)
        for each in running:
            each[2] -= 1
        done += [ServedRequest(each[0], each[1], now) for each in running if each[2] == 0]
        running = [each for each in running if each[2] > 0]
    return done


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


for rate in (5, 20, 35, 60):
    served = simulate(rate)
    here.figure(
        f"ttft_{rate}",
        percentile([each.ttft for each in served], 0.99),
        "s",
        f"TTFT, p99, {rate}/s",
    )
    here.figure(
        f"tpot_{rate}", percentile([each.tpot for each in served], 0.99), "s", "… TPOT, p99"
    )
    span = max(each.last for each in served)
    in_system = sum(each.last - each.arrived for each in served) / span
    stay = sum(each.last - each.arrived for each in served) / len(served)
    assert abs(in_system - len(served) / span * stay) < 1e-6 * in_system  # Little's law
    here.figure(f"in_system_{rate}", in_system, "1", "… requests in the system (= λ · W)")

# %% [markdown]
# From 20 to 60 requests a second the p99 of TTFT goes from a tenth of a second to many seconds:
# beyond *capacity* the queue grows for as long as the load lasts, and any percentile you quote is a
# statement about how long you measured. Capacity here: a prompt and a step for each request
# admitted, 20 ms + (4 ms + 0.05 ms · rows) with some 100 rows is 29 ms, so about 35 a second.
#
# ## Goodput
#
# Throughput counts tokens; *goodput* counts the requests a second that kept their bounds, such as
# TTFT ≤ 0.5 s and TPOT ≤ 30 ms. It has a maximum; beyond it each further request makes others miss.
#
# %%
for rate in (20, 35, 60):
    served = simulate(rate)
    good = [each for each in served if each.ttft <= 0.5 and each.tpot <= 0.030]
    span = max(each.last for each in served)
    here.figure(
        f"goodput_{rate}", len(good) / span, "1", f"goodput (requests/s) at {rate}/s offered"
    )


# %% [markdown]
# ## Measure it like that
#
# - *Open loop*: requests come at their times, ready or not. A closed loop (N users who wait) slows
#   itself down and hides the queue.
# - Latency from the moment a request *should* have been sent.
# - Percentiles over all requests, failed ones included, after a warm-up, for minutes.
# - Real lengths: a trace, or at least a mix. Equal prompts hit the prefix cache and flatter you.
#
# `ridgeline bench serve --url http://127.0.0.1:8000 --rate 4` does it for any OpenAI endpoint.
#
# What is traded against what: chunked prefill lowers others' TPOT and raises one's own TTFT; larger
# batches raise throughput and TPOT; prefill and decode on separate machines stop disturbing each
# other at the price of moving the cache.
#
# ## Take along
#
# - TTFT is queue and prefill; TPOT is the step. Bound both, at a percentile.
# - L = λW: it sizes the batch, the cache and the number of replicas.
# - Near capacity latency explodes: plan for 70 to 80% of it.
# - Goodput under bounds is the number to compare and to pay for.
#
# ## In the tree
#
# - `ridgeline/bench/serve/`: open-loop load on an endpoint; it finds the highest rate inside
#   bounds.
# - `ridgeline/server/metrics/`: what a server counts.
# - `ridgeline/planning/serving/`: fleets by simulation; `ridgeline plan --for serve`.
# - `docs/serve.md`: the server.
#
# ## Exercise
#
# From (arrived, first token, last token, output tokens) of each request, all in seconds, return the
# goodput over `span` seconds: requests with TTFT ≤ `ttft` and TPOT ≤ `tpot`, a second. A request of
# one token has no TPOT and meets any bound on it.
#
# %% [exercise]
def goodput(
    requests: list[tuple[float, float, float, int]], ttft: float, tpot: float, span: float
) -> float:
    # your code
    good = 0
    for arrived, first, last, tokens in requests:
        per_token = (last - first) / (tokens - 1) if tokens > 1 else 0.0
        good += first - arrived <= ttft and per_token <= tpot
    return good / span
    # end of your code


# %% [check]
from collections.abc import Callable, Iterator

from ridgeline.learn.trials import AnswerTrial


def trials(answer: Callable[..., float]) -> Iterator[AnswerTrial]:
    quick, late, slow = (0.0, 0.2, 1.2, 101), (1.0, 3.0, 4.0, 101), (2.0, 2.1, 7.1, 101)
    yield AnswerTrial.of(answer, [quick], 0.5, 0.03, 10.0, want=0.1)
    yield AnswerTrial.of(answer, [quick, late], 0.5, 0.03, 10.0, want=0.1, hint="TTFT is 2 s")
    yield AnswerTrial.of(
        answer, [quick, slow], 0.5, 0.03, 10.0, want=0.1, hint="5 s for 100 gaps: 50 ms a token"
    )
    yield AnswerTrial.of(
        answer,
        [(0.0, 0.1, 0.1, 1)],
        0.5,
        0.03,
        2.0,
        want=0.5,
        hint="one token: no gap to divide by",
    )
