"""Lesson 9: scheduling: FCFS, SJF, chunked prefill, preemption.

The scheduler decides in every step which sequences compute which tokens. A policy orders the
requests that wait: first come first served (FCFS), or the shortest prompt first (SJF). A token
budget limits the tokens of a step. A long prompt is then computed in chunks, together with decodes
of other requests (Sarathi-Serve, Agrawal et al., OSDI 2024, arXiv:2403.02310). If no block is
free, the sequence that was admitted last is preempted: it loses its blocks and computes its tokens
again later, as in vLLM (Kwon et al. 2023, arXiv:2309.06180).

    budget    [ d d d d | c c c c c c c c c ]   d: decodes, c: a chunk of the
                          prompt, as large as the decodes leave it
    waiting   [ preempted and forked | by the key of the policy ]  --> running
"""

from statistics import mean, median

from lessons.lesson import Counters, ask, make_llm, timed
from lessons.pictures import show_lanes
from lessons.show import Questions, link, say, show_source, show_table
from nanovllm import LLM, SamplingParams, Trace
from nanovllm.cli.trace.trace import State
from nanovllm.engine.policies import AGING, shortest_job_first
from nanovllm.engine.scheduler import Scheduler
from nanovllm.outputs import RequestOutput

# Plain torch: compiled kernels would change the figures.
OPTIONS = dict(attention_backend="sdpa", num_kv_cache_blocks=256, enable_prefix_caching=False)
LENGTHS = [150, *[9] * 12]  # tokens of the prompts: a long one, and short ones after it
BUDGET = 32  # tokens of a step
LONG = 600  # tokens of the prompt that is computed in chunks
DECODING = 4  # requests that decode when a long prompt arrives


def prompt(num_tokens: int) -> dict[str, list[int]]:
    return {"prompt_token_ids": [5 + i % 100 for i in range(num_tokens)]}


def run_policy(policy: str, lengths: list[int]) -> tuple[dict[int, int], dict[int, int]]:
    """Run prompts in this order -> the steps that admit each, and the steps of its first token.

    The first dict has the order of admission.
    """
    llm = make_llm(**OPTIONS, scheduling_policy=policy, max_num_batched_tokens=BUDGET)
    with Trace(llm) as trace:
        ask(llm, [prompt(length) for length in lengths], ignore_eos=True, max_tokens=2)
    admitted, first, state = dict[int, int](), dict[int, int](), State()
    for event in trace.events:
        state.apply(event)
        for seq in event.get("new_rows", ()):
            admitted[seq] = event["plan"]
        if "commit" in event:
            for seq in state.receivers:
                first.setdefault(seq, event["commit"])
    return admitted, first


def chunk_steps(llm: LLM) -> list[tuple[int, float]]:
    """Let a prompt of LONG tokens arrive while others decode -> tokens and ms of its steps."""
    engine, seconds = llm.engine, list[float]()
    for _ in range(DECODING):
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=64)
        engine.add_request(prompt(9), params)
    engine.step()
    engine.step()
    engine.add_request(prompt(LONG), SamplingParams(temperature=0, max_tokens=1))
    engine.observer = counters = Counters(llm)
    finished: list[RequestOutput] = []
    while not finished:
        finished, step = timed(engine.step, repeats=1)
        seconds.append(step)
    llm.shutdown()  # aborts the others
    return [(n, 1e3 * s) for n, s in zip(counters.tokens, seconds, strict=True)]


def preempt(num_blocks: int, enable_prefix_caching: bool) -> tuple[Trace, list[list[int]], int]:
    """Run two requests -> the trace, their tokens, and how many tokens were computed again."""
    options = dict(num_kv_cache_blocks=num_blocks, enable_prefix_caching=enable_prefix_caching)
    llm = make_llm(block_size=4, **options)
    prompts = ["What is 12 + 30?\n", "Sort 42, 7, 99\n"]
    with Trace(llm) as trace:
        outputs = ask(llm, prompts, ignore_eos=True, max_tokens=9)
    tokens = [output["token_ids"] for output in outputs]
    return trace, tokens, int(llm.stats()["recomputed_tokens"])


