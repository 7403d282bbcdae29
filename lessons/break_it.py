"""Exercises that break the engine: a fault of one line, and the shortest history that shows it.

`python -m lessons break N` makes the N-th fault of mutants.py, or one of states.py, drafts.py or
disk.py, in memory and runs the random histories of oracle.py. It shortens the first failing
histories as long as they fail, prints the trace of the shortest, and asks which invariant broke.
"""

import contextlib
import io
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any, NamedTuple

from lessons.oracle import disk, drafts, oracle, states
from lessons.oracle.mutants import MUTANTS, Mutant, apply, describe
from lessons.oracle.oracle import INVARIANTS, Action, History, InvariantError
from lessons.show import Question, fill, say, show_answers, show_command, show_question, show_table
from nanovllm.cli.trace.trace import Trace
from nanovllm.engine import scheduler
from nanovllm.engine.policies import shortest_job_first
from nanovllm.features.memory import disk_cache
from nanovllm.features.models.hybrid import state_blocks
from nanovllm.features.requests import ngram

SEEDS = 300  # histories to try
FAILURES = 3  # failing histories that are shortened; the shortest is shown
VARIATIONS = 20  # other requests in place of one, and other engines, that are tried
FAULTS = MUTANTS | states.MUTANTS | drafts.MUTANTS | disk.MUTANTS
NAMES = list(FAULTS)
# Module of a fault -> the histories that show it, and their keyword argument for the faulty module.
MAKE: dict[Any, tuple[type[History], str]] = {
    scheduler: (History, "schedulers"),
    state_blocks: (states.HybridHistory, "managers"),
    ngram: (drafts.DraftHistory, "ngrams"),
    disk_cache: (disk.DiskHistory, "disks"),
}


class Theme(NamedTuple):
    name: str
    exercises: tuple[int, ...]
    # The invariants that its faults violate first. A reader chooses one of them.
    invariants: tuple[str, ...]


SHARING = ("slots", "owners", "partition", "context", "cached", "progress")
THEMES = (
    Theme("sharing and copies", (1, 2, 9, 10, 13, 14, 15, 22), SHARING),
    Theme(
        "prefix cache",
        (3, 4, 5, 6, 7, 8, 25),
        ("answers", "context", "cached", "index", "owners", "progress", "no error"),
    ),
    Theme(
        "scheduling",
        (11, 12, 16, 17, 18, 24),
        ("answers", "budget", "oldest", "progress", "no error"),
    ),
    Theme("rows and ends", (19, 20, 21, 23), ("answers", "budget", "progress", "returned")),
    Theme(
        "states of linear attention (elective `state_cache`)",
        (26, 27, 28, 29),
        ("answers", "context", "cached", "states", "snapshots", "state slots", "no error"),
    ),
    Theme(
        "drafts (elective `drafts`)",
        (30, 31),
        ("answers", "context", "cached", "budget", "progress", "no error"),
    ),
    Theme(
        "prefix cache on disk (lesson 8)",
        (32, 33),
        ("answers", "context", "cached", "index", "partition", "progress", "no error"),
    ),
)
EASY, HARD = (1, 9, 13, 16, 19, 21, 23, 26), (3, 4, 5, 8, 10, 14, 20, 25, 29)


@dataclass(frozen=True)
class Attempt:
    """A history with a fault, which can be run again and again."""

    modules: dict[str, Any]  # the keyword argument of History: the faulty module
    seed: int
    actions: tuple[Action, ...]
    make: type[History] = History

    def failure(self) -> tuple[int, ...] | None:
        """Run it. Returns its length and complexity if it fails, else None."""
        history = self.make(self.seed, **self.modules)
        try:
            oracle.replay(history, self.actions)
        except InvariantError:
            tokens = sum(len(seq.token_ids) for seq in history.seqs)
            is_sjf = history.scheduler.policy_key.__name__ == shortest_job_first.__name__
            return history.steps, tokens, len(self.actions), history.async_scheduling, is_sjf
        return None

    def trace(self) -> tuple[Trace, History, InvariantError]:
        """Run it again with a Trace, up to the failure. The trace does not name the failure."""
        history = self.make(self.seed, **self.modules)
        with Trace(history) as trace:
            try:
                oracle.replay(history, self.actions)
            except InvariantError as error:
                return trace, history, error
        raise ValueError("this history does not fail")

    def variations(self) -> Iterator["Attempt"]:
        """Yield variations: without one of the actions, with other requests, in another engine."""
        actions = self.actions
        for i in reversed(range(len(actions))):
            yield replace(self, actions=actions[:i] + actions[i + 1 :])
        for i, action in enumerate(actions):
            if action.name == "add":
                for seed in range(VARIATIONS):
                    other = (Action("add", seed),)
                    yield replace(self, actions=actions[:i] + other + actions[i + 1 :])
        for seed in range(VARIATIONS):
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
        is_single = seq.parent is None and all(other.parent is not seq for other in history.seqs)
        name = seq.request_id if is_single else f"{seq.request_id}.{seq.index}"  # as in the trace
        rows.append((name, *texts, seq.status.name.lower()))
    say("""The sequences. 0.1, if there is one, is the second sample of request 0 and shares its
        blocks (elective `samples`). What each must get is computed without an engine:""")
    show_table(("sequence", "prompt", "must get", "has got at the end", "and is"), rows)


