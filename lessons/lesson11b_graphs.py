"""Lesson 11b: CUDA graphs.

With overlap the host plans a step while the device computes the one before. But the host also
launches each step, operator by operator. A decode has hundreds of small kernels, and each launch
takes the host some microseconds. If the kernels take less, the device waits again. A CUDA graph
records all launches of a step once, and then one call repeats them:

    without    host    launch 1 | launch 2 | launch 3 | ...
               device          | k 1 |    | k 2 |    | k 3 |  ...
    a graph    host    replay |  (plans the next step)
               device          | k 1 | k 2 | k 3 | ...

A replay repeats exactly what was recorded: the same kernels, addresses, sizes and grids. This
lesson shows what follows from that. A CPU takes the place of the GPU: lessons/device.py counts what
the host launches, records it, and replays it by one call.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

# torch describes such modes in its documentation, although the module has a private name.
from torch.utils._python_dispatch import TorchDispatchMode

from lessons.device import Device
from lessons.lesson import decode_plan, embedded_config, make_llm, optional, prompt_plan, runner_of
from lessons.pictures import show_lanes
from lessons.show import Questions, link, say, show_source, show_table
from nanovllm.backends.gpu.graphs import CudaCapture, DecodeGraphs, batch_sizes, capture_sizes

ROWS = 8  # max_num_seqs; row 8 is padding
LAUNCH, KERNEL = 5, 2  # microseconds, of a launch on the host, and of a kernel on the device
KV_HEADS, RESIDENT = 8, 264  # of a model, and programs that a GPU runs at a time


class Operators(TorchDispatchMode):
    """Counts the operators that torch runs while it is entered, each at least one launch."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number: int = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += not op.is_view  # a view computes nothing
        return op(*args, **(kwargs or {}))


def embed(x: Tensor, rows: Tensor, last_tokens: Tensor, embedding: Tensor) -> None:
    x[:] = embedding[last_tokens[rows]]


def layer(x: Tensor, weight: Tensor) -> None:
    x += torch.relu(x @ weight)


def sample(tokens: Tensor, x: Tensor, embedding: Tensor) -> None:
    tokens[:] = (x @ embedding.T).argmax(dim=1)


def record(last_tokens: Tensor, positions: Tensor, rows: Tensor, tokens: Tensor) -> None:
    last_tokens[rows] = tokens
    positions[rows] += 1


