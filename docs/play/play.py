"""Runs the scheduler and the block manager for index.html, on the oracle model.

No call keeps anything: `run` repeats all steps from the first one, so each change of a request, an
option or the reader's code shows what it would have done. It runs in Pyodide, and in CPython too.
"""

import contextlib
import hashlib
import io
import json
import os
import re
import sys
import traceback
from pathlib import Path
from types import ModuleType

try:
    import xxhash  # noqa: F401
except ImportError:  # it could not be fetched: other hashes, and thus other tokens of the oracle

    def digest(data: bytes, seed: int = 0) -> bytes:
        return hashlib.blake2b(data, digest_size=16, salt=seed.to_bytes(8, "little")).digest()

    sys.modules["xxhash"] = stand_in = ModuleType("xxhash")
    stand_in.xxh3_128_digest = digest
    stand_in.xxh64_intdigest = lambda data, seed: int.from_bytes(digest(data, seed)[:8], "little")

from lessons import break_it
from lessons.oracle.oracle import History, OracleRunner, make_samples
from nanovllm.cli.trace import show
from nanovllm.cli.trace.trace import Trace
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.policies import FIRST
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from tools.simulate.__main__ import use_policy

sys.dont_write_bytecode = True  # a file that is changed twice in a second is read again
LINE = re.compile(r"(?:@(\d+) +)?(.*?)(?: *-> *(\d+))?")
NUM_OUTPUT = 8  # tokens of a request that does not say how many
OUTPUT = "αβγ"  # the texts of the oracle's tokens 0, 1 and 2
OWN = 0x110000  # tokens from here on, after the last character, belong to one request
CODE = "yours.py"
ROOT = Path(break_it.__file__).parents[1]
# Without a model, the times of steps mean nothing: the trace has no lane for them.
WITHOUT_TIMES = "#lanes > :nth-child(5) { display: none; }</style>"


class Play(History):
    """A history with the reader's options and requests. Raises ValueError."""

    def __init__(self, form: dict[str, str]) -> None:
        super().__init__(0)
        self.budget, self.max_num_seqs = int(form["budget"]), int(form["rows"])
        self.num_blocks, self.size = int(form["blocks"]), int(form["size"])
        self.async_scheduling = False
        self.block_manager = BlockManager(self.num_blocks, self.size)
        policy = "fcfs" if form["policy"] == "own" else form["policy"]
        self.scheduler = Scheduler(self.block_manager, self.max_num_seqs, self.budget, policy)
        self.runner = OracleRunner(self.num_blocks, self.size, self.max_num_seqs)
        lines = filter(None, map(str.strip, form["requests"].splitlines()))
        coming = [self.read(line, number) for number, line in enumerate(lines)]
        self.coming = sorted(coming, key=lambda pair: pair[0])
        if not coming:
            raise ValueError("there is no request; write one, such as 12 -> 8")

    def read(self, line: str, number: int) -> tuple[int, Sequence]:
        """Return the step at which a request arrives, and its sequence."""
        step, prompt, num_output = LINE.fullmatch(line).groups()
        tokens = [OWN + number] * int(prompt) if prompt.isdecimal() else [ord(c) for c in prompt]
        length = len(tokens) + int(num_output or NUM_OUTPUT)
        if not len(tokens) < length <= self.num_blocks * self.size or not tokens:
            raise ValueError(
                f"request {number}, {line!r}, has a prompt of {len(tokens)} tokens and {length} in "
                f"all; both have at least one, and {self.num_blocks * self.size} have room"
            )
        return int(step or 1), make_samples(tokens, length, number)[0]

    def advance(self, steps: int) -> None:
        """Run up to this step. If nothing is left to do, the next request arrives earlier."""
        while self.steps < steps and (self.coming or self.scheduler.has_work()):
            now = self.steps + 1 if self.scheduler.has_work() else self.coming[0][0]
            while self.coming and self.coming[0][0] <= max(now, self.steps + 1):
                self.seqs.append(self.coming.pop(0)[1])
                self.scheduler.add(self.seqs[-1])
            self.step()
            self.check()

    def memory(self) -> list[list[str]]:
        """Return a row for each block that was written: number, owners, hashes, slots."""
        rows = [["block", "owners", "hash", "parent"]]
        for block in self.block_manager.blocks[1:]:
            number, cached = block.block_id, block.is_cached
            owners = [s.request_id for s in self.scheduler.running if number in s.block_table]
            state = " ".join(owners) or ("evictable" if cached else "free")
            hashes = [h.hex()[:4] * cached for h in (block.block_hash, block.parent_block_hash)]
            held = self.runner.memory[self.runner.slots_of(number)]
            slots = [f"{text(pair[0])}@{pair[1]}" if pair else "" for pair in held]
            rows += [[str(number), state, *hashes, *slots]] if any(held) else []
        return rows


