"""Lesson 3: generate without a cache, and with a KV cache.

The model of lesson 2 reads a text and gives the probability of each next token. That is one token
and not an answer. The simplest way to an answer is a loop: run the model, choose a token, append it
to the text, and run the model over the whole text again (Vaswani et al. 2017, arXiv:1706.03762).
For a prompt of 4 tokens and an output of 3 it computes 4 + 5 + 6 = 15 tokens. With a KV cache it
computes 6, in a step of the prompt, called prefill, and two decodes (Pope et al. 2022):

             without a cache    with a cache
    step 1   x x x x            x x x x        x: computed in this step
    step 2   x x x x x          . . . . x      .: key and value are in the cache
    step 3   x x x x x x        . . . . . x
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from lessons.lesson import decode_plan, make_llm, prompt_plan, runner_of, shape_of, timed
from lessons.show import Questions, faster, link, say, show_source, show_table
from nanovllm import LLM

# A way to generate: (llm, prompt, number of output tokens) -> each token, and how many tokens the
# model computed for it.
Way = Callable[[LLM, list[int], int], Iterator[tuple[int, int]]]
PROMPT = "What is 12 + 30?\n"
LENGTHS = (20, 40, 80, 160)
# Blocks of 16 tokens for the longest text that the model can read; lesson 5 explains them.
BLOCK_TABLE = list(range(1, 65))


def without_cache(llm: LLM, prompt: list[int], num_output: int) -> Iterator[tuple[int, int]]:
    """Generate by plans that begin at position 0, so nothing is read that is in the cache."""
    ids = list(prompt)
    for _ in range(num_output):
        plan = prompt_plan([list(ids)], [BLOCK_TABLE])
        [token] = llm.engine.runner.run(plan)().token_ids
        ids.append(token)
        yield token, plan.num_tokens


def with_cache(llm: LLM, prompt: list[int], num_output: int) -> Iterator[tuple[int, int]]:
    """Compute the prompt once. Each later step computes the token that row 0 sampled last."""
    plan = prompt_plan([prompt], [BLOCK_TABLE])
    for _ in range(num_output):
        [token] = llm.engine.runner.run(plan)().token_ids
        yield token, plan.num_tokens
        plan = decode_plan(1)


def third_key(llm: LLM, ids: list[int]) -> Any:
    """Run the model over `ids` -> 4 numbers of the third token's key, in the last layer."""
    next(without_cache(llm, ids, 1))
    layer, key, block, head, slot = -1, 0, 1, 0, 2
    return runner_of(llm).attention.cache[layer, key, block, head, slot, :4].tolist()


def run() -> None:
    llm = make_llm(attention_backend="sdpa")
    prompt = llm.get_tokenizer().encode(PROMPT)
    QUESTIONS.show(1, 2)
    say("""The first numbers of the third token's key in the last layer, when the model reads 3, 6
        and 10 tokens of a prompt:""")
    rows = [(n, *(f"{x:.4f}" for x in third_key(llm, prompt[:n]))) for n in (3, 6, 10)]
    show_table(("tokens read", "1", "2", "3", "4"), rows)
    say("""So keys and values (KV) can be kept, and attention reads nothing else of earlier tokens
        (lesson 2). Both ways give the same output. The tokens that they compute, and the time:""")
    rows = []
    for n in LENGTHS:
        runs = [way(llm, prompt, n) for way in (without_cache, with_cache)]
        (old, slow), (new, fast) = (timed(partial(list[tuple[int, int]], run), 1) for run in runs)
        assert [token for token, _ in old] == [token for token, _ in new]
        counts = [f"{sum(computed for _, computed in steps):,}" for steps in (old, new)]
        rows.append((n, *counts, f"{slow:.2f}", f"{fast:.2f}", faster(slow, fast)))
    head = ("output tokens", "without", "with", "seconds without", "seconds with", "it is")
    show_table(head, rows)
    c = shape_of("qwen3-0.6b")
    say(f"""The price is memory. In bfloat16 a token of Qwen3-0.6B takes 2 (a key and a value) *
        {c.num_layers} layers * {c.num_kv_heads} KV heads * {c.head_dim} numbers * 2 bytes =
        {c.block_bytes(1, 2):,} bytes. This lesson reserved memory for the longest text that the
        model can read, and used little of it. Lessons 5 to 9 are about this memory.""")
    show_source(
        link("runner.model_runner.ModelRunner.run"),
        link("models.attention.PlainAttention.store"),
        link("engine.scheduler.Scheduler.schedule", "decode_rows.append"),
    )
    say("""Build it: `python -m lessons build cache`. The two ways are the first rungs of the
        ladder: `python -m lessons ladder 3` measures them.""")


QUESTIONS = Questions("""
    A prompt of 4 tokens and an output of 3 made 15 without a cache. How many tokens does the model
    compute for the same prompt and an output of 6?
    Answer: 39. 4 + 5 + 6 + 7 + 8 + 9. Long outputs that are twice as long take four times as many
    tokens: there are twice as many steps, and a step computes more.
    Hint: How many steps are there, and how many tokens does the last one compute?

    The model runs over the first 3 tokens of a prompt, and then over the first 6. Does the key of
    the third token change in the second run? (a) Yes: attention mixes the keys of all tokens that
    the model reads. (b) Yes, except in the first layer. (c) No: a token attends only to itself and
    to the tokens before it.
    Answer: c. What a layer computes for a token depends on nothing that follows it.
    Hint: Which tokens does the third token attend to, in any layer?
""")
