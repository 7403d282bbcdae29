"""A CPU's attention equals plain attention over contiguous tensors and reads no other slots."""

from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint, random_llm
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm import SamplingParams

numba = pytest.importorskip("numba")  # a machine that only runs the GPU's tests may lack it

from attention_cases import BACKENDS, NAN, compare, heads_strategy, make  # noqa: E402

from nanovllm.backends.cpu.attention import NumbaAttention, balanced  # noqa: E402
from nanovllm.backends.cpu.kernels.attention import KEYS  # noqa: E402


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 70)), min_size=1, max_size=9),
    pasts=st.lists(st.integers(0, 99), max_size=12),
    block_size=st.sampled_from([1, 2, 16, 48]),
    heads=heads_strategy,
    seed=st.integers(0, 1000),
    window=st.sampled_from([0, 0, 1, 7, 16, 40]),
)
def test_ragged_batch(
    backend: Any,
    lengths: list[tuple[int, int]],
    pasts: list[int],
    block_size: int,
    heads: tuple[int, int],
    seed: int,
    window: int,
) -> None:
    """Chunks, and after them decodes."""
    lengths = lengths + [(1, past) for past in pasts]
    compare(backend, lengths, block_size, heads, seed, window=window)


@settings(max_examples=100, deadline=None)
@given(
    pasts=st.lists(st.integers(0, 99), min_size=1, max_size=20),
    block_size=st.sampled_from([1, 2, 16, 48]),
    heads=heads_strategy | st.just((18, 2)),
    dim=st.sampled_from([8, 32, 64, 96, 128]),
    seed=st.integers(0, 1000),
)
def test_decodes_in_bfloat16(
    pasts: list[int], block_size: int, heads: tuple[int, int], dim: int, seed: int
) -> None:
    lengths = [(1, past) for past in pasts]
    compare(NumbaAttention, lengths, block_size, heads, seed, dtype=torch.bfloat16, dim=dim)


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (18, 2)])
def test_prompts_and_chunks_in_bfloat16(block_size: int, heads: tuple[int, int]) -> None:
    """Groups of 1 to 64 rows, and contexts that end anywhere in a tile of keys."""
    lengths = [(n, past) for n in (1, 7, 33, 70) for past in (0, 5, 90)] + [(1, 40)]
    compare(NumbaAttention, lengths, block_size, heads, 4, dtype=torch.bfloat16, dim=64)


