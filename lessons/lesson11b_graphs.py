"""Lesson 11b: CUDA graphs.

With overlap the host plans a step while the device computes the one before. But the host also
launches each step, kernel by kernel. A decode of a model with 28 layers has about 280 small ones,
and each launch takes the host some microseconds. If a kernel takes less, the device waits again. A
CUDA graph records all launches of a step once, and then one call repeats them:

    without    host    launch 1 | launch 2 | launch 3 | ...
               device          | k 1 |    | k 2 |    | k 3 |  ...
    a graph    host    replay |  (plans the next step)
               device          | k 1 | k 2 | k 3 | ...

What must be true of a step, so that a recording of it can be repeated for other rows? A CPU takes
the place of the GPU here: lessons/device.py counts what the host launches, records it, and replays
it by one call.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from lessons.device import Device
from lessons.lesson import optional
from lessons.show import Questions, link, say, show_source, show_table
from nanovllm.backends.gpu.graphs import DecodeGraphs, batch_sizes

ROWS = 8  # max_num_seqs; row 8 is padding
LAUNCH, KERNEL = 5, 2  # microseconds on the host, and on the device


def read(x: Tensor, rows: Tensor, last_tokens: Tensor) -> None:
    x[:] = last_tokens[rows]


def layer(x: Tensor) -> None:
    x += 1


def record(x: Tensor, rows: Tensor, last_tokens: Tensor, positions: Tensor) -> None:
    last_tokens[rows] = x
    positions[rows] += 1


class Model:
    """A model whose next token is the last one + 4. Tokens and positions stay on the device."""

    def __init__(self, device: Device) -> None:
        self.last_tokens, self.positions = torch.zeros(2, ROWS + 1, dtype=torch.int64)
        self.device, self.sizes = device, list[int]()  # the number of rows of each call

    def decode(self, rows: Tensor, order: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Compute the last tokens of rows [S] -> hidden states and next tokens, [S] both here."""
        self.sizes.append(len(rows))
        x, launch = torch.empty_like(rows), self.device.launch
        launch(read, x, rows, self.last_tokens)
        for _ in range(4):
            launch(layer, x)
        launch(record, x, rows, self.last_tokens, self.positions)
        return x, x

    def warm_up_and_capture(self, function: Callable[[], None]) -> Callable[[], None]:
        function()
        return self.device.capture(function)


