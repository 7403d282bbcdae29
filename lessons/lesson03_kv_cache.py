"""Lesson 3: generate without a cache, and with a KV cache.

The model of lesson 2 reads a text and gives the probability of each next token. That is one token
and not an answer. The simplest way to an answer is a loop: run the model, choose a token, append it
to the text, and run the model over the whole text again (Vaswani et al. 2017, arXiv:1706.03762).
For a prompt of 4 tokens and an output of 3 it computes 4 + 5 + 6 = 15 tokens. With a KV cache it
computes 6 (Pope et al. 2022, arXiv:2211.05102):

             without a cache    with a cache
    step 1   x x x x            x x x x        x: computed in this step
    step 2   x x x x x          . . . . x      .: key and value are in the cache
    step 3   x x x x x x        . . . . . x
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

from lessons.lesson import (
    decode_plan,
    make_llm,
    prompt_plan,
    runner_of,
    shape_of,
    timed,
)
from lessons.show import Questions, faster, link, say, show_source, show_table
from nanovllm import LLM

# A way to generate: (llm, prompt, number of output tokens) -> each token, and how many tokens the
# model computed for it.
Way: TypeAlias = Callable[[LLM, list[int], int], Iterator[tuple[int, int]]]
PROMPT = "What is 12 + 30?\n"
LENGTHS = (20, 40, 80, 160)


def block_table(llm: LLM) -> list[int]:
    """Return blocks for the longest text that the model can read. Lesson 5 explains blocks."""
    size = llm.engine.scheduler.block_manager.block_size
    return list(range(1, 1 - (-llm.engine.input_processor.max_model_len // size)))


def without_cache(llm: LLM, prompt: list[int], num_output: int) -> Iterator[tuple[int, int]]:
    """Generate by plans that begin at position 0, so nothing is read that is in the cache."""
    ids = list(prompt)
    for _ in range(num_output):
        plan = prompt_plan([list(ids)], [block_table(llm)])
        [token] = llm.engine.runner.run(plan)().token_ids
        ids.append(token)
        yield token, plan.num_tokens


def with_cache(llm: LLM, prompt: list[int], num_output: int) -> Iterator[tuple[int, int]]:
    """Compute the prompt once. Each later step computes the token that row 0 sampled last."""
    plan = prompt_plan([prompt], [block_table(llm)])
    for _ in range(num_output):
        [token] = llm.engine.runner.run(plan)().token_ids
        yield token, plan.num_tokens
        plan = decode_plan(1)


def third_key(llm: LLM, ids: list[int]) -> Any:
    """Run the model over `ids` -> 4 numbers of the third token's key, in the last layer."""
    next(without_cache(llm, ids, 1))
    attention = runner_of(llm).attention
    return attention.cache[-1, 0, 1, 0, 2, :4].tolist()  # of block 1 and head 0


def run() -> None:
    llm = make_llm(attention_backend="sdpa")
    prompt = llm.get_tokenizer().encode(PROMPT)
    QUESTIONS.show(1)
    say(f"""Without a cache, a prompt of p = {len(prompt)} tokens and an output of n tokens make the
        model compute p + (p + 1) + ... + (p + n - 1) = n * p + n * (n - 1) / 2 tokens. The last
        token of the output is sampled and not computed. Which of all these results are new?""")
    QUESTIONS.show(2)
    say("""The key of the third token in the last layer, its first 4 numbers, when the model reads
        the first 3, 6 and 10 tokens of the prompt:""")
    rows = [(n, *(f"{x:.4f}" for x in third_key(llm, prompt[:n]))) for n in (3, 6, 10)]
    show_table(("tokens read", "1", "2", "3", "4"), rows)
    say("""So the key and value (KV) of a token can be kept, and of earlier tokens attention reads
        nothing else (lesson 2). Both ways give the same tokens:""")
    rows = []
    for n in LENGTHS:
        old, slow = timed(partial(list[tuple[int, int]], without_cache(llm, prompt, n)), repeats=1)
        new, fast = timed(partial(list[tuple[int, int]], with_cache(llm, prompt, n)), repeats=1)
        assert [token for token, _ in old] == [token for token, _ in new]
        counts = [f"{sum(computed for _, computed in steps):,}" for steps in (old, new)]
        rows.append((n, *counts, f"{slow:.2f}", f"{fast:.2f}", faster(slow, fast)))
    head = ("output tokens", "without", "with", "seconds without", "seconds with", "it is")
    show_table(head, rows)
    say("""A step that computes a prompt is often called prefill, and a step that computes one token
        of each sequence decode. The engine has no such phases: a sequence has known tokens and
        computed tokens, and a step computes some of the difference.""")
    QUESTIONS.show(3)
    c = shape_of("qwen3-0.6b")
    say(f"""The price is memory, a key and a value for each layer and KV head. In bfloat16 a token
        of Qwen3-0.6B takes 2 * {c.num_layers} layers * {c.num_kv_heads} KV heads * {c.head_dim}
        numbers * 2 bytes = {c.block_bytes(1, 2):,} bytes. The length of an answer is not known in
        advance. This lesson reserved memory for each of the
        {llm.engine.input_processor.max_model_len:,} positions that the model can read, and used few
        of them. Lessons 5 to 9 are about this memory.""")
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
    Answer: 39. 4 + 5 + 6 + 7 + 8 + 9. For twice as long an output there are twice as many steps,
    and a step computes more: long outputs take four times as many tokens.
    Hint: How many steps are there, and how many tokens does the last one compute?

    The model runs over the first 3 tokens of a prompt, and then over the first 6. Does the key of
    the third token change in the second run? (a) Yes: attention mixes the keys of all tokens that
    the model reads. (b) Yes, except in the first layer. (c) No: a token attends only to itself and
    to the tokens before it.
    Answer: c. What a layer computes for a token depends on nothing that follows it.
    Hint: Which tokens does the third token attend to, in any layer?

    Qwen3-0.6B has 16 query heads but 8 KV heads: two query heads share one. What is gained? (a) A
    token takes half of the memory in the cache, and a decode reads half as much of it. (b)
    Attention computes half as many scores. (c) The first token comes sooner.
    Answer: a. Each query head still has its own scores. With 16 KV heads a token would take 229,376
    bytes and not 114,688. This is grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245).
    Hint: Does a cache hold query heads or KV heads?
""")
