"""Replay: a decode step as a graph, with one launch instead of many.

The task. Write `Replays`. Its constructor captures a graph of `step` for each size in `sizes`.
`decode` copies its rows to the tensor that the graphs read, replays the smallest graph that has
room for them, and returns their tokens.

Example: for sizes [1, 2, 4], three rows [5, 0, 2] are padded to [5, 0, 2, P], where P is
`padding_row`, and the graph of 4 rows is replayed. The result has three tokens.

What must stay true:
  - `decode` makes one launch, and captures nothing. It gets 1 to max(sizes) rows.
  - A step changes the rows that it computes. So `decode` computes each of its rows once and no
    other, and the constructor computes none. The padding row belongs to no sequence: it may be
    computed at any time, and several times.
  - A kernel is compiled when it is launched with a size for the first time, which a capture does
    not allow: run each size once before its capture.
  - A list that `decode` has returned does not change later, and arguments do not change.

In the engine: DecodeGraphs in nanovllm/backends/gpu/graphs.py. Hints: `replay =
device.capture(function)` of lessons/device.py records what a call of `function` launches. A replay
writes its tokens to the tensor that `step` returned in the capture. x[:size] has the address of x,
and torch.tensor(...) a new one. x[:n] = y copies to x.
"""

from collections.abc import Callable

from torch import Tensor

from lessons.device import Device


class Replays:
    def __init__(
        self, device: Device, step: Callable[[Tensor], Tensor], sizes: list[int], padding_row: int
    ) -> None:
        """step: rows [S], int64 -> their next tokens [S], int64, by kernels on `device`."""
        raise NotImplementedError("__init__ is to be written; see the top of this file")

    def decode(self, rows: list[int]) -> list[int]:
        raise NotImplementedError("decode is to be written; see the top of this file")