def run() -> None:
    QUESTIONS.show(1, 2)
    say(f"""1. With a graph, 280 kernels take one launch and their own time, {LAUNCH} + 280 *
        {KERNEL} = {LAUNCH + 280 * KERNEL} microseconds.""")
    model, rows, positions = Model(Device()), torch.tensor([3, 0, 5]), list[tuple[str, str]]()
    model.decode(rows)
    eager = model.device.launches
    replay = model.device.capture(lambda: model.decode(rows))
    model.positions.zero_()

    def replay_and_show(what: str) -> None:
        replay()
        positions.append((what, " ".join(map(str, model.positions[:ROWS].tolist()))))

    replay_and_show("replay; the recording has rows 3, 0 and 5")
    other = torch.tensor([1, 2, 4])
    replay_and_show("make a new tensor of the rows 1, 2 and 4, and replay")
    rows.copy_(other)
    replay_and_show("copy these rows into the old tensor, and replay")
    say(f"""2. A small model, whose next token is the last one + 4, has the last tokens and
        positions of all rows on a device. A decode is {eager} launches and adds 1 to the positions
        of its rows. The positions of rows 0 to 7 after three replays:""")
    show_table(("what the host does", "positions"), positions)
    say("""Fixed addresses: the second replay has computed rows 3, 0 and 5 again, because it knows
        nothing of the new tensor. So every tensor that a kernel reads or writes keeps its address:
        weights, KV cache, inputs, block tables, outputs. Only contents change: the engine copies
        the rows of each step into the recorded tensor. Positions, last tokens and block tables of
        all rows stay on the device.""")
    model, table = Model(Device()), []
    graphs = DecodeGraphs(
        model.decode,
        np.zeros(ROWS + 1, np.int64),
        torch.device("cpu"),
        lambda: model.warm_up_and_capture,
    )
    for decode_rows in ([2], [2, 4], [3, 0, 5], [7, 3, 0, 5, 1]):
        before = model.device.launches
        _, tokens = graphs.replay(decode_rows)
        computed, launches = graphs.rows[0, : graphs.size].tolist(), model.device.launches - before
        table.append((str(decode_rows), str(computed), len(tokens), launches))
    say(f"""Sizes: a recording has a fixed number of rows. With max_num_seqs={ROWS} the engine
        captures {", ".join(map(str, batch_sizes(ROWS)))} rows, and fills a step up to the next size
        with the padding row, {ROWS} here, whose block table has only the null block. The engine's
        DecodeGraphs with the small model:""")
    show_table(("decode_rows", "rows in the graph", "tokens returned", "launches"), table)
    try:
        cold = Model(Device())
        cold.device.capture(lambda: cold.decode(rows))
    except RuntimeError as error:
        refused = str(error)
    say(f"""{eager} launches have become 1. Warm-up: DecodeGraphs called the model with
        {", ".join(map(str, model.sizes))} rows. Each size runs once before it is recorded, because
        a recording must not compile kernels or initialize libraries. Without this, the model of the
        device says: {refused!r}. The largest size comes first, so that the smaller ones can use
        its memory again.""")
    QUESTIONS.show(3)
    kernels = optional("nanovllm.backends.gpu.kernels.attention")
    splits = [kernels.num_splits(n, 8, 264) for n in (1, 4, 16, 64)] if kernels else []
    say(f"""Grids: the number of programs of a kernel is recorded too, so it may depend on the
        number of rows, but not on the lengths of their contexts. Attention splits each context
        among several programs (lesson 10b). For 1, 4, 16 and 64 rows with 8 KV heads, on a GPU with
        room for 264 programs, the engine's num_splits gives {splits}. Twice as many may start,
        because short contexts have fewer splits: for one row 2 * 264 // 8 = 66, but at most 64. A
        program reads the length of its row on the device, and ends at once if its split is
        empty.""")
    say("""A step with a chunk has another number of tokens each time, and the engine launches it
        one by one, or in pieces between two attentions (backends/gpu/chunk_graphs.py). On a CPU a
        call costs time as well, so one call computes all layers where its kernels allow it.""")
    show_source(
        link("backends.gpu.graphs.CudaCapture.__call__", "function()"),
        link("backends.gpu.graphs.capture_sizes", "sorted(sizes, reverse=True)"),
        link(DecodeGraphs.replay, "self.padding_row"),
        link(DecodeGraphs.replay, "self.replays[self.size]()"),
    )
    say("""Build it: `python -m lessons build replay`. Then lesson 11c looks at all this from the
        side of a user, who waits for tokens.""")


QUESTIONS = Questions(f"""
    A decode has 280 kernels. The host takes {LAUNCH} microseconds to launch one, and the device
    {KERNEL} to compute one, while the host launches the next. How long is the step without a graph,
    in microseconds, rounded to hundreds?
    Answer: 1400. The slower of the two decides: 280 launches of {LAUNCH} microseconds are 1,400.
    The device is busy for 560 of them.
    Hint: Which of them is slower, and how often?

    A step of rows 3, 0 and 5 is recorded. The host makes a new tensor with the rows 1, 2 and 4, and
    replays the recording. Which rows does it compute? (a) Rows 1, 2 and 4. (b) Rows 3, 0 and 5. (c)
    All six.
    Answer: b. Where the kernels read and write is a part of the recording. What is there may
    change, so the host must write the new rows into the old tensor.
    Hint: How could the recorded kernels know the address of a tensor that did not exist yet?

    Why may the grid of attention in a graph not depend on the longest context of the step? (a)
    Contexts grow with each step, and the recorded grid would stay as it was. (b) The longest
    context is not known to the device. (c) All programs must have the same number of keys.
    Answer: a. A grid that was right for 100 tokens would leave out the keys of longer contexts. So
    the grid depends on what the size of the graph fixes, the number of rows.
    Hint: What is the context of a row when the step is recorded, and what is it 1,000 steps later?
""")
