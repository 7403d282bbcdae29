"""quantization="int8": both references, the CPU's kernel, engines, memory, errors, grades."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import fresh
import numpy as np
import pytest
import torch
from checkpoints import VOCAB, make_checkpoint, random_llm, weights_of, wrong_by_task
from safetensors.torch import load_file

from nanovllm import LLM, SamplingParams
from nanovllm.backends.int8 import (
    Int8Weight,
    dynamic,
    integer_product,
    quantize,
    quantized,
    weight_only,
)
from nanovllm.loading.checkpoint import Checkpoint
from nanovllm.loading.memory import weight_bytes
from nanovllm.models.backend import Backend
from nanovllm.models.qwen3 import Qwen3
from tools.benchmarks import workloads

try:
    import nanovllm.backends.cpu.kernels.int8 as kernels
    from nanovllm.backends.cpu.kernels import product
    from nanovllm.backends.cpu.kernels.fused_decode import FusedLayers
except ImportError:
    kernels = None

needs_numba = pytest.mark.skipif(kernels is None, reason="needs Numba")
CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def module(weight: torch.Tensor, dtype: torch.dtype, bias: bool = False) -> SimpleNamespace:
    """What a product sees of a Linear."""
    stored = Int8Weight.empty(partial(torch.empty, dtype=dtype), *weight.shape)
    stored.copy_(weight)
    addend = torch.randn(len(weight)).to(dtype) if bias else None
    return SimpleNamespace(weight=stored, bias=addend)


def packed(layer: SimpleNamespace) -> SimpleNamespace:
    """The same for the CPU's kernel."""
    weight = layer.weight
    stored = kernels.PackedWeight.empty(partial(torch.empty, dtype=weight.dtype), *weight.shape)
    stored.store(0, weight.values, weight.scale)
    return SimpleNamespace(weight=stored, bias=layer.bias)


def integers(*shape: int) -> torch.Tensor:
    """Random integers that are quantized to themselves, because 127 is in every row."""
    x = torch.randint(-127, 128, shape).float()
    x[:, shape[1] // 2] = 127
    return x


def test_quantize() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 70) * torch.tensor([1e-3, 1.0, 1e4, 1e-20, 0.0])[:, None]
    values, scale = quantize(x)
    assert (values.dtype, scale.dtype) == (torch.int8, torch.float32)
    assert values[:4].abs().amax(1).tolist() == [127] * 4
    assert (values[4] == 0).all()
    torch.testing.assert_close(scale[:4], x[:4].abs().amax(1) / 127)
    assert ((values * scale[:, None] - x).abs() <= 0.5001 * scale[:, None]).all()
    values, scale = quantize(torch.tensor([[127, 0.5, 1.5, 2.5, -0.5, -1.5, -127]]))
    assert values.tolist() == [[127, 0, 2, 2, 0, -2, -127]]  # ties to even
    assert scale.tolist() == [1]
    spoiled = torch.tensor([[1, float("nan")], [1, 2], [1, float("inf")]])
    assert quantize(spoiled)[1].isfinite().tolist() == [False, True, False]


