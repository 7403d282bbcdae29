"""Packed weights: the same numbers as plain ones, never two copies of the model while packing."""

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import fresh
import pytest
import torch
from checkpoints import make_checkpoint, make_config, random_llm
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm import SamplingParams
from nanovllm.backends.cpu.linear import (
    address,
    is_packed_by,
    linear,
    new_padded,
    packed,
    padded,
    padded_tokens,
    product,
    repacked,
)

has_tiles = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)  # not for Macs
needs_tiles = pytest.mark.skipif(not has_tiles(), reason="no bf16 tiles on this processor")


def weights(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


@needs_tiles
@pytest.mark.parametrize("shape", [(512, 256), (96, 64), (199, 70), (1, 3)])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_equals_plain(shape: tuple[int, int], bias: bool) -> None:
    torch.manual_seed(0)
    weight = weights(*shape)
    tiles, b = packed(weight), weights(shape[0]) if bias else None
    assert tiles.is_mkldnn
    for tokens in (1, 2, 16, 17, 64, 65, 300):
        x = torch.randn(tokens, shape[1]).bfloat16()
        assert torch.equal(product(x, tiles, b), F.linear(x, weight, b))


@pytest.mark.parametrize("tokens", [1, 16, 17, 100])
def test_large_float32_weights_are_packed(tokens: int) -> None:
    weight, x = weights(600, 500, dtype=torch.float32), weights(tokens, 500, dtype=torch.float32)
    blocked, bias = packed(weight), weights(600, dtype=torch.float32)
    assert blocked.is_mkldnn
    wanted = F.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(product(x, blocked, bias).double(), wanted, rtol=1e-5, atol=1e-4)


def test_rows_after_a_tensor_are_its_padding() -> None:
    """They are used where the memory has them, and their content does not matter."""
    weight = packed(weights(600, 500, dtype=torch.float32))
    x = new_padded(weights(1, 1, dtype=torch.float32), 100, 500)
    padded(x).fill_(float("nan"))
    x.copy_(torch.randn(100, 500))
    before = x.clone()
    assert padded(x).data_ptr() == x.data_ptr()
    assert padded(x).shape == padded(before).shape == (padded_tokens(100), 500) == (112, 500)
    assert torch.equal(product(x, weight), product(before, weight))
    rows = torch.randn(150, 500)
    assert padded(rows[:100]).data_ptr() == rows.data_ptr()
    for other in (before, rows[50:], rows[::2][:30]):  # without room, or not contiguous
        assert padded(other).data_ptr() != other.data_ptr()
        assert torch.equal(padded(other)[: len(other)], other)
    assert padded(rows[:16]).shape == (16, 500)


def test_what_stays_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """float16, small odd weights in float32, and any weight where torch lacks the operations."""
    narrow = weights(32, 32)
    for plain in (weights(40, 32, dtype=torch.float32), weights(600, 600, dtype=torch.float16)):
        assert packed(plain) is plain
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    assert packed(narrow) is narrow


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(512, 256), (64, 32), (192, 160)])
@pytest.mark.parametrize("bias", [False, True])
def test_the_kernel_reads_what_torch_packed(
    shape: tuple[int, int], bias: bool, dtype: torch.dtype
) -> None:
    pytest.importorskip("numba")
    from nanovllm.backends.cpu.kernels import parallel
    from nanovllm.backends.cpu.kernels.blocks import blocks_product
    from nanovllm.backends.cpu.kernels.primitives import DTYPE_EXAMPLE

    unit = blocks_product(dtype)
    if unit is None:
        pytest.skip("neither AMX nor AVX512-BF16 on this processor")
    example = DTYPE_EXAMPLE[dtype]
    torch.manual_seed(0)
    weight = weights(*shape, dtype=dtype)
    tiles, b = repacked(packed(weight)), weights(shape[0], dtype=dtype) if bias else None
    assert is_packed_by(unit.width, tiles)
    for rows in (*range(1, 9), 12, 15, 16, 17, 20, 31, 32, 33, 40, 50, 63, 64, 65, 200):
        x, found = weights(rows, shape[1], dtype=dtype), torch.full((rows + 1, shape[0]), 7.0)
        found = found.to(dtype)
        addresses = x.data_ptr(), address(tiles), 0, 0 if b is None else b.data_ptr()
        arguments = (*addresses, found.data_ptr(), rows, *shape[::-1], example)
        parallel.in_parts(unit.blocks, arguments, shape[0] // unit.width, 3)
        limit = (
            dict(atol=0.02, rtol=0.016) if dtype is torch.bfloat16 else dict(atol=1e-4, rtol=1e-5)
        )
        torch.testing.assert_close(found[:rows], F.linear(x, weight, b), **limit)
        assert (found[rows] == 7).all()


@needs_tiles
@pytest.mark.parametrize("width", [32, 64])
def test_what_is_packed_in_another_way(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weights(64, 64)
    tiles = packed(weight)
    assert not is_packed_by(width, weight)
    assert not is_packed_by(width, packed(weights(64, 70)))
    tiny = weight.clone()
    tiny[3], tiny[:, 5] = 1e-39, 0  # numbers that the matrix units take for 0
    assert is_packed_by(width, packed(tiny)) == is_packed_by(width, tiles)
    # As if torch packed in another way: the numbers are those of another weight.
    other = packed(weights(64, 64))
    monkeypatch.setattr("nanovllm.backends.cpu.linear.address", lambda _: address(other))
    assert not is_packed_by(width, tiles)


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 6, 8, 16], indirect=True)
@pytest.mark.parametrize("shape", [(192, 64), (576, 576), (896, 256)])
def test_the_layout_for_any_number_of_threads(threads: int, shape: tuple[int, int]) -> None:
    """oneDNN packs for the number of threads. The unit reads only the layout for one."""
    weight = weights(*shape, dtype=torch.float32)
    tiles = repacked(packed(weight))
    assert is_packed_by(64, tiles)
    assert torch.equal(tiles.to_dense(), weight)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("threads", [1, 2, 8], indirect=True)
