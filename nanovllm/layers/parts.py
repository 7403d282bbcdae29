"""parts: elementwise work on many rows, in pieces whose intermediates stay in the cache."""

from collections.abc import Iterable

from torch import Tensor

PART = 1 << 18  # elements of the first tensor


def parts(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """The tensors, which have a row for each token, in runs of rows: all at once if they are few.

    For a prompt of thousands of tokens a CPU gets new pages for each tensor in between, and that
    takes several times as long as the arithmetic. On a GPU it is the calls that cost: all at once.
    """
    first = tensors[0]
    if first.numel() <= PART or first.device.type != "cpu":
        return (tensors,)
    rows = max(1, PART * len(first) // first.numel())
    return zip(*(t.split(rows) for t in tensors), strict=True)
