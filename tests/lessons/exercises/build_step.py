"""Checks `plan_step`: python -m lessons build step --check FILE"""

import random
from itertools import count

import pytest
from build_check import expect, load, make_samples, same

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduler import Scheduler

plan_step = load("step.py", "plan_step")


@pytest.mark.parametrize(
    ("running", "waiting", "budget", "most", "want", "left"),
    [
        ([1, 1], [4, 5, 2], 8, 3, [1, 1, 4], 2),
        ([1, 1], [4, 5, 2], 8, 4, [1, 1, 4, 2], 1),
        ([], [20], 8, 4, [8], 0),
        ([12], [3], 8, 4, [8], 1),
        ([12], [3], 12, 4, [12], 1),
        ([1, 0, 1], [1], 8, 4, [1, 1, 1], 0),
        ([1, 0, 1], [1], 8, 3, [1, 1], 1),
        ([1, 1, 1], [], 2, 4, [1, 1], 0),
        ([1], [9, 1], 4, 4, [1, 3], 1),
        ([], [], 4, 4, [], 0),
        ([6, 1], [], 4, 4, [4], 0),
        ([6, 1], [], 30, 4, [6, 1], 0),
    ],
)
def test_the_plan(
    running: list[int], waiting: list[int], budget: int, most: int, want: list[int], left: int
) -> None:
    # The order of admission is not that of arrival.
    every = [make_samples([0] * (n + 3), 99, 9 - i)[0] for i, n in enumerate(running + waiting)]
    for seq, n in zip(every, running + waiting, strict=True):
        seq.num_computed, seq.decoding = 3, n <= 1
    first, second = every[: len(running)], every[len(running) :]
    before = repr(every)
    planned = plan_step(first, second, budget, most)
    plan = list(planned)
    plan_step([], [], budget, most)
    expect(planned == plan, "A call of plan_step should not change an earlier plan, but it does.")
    expect(all(seq in every for seq, _ in plan), "The plan has a sequence that is in neither list.")
    order = [every.index(seq) for seq, _ in plan]
    expect(
        order == sorted(order),
        f"The plan has the sequences in the order {order}. The running ones come first, in the "
        "order of their list, and then the waiting ones in the order of theirs.",
    )
    expect(repr(every) == before, "plan_step should not change a sequence, but it does.")
    what = f"A budget of {budget} and max_num_seqs={most}. Running sequences have {running} tokens "
    what += f"to compute, waiting ones {waiting}. "
    same([tokens for _, tokens in plan], want, f"{what}The plan")
    what += "The sequences are numbered, the running ones first. Afterwards the numbers in "
    number = len(every) - left
    same([every.index(seq) for seq in first], [*range(number)], f"{what}`running`")
    same([every.index(seq) for seq in second], [*range(number, len(every))], f"{what}`waiting`")


@pytest.mark.parametrize("computed", [0, 8, 12])
@pytest.mark.parametrize("is_running", [False, True])
def test_a_preempted_sequence(is_running: bool, computed: int) -> None:
    [seq] = make_samples([0] * 10, 99)
    seq.token_ids += [1] * 5
    seq.num_computed = computed
    lists = ([seq], []) if is_running else ([], [seq])
    what = f"A {'running' if is_running else 'waiting'} sequence was preempted: its prompt has 10 "
    what += f"tokens, its output 5, and {computed} are computed. With a budget of "
    for budget in (30, 2):
        planned = [n for _, n in plan_step(*map(list, lists), budget, 4)]
        same(planned, [min(15 - computed, budget)], f"{what}{budget}, the plan")


def test_waiting_ones_keep_their_order() -> None:
    new, preempted = make_samples([0] * 3, 99, 1)[0], make_samples([0] * 10, 99)[0]
    preempted.token_ids += [1] * 5
    for computed in (0, 2):
        preempted.num_computed = computed
        plan = [n for _, n in plan_step([], [new, preempted], 30, 4)]
        what = "A new sequence waits with 3 tokens, and after it a preempted one with 15, of which "
        same(plan, [3, 15 - computed], f"{what}{computed} are computed. The plan")


def test_two_samples_of_a_request() -> None:
    samples = make_samples([0] * 3, 99, seeds=(0, 1))
    plan = [n for _, n in plan_step(samples, [], 30, 4)]
    same(plan, [3, 3], "Two samples of one request run, with 3 tokens to compute each. The plan")


def test_as_the_engine() -> None:
    """Every step of random requests, planned by the engine's scheduler and by plan_step."""
    for seed in range(30):
        rng = random.Random(seed)
        budget, most = rng.randint(1, 20), rng.randint(1, 5)
        scheduler = Scheduler(BlockManager(1000, 4), most, budget)
        for arrival in range(8):
            size = rng.randint(1, 30)
            scheduler.add(make_samples([arrival] * size, size + rng.randint(1, 6), arrival)[0])
        for number in count(1):
            running, waiting = list(scheduler.running), list(scheduler.waiting)
            if not running + waiting:
                break
            before = {seq: seq.num_computed for seq in running + waiting}
            got = plan_step(running, waiting, budget, most)
            planned = scheduler.schedule()
            assert planned is not None
            computed = {seq.request_id: seq.num_computed - n for seq, n in before.items()}
            same(
                {seq.request_id: tokens for seq, tokens in got},
                {name: tokens for name, tokens in computed.items() if tokens},
                f"Step {number} of random requests, a budget of {budget} and max_num_seqs={most}: "
                "the plan (request: tokens)",
            )
            scheduler.commit(planned, [1] * len(planned.sampling_seqs))