@pytest.mark.parametrize("window", [0, 1, 50, 130, 300])
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (8, 1)])
@pytest.mark.parametrize(("dim", "block_size"), [(8, 16), (32, 1), (96, 3), (160, 16)])
def test_short_chunks_in_bfloat16(
    heads: tuple[int, int], dim: int, block_size: int, window: int
) -> None:
    """Queries of a group see different numbers of tokens."""
    lengths = [(20, 320), (33, 325), (1, 330), (60, 320), (7, 333), (1, 5)]
    step = compare(
        NumbaAttention,
        lengths,
        block_size,
        heads,
        2,
        {320 // block_size: [0, 1, 2, 3, 4]},
        torch.bfloat16,
        dim,
        window=window,
    )
    shared = whole(320 // block_size * block_size)
    assert prefixes(step) == dict.fromkeys(range(20 + 33 + 1 + 60 + 7), shared)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [1, 16, 200])
def test_nothing_before_a_window_is_read(backend: Any, window: int) -> None:
    """`compare` stores NaN there."""
    compare(
        backend, [(40, 300), (1, 127), (3, 500), (1, 600), (1, 5)], 16, (4, 2), 6, window=window
    )


def test_a_prefix_and_the_rest_in_bfloat16() -> None:
    lengths = [(1, past) for past in (321, 400, 380, 320)]
    for dim in (8, 64):
        step = compare(
            NumbaAttention, lengths, 16, (4, 2), 1, {20: [0, 1, 2, 3]}, torch.bfloat16, dim
        )
        assert prefixes(step) == dict.fromkeys(range(4), whole(320))


def whole(tokens: int) -> int:
    """The tokens of whole segments."""
    return tokens // KEYS * KEYS


def prefixes(step: Any) -> dict[int, int]:
    """Tokens of the step that read a prefix with others -> its length. None reads two."""
    groups = step.prefixes
    read = [
        (int(token), int(length))
        for tokens, lengths in zip(groups.queries, groups.context_lens, strict=True)
        for token, length in zip(tokens, lengths, strict=True)
        if token >= 0
    ]
    assert len(dict(read)) == len(read)
    return dict(read)


@pytest.mark.parametrize("heads", [(4, 2), (8, 1), (3, 3)])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("window", [0, 5, 129, 270])
def test_shared_prefixes_are_read_once(
    block_size: int, heads: tuple[int, int], window: int
) -> None:
    """Two families of a common prefix, two that share too little, and others, some not decoding."""
    long, short = 384 // block_size, 256 // block_size
    pasts = [385, 450, 430, 500, 264, 256 + 1, 274, 310, 17, 40, 20, 0]
    lengths = [(7, 500), (3, 0)] + [(1, past) for past in pasts]
    few = -(-16 // block_size)
    shared = {long: [0, 2, 3, 5], short: [6, 7, 9], few: [10, 11]}
    step = compare(NumbaAttention, lengths, block_size, heads, 5, shared, window=window)
    wanted = dict.fromkeys((10, 11, 13), whole(384)) | dict.fromkeys((14, 15, 17), whole(256))
    assert prefixes(step) == wanted


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_short_chunks_behind_a_shared_prefix(block_size: int) -> None:
    """They share it unless it is short, also with a prompt that computes it in the same step."""
    number, few = 320 // block_size, 64 // block_size
    # The last one, a decode, shares a little with all: they must keep their longer prefix.
    lengths = [(400, 0), (20, 320), (33, 325), (60, 320), (65, 320), (17, 70), (18, 64), (1, 30)]
    shared = {number: [0, 1, 2, 3, 4], few: [5, 6], 16 // block_size: [0, 7]}
    step = compare(NumbaAttention, lengths, block_size, (4, 2), 3, shared)
    wanted = range(400, 400 + 20 + 33 + 60 + 65)
    assert prefixes(step) == dict.fromkeys(wanted, whole(320))


@pytest.mark.parametrize("backend", BACKENDS)
def test_copies_read_before_they_write(backend: Any) -> None:
    made = make(backend, (4, 2), 6, 16)
    made.cache.normal_()
    before = made.cache.clone()
    made.copy_blocks([(1, 2), (2, 3), (4, 1)])
    for source, target in ((1, 2), (2, 3), (4, 1), (4, 4), (5, 5)):
        assert torch.equal(made.cache[:, :, target], before[:, :, source])


def test_the_cache_begins_with_a_page() -> None:
    """Else every row would lie in one cache line too many: 24 instead of 20 ms of a decode step."""
    for num_blocks in (1, 7, 1000):
        assert make(NumbaAttention, (4, 2), num_blocks, 16).cache.data_ptr() % 4096 == 0


def test_threads_share_the_work() -> None:
    """More threads than torch has are never used, and fewer give the same numbers."""
    before = torch.get_num_threads()
    try:
        for threads in (1, before):
            torch.set_num_threads(threads)
            compare(NumbaAttention, [(1, n) for n in range(40)], 16, (4, 2), 0)
            assert numba.get_num_threads() == min(threads, numba.config.NUMBA_NUM_THREADS)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [1, 8, 24, 47])
def test_equal_parts_have_about_the_same_work(count: int, parts: int) -> None:
    """Each group of a prompt reads more keys than the last, the second half three times as many."""
    sizes = np.arange(1, count + 1)
    order = balanced(sizes, parts)
    assert sorted(order) == list(range(count))
    shares = [
        sizes[order[count * p // parts : count * (p + 1) // parts]].sum() for p in range(parts)
    ]
    assert max(shares) - min(shares) <= 2 * count


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 16}, {"block_size": 3}])
def test_nan_in_what_nobody_wrote(tmp_path, options: dict) -> None:
    """The whole engine: a cache full of NaN changes nothing."""
    make_checkpoint(tmp_path)
    prompts = [[1 + (7 * i + n) % 150 for i in range(n)] for n in (1, 5, 16, 31, 32)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    answers = []
    for poison in (0.0, NAN):
        llm = random_llm(tmp_path, **options)
        llm.engine.runner.attention.cache.fill_(poison)
        answers.append([o["token_ids"] for o in llm.generate(prompts, params, use_tqdm=False)])
    assert answers[0] == answers[1]
