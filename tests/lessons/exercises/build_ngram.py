"""Checks `propose`, `accept` and `generate`: python -m lessons build ngram --check FILE"""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from build_check import expect, load, same

from lessons.lesson import make_llm
from lessons.lesson02_model import Model, attention
from lessons.oracle.oracle import next_token

propose, accept, generate = load("ngram.py", "propose", "accept", "generate")


@pytest.mark.parametrize(
    ("known", "size", "most", "want"),
    [
        ([5, 1, 2, 3, 4, 1, 2], 2, 3, [3, 4, 1]),
        ([5, 1, 2, 3, 4, 1, 2], 2, 9, [3, 4, 1, 2]),
        ([5, 1, 2, 3, 4, 1, 2], 2, 1, [3]),
        ([5, 1, 2, 3, 4, 1, 2], 2, 0, []),
        ([1, 2, 8, 1, 2, 9, 1, 2], 2, 1, [9]),
        ([1, 2, 9, 1, 2], 2, 1, [9]),
        ([1, 2, 9, 3, 2, 8, 1, 2], 2, 1, [9]),
        ([7, 7, 7], 1, 5, [7]),
        ([7, 7, 7], 2, 5, [7]),
        ([1, 2, 1, 2, 1], 3, 5, [2, 1]),
        ([1, 2, 3], 2, 3, []),
        ([1, 2], 2, 3, []),
        ([1], 2, 3, []),
        ([1, 2, 1], 3, 3, []),
        ([1, 1], 3, 3, []),
    ],
)
def test_propose(known: list[int], size: int, most: int, want: list[int]) -> None:
    given = list(known)
    same(
        propose(known, size, most),
        want,
        f"The drafts after {given}, with size={size}, most={most},",
    )
    same(known, given, "The known tokens, which propose gets,")


def test_propose_in_a_long_text() -> None:
    got = propose([5, 6, 7, *range(10, 1000), 5, 6], 2, 3)
    same(got, [7, 10, 11], "Known are 5, 6, 7, 990 other tokens, 5 and 6. The drafts")


@pytest.mark.parametrize(
    ("drafts", "drawn", "want"),
    [
        ([3, 4, 1], [3, 4, 7, 9], [3, 4, 7]),
        ([3, 4], [3, 4, 5], [3, 4, 5]),
        ([3, 4], [8, 4, 5], [8]),
        ([3, 4, 5], [3, 8, 5, 6], [3, 8]),
        ([3, 4], [8, 3, 4], [8]),
        ([], [6], [6]),
    ],
)
def test_accept(drafts: list[int], drawn: list[int], want: list[int]) -> None:
    what = f"Drafts {drafts}, and {drawn} are drawn: what is kept"
    same(accept(list(drafts), list(drawn)), want, what)


class Recorded:
    """A model with a KV cache, which is the list of its tokens, and the chunks that it computed."""

    def __init__(self, after: Callable[[list[int]], int]) -> None:
        self.after, self.memory = after, list[int]()  # after: known tokens -> the next token
        self.chunks: list[tuple[int, list[int]]] = []  # position and tokens

    def draw(self, ids: list[int], start: int) -> list[int]:
        self.chunks.append((start, list(ids)))
        what = f"Steps (position, tokens): {self.chunks}. The last "
        known = len(self.memory)
        expect(
            0 <= start <= known,
            f"{what}begins at position {start}, but only the positions before {known} are computed.",
        )
        expect(
            len(ids) > 0,
            f"{what}has no tokens. Too many known ones count as computed: a wrong draft does not "
            "compute the token that takes its place.",
        )
        self.memory[start:] = ids
        return [self.after(self.memory[:end]) for end in range(start + 1, start + len(ids) + 1)]


def compare(
    after: Callable[[list[int]], int],
    prompt: list[int],
    max_tokens: int,
    ends: set[int],
    size: int,
    most: int,
) -> int:
    """Compare outputs and steps with the definition. Returns the number of steps."""
    output, known, left = list[int](), list(prompt), max_tokens
    while left and not (output and output[-1] in ends):
        output.append(after(known + output))
        left -= 1
    chunks, computed, drafts = list[tuple[int, list[int]]](), 0, list[int]()
    while len(known) < len(prompt) + len(output):
        chunks.append((computed, known[computed:] + drafts))
        right = (prompt + output)[len(known) :]
        accepted = next((i for i, a in enumerate(drafts) if right[i : i + 1] != [a]), len(drafts))
        computed = len(known) + accepted
        known += right[: accepted + 1]
        left = len(prompt) + max_tokens - len(known)
        drafts = propose(known, size, min(most, left - 1)) if left else []
    model, given = Recorded(after), list(prompt)
    got = generate(model.draw, prompt, max_tokens, ends, size, most)
    what = f"Prompt {given}, max_tokens {max_tokens}, ends {ends}, size {size}, most {most}: "
    same(got, output, f"{what}your steps are {model.chunks}. The output, as without drafts,")
    same(model.chunks, chunks, f"{what}the output is right. The steps (position, tokens)")
    same(prompt, given, f"{what}the prompt that generate gets")
    return len(chunks)


def copy(period: int) -> Callable[[list[int]], int]:
    """A model that repeats the token `period` positions before."""
    return lambda known: known[-period] if len(known) >= period else 0


def test_texts_that_repeat() -> None:
    compare(copy(2), [1, 2], 3, set(), 1, 0)
    steps = compare(copy(3), [1, 2, 3, 1, 2], 12, set(), 2, 4)
    expect(
        steps < 6, f"12 tokens of a text that repeats should take less than 6 steps, not {steps}."
    )
    compare(copy(4), [1, 2, 3, 9, 1, 2], 8, {9}, 2, 4)
    compare(copy(4), [1, 2, 3, 9, 1], 8, {9}, 1, 4)


def test_short_prompts() -> None:
    """The shortest first. The next token is a hash of all tokens, so drafts are often wrong."""

    def after(known: list[int]) -> int:
        return next_token(list(zip(known, range(len(known)), strict=True)), 0)

    for length in range(1, 6):
        for prompt in product(range(3), repeat=length):
            for max_tokens, size, most, ends in product((1, 2, 6), (1, 2), (1, 3), (set(), {2})):
                compare(after, list(prompt), max_tokens, ends, size, most)


@torch.inference_mode()
def test_the_model_copies_a_text() -> None:
    tokenizer, model = make_llm(num_kv_cache_blocks=8).get_tokenizer(), Model()
    count = "Count from 1 to 12\n"
    text = f"{count}{', '.join(map(str, range(1, 13)))}\n\n{count}"

    def after(known: list[int]) -> int:
        return int(model.logits(known, range(len(known)), attention)[-1].argmax())

    steps = compare(after, tokenizer.encode(text), 20, set(), 2, 5)
    print(f"20 tokens in {steps} steps")
