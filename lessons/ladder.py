"""The ladder: the same 16 requests on every rung, from no cache to the defaults of LLM().

Each rung adds one idea to the previous rung and gives the same tokens. `python -m lessons ladder 6`
measures the rungs of lesson 6, and the one before them. All of them take 20 to 60 s, and 15 to
30 s more if the CPU's kernels have to be compiled first.

    no cache -> a KV cache -> blocks -> batches -> a token budget -> prefix sharing
             -> kernels -> async scheduling -> the defaults
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from statistics import mean
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from lessons import lesson03_kv_cache
from lessons.lesson import Counters, make_llm, optional
from lessons.lesson03_kv_cache import Way
from lessons.show import faster, link, say, show_source, show_table
from nanovllm import LLM, SamplingParams
from nanovllm.engine.observer import NO_OBSERVER
from nanovllm.outputs import RequestOutput

NUM_REQUESTS = 16
ROWS = 8  # requests that run at once, from static batches to async scheduling
BUDGET = 32  # tokens of a step, from there on to async scheduling
LENGTHS = (4, 8, 12, 36)  # output tokens; a static batch waits for its longest
# Every request begins with this conversation.
BEGINNING = [
    ("system", "You are a helpful assistant."),
    ("user", "What is 12 + 30?"),
    ("assistant", "12 + 30 = 42"),
]


class Request(NamedTuple):
    prompt: list[int]
    num_output: int


class Run(NamedTuple):
    """What one run of all requests took."""

    tokens: list[list[int]]  # the output of each request
    steps: int
    computed: int  # tokens
    slots: int  # largest number of reserved slots of the KV cache
    first_token: float  # seconds from the start to a request's first token, the mean
    longest_step: float  # seconds
    seconds: float


def make_requests(llm: LLM, number: int) -> list[Request]:
    """Requests to count. Their answers are longer than LENGTHS, so each ends at its length."""
    beginning = [{"role": role, "content": content} for role, content in BEGINNING]
    tokenizer, requests = llm.get_tokenizer(), []
    for i in range(1, number + 1):
        chat = [*beginning, {"role": "user", "content": f"Count from {i} to {i + 30}."}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        requests.append(Request(tokenizer.encode(text), LENGTHS[i % len(LENGTHS)]))
    return requests


def by_hand(llm: LLM, requests: list[Request], way: Way, reserved: int) -> Run:
    """One request after the other, by plans that are written by hand.

    reserved: for how many requests of the greatest length slots are reserved.
    """
    tokens, firsts, times, total = list[list[int]](), list[float](), [time.monotonic()], 0
    for prompt, num_output in requests:
        tokens.append([])
        for token, computed in way(llm, prompt, num_output):
            tokens[-1].append(token)
            times.append(time.monotonic())
            total += computed
        firsts.append(times[-num_output] - times[0])
    longest = max(b - a for a, b in pairwise(times))
    slots, seconds = reserved * llm.engine.input_processor.max_model_len, times[-1] - times[0]
    return Run(tokens, len(times) - 1, total, slots, mean(firsts), longest, seconds)


def by_engine(llm: LLM, requests: list[Request], group: int) -> Run:
    """Add `group` requests, run the engine until all have finished, and add the next group."""
    engine = llm.engine
    engine.reset_prefix_cache()
    engine.observer = counters = Counters(llm)
    outputs, ids = dict[str, RequestOutput](), list[str]()
    start, longest = time.monotonic(), 0.0
    for i in range(0, len(requests), group):
        for prompt, num_output in requests[i : i + group]:
            params = SamplingParams(temperature=0, max_tokens=num_output)
            ids.append(engine.add_request(prompt, params))
        while engine.has_unfinished_requests():
            step_start = time.monotonic()
            outputs |= {output.request_id: output for output in engine.step()}
            longest = max(longest, time.monotonic() - step_start)
    seconds = time.monotonic() - start
    engine.observer = NO_OBSERVER
    tokens = [outputs[i].outputs[0].token_ids for i in ids]
    first = mean((outputs[i].metrics.first_token_time or start) - start for i in ids)
    slots = counters.blocks * engine.scheduler.block_manager.block_size
    steps = counters.tokens
    return Run(tokens, len(steps), sum(steps), slots, first, longest, seconds)


class Rung(NamedTuple):
    lesson: int
    adds: str
    options: dict[str, Any]  # of the LLM, in addition to the options of make_llm
    run: Callable[[LLM, list[Request]], Run]


PLAIN: dict[str, Any] = dict(attention_backend="sdpa", num_kv_cache_blocks=256, max_num_seqs=ROWS)
PLAIN |= {"enable_prefix_caching": False}
CHUNKS = PLAIN | {"max_num_batched_tokens": BUDGET}
SHARING = CHUNKS | {"enable_prefix_caching": True}
KERNELS = SHARING | {"attention_backend": "numba"}
ASYNC = KERNELS | {"async_scheduling": True}
KERNEL_LESSON = 10
static, continuous = partial(by_engine, group=ROWS), partial(by_engine, group=sys.maxsize)

RUNGS = [
    Rung(3, "no cache", PLAIN, partial(by_hand, way=lesson03_kv_cache.without_cache, reserved=0)),
    Rung(3, "a KV cache", PLAIN, partial(by_hand, way=lesson03_kv_cache.with_cache, reserved=1)),
    Rung(5, "blocks", PLAIN, partial(by_engine, group=1)),
    Rung(6, f"static batches of {ROWS}", PLAIN, static),
    Rung(6, "continuous batching", PLAIN, continuous),
    Rung(6, f"a token budget of {BUDGET}", CHUNKS, continuous),
    Rung(8, "prefix sharing", SHARING, continuous),
    Rung(KERNEL_LESSON, "kernels (Numba)", KERNELS, continuous),
    Rung(11, "async scheduling", ASYNC, continuous),
    Rung(12, "the defaults of LLM()", {}, continuous),
]


def has_numba(dtype: torch.dtype = torch.float32) -> bool:
    """Return whether the CPU's kernels can run. The first call compiles them, in 15 to 30 s."""
    if (compile_ := optional("nanovllm.backends.cpu.compile")) is not None:
        compile_.compile_now(dtype)
    return compile_ is not None


