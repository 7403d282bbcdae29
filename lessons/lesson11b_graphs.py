"""Lesson 11b: CUDA graphs.

With overlap the host plans a step while the device computes the one before. But the host also
launches each step, kernel by kernel. Suppose that a decode of 28 layers has 10 kernels in each, and
that the host takes 5 microseconds to launch one. If a kernel takes less, the device waits again. A
CUDA graph records all launches of a step once, and then one call repeats them:

    without    host    launch 1 | launch 2 | launch 3 | ...
               device          | k 1 |    | k 2 |    | k 3 |  ...
    a graph    host    replay |  (plans the next step)
               device          | k 1 | k 2 | k 3 | ...

What must be true of a step, so that a recording of it can be repeated for other rows? A CPU takes
the place of the GPU here: `lessons/device.py` counts what the host launches, records it, and
replays it by one call.
"""

import torch
from torch import Tensor

from lessons.device import Device
from lessons.show import Questions, link, say, show_source, show_table
from nanovllm.backends.gpu.graphs import DecodeGraphs, batch_sizes

ROWS = 8  # max_num_seqs; row 8 is padding
LAUNCH, KERNEL = 5, 2  # microseconds on the host, and on the device


def layer(rows: Tensor, positions: Tensor) -> None:
    """Stands for the kernels of a layer."""


def advance(rows: Tensor, positions: Tensor) -> None:
    positions[rows] += 1


def decode(device: Device, rows: Tensor, positions: Tensor) -> None:
    """Launch the kernels of a step, whose last one adds 1 to the positions of its rows."""
    for kernel in (layer, layer, layer, layer, layer, advance):
        device.launch(kernel, rows, positions)


def run() -> None:
    QUESTIONS.show(1, 2)
    say(f"""With a graph, a step of 280 kernels takes one launch and the time of the kernels:
        {LAUNCH} + 280 * {KERNEL} = {LAUNCH + 280 * KERNEL} microseconds.""")
    device = Device()
    rows = torch.tensor([3, 0, 5])
    positions = torch.zeros(ROWS, dtype=torch.long)
    try:
        device.capture(lambda: decode(device, rows, positions))
    except RuntimeError as error:
        refused = str(error)
    decode(device, rows, positions)
    eager = device.launches
    replay = device.capture(lambda: decode(device, rows, positions))
    positions.zero_()
    other = torch.tensor([1, 2, 4])
    table = []
    for what in (
        "replay; the recording has rows 3, 0 and 5",
        "make a new tensor of the rows 1, 2 and 4, and replay",
        "copy these rows into the old tensor, and replay",
    ):
        if what.startswith("copy"):
            rows.copy_(other)
        before = device.launches
        replay()
        table.append((what, device.launches - before, " ".join(map(str, positions.tolist()))))
    say(f"""A step as in question 2 is recorded. It has {eager} launches, of which the last one adds
        1 to the positions of its rows. The positions of rows 0 to 7 after three replays:""")
    show_table(("what the host does", "launches", "positions"), table)
    say(f"""Fixed addresses: the second replay has computed rows 3, 0 and 5 again, because it knows
        nothing of the new tensor. So every tensor that a kernel reads or writes keeps its address:
        weights, KV cache, inputs, block tables, outputs. Only contents change: if a step has
        other rows than the step before, the engine copies their numbers into the recorded tensor.
        Token ids and positions need no copy, because the step before has left them on the device.

        Sizes: a recording has a fixed number of rows. With max_num_seqs={ROWS} the engine captures
        {", ".join(map(str, batch_sizes(ROWS)))} rows, and fills a step up to the next size with the
        padding row, {ROWS} here, whose block table has only the null block. The rows 3, 0 and 5
        become 3, 0, 5 and {ROWS}, and the token of row {ROWS} is left out.

        Warm-up: each size runs once before it is recorded. To compile a kernel or to initialize a
        library would break the recording, and both happen at the first call with a size. Without
        this, `lessons/device.py` says: {refused!r}.

        Grids: the number of programs of a kernel is recorded too. Attention splits each context
        among several programs (lesson 10b), and contexts grow with each step: a number that was
        right for 100 tokens would leave out keys of longer contexts. So the number of programs
        depends on the number of rows alone. A program reads the length of its row on the device,
        and ends at once if its split is empty.

        A decode is one graph. Of a step with chunks, whose attention depends on the lengths of the
        chunks, only the parts between two attentions are graphs. vLLM calls the two full and
        piecewise CUDA graphs.""")
    show_source(
        link("backends.gpu.graphs.CudaCapture.__call__", "function()"),
        link(DecodeGraphs.replay, "self.padding_row"),
        link(DecodeGraphs.replay, "to_device(rows"),
        link(DecodeGraphs.replay, "self.replays[self.size]()"),
    )
    say("Build it: `python -m lessons build replay`.")


QUESTIONS = Questions(f"""
    A decode has 280 kernels. The host takes {LAUNCH} microseconds to launch one, and the device
    {KERNEL} to compute one, while the host launches the next. How long is the step without a graph,
    in microseconds, rounded to hundreds?
    Answer: 1400. The slower of the two decides: 280 launches of {LAUNCH} microseconds are 1,400.
    The device is busy for 560 of them.
    Hint: Which of them is slower, and how often?

    A step of rows 3, 0 and 5 is recorded. The host makes a new tensor with the rows 1, 2 and 4, and
    replays the recording. Which rows does it compute?
    (a) Rows 1, 2 and 4. (b) Rows 3, 0 and 5. (c) None: the replay raises an error.
    Answer: b. Where the kernels read and write is a part of the recording. What is there may
    change, so the host must write the new rows into the old tensor.
    Hint: How could the recorded kernels know the address of a tensor that did not exist yet?
""")

IN_VLLM = """`CudagraphDispatcher.dispatch` in `v1/cudagraph_dispatcher.py` chooses a graph: by
default a full one for a decode and piecewise ones for other steps, for the sizes in
`cudagraph_capture_sizes`. In the model runner V2 this is `CudaGraphManager` in
`v1/worker/gpu/cudagraph_utils.py`."""
