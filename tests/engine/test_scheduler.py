"""Policies, budgets, sharing and the reserve: one test for each promise and earlier failure."""

import random

import pytest
from oracle_engine import Engine, right, sequence

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.policies import AGING, POLICIES
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Status
from nanovllm.features.kv.host_cache.host_blocks import HostCacheBlockManager


def test_one_prefix_is_computed_once() -> None:
    """1,000 prompts with a common prefix, all in one step: they share its blocks."""
    engine = Engine(blocks=5000, size=16, seqs=1000, budget=64_000)
    prefix = [i % 7 for i in range(512)]
    seqs = [sequence([*prefix, i % 5, i % 11, i], 2, i) for i in range(1000)]
    engine.add(*seqs)
    plan = engine.step()
    assert plan.num_tokens == 512 + 1000 * 3
    assert sum(seq.num_cached_tokens for seq in seqs) == 999 * 512
    engine.run()
    assert all(right(s) for s in seqs)


def test_n_samples_compute_their_prompt_once() -> None:
    """And each other sample one token again, for its own logits; full blocks are never copied."""
    engine = Engine(blocks=60, size=4, seqs=8, budget=100)
    seq = sequence([1, 2, 0] * 5, 9, n=6)  # 15 tokens: the last block holds three
    samples = [seq, *seq.forks]
    engine.add(seq)
    plans = [engine.step(), engine.step()]
    assert [p.num_tokens for p in plans] == [15, 1 + 5]
    assert len(plans[1].block_copies) == 5
    heads = {tuple(s.block_table[:3]) for s in samples}
    assert len(heads) == 1  # shared up to where they part
    assert len({s.block_table[3] for s in samples}) == 6
    engine.run()
    assert all(right(s) for s in samples)
    assert len({tuple(s.output_ids) for s in samples}) > 1


def test_fully_cached_prompt_computes_its_last_block() -> None:
    engine = Engine(blocks=20, size=4, seqs=2, budget=100)
    first = sequence([1, 2, 3, 4] * 3, 3)
    engine.add(first)
    engine.run()
    again = sequence([1, 2, 3, 4] * 3, 3, arrival=1)
    engine.add(again)
    plan = engine.step()
    # The logits of the last block are needed, so all of it is computed.
    assert again.num_cached_tokens == 8
    assert plan.num_tokens == 4
    engine.run()
    assert right(again)


def test_output_is_shared_as_prompt() -> None:
    """A second turn, which begins with the first turn and its answer, finds both."""
    engine = Engine(blocks=40, size=4, seqs=2, budget=100)
    first = sequence([1, 2, 3, 4, 5], 12)
    engine.add(first)
    engine.run()
    second = sequence([*first.token_ids, 9, 9], 3, arrival=1)
    engine.add(second)
    engine.step()
    assert second.num_cached_tokens == 16  # of 17 known tokens, all but the last have their KV
    engine.run()
    assert right(second)


def test_a_resumed_sequence_finds_its_former_self() -> None:
    engine = Engine(blocks=12, size=4, seqs=3, budget=100)
    seqs = [sequence([i] * 8, 20, i, seed=i) for i in range(3)]
    engine.add(*seqs)
    engine.run()
    assert engine.scheduler.preemptions > 0
    assert all(right(s) for s in seqs)
    recomputed = engine.scheduler.recomputed_tokens
    computed = sum(p.num_tokens for p in engine.plans)
    assert computed == sum(s.max_length - 1 for s in seqs) + recomputed


def test_shortest_job_first_and_a_cached_prefix_makes_it_shorter() -> None:
    engine = Engine(blocks=400, size=4, seqs=1, budget=1000, policy="sjf")
    common = [1] * 400
    warm = sequence(common, 1, 0)
    engine.add(warm)
    engine.run()
    long, short, cached = (
        sequence([2] * 300, 1, 1),
        sequence([3] * 200, 1, 2),
        sequence([*common, 4, 4, 4], 1, 3),
    )
    tie = sequence([5] * (200 - AGING), 1, 3 + 10**6)
    tie.arrival = 3
    engine.add(long, short, cached)
    engine.run()
    assert engine.finished == [warm, cached, short, long]


def test_sjf_overtaking_is_bounded() -> None:
    """Under endless short jobs, a long one is overtaken at most tokens / AGING times."""
    engine = Engine(blocks=200, size=4, seqs=1, budget=1000, policy="sjf")
    long = sequence([1] * 400, 1, 0)
    engine.add(sequence([9], 1, 0), long)
    overtook = 0
    for arrival in range(1, 100):
        engine.add(sequence([2, arrival], 1, arrival))
        engine.step()
        if long.status is Status.FINISHED:
            break
        overtook += 1
    assert long.status is Status.FINISHED
    assert 400 / AGING / 2 < overtook <= 400 / AGING + 1


