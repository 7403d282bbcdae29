"""Exercises that break the engine: a fault of one line, and the shortest history that shows it.

`python -m nanovllm.lessons break N` makes the N-th fault of mutants.py in memory and runs the random
histories of oracle.py. It makes the first that fails shorter, as long as it fails, prints its trace
and asks which invariant broke.
"""

import contextlib
import inspect
import io
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from nanovllm.engine import block_manager
from nanovllm.engine.policies import shortest_job_first
from nanovllm.lessons.lesson import (
    WIDTH,
    Question,
    say,
    show_answers,
    show_questions,
    show_table,
)
from nanovllm.lessons.mutants import MUTANTS, Mutant, apply, describe
from nanovllm.lessons.oracle import (
    INVARIANTS,
    Action,
    History,
    InvariantError,
    check_cached_tail,
    check_late_copy,
    random_actions,
    replay,
)
from nanovllm.trace import Trace

SEEDS = 300  # histories to try
FAILURES = 3  # that many of those that fail are made shorter, and the shortest is shown
NAMES = list(MUTANTS)


@dataclass(frozen=True)
class Attempt:
    """A history with a fault, which can be run again and again."""

    modules: dict[str, Any]  # the argument of History that takes the faulty module
    seed: int
    actions: tuple[Action, ...]

    def failure(self) -> tuple[int, ...] | None:
        """Run it. Returns how long and how complicated it is if it fails, and None if not."""
        history = History(self.seed, **self.modules)
        try:
            replay(history, self.actions)
        except InvariantError:
            tokens = sum(len(seq.token_ids) for seq in history.seqs)
            is_sjf = history.scheduler.policy_key.__name__ == shortest_job_first.__name__
            return history.steps, tokens, len(self.actions), history.max_in_flight, is_sjf
        return None

    def trace(self) -> tuple[Trace, History, InvariantError]:
        """Run it once more with a Trace, up to the failure, which the trace does not name."""
        history = History(self.seed, **self.modules)
        with Trace(history) as trace:
            try:
                replay(history, self.actions)
            except InvariantError as error:
                return trace, history, error
        raise ValueError("this history does not fail")

    def variations(self) -> Iterator["Attempt"]:
        """The same without one of its actions, with other requests, or in another engine."""
        actions = self.actions
        for i in reversed(range(len(actions))):
            yield replace(self, actions=actions[:i] + actions[i + 1 :])
        for i, action in enumerate(actions):
            if action.name == "add":
                for seed in range(20):
                    other = (Action("add", seed),)
                    yield replace(self, actions=actions[:i] + other + actions[i + 1 :])
        for seed in range(20):
            yield replace(self, seed=seed)


def shorten(attempt: Attempt) -> tuple[tuple[int, ...], Attempt]:
    """Take variations that fail earlier, until there are none (Zeller 1999, delta debugging)."""
    best = attempt.failure()
    assert best is not None
    improved = True
    while improved:
        improved = False
        for other in attempt.variations():
            length = other.failure()
            if length is not None and length < best:
                best, attempt, improved = length, other, True
                break
    return best, attempt


def shortest_failure(mutant: Mutant) -> Attempt | None:
    """Return None if no history fails."""
    module = "managers" if mutant.module is block_manager else "schedulers"
    modules = {module: apply(mutant)}
    attempts = (Attempt(modules, seed, tuple(random_actions(seed))) for seed in range(SEEDS))
    failing = (attempt for attempt in attempts if attempt.failure() is not None)
    found = [shorten(attempt) for attempt in islice(failing, FAILURES)]
    return min(found, key=lambda pair: pair[0])[1] if found else None


def show_requests(history: History) -> None:
    rows = []
    for seq in history.seqs:
        if seq.parent is None:
            samples = sum(other.arrival == seq.arrival for other in history.seqs)
            prompt = " ".join(map(str, seq.token_ids[: seq.num_prompt]))
            rows.append((seq.request_id, seq.max_length - seq.num_prompt, samples, prompt))
    show_table(("request", "output tokens at most", "samples", "prompt"), rows)


def show_blocks(history: History) -> None:
    """Print the blocks that are owned or cached when the history ends."""
    size, memory, rows = history.size, history.runner.memory, []
    for block in history.blocks.blocks:
        if block.ref_count or block.identity:
            pairs = memory[block.block_id * size : (block.block_id + 1) * size]
            held = " ".join("empty" if p is None else f"{p[0]}@{p[1]}" for p in pairs)
            cached = memoryview(block.token_ids).cast("I").tolist() if block.identity else ""
            rows.append((block.block_id, block.ref_count, cached, held))
    say("""The blocks at the end that are owned or cached: the reference count, the tokens that the
        prefix index says, and what each slot holds, token@position:""")
    show_table(("block", "ref_count", "cached as", "holds"), rows)


def show_failure(mutant: Mutant) -> InvariantError:
    """Print what fails with the fault. Returns the error."""
    attempt = shortest_failure(mutant)
    if attempt is not None:
        trace, history, error = attempt.trace()
        say("""Random requests run on a model whose next token depends on every slot that it reads.
            This is the shortest history that was found in which something goes wrong, up to the
            step that does. Tokens are 0, 1 and 2.""")
        show_requests(history)
        print(trace, end="\n\n")
        show_blocks(history)
        return error
    check = check_cached_tail if mutant.module is block_manager else check_late_copy
    say("""No history of requests shows this fault, because the engine does nothing today that would.
        These calls show it, in which a model's next token depends on every slot that it reads:""")
    source = inspect.getsource(check)
    print(source[: source.rindex("    require(")])
    try:
        check(apply(mutant))
    except InvariantError as error:
        return error
    raise ValueError("no test catches this fault")


def run(which: str | None, answers: list[str] | None) -> None:
    """The N-th exercise. Without a number all are listed; with `answers` it is solved."""
    if which is None:
        for i, mutant in enumerate(MUTANTS.values(), 1):
            print(f"break {i:2}  a fault in {file_of(mutant)}")
        return
    if which not in map(str, range(1, len(NAMES) + 1)):
        raise ValueError(f"break takes a number from 1 to {len(NAMES)}, not {which!r}")
    name = NAMES[int(which) - 1]
    mutant, file = MUTANTS[name], file_of(MUTANTS[name])
    with contextlib.redirect_stdout(io.StringIO() if answers is not None else sys.stdout):
        print(f"A line of {file} is changed, in memory only.\n")
        error = show_failure(mutant)
        print("This must hold after every step:\n")
        for i, text in enumerate(INVARIANTS.values(), 1):
            print(textwrap.fill(f"{i:2}. {text}", WIDTH, subsequent_indent="    "))
        print()
    functions = {m.function: None for m in MUTANTS.values() if m.module is mutant.module}
    questions = [
        Question(
            "Which of these is the first that was found not to hold? (3, 8 and 9 are checked while a "
            "step runs, the others after it.)",
            number_of(error.name),
            f"{error}.",
        ),
        Question(
            f"Which function of {file} has the fault: {', '.join(sorted(functions))}?",
            mutant.function,
            f"{name[0].upper()}{name[1:]}. {describe(mutant)}.",
        ),
    ]
    if answers is None:
        show_questions(questions, f"python -m nanovllm.lessons break {which} --answers")
    else:
        show_answers(questions, answers)


def number_of(invariant: str) -> str:
    return str(list(INVARIANTS).index(invariant) + 1)


def file_of(mutant: Mutant) -> str:
    return f"{mutant.module.__name__.rpartition('.')[2]}.py"