def text(token: int) -> str:
    name = chr(token) if token < OWN else chr(ord("A") + (token - OWN) % 26)
    return OUTPUT[token] if token < len(OUTPUT) else name


def explain(error: BaseException) -> str:
    """Return what an error says, and the line of the reader's code that raised it."""
    place, kind = "", ""
    while error is not None:
        frames = traceback.TracebackException.from_exception(error)
        lines = [frame.lineno for frame in frames.stack if frame.filename == CODE]
        lines += [frames.lineno] if isinstance(error, SyntaxError) else []
        place = f"line {lines[-1]} of your code: " if lines else place
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        message = error.msg if isinstance(error, SyntaxError) else str(error)
        error = error.__cause__
    return f"{place}{kind}{message}"


def run(form: str) -> str:
    """Run the steps of a form -> what the page shows. Both are JSON."""
    fields, error = json.loads(form), ""
    try:
        play = Play(fields)
    except ValueError as refused:
        return json.dumps({"error": str(refused)})
    trace = Trace(play)
    try:
        if fields["policy"] == "own":
            Path(CODE).write_text(fields["code"])
            use_policy(CODE, play.scheduler)
            trace.options["policy"] = "your code"
        with trace:
            play.advance(int(fields["steps"]))
    except Exception as raised:
        error = explain(raised)
    tokens = {*range(len(OUTPUT)), *(token for seq in play.seqs for token in seq.token_ids)}
    page = show.page(trace.options, trace.events, {token: text(token) for token in tokens})
    page = page.replace("</style>", WITHOUT_TIMES) if trace.num_steps else ""
    keys = {seq.request_id: seq.queue_key[0] for seq in play.scheduler.waiting}
    waiting = [f"{name} (key {'first' if key == FIRST else key})" for name, key in keys.items()]
    found = {"page": page, "steps": trace.num_steps, "memory": play.memory(), "error": error}
    ended = not play.coming and not play.scheduler.has_work()
    return json.dumps(found | {"waiting": ", ".join(waiting), "ended": ended})


def show_fault(number: str, answers: bool) -> str:
    """Return what `python -m lessons break NUMBER` prints, or its answers."""
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        break_it.run(number, [] if answers else None)
    return shown.getvalue()


def stub(task: str) -> str:
    return Path(ROOT, "lessons", "tasks", f"{task}.py").read_text()


def check(task: str, code: str) -> str:
    """Return what the checks of `python -m lessons build TASK --check FILE` print.

    They run in this process, because a browser starts no other. The page can stop it.
    """
    import pytest

    for name in [name for name in sys.modules if name.startswith("build_")]:
        del sys.modules[name]  # they import the solution
    Path(CODE).write_text(code)
    os.environ["SOLUTION"] = CODE
    file = str(ROOT / "tests" / "lessons" / "exercises" / f"build_{task}.py")
    options = ["-xqrN", "--tb=short", "--no-header", "--show-capture=stdout", "--noconftest"]
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        pytest.main([*options, "-p", "no:cacheprovider", "-p", "no:faulthandler", file])
    return shown.getvalue()