class Model:
    """A small model on a device, where the last tokens and positions of all rows stay."""

    def __init__(self, device: Device) -> None:
        generator = torch.Generator().manual_seed(0)
        self.embedding, *self.weights = torch.randn(5, 8, 8, generator=generator)
        self.last_tokens, self.positions = torch.zeros(2, ROWS + 1, dtype=torch.int64)
        self.device, self.sizes = device, list[int]()  # the number of rows of each call

    def decode(self, rows: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the last tokens of rows [S] -> hidden states [S, E], next tokens [S]."""
        self.sizes.append(len(rows))
        x, tokens, launch = torch.empty(len(rows), 8), torch.empty_like(rows), self.device.launch
        launch(embed, x, rows, self.last_tokens, self.embedding)
        for weight in self.weights:
            launch(layer, x, weight)
        launch(sample, tokens, x, self.embedding)
        launch(record, self.last_tokens, self.positions, rows, tokens)
        return x, tokens


def count_launches() -> int:
    """Return the operators of a decode of the embedded model in plain torch."""
    runner = runner_of(make_llm(attention_backend="sdpa", num_kv_cache_blocks=4))
    runner.run(prompt_plan([[1, 2, 3]], [[1]]))()
    operators = Operators()
    with operators:
        runner.run(decode_plan(1))()
    return operators.number


def capture_without_warm_up() -> str:
    """Return the error of a capture whose kernels have never run."""
    model, rows = Model(Device()), torch.tensor([0])
    try:
        model.device.capture(lambda: model.decode(rows, rows))
    except RuntimeError as error:
        return str(error)
    raise AssertionError("a capture has compiled a kernel")


def positions_after_replays(model: Model) -> list[tuple[str, str]]:
    """Replay a recording with other rows in two ways -> the positions of all rows after each."""
    rows, table = torch.tensor([3, 0, 5]), list[tuple[str, str]]()
    replay = model.device.capture(lambda: model.decode(rows, rows))
    model.positions.zero_()

    def show(what: str) -> None:
        replay()
        table.append((what, " ".join(map(str, model.positions[:ROWS].tolist()))))

    show("replay; the recording has rows 3, 0 and 5")
    other = torch.tensor([1, 2, 4])
    show("make a new tensor of the rows 1, 2 and 4, and replay")
    rows.copy_(other)
    show("copy these rows into the old tensor, and replay")
    return table


def show_padding(model: Model) -> None:
    """Decode several steps by the engine's DecodeGraphs, and print what they compute."""

    def capture(function: Callable[[], None]) -> Callable[[], None]:
        function()  # to warm up, as CudaCapture does
        return model.device.capture(function)

    positions = np.zeros(ROWS + 1, np.int64)
    graphs = DecodeGraphs(model.decode, positions, torch.device("cpu"), lambda: capture)
    table = []
    for decode_rows in ([2], [2, 4], [3, 0, 5], [7, 3, 0, 5, 1]):
        before = model.device.launches
        _, tokens = graphs.replay(decode_rows)
        computed = graphs.rows[0, : graphs.size].tolist()
        launches = model.device.launches - before
        table.append((str(decode_rows), str(computed), len(tokens), launches))
    show_table(("decode_rows", "rows in the graph", "tokens returned", "launches"), table)


def run() -> None:
    launches, layers = count_launches(), embedded_config().num_layers
    say(f"""A decode of the embedded model, with {layers} layers, runs {launches} operators of
        torch. On a GPU each is at least one launch. Suppose that a launch takes the host {LAUNCH}
        microseconds, and that a kernel takes the device {KERNEL}.""")
    QUESTIONS.show(1)
    without, replayed = launches * LAUNCH, LAUNCH + launches * KERNEL
    say(f"""Without a graph the device has each kernel done before the next is launched, so the step
        takes {launches} * {LAUNCH} = {without:,} microseconds. With a graph it takes one launch
        and the kernels, {LAUNCH} + {launches} * {KERNEL} = {replayed:,}.""")
    lanes = [
        ("host", [(i * LAUNCH, LAUNCH, f"launch {i + 1}", 1) for i in range(6)]),
        ("device", [((i + 1) * LAUNCH, KERNEL, f"{i + 1}", 2) for i in range(6)]),
        ("host, a graph", [(0, LAUNCH, "replay", 1)]),
        ("device", [(LAUNCH + i * KERNEL, KERNEL, f"{i + 1}", 2) for i in range(6)]),
    ]
    show_lanes("Six kernels, launched one by one and as a graph", lanes, "microseconds")
    model, rows = Model(Device()), torch.arange(3)
    model.decode(rows, rows)
    eager = model.device.launches
    QUESTIONS.show(2)
    say(f"""Now a recording. A small model has its last tokens and positions on a device, in tensors
        with an entry for each row. A decode of it is {eager} launches, and a replay is 1. Each
        decode adds 1 to the positions of its rows. Fixed addresses: the positions of rows 0 to 7
        after three replays:""")
    show_table(("what the host does", "positions"), positions_after_replays(model))
    say("""The second replay has computed rows 3, 0 and 5 again: it knows nothing of the new tensor.
        So an engine keeps its inputs in tensors that it never replaces, and copies the rows of each
        step into them. Positions, last tokens and block tables of all rows stay on the device, and
        the kernels read them there.""")
    say(f"""Sizes: a recording has a fixed number of rows. With max_num_seqs={ROWS} the engine
        captures {", ".join(map(str, batch_sizes(ROWS)))} rows, and fills a step up to the next size
        with the padding row, {ROWS} here, whose block table has only the null block. The engine's
        DecodeGraphs with the small model:""")
    model = Model(Device())
    show_padding(model)
    say(f"""{eager} launches have become 1. Warm-up: DecodeGraphs called the model with
        {", ".join(map(str, model.sizes))} rows. Each size runs once before it is recorded, because
        a recording must not compile kernels or initialize libraries. Without this, the model of the
        device says: {capture_without_warm_up()!r}. The largest size comes first, so that the
        smaller ones can use its memory again.""")
    QUESTIONS.show(3)
    kernels: Any = optional("nanovllm.backends.gpu.kernels.attention")
    if kernels is not None:
        splits = {n: kernels.num_splits(n, KV_HEADS, RESIDENT) for n in (1, 4, 16, 64)}
        say(f"""Grids: the number of programs of a kernel is recorded too, so it may depend on the
            number of rows, but not on the lengths of their contexts. Attention splits each context
            among several programs (lesson 10b). With {KV_HEADS} KV heads and room for {RESIDENT}
            programs the engine starts this number of splits, whatever the lengths are. A program
            reads the length of its row on the device, and ends at once if its split is empty:""")
        show_table(("rows", "splits of each context"), splits.items())
        show_source(link(kernels.num_splits))
    say("""A step with a chunk has another number of tokens each time, and the engine launches it
        one by one, or in pieces between two attentions (backends/gpu/chunk_graphs.py). On a CPU a
        call costs time as well, so one call computes all layers where its kernels allow it.""")
    show_source(
        link(CudaCapture.__call__, "function()"),
        link(capture_sizes, "sorted(sizes, reverse=True)"),
        link(DecodeGraphs.replay, "self.padding_row"),
        link(DecodeGraphs.replay, "self.replays[self.size]()"),
    )
    say("""Build it: `python -m lessons build replay`. Then lesson 11c looks at all this from the
        side of a user, who waits for tokens.""")


QUESTIONS = Questions(f"""
    A decode has 279 kernels. The host takes {LAUNCH} microseconds to launch one, and the device
    {KERNEL} to compute one, while the host launches the next. How long is the step, in
    microseconds, rounded to hundreds?
    Answer: 1400. The slower of the two decides: 279 launches of {LAUNCH} microseconds are 1,395.
    The device is busy for 558 of them.
    Hint: Which of them is slower, and how often?

    A step of rows 3, 0 and 5 is recorded. The host makes a new tensor with the rows 1, 2 and 4, and
    replays the recording. Which rows does it compute?
    (a) Rows 1, 2 and 4.
    (b) Rows 3, 0 and 5.
    (c) All six.
    Answer: b. Where the kernels read and write is a part of the recording. What is there may
    change, so the host must write the new rows into the old tensor.
    Hint: How could the recorded kernels know the address of a tensor that did not exist yet?

    Why may the grid of attention in a graph not depend on the longest context of the step?
    (a) Contexts grow with each step, and the recorded grid would stay as it was.
    (b) The longest context is not known to the device.
    (c) All programs must have the same number of keys.
    Answer: a. A grid that was right for 100 tokens would leave out the keys of longer contexts. So
    the grid depends on what the size of the graph fixes, the number of rows.
    Hint: What is the context of a row when the step is recorded, and what is it 1,000 steps later?
""")
