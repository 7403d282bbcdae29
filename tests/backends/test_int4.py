"""quantization="int4": both references, the CPU's kernel, engines, memory, errors, grades."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import VOCAB, make_checkpoint, random_llm, weights_of, wrong_by_task
from safetensors.torch import load_file

from nanovllm import LLM, SamplingParams
from nanovllm.backends import int8
from nanovllm.backends.int4 import (
    GROUP,
    Int4Weight,
    dynamic,
    pack,
    quantize,
    quantized,
    unpack,
)
from nanovllm.loading.checkpoint import Checkpoint
from nanovllm.loading.memory import weight_bytes
from nanovllm.models.backend import Backend
from nanovllm.models.qwen3 import Qwen3
from tools.benchmarks import workloads

try:
    import nanovllm.backends.cpu.kernels.int4 as kernels
    from nanovllm.backends.cpu.jit import compiled, has_feature
    from nanovllm.backends.cpu.kernels import product
    from nanovllm.backends.cpu.kernels.llvm.dot_int4 import int4_rows
except ImportError:
    kernels = None

needs_numba = pytest.mark.skipif(kernels is None, reason="needs Numba")
CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def module(
    weight: torch.Tensor, dtype: torch.dtype, bias: bool = False, cls: Any = Int4Weight
) -> SimpleNamespace:
    """What a product sees of a Linear."""
    stored = cls.empty(partial(torch.empty, dtype=dtype), *weight.shape)
    stored.copy_(weight)
    torch.manual_seed(1)
    addend = torch.randn(len(weight)).to(dtype) if bias else None
    return SimpleNamespace(weight=stored, bias=addend)


def test_quantize() -> None:
    """The largest magnitude of a group becomes -8, and the others the nearest number."""
    torch.manual_seed(0)
    x = torch.randn(5, 70) * torch.tensor([1e-3, 1.0, 1e3, 1e-20, 0.0])[:, None]
    values, scale = quantize(x)
    assert (values.dtype, values.shape) == (torch.int8, (5, 3, GROUP))
    assert (scale.dtype, scale.shape) == (torch.float16, (5, 3))
    assert values[:3].amin(2).tolist() == [[-8] * 3] * 3
    assert (values[3:] == 0).all()
    assert (values[:, 2, 70 - 2 * GROUP :] == 0).all()  # the padding
    near = (values * scale.float()[:, :, None]).flatten(1)[:, :70]
    step = scale.float().abs().repeat_interleave(GROUP, 1)[:, :70]
    # A number whose sign differs from the sign of the largest is at most 7 steps large.
    assert ((near - x).abs() <= 1.01 * step)[:3].all()
    assert ((near - x).abs() <= 0.51 * step)[:3].float().mean() > 0.95
    assert near[3:].abs().max() < 1e-19


def test_pack() -> None:
    values = torch.randint(-8, 8, (3, 5, GROUP), dtype=torch.int8)
    packed = pack(values)
    assert (packed.dtype, packed.shape) == (torch.int32, (3, 5, 4))
    assert torch.equal(unpack(packed), values)
    low = packed.view(torch.uint8) & 15
    assert torch.equal(low.int() - 8, values[:, :, :16].int())  # as in Q4_0 of llama.cpp


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_references_are_near_the_product_of_the_weights(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(300, 500), torch.randn(7, 500).to(dtype)
    for bias in (False, True):
        layer = module(weight, dtype, bias)
        wanted = x.float() @ layer.weight.dequantized().float().T
        wanted += layer.bias.float() if bias else 0
        for product, limit in ((int8.weight_only, 0.005), (dynamic, 0.012)):
            found = product(x, layer)
            assert found.dtype == dtype
            assert (found.float() - wanted).norm() / wanted.norm() < limit
        exact = x.float() @ weight.T
        assert 0.05 < (wanted - exact).norm() / exact.norm() < 0.12 or bias


@pytest.mark.parametrize("inputs", [96, 97])
@pytest.mark.parametrize("kind", ["Int4Weight", "PackedInt4"])
def test_a_weight_is_loaded_part_by_part(kind: str, inputs: int) -> None:
    """Like a tensor: split into projections, and looked up by tokens."""
    if kind == "PackedInt4" and kernels is None:
        pytest.skip("needs Numba")
    cls = Int4Weight if kind == "Int4Weight" else kernels.PackedInt4
    torch.manual_seed(0)
    sources = [torch.randn(n, inputs).bfloat16() for n in (300, 7, 1)]
    weight = cls.empty(partial(torch.empty, dtype=torch.bfloat16), 308, inputs)
    assert weight.shape == (308, inputs)
    for part, source in zip(weight.split([300, 7, 1]), sources, strict=True):
        assert part.shape == source.shape
        part.copy_(source)
    values, scale = quantize(torch.cat(sources))
    wanted = (values * scale.float()[:, :, None]).flatten(1)[:, :inputs].bfloat16()
    rows = torch.randint(0, 308, (400,))
    assert torch.equal(weight[rows], wanted[rows])
    assert torch.equal(weight[slice(None)], wanted)
    assert torch.equal(part[torch.tensor([0])], weight[torch.tensor([307])])


# ---- the CPU's kernel ----

SHAPES = [(1, 64, 8), (1, 192, 7), (2, 96, 199), (4, 128, 16), (5, 63, 5), (13, 1000, 37)]
SHAPES += [(70, 64, 3), (130, 256, 130)]


@needs_numba
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_kernel_equals_the_reference(
    shape: tuple[int, int, int], dtype: torch.dtype, bias: bool
) -> None:
    """Up to the order in which float32 rounds: the kernel fuses a product with a sum."""
    torch.manual_seed(0)
    tokens, inputs, outputs = shape
    weight, x = torch.randn(outputs, inputs), torch.randn(tokens, inputs).to(dtype)
    layer = module(weight, dtype, bias, kernels.PackedInt4)
    found, wanted = product.linear(x, layer), dynamic(x, module(weight, dtype, bias))
    assert found.dtype == dtype
    torch.testing.assert_close(
        found, wanted, rtol=2e-5 if dtype is torch.float32 else 8e-3, atol=2e-4
    )
    # The result for a token does not depend on the batch.
    for start, stop in ((0, 1), (tokens // 2, tokens)):
        assert torch.equal(product.linear(x[start:stop].clone(), layer), found[start:stop])


def tiles() -> dict[str, Any]:
    """All tiles that this processor can run."""
    if kernels is None:
        return {}
    found = {"plain": kernels.plain_tile}
    if has_feature("avx2") and has_feature("f16c"):

        @compiled()
        def avx2(sums, x, weight, scale, groups, stride, tokens):
            int4_rows(8, 2, x, stride, weight, scale, groups, sums)
            int4_rows(8, 1, x + 2 * stride, stride, weight, scale, groups, sums + 128)

        found["avx2"] = avx2
    if has_feature("avx512vnni"):
        found["vnni"] = kernels.simd_tile
    return found


@needs_numba
@pytest.mark.parametrize("name", tiles())
def test_sums_of_a_tile_are_exact(name: str) -> None:
    """With scales that are powers of two, also for the largest sums of 16 bits."""
    torch.manual_seed(0)
    groups = 10
    values = torch.randint(-8, 8, (16, groups, GROUP), dtype=torch.int8)
    x = torch.randint(-127, 128, (3, groups * GROUP), dtype=torch.int8)
    values[0], values[1], values[2], x[0], x[1] = 7, -8, 7, 127, -127
    scale = 2.0 ** torch.randint(-9, 3, (16, groups)).half()
    scale[3] *= -1
    weight = kernels.PackedInt4.empty(torch.empty, 16, groups * GROUP)
    weight.store(0, pack(values), scale)
    starts = -8 * x.unflatten(1, (groups, GROUP)).sum(2, dtype=torch.int32)
    rows = torch.zeros((3, product.quantized_bytes(groups * GROUP, GROUP)), dtype=torch.int8)
    header = torch.cat((torch.ones(3, 1, dtype=torch.int32), starts), dim=1).view(torch.int8)
    rows[:, : x.shape[1] + header.shape[1]] = torch.cat((x, header), dim=1)
    sums = np.zeros((3, 16), np.float32)
    addresses = (tensor.data_ptr() for tensor in (rows, weight.values, weight.scale))
    tiles()[name](sums.ctypes.data, *addresses, groups, rows.shape[1], len(x))
    dense = (values.double() * scale.double()[:, :, None]).flatten(1)
    assert torch.equal(torch.from_numpy(sums).double(), x.double() @ dense.T)


# ---- engines ----


def tokens(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [out["token_ids"] for out in llm.generate(prompts, GREEDY, use_tqdm=False)]


@pytest.mark.parametrize("backend", ["sdpa", "numba"])
@pytest.mark.parametrize(("family", "tie"), [("qwen3", False), ("llama", True), ("qwen2", False)])
def test_greedy_tokens_are_the_same(tmp_path: Path, family: str, tie: bool, backend: str) -> None:
    """Whole, chunked, batched and after preemption, in float32."""
    if backend == "numba":
        pytest.importorskip("numba")
    make_checkpoint(tmp_path, family, tie=tie)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, VOCAB, (n,), generator=generator).tolist() for n in (37, 5, 18, 1)]
    make = partial(random_llm, tmp_path, quantization="int4", attention_backend=backend)
    llm = make()
    wanted = [tokens(llm, [prompt])[0] for prompt in prompts]
    assert tokens(llm, prompts) == wanted
    for options in ({"max_num_batched_tokens": 7}, {"num_kv_cache_blocks": 6}):
        llm = make(**options)
        assert tokens(llm, prompts) == wanted
    assert llm.stats()["preemptions"] > 0


@pytest.mark.parametrize("tie", [False, True])
def test_what_an_engine_stores(tmp_path: Path, tie: bool) -> None:
    """Layers in int4, the head in int8, the rest as it is; sizes as they are reported."""
    make_checkpoint(tmp_path, tie=tie)
    llm = random_llm(tmp_path, quantization="int4", dtype="bfloat16")
    runner, stored = llm.engine.runner, weights_of(llm)
    checkpoint = load_file(tmp_path / "model.safetensors")
    for name, weight in stored.items():
        every = torch.arange(len(weight)) if isinstance(weight, torch.Tensor) else None
        if every is not None:
            assert torch.equal(weight, checkpoint[name].bfloat16())
            continue
        every = torch.arange(weight.shape[0])
        if name.endswith("_proj.weight"):
            values, scale = quantize(checkpoint[name])
            wanted = (values * scale.float()[:, :, None]).flatten(1)[:, : weight.shape[1]]
        else:
            values, scale = int8.quantize(checkpoint[name])
            wanted = values * scale[:, None]
        assert torch.equal(weight[every], wanted.bfloat16()), name
    layers = [linear.weight.nbytes for linear in runner.model.linears()]
    others = [weight.nbytes for weight in stored.values() if isinstance(weight, torch.Tensor)]
    assert abs(sum(layers) + sum(others) - weight_bytes(runner.model, runner.backend)) <= 0


def test_sizes_of_known_shapes(tmp_path: Path) -> None:
    """GB in bfloat16 and int4. The head is in int8; a table that is not tied is in bfloat16."""
    for shape, wanted in {"qwen3-0.6b": (1.192, 0.404), "qwen3-4b": (8.045, 2.433)}.items():
        config = Checkpoint(workloads.write_shape(shape, tmp_path)).model_config
        plain = Backend(CPU, torch.bfloat16)
        backends = [plain, quantized(plain)]
        found = [weight_bytes(Qwen3.on_meta(config), backend) / 1e9 for backend in backends]
        assert found == pytest.approx(wanted, abs=2e-3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "float16"}, "'float16'; set dtype='bfloat16'"),
        ({"dtype": "float16", "attention_backend": "sdpa"}, "set dtype='bfloat16'"),
        ({"quantization": "int5"}, "quantization must be one of int8, int4, .*not 'int5'"),
    ],
    ids=str,
)
def test_values_that_do_not_fit(tmp_path: Path, options: dict, words: str) -> None:
    make_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=words):
        random_llm(tmp_path, **{"quantization": "int4", **options})


@pytest.mark.slow
def test_grades() -> None:
    """Most answers of the embedded model are still right; its 3 million weights suffer most."""
    llm = LLM(dtype="bfloat16", device="cpu", quantization="int4")
    found = wrong_by_task(llm).values()
    wrong, total = sum(len(failed) for failed, _ in found), sum(number for _, number in found)
    print(f"{wrong} of {total} answers are wrong in int4")
    assert wrong < total / 3