def test_preempted_first_under_any_policy(monkeypatch) -> None:
    """A policy may return negative keys, such as one that admits the longest outputs first."""
    monkeypatch.setitem(POLICIES, "longest", lambda seq, _: -seq.max_length)
    engine = Engine(blocks=6, size=2, seqs=2, budget=100, policy="longest")
    old, new = sequence([1, 2, 3], 5, 0), sequence([4, 5, 6], 8, 1)
    engine.add(old)
    engine.step()
    engine.scheduler.preempt(old)
    engine.add(new)
    assert engine.scheduler.waiting[0] is old
    engine.run()
    assert right(old)
    assert right(new)


def test_an_abort_at_the_head_admits_the_next() -> None:
    engine = Engine(blocks=8, size=1, seqs=4, budget=100)
    engine.add(sequence([1, 2], 5, 0))
    engine.step()
    large, small = sequence([3] * 6, 1, 1), sequence([4], 1, 2)
    engine.add(large, small)
    assert not engine.step().new_rows
    engine.scheduler.finish(large, "abort")
    assert engine.step().new_rows
    engine.run()
    assert right(small)


# Numbers of blocks that admission could leave available, to compare with the scheduler's own.
RESERVES = {
    "none": lambda s: 0,
    "half a block per sequence": lambda s: len(s.running) // 2,
    "two blocks per sequence": lambda s: 2 * len(s.running),
}


def half_pool(reserve: str | None = None, host_blocks: int = 0) -> tuple[int, float]:
    """Run 256 requests on half of the blocks that they could use, with the scheduler alone.

    Returns (steps, the share of the computed tokens that were computed again). `host_blocks` are
    those of a host cache.
    """
    rng = random.Random(0)
    lengths = [(rng.randint(100, 1024), rng.randint(100, 1024)) for _ in range(256)]
    num_blocks = sum(-(-(p + o) // 16) for p, o in lengths) // 2
    blocks = BlockManager(num_blocks, 16)
    if host_blocks:
        blocks = HostCacheBlockManager(num_blocks, 16, host_blocks)
    scheduler = Scheduler(blocks, 256, 8192)
    if reserve is not None:
        scheduler.reserve = lambda: RESERVES[reserve](scheduler)
    for i, (prompt, output) in enumerate(lengths):
        scheduler.add(sequence([rng.randrange(10_000) for _ in range(prompt)], output, i))
    steps = computed = 0
    while scheduler.has_work():
        step = scheduler.schedule()
        steps, computed = steps + 1, computed + step.plan.num_tokens
        scheduler.commit(step, [7] * len(step.sampling_seqs))
    return steps, scheduler.recomputed_tokens / computed


@pytest.mark.slow
def test_a_host_cache_spares_what_a_half_pool_computes_again() -> None:
    found = {host: half_pool(host_blocks=host) for host in (0, 4000, 9000)}
    assert len({steps for steps, _ in found.values()}) == 1
    shares = [share for _, share in found.values()]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < 0.001 < 0.05 < shares[0]


@pytest.mark.slow
def test_the_reserve_keeps_a_full_pool_from_thrashing() -> None:
    """With half of the blocks little is computed twice, and hardly a step is lost."""
    steps, recomputed = half_pool()
    others = {name: half_pool(name) for name in RESERVES}
    assert recomputed < 0.12 < others["none"][1]
    assert steps <= 1.03 * min(other for other, _ in others.values())


def test_a_fork_that_has_no_room_does_not_cost_its_parent_a_block() -> None:
    """Its admission is tried, which shares the parent's blocks, and reverted."""
    engine = Engine(blocks=9, size=3, seqs=6, budget=64)
    first = sequence([i % 3 for i in range(19)], 8)
    parent = sequence([0, 1], 4, arrival=1, n=2)
    [fork] = parent.forks
    engine.add(first, parent)
    engine.step()
    engine.step()
    assert fork.status is Status.WAITING
    assert engine.block_manager.num_available == 1
    engine.step()  # the parent needs the block that is left, and nothing is shared any more
    assert parent.status is Status.RUNNING
    assert engine.scheduler.preemptions == 0
    engine.run()
    assert all(map(right, (first, parent, fork)))