def as_text(pairs: Iterable[tuple[int, int] | None]) -> str:
    return " ".join("empty" if pair is None else f"{pair[0]}@{pair[1]}" for pair in pairs)


def show_blocks(history: History) -> None:
    """Print the blocks that are owned or cached when the history ends."""
    size, memory, rows = history.size, history.runner.memory, []
    for block in history.block_manager.blocks:
        if block.ref_count or block.is_cached:
            held = as_text(memory[block.block_id * size : (block.block_id + 1) * size])
            cached = block.token_ids if block.is_cached else ""
            rows.append((block.block_id, block.ref_count, cached, held))
    say("""The owned or cached blocks at the end: the reference count, the tokens with which it is
        cached, and the content of each slot, token@position:""")
    show_table(("block", "ref_count", "cached as", "holds"), rows)


def show_states(history: states.HybridHistory) -> None:
    """Print the states of rows and the snapshots when the history ends."""
    uses = [(s.row, f"row {s.row}, request {s.request_id}") for s in history.scheduler.running]
    snapshots = history.block_manager.snapshots.items()
    uses += [(slot, f"snapshot of block {block_id}") for block_id, slot in snapshots]
    consumed = ((*use, history.runner.states[use[0]].pairs) for use in uses)
    rows = [(*use, "unknown" if p is None else as_text(p) or "nothing") for *use, p in consumed]
    say("""The states at the end, each with all tokens that it has consumed, token@position. A state
        is unknown if nothing was written to it, or by a step that failed:""")
    show_table(("state", "of", "has consumed"), rows)


def show_attempt(attempt: Attempt) -> InvariantError:
    """Print a history that fails, up to the step that fails. Returns the error."""
    trace, history, error = attempt.trace()
    show_sequences(history)
    if isinstance(history, disk.DiskHistory):
        steps = ", ".join(map(str, history.restarts))
        say(f"""After these steps, the prefix cache was saved, emptied and loaded again, as after a
            restart: {steps}. Another request may have run before it was loaded.""")
    if history.size == 1:
        say("Blocks have one slot each: the slot of position p is block_table[p].")
    print(trace, end="\n\n")
    if error.name == "no error":
        say(f"After that, step {history.steps + 1} raises {error.detail}.")
    show_blocks(history)
    if isinstance(history, states.HybridHistory):
        show_states(history)
    return error


def show_failure(mutant: Mutant) -> InvariantError:
    """Print the shortest history that fails with the fault. Returns the error."""
    make, key = MAKE.get(mutant.module, (History, "managers"))
    modules = {key: apply(mutant)}
    attempt = shortest(modules, range(SEEDS), make)
    say("""Random requests run on a model. Its next token depends on every slot that it reads. This
        is the shortest failing history of those that were tried, up to the step that fails. Tokens
        are 0, 1 and 2.""")
    return show_attempt(attempt)


def run(which: str | None = None, answers: list[str] | None = None) -> None:
    """Run an exercise, or list all if `which` is None. With `answers`, compare or show answers."""
    if which is None:
        for theme in THEMES:
            print(f"{theme.name[0].upper()}{theme.name[1:]}:")
            for i in theme.exercises:
                level = "easy" if i in EASY else "hard" if i in HARD else "medium"
                print(f"  break {i:2}  {level:6}  a fault in {file_of(FAULTS[NAMES[i - 1]])}")
        return
    if which not in map(str, range(1, len(NAMES) + 1)):
        raise ValueError(f"break takes a number from 1 to {len(NAMES)}, not {which!r}")
    name = NAMES[int(which) - 1]
    [theme] = (theme for theme in THEMES if int(which) in theme.exercises)
    mutant, file = FAULTS[name], file_of(FAULTS[name])
    with contextlib.redirect_stdout(io.StringIO() if answers is not None else sys.stdout):
        print(f"A line of {file} is changed, in memory only.\n")
        error = show_failure(mutant)
        print("This must hold, after every step or when requests have ended:\n")
        for i, invariant in enumerate(theme.invariants, 1):
            print(fill(INVARIANTS[invariant], f"{i:2}. ", "    "))
        print()
    functions = {m.function for m in FAULTS.values() if m.module is mutant.module}
    function = mutant.function
    if function == "_shared_block":  # its fault cannot be told apart from one of its caller
        function += " or copy_on_write"
    questions = [
        Question(
            "Which of these is the first that was found not to hold?",
            str(theme.invariants.index(error.name) + 1),
            f"{str(error).rstrip('.')}.",
            "Look at the last step of the trace and at the state after it. The theme is "
            f"{theme.name}.",
        ),
        Question(
            f"Which function of {file} has the fault: {', '.join(sorted(functions))}?",
            function,
            f"{name[0].upper()}{name[1:]}. {describe(mutant)}.",
            "Find the first line of the trace or of the tables that should be different. Which of "
            "the functions decides that?",
        ),
    ]
    if answers is None:
        show_question(questions, 1)
        show_question(questions, 2)
        show_command(questions, f"python -m lessons break {which} --answers")
    else:
        show_answers(questions, answers)


def file_of(mutant: Mutant) -> str:
    return f"{mutant.module.__name__.rpartition('.')[2]}.py"
