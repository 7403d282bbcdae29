"""Checks `attention`: python -m lessons build attention --check FILE"""

import pytest
import torch
from build_check import expect, load, same
from build_heads import attention as by_torch
from build_heads import compare_heads, random_heads

from lessons import lesson02_model as lesson
from lessons.lesson import make_llm

attention = load("attention.py", "attention")


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (6, 1)])
@pytest.mark.parametrize(("tokens", "scale"), [(1, 1), (5, 1), (5, 20), (1100, 1)])
def test_attention(tokens: int, heads: int, kv_heads: int, scale: int) -> None:
    q, k, v = random_heads(tokens, heads, kv_heads)
    q, k = scale * q, scale * k
    given = [q.clone(), k.clone(), v.clone()]
    for layer in (0, 3):
        got = attention(layer, *given)
        large = f", keys and queries times {scale}" if scale != 1 else ""
        what = f"{tokens} tokens, {heads} query heads, {kv_heads} KV heads{large}"
        compare_heads(got, by_torch(q, k, v), what)
        for name, x, before in zip("qkv", given, (q, k, v), strict=True):
            expect(x.equal(before), f"`attention` changes {name}, which is the caller's.")


@torch.inference_mode()
def test_the_model_answers() -> None:
    tokenizer, model = make_llm(num_kv_cache_blocks=8).get_tokenizer(), lesson.Model()
    ids = tokenizer.encode(lesson.PROMPT)
    logits = [model.logits(ids, range(len(ids)), f) for f in (attention, lesson.attention)]
    largest = float((logits[0] - logits[1]).abs().max())
    what = f"{lesson.PROMPT!r}: logits with your attention differ by up to {largest:.2g}."
    expect(largest < 1e-2, what)
    for _ in range(10):
        ids.append(int(model.logits(ids, range(len(ids)), attention)[-1].argmax()))
    answer = tokenizer.decode(ids).removeprefix(lesson.PROMPT)
    same(answer, "12 + 30 = 42", f"The model's answer to {lesson.PROMPT!r}")