def climb(
    rungs: list[Rung], number: int, repeats: int, warm_up: bool = True
) -> list[tuple[Rung, Run]]:
    """Run `number` requests on all rungs in turns, `repeats` times -> each rung, its fastest run.

    Raises AssertionError if the tokens of a rung differ from the first rung.
    """
    runs: list[list[Run]] = [[] for _ in rungs]
    llms = [make_llm(**rung.options) for rung in rungs]
    requests = make_requests(llms[0], number)
    for rung, llm in zip(rungs if warm_up else (), llms, strict=False):
        rung.run(llm, requests[:ROWS])
    for i in tqdm(range(repeats * len(rungs)), unit="run", leave=False):
        place = i % len(rungs)
        runs[place].append(rungs[place].run(llms[place], requests))
        same = runs[place][-1].tokens == runs[0][0].tokens
        assert same, f"{rungs[place].adds} changes the tokens"
    return [
        (rung, min(each, key=lambda run: run.seconds))
        for rung, each in zip(rungs, runs, strict=True)
    ]


def show(results: list[tuple[Rung, Run]]) -> None:
    """Print the table. A gain compares a rung with the previous rung."""
    rows: list[tuple[object, ...]] = []
    before = None
    for rung, run in results:
        speed = f"{sum(map(len, run.tokens)) / run.seconds:,.0f}"
        counts = (run.steps, f"{run.computed:,}", f"{run.slots:,}")
        times = (f"{1e3 * run.first_token:,.0f}", f"{1e3 * run.longest_step:,.0f}")
        gain = faster(before.seconds, run.seconds) if before else ""
        rows.append((f"{rung.lesson} {rung.adds}", *counts, speed, gain, *times))
        before = run
    names = ("lesson", "steps", "computed", "slots", "tokens/s", "gain", "first ms", "step ms")
    show_table(names, rows)


def has_rung(lesson: str) -> bool:
    return any(str(rung.lesson) == lesson for rung in RUNGS)


def rungs_of(lesson: str | None) -> list[Rung]:
    """Return the rungs of a lesson after the one before them, or all. Raises ValueError."""
    if lesson is None:
        return RUNGS
    if not has_rung(lesson):
        names = ", ".join(dict.fromkeys(str(rung.lesson) for rung in RUNGS))
        raise ValueError(f"lesson {lesson} has no rung of the ladder; these have: {names}")
    numbers = [i for i, rung in enumerate(RUNGS) if str(rung.lesson) == lesson]
    return RUNGS[max(0, numbers[0] - 1) : numbers[-1] + 1]


def run(which: str | None = None) -> None:
    """Run the rungs of the lesson `which`, or all. Raises ValueError if the lesson has none."""
    rungs = rungs_of(which)
    say(f"""The requests begin with the same conversation and have {min(LENGTHS)} to {max(LENGTHS)}
        output tokens, in float32. Times are of the fastest of three runs, after one to warm up.

        computed: tokens in all steps. slots: the most slots of the KV cache that were reserved.
        gain: speed compared with the previous rung. first ms: mean time from the start to a
        request's first token. step ms: the longest step. A small token budget makes it
        shorter, and the whole run slower.""")
    if any(rung.lesson >= KERNEL_LESSON for rung in rungs) and not has_numba():
        say("Numba is not installed, so its rung is left out; later ones run in plain torch.")
        plain = {"attention_backend": "sdpa"}
        rungs = [r._replace(options=r.options | plain) for r in rungs if r.lesson != KERNEL_LESSON]
    show(climb(rungs, NUM_REQUESTS, repeats=3))
    if which is None:
        say("""A cache, batches, prefix sharing and kernels are about speed, blocks about memory
            (the slots), and a small token budget about the longest step. Async scheduling is for a
            GPU; a CPU does not compute while the host plans. The defaults run all requests at once,
            with up to 2,048 tokens a step on a CPU.""")
        show_source(
            link("engine.llm_engine.LLMEngine.step"), link("engine.scheduler.Scheduler.schedule")
        )
