"""One schedule: which sequences compute how many tokens in the next step.

The task. A sequence has known tokens and computed tokens. Write `plan_step`: it gives the tokens of
one step to sequences, as (sequence, tokens) in this order: first the running ones, the oldest
first, then the waiting ones, the first first. Each computes all tokens that are known and not
computed, or what is left of the budget. `running` and `waiting` change as sequences are admitted.

Example: a budget of 8 and at most 3 running sequences. Two running sequences have 1 token to
compute each, three waiting ones have 4, 5 and 2. The plan is 1, 1, 4, and the second waiting one
waits: there are 3 running sequences. With at most 4, it is admitted and computes 2 of its 5 tokens.

What must stay true: nobody gets 0 tokens; a waiting sequence is admitted only if budget is left and
fewer than max_num_seqs run; no waiting sequence overtakes another; `known` and `computed` stay.

Where it goes. Scheduler.schedule in nanovllm/engine/scheduler.py, which also finds blocks for them.
The check compares each step of random requests with the engine's scheduler, with enough blocks.
"""

from dataclasses import dataclass


@dataclass(eq=False)
class Seq:
    known: int  # tokens
    computed: int


def plan_step(
    running: list[Seq], waiting: list[Seq], budget: int, max_num_seqs: int
) -> list[tuple[Seq, int]]:
    raise NotImplementedError("plan_step is to be written; see the top of this file")
