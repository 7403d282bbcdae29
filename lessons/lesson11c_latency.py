"""Lesson 11c: what a user waits for: latency under load.

All lessons so far make more tokens per second. But a user does not see tokens per second. A user
waits for the first token, and then reads along. Each request has the times of its events
(RequestMetrics):

    arrival      first scheduled     first token              finished
       |--- queue ---|---- prompt -------|- t -|- t -|- t -|- t -|
       |------ time to first token ------|  t: time between tokens

A service promises limits, such as 1 s to the first token and 100 ms between tokens. Goodput is the
number of requests per second that keep both (DistServe, Zhong et al. 2024, arXiv:2401.09670).
"""

import random
import time
from itertools import accumulate
from statistics import median, quantiles
from typing import Any, NamedTuple

from lessons.lesson import make_llm
from lessons.pictures import show_plot
from lessons.show import Questions, link, say, show_source, show_table
from nanovllm import LLM, SamplingParams

REQUESTS, TOKENS = 64, 16
LOADS = (0.3, 0.6, 0.9, 1.5, 3.0)  # arrivals, as parts of what the engine can serve


class Latency(NamedTuple):
    first: float  # seconds from the arrival to the first token
    between: float  # mean seconds between tokens


def latency(metrics: Any, arrival: float, tokens: int) -> Latency:
    first = metrics.first_token_time
    return Latency(first - arrival, (metrics.finished_time - first) / (tokens - 1))


def goodput(latencies: list[Latency], limits: Latency, seconds: float) -> float:
    """Return the requests per second that meet both limits."""
    return sum(x.first <= limits.first and x.between <= limits.between for x in latencies) / seconds


def serve(llm: LLM, arrivals: list[float]) -> tuple[list[Latency], float]:
    """Run a request at each of `arrivals`, seconds after the start -> latencies, seconds."""
    engine, latencies, due = llm.engine, list[Latency](), dict[str, float]()
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    start, waiting = time.monotonic(), list(arrivals)
    while waiting or engine.has_unfinished_requests():
        while waiting and start + waiting[0] <= time.monotonic():
            # It may have arrived during a step, before the engine could take it.
            name = engine.add_request(f"Count from {len(due)} to {len(due) + 40}\n", params)
            due[name] = start + waiting.pop(0)
        if not engine.has_unfinished_requests():
            time.sleep(max(0.0, start + waiting[0] - time.monotonic()))
            continue
        for output in engine.step():
            latencies.append(latency(output.metrics, due[output.request_id], TOKENS))
    return latencies, time.monotonic() - start


def run() -> None:
    options = dict(enable_prefix_caching=False, num_kv_cache_blocks=256, max_num_seqs=8)
    llm = make_llm(attention_backend="sdpa", **options)
    serve(llm, [0.0] * REQUESTS)  # prepares buffers
    alone = [serve(llm, [0.0])[0][0] for _ in range(5)]
    one = Latency(median(x.first for x in alone), median(x.between for x in alone))
    capacity = REQUESTS / serve(llm, [0.0] * REQUESTS)[1]
    limits = Latency(5 * one.first, 3 * one.between)
    QUESTIONS.show(1)
    say(f"""A request that is alone has its first token after {one.first * 1e3:.0f} ms and another
        every {one.between * 1e3:.1f} ms. If all {REQUESTS} requests arrive at once, the engine
        serves {capacity:.1f} requests per second, 8 at a time (max_num_seqs=8). Let the limits be
        {limits.first * 1e3:.0f} ms to the first token, five times as long, and
        {limits.between * 1e3:.1f} ms between tokens, three times as long. The same requests arrive
        at random (a Poisson process). Load is the arrival rate divided by the capacity, and 5 % of
        the requests wait longer than p95:""")
    rows, served, good, rng = [], [], [], random.Random(0)
    arrivals = list(accumulate(rng.expovariate(1) for _ in range(REQUESTS)))
    for load in LOADS:
        scale = REQUESTS / (load * capacity * arrivals[-1])  # so that the mean rate is exact
        latencies, seconds = serve(llm, [scale * arrival for arrival in arrivals])
        first, between = ([1e3 * x for x in times] for times in zip(*latencies, strict=True))
        served.append((load, REQUESTS / seconds))
        good.append((load, goodput(latencies, limits, seconds)))
        times = (median(first), quantiles(first, n=20)[-1], median(between))
        rates = (f"{served[-1][1]:.1f}", f"{good[-1][1]:.1f}")
        rows.append((f"{load:.1f}", *(f"{x:.0f}" for x in times), *rates))
    head = ("median first ms", "p95 first ms", "median between ms", "requests/s", "goodput")
    show_table(("load", *head), rows)
    lines = {"served": served, "goodput": good}
    show_plot("Throughput and goodput", "load", "requests/s", lines)
    QUESTIONS.show(2)
    say("""Up to a load of about 1 the engine serves what arrives. Above, the queue grows with each
        request, so its wait has no limit, and more requests in a test make the table worse.
        A smaller token budget trades the time to the first token for the time between tokens
        (lesson 6b), and fewer rows make steps shorter.""")
    show_source(
        link("outputs.RequestMetrics", "first_token_time"),
        link("engine.scheduler.Scheduler._admit", "self.max_num_seqs"),
    )
    say("""What to do: say what 4 and 16 rows would do to both times of the table at a load of 0.9.
        Then change max_num_seqs in this file, and run it again.""")


QUESTIONS = Questions("""
    Requests arrive three times as fast as the engine can serve them. It works all the time. What
    happens to its goodput? (a) It is as large as the number of requests that it serves per second.
    (b) It is lower: most requests have waited too long when their first token comes. (c) It is
    three times as large.
    Answer: b. The engine serves as many requests as it can, but each has waited longer than the one
    before. Only the first ones meet the limits.
    Hint: How long does the last request of the test wait before it is admitted?

    An engine has twice as many rows. Its tokens per second grow by a third. What happens to the
    time between tokens at full load? (a) It falls, because the engine computes more tokens per
    second. (b) It stays, because each request has a row in every step. (c) It grows, because twice
    as many requests share 4/3 of the tokens per second.
    Answer: c. Each request gets 2/3 of the tokens per second that it had. Batching buys throughput
    with latency.
    Hint: How many tokens per second does one request get, before and after?
""")
