"""A solution of `python -m lessons build step`."""

from nanovllm.engine.sequence import Sequence


def plan_step(
    running: list[Sequence], waiting: list[Sequence], budget: int, max_num_seqs: int
) -> list[tuple[Sequence, int]]:
    plan = []
    for seq in running:
        tokens = min(len(seq.token_ids) - seq.num_computed, budget)
        if tokens > 0:
            plan.append((seq, tokens))
            budget -= tokens
    while waiting and budget > 0 and len(running) < max_num_seqs:
        seq = waiting.pop(0)
        running.append(seq)
        tokens = min(len(seq.token_ids) - seq.num_computed, budget)
        plan.append((seq, tokens))
        budget -= tokens
    return plan
