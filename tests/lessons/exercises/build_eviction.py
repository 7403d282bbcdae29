"""Checks `FewestHits`: python -m lessons build eviction --check FILE"""

from types import SimpleNamespace

import pytest
from build_check import OracleRunner, answer, check_history, expect, load, make_samples, same

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


def start(blocks: BlockManager, *heads: int, preemptions: int = 0) -> Sequence:
    """Run a sequence with one full block [head, head] for each head. It keeps its blocks."""
    tokens = [token for head in heads for token in (head, head)] + [0]
    seq = make_samples(tokens, len(tokens) + 1)[0]
    seq.preemptions = preemptions
    blocks.attach_cached(seq, blocks.match(seq))
    for _ in range(blocks.num_needed(seq, len(tokens))):
        blocks.append_block(seq)
    seq.num_computed = len(tokens)
    blocks.cache_full_blocks(seq)
    return seq


def use(blocks: BlockManager, *prompts: int | tuple[int, ...]) -> None:
    """Run a sequence for each prompt, and release its blocks."""
    for heads in prompts:
        blocks.release(start(blocks, *(heads if isinstance(heads, tuple) else (heads,))))


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


@pytest.mark.parametrize(
    ("prompts", "want", "what"),
    [
        (
            (1, 1, 1, 1, (2, 3)),
            [3, 2, 1],
            "Block 1 has 3 hits. Then blocks 2 and 3 of a document are computed, with 0 hits.",
        ),
        (
            (1, 2, 3, 2, 3, 1),
            [2, 3, 1],
            "Blocks 1, 2 and 3 have one hit each and were used last in the order 2, 3, 1.",
        ),
        (
            (*[1] * 5, *[2] * 4, *[3] * 3, 4, 4, 5),
            [5, 4, 3, 2, 1],
            "Blocks 1 to 5 have 4, 3, 2, 1 and 0 hits, and were used in this order.",
        ),
        (
            ((1, 2, 3), (1, 2, 3), 4),
            [4, 3, 2, 1],
            "Blocks 1, 2 and 3 of one prompt have one hit each, and block 4 has none. The last "
            "block of a sequence is released first.",
        ),
        (
            ((7, 1), (7, 1), (8, 1)),
            [1, 8, 1, 7],
            "Block 7 and block 1 after it have one hit each. Blocks 8 and 1 after it have none.",
        ),
        (
            (*[(1, 2)] * 4, 3, 3, 3),
            [3, 2, 1],
            "Blocks 1 and 2 of one prompt have 3 hits each, and block 3 has 2.",
        ),
        (
            (50, 50, 50, tuple(range(1, 33)), tuple(range(1, 33))),
            [*range(32, 0, -1), 50],
            "Block 50 has 2 hits, and blocks 1 to 32 of one prompt have one each.",
        ),
    ],
    ids=["scan", "recent", "many", "prefix", "parents", "first", "long"],
)
def test_order(prompts: tuple[int | tuple[int, ...], ...], want: list[int], what: str) -> None:
    use(blocks := Checked(40, 2), *prompts)
    same(evict_all(blocks), want, f"{what} The order of eviction")


def test_a_match_or_a_choice_alone_changes_nothing() -> None:
    use(blocks := Checked(8, 2), 1, 1, 2, 2, 2)
    for _ in range(5):
        blocks.match(make_samples([1, 1, 0], 4)[0])
        blocks.choose_victim()
    use(blocks, 3)
    what = "Block 1 has one hit and block 2 has two. Then `match` finds block 1 and choose_victim "
    what += "returns it, 5 times, and no sequence takes it. Then block 3 is computed, with 0 hits. "
    same(evict_all(blocks), [3, 1, 2], f"{what}The order of eviction")


def test_forks_and_resumed_sequences() -> None:
    use(blocks := Checked(8, 2), 2, 2)
    parent, child = start(blocks, 1), make_samples([1, 1, 0], 4)[0]
    blocks.fork(parent, child, 2)
    blocks.release(child)
    blocks.release(parent)
    what = "Block 2 has one hit. Block 1 has none: a fork shares it with the sequence that owns it."
    same(evict_all(blocks), [1, 2], f"{what} The order of eviction")
    use(blocks, 3)
    blocks.release(start(blocks, 3, preemptions=1))
    use(blocks, 4)
    what = "Block 3 has one hit, by a sequence that resumes after a preemption, and block 4 none."
    same(evict_all(blocks), [4, 3], f"{what} The order of eviction")