@pytest.mark.parametrize("inputs", [1, 1023, 1024, 3000])
def test_the_product_of_integers_is_exact(inputs: int) -> None:
    torch.manual_seed(0)
    x = torch.randint(-127, 128, (3, inputs), dtype=torch.int8)
    weight = torch.randint(-127, 128, (5, inputs), dtype=torch.int8)
    x[0], weight[0], weight[1] = 127, 127, -127
    assert torch.equal(integer_product(x, weight).long(), x.long() @ weight.long().T)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_references_are_near_the_product_of_the_weights(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(300, 500), torch.randn(7, 500).to(dtype)
    for bias in (False, True):
        layer = module(weight, dtype, bias)
        wanted = x.float() @ weight.T + (layer.bias.float() if bias else 0)
        for product, limit in ((weight_only, 0.012), (dynamic, 0.017)):
            found = product(x, layer)
            assert found.dtype == dtype
            assert (found.float() - wanted).norm() / wanted.norm() < limit


@pytest.mark.parametrize("inputs", [96, 97])
@pytest.mark.parametrize("kind", ["Int8Weight", "PackedWeight"])
def test_a_weight_is_loaded_part_by_part(kind: str, inputs: int) -> None:
    """Like a tensor: split into projections, and looked up by tokens."""
    if kind == "PackedWeight" and kernels is None:
        pytest.skip("needs Numba")
    cls = Int8Weight if kind == "Int8Weight" else kernels.PackedWeight
    torch.manual_seed(0)
    sources = [torch.randn(n, inputs).bfloat16() for n in (300, 7, 1)]
    weight = cls.empty(partial(torch.empty, dtype=torch.bfloat16), 308, inputs)
    assert weight.shape == (308, inputs)
    for part, source in zip(weight.split([300, 7, 1]), sources, strict=True):
        assert part.shape == source.shape
        part.copy_(source)
    values, scale = quantize(torch.cat(sources))
    rows = torch.randint(0, 308, (400,))
    assert torch.equal(weight[rows], (values * scale[:, None]).bfloat16()[rows])
    assert torch.equal(part[torch.tensor([0])], weight[torch.tensor([307])])
    if kind == "Int8Weight":
        assert torch.equal(weight.values, values)
        assert torch.equal(weight[rows], weight.dequantized()[rows])


# ---- the CPU's kernel ----

SHAPES = [
    (1, 64, 8),
    (1, 192, 7),
    (2, 96, 199),
    (4, 128, 16),
    (5, 63, 5),
    (7, 1000, 37),
    (70, 64, 3),
    (130, 256, 130),
]


@needs_numba
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_kernel_equals_the_reference(
    shape: tuple[int, int, int], dtype: torch.dtype, bias: bool
) -> None:
    torch.manual_seed(0)
    tokens, inputs, outputs = shape
    layer = module(torch.randn(outputs, inputs), dtype, bias)
    x = torch.randn(tokens, inputs).to(dtype)
    found = product.linear(x, packed(layer))
    assert found.dtype == dtype
    assert torch.equal(found, dynamic(x, layer))
    # The result for a token does not depend on the batch.
    for start, stop in ((0, 1), (tokens // 2, tokens)):
        assert torch.equal(product.linear(x[start:stop].clone(), packed(layer)), found[start:stop])


@needs_numba
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_integers_of_the_kernel_are_exact(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    tokens, inputs, outputs = shape
    weight, x = integers(outputs, inputs), integers(tokens, inputs)
    x[0], weight[0], weight[-1] = 127, 127, -127
    layer = module(weight, torch.float32)
    assert set(layer.weight.scale.tolist()) == {1}
    found = product.linear(x, packed(layer))
    assert torch.equal(found.double(), x.double() @ weight.double().T)


@needs_numba
@pytest.mark.parametrize("name", ["plain", "avx2"])
@pytest.mark.parametrize("tokens", [1, 2])
def test_tiles_without_vnni(name: str, tokens: int) -> None:
    if name == "avx2" and not kernels.HAS_AVX2:
        pytest.skip("this processor has no AVX2")
    torch.manual_seed(0)
    x, weight = (torch.randint(-127, 128, (n, 320), dtype=torch.int8) for n in (tokens, 64))
    stored = packed(module(weight.float(), torch.float32)).weight
    stored.store(0, weight, torch.ones(64))
    sums = np.ones((tokens, 64), np.int32)
    tile = getattr(kernels, f"{name}_tile")
    tile(sums.ctypes.data, x.data_ptr(), stored.values.data_ptr(), 80, 320, tokens)
    assert torch.equal(torch.from_numpy(sums).long(), x.long() @ (weight.long() + 128).T + 1)


@needs_numba
def test_nan_stays_nan() -> None:
    layer, x = module(torch.randn(9, 64), torch.float32), torch.randn(3, 64)
    x[1, 5] = float("nan")
    for found in (product.linear(x, packed(layer)), dynamic(x, layer)):
        assert found[1].isnan().all()
        assert not found[[0, 2]].isnan().any()


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
    make = partial(random_llm, tmp_path, quantization="int8", attention_backend=backend)
    llm = make()
    wanted = [tokens(llm, [prompt])[0] for prompt in prompts]
    assert tokens(llm, prompts) == wanted
    for options in ({"max_num_batched_tokens": 7}, {"num_kv_cache_blocks": 6}):
        llm = make(**options)
        assert tokens(llm, prompts) == wanted
    assert llm.stats()["preemptions"] > 0


@pytest.mark.parametrize("tie", [False, True])
def test_what_an_engine_stores(tmp_path: Path, tie: bool) -> None:
    """Every weight of the checkpoint, rounded from its own numbers; sizes as they are reported."""
    make_checkpoint(tmp_path, tie=tie)
    llm = random_llm(tmp_path, quantization="int8", dtype="bfloat16")
    runner, stored = llm.engine.runner, weights_of(llm)
    checkpoint = load_file(tmp_path / "model.safetensors")
    for name, weight in stored.items():
        if "norm" in name or (name.startswith("model.embed") and not tie):
            assert torch.equal(weight, checkpoint[name].bfloat16())
        else:
            values, scale = quantize(checkpoint[name])
            found = weight[torch.arange(len(values))]
            assert torch.equal(found, (values * scale[:, None]).bfloat16()), name
    layers = [linear.weight.nbytes for linear in runner.model.linears()]
    others = [weight.nbytes for weight in stored.values() if isinstance(weight, torch.Tensor)]
    size = sum(layers) + sum(others)
    assert size == weight_bytes(runner.model, runner.backend)
    plain = weight_bytes(runner.model, Backend(CPU, torch.bfloat16))
    assert plain == 2 * sum(tensor.numel() for tensor in checkpoint.values())
    assert isinstance(runner.fused_model, FusedLayers)


def test_sizes_of_known_shapes(tmp_path: Path) -> None:
    """GB in bfloat16 and int8. The table of a head that is not tied stays in bfloat16."""
    sizes = {"qwen3-0.6b": (1.192, 0.598), "qwen3-8b": (16.381, 8.819)}
    for shape, wanted in sizes.items():
        config = Checkpoint(workloads.write_shape(shape, tmp_path)).model_config
        plain = Backend(CPU, torch.bfloat16)
        backends = [plain, quantized(plain)]
        found = [weight_bytes(Qwen3.on_meta(config), backend) / 1e9 for backend in backends]
        assert found == pytest.approx(wanted, abs=2e-3)


MEMORY = """
import ctypes
from functools import partial
from pathlib import Path
from threading import Event, Thread
import torch
from nanovllm import LLM

def private():
    lines = open("/proc/self/status")
    return next(int(l.split()[1]) * 1024 for l in lines if l.startswith("RssAnon"))

def load(path, done):
    options = dict(dtype="bfloat16", device="cpu", num_kv_cache_blocks=4, skip_tokenizer_init=True)
    llms.append(LLM(path, quantization="int8", max_model_len=32, **options))
    done.set()

llms, (large, small) = [], {paths}
load(small, Event())
# glibc keeps freed memory for later, and how much depends on when the threads run. With this
# threshold (M_MMAP_THRESHOLD is -3) it returns every large piece at once: what is measured is in
# use. The first LLM has set another one.
assert ctypes.CDLL(None).mallopt(-3, 1 << 16)
before, peak, done = private(), 0, Event()
Thread(target=load, args=(large, done)).start()
while not done.wait(0.002):
    peak = max(peak, private())
model = llms[-1].engine.runner.model
size = 2 * sum(m.weight.shape.numel() for m in model.linears())
print((peak - before) / size, (private() - before) / size)
"""


@pytest.mark.slow
def test_loading_never_holds_the_model_in_bfloat16(path: Path, large: Path) -> None:
    done = fresh.run(MEMORY.format(paths=[str(large), str(path)]))
    assert done.returncode == 0, done.stderr
    peak, after = map(float, done.stdout.split())
    assert peak < 0.75
    assert 0.4 < after < 0.6


@pytest.mark.slow
def test_random_weights_and_bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from bench_module import bench

    make_checkpoint(tmp_path)
    assert not bench.main(
        f"--model {tmp_path} --num-seqs 2 --input 3 5 --output 2 4 --repeats 1 --baseline "
        "--set quantization=int8 --set load_format=dummy --set device=cpu".split()
    )
    assert "nanovllm" in capsys.readouterr().out


# ---- errors ----


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (
            {"quantization": "int5"},
            ValueError,
            "quantization must be one of int8, int4, .*not 'int5'",
        ),
        ({"quantization": "INT8"}, ValueError, "int8, int4, .*not 'INT8'"),
        ({"quantization": 8}, TypeError, "quantization must be a string, not 8"),
        ({"dtype": "float16"}, ValueError, "'float16'; set dtype='bfloat16'"),
        ({"dtype": "float16", "attention_backend": "sdpa"}, ValueError, "set dtype='bfloat16'"),
    ],
    ids=str,
)
def test_values_that_do_not_fit(
    tmp_path: Path, options: dict, error: type[Exception], words: str
) -> None:
    make_checkpoint(tmp_path)
    with pytest.raises(error, match=words):
        random_llm(tmp_path, **{"quantization": "int8", **options})


# ---- quality ----


@pytest.fixture(scope="session")
def embedded_int8() -> LLM:
    return LLM(dtype="bfloat16", device="cpu", quantization="int8")


@pytest.mark.slow
def test_grades(embedded_int8: LLM, wrong_in_bf16: dict) -> None:
    """Of the answers in each task at most 1 of 100 more is wrong than in bfloat16."""
    for task, (failed, total) in wrong_by_task(embedded_int8).items():
        assert len(failed) <= len(wrong_in_bf16[task][0]) + total / 100, (task, failed[:3])
