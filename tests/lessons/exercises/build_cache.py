"""Checks `KVCache`: python -m lessons build cache --check FILE"""

import pytest
import torch
from build_check import expect, load, same
from build_heads import attention, compare_heads, random_heads
from torch import Tensor

from lessons.lesson import decode_plan, make_llm, prompt_plan, runner_of
from nanovllm.models.attention import PlainAttention
from nanovllm.models.batch import ForwardBatch

KVCache = load("cache.py", "KVCache")


def compare_pieces(lengths: list[int], heads: int, kv_heads: int, scale: float) -> None:
    """Tokens that are computed in pieces of these lengths, compared with torch's attention."""
    q, k, v = random_heads(sum(lengths), heads, kv_heads)
    q, k = scale * q, scale * k
    cache, pieces, copies = KVCache(kv_heads, 8), [], []
    for piece in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        given = [x.clone() for x in piece]
        pieces.append(cache.attend(*given))
        for name, x, before in zip("qkv", given, piece, strict=True):
            expect(x.equal(before), f"`attend` changes {name}, which is the caller's.")
        copies.append(pieces[-1].clone())
    both = zip(pieces, copies, strict=True)
    unchanged = all(a.nan_to_num().equal(b.nan_to_num()) for a, b in both)
    expect(unchanged, "A later call of `attend` changes the result of an earlier one.")
    large = f", keys and queries times {scale}" if scale != 1 else ""
    what = f"{heads} query heads, {kv_heads} KV heads, tokens in pieces of {lengths}{large}"
    compare_heads(torch.cat(pieces), attention(q, k, v), what)


def test_one_piece() -> None:
    for kv_heads in (6, 2):
        compare_pieces([5], 6, kv_heads, 1)


def test_two_caches_are_independent() -> None:
    one, other = KVCache(2, 8), KVCache(2, 8)
    one.attend(*random_heads(3, 2, 2))
    tokens = random_heads(4, 2, 2)
    what = "Another cache holds 3 tokens, this one none"
    compare_heads(other.attend(*tokens), attention(*tokens), what)


@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "scale"),
    [
        ([1, 1, 1, 1], 2, 2, 1),
        ([3, 2], 2, 2, 1),
        ([1, 4, 2], 2, 2, 1),
        ([6, 1, 1], 2, 2, 1),
        ([3, 1, 2], 6, 2, 1),
        ([3, 2], 2, 2, 0),  # all scores are 0
        ([3, 2], 2, 2, 20),  # exp of the largest scores is infinite
        ([50, 1, 1100, 1], 2, 2, 1),  # longer than a buffer or a window
    ],
)
def test_pieces(lengths: list[int], heads: int, kv_heads: int, scale: float) -> None:
    compare_pieces(lengths, heads, kv_heads, scale)


def test_the_tensors_are_the_callers() -> None:
    cache, tokens, results = KVCache(2, 8), random_heads(5, 2, 2), []
    for start, end in ((0, 1), (1, 3), (3, 5)):
        piece = [x[start:end].clone() for x in tokens]
        results.append(cache.attend(*piece))
        for given in piece:
            given.fill_(9.0)
    what = "The caller has overwritten q, k and v of the tokens 0, 1 to 2, 3 to 4 after each call"
    compare_heads(torch.cat(results), attention(*tokens), what)


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
