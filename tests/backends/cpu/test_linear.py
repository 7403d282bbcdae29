"""Packed weights: torch's products, the same bits for any number of rows, no weight twice."""

import gc
import weakref
from pathlib import Path

import fresh
import pytest
import torch
from checkpoints import make_checkpoint, make_config, random_llm
from torch.nn import functional as F

from nanovllm import SamplingParams
from nanovllm.models.layers import Linear

pytest.importorskip("numba")

from nanovllm.backends.cpu.backend import CpuBackend
from nanovllm.backends.cpu.linear import PackedFloats, linear

DTYPES = [torch.float32, torch.bfloat16]
# Sizes of whole blocks, of parts of them, and of less than a word.
SHAPES = [(512, 256), (64, 32), (199, 70), (65, 33), (1, 3), (130, 1)]


def make_linear(
    outputs: int, inputs: int, dtype: torch.dtype, bias: bool = False
) -> tuple[Linear, torch.Tensor]:
    """A packed layer, and its weight."""
    module = Linear(inputs, {"proj": outputs}, CpuBackend(torch.device("cpu"), dtype), bias)
    weight = torch.randn(outputs, inputs).to(dtype)
    module.weight.copy_(weight)
    if module.bias is not None:
        module.bias.normal_()
    return module, weight


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_products(shape: tuple[int, int], bias: bool, dtype: torch.dtype) -> None:
    """torch's, with NaN in other rows, and the same bits for each row alone."""
    torch.manual_seed(0)
    module, weight = make_linear(*shape, dtype, bias)
    assert torch.equal(module.weight[torch.arange(shape[0])], weight)
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
    module, weight = make_linear(70, 4000, torch.float32)
    x = torch.randn(150, 4000)
    torch.testing.assert_close(linear(x, module), F.linear(x, weight), atol=1e-3, rtol=1e-4)
    assert torch.equal(linear(x, module)[140:], linear(x[140:], module))


@pytest.mark.parametrize("threads", [1, 2, 6], ids=str)
def test_more_threads_than_blocks(threads: int) -> None:
    before = torch.get_num_threads()
    module, _ = make_linear(130, 64, torch.float32)
    x = torch.randn(5, 64)
    wanted = linear(x, module)
    torch.set_num_threads(threads)
    try:
        assert torch.equal(linear(x, module), wanted)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tie", [False, True])
def test_engine_packs(tmp_path, tie: bool, dtype: str) -> None:
    make_checkpoint(tmp_path, tie=tie)
    model = random_llm(tmp_path, dtype=dtype).engine.runner.model
    weights = [module.weight for module in model.linears()]
    assert all(isinstance(weight, PackedFloats) for weight in weights)
    # Small weights share memory, so that they are on huge pages as well.
    assert len({weight.values.untyped_storage().data_ptr() for weight in weights}) == 1
    assert (model.embed_tokens is model.lm_head.weight) == tie


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_freed_without_the_garbage_collector(path: Path, dtype: str) -> None:
    llm = random_llm(path, dtype=dtype)
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
from nanovllm.backends.cpu.backend import CpuBackend
from nanovllm.models.qwen3 import Qwen3

def private():
    lines = open("/proc/self/status")
    return next(int(l.split()[1]) * 1024 for l in lines if l.startswith("RssAnon"))

config = Checkpoint(Path("{path}")).model_config
model = Qwen3(config, 512, CpuBackend(torch.device("cpu"), torch.bfloat16))
parts = [(part, torch.zeros(part.shape, dtype=torch.bfloat16)) for part in model.checkpoint_tensors()]
size = sum(zeros.fill_(1).nbytes for _, zeros in parts)
before, peak = private(), 0
for part, ones in parts:
    part.store(ones)
    peak = max(peak, private())
print((peak - before) / size)
"""


@pytest.mark.slow
def test_loading_holds_no_weight_twice(tmp_path) -> None:
    sizes = dict(hidden_size=1024, intermediate_size=3072, vocab_size=10_000, num_hidden_layers=4)
    make_config(**sizes).save_pretrained(tmp_path)
    done = fresh.run(MEMORY.format(path=tmp_path))
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1.1
