"""Exercises that break the engine: a fault of one line, and the shortest history that shows it.

`python -m nanovllm.lessons break N` makes the N-th fault of mutants.py in memory and runs the random
histories of oracle.py. It makes the first that fails shorter, as long as it fails, prints its trace
and asks which invariant broke.
"""

import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from nanovllm.engine import block_manager
from nanovllm.lessons.lesson import WIDTH, Question, link, say, show_answers, show_questions
from nanovllm.lessons.mutants import MUTANTS, Mutant, apply
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

    def failure(self) -> tuple[int, int, int] | None:
        """Run it. Returns how long it is (steps, tokens, actions) if it fails."""
        history = History(self.seed, **self.modules)
        try:
            replay(history, self.actions)
        except InvariantError:
            tokens = sum(len(seq.token_ids) for seq in history.seqs)
            return history.steps, tokens, len(self.actions)
        return None

    def trace(self) -> tuple[Trace, InvariantError]:
        """Run it once more with a Trace, up to the failure, which the trace does not name."""
        history = History(self.seed, **self.modules)
        with Trace(history) as trace:
            try:
                replay(history, self.actions)
            except InvariantError as error:
                return trace, error
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


def shorten(attempt: Attempt) -> tuple[tuple[int, int, int], Attempt]:
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


def show_failure(mutant: Mutant) -> InvariantError:
    """Print what fails with the fault. Returns the error."""
    attempt = shortest_failure(mutant)
    if attempt is not None:
        trace, error = attempt.trace()
        say("""Random requests run on a model whose next token depends on every slot that it reads.
            This is the shortest history that was found in which something goes wrong, up to the
            step that does. Tokens are 0, 1 and 2.""")
        print(trace, end="\n\n")
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
    print(f"A line of {file} is changed, in memory only.\n")
    error = show_failure(mutant)
    print("This must hold after every step:\n")
    for i, text in enumerate(INVARIANTS.values(), 1):
        print(textwrap.fill(f"{i:2}. {text}", WIDTH, subsequent_indent="    "))
    print()
    functions = {m.function: None for m in MUTANTS.values() if m.module is mutant.module}
    line = f"`{mutant.pattern}` became `{mutant.replacement}`, where a capital letter stands for "
    line += f"any expression: {name}. See {link(function_of(mutant))}."
    questions = [
        Question("Which of these did not hold?", number_of(error.name), f"{error}."),
        Question(
            f"Which function of {file} has the fault: {', '.join(sorted(functions))}?",
            mutant.function,
            line,
        ),
    ]
    if answers is None:
        show_questions(questions, f"python -m nanovllm.lessons break {which} --answers")
    else:
        show_answers(questions, answers)


def number_of(invariant: str) -> str:
    return str(list(INVARIANTS).index(invariant) + 1)


def function_of(mutant: Mutant) -> object:
    owner = "BlockManager" if mutant.module is block_manager else "Scheduler"
    return getattr(getattr(mutant.module, owner), mutant.function)


def file_of(mutant: Mutant) -> str:
    return f"{mutant.module.__name__.rpartition('.')[2]}.py"
