"""Capture and replay of decode, on a CPU: a stand-in for a graph re-runs what was captured.

What a CUDA graph adds to this is recording; what can go wrong above it can go wrong here: padding,
rows that advance on the device, rows that the host changed in between.
"""

import gc
import itertools
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import faults
import numpy as np
import pytest
import torch
from graphs import capture_with, stand_in

from nanovllm import LLM, SamplingParams
from nanovllm.backends.gpu import graphs as gpu_graphs
from nanovllm.backends.gpu.graphs import CudaCapture, DecodeGraphs, batch_sizes
from nanovllm.config import EngineConfig
from nanovllm.loading.checkpoint import Checkpoint
from nanovllm.loading.make_runner import make_runner
from nanovllm.runner.one_rank import OneRank


def make_llm(path: Path, graphs: bool, **options: object) -> LLM:
    """An LLM, with the stand-in for graphs if asked for; async, as on a GPU."""
    settings = dict(
        dtype="float32",
        device="cpu",
        skip_tokenizer_init=True,
        max_model_len=64,
        num_kv_cache_blocks=400,
        async_scheduling=True,
    )
    with pytest.MonkeyPatch.context() as patch:
        if graphs:
            capture_with(patch, stand_in)
        llm = LLM(str(path), **(settings | options))
    assert hasattr(llm.engine.runner, "graphs") == graphs
    return llm


@pytest.mark.parametrize("maximum", [1, 3, 10, 17, 100, 256, 600])
def test_batch_sizes(maximum: int) -> None:
    sizes = batch_sizes(maximum)
    assert sizes[-1] == maximum
    assert sizes == sorted(set(sizes))
    for num in range(1, maximum + 1):  # padding stays a small share
        size = next(s for s in sizes if s >= num)
        assert size - num < max(16, num / 8), (num, size)


def test_a_replay_writes_one_slot_a_row_and_the_null_block(path: Path) -> None:
    """Padding must not write through the stale table of a row that is free."""
    llm = make_llm(
        path, graphs=True, max_num_seqs=4, async_scheduling=False, attention_backend="sdpa"
    )
    runner = llm.engine.runner
    rows, graphs, cache = runner.rows, runner.graphs, runner.attention.cache
    cache.zero_()
    replay, batches = graphs.replay, []

    def watched(decode_rows: list[int]) -> object:
        before = cache.clone()
        result = replay(decode_rows)
        written = set(
            (cache != before)[:, 0].any(-1).any(2).any(0).flatten().nonzero().flatten().tolist()
        )
        at = rows.positions[decode_rows] - 1
        own = set((rows.block_tables[decode_rows, at // 16] * 16 + at % 16).tolist())
        assert own <= written <= own | {0}, (decode_rows, written, own)
        batches.append(decode_rows)
        return result

    graphs.replay = watched
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (3, 20, 20, 20)]
    llm.generate([[i + 1, i + 2] for i in range(4)], params, use_tqdm=False)
    assert batches.count([1, 2, 3]) > 10  # in the graph of 4, and row 0 is free


def test_rules_are_forgotten_with_their_request(path: Path, monkeypatch) -> None:
    """A row that once had rules costs later requests nothing: no token is sampled twice."""
    llm = make_llm(path, graphs=True, max_num_seqs=4, async_scheduling=False)
    greedy = dict(temperature=0, max_tokens=6, ignore_eos=True)
    ruled = SamplingParams(repetition_penalty=1.5, **greedy)
    llm.generate([[1, 2], [3, 4]], ruled, use_tqdm=False)
    sample, calls = llm.engine.runner.sample, []
    monkeypatch.setattr(llm.engine.runner, "sample", lambda *a: calls.append(a) or sample(*a))
    llm.generate([[1, 2]], SamplingParams(**greedy), use_tqdm=False)  # in one of the rows
    assert [rules for *_, rules in calls] == [None]  # of the prompt; decodes sample in the graph


def test_an_engine_with_graphs_is_freed_at_once(path: Path, monkeypatch) -> None:
    """Its memory must not wait for Python's collector: the next engine may need it."""

    def capture(function: Callable[[], None]) -> Callable[[], None]:
        function()
        return lambda: None  # like a CUDA graph, which does not keep the function that it captured

    def record(decode: Callable, positions: np.ndarray, min_over_ranks: Callable) -> DecodeGraphs:
        return DecodeGraphs(decode, positions, torch.device("cpu"), lambda: capture, min_over_ranks)

    config = EngineConfig(dtype="float32", device="cpu", max_num_seqs=2, num_kv_cache_blocks=4)
    model_config = Checkpoint(path).model_config
    capture_with(monkeypatch, record)
    runner = make_runner(config, model_config, {}, "random", 32, OneRank())
    gone = weakref.ref(runner)
    gc.disable()
    try:
        del runner
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.slow
def test_an_error_at_any_line(path: Path) -> None:
    """A step fails, and all requests go on.

    If rows were not sent when one of them had ended, the same rows are there again with the request
    that is added then.
    """
    prompts, lengths = [[1, 2], [3, 4], [5, 6]], (7, 3, 4)
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    llm = make_llm(path, graphs=True, max_num_seqs=4, async_scheduling=False)
    free_rows = llm.engine.scheduler.free_rows.copy()
    pairs = list(zip(prompts, params, strict=True))
    want = [llm.generate([x], y, use_tqdm=False)[0].outputs[0].token_ids for x, y in pairs]
    engine, found, failures = llm.engine, dict[int, list[int]](), list[str]()

    def action() -> None:
        found.clear()
        failures.clear()
        llm.reset_prefix_cache()
        llm.engine.runner.graphs.decode_rows = None  # each run has the same lines and rows
        engine.scheduler.free_rows = free_rows.copy()
        for pair in pairs[:2]:
            engine.add_request(*pair)
        while engine.has_unfinished_requests():
            try:
                found.update({o.prompt_token_ids[0]: o["token_ids"] for o in engine.step()})
            except ZeroDivisionError:
                failures.append("")
                engine.add_request(*pairs[2])

    def fault() -> None:
        raise ZeroDivisionError

    files = ("backends/gpu/graphs.py",)
    lines = faults.run(action, files)
    assert len(lines) > 30
    for at, line in enumerate(lines):
        faults.run(action, files, at, fault)
        assert [found.get(prompt[0]) for prompt in prompts] == want, line
        assert len(failures) == 1


def test_engines_capture_on_streams_of_their_own(monkeypatch) -> None:
    """torch returns the same streams in turn; a graph that is freed harms others on its stream."""
    numbers = itertools.count()

    class Stream:
        def __init__(self) -> None:
            self.number = next(numbers) % 3

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Stream) and other.number == self.number

        def __hash__(self) -> int:
            return self.number

    stubs = dict(Stream=Stream, graph_pool_handle=int, synchronize=int)
    stubs |= dict(graph=lambda *_, **__: nullcontext(), CUDAGraph=lambda: Mock())
    for name, stub in stubs.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    monkeypatch.setattr(gpu_graphs, "NUM_STREAMS", 3)

    def engine() -> DecodeGraphs:
        decode = lambda rows, order: (rows, order)  # noqa: E731
        return DecodeGraphs(decode, np.zeros(3, np.int64), torch.device("cpu"), CudaCapture)

    first = engine()
    Stream(), Stream()  # of other code
    second, third = engine(), engine()
    assert [each.capture.stream.number for each in (first, second, third)] == [0, 1, 2]
    with pytest.raises(ValueError, match="at most 3 engines .* or set enforce_eager=True"):
        engine()
    del second
    gc.collect()
    assert engine().capture.stream.number == 1
