"""Lesson 6b: chunked prefill, and steps without phases.

Continuous batching decides in every step who computes. Then a long prompt arrives. If one step
computes all of it, the step is long, and the users of the other requests see their text stop. So a
step has a token budget (max_num_batched_tokens), and the prompt is computed in chunks, as large as
what is left of the budget (Sarathi-Serve, OSDI 2024, arXiv:2403.02310). With 4 decodes, a prompt of
600 and a budget of 64, in the order in which the scheduler serves them:

    step 1   [ d d d d | 60 of the prompt ]      d: a decode, one token
    step 2   [ d d d d | the next 60      ]
    ...
    step 10  [ d d d d | the last 60      ]  and the prompt gets its first token

In nanovllm and vLLM a step has no phase: it is neither a prefill nor a decode, but may compute
both. A sequence has known tokens and computed tokens, and a step computes some of the difference.
The scheduler gives budget to the running sequences, in the order in which they were admitted. While
budget is left, it then admits waiting ones. For this rule a decode is only a sequence with one
token left to compute."""

from lessons.lesson import Counters, make_llm, timed
from lessons.show import Questions, link, say, show_source, show_table
from nanovllm import LLM, SamplingParams

SHOWS_TIMES = True


def prompt(num_tokens: int) -> dict[str, list[int]]:
    return {"prompt_token_ids": [5 + i % 100 for i in range(num_tokens)]}


def chunk_steps(llm: LLM) -> tuple[list[int], list[float]]:
    """Let a prompt of 600 tokens arrive while 4 requests decode -> tokens and ms of its steps."""
    engine = llm.engine
    outputs = list[object]()
    ms = list[float]()
    for _ in range(4):
        engine.add_request(prompt(9), SamplingParams(temperature=0, ignore_eos=True, max_tokens=64))
    engine.step()
    engine.add_request(prompt(600), SamplingParams(temperature=0, max_tokens=1))
    engine.observer = counters = Counters(llm)
    while not outputs:
        outputs, seconds = timed(engine.step, repeats=1)
        ms.append(1e3 * seconds)
    llm.shutdown()  # aborts the others
    return list(counters.tokens), ms


def run() -> None:
    QUESTIONS.show(1)
    say("""4 requests decode when a prompt of 600 tokens arrives. The time between two
        of their tokens is at most the longest step. The prompt has its first token after all of
        its steps:""")
    rows = []
    options = dict(num_kv_cache_blocks=256, enable_prefix_caching=False)
    for budget in (1024, 128, 64):
        llm = make_llm(attention_backend="sdpa", max_num_batched_tokens=budget, **options)
        runs = [chunk_steps(llm) for _ in range(3)]
        longest, total = (min(f(ms) for _, ms in runs) for f in (max, sum))
        tokens = " ".join(map(str, runs[0][0]))
        rows.append((budget, tokens, f"{longest:.1f}", f"{total:.0f}"))
    show_table(("budget", "tokens of each step", "longest step, ms", "first token, ms"), rows)
    say("""A small budget keeps the steps short for the requests that decode. On a quiet machine the
        prompt then gets its first token later, because each step has a fixed cost. Only its last
        chunk yields a token: the logits of the others are not even computed.""")
    QUESTIONS.show(2)
    say("""In the source there is a branch for sequences that decode. It does not decide who
        computes. It is there because their token is in another place: on the device, in their row,
        where the step before sampled it. The tokens of a chunk are in the plan.""")
    show_source(
        link("engine.scheduler.Scheduler.schedule", "decode_rows.append"),
        link("engine.scheduler.Scheduler.plan_chunk", "tokens = min("),
        link("engine.scheduler.Scheduler.plan_chunk", "kind = seq.result_kind"),
    )
    say("""Build it: `python -m lessons build step`, and then m3, in your engine. The budget is a
        rung of the ladder that makes the longest step shorter: `python -m lessons ladder 6`.""")


QUESTIONS = Questions("""
    Six requests decode, and a prompt of 200 tokens arrives. The budget is 56 tokens. In how many
    steps is the prompt computed?
    Answer: 4. Six tokens of each step are decodes, so 50 are left for the prompt.
    Hint: How many tokens of the budget do the decodes take in each step?

    The scheduler does not look for decodes. Why do they get their tokens before the prompt that is
    not finished?
    (a) They have fewer tokens to compute.
    (b) They were admitted before the prompt.
    (c) Chunks come last in the plan of a step.
    Answer: b. As long as the prompt is not finished, it takes all of the budget that is left, so
    nobody is admitted after it. It is always the last of the running sequences.
    Hint: When is a waiting sequence admitted, and what does the prompt leave of the budget?
""")

IN_VLLM = """`Scheduler.schedule` in `v1/core/sched/scheduler.py` has the same rule, and its first
comment says so. `long_prefill_token_threshold` can limit a chunk to less than the budget that is
left; it is off by default."""
