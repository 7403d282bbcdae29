"""The ladder: the same 16 requests on every rung, from no cache to the defaults of LLM().

Each rung adds one idea to the previous rung and gives the same tokens; the last, the defaults,
changes several options. `python -m lessons ladder 6` measures the rungs of lesson 6, and the one
before them. All of them take 20 to 60 s, and 15 to 30 s more if the CPU's kernels have to be
compiled first.

    no cache -> a KV cache -> blocks -> batches -> a token budget -> prefix sharing
             -> kernels -> async scheduling -> the defaults
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from tqdm import tqdm

from lessons.lesson import Counters, make_llm
from lessons.lesson03_kv_cache import Way, with_cache, without_cache
from lessons.show import faster, link, say, show_source, show_table
from nanovllm import LLM, SamplingParams
from nanovllm.engine.observer import NO_OBSERVER

SHOWS_TIMES = True
NUM_REQUESTS = 16
ROWS = 8  # requests that run at once, from static batches to async scheduling
BUDGET = 32  # tokens of a step, from there on to async scheduling
LENGTHS = (4, 8, 12, 36)  # output tokens; a static batch waits for its longest
ROLES = ("system", "user", "assistant", "user")
BEGINNING = ("You are a helpful assistant.", "What is 12 + 30?", "12 + 30 = 42")  # of each request
Requests = list[tuple[list[int], int]]  # the prompt, and the number of output tokens


class Run(NamedTuple):
    tokens: list[list[int]]  # the output of each request
    steps: list[int]  # tokens that each computes
    slots: int  # largest number of reserved slots of the KV cache
    times: list[float]  # of the start and after each step, in seconds

    @property
    def seconds(self) -> float:
        return self.times[-1] - self.times[0]


def make_requests(llm: LLM, number: int) -> Requests:
    """Requests to count. Their answers are longer than LENGTHS, so each ends at its length."""
    tokenizer = llm.get_tokenizer()
    requests = []
    for i in range(1, number + 1):
        texts = (*BEGINNING, f"Count from {i} to {i + 30}.")
        chat = [{"role": role, "content": text} for role, text in zip(ROLES, texts, strict=True)]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        requests.append((tokenizer.encode(text), LENGTHS[i % len(LENGTHS)]))
    return requests


def by_hand(llm: LLM, requests: Requests, way: Way) -> Run:
    """One request after the other, by plans that are written by hand."""
    tokens = list[list[int]]()
    steps = list[int]()
    times = [time.monotonic()]
    for prompt, num_output in requests:
        tokens.append([])
        for token, num_tokens in way(llm, prompt, num_output):
            tokens[-1].append(token)
            times.append(time.monotonic())
            steps.append(num_tokens)
    # Lesson 3 reserves slots for the longest text that the model can read.
    slots = llm.engine.input_processor.max_model_len if way is with_cache else 0
    return Run(tokens, steps, slots, times)


def by_engine(llm: LLM, requests: Requests, group: int) -> Run:
    """Add `group` requests, run the engine until all have finished, and add the next group."""
    engine = llm.engine
    engine.reset_prefix_cache()
    engine.observer = counters = Counters(llm)
    outputs = dict[str, list[int]]()
    ids = list[str]()
    times = [time.monotonic()]
    for i in range(0, len(requests), group):
        for prompt, num_output in requests[i : i + group]:
            params = SamplingParams(temperature=0, max_tokens=num_output)
            ids.append(engine.add_request(prompt, params))
        while engine.has_unfinished_requests():
            outputs |= {out.request_id: out.outputs[0].token_ids for out in engine.step()}
            times.append(time.monotonic())
    engine.observer = NO_OBSERVER
    slots = counters.blocks * engine.scheduler.block_manager.block_size
    return Run([outputs[i] for i in ids], counters.tokens, slots, times)


class Rung(NamedTuple):
    lesson: int
    adds: str
    options: dict[str, Any]  # of the LLM, in addition to the options of make_llm
    run: Callable[[LLM, Requests], Run]


PLAIN: dict[str, Any] = dict(attention_backend="sdpa", num_kv_cache_blocks=256, max_num_seqs=ROWS)
PLAIN |= {"enable_prefix_caching": False}
CHUNKS = PLAIN | {"max_num_batched_tokens": BUDGET}
SHARING = CHUNKS | {"enable_prefix_caching": True}
KERNELS = SHARING | {"attention_backend": "numba"}
ASYNC = KERNELS | {"async_scheduling": True}
static, continuous = partial(by_engine, group=ROWS), partial(by_engine, group=sys.maxsize)

RUNGS = [
    Rung(3, "no cache", PLAIN, partial(by_hand, way=without_cache)),
    Rung(3, "a KV cache", PLAIN, partial(by_hand, way=with_cache)),
    Rung(5, "blocks", PLAIN, partial(by_engine, group=1)),
    Rung(6, f"static batches of {ROWS}", PLAIN, static),
    Rung(6, "continuous batching", PLAIN, continuous),
    Rung(6, f"a token budget of {BUDGET}", CHUNKS, continuous),
    Rung(8, "prefix sharing", SHARING, continuous),
    Rung(10, "kernels (Numba)", KERNELS, continuous),
    Rung(11, "async scheduling", ASYNC, continuous),
    Rung(12, "the defaults of LLM()", {}, continuous),
]
LESSONS = list(dict.fromkeys(str(rung.lesson) for rung in RUNGS))


def climb(rungs: list[Rung], number: int, repeats: int) -> list[Run]:
    """Run `number` requests on all rungs in turns, `repeats` times -> the fastest run of each.

    Raises AssertionError if the tokens of a rung differ from the first rung.
    """
    llms = [make_llm(**rung.options) for rung in rungs]
    turns = list[list[Run]]()
    requests = make_requests(llms[0], number)
    for _ in tqdm(range(repeats), unit="turn", leave=False):
        turns.append([rung.run(llm, requests) for rung, llm in zip(rungs, llms, strict=True)])
        for rung, run in zip(rungs, turns[-1], strict=True):
            assert run.tokens == turns[0][0].tokens, f"{rung.adds} changes the tokens"
    return [min(runs, key=lambda run: run.seconds) for runs in zip(*turns, strict=True)]


def show(rungs: list[Rung], runs: list[Run]) -> None:
    """Print the table. A gain compares a rung with the previous rung."""
    rows = []
    for rung, run, before in zip(rungs, runs, [None, *runs[:-1]], strict=True):
        speed = f"{sum(map(len, run.tokens)) / run.seconds:,.0f}"
        gain = faster(before.seconds, run.seconds) if before else ""
        longest = f"{1e3 * max(b - a for a, b in pairwise(run.times)):,.0f}"
        counts = (len(run.steps), f"{sum(run.steps):,}", f"{run.slots:,}")
        rows.append((f"{rung.lesson} {rung.adds}", *counts, speed, gain, longest))
    show_table(("lesson", "steps", "computed", "slots", "tokens/s", "gain", "step ms"), rows)


def rungs_of(lesson: str | None) -> list[Rung]:
    """Return the rungs of a lesson after the one before them, or all. Raises ValueError."""
    numbers = [i for i, rung in enumerate(RUNGS) if lesson in (None, str(rung.lesson))]
    if not numbers:
        these = ", ".join(LESSONS)
        raise ValueError(f"lesson {lesson} has no rung of the ladder; these have: {these}")
    return RUNGS[max(0, numbers[0] - 1) : numbers[-1] + 1]


def run(which: str | None = None) -> None:
    """Run the rungs of the lesson `which`, or all. Raises ValueError if the lesson has none."""
    rungs = rungs_of(which)
    say(f"""{NUM_REQUESTS} requests, whose prompts have a common prefix, have {min(LENGTHS)} to
        {max(LENGTHS)} output tokens, in float32. Each row of the table, a rung of the ladder, adds
        one idea to the row above; the defaults change several options. Times are of the fastest of
        three runs.

        computed: tokens in all steps. slots: the most tokens for which memory of the KV cache was
        reserved. gain: speed compared with the row above. step ms: the longest step, for which a
        rung may give up some speed.

        The rungs: {", ".join(rung.adds for rung in rungs)}. Before you see the table, say what each
        gains.""")
    show(rungs, climb(rungs, NUM_REQUESTS, repeats=3))
    if which is None:
        say("""A cache, batches, prefix sharing and kernels are about speed, blocks about memory
            (the slots), and a small token budget about the longest step: it becomes shorter, and
            the whole run slower. Async scheduling is for a GPU; a CPU does not compute while the
            host plans. The defaults run all requests at once, with up to 2,048 tokens a step on a
            CPU.""")
        show_source(link("engine.llm_engine.LLMEngine.step"))
