"""Checks `Matching.match`: python -m lessons build prefix --check FILE"""

from types import SimpleNamespace

import pytest
from build_check import check_history, expect, load, make_samples

from nanovllm.engine.block_manager import Block, BlockManager
from nanovllm.engine.sequence import Sequence

Matching = load("prefix.py", "Matching")


def cache(blocks: BlockManager, tokens: list[int]) -> None:
    """Run a sequence of these tokens and release its blocks."""
    seq = make_samples(tokens, len(tokens) + 1)[0]
    blocks.attach_cached(seq, BlockManager.match(blocks, seq))
    for _ in range(blocks.num_needed(seq, len(tokens))):
        blocks.append_block(seq)
    seq.num_computed = len(tokens)
    blocks.cache_full_blocks(seq)
    blocks.release(seq)


def state(blocks: BlockManager) -> tuple[object, ...]:
    """A copy of all that a match may not change."""
    each = [(b.ref_count, b.block_hash, list(b.token_ids)) for b in blocks.blocks]
    return each, list(blocks.free), list(blocks.evictable), dict(blocks.hash_to_block)


def matched(blocks: BlockManager, tokens: list[int]) -> list[list[int]]:
    """The tokens of the blocks that match."""
    before = state(blocks)
    found = blocks.match(make_samples(tokens, len(tokens) + 1)[0])
    is_right = isinstance(found, list) and all(isinstance(block, Block) for block in found)
    expect(is_right, f"match should return a list of Blocks, but it returns {found!r}.")
    expect(state(blocks) == before, "match should change nothing, but it changes the manager.")
    return [block.token_ids for block in found]


@pytest.mark.parametrize(
    ("tokens", "want"),
    [
        ([5, 6, 7, 8, 9], [[5, 6], [7, 8]]),
        ([5, 6, 7, 8], [[5, 6]]),
        ([5, 6, 9, 8, 7], [[5, 6]]),
        ([5, 6, 9, 9, 7, 8, 1], [[5, 6]]),
        ([7, 8, 9], []),
        ([5, 6], []),
        ([5], []),
        ([9, 6, 7, 8, 1], []),
    ],
)
def test_matches(tokens: list[int], want: list[list[int]]) -> None:
    blocks = Matching(8, 2)
    cache(blocks, [5, 6, 7, 8])
    got = matched(blocks, tokens)
    expect(
        got == want,
        f"[5, 6] and, after it, [7, 8] are cached. {tokens} should match the blocks {want}, but "
        f"matches {got}.",
    )


def test_many_blocks() -> None:
    blocks, tokens = Matching(8, 2), list(range(12))
    cache(blocks, tokens)
    got = matched(blocks, [*tokens, 0])
    expect(len(got) == 6, f"All 6 blocks of a prompt are cached. They should match, but {got} do.")


def test_without_prefix_caching() -> None:
    blocks = Matching(8, 2, enable_prefix_caching=False)
    cache(blocks, [5, 6, 7, 8])
    got = matched(blocks, [5, 6, 7, 8, 9])
    expect(got == [], f"Without enable_prefix_caching nothing should match, but {got} does.")


def test_equal_tokens_after_different_tokens() -> None:
    blocks = Matching(8, 2)
    cache(blocks, [5, 6, 7, 8])
    cache(blocks, [1, 2])
    got = matched(blocks, [1, 2, 7, 8, 9])
    expect(
        got == [[1, 2]],
        "[7, 8] is cached after [5, 6], and [1, 2] alone. [1, 2, 7, 8, 9] should match [[1, 2]], "
        f"but matches {got}.",
    )


def test_a_block_after_one_that_was_evicted() -> None:
    blocks = Matching(8, 2)
    cache(blocks, [5, 6, 7, 8])
    [first] = BlockManager.match(blocks, make_samples([5, 6, 7], 4)[0])
    blocks._evict(first)
    got = matched(blocks, [5, 6, 7, 8, 9])
    expect(
        got == [],
        "[5, 6] was cached and has been evicted, and [7, 8] after it is still cached. "
        f"[5, 6, 7, 8, 9] should match no block, but matches {got}.",
    )


def test_different_tokens_with_the_same_hash() -> None:
    class Colliding(Matching):
        def hash_block(self, parent_block_hash: bytes, token_ids: list[int]) -> bytes:
            return super().hash_block(parent_block_hash, token_ids[:1])

    blocks = Colliding(8, 2)
    cache(blocks, [5, 6])
    got = matched(blocks, [5, 7, 8])
    expect(
        got == [],
        "[5, 6] is cached, and [5, 7] has the same hash here. [5, 7, 8] should match no block, but "
        f"matches {got}.",
    )


class Compared(Matching):
    """The solution, compared with the engine's match. Sequences may have output already."""

    def match(self, seq: Sequence) -> list[Block]:
        got, want = super().match(seq), BlockManager.match(self, seq)
        numbers = [[block.block_id for block in blocks] for blocks in (want, got)]
        expect(
            got == want,
            f"Block size {self.block_size}. A sequence with a prompt of {seq.num_prompt} tokens "
            f"and {seq.num_output} tokens of output should match the blocks {numbers[0]}, but "
            f"matches {numbers[1]}.",
        )
        return got


def test_random_requests() -> None:
    found = 0
    for seed in range(40):
        history = check_history(seed, managers=SimpleNamespace(BlockManager=Compared))
        found += history.scheduler.cached_tokens
    expect(found > 0, "Random requests found nothing in the prefix cache.")
