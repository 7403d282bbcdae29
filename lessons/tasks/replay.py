"""Replay: a decode step as a graph, with one launch instead of many.

The task. A decode step launches many kernels, and each launch costs the host time. A graph records
the launches of a step once, and `replay()` repeats them all by one call. It repeats them as they
were recorded: the same number of rows, and tensors at the same addresses. Write `Replays`. Its
constructor captures a graph for each size in `sizes`. `decode` copies its rows to the tensor that
the graphs read, replays the smallest graph that has room for them, and returns their tokens.

Example: for sizes [1, 2, 4], three rows [5, 0, 2] are padded to [5, 0, 2, P], where P is
`padding_row`, and the graph of 4 rows is replayed. The result has three tokens.

What must stay true:
  - `decode` makes one launch, and captures nothing. It gets at most max(sizes) rows.
  - A step changes the rows that it computes: their KV, positions and last tokens. So no row is
    computed twice, and none that is not in `rows`. The padding row belongs to no sequence.
  - A kernel is compiled when it is launched for the first time, which a capture does not allow. So
    each size is run once before it is captured.
  - A list that `decode` has returned does not change later.

Where it goes. DecodeGraphs in nanovllm/backends/gpu/graphs.py. The check uses the model of a GPU in
lessons/device.py: `replay = device.capture(function)` records what a call of `function` launches.

Hints: x[:size] has the address of x, and torch.tensor(...) a new one. x[:n] = y copies to x.
"""

from collections.abc import Callable

from torch import Tensor

from lessons.device import Device


class Replays:
    def __init__(
        self,
        device: Device,
        step: Callable[[Tensor], Tensor],
        sizes: list[int],
        padding_row: int,
    ) -> None:
        """step: rows [S], int64 -> their next tokens [S], int64, by kernels on `device`."""
        raise NotImplementedError("__init__ is to be written; see the top of this file")

    def decode(self, rows: list[int]) -> list[int]:
        raise NotImplementedError("decode is to be written; see the top of this file")
