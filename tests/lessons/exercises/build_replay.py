"""Checks `Replays`: python -m lessons build replay --check FILE"""

import random

import torch
from build_check import answer, expect, load
from torch import Tensor

from lessons.device import Device
from lessons.oracle.oracle import next_token

Replays = load("replay.py", "Replays")
PADDING = 6  # the padding row: rows 0 to 5 have sequences
SIZES = [1, 2, 4, 6]


class Rows:
    """Rows of the oracle's sequences on a device: each step adds a token to the rows it computes.

    A size of a step has kernels of its own, as in Triton, where sizes are constants.
    """

    def __init__(self, prompts: list[list[int]]) -> None:
        self.device = Device()
        self.tokens = torch.full((PADDING + 1, 64), -1)
        self.lengths = torch.zeros(PADDING + 1, dtype=torch.int64)
        for row, ids in enumerate(prompts):
            self.tokens[row, : len(ids)] = torch.tensor(ids)
            self.lengths[row] = len(ids)
        self.kernels = {}
        self.computed: list[list[int]] = []  # the rows of each step that ran

    def step(self, rows: Tensor) -> Tensor:
        if len(rows) not in self.kernels:
            self.kernels[len(rows)] = self.make_kernels()
        lengths, new = torch.zeros_like(rows), torch.full_like(rows, -1)  # -1 is no token
        for kernel in self.kernels[len(rows)]:
            self.device.launch(kernel, rows, lengths, new)
        return new

    def make_kernels(self):
        def load_lengths(rows: Tensor, lengths: Tensor, new: Tensor) -> None:
            self.computed.append(rows.tolist())
            lengths.copy_(self.lengths[rows])

        def sample(rows: Tensor, lengths: Tensor, new: Tensor) -> None:
            for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
                ids = self.tokens[row, :length].tolist()
                new[i] = next_token(list(zip(ids, range(len(ids)), strict=True)), 0)

        def store(rows: Tensor, lengths: Tensor, new: Tensor) -> None:
            for row, length, token in zip(rows, lengths, new, strict=True):
                self.tokens[row, min(length, 63)] = token
                self.lengths[row] = min(length + 1, 63)

        return load_lengths, sample, store


PROMPTS = [[row % 3, row // 3, row % 2] for row in range(PADDING)]


class Run:
    """The solution and its sequences. `decode` checks one step."""

    def __init__(self, sizes: list[int] = SIZES) -> None:
        self.rows = Rows(PROMPTS)
        try:
            self.replays = Replays(self.rows.device, self.rows.step, sizes, PADDING)
        except RuntimeError as error:
            expect(False, f"The constructor raises an error: {error}.")
        self.outputs: list[list[int]] = [[] for _ in PROMPTS]
        self.said: list[list[int]] = []
        touched = sorted({row for rows in self.rows.computed for row in rows} - {PADDING})
        expect(
            not touched,
            f"The constructor runs the step for the rows {touched}, which belong to sequences and "
            f"change. It should run it for the padding row, {PADDING}.",
        )

    def decode(self, *rows: int) -> list[int]:
        device, self.rows.computed, before = self.rows.device, [], self.rows.device.launches
        self.said.append(list(rows))
        what = f"Sizes {SIZES}, padding row {PADDING}, after steps of the rows {self.said[:-1]}: "
        what = what.replace(", after steps of the rows []", "")
        try:
            got = self.replays.decode(list(rows))
        except RuntimeError as error:
            expect(False, f"{what}a step of {list(rows)} raises an error: {error}.")
        number = device.launches - before
        expect(
            number == 1,
            f"{what}a step of {list(rows)} makes {number} launches. It should be 1, of a graph.",
        )
        [computed] = self.rows.computed
        want = [*rows, *[PADDING] * (min(n for n in SIZES if n >= len(rows)) - len(rows))]
        expect(
            computed == want,
            f"{what}a step of {list(rows)} should compute the rows {want}, but it computes "
            f"{computed}. A graph reads the tensor with which it was captured.",
        )
        expect(
            isinstance(got, list) and len(got) == len(rows),
            f"{what}a step of {list(rows)} should return a list of {len(rows)} tokens, but it "
            f"returns {got!r}.",
        )
        for row, token in zip(rows, got, strict=True):
            self.outputs[row].append(token)
            number = len(PROMPTS[row]) + len(self.outputs[row])
            wanted = answer(PROMPTS[row], number, frozenset(), 0)
            expect(
                self.outputs[row] == wanted,
                f"{what}after a step of {list(rows)}, row {row} should have got the tokens "
                f"{wanted}, but it has {self.outputs[row]}.",
            )
        return got


def test_one_row() -> None:
    run = Run()
    for _ in range(3):
        run.decode(2)


def test_other_rows() -> None:
    run = Run()
    for rows in ((1, 4), (4, 1), (0, 5)):
        run.decode(*rows)


def test_the_example() -> None:
    Run().decode(5, 0, 2)


def test_padding() -> None:
    run = Run()
    for rows in ((0, 1, 2, 3), (4, 5, 1), (2, 0, 3, 1, 5), (2, 3, 4)):
        run.decode(*rows)


def test_all_sizes_are_captured_at_the_start() -> None:
    run, captured = Run(), []
    run.rows.device.capture = captured.append
    for number in range(1, PADDING + 1):
        run.decode(*range(number))
    expect(not captured, "`decode` captures a graph. All graphs are captured in the constructor.")


def test_sizes_in_any_order() -> None:
    run = Run([4, 6, 1, 2])
    run.decode(0, 1, 2)
    run.decode(3)


def test_results_do_not_change_later() -> None:
    run = Run()
    first = run.decode(0, 1)
    kept = list(first)
    run.decode(2, 3)
    run.decode(0, 1)
    expect(
        first == kept,
        f"A step of [0, 1] returned {kept}. After other steps this list is {first}.",
    )


def test_two_devices() -> None:
    one, other = Run(), Run()
    one.decode(0, 1)
    other.decode(2, 3)
    one.decode(0, 1)


def test_random_steps() -> None:
    for seed in range(20):
        rng, run = random.Random(seed), Run()
        for _ in range(12):
            run.decode(*rng.sample(range(PADDING), rng.randint(1, PADDING)))
