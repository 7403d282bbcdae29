"""Probes what launches cost: empty kernels, and the products of a decode as a chain.

With a programmatic launch (CUDA C++ Programming Guide, "Programmatic Dependent Launch") a kernel
starts before the previous one has ended. Only what follows `griddepcontrol.wait` sees the results
of the previous kernel, but weights may be loaded before it. Whether that pays depends on the card.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from triton.language.extra import cuda

from nanovllm.backends.gpu.kernels.launch import COMPILE_OPTIONS
from nanovllm.tools.benchmarks.gpu.products import layer_shapes
from nanovllm.tools.benchmarks.gpu.rows import Row, headline
from nanovllm.tools.benchmarks.gpu.timing import DEVICE, data, seconds
from nanovllm.tools.benchmarks.workloads import SHAPES

NODES = 300
SHAPE = "qwen3-0.6b"


@triton.jit
def _empty(x, WAIT: tl.constexpr, TRIGGER: tl.constexpr, TRIGGER_FIRST: tl.constexpr):
    if TRIGGER and TRIGGER_FIRST:
        cuda.gdc_launch_dependents()
    if WAIT:
        cuda.gdc_wait()
    if TRIGGER and not TRIGGER_FIRST:
        cuda.gdc_launch_dependents()


@triton.jit
def _gemv(
    x,
    weight,
    out,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    WAIT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program computes OUTPUTS values of out = weight x, with all of its weights in registers.

    WAIT: for the previous kernel, which wrote x. EARLY: load the weights before that.
    """
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, WIDTH)[None, :]
    pointers = weight + output[:, None] * INPUTS + column
    held = ()
    if EARLY:
        for start in tl.static_range(0, INPUTS, WIDTH):
            held += (tl.load(pointers + start),)
    if WAIT:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    if not EARLY:
        for start in tl.static_range(0, INPUTS, WIDTH):
            held += (tl.load(pointers + start),)
    total = tl.zeros([OUTPUTS, WIDTH], tl.float32)
    for i in tl.static_range(INPUTS // WIDTH):
        values = tl.load(tl.broadcast_to(x + i * WIDTH + column, [OUTPUTS, WIDTH]))
        total += held[i].to(tl.float32) * values.to(tl.float32)
    tl.store(out + output, tl.sum(total, 1).to(out.dtype.element_ty))


def gemv(x: Tensor, weight: Tensor, out: Tensor, wait: bool, early: bool) -> None:
    """Write weight [O, I] times the first I values of x to `out` [O]."""
    outputs, inputs = weight.shape
    tile = dict(OUTPUTS=16 if outputs >= 4096 else 8, WIDTH=min(256, inputs))
    options = dict(WAIT=wait, EARLY=early, num_warps=8) | ({"launch_pdl": True} if wait else {})
    grid = (outputs // tile["OUTPUTS"], 1, 1)
    _gemv[grid](x, weight, out, INPUTS=inputs, **tile, **options, **COMPILE_OPTIONS)


def rows() -> Iterator[Row]:
    """Yield the time of a launch of each kind."""
    programmatic = torch.version.hip is None and torch.cuda.get_device_capability(DEVICE) >= (9, 0)
    yield from empty(programmatic)
    yield from chain(programmatic)
    if not programmatic:
        yield headline({"note": "no programmatic launches: they need compute capability 9.0"})


def empty(programmatic: bool) -> Iterator[Row]:
    """Yield the time of an empty kernel, of one program and of one for each multiprocessor."""
    flags = ("WAIT", "TRIGGER", "TRIGGER_FIRST")
    kinds: dict[str, tuple[bool, bool, bool]] = {"plain": (False, False, False)}
    if programmatic:
        kinds["programmatic, without a wait"] = (False, False, False)
        kinds["programmatic, waits, then triggers"] = (True, True, False)
        kinds["programmatic, triggers, then waits"] = (True, True, True)
    x, num_sms = data(16), torch.cuda.get_device_properties(DEVICE).multi_processor_count
    for kind, values in kinds.items():
        options: dict[str, Any] = dict(zip(flags, values, strict=True))
        if kind != "plain":
            options["launch_pdl"] = True
        row: Row = {"empty kernel": kind}
        for programs in (1, num_sms):
            call = partial(_empty[(programs, 1, 1)], x, **options, **COMPILE_OPTIONS)
            row[f"us with {programs} programs"] = 1e6 * seconds([call] * NODES)
        yield headline(row)


def chain(programmatic: bool) -> Iterator[Row]:
    """Yield the time of the products of all layers for one row, each of the previous result.

    Raises RuntimeError if a product reads its input before it was written.
    """
    layers = SHAPES[SHAPE][2]
    weights = [
        data(*shape).mul_(shape[1] ** -0.5) for _ in range(layers) for shape in layer_shapes(SHAPE)
    ]
    results = [data(len(weight)) for weight in weights]
    inputs = [data(weights[0].shape[1]), *results[:-1]]
    triples = list(zip(inputs, weights, results, strict=True))
    kinds: dict[str, list[Callable[[], Any]]] = {
        "torch's linear": [partial(F.linear, x[None, : w.shape[1]], w) for x, w, _ in triples]
    }
    for kind, wait, early in (
        ("plain", False, False),
        ("programmatic, loads after the wait", True, False),
        ("programmatic, loads before the wait", True, True),
    ):
        if programmatic or not wait:
            kinds[kind] = [partial(gemv, *triple, wait, early) for triple in triples]
    num_bytes = sum(2 * weight.numel() for weight in weights)
    wanted = None
    for kind, calls in kinds.items():
        time = seconds(calls)
        row = {"chain of products": kind, "launches": len(calls), "us per launch": 1e6 * time}
        yield headline(row | {"GB/s": num_bytes / len(calls) / time / 1e9})
        if kind != "torch's linear":
            found = results[-1].clone()
            wanted = found if wanted is None else wanted
            if not torch.equal(found, wanted):
                raise RuntimeError(f"{kind}: a product read its input before it was written")
