"""Lesson 3: generate without a cache, and with a KV cache.

The model of lesson 2 reads a text and gives the probability of each token to be the next. That is
one token and not an answer. The simplest way to an answer is a loop: run the model, choose a token,
append it to the text, and run the model over the whole text again (Vaswani et al. 2017,
arXiv:1706.03762):

    text --> model --> probabilities --> token
      ^                                    |
      +------------- appended -------------+
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from lessons.lesson import decode_plan, make_llm, prompt_plan, runner_of, shape_of, timed
from lessons.show import Questions, faster, link, say, show_source, show_table
from nanovllm import LLM

SHOWS_TIMES = True
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
    say("""The first four numbers of the third token's key in the last layer, when the model reads
        3, 6 and 10 tokens of a prompt:""")
    rows = [(n, *(f"{x:.4f}" for x in third_key(llm, prompt[:n]))) for n in (3, 6, 10)]
    show_table(("tokens read", *(f"number {i}" for i in (1, 2, 3, 4))), rows)
    say("""So keys and values (KV) can be kept, and attention reads nothing else of earlier tokens
        (lesson 2). A step of the prompt, called prefill, stores them in the KV cache. Each later
        step, a decode, computes one token (Pope et al. 2022). For a prompt of 4 tokens and an
        output of 3:

                     without a cache    with a cache
            step 1   x x x x            x x x x       prefill   x: computed in this step
            step 2   x x x x x          . . . . x     decode    .: key and value are
            step 3   x x x x x x        . . . . . x   decode       in the cache

        Both ways give the same output. The tokens that they compute without a cache and with it,
        and the time:""")
    rows = []
    for n in LENGTHS:
        runs = [way(llm, prompt, n) for way in (without_cache, with_cache)]
        (old, slow), (new, fast) = (timed(partial(list[tuple[int, int]], run), 1) for run in runs)
        assert [token for token, _ in old] == [token for token, _ in new]
        a, b = (f"{sum(computed for _, computed in steps):,}" for steps in (old, new))
        rows.append((n, a, f"{slow:.2f}", b, f"{fast:.2f}", faster(slow, fast)))
    head = ("output", "without: tokens", "seconds", "with: tokens", "seconds", "speed")
    show_table(head, rows)
    c = shape_of("qwen3-0.6b")
    say(f"""The price is memory. In bfloat16 a token of Qwen3-0.6B takes 2 (a key and a value) *
        {c.num_layers} layers * {c.num_kv_heads} KV heads * {c.head_dim} numbers * 2 bytes =
        {c.block_bytes(1, 2):,} bytes. This lesson reserved memory for the longest text that the
        model can read, and used little of it. Lessons 5, 8, 9 are about this memory.""")
    say("""In the engine, `run` computes the tokens of a plan, and `store` writes their keys and
        values to the cache. For a decode the plan has only the number of a row. The token was
        sampled in the step before, and the device still has it, at this row.""")
    show_source(
        link("runner.model_runner.ModelRunner.run"),
        link("models.attention.PlainAttention.store"),
        link("engine.scheduler.Scheduler.schedule", "decode_rows.append"),
    )
    say("""Build it: `python -m lessons build cache`, and then `python -m lessons build m1`, the
        first milestone of your engine. The two ways are the first rungs of the ladder: `python -m
        lessons ladder 3` measures them.""")


QUESTIONS = Questions("""
    A prompt has 4 tokens. The loop runs until the output has 6 tokens. How many tokens does the
    model compute in all its runs?
    Answer: 39. 4 + 5 + 6 + 7 + 8 + 9. An output twice as long needs up to four times the tokens:
    there are twice as many runs, and each computes up to twice as many tokens.
    Hint: How many runs are there, and how many tokens does the last one compute?

    The model runs over the first 3 tokens of a prompt, and then over the first 6. Does the key of
    the third token change in the second run?
    (a) Yes: it now depends on all six tokens.
    (b) Yes, in all layers except the first.
    (c) No, it is the same in each of the layers.
    Answer: c. In each layer a token attends only to itself and to tokens before it. So nothing that
    is computed for it depends on what follows it.
    Hint: Which tokens does the third token attend to, in any layer?
""")

IN_VLLM = """`FlashAttentionImpl.do_kv_cache_update` in `v1/attention/backends/flash_attn.py` stores
keys and values, and `FlashAttentionImpl.forward` reads them. `get_attn_backend` in
`v1/attention/selector.py` chooses among many backends."""
