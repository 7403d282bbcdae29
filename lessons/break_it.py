"""Exercises that break the engine: a fault of one line, and the shortest history that shows it.

`python -m lessons break N` makes the N-th fault of lessons/oracle/ in memory and runs the random
histories of oracle.py. It shortens the first failing histories as long as they fail, prints the
trace of the shortest, and asks which invariant broke.
"""

import contextlib
import io
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any

from lessons import score
from lessons.oracle import drafts, oracle, states
from lessons.oracle.mutants import MUTANTS, apply, describe
from lessons.oracle.oracle import INVARIANTS, Action, History, InvariantError
from lessons.show import Question, fill, say, show_answers, show_command, show_question, show_table
from nanovllm.cli.trace.trace import Trace
from nanovllm.engine import block_manager, scheduler
from nanovllm.features.models.hybrid import state_blocks
from nanovllm.features.sampling import ngram

SEEDS = 300  # histories to try
FAILURES = 3  # failing histories that are shortened; the shortest is shown
VARIATIONS = 20  # other requests in place of one, and other engines, that are tried
FAULTS = MUTANTS | states.MUTANTS | drafts.MUTANTS
NAMES = list(FAULTS)
FILES = [f"{mutant.module.__name__.rpartition('.')[2]}.py" for mutant in FAULTS.values()]
# Module of a fault -> the histories that show it, and their keyword argument for the faulty module.
MAKE: dict[Any, tuple[type[History], str]] = {
    block_manager: (History, "managers"),
    scheduler: (History, "schedulers"),
    state_blocks: (states.HybridHistory, "managers"),
    ngram: (drafts.DraftHistory, "ngrams"),
}


# Theme -> its exercises, and the invariants of which each violates one first.
THEMES = {
    "sharing": ((1, 2, 9, 10, 13, 14, 15, 22), "slots owners partition context cached progress"),
    "prefix cache": ((3, 4, 5, 6, 7, 8, 25), "answers context cached index owners progress"),
    "scheduling": ((11, 12, 16, 17, 18, 24), "answers budget oldest progress"),
    "rows and ends": ((19, 20, 21, 23), "answers budget progress returned"),
    "states (elective `state_cache`)": ((26, 27, 28, 29), "context states snapshots state_slots"),
    "drafts (elective `drafts`)": ((30, 31), "answers context cached budget progress"),
}
EASY = (1, 9, 13, 16, 19, 21, 23, 26)
HARD = (3, 4, 5, 8, 10, 14, 20, 25, 29)


@dataclass(frozen=True)
class Attempt:
    """A history with a fault, which can be run again and again."""

    modules: dict[str, Any]  # the keyword argument of `make`: the faulty module
    seed: int
    actions: tuple[Action, ...]
    make: type[History] = History

    def failure(self) -> tuple[int, ...] | None:
        """Run it. Returns its length and complexity if it fails, else None."""
        history = self.make(self.seed, **self.modules)
        if oracle.replay(history, self.actions) is None:
            return None
        tokens = sum(len(seq.token_ids) for seq in history.seqs)
        return history.steps, tokens, len(self.actions), history.async_scheduling

    def variations(self) -> Iterator["Attempt"]:
        """Yield variations: without one of the actions, with other requests, in another engine."""
        actions = self.actions
        for i in reversed(range(len(actions))):
            yield replace(self, actions=actions[:i] + actions[i + 1 :])
        for i, (name, _) in enumerate(actions):
            for seed in range(VARIATIONS if name == "add" else 0):
                yield replace(self, actions=(*actions[:i], (name, seed), *actions[i + 1 :]))
        for seed in range(VARIATIONS):
            yield replace(self, seed=seed)


def shorten(attempt: Attempt) -> tuple[tuple[int, ...], Attempt]:
    """Take variations that fail earlier, until there are none (Zeller 1999, delta debugging)."""
    best = attempt.failure()
    assert best is not None
    for other in attempt.variations():
        length = other.failure()
        if length is not None and length < best:
            return shorten(other)
    return best, attempt


def shortest(modules: dict[str, Any], seeds: Iterable[int], make: type[History]) -> Attempt:
    """Return the shortest history of the first that fail, each of which is shortened.

    Requests with one sample each are tried first: forks and copies make a history harder to read.
    """
    single: Any = type("SingleSamples", (make,), {"sample_counts": (1,)})
    kinds = product((single, make), seeds)
    attempts = (Attempt(modules, i, tuple(oracle.random_actions(i)), kind) for kind, i in kinds)
    failing = (attempt for attempt in attempts if attempt.failure() is not None)
    return min(map(shorten, islice(failing, FAILURES)), key=lambda pair: pair[0])[1]


