"""Checks `Replays`: python -m lessons build replay --check FILE"""

import random

import pytest
import torch
from build_check import answer, expect, load, same
from torch import Tensor

from lessons.device import Device
from lessons.oracle.oracle import next_token

Replays = load("replay.py", "Replays")
PADDING = 6  # the padding row: rows 0 to 5 have sequences
SIZES = [1, 2, 4, 6]
PROMPTS = [[row % 3, row // 3, row % 2] for row in range(PADDING)]


class Rows:
    """Rows of the oracle's sequences on a device: each step adds a token to the rows it computes."""

    def __init__(self, padding: int) -> None:
        self.device = Device()
        # Of each row. Rows that are neither of PROMPTS nor padding belong to nobody.
        self.tokens = [*map(list, PROMPTS), *[[0] for _ in range(PADDING, padding + 1)]]
        self.kernels = self.make_kernels()
        self.computed: list[list[int]] = []  # the rows of each step that ran

    def step(self, rows: Tensor) -> Tensor:
        same(rows.dtype, torch.int64, "The dtype of the rows that `step` gets")
        new = torch.full_like(rows, -1)  # -1 is no token
        for kernel in self.kernels:
            self.device.launch(kernel, rows, new)
        return new

    def make_kernels(self):
        def sample(rows: Tensor, new: Tensor) -> None:
            self.computed.append(rows.tolist())
            for i, row in enumerate(rows):
                ids = self.tokens[row]
                new[i] = next_token(list(zip(ids, range(len(ids)), strict=True)), 0)

        def store(rows: Tensor, new: Tensor) -> None:
            for row, token in zip(rows, new.tolist(), strict=True):
                self.tokens[row].append(token)

        return sample, store


def reason(computed: list[list[int]], rows: list[int], want: list[int], padding: int) -> str:
    """Return why a graph may have computed other rows than `want`, which are `rows` and padding."""
    if len(computed) != 1:
        return "A graph has one step"
    if len(computed[0]) != len(want):
        return f"The smallest graph that has room is the one of size {len(want)}"
    if computed[0][: len(rows)] == rows:
        return f"Only the row {padding} is padding"
    if sorted(computed[0]) == sorted(want):
        return "The graph reads the rows of this step, in their order"
    return "A graph reads the tensor with which it was captured: copy the rows of each step to it"


class Run:
    """The solution and its sequences. `decode` checks one step."""

    def __init__(self, sizes: list[int] = SIZES, padding: int = PADDING, note: str = "") -> None:
        self.note = note
        self.sizes, self.padding, self.rows = sorted(sizes), padding, Rows(padding)
        self.outputs, self.said = [list[int]() for _ in PROMPTS], list[object]()
        self.given, kept = list[int](), [*sizes]  # a caller may give the same list again
        try:
            self.replays = Replays(self.rows.device, self.rows.step, sizes, padding)
        except RuntimeError as error:
            expect(False, f"The constructor raises an error: {error}.")
        same(sizes, kept, "The constructor may not change its argument `sizes`, which")
        touched = sorted({row for rows in self.rows.computed for row in rows} - {padding})
        same(
            touched, [], f"The constructor runs the step for the padding row, {padding}. Other rows"
        )
        self.rows.device.capture = lambda *_: expect(False, "`decode` captures a graph.")

    def decode(self, *rows: int) -> list[int]:
        device, self.rows.computed, before = self.rows.device, [], self.rows.device.launches
        after = f", after steps of the rows {self.said}" if self.said else ""
        what = f"{self.note}Sizes {self.sizes}, padding row {self.padding}{after}: a step of {[*rows]} "
        self.said.append([*rows])
        self.given[:] = rows
        try:
            got = self.replays.decode(self.given)
        except Exception as error:
            expect(False, f"{what}raises an error: {error}.")
        same(device.launches - before, 1, f"{what}replays a graph. The number of launches")
        want = [*rows, *[self.padding] * (min(n for n in self.sizes if n >= len(rows)) - len(rows))]
        why = reason(self.rows.computed, [*rows], want, self.padding)
        computed = f"{what}replays a graph. {why}. The rows that are computed"
        same(self.rows.computed, [want], computed)
        same(self.given, [*rows], f"{what}may not change its argument, which")
        is_right = isinstance(got, list) and len(got) == len(rows)
        expect(is_right, f"{what}should return a list of {len(rows)} tokens, but it is {got!r}.")
        for row, token in zip(rows, got, strict=True):
            self.outputs[row].append(token)
            wanted = answer(
                PROMPTS[row], len(PROMPTS[row]) + len(self.outputs[row]), frozenset(), 0
            )
            own = "A replay writes to the tensor that `step` returned in its capture. "
            own *= token == -1  # nothing has been written there
            said = f"{what}gives the next tokens. {own}The output of row {row}"
            same(self.outputs[row], wanted, said)
        return got


@pytest.mark.parametrize(
    "steps",
    [
        ((2,), (2,), (2,)),
        ((1, 4), (4, 1), (0, 5)),
        ((5, 0, 2),),
        ((0, 1, 2, 3), (4, 5, 1), (2, 0, 3, 1, 5), (2, 3, 4)),
        ((1, 4, 5, 2), (1, 4, 5), (1, 4), (1,)),
        [range(number) for number in range(1, PADDING + 1)],
    ],
)
def test_steps(steps: list[tuple[int, ...]]) -> None:
    run = Run()
    for rows in steps:
        run.decode(*rows)


def test_sizes_in_any_order() -> None:
    run = Run([4, 6, 1, 2], padding=9)
    run.decode(0, 1, 2)
    run.decode(3)


def test_results_do_not_change_later() -> None:
    run = Run()
    first = run.decode(0, 1)
    kept = list(first)
    run.decode(2, 3, 4)
    same(first, kept, "The list that a step of [0, 1] has returned, after another step,")


def test_two_devices() -> None:
    note = "There are two devices, each with its Replays. "
    one, other = Run([1, 4], 9, note), Run([1, 2, 6], note=note)
    one.decode(0, 1, 3)
    other.decode(2, 3, 5)
    one.decode(0, 1, 3)


def test_random_steps() -> None:
    for seed in range(20):
        rng, run = random.Random(seed), Run()
        for _ in range(12):
            run.decode(*rng.sample(range(PADDING), rng.randint(1, PADDING)))
