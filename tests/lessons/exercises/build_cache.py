"""Checks `KVCache`: python -m lessons build cache --check FILE"""

import pytest
import torch
from build_check import expect, load, same
from torch import Tensor
from torch.nn import functional as F

from lessons.lesson import decode_plan, make_llm, prompt_plan, runner_of
from nanovllm.models.attention import PlainAttention
from nanovllm.models.batch import ForwardBatch

KVCache = load("cache.py", "KVCache")


@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "scale"),
    [
        ([5], 2, 2, 1),
        ([1, 1, 1, 1], 2, 2, 1),
        ([3, 2], 2, 2, 1),
        ([1, 4, 2], 2, 2, 1),
        ([6, 1, 1], 2, 2, 1),
        ([3, 1, 2], 6, 2, 1),
        ([3, 2], 2, 2, 20),  # exp of the largest scores is infinite
    ],
)
def test_attention(lengths: list[int], heads: int, kv_heads: int, scale: float) -> None:
    """Tokens that are computed in pieces of these lengths, compared with torch's attention."""
    generator, dim = torch.Generator().manual_seed(sum(lengths)), 8
    q, k, v = (
        torch.randn(sum(lengths), h, dim, generator=generator) for h in (heads, kv_heads, kv_heads)
    )
    q, k = scale * q, scale * k
    each = (x.transpose(0, 1)[None] for x in (q, k, v))
    want = F.scaled_dot_product_attention(*each, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
    cache, pieces = KVCache(kv_heads, dim), []
    for piece in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        pieces.append(cache.attend(*(x.clone() for x in piece)))
    got = torch.cat(pieces)
    same([*got.shape], [*want.shape], "The shape of the result")
    wrong = [i for i in range(len(got)) if not torch.allclose(got[i], want[i], atol=1e-4)]
    large = f", keys and queries times {scale}" if scale > 1 else ""
    expect(
        not wrong,
        f"{heads} query heads, {kv_heads} KV heads, tokens in pieces of {lengths}{large}: the "
        f"attention of the tokens {wrong} differs from torch's.",
    )


class YourAttention(PlainAttention):
    """The engine's attention, but for its cache: a KVCache for each layer of the one sequence."""

    def store(self, layer: int, k: Tensor, v: Tensor, batch: ForwardBatch) -> None:
        self.new = k, v

    def attend(self, layer: int, q: Tensor, batch: ForwardBatch) -> Tensor:
        if layer not in self.caches:
            self.caches[layer] = KVCache(*self.new[0].shape[1:])
        return self.caches[layer].attend(q, *self.new).flatten(1)


def test_the_model_answers() -> None:
    llm = make_llm(attention_backend="sdpa", num_kv_cache_blocks=8)
    runner, encode = runner_of(llm), llm.get_tokenizer().encode
    runner.attention.__class__ = YourAttention
    runner.attention.caches = {}
    ids = runner.run(prompt_plan([encode("What is 12 + 30?\n")], [[1, 2]]))().token_ids
    for _ in range(9):
        ids += runner.run(decode_plan(1))().token_ids
    same(
        llm.get_tokenizer().decode(ids), "12 + 30 = 42", "The model's answer to 'What is 12 + 30?'"
    )
