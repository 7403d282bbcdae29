"""Checks `plan_step`: python -m lessons build step --check FILE"""

import random

import pytest
from build_check import expect, load, make_samples, same

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence

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
    ],
)
def test_the_plan(
    running: list[int], waiting: list[int], budget: int, most: int, want: list[int], left: int
) -> None:
    every = [make_samples([0] * (n + 3), 99, i)[0] for i, n in enumerate(running + waiting)]
    for seq in every:
        seq.num_computed = 3
    first, second = every[: len(running)], every[len(running) :]
    planned = plan_step(first, second, budget, most)
    order = [every.index(seq) for seq, _ in planned]
    expect(
        order == sorted(order),
        f"The plan has the sequences in the order {order}. The running ones come first, and the "
        "oldest of them before the others.",
    )
    expect(
        [(len(s.token_ids), s.num_computed) for s in every]
        == [(n + 3, 3) for n in running + waiting],
        "A sequence has other numbers of known or computed tokens than before.",
    )
    what = f"A budget of {budget} and max_num_seqs={most}. Running sequences have {running} tokens "
    what += f"to compute, waiting ones {waiting}. "
    same([tokens for _, tokens in planned], want, f"{what}The plan")
    same(len(second), left, f"{what}The number of those that wait then")


def test_as_the_engine() -> None:
    """Every step of random requests, planned by the engine's scheduler and by plan_step."""
    for seed in range(30):
        rng = random.Random(seed)
        budget, most = rng.randint(1, 20), rng.randint(1, 5)
        scheduler = Scheduler(BlockManager(1000, 4), most, budget)
        mine: dict[Sequence, Sequence] = {}
        running, waiting, number = [], [], 0
        for arrival in range(8):
            size = rng.randint(1, 30)
            most_tokens = size + rng.randint(1, 6)
            seq, copy = (make_samples([arrival] * size, most_tokens, arrival)[0] for _ in "12")
            scheduler.add(seq)
            mine[seq] = copy
            waiting.append(copy)
        while scheduler.has_work():
            number += 1
            before = {seq: seq.num_computed for seq in mine}
            planned = scheduler.schedule()
            assert planned is not None
            got, names = plan_step(running, waiting, budget, most), list(mine.values())
            computed = [seq.num_computed - before[seq] for seq in mine]
            same(
                {names.index(seq): tokens for seq, tokens in got},
                {i: tokens for i, tokens in enumerate(computed) if tokens},
                f"Step {number} of random requests, a budget of {budget} and max_num_seqs={most}: "
                "the plan (request: tokens)",
            )
            updated = scheduler.commit(planned, [1] * len(planned.sampling_seqs))
            for one, tokens in got:
                one.num_computed += tokens
            for seq in updated:
                mine[seq].token_ids.append(1)
                if seq.finish_reason:
                    running.remove(mine[seq])