def show_sequences(history: History) -> None:
    """Print the requests, the output by the model's definition, and the output at the end."""
    rows = []
    for seq in history.seqs:
        prompt = seq.token_ids[: seq.num_prompt]
        want = oracle.answer(prompt, seq.max_length, seq.stop_token_ids, seq.sampling.seed)
        texts = (" ".join(map(str, ids)) for ids in (prompt, want, seq.output_ids))
        samples = sum(other.arrival == seq.arrival for other in history.seqs)
        name = f"{seq.request_id}.{seq.index}" if samples > 1 else seq.request_id  # as in the trace
        rows.append((name, *texts, seq.status.name.lower()))
    say("""The sequences. 0.1, if there is one, is the second sample of request 0 and shares its
        blocks (elective `samples`). What each must get is computed without an engine:""")
    show_table(("sequence", "prompt", "must get", "has got at the end", "and is"), rows)


def as_text(pairs: Iterable[tuple[int, int] | None]) -> str:
    return " ".join("empty" if pair is None else f"{pair[0]}@{pair[1]}" for pair in pairs)


def show_blocks(history: History) -> None:
    """Print the blocks that are owned or cached when the history ends, and the states."""
    runner = history.runner
    rows = []
    for block in history.block_manager.blocks:
        if block.ref_count or block.is_cached:
            held = as_text(runner.memory[runner.slots_of(block.block_id)])
            cached = block.token_ids if block.is_cached else ""
            rows.append((block.block_id, block.ref_count, cached, held))
    say("""The owned or cached blocks at the end: the reference count, the tokens with which it is
        cached, and the content of each slot, token@position:""")
    show_table(("block", "ref_count", "cached as", "holds"), rows)
    if isinstance(history, states.HybridHistory):
        uses = [(s.row, f"row {s.row}, request {s.request_id}") for s in history.scheduler.running]
        snapshots = history.block_manager.snapshots.items()
        uses += [(slot, f"snapshot of block {block_id}") for block_id, slot in snapshots]
        say("""The states at the end, each with all tokens that it has consumed. A state is empty
            if nothing was written to it, or by a step that failed:""")
        consumed = [(*use, as_text(history.runner.states[use[0]] or [None])) for use in uses]
        show_table(("state", "of", "has consumed"), consumed)


def show_attempt(attempt: Attempt) -> InvariantError:
    """Print a history that fails, up to the step that fails. Returns the error."""
    history = attempt.make(attempt.seed, **attempt.modules)
    with Trace(history) as trace:
        error = oracle.replay(history, attempt.actions)
    assert error is not None
    show_sequences(history)
    print(trace, end="\n\n")
    if error.name == "no error":
        say(f"After that, step {history.steps + 1} raises {error.detail}.")
    show_blocks(history)
    return error


def run(which: str | None = None, answers: list[str] | None = None) -> None:
    """Run an exercise, or list all if `which` is None. With `answers`, compare or show answers."""
    if which is None:
        for title, (exercises, _) in THEMES.items():
            print(f"{title[0].upper()}{title[1:]}:")
            for i in exercises:
                level = "easy" if i in EASY else "hard" if i in HARD else "medium"
                print(f"  break {i:2}  {level:6}  a fault in {FILES[i - 1]}")
        return
    if which not in map(str, range(1, len(NAMES) + 1)):
        raise ValueError(f"break takes a number from 1 to {len(NAMES)}, not {which!r}")
    name, file = NAMES[int(which) - 1], FILES[int(which) - 1]
    [(title, names)] = ((t, names) for t, (of, names) in THEMES.items() if int(which) in of)
    mutant = FAULTS[name]
    invariants = [*names.split(), "no error"]
    make, key = MAKE[mutant.module]
    with contextlib.redirect_stdout(io.StringIO() if answers is not None else sys.stdout):
        say(f"""A line of {file} is changed, in memory only. Random requests run on a model. Its
            next token depends on every slot that it reads. This is the shortest failing history of
            those that were tried, up to the step that fails. Tokens are 0, 1 and 2.""")
        error = show_attempt(shortest({key: apply(mutant)}, range(SEEDS), make))
        print("This must hold, after every step or when requests have ended:\n")
        for i, invariant in enumerate(invariants, 1):
            print(fill(INVARIANTS[invariant], f"{i:2}. ", "    "))
        print()
    functions = sorted({m.function for m in FAULTS.values() if m.module is mutant.module})
    # The fault of `_shared_block` cannot be told apart from one of its caller.
    right = mutant.function.replace("_shared_block", "_shared_block or copy_on_write")
    questions = [
        Question(
            "Which of these is the first that was found not to hold?",
            str(invariants.index(error.name) + 1),
            f"{str(error).rstrip('.')}.",
            f"Look at the last step of the trace and at the state after it. The theme is {title}.",
        ),
        Question(
            f"Which function of {file} has the fault: {', '.join(functions)}?",
            right,
            f"{name[0].upper()}{name[1:]}. {describe(mutant)}.",
            "Find the first line that should be different. Which of the functions decides it?",
        ),
    ]
    if answers is None:
        tries = [show_question(questions, number) for number in (1, 2)]
        if all(tries):
            score.record("fault", which, max(tries))
        show_command(questions, f"python -m lessons break {which} --answers")
    else:
        show_answers(questions, answers)
