"""Eviction, and what is computed once. Random histories in test_oracle.py find wrong contents."""

from oracle_engine import Engine, plain_sequence, sequence

from nanovllm.engine.block_manager import BlockManager


def test_least_recently_used_goes_first_and_tails_before_heads() -> None:
    engine = Engine(blocks=8, size=1, seqs=1, budget=100)
    engine.add(sequence([1, 2, 3], 1, 0), sequence([4, 5, 6], 1, 1))
    engine.run()
    engine.add(sequence([7, 8, 9, 7], 1, 2))  # two free blocks, then two evicted: 3 and 2
    engine.run()
    probe = [sequence(p, 1, 9) for p in ([1, 2, 3, 0], [4, 5, 6, 0])]
    assert [len(engine.block_manager.match(p)) for p in probe] == [1, 3]


def test_a_block_that_is_computed_again_finds_its_children_again() -> None:
    blocks = BlockManager(8, 2)

    def cached(*token_ids: int) -> int:
        """Run a sequence of these tokens. Returns how many of its blocks were cached."""
        seq = sequence([*token_ids, 9], 1, 0)
        blocks.attach_cached(seq, found := blocks.match(seq))
        for _ in range(blocks.num_needed(seq, len(seq.token_ids))):
            blocks.append_block(seq)
        seq.num_computed = len(token_ids)
        blocks.cache_full_blocks(seq)
        blocks.release(seq)
        return len(found)

    assert cached(1, 2, 3, 4) == 0
    assert cached(1, 2, 3, 4) == 2
    [parent] = blocks.match(sequence([1, 2, 9], 1, 0))
    blocks._evict(parent)
    assert len(blocks.match(sequence([1, 2, 3, 4, 9], 1, 0))) == 0
    assert cached(1, 2) == 0
    assert cached(1, 2, 3, 4) == 2


def test_hashes_are_computed_once_and_shared_by_forks() -> None:
    blocks, computed = BlockManager(8, 2), []
    hash_block = blocks.hash_block

    def counted(parent_block_hash: bytes, token_ids: list[int]) -> bytes:
        computed.append(token_ids)
        return hash_block(parent_block_hash, token_ids)

    blocks.hash_block = counted  # type: ignore[method-assign]
    parent, child = sequence([1, 2, 3, 4, 5], 1, 0), sequence([1, 2, 3, 4, 6], 1, 1)
    for _ in range(3):
        blocks.match(parent)
    for _ in range(3):
        blocks.append_block(parent)
    parent.num_computed = 5
    blocks.cache_full_blocks(parent)
    assert computed == [[1, 2], [3, 4]]
    blocks.fork(parent, child, 3)
    assert child.block_hashes == parent.block_hashes[:1]
    assert child.num_cached_blocks == 1


def test_a_failure_that_removes_tokens_removes_their_hashes() -> None:
    """Otherwise, blocks with other tokens would be cached under these hashes."""
    blocks, seq = BlockManager(9, 4), plain_sequence([1, 2, 3, 4, 5, 6, 7, 8, 9])
    blocks.block_hash(seq, 1)
    del seq.token_ids[6:]
    blocks.revert([seq])
    seq.token_ids += [3, 2, 1]
    assert blocks.block_hash(seq, 1) == blocks.block_hash(plain_sequence(seq.token_ids), 1)
