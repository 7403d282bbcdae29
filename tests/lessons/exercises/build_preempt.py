"""Checks `Preempting`: python -m lessons build preempt --check FILE"""

from types import SimpleNamespace

import pytest
from build_check import OracleRunner, check_history, load, make_samples, same

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence

Preempting = load("preempt.py", "Preempting")


def start(prompts: list[int], num_blocks: int) -> tuple[Scheduler, list[Sequence]]:
    """Run prompts of these lengths, one after the other, in blocks of 2, until all are computed."""
    scheduler = Scheduler(BlockManager(num_blocks, 2), len(prompts), 99)
    runner, seqs = OracleRunner(num_blocks, 2, len(prompts)), []
    for arrival, length in enumerate(prompts):
        seqs.append(make_samples([arrival] * length, 20, arrival)[0])
        scheduler.add(seqs[-1])
    # Without the reserve of admission, so that all run and every block is full.
    scheduler.reserve = lambda: 0
    step = scheduler.schedule()
    assert step is not None
    scheduler.commit(step, runner.run(step.plan))
    assert len(scheduler.running) == len(prompts)
    scheduler.__class__ = Preempting
    return scheduler, seqs


@pytest.mark.parametrize(
    ("prompts", "blocks", "seq", "tokens", "more", "running", "waiting"),
    [
        ([4, 2, 2], 4, 0, 1, 1, [0, 1], [2]),
        ([4, 2], 3, 1, 1, 1, [0], [1]),
        ([4, 2, 2, 2], 5, 0, 5, 3, [0], [1, 2, 3]),
        ([2, 2, 2, 2], 4, 2, 7, 4, [0, 1], [2, 3]),
        ([4], 2, 0, 1, 1, [], [0]),
        ([4, 2], 5, 0, 2, 1, [0, 1], []),
        ([4, 2], 5, 0, 4, 2, [0, 1], []),
    ],
)
def test_who_is_preempted(
    prompts: list[int],
    blocks: int,
    seq: int,
    tokens: int,
    more: int,
    running: list[int],
    waiting: list[int],
) -> None:
    scheduler, seqs = start(prompts, blocks)
    before = [(list(s.token_ids), s.row) for s in seqs]
    for s in seqs:
        s.num_cached_tokens = s.preemptions = 1
    went_on = scheduler._make_room(seqs[seq], tokens)
    what = f"{len(prompts)} sequences run, {blocks - sum(prompts) // 2} of {blocks} blocks are "
    what += f"available, and sequence {seq} needs {more}. After _make_room, "
    same([s.arrival for s in scheduler.running], running, f"{what}those that run")
    same([s.arrival for s in scheduler.waiting], waiting, f"{what}those that wait")
    same(went_on, seq in running, f"{what}what it has returned: whether sequence {seq} runs")
    held = sum(prompts[i] // 2 for i in running)
    same(scheduler.block_manager.num_available, blocks - held, f"{what}the available blocks")
    same(sorted(scheduler.free_rows), [before[i][1] for i in waiting], f"{what}the free rows")
    rows = [-1 if i in waiting else row for i, (_, row) in enumerate(before)]
    same([s.row for s in seqs], rows, f"{what}seq.row of all")
    same([s.token_ids for s in seqs], [ids for ids, _ in before], f"{what}the tokens of all")
    states = ["WAITING" if i in waiting else "RUNNING" for i in range(len(seqs))]
    same([s.status.name for s in seqs], states, f"{what}their status")
    same(scheduler.preemptions, len(waiting), f"{what}self.preemptions")
    counts = [1 + (i in waiting) for i in range(len(seqs))]
    decoding = [i not in waiting for i in range(len(seqs))]
    same([s.decoding for s in seqs], decoding, f"{what}seq.decoding of all")
    same([s.preemptions for s in seqs], counts, f"{what}seq.preemptions of all")
    same([s.num_cached_tokens for s in seqs], [1] * len(seqs), f"{what}seq.num_cached_tokens")
    again = sum(prompts[i] for i in waiting)
    same(scheduler.recomputed_tokens, again, f"{what}self.recomputed_tokens")


def test_it_waits_before_others() -> None:
    scheduler, seqs = start([4, 2], 3)
    scheduler.queue(make_samples([7], 9, 7)[0], -5)
    scheduler._make_room(seqs[0], 1)
    scheduler.queue(make_samples([8], 9, 8)[0])
    what = "Request 7 has never run and waits with the key -5. Sequence 1 is preempted, and then "
    what += "sequence 8, by self.queue(seq). The queue"
    same([s.arrival for s in scheduler.waiting], [1, 8, 7], what)


def test_one_that_is_not_the_last() -> None:
    """The engine calls `preempt` also for another one, when it searches beams."""
    scheduler, seqs = start([2, 4, 2], 4)
    table = list(seqs[1].block_table)
    scheduler.preempt(seqs[1])
    what = "Sequences 0, 1 and 2 run. After preempt(sequence 1), "
    same([s.arrival for s in scheduler.running], [0, 2], f"{what}those that run")
    same([s.arrival for s in scheduler.waiting], [1], f"{what}those that wait")
    same((seqs[1].row, seqs[1].decoding), (-1, False), f"{what}its row and seq.decoding")
    evictable = list(scheduler.block_manager.evictable)
    same(evictable, table[::-1], f"{what}its blocks in the order of eviction, the last first,")


def test_its_blocks_stay_cached() -> None:
    scheduler, [seq] = start([4], 2)
    scheduler.preempt(seq)
    what = "A sequence runs alone and is preempted. The number of its blocks that the prefix cache"
    same(len(scheduler.block_manager.match(seq)), 2, f"{what} still has")
    same(seq.status.name, "WAITING", "A sequence runs alone and is preempted. Its status")


def test_random_histories() -> None:
    """Chunks, preemptions, aborts and forks: every request gets the tokens of the oracle."""
    for seed in range(300):
        mine = check_history(seed, schedulers=SimpleNamespace(Scheduler=Preempting)).scheduler
        want = check_history(seed).scheduler
        for name in ("preemptions", "recomputed_tokens", "cached_tokens"):
            what = f"Random requests end with the right tokens. The scheduler's {name}, as with "
            same(getattr(mine, name), getattr(want, name), f"{what}preempt in scheduler.py,")
