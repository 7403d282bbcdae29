"""Lesson 9b: policies: who is admitted first.

When the token budget, rows or blocks are short, requests wait in a queue, and a policy orders it.
First come, first served (FCFS) is the simplest. With a budget of 32 tokens a step, a prompt of 150
tokens takes five steps. Shortest job first (SJF) admits the request with the smallest key, which
here is the number of uncached prompt tokens:

    arrived    150   9   9   9   9      tokens of the prompts
    FCFS      [150   9   9   9   9]     the order of admission
    SJF       [  9   9   9   9 150]

SJF alone has a fault: the long prompt waits forever if short ones keep arriving. So a later request
starts with a larger key: the key has 16 more for each request that came before. This is called
aging. The number of short prompts that overtake the long one is then limited. (vLLM has neither SJF
nor aging.)
"""

from lessons.lesson import Counters, ask, make_llm
from lessons.lesson06b_chunks import prompt
from lessons.show import Questions, link, say, show_source, show_table
from nanovllm.engine.policies import AGING

LENGTHS = [150, *[9] * 12]  # tokens of the prompts


def first_tokens(policy: str) -> dict[int, int]:
    """Run the prompts with a budget of 32 tokens -> the step of the first token of each."""
    options = dict(scheduling_policy=policy, max_num_batched_tokens=32, num_kv_cache_blocks=256)
    llm = make_llm(enable_prefix_caching=False, **options)
    llm.engine.observer = counters = Counters(llm)
    ask(llm, [prompt(length) for length in LENGTHS], ignore_eos=True, max_tokens=2)
    steps = dict[int, int]()
    for number, names in enumerate(counters.results, 1):
        for name in names:
            steps.setdefault(int(name), number)
    return steps


def run() -> None:
    QUESTIONS.show(1, 2)
    say("""A prompt of 150 tokens arrives just before 12 short ones. Each answer has 2 tokens, so
        each request also has one decode, and a step has at most 32 tokens. With FCFS the long
        prompt uses up the budget of the first steps. The steps in which each request gets its first
        token:""")
    fcfs, sjf = first_tokens("fcfs"), first_tokens("sjf")
    rows = [(str(i), n, fcfs[i], n + AGING * i, sjf[i]) for i, n in enumerate(LENGTHS)]
    means = [f"{sum(first.values()) / len(first):.1f}" for first in (fcfs, sjf)]
    show_table(("request", "tokens", "FCFS first token", "SJF key", "SJF first token"), rows)
    say(f"""On average the first token comes in step {means[0]} with FCFS, and in step {means[1]}
        with SJF. The long prompt has the key 150, and request 9 has 9 + 16 * 9 = 153. So the long
        prompt is admitted before request 9, although it is longer.""")
    show_source(
        link("engine.policies.shortest_job_first", "AGING * seq.arrival"),
        link("engine.scheduler.Scheduler.add", "self.policy_key"),
    )
    say("Build it: `python -m lessons build policy`.")


QUESTIONS = Questions("""
    A long prompt arrives just before twelve short ones. With SJF, most of them are computed first.
    Why is the mean time to the first token smaller than with FCFS, although the same tokens are
    computed?
    (a) One request waits longer, and several wait less.
    (b) A short prompt takes less time for each of its tokens.
    (c) The long prompt is then computed in fewer steps.
    Answer: a. The long prompt delays all that come after it with FCFS.
    Hint: Who waits for whom with FCFS, and who with SJF?

    The key is the number of uncached prompt tokens + 16 * the number of the request. Request 0 has
    150 tokens, and every later one has 9. How many of the later ones are admitted before it, if all
    wait?
    Answer: 8. Request 8 has the key 9 + 16 * 8 = 137, and request 9 has 153, which is more than
    150.
    Hint: For which numbers i is 9 + 16 i less than 150?
""")

IN_VLLM = """`Request.__lt__` in `v1/request.py` orders by a priority that the user gives, if the
policy is "priority" (`PriorityRequestQueue` in `v1/core/sched/request_queue.py`); the default is
FCFS. SJF and aging are nanovllm's own: a request of low priority can wait forever in vLLM."""