def test_layers_are_fused_for_any_number_of_threads(threads: int, tmp_path: Path) -> None:
    pytest.importorskip("numba")
    from nanovllm.backends.cpu.kernels.fused_decode import FusedLayers

    make_checkpoint(tmp_path)
    runner = random_llm(tmp_path, dtype="float32").engine.runner
    assert isinstance(runner.fused_model, FusedLayers)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=needs_tiles)])
@pytest.mark.parametrize("tie", [False, True])
def test_engine_packs(tmp_path: Path, tie: bool, dtype: str) -> None:
    make_checkpoint(tmp_path, tie=tie)
    model = random_llm(tmp_path, dtype=dtype).engine.runner.model
    for module in model.linears():
        outputs, inputs = module.weight.shape
        read_by_unit = outputs % 64 == 0 and inputs % 32 == 0
        assert module.weight.is_mkldnn == (dtype == "bfloat16" or read_by_unit)
    assert not model.embed_tokens.is_mkldnn  # a table that is looked up


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_freed_without_the_garbage_collector(tmp_path: Path, dtype: str) -> None:
    make_checkpoint(tmp_path)
    llm = random_llm(tmp_path, dtype=dtype)
    llm.generate([[5, 6]], SamplingParams(max_tokens=2), use_tqdm=False)
    module = weakref.ref(llm.engine.runner.model.layers[0].mlp.down_proj)
    gc.disable()
    try:
        del llm
        assert module() is None
    finally:
        gc.enable()


MEMORY = """
import math
from pathlib import Path
import torch
from nanovllm.loading.checkpoint import Checkpoint
from nanovllm.backends.cpu import linear
from nanovllm.models.backend import Backend
from nanovllm.models.qwen3 import Qwen3

def private():
    lines = open("/proc/self/status")
    return next(int(l.split()[1]) * 1024 for l in lines if l.startswith("RssAnon"))

peak, inner = 0, linear.packed
def packed(weight):
    global peak
    tiles = inner(weight)
    peak = max(peak, private())
    return tiles

config = Checkpoint(Path("{path}")).model_config
model = Qwen3(config, 512, Backend(torch.device("cpu"), torch.bfloat16))
size = 0
for part in model.checkpoint_tensors():
    part.store(torch.zeros(part.shape))
    size += 2 * math.prod(part.shape)
del part
inner(model.layers[0].mlp.down_proj.weight)
before, linear.packed = private(), packed
for module in model.linears():
    linear.pack(module)
print((peak - before) / size, (private() - before) / size, model.lm_head.weight.nbytes / size)
"""


@pytest.mark.slow
@needs_tiles
def test_packing_holds_one_weight_twice(tmp_path: Path) -> None:
    sizes = dict(hidden_size=1024, intermediate_size=3072, vocab_size=10_000, num_hidden_layers=4)
    make_config(**sizes).save_pretrained(tmp_path)
    done = fresh.run(MEMORY.format(path=tmp_path))
    assert done.returncode == 0, done.stderr
    peak, after, head = map(float, done.stdout.split())
    assert peak < head + 0.1  # the untied head is the largest and comes last
    assert after < 0.1


def test_few_numbers_of_tokens() -> None:
    """oneDNN makes code for each and keeps it: once it was 60 ms of each new prompt, and 1 GiB."""
    numbers = {padded_tokens(n) for n in range(1, 8193)}
    assert len(numbers) <= 112
    for n in range(1, 8193):
        assert n <= padded_tokens(n) <= max(n + 15, n * 17 // 16)
        assert padded_tokens(n) in numbers
        assert padded_tokens(padded_tokens(n)) == padded_tokens(n)


@needs_tiles
def test_products_get_few_numbers_of_tokens(tmp_path: Path) -> None:
    seen = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "_linear_pointwise" in str(function):
                seen.add(len(args[0]))
            return function(*args, **(kwargs or {}))

    make_checkpoint(tmp_path)
    llm = random_llm(tmp_path, dtype="bfloat16")
    # The kernels of the unit do not use oneDNN.
    llm.engine.runner.fused_model = llm.engine.runner.model
    llm.engine.runner.model.backend.linear = linear
    lengths = (3, 18, 83, 100, 117)
    with Watch():
        for n in lengths:
            params = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=0)
            out = llm.generate([[1 + i % 50 for i in range(n)]], params, use_tqdm=False)[0]
            assert len(out.prompt_logprobs or ()) == n
    # Those of the layers and those of the head: all tokens but the last, in parts of 64.
    parts = {min(64, n - 1 - start) for n in lengths for start in range(0, n - 1, 64)}
    assert seen - {1} == {padded_tokens(n) for n in {*lengths, *parts}} - {1}
