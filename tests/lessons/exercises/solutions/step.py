"""A solution of `python -m lessons build step`."""

from dataclasses import dataclass


@dataclass(eq=False)
class Seq:
    known: int  # tokens
    computed: int


def plan_step(
    running: list[Seq], waiting: list[Seq], budget: int, max_num_seqs: int
) -> list[tuple[Seq, int]]:
    plan = []
    for seq in running:
        tokens = min(seq.known - seq.computed, budget)
        if tokens > 0:
            plan.append((seq, tokens))
            budget -= tokens
    while waiting and budget > 0 and len(running) < max_num_seqs:
        seq = waiting.pop(0)
        running.append(seq)
        tokens = min(seq.known - seq.computed, budget)
        plan.append((seq, tokens))
        budget -= tokens
    return plan
