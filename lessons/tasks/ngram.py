"""Draft and verify: several tokens of a repeating text in one step of the model.

The task. Write `propose`: the drafts are what followed the last `size` known tokens where they
occurred before. Write `accept`: which of the drawn tokens are kept. Write the loop of `generate`.
draw(ids, start) computes the tokens `ids` at the positions start, start + 1, ... and returns the
token that is drawn after each. The first step computes the prompt, without drafts.

Example: known are [5, 1, 2, 3, 4, 1, 2]. For size 2 and most 3, [1, 2] occurred before, so the
drafts are [3, 4, 1]. The chunk is [2, 3, 4, 1]. If the model draws [3, 4, 7, 9], the drafts 3 and 4
are right, and 7 takes the place of the draft 1. 9 followed a wrong token. The result is [3, 4, 7].

What must stay true:
  - The last occurrence before the end counts. There may be fewer drafts than `most`, or none.
  - The output is what the model gives without drafts, at most max_tokens tokens, and it ends with
    the first token in `ends`.
  - A step computes the known tokens that are not computed, then the drafts, also those after an end
    token. If k more tokens may follow, it has at most k - 1 drafts, because a token is drawn after
    the last of them too.
  - The next chunk begins after the last token that is right and computed: in the example with 7, at
    position 9.

In the engine: NgramSpeculation in nanovllm/features/sampling/ngram.py.
"""

from collections.abc import Callable

Draw = Callable[[list[int], int], list[int]]


def propose(known: list[int], size: int, most: int) -> list[int]:
    """The drafts after `known`: what followed the last `size` tokens, at most `most` tokens."""
    raise NotImplementedError("propose is to be written; see the top of this file")


def accept(drafts: list[int], drawn: list[int]) -> list[int]:
    """The tokens that are kept of `drawn`, which has one more than `drafts`."""
    raise NotImplementedError("accept is to be written; see the top of this file")


def generate(
    draw: Draw, prompt: list[int], max_tokens: int, ends: set[int], size: int, most: int
) -> list[int]:
    """The output tokens after a prompt, max_tokens >= 1, with at most `most` drafts in a step."""
    raise NotImplementedError("generate is to be written; see the top of this file")
