"""Checks `Preempting`: python -m lessons build preempt --check FILE"""

from types import SimpleNamespace

import pytest
from build_check import OracleRunner, check_history, expect, load, make_samples

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, Status

Preempting = load("preempt.py", "Preempting")


def start(prompts: list[int], num_blocks: int) -> tuple[Scheduler, list[Sequence]]:
    """Run prompts of these lengths, one after the other, in blocks of 2, until all are computed."""
    scheduler = Scheduler(BlockManager(num_blocks, 2, False), len(prompts), 99)
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


def names(seqs: list[Sequence]) -> list[int]:
    return [seq.arrival for seq in seqs]


def test_room_for_the_oldest() -> None:
    scheduler, seqs = start([4, 2, 2], 4)
    tokens = list(seqs[2].token_ids)
    row, went_on = seqs[2].row, scheduler._make_room(seqs[0], 1)
    what = "Sequences 0, 1 and 2 run and have all blocks. 0 needs one: "
    got, available = names(scheduler.running), scheduler.block_manager.num_available
    expect(
        got == [0, 1],
        f"{what}sequence 2, which was admitted last, should be preempted, but then {got} run, and "
        f"{available} blocks are available.",
    )
    expect(went_on is True, f"{what}it gets one and runs, but _make_room returns {went_on!r}.")
    expect(
        names(list(scheduler.waiting)) == [2] and seqs[2].status is Status.WAITING,
        f"{what}sequence 2 should wait, but its status is {seqs[2].status.name} and the queue has "
        f"{names(list(scheduler.waiting))}.",
    )
    expect(available == 1, f"{what}the block of 2 should be available, but {available} are.")
    expect(
        scheduler.free_rows == [row],
        f"{what}row {row} of sequence 2 should be free, but the free rows are "
        f"{scheduler.free_rows}.",
    )
    expect(
        seqs[2].token_ids == tokens,
        f"{what}sequence 2 had the tokens {tokens}, and has {seqs[2].token_ids} when it waits.",
    )
    counts = scheduler.preemptions, seqs[2].preemptions, seqs[0].preemptions
    expect(
        counts == (1, 1, 0),
        f"{what}self.preemptions should be 1, and seq.preemptions 1 for sequence 2 and 0 for "
        f"sequence 0, but they are {counts}.",
    )


def test_a_sequence_preempts_itself() -> None:
    scheduler, seqs = start([4, 2], 3)
    went_on = scheduler._make_room(seqs[1], 1)
    got = names(scheduler.running), went_on
    expect(
        got == ([0], False),
        "Sequences 0 and 1 run and have all blocks. Sequence 1, which was admitted last, needs "
        f"one: it should be preempted itself, and _make_room return False. But then {got[0]} run, "
        f"and it returns {got[1]!r}.",
    )


def test_several_are_preempted() -> None:
    scheduler, seqs = start([4, 2, 2, 2], 5)
    scheduler._make_room(seqs[0], 5)
    got = names(scheduler.running), names(list(scheduler.waiting))
    expect(
        got == ([0], [1, 2, 3]),
        "Four sequences run and have all blocks, and sequence 0 needs 3: sequences 3, 2 and 1 "
        f"should be preempted, in this order, so that 1 waits first. But then {got[0]} run, and "
        f"{got[1]} wait.",
    )


@pytest.mark.parametrize("tokens", [2, 4])
def test_nothing_is_preempted_without_need(tokens: int) -> None:
    scheduler, seqs = start([4, 2], 5)
    went_on = scheduler._make_room(seqs[0], tokens)
    got = names(scheduler.running), went_on
    expect(
        got == ([0, 1], True),
        f"2 blocks of 2 slots are available, and sequence 0 needs room for {tokens} tokens: both "
        f"sequences should run on. But then {got[0]} run, and _make_room returns {got[1]!r}.",
    )


def test_it_waits_before_others() -> None:
    scheduler, seqs = start([4, 2], 3)
    scheduler.add(make_samples([7], 9, 7)[0])
    scheduler._make_room(seqs[0], 1)
    got = names(list(scheduler.waiting))
    expect(
        got == [1, 7],
        "Request 7 has never run and waits when sequence 1 is preempted. The queue should be "
        f"[1, 7], but it is {got}.",
    )


def test_random_histories() -> None:
    """Chunks, preemptions, aborts and forks: every request gets the tokens of the oracle."""
    for seed in range(300):
        mine = check_history(seed, schedulers=SimpleNamespace(Scheduler=Preempting))
        engine = check_history(seed)
        got, want = mine.scheduler.preemptions, engine.scheduler.preemptions
        expect(
            got == want,
            f"Random requests end with the right tokens, after {got} preemptions. The engine needs "
            f"{want}. See preempt in scheduler.py.",
        )
