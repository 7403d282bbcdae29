"""A solution of `python -m lessons build ngram`."""

from collections.abc import Callable


def propose(known: list[int], size: int, most: int) -> list[int]:
    for end in range(len(known) - 1, size - 1, -1):
        if known[end - size : end] == known[-size:]:
            return known[end : end + most]
    return []


def accept(drafts: list[int], drawn: list[int]) -> list[int]:
    number = 0
    while number < len(drafts) and drafts[number] == drawn[number]:
        number += 1
    return drawn[: number + 1]


def generate(
    draw: Callable[[list[int], int], list[int]],
    prompt: list[int],
    max_tokens: int,
    ends: set[int],
    size: int,
    most: int,
) -> list[int]:
    known, drafts, computed = list(prompt), [], 0
    while True:
        drawn = draw(known[computed:] + drafts, computed)
        computed = len(known)
        kept = accept(drafts, drawn[-len(drafts) - 1 :])
        computed += len(kept) - 1
        for token in kept:
            known.append(token)
            if token in ends or len(known) == len(prompt) + max_tokens:
                return known[len(prompt) :]
        left = len(prompt) + max_tokens - len(known)
        drafts = propose(known, size, min(most, left - 1))