def show_policies() -> None:
    fcfs, sjf = run_policy("fcfs", LENGTHS), run_policy("sjf", LENGTHS)
    keys = [length + AGING * i for i, length in enumerate(LENGTHS)]
    assert list(sjf[0]) == sorted(fcfs[0], key=lambda request: keys[request])
    rows = list[tuple[object, ...]]()
    for i, length in enumerate(LENGTHS):
        rows.append((i, length, fcfs[1][i], keys[i], sjf[1][i]))
    fcfs_mean, sjf_mean = (f"{mean(first.values()):.1f}" for _, first in (fcfs, sjf))
    rows.append(("mean", "", fcfs_mean, "", sjf_mean))
    show_table(("request", "tokens", "FCFS first token", "SJF key", "SJF first token"), rows)
    for policy, (admitted, first) in (("FCFS", fcfs), ("SJF", sjf)):
        lanes = []
        for i, length in enumerate(LENGTHS):
            begin, end = admitted[i] - 0.5, first[i] + 0.5
            cells = [(0.5, begin - 0.5, "", 0), (begin, end - begin, "", 1)]
            lanes.append((f"request {i}, {length} tokens", cells))
        title = f"{policy}: when each request gets its first token"
        show_lanes(title, lanes, "step", waiting=0, computing_the_prompt=1)


def show_chunks() -> None:
    rows = []
    for budget in (1024, 64):
        llm = make_llm(**OPTIONS, max_num_batched_tokens=budget)
        runs = [chunk_steps(llm) for _ in range(4)][1:]  # the first prepares buffers
        longest = median(max(ms for _, ms in steps) for steps in runs)
        total = median(sum(ms for _, ms in steps) for steps in runs)
        tokens = " ".join(str(tokens) for tokens, _ in runs[0])
        rows.append((budget, tokens, f"{longest:.1f}", f"{total:.0f}"))
    show_table(("budget", "tokens of each step", "longest step, ms", "first token, ms"), rows)
    say("""The small budget keeps the longest step short for the requests that decode. The long
        prompt then gets its first token later, because each step has a fixed cost.""")


def show_preemption() -> None:
    pools = ((32, True), (8, True), (8, False))
    runs = [preempt(*pool) for pool in pools]
    trace = runs[1][0]
    event = next(event for event in trace.events if "preempted" in event)
    step, (lost,) = event["plan"], event["preempted"]
    say(f"""Preemption: two requests in a pool of 8 blocks. In step {step} request {1 - lost} needs
        another block and none is free. The scheduler preempts the request that was admitted last:
        request {lost} loses its blocks and returns to the head of the queue with its tokens.
        (Requests go on after <|endoftext|>, because ignore_eos is set.)""")
    print(trace, end="\n\n")
    say("""The tokens are the same as in a large pool. With prefix caching, the blocks that request
        1 lost stay in the cache until they are evicted, so fewer tokens are computed again:""")
    assert runs[0][1] == runs[1][1] == runs[2][1]
    head = ("blocks", "prefix caching", "steps", "tokens computed again")
    show_table(head, [(*pool, t.num_steps, n) for pool, (t, _, n) in zip(pools, runs, strict=True)])


def run() -> None:
    QUESTIONS.show(1)
    say(f"""A prompt of {LENGTHS[0]} tokens arrives just before {len(LENGTHS) - 1} short ones, and a
        step has at most {BUDGET} tokens. FCFS admits the long prompt first, and it uses the budget
        of the first steps. SJF admits the smallest key first: the number of uncached prompt tokens
        + {AGING} * the number of the request. The second term is aging: the long prompt does not
        wait forever, because much later requests have larger keys. The steps in which each request
        gets its first token:""")
    show_policies()
    say(f"""Chunked prefill: {DECODING} requests decode, and a prompt of {LONG} tokens arrives.
        Running sequences get their tokens first, and the prompt takes what the budget leaves. With
        a large budget it is computed in one step, for which the others wait. With a small one it
        takes more steps, each of which is shorter:""")
    show_chunks()
    QUESTIONS.show(2)
    show_preemption()
    show_source(
        link(shortest_job_first, "AGING * seq.arrival"),
        link(Scheduler.plan_chunk, "tokens = min("),
        link(Scheduler.preempt),
    )


QUESTIONS = Questions("""
    A long prompt arrives just before twelve short ones. With SJF, the short ones are computed
    first. Why is the mean time to the first token smaller than with FCFS, although the same tokens
    are computed?
    (a) One request waits a little longer, and twelve wait less.
    (b) Short prompts take less time for each token.
    (c) The long prompt is computed in fewer steps.
    Answer: a. The long prompt delays all that come after it. It can wait forever if shorter ones
    keep arriving, and aging prevents this.
    Hint: Who waits for whom with FCFS, and who with SJF?

    A running request needs a block and none is free. Why is the request preempted that was admitted
    last?
    (a) It has the fewest tokens.
    (b) The oldest request then always continues, so requests end and free their blocks.
    (c) Its tokens are not known yet.
    Answer: b. If the oldest were preempted, two requests could take the blocks from each other
    without end. A late request can have a long prompt, so it need not have the fewest tokens.
    Hint: Which rule guarantees that at least one request ends?
""")
