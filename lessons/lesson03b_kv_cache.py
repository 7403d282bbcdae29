"""Lesson 3b: generate with a KV cache.

Without a cache, 160 output tokens after a prompt of 10 make the model compute 14,320 tokens, nearly
all of them again. What has to be computed again? A token attends to the tokens before it, by their
keys and values (KV), and nothing else of them is needed (lesson 2). A KV cache stores these, and
each step computes only what is new: 169 tokens. Pope et al. 2022 (arXiv:2211.05102) describe the
costs and savings. The cache takes memory for each token: lessons 5 to 9 are about this memory.

             without a cache    with a cache
    step 1   x x x x            x x x x        x: computed in this step
    step 2   x x x x x          . . . . x      .: key and value are in the cache
    step 3   x x x x x x        . . . . . x
"""

from collections.abc import Iterator

import torch

from lessons import lesson03a_no_cache
from lessons.lesson import decode_plan, make_llm, prompt_plan, runner_of, shape_of
from lessons.lesson03a_no_cache import LENGTHS, PROMPT, block_table, measure
from lessons.pictures import show_formula
from lessons.show import Questions, faster, link, say, show_source, show_table
from nanovllm import LLM
from nanovllm.engine.scheduler import Scheduler
from nanovllm.models.attention import PlainAttention


def generate(llm: LLM, prompt: list[int], num_output: int) -> Iterator[tuple[int, int]]:
    """Generate with a cache, as a `Way` of lesson 3a.

    The first step computes the prompt. Each later step computes the token that row 0 sampled last,
    and reads the KV of all other tokens in the cache.
    """
    plan = prompt_plan([prompt], [block_table(llm)])
    for _ in range(num_output):
        [token] = llm.engine.runner.run(plan)().token_ids
        yield token, plan.num_tokens
        plan = decode_plan(1)


def key_in_texts(llm: LLM, ids: list[int], position: int, lengths: list[int]) -> torch.Tensor:
    """Return the key at `position` after texts of these lengths [N, D], in the last layer.

    It is the key of the first head.
    """
    attention = runner_of(llm).attention
    size = llm.engine.scheduler.block_manager.block_size
    assert isinstance(attention, PlainAttention)
    block, offset = block_table(llm)[position // size], position % size
    keys = []
    for length in lengths:
        next(lesson03a_no_cache.generate(llm, ids[:length], 1))
        keys.append(attention.cache[-1, 0, block, 0, offset].clone())
    return torch.stack(keys)


def compare(llm: LLM, prompt: list[int], lengths: tuple[int, ...]) -> None:
    """Print both ways together."""
    rows = []
    for n in lengths:
        expected, without, slow = measure(lesson03a_no_cache.generate, llm, prompt, n)
        tokens, computed, fast = measure(generate, llm, prompt, n)
        assert tokens == expected
        rows.append((n, f"{without:,}", computed, f"{slow:.2f}", f"{fast:.2f}", faster(slow, fast)))
    head = ("output tokens", "without", "with", "seconds without", "seconds with", "it is")
    show_table(head, rows)


def run() -> None:
    llm = make_llm(attention_backend="sdpa")
    prompt = llm.get_tokenizer().encode(PROMPT)

    QUESTIONS.show(1)
    say("""The key of the third token in the last layer, its first 4 numbers, when the model reads
        the first 3, 6 and 10 tokens of the prompt:""")
    keys = key_in_texts(llm, prompt, 2, [3, 6, 10])
    rows = [
        (n, *(f"{x:.4f}" for x in k[:4])) for n, k in zip((3, 6, 10), keys.tolist(), strict=True)
    ]
    show_table(("tokens read", "1", "2", "3", "4"), rows)
    assert torch.allclose(keys, keys[:1], atol=1e-4)
    say("""The key depends on its token and the tokens before it only, so it can be kept. Without a
        cache each step computes it again. Both ways give the same tokens:""")
    compare(llm, prompt, LENGTHS[1:])
    say("""The number of computed tokens no longer grows with the square of the output's length.""")

    QUESTIONS.show(2)
    say("""The price is memory, a key and a value for each layer and KV head. A token takes this
        number of bytes:""")
    show_formula(
        "2 * layers * KV heads * head size * bytes of a number",
        r"2 \times \text{layers} \times \text{KV heads} \times \text{head size} \times "
        r"\text{bytes of a number}",
    )
    rows = []
    models = (
        ("embedded model, float32", runner_of(llm).model.config, 4),
        ("Qwen3-0.6B, bfloat16", shape_of("qwen3-0.6b"), 2),
    )
    for name, c, number in models:
        arithmetic = f"2 * {c.num_layers} * {c.num_kv_heads} * {c.head_dim} * {number}"
        rows.append((name, arithmetic, f"{c.block_bytes(1, number):,}"))
    show_table(("model", "arithmetic", "bytes a token"), rows)
    slots = len(block_table(llm)) * llm.engine.scheduler.block_manager.block_size
    say(f"""The length of an answer is not known in advance. This lesson therefore reserved a slot
        for each of the {slots:,} positions that the model can read, and used few of them. In lesson
        5 a sequence takes memory only when it needs it.""")
    say("""A step that computes a prompt is often called prefill, and a step that computes one token
        of each sequence decode. A prefill computes many tokens for each read of the weights. The
        engine has no such phases: a sequence has known tokens and computed tokens, and a step
        computes some of the difference.""")
    show_source(link(PlainAttention.store), link(Scheduler.schedule, "decode_rows.append"))
    say("""Build it: `python -m lessons build cache`. On the ladder (`python -m lessons ladder`) a
        cache is the second rung.""")


QUESTIONS = Questions("""
    The model runs over the first 3 tokens of a prompt, and then over the first 6. Does the key of
    the third token change in the second run?
    (a) Yes: attention mixes the keys of all tokens that the model reads.
    (b) Yes, except in the first layer.
    (c) No: a token attends only to itself and to the tokens before it.
    Answer: c. What a layer computes for a token depends on nothing that follows it, so the KV can
    be stored.
    Hint: Which tokens does the third token attend to, in any layer?

    Qwen3-0.6B has 16 query heads but 8 KV heads: two query heads share one. What is gained?
    (a) A token takes half of the memory in the cache, and a decode reads half as much of it.
    (b) Attention computes half as many scores.
    (c) The first token comes sooner.
    Answer: a. Each query head still has its own scores. With 16 KV heads a token would take 229,376
    bytes and not 114,688. This is grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245).
    Hint: What does the formula of the bytes contain: query heads or KV heads?
""")
