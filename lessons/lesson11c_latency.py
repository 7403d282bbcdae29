"""Lesson 11c: what a user waits for: latency under load.

Most lessons so far are about tokens per second of all requests. A user does not see this number: a
user waits for the first token, and then reads along. Each request has the times of its events
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
from statistics import median
from typing import Any

from lessons.lesson import make_llm
from lessons.show import Questions, link, say, show_source, show_table
from nanovllm import LLM, SamplingParams

SHOWS_TIMES = True
REQUESTS, TOKENS, ROWS = 64, 16, 8
LOADS = (0.3, 0.9, 3.0)  # arrivals, as parts of what the engine can serve


def serve(llm: LLM, arrivals: list[float]) -> tuple[list[Any], float]:
    """Run requests that arrive at these seconds -> (first token, between tokens), all seconds."""
    engine = llm.engine
    waits = list[Any]()
    due = dict[str, float]()
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    start = time.monotonic()
    waiting = list(arrivals)
    while waiting or engine.has_unfinished_requests():
        while waiting and start + waiting[0] <= time.monotonic():
            # It may have arrived during a step, before the engine could take it.
            name = engine.add_request(f"Count from {len(due)} to {len(due) + 40}\n", params)
            due[name] = start + waiting.pop(0)
        for output in engine.step():
            first, last = output.metrics.first_token_time, output.metrics.finished_time
            waits.append((first - due[output.request_id], (last - first) / (TOKENS - 1)))
    return waits, time.monotonic() - start


def run() -> None:
    options = dict(enable_prefix_caching=False, num_kv_cache_blocks=256, max_num_seqs=ROWS)
    llm = make_llm(attention_backend="sdpa", **options)
    serve(llm, [0.0] * REQUESTS)  # prepares buffers
    alone = [serve(llm, [0.0])[0][0] for _ in range(5)]
    first, between = (round(median(times), 4) for times in zip(*alone, strict=True))
    capacity = REQUESTS / serve(llm, [0.0] * REQUESTS)[1]
    limits = (5 * first, 3 * between)
    QUESTIONS.show(1)
    say(f"""The work is {REQUESTS} requests for {TOKENS} tokens each. One that is alone has its
        first token after {first * 1e3:.1f} ms and another every {between * 1e3:.1f} ms. If all
        arrive at once, the engine serves {capacity:.1f} requests per second, {ROWS} at a time
        (max_num_seqs={ROWS}). Let one limit be five times the first of these times,
        {limits[0] * 1e3:.1f} ms to the first token, and the other three times the second,
        {limits[1] * 1e3:.1f} ms between tokens on average. The same requests arrive at random (a
        Poisson process). Load is the arrival rate divided by the capacity:""")
    rows = []
    rng = random.Random(0)
    arrivals = list(accumulate(rng.expovariate(1) for _ in range(REQUESTS)))
    for load in LOADS:
        scale = REQUESTS / (load * capacity * arrivals[-1])  # so that the mean rate is exact
        waits, seconds = serve(llm, [scale * arrival for arrival in arrivals])
        good = sum(a <= limits[0] and b <= limits[1] for a, b in waits)
        times = (f"{1e3 * median(x):.0f}" for x in zip(*waits, strict=True))
        rows.append((load, *times, *(f"{n / seconds:.1f}" for n in (REQUESTS, good))))
    head = ("load", "median first ms", "median between ms", "requests/s", "goodput")
    show_table(head, rows)
    say(f"""The rate of the table is {REQUESTS} divided by the time until the last request ends.
        After the last arrival rows become idle one by one, so fewer are served than arrive even
        with a load below 1. At 0.9 both times are near their limits, so the goodput differs much
        between runs. With a load above 1 the queue grows with each request, so its wait has no
        limit, and more requests in a test make the table worse. The time between tokens grows until
        all {ROWS} rows are used, and then no more, however long the queue is.""")
    QUESTIONS.show(2)
    show_source(link("outputs.RequestMetrics", "first_token_time"))
    say("""What to do: say what 4 and 16 rows do to both times at a load of 3.0. Then change ROWS in
        `lessons/lesson11c_latency.py`, and run it again. With more rows the first token comes
        sooner, and the time between tokens is longer. (The capacity changes too, and the arrival
        rate of each load with it.)""")


QUESTIONS = Questions("""
    Requests arrive three times as fast as the engine can serve them. It works all the time. How
    large is its goodput, compared with the number of requests that it serves per second?
    (a) It is lower. (b) It is as large. (c) It is three times as large.
    Answer: a. Most requests have waited too long when their first token comes. The engine serves as
    many as it can, but each has waited longer than the one before. Only the first ones meet the
    limits.
    Hint: How long does the last request of the test wait before it is admitted?

    An engine has twice as many rows. Its tokens per second grow by a third. What happens to the
    time between tokens at full load?
    (a) It falls by a quarter. (b) It stays about the same. (c) It grows by about one half.
    Answer: c. Twice as many requests share 4/3 of the tokens per second, so each gets 2/3 of what
    it had. Batching buys throughput with latency.
    Hint: How many tokens per second does one request get, before and after?
""")

IN_VLLM = """`vllm bench serve` (`calculate_metrics` in `benchmarks/serve.py`) measures a server.
The time to first token is called TTFT, each time between two tokens ITL, and the mean of a
request's TPOT. The limits of its goodput are the option `--goodput`."""