def test_a_copy_has_no_hits() -> None:
    use(blocks := Checked(8, 2), (1, 2), (1, 2), 3)
    parent, child = start(blocks, 1, 2), make_samples([1, 1, 2, 4, 0], 6)[0]
    blocks.fork(parent, child, 3)
    blocks.copy_on_write(child)
    child.num_computed = 4
    blocks.cache_full_blocks(child)
    use(blocks, 3)
    blocks.release(child)
    blocks.release(parent)
    what = "Block 1 and block 2 after it have 2 hits, and block 3 has one. A fork copies block 2, "
    what += "writes another token to the copy, and caches it with 0 hits. The order of eviction"
    same(evict_all(blocks), [2, 3, 2, 1], what)


def test_hits_of_a_block_in_use_count() -> None:
    blocks = Checked(8, 2)
    seq = start(blocks, 1)
    use(blocks, 1, 1, 1, 2, 2, 2)
    blocks.release(seq)
    use(blocks, 2)
    what = (
        "Block 1 gets 3 hits while the request that computed it still runs, and then block 2 gets "
    )
    same(evict_all(blocks), [1, 2], f"{what}3 hits. The order of eviction")
    seq = start(blocks, 3)
    use(blocks, 3, 3, 4, 4)
    blocks.release(seq)
    use(blocks, 3, 5, 4)
    what = "Block 3 gets 2 hits while the request that computed it still runs, and 1 later. Block "
    same(
        evict_all(blocks), [5, 4, 3], f"{what}4 has 2 hits and block 5 none. The order of eviction"
    )


@pytest.mark.parametrize(("popular", "other"), [(4, 5), (5, 4), (1, 2), (2, 1)])
@pytest.mark.parametrize("how", ["evicted", "lost by reset_prefix_cache()", "lost by revert()"])
def test_hits_are_lost_with_the_content(popular: int, other: int, how: str) -> None:
    blocks = Checked(3, 2)
    use(blocks, *[1] * 10, *[2] * 5)
    if how == "evicted":
        evict_all(blocks)
    elif "reset" in how:
        blocks.reset_prefix_cache()
    else:  # after a step that failed
        blocks.revert([])
    use(blocks, *sorted((popular, other)), popular)
    what = f"Blocks 1 and 2, with many hits, are {how}. Blocks {popular} and {other} are computed, "
    what += f"with 0 hits. Then {popular} gets one. The order of eviction"
    same(evict_all(blocks), [other, popular], what)


def test_two_managers() -> None:
    use(blocks := Checked(8, 2), 1, 1, 1, 2)
    use(other := Checked(8, 2), 3)
    other.reset_prefix_cache()
    what = "Block 1 has 2 hits and block 2 none. Then another manager computes a block and resets "
    same(evict_all(blocks), [2, 1], f"{what}its prefix cache. The order of eviction")


def test_a_reset_that_is_refused() -> None:
    use(blocks := Checked(8, 2), 1, 1, 1, 2)
    seq = start(blocks, 3)
    expect(not blocks.reset_prefix_cache(), "A sequence runs, so the cache must not be reset.")
    blocks.release(seq)
    what = "Block 1 has 2 hits and block 2 none. reset_prefix_cache() does nothing and returns "
    what += "False, because a sequence runs. The order of eviction"
    same(evict_all(blocks), [2, 3, 1], what)


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
        same(seq.output_ids, want, f"The tokens of request {arrival}")
    return scheduler.cached_tokens


def test_more_prefix_hits_than_least_recently_used() -> None:
    assert cached_tokens(BlockManager) == 10 * 16  # documents evict the prefix between two rounds
    what = "20 chats with a common prefix of 16 tokens run between documents. The tokens from the "
    what += "prefix cache, of all chats but the first (160 with the engine's own rule),"
    same(cached_tokens(FewestHits), 19 * 16, what)


def test_random_histories() -> None:
    """Chunks, preemptions, aborts and forks: every request gets the tokens of the oracle."""
    evictions = 0
    for seed in range(200):
        history = check_history(seed, managers=SimpleNamespace(BlockManager=Checked))
        evictions += history.block_manager.evictions
    assert evictions > 200  # else the pools were too large to prove anything
