"""Checks `KVCache`: python -m lessons build cache --check FILE"""

import pytest
import torch
from build_check import expect, load
from torch import Tensor
from torch.nn import functional as F

from lessons.lesson import decode_plan, make_llm, prompt_plan, runner_of
from nanovllm.models.attention import PlainAttention
from nanovllm.models.batch import ForwardBatch

KVCache = load("cache.py", "KVCache")


def tokens(number: int, heads: int, kv_heads: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return tuple(
        torch.randn(number, h, dim, generator=generator) for h in (heads, kv_heads, kv_heads)
    )


def compare(lengths: list[int], heads: int, kv_heads: int) -> None:
    """Compare tokens that are computed in pieces of these lengths with torch's attention of all."""
    dim = 8
    q, k, v = tokens(sum(lengths), heads, kv_heads, dim)
    each = (x.transpose(0, 1)[None] for x in (q, k, v))
    want = F.scaled_dot_product_attention(*each, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
    cache, pieces = KVCache(kv_heads, dim), []
    for piece in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        pieces.append(cache.attend(*piece))
    got = torch.cat(pieces)
    expect(
        got.shape == want.shape, f"The result should be {list(want.shape)}, not {list(got.shape)}."
    )
    wrong = [i for i in range(len(got)) if not torch.allclose(got[i], want[i], atol=1e-4)]
    expect(
        not wrong,
        f"{heads} query heads, {kv_heads} KV heads, tokens in pieces of {lengths}: the attention "
        f"of the tokens {wrong} differs from torch's.",
    )


def test_one_piece_is_causal() -> None:
    compare([5], 2, 2)


def test_one_by_one() -> None:
    compare([1, 1, 1, 1], 2, 2)


@pytest.mark.parametrize("lengths", [[3, 2], [1, 4, 2], [6, 1, 1]])
def test_pieces(lengths: list[int]) -> None:
    compare(lengths, 2, 2)


def test_groups_of_query_heads() -> None:
    compare([3, 1, 2], 6, 2)


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
    got = llm.get_tokenizer().decode(ids)
    expect(
        got == "12 + 30 = 42",
        f"The model is asked what 12 + 30 is. With your cache it answers {got!r}.",
    )
