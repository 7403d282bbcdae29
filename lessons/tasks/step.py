"""One schedule: which sequences compute how many tokens in the next step.

The task. Write `plan_step`. It returns the plan of one step, a list of (sequence, number of
tokens): first the running sequences, in the order of their list, the order of admission. It does
not matter whether they decode. Then come the waiting ones, in the order of theirs. Each
computes all tokens of seq.token_ids after the first seq.num_computed, or what is left of the
budget. A waiting one has at least one token to compute. If it computes some, it is admitted: it
moves from the list `waiting` to the end of `running`. It may have output already, if it was
preempted (lesson 9a).

Example: a budget of 8 and max_num_seqs=3. Two running sequences have 1 token to compute each, three
waiting ones have 4, 5 and 2. The plan is 1, 1, 4, and the second waiting one waits: 3 sequences
run. With max_num_seqs=4, it is admitted and computes 2 of its 5 tokens.

What must stay true:
  - The plan has no entry of 0 tokens. A running sequence may have none to compute, because a
    step has not returned its token yet: leave it out, and go on with the next.
  - No waiting sequence is passed over. The sequences, and the plans of earlier calls, stay as they
    are.

In the engine: schedule in nanovllm/engine/scheduler.py, which also finds blocks for the tokens.
"""

from nanovllm.engine.sequence import Sequence


def plan_step(
    running: list[Sequence], waiting: list[Sequence], budget: int, max_num_seqs: int
) -> list[tuple[Sequence, int]]:
    raise NotImplementedError("plan_step is to be written; see the top of this file")
