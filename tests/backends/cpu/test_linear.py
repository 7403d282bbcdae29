"""Packed weights: torch's products, the same bits for any number of rows, never two models."""

import gc
import weakref
from pathlib import Path

import fresh
import pytest
import torch
from checkpoints import make_checkpoint, make_config, random_llm
from torch.nn import functional as F

from nanovllm import SamplingParams
from nanovllm.models.backend import Backend
from nanovllm.models.layers import Linear

pytest.importorskip("numba")

from nanovllm.backends.cpu.linear import PackedFloats, linear, pack
from nanovllm.backends.cpu.memory import WeightMemory

DTYPES = [torch.float32, torch.bfloat16]
# Sizes of whole blocks, of parts of them, and of less than a word.
SHAPES = [(512, 256), (64, 32), (199, 70), (65, 33), (1, 3), (130, 1)]


def make_linear(outputs: int, inputs: int, dtype: torch.dtype, bias: bool = False) -> Linear:
    module = Linear(inputs, {"proj": outputs}, Backend(torch.device("cpu"), dtype), bias)
    for tensor in (module.weight, module.bias):
        if tensor is not None:
            tensor.normal_()
    return module


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_products(shape: tuple[int, int], bias: bool, dtype: torch.dtype) -> None:
    """torch's, with NaN in other rows, and the same bits for each row alone."""
    torch.manual_seed(0)
    module = make_linear(*shape, dtype, bias)
    weight = module.weight.clone()
    pack(module, WeightMemory())
    assert torch.equal(module.weight.unpack(), weight)
    limits = dict(atol=0.03, rtol=0.016) if dtype is torch.bfloat16 else dict(atol=1e-4, rtol=1e-5)
    x = torch.randn(300, shape[1]).to(dtype)
    whole = linear(x, module)
    torch.testing.assert_close(whole, F.linear(x, weight, module.bias), **limits)
    for rows in (1, 2, 3, 5, 6, 7, 13, 16, 17, 64, 65, 299):
        some = x[:rows].clone()
        some[rows // 2 + 1 :] = torch.nan
        found = linear(some, module)[: rows // 2 + 1]
        assert torch.equal(found, whole[: rows // 2 + 1]), rows


def test_rows_that_do_not_stay_in_the_cache() -> None:
    module = make_linear(70, 4000, torch.float32)
    weight, x = module.weight.clone(), torch.randn(150, 4000)
    pack(module, WeightMemory())
    torch.testing.assert_close(linear(x, module), F.linear(x, weight), atol=1e-3, rtol=1e-4)
    assert torch.equal(linear(x, module)[140:], linear(x[140:], module))


@pytest.mark.parametrize("threads", [1, 2, 6], ids=str)
def test_more_threads_than_blocks(threads: int) -> None:
    before, module = torch.get_num_threads(), make_linear(130, 64, torch.bfloat16)
    pack(module, WeightMemory())
    x = torch.randn(5, 64).bfloat16()
    wanted = linear(x, module)
    torch.set_num_threads(threads)
    try:
        assert torch.equal(linear(x, module), wanted)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tie", [False, True])
def test_engine_packs(tmp_path: Path, tie: bool, dtype: str) -> None:
    make_checkpoint(tmp_path, tie=tie)
    model = random_llm(tmp_path, dtype=dtype).engine.runner.model
    weights = [module.weight for module in model.linears()]
    assert all(isinstance(weight, PackedFloats) for weight in weights)
    # Small weights share memory, so that they are on huge pages as well.
    assert len({weight.values.untyped_storage().data_ptr() for weight in weights}) == 1
    assert isinstance(model.embed_tokens, torch.Tensor)  # a table that is looked up


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
from nanovllm.backends.cpu.memory import WeightMemory
from nanovllm.models.backend import Backend
from nanovllm.models.qwen3 import Qwen3

def private():
    lines = open("/proc/self/status")
    return next(int(l.split()[1]) * 1024 for l in lines if l.startswith("RssAnon"))

config = Checkpoint(Path("{path}")).model_config
model = Qwen3(config, 512, Backend(torch.device("cpu"), torch.bfloat16))
size = 0
for part in model.checkpoint_tensors():
    part.store(torch.zeros(part.shape))
    size += 2 * math.prod(part.shape)
del part
before, peak, memory = private(), 0, WeightMemory()
for module in model.linears():
    linear.pack(module, memory)
    peak = max(peak, private())
print((peak - before) / size, (private() - before) / size, model.lm_head.weight.nbytes / size)
"""


@pytest.mark.slow
def test_packing_holds_one_weight_twice(tmp_path: Path) -> None:
    sizes = dict(hidden_size=1024, intermediate_size=3072, vocab_size=10_000, num_hidden_layers=4)
    make_config(**sizes).save_pretrained(tmp_path)
    done = fresh.run(MEMORY.format(path=tmp_path))
    assert done.returncode == 0, done.stderr
    peak, after, head = map(float, done.stdout.split())
    assert peak < head + 0.1  # the untied head is the largest and comes last
    assert after < 0.1
