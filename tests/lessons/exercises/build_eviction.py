"""Checks `FewestHits`: python -m lessons build eviction --check FILE"""

from types import SimpleNamespace

import pytest
from build_check import OracleRunner, answer, check_history, expect, load, make_samples

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence

FewestHits = load("eviction.py", "FewestHits")


class Checked(FewestHits):
    """The solution, with a check of every choice."""

    def choose_victim(self) -> int:
        before = list(self.evictable)
        victim = super().choose_victim()
        expect(victim in before, f"The victim must be one of {before}, but it is {victim!r}.")
        expect(list(self.evictable) == before, "choose_victim must not change self.evictable.")
        return victim


def use(blocks: BlockManager, *heads: int) -> None:
    """Run a sequence with one full block [head, head] for each head, and release its blocks."""
    blocks.release(start(blocks, *heads))


def start(blocks: BlockManager, *heads: int) -> Sequence:
    """Run a sequence as in `use`, which keeps its blocks."""
    tokens = [token for head in heads for token in (head, head)] + [0]
    seq = make_samples(tokens, len(tokens) + 1)[0]
    blocks.attach_cached(seq, blocks.match(seq))
    for _ in range(blocks.num_needed(seq, len(tokens))):
        blocks.append_block(seq)
    seq.num_computed = len(tokens)
    blocks.cache_full_blocks(seq)
    return seq


def evict_all(blocks: BlockManager) -> list[int]:
    """Take every block. Returns the heads of those that were evicted, in this order."""
    seq, order = make_samples([0], 2)[0], []
    while blocks.num_available:
        if not blocks.free:
            block = blocks.blocks[blocks.choose_victim()]
            order.append(block.token_ids[0] if block.is_cached else -1)
        blocks.append_block(seq)
    blocks.release(seq)
    return order


def test_fewest_hits_first() -> None:
    blocks = Checked(8, 2)
    for _ in range(4):
        use(blocks, 1)
    use(blocks, 2, 3)
    got = evict_all(blocks)
    expect(
        got == [3, 2, 1],
        "Block 1 has 3 hits. Then blocks 2 and 3 of a document are computed, with 0 hits. The "
        f"expected order of eviction is [3, 2, 1], but it is {got}.",
    )


def test_the_least_recently_used_of_equal_ones() -> None:
    blocks = Checked(8, 2)
    for head in (1, 2, 3, 2, 3, 1):
        use(blocks, head)
    got = evict_all(blocks)
    expect(
        got == [2, 3, 1],
        "Blocks 1, 2 and 3 have one hit each and were used last in the order 2, 3, 1. They should "
        f"be evicted in this order, but the order is {got}.",
    )


def test_every_hit_counts() -> None:
    blocks = Checked(8, 2)
    for head, times in ((1, 5), (2, 4), (3, 3), (4, 2), (5, 1)):
        for _ in range(times):
            use(blocks, head)
    got = evict_all(blocks)
    expect(
        got == [5, 4, 3, 2, 1],
        "Blocks 1 to 5 have 4, 3, 2, 1 and 0 hits, and were used in this order. The expected order "
        f"of eviction is [5, 4, 3, 2, 1], but it is {got}.",
    )


def test_hits_of_a_block_in_use_count() -> None:
    blocks = Checked(8, 2)
    seq = start(blocks, 1)
    for head in (1, 1, 1, 2, 2, 2):
        use(blocks, head)
    blocks.release(seq)
    use(blocks, 2)
    got = evict_all(blocks)
    expect(
        got == [1, 2],
        "Block 1 gets 3 hits while the request that computed it still runs, and then block 2 gets "
        f"3 hits. They should be evicted in the order [1, 2], but the order is {got}.",
    )
    seq = start(blocks, 3)
    for head in (3, 3, 4, 4):
        use(blocks, head)
    blocks.release(seq)
    use(blocks, 3)
    use(blocks, 5)
    use(blocks, 4)
    got = evict_all(blocks)
    expect(
        got == [5, 4, 3],
        "Block 3 gets 2 hits while the request that computed it still runs, and 1 later. Block 4 "
        f"has 2 hits and block 5 none. The expected order of eviction is [5, 4, 3], but it is "
        f"{got}.",
    )


def test_each_block_of_a_prefix_has_hits() -> None:
    blocks = Checked(8, 2)
    for heads in ((1, 2, 3), (1, 2, 3), (4,)):
        use(blocks, *heads)
    got = evict_all(blocks)
    expect(
        got == [4, 3, 2, 1],
        "Blocks 1, 2 and 3 of one prompt have one hit each, and block 4 has none. The expected "
        f"order of eviction is [4, 3, 2, 1], because the last block of a sequence is released "
        f"first, but it is {got}.",
    )


@pytest.mark.parametrize("popular", [4, 5])
def test_hits_belong_to_the_content(popular: int) -> None:
    blocks = Checked(3, 2)
    for head, times in ((1, 10), (2, 5)):
        for _ in range(times):
            use(blocks, head)
    evict_all(blocks)
    for head in (4, 5, popular):
        use(blocks, head)
    got, want = evict_all(blocks), [9 - popular, popular]
    expect(
        got == want,
        "Blocks with many hits are evicted and filled with new content, 4 and 5. Then "
        f"{popular} gets one hit, and {9 - popular} has none. The expected order of eviction is "
        f"{want}, but it is {got}. New content should start with 0 hits.",
    )


def cached_tokens(manager: type[BlockManager]) -> int:
    """Serve 10 rounds of 2 chats and 6 documents, one at a time, with a pool of 24 blocks of 4.

    Chats begin with the same 16 tokens, and documents share nothing. Returns the prompt tokens that
    were in the prefix cache.
    """
    blocks = manager(24, 4)
    scheduler, runner = Scheduler(blocks, 1, 100), OracleRunner(24, 4, 1)
    for arrival in range(80):
        own = [1000 + arrival] * 3
        prompt = [7] * 16 + own if arrival % 8 < 2 else [100 + arrival] * 13
        seq = make_samples(prompt, len(prompt) + 4, arrival)[0]
        scheduler.add(seq)
        while scheduler.has_work():
            step = scheduler.schedule()
            assert step is not None
            scheduler.commit(step, runner.run(step.plan))
        want = answer(prompt, seq.max_length, frozenset(), 0)
        expect(seq.output_ids == want, f"request {arrival} got the tokens of another context")
    return scheduler.cached_tokens


def test_more_prefix_hits_than_least_recently_used() -> None:
    lru, got, want = cached_tokens(BlockManager), cached_tokens(FewestHits), 19 * 16
    assert lru == 10 * 16  # documents evict the common prefix between two rounds
    expect(
        got == want,
        f"20 chats with a common prefix of 16 tokens run between documents. The engine's own rule "
        f"takes {lru} tokens from the prefix cache. Of yours 19 * 16 = {want} are expected, all "
        f"but the first chat's, but it takes {got}.",
    )


def test_random_histories() -> None:
    """Chunks, preemptions, aborts and forks: every request gets the tokens of the oracle."""
    evictions = 0
    for seed in range(200):
        history = check_history(seed, managers=SimpleNamespace(BlockManager=Checked))
        evictions += history.block_manager.evictions
    assert evictions > 200  # else the pools were too large to prove anything
