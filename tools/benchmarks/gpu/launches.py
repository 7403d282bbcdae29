"""Probes what launches cost: empty kernels, and the products of a decode as a chain.

With a programmatic launch (CUDA C++ Programming Guide, "Programmatic Dependent Launch") a kernel
starts before the previous one has ended. Only what follows `griddepcontrol.wait` sees the results
of the previous kernel, but weights may be loaded before it. Whether that pays depends on the card.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from tools.benchmarks.gpu.probe import empty, gemv
from tools.benchmarks.gpu.products import SHAPE, layer_shapes
from tools.benchmarks.gpu.rows import Row, headline
from tools.benchmarks.gpu.timing import DEVICE, capture, data, seconds
from tools.benchmarks.workloads import SHAPES

NODES = 300


def rows() -> Iterator[Row]:
    """Yield the time of a launch of each kind."""
    programmatic = torch.version.hip is None and torch.cuda.get_device_capability(DEVICE) >= (9, 0)
    yield from empty_kernels(programmatic)
    yield from chain(programmatic)
    if not programmatic:
        yield headline({"note": "no programmatic launches: they need compute capability 9.0"})


def empty_kernels(programmatic: bool) -> Iterator[Row]:
    """Yield the time of an empty kernel, of one program and of one for each multiprocessor."""
    kinds = {"plain": (False, False, False)}
    if programmatic:
        kinds["programmatic"] = (True, False, False)
        kinds["programmatic, triggers after the wait"] = (True, False, True)
        kinds["programmatic, triggers before the wait"] = (True, True, False)
    x, num_sms = data(16), torch.cuda.get_device_properties(DEVICE).multi_processor_count
    for kind, flags in kinds.items():
        row: Row = {"empty kernel": f"empty kernel, {kind}"}
        for programs in (1, num_sms):
            time = seconds([partial(empty, x, programs, *flags)] * NODES)
            row[f"us with {programs} programs"] = 1e6 * time
        yield headline(row)


def chain(programmatic: bool) -> Iterator[Row]:
    """Yield the time of the products of all layers for one row, each of the previous result.

    Raises RuntimeError if a product read its input before it was written.
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
    for kind, pdl, early in (
        ("plain", False, False),
        ("programmatic, loads after the wait", True, False),
        ("programmatic, loads before the wait", True, True),
    ):
        if programmatic or not pdl:
            kinds[kind] = [partial(gemv, *triple, pdl, early) for triple in triples]
    num_bytes = sum(2 * weight.numel() for weight in weights)
    wanted = None
    for kind, calls in kinds.items():
        time = seconds(calls)
        row = {"chain": f"chain of products, {kind}", "launches": len(calls)}
        row |= {"us each": 1e6 * time, "GB/s": num_bytes / len(calls) / time / 1e9}
        yield headline(row)
        if kind != "torch's linear":
            graph = capture(calls)
            for result in results:
                result.fill_(float("nan"))
            graph.replay()
            found = results[-1].clone()
            wanted = found if wanted is None else wanted
            if not torch.equal(found, wanted):
                raise RuntimeError(f"{kind}: a product read its input before it was written")
