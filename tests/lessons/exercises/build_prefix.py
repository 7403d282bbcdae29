"""Checks `Matching.match`: python -m lessons build prefix --check FILE"""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from build_check import check_history, expect, load, make_samples, same

from nanovllm.engine.block_manager import Block, BlockManager
from nanovllm.engine.sequence import Sequence

Matching = load("prefix.py", "Matching")


def manager(*prompts: list[int], make: type[BlockManager] = Matching) -> BlockManager:
    """A manager with blocks of 2 slots. Sequences of these tokens have run and are released."""
    blocks = make(8, 2)
    for tokens in prompts:
        seq = make_samples(tokens, len(tokens) + 1)[0]
        blocks.attach_cached(seq, BlockManager.match(blocks, seq))
        for _ in range(blocks.num_needed(seq, len(tokens))):
            blocks.append_block(seq)
        seq.num_computed = len(tokens)
        blocks.cache_full_blocks(seq)
        blocks.release(seq)
    return blocks


def fields(blocks: BlockManager, seq: Sequence) -> dict[str, str]:
    """Return what `match` must not change: the manager, and fields of the sequence."""
    names = ("token_ids", "num_computed", "block_table")
    of_seq = {f"seq.{name}": repr(getattr(seq, name)) for name in names}
    return {f"self.{name}": repr(value) for name, value in vars(blocks).items()} | of_seq


class Index(dict[bytes, Block]):
    """`hash_to_block`, through which a match must not go."""

    def __iter__(self) -> Iterator[bytes]:
        message = "match should look up each hash in hash_to_block, and not go through its blocks."
        raise pytest.fail.Exception(message, pytrace=False)

    keys = values = items = __iter__  # type: ignore[assignment]


def check(blocks: BlockManager, tokens: list[int], want: list[list[int]], cached: str) -> None:
    """Compare the tokens of the blocks that match with `want`. Nothing may change."""
    seq = make_samples(tokens, len(tokens) + 1)[0]
    blocks.hash_to_block = Index(blocks.hash_to_block)
    before = fields(blocks, seq)
    with pytest.MonkeyPatch.context() as patch:
        message = "match is the task: it should not call the engine's."
        patch.setattr(BlockManager, "match", lambda *_: expect(False, message))
        found = blocks.match(seq)
    is_right = isinstance(found, list) and all(isinstance(block, Block) for block in found)
    expect(is_right, f"match should return a list of Blocks, but it returns {found!r}.")
    changed = [name for name, value in fields(blocks, seq).items() if before.get(name) != value]
    expect(not changed, f"match should change nothing, but it changes {', '.join(changed)}.")
    same(
        [b.token_ids for b in found], want, f"{cached} The tokens of the blocks matched by {tokens}"
    )


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
        ([1, 2, 7, 8, 9], [[1, 2]]),
    ],
)
def test_matches(tokens: list[int], want: list[list[int]]) -> None:
    blocks = manager([5, 6, 7, 8], [1, 2])
    check(blocks, tokens, want, "[5, 6] and, after it, [7, 8] are cached, and [1, 2].")


def test_many_blocks() -> None:
    tokens = list(range(12))
    want = [tokens[i : i + 2] for i in range(0, 12, 2)]
    check(manager(tokens), [*tokens, 0], want, "All 6 blocks of a prompt are cached.")


def test_a_block_after_one_that_was_evicted() -> None:
    blocks = manager([5, 6, 7, 8])
    [first] = BlockManager.match(blocks, make_samples([5, 6, 7], 4)[0])
    blocks._evict(first)
    check(blocks, [5, 6, 7, 8, 9], [], "[7, 8] is cached, and [5, 6] before it has been evicted.")


@pytest.mark.parametrize("other", [[5, 7], [7, 6], [6, 5]])
def test_different_tokens_with_the_same_hash(other: list[int]) -> None:
    class Colliding(Matching):
        def hash_block(self, parent_block_hash: bytes, token_ids: list[int]) -> bytes:
            return super().hash_block(parent_block_hash, [])

    blocks = manager([5, 6], make=Colliding)
    check(blocks, [*other, 8], [], f"[5, 6] is cached, and {other} has the same hash here.")


class Compared(Matching):
    """The solution, compared with the engine's match. Sequences may have output already."""

    def match(self, seq: Sequence) -> list[Block]:
        got, want = super().match(seq), BlockManager.match(self, seq)
        numbers = [[block.block_id for block in blocks] for blocks in (got, want)]
        what = f"Block size {self.block_size}. The blocks matched by a sequence with a prompt of "
        what += f"{seq.num_prompt} tokens and {seq.num_output} tokens of output, "
        what += "with and without owners, if blocks with other tokens may have the same hash,"
        same(*numbers, what)
        return got


def test_random_requests() -> None:
    found = 0
    for seed in range(40):
        history = check_history(seed, managers=SimpleNamespace(BlockManager=Compared))
        found += history.scheduler.cached_tokens
    expect(found > 0, "Random requests found nothing in the prefix cache.")
