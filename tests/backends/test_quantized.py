"""Weights in int8 and int4: both references, the CPU's kernels, engines, memory, errors, grades."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fresh
import pytest
import torch
from checkpoints import make_checkpoint, random_llm, weights_of, wrong_by_task
from safetensors.torch import load_file

from nanovllm import LLM, SamplingParams
from nanovllm.backends import int4, int8
from nanovllm.backends.int4 import GROUP_SIZE, Int4Weight, pack, unpack
from nanovllm.backends.int8 import Int8Weight, integer_product
from nanovllm.loading.checkpoint import Checkpoint
from nanovllm.loading.memory import weight_bytes
from nanovllm.models.backend import Backend
from nanovllm.models.qwen3 import Qwen3
from tools.benchmarks import workloads

try:
    import nanovllm.backends.cpu.kernels.int4 as int4_kernels
    import nanovllm.backends.cpu.kernels.int8 as int8_kernels
    from nanovllm.backends.cpu import linear
    from nanovllm.backends.cpu.kernels.fused_layers import FusedLayers
except ImportError:
    int8_kernels = None

needs_numba = pytest.mark.skipif(int8_kernels is None, reason="needs Numba")
KINDS: dict[str, Any] = {"int8": int8, "int4": int4}
each_kind = pytest.mark.parametrize("kind", KINDS)
CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def weight_class(kind: str, packed: bool = False) -> Any:
    """The class of weights of a kind; packed: for the CPU's kernel."""
    if packed:
        return int8_kernels.PackedInt8 if kind == "int8" else int4_kernels.PackedInt4
    return Int8Weight if kind == "int8" else Int4Weight


def test_a_gpu_converts_int4_with_few_launches(monkeypatch) -> None:
    """In parts of at most 2^24 weights, and not as a CPU by 64 rows."""
    weight = Int4Weight.empty(partial(torch.empty, device="meta"), 5000, 4096)
    read, parts = Int4Weight.read, []

    def recorded(self: Int4Weight, rows: slice) -> Any:
        parts.append(rows)
        return read(self, rows)

    monkeypatch.setattr(Int4Weight, "read", recorded)
    assert weight.dequantized().shape == (5000, 4096)
    assert parts == [slice(0, 4096), slice(4096, 8192)]


def module(
    weight: torch.Tensor, dtype: torch.dtype, kind: str, bias: bool = False, packed: bool = False
) -> SimpleNamespace:
    """What a product sees of a Linear."""
    stored = weight_class(kind, packed).empty(partial(torch.empty, dtype=dtype), *weight.shape)
    stored.copy_(weight)
    torch.manual_seed(1)
    return SimpleNamespace(weight=stored, bias=torch.randn(len(weight)).to(dtype) if bias else None)


def dequantized(kind: str, weight: torch.Tensor) -> torch.Tensor:
    """The numbers in float32 that are stored of a weight [O, I]."""
    values, scale = KINDS[kind].quantize(weight)
    if kind == "int8":
        return values * scale[:, None]
    return (values * scale.float()[:, :, None]).flatten(1)[:, : weight.shape[1]]


def rows_of(weight: Any, rows: torch.Tensor) -> torch.Tensor:
    """Rows of a weight. The engine looks up no rows in int4 that are packed."""
    if hasattr(weight, "__getitem__"):
        return weight[rows]
    words, scale = weight.read(rows)
    values = unpack(words.unflatten(1, (-1, 4))) * scale.float()[:, :, None]
    return values.flatten(1)[:, : weight.inputs].to(weight.dtype)


def integers(*shape: int) -> torch.Tensor:
    """Random integers that are quantized to themselves, because 127 is in every row."""
    x = torch.randint(-127, 128, shape).float()
    x[:, shape[1] // 2] = 127
    return x


def test_int8_values_and_scales() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 70) * torch.tensor([1e-3, 1.0, 1e4, 1e-20, 0.0])[:, None]
    values, scale = int8.quantize(x)
    assert (values.dtype, scale.dtype) == (torch.int8, torch.float32)
    assert values[:4].abs().amax(1).tolist() == [127] * 4
    assert (values[4] == 0).all()
    torch.testing.assert_close(scale[:4], x[:4].abs().amax(1) / 127)
    assert ((values * scale[:, None] - x).abs() <= 0.5001 * scale[:, None]).all()
    values, scale = int8.quantize(torch.tensor([[127, 0.5, 1.5, 2.5, -0.5, -1.5, -127]]))
    assert values.tolist() == [[127, 0, 2, 2, 0, -2, -127]]  # ties to even
    assert scale.tolist() == [1]
    spoiled = torch.tensor([[1, float("nan")], [1, 2], [1, float("inf")]])
    assert int8.quantize(spoiled)[1].isfinite().tolist() == [False, True, False]


def test_int4_values_and_scales() -> None:
    """The largest magnitude of a group becomes -8, and the others the nearest number."""
    torch.manual_seed(0)
    x = torch.randn(5, 70) * torch.tensor([1e-3, 1.0, 1e3, 1e-20, 0.0])[:, None]
    values, scale = int4.quantize(x)
    assert (values.dtype, values.shape) == (torch.int8, (5, 3, GROUP_SIZE))
    assert (scale.dtype, scale.shape) == (torch.float16, (5, 3))
    assert values[:3].amin(2).tolist() == [[-8] * 3] * 3
    assert (values[3:] == 0).all()
    assert (values[:, 2, 70 - 2 * GROUP_SIZE :] == 0).all()  # the padding
    near = (values * scale.float()[:, :, None]).flatten(1)[:, :70]
    step = scale.float().abs().repeat_interleave(GROUP_SIZE, 1)[:, :70]
    # A number whose sign differs from the sign of the largest is at most 7 steps large.
    assert ((near - x).abs() <= 1.01 * step)[:3].all()
    assert ((near - x).abs() <= 0.51 * step)[:3].float().mean() > 0.95
    assert near[3:].abs().max() < 1e-19


def test_pack() -> None:
    values = torch.randint(-8, 8, (3, 5, GROUP_SIZE), dtype=torch.int8)
    packed = pack(values)
    assert (packed.dtype, packed.shape) == (torch.int32, (3, 5, 4))
    assert torch.equal(unpack(packed), values)
    low = packed.view(torch.uint8) & 15
    assert torch.equal(low.int() - 8, values[:, :, :16].int())  # as in Q4_0 of llama.cpp


@pytest.mark.parametrize("inputs", [1, 1023, 1024, 3000])
def test_the_product_of_integers_is_exact(inputs: int) -> None:
    torch.manual_seed(0)
    x = torch.randint(-127, 128, (3, inputs), dtype=torch.int8)
    weight = torch.randint(-127, 128, (5, inputs), dtype=torch.int8)
    x[0], weight[0], weight[1] = 127, 127, -127
    assert torch.equal(integer_product(x, weight).long(), x.long() @ weight.long().T)


# Relative errors at most: of weight_only and dynamic against the product of the stored weights.
LIMITS = {"int8": (0.005, 0.014), "int4": (0.005, 0.012)}


@each_kind
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_references_are_near_the_product_of_the_weights(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(300, 500), torch.randn(7, 500).to(dtype)
    for bias in (False, True):
        layer = module(weight, dtype, kind, bias)
        wanted = x.float() @ layer.weight.dequantized().float().T
        wanted += layer.bias.float() if bias else 0
        for product, limit in zip(
            (int8.weight_only, KINDS[kind].dynamic), LIMITS[kind], strict=True
        ):
            found = product(x, layer)
            assert found.dtype == dtype
            assert (found.float() - wanted).norm() / wanted.norm() < limit
    exact, wanted = (x.float() @ w.T for w in (weight, layer.weight.dequantized().float()))
    low, high = (0, 0.012) if kind == "int8" else (0.05, 0.12)
    assert low < (wanted - exact).norm() / exact.norm() < high


@each_kind
@pytest.mark.parametrize("inputs", [96, 97])
@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=needs_numba)])
def test_a_weight_is_loaded_part_by_part(kind: str, packed: bool, inputs: int) -> None:
    """Like a tensor: split into projections, and looked up by tokens."""
    torch.manual_seed(0)
    sources = [torch.randn(n, inputs).bfloat16() for n in (300, 7, 1)]
    empty = partial(torch.empty, dtype=torch.bfloat16)
    weight = weight_class(kind, packed).empty(empty, 308, inputs)
    assert weight.shape == (308, inputs)
    for part, source in zip(weight.split([300, 7, 1]), sources, strict=True):
        assert part.shape == source.shape
        part.copy_(source)
    wanted = dequantized(kind, torch.cat(sources)).bfloat16()
    rows = torch.randint(0, 308, (400,))
    assert torch.equal(rows_of(weight, rows), wanted[rows])
    assert torch.equal(rows_of(part, torch.tensor([0])), wanted[-1:])
    if not packed:
        assert torch.equal(weight.dequantized(), wanted)


# ---- the CPU's kernel ----

SHAPES = [
    (1, 64, 8),
    (1, 192, 7),
    (2, 96, 199),
    (4, 128, 16),
    (5, 63, 5),
    (13, 1000, 37),
    (70, 64, 3),
    (130, 256, 130),
]


@needs_numba
@each_kind
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_kernel_equals_the_reference(
    kind: str, shape: tuple[int, int, int], dtype: torch.dtype, bias: bool
) -> None:
    """In int4 up to the order in which float32 rounds: its kernel fuses a product with a sum."""
    torch.manual_seed(0)
    tokens, inputs, outputs = shape
    weight, x = torch.randn(outputs, inputs), torch.randn(tokens, inputs).to(dtype)
    layer = module(weight, dtype, kind, bias, packed=True)
    found = linear.linear(x, layer)
    wanted = KINDS[kind].dynamic(x, module(weight, dtype, kind, bias))
    assert found.dtype == dtype
    exact, rtol = kind == "int8", 2e-5 if dtype is torch.float32 else 8e-3
    torch.testing.assert_close(found, wanted, rtol=0 if exact else rtol, atol=0 if exact else 2e-4)
    # The result for a token does not depend on the batch.
    for start, stop in ((0, 1), (tokens // 2, tokens)):
        assert torch.equal(linear.linear(x[start:stop].clone(), layer), found[start:stop])


@needs_numba
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_integers_of_the_kernel_are_exact(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    tokens, inputs, outputs = shape
    weight, x = integers(outputs, inputs), integers(tokens, inputs)
    x[0], weight[0], weight[-1] = 127, 127, -127
    assert set(module(weight, torch.float32, "int8").weight.scale.tolist()) == {1}
    found = linear.linear(x, module(weight, torch.float32, "int8", packed=True))
    assert torch.equal(found.double(), x.double() @ weight.double().T)


@needs_numba
@pytest.mark.parametrize("tokens", [1, 3])
def test_sums_in_int4_are_exact(tokens: int) -> None:
    """With scales that are powers of two, also for the largest sums of 16 bits."""
    torch.manual_seed(0)
    groups = 10
    values = torch.randint(-8, 8, (16, groups, GROUP_SIZE), dtype=torch.int8)
    x = integers(tokens, groups * GROUP_SIZE)
    values[0], values[1], values[2], x[0] = 7, -8, 7, 127
    scale = 2.0 ** torch.randint(-4, 3, (16, groups)).half()
    scale[3] *= -1
    layer = module(torch.zeros(16, groups * GROUP_SIZE), torch.float32, "int4", packed=True)
    layer.weight.store(0, pack(values), scale)
    dense = (values.double() * scale.double()[:, :, None]).flatten(1)
    assert torch.equal(linear.linear(x, layer).double(), x.double() @ dense.T)


@pytest.mark.slow
@needs_numba
@pytest.mark.parametrize("names", [(), ("avx2",), ("avx2", "avx512f")])
def test_kernels_of_other_processors(tmp_path, names: tuple[str, ...]) -> None:
    """The tests above and those of weights in float32, if Numba sees only some instructions.

    Those of a Mac are in tests/test_other_systems.py.
    """
    code = f"""
import sys, pytest
from nanovllm.backends.cpu import jit
known = jit.get_host_cpu_features()
jit.get_host_cpu_features = lambda: {{name: known.get(name, False) for name in {names}}}
names = "of_the_kernel or int4_are_exact or ((kernel_equals or test_products) and float32)"
options = "-q", "-n", "0", "-k", names, "-p", "no:cacheprovider", "--noconftest"
files = "tests/backends/test_quantized.py", "tests/backends/cpu/test_linear.py"
sys.exit(pytest.main([*options, *files]))
"""
    done = fresh.run(code, NUMBA_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stdout


@needs_numba
def test_nan_stays_nan() -> None:
    weight, x = torch.randn(9, 64), torch.randn(3, 64)
    x[1, 5] = float("nan")
    for packed, run in ((True, linear.linear), (False, int8.dynamic)):
        found = run(x, module(weight, torch.float32, "int8", packed=packed))
        assert found[1].isnan().all()
        assert not found[[0, 2]].isnan().any()


# ---- engines ----


def tokens(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [out["token_ids"] for out in llm.generate(prompts, GREEDY, use_tqdm=False)]


@each_kind
@pytest.mark.parametrize("tie", [False, True])
def test_what_an_engine_stores(tmp_path, kind: str, tie: bool) -> None:
    """Layers in `kind`, the head in int8, the rest as it is; sizes as they are reported."""
    make_checkpoint(tmp_path, tie=tie)
    llm = random_llm(tmp_path, quantization=kind, dtype="bfloat16")
    runner, stored = llm.engine.runner, weights_of(llm)
    checkpoint = load_file(tmp_path / "model.safetensors")
    for name, weight in stored.items():
        if "norm" in name or (name.startswith("model.embed") and not tie):
            assert torch.equal(weight, checkpoint[name].bfloat16())
        else:
            wanted = dequantized(kind if "_proj." in name else "int8", checkpoint[name])
            assert torch.equal(rows_of(weight, torch.arange(len(wanted))), wanted.bfloat16()), name
    layers = [linear.weight.nbytes for linear in runner.model.linears()]
    others = [weight.nbytes for weight in stored.values() if isinstance(weight, torch.Tensor)]
    assert sum(layers) + sum(others) == weight_bytes(
        Qwen3.on_meta(runner.model.config, runner.backend)
    )
    plain = weight_bytes(Qwen3.on_meta(runner.model.config, Backend(CPU, torch.bfloat16)))
    assert plain == 2 * sum(tensor.numel() for tensor in checkpoint.values())
    assert isinstance(runner.fused_model, FusedLayers)


def test_sizes_of_known_shapes(tmp_path) -> None:
    """GB in bfloat16, int8 and int4. A table that is not tied stays in bfloat16."""
    sizes = {"qwen3-0.6b": (1.192, 0.598, 0.404), "qwen3-8b": (16.381, 8.819, 5.775)}
    for shape, wanted in sizes.items():
        config = Checkpoint(workloads.write_shape(shape, tmp_path)).model_config
        plain = Backend(CPU, torch.bfloat16)
        backends = [plain, int8.quantized(plain), int4.quantized(plain)]
        found = [weight_bytes(Qwen3.on_meta(config, backend)) / 1e9 for backend in backends]
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
    sizes = dict(num_kv_cache_blocks=4, max_model_len=32)
    llms.append(LLM(path, device="cpu", skip_tokenizer_init=True, **sizes, **{options}))
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
@pytest.mark.parametrize(
    ("options", "least", "most"),
    [
        ({"dtype": "bfloat16", "quantization": "int8"}, 0.4, 0.75),
        ({"dtype": "bfloat16", "attention_backend": "sdpa"}, 0.9, 1.3),
        ({"dtype": "float32", "attention_backend": "sdpa"}, 1.8, 2.6),
    ],
    ids=str,
)
def test_loading_holds_the_model_once(
    path: Path, large: Path, options: dict, least: float, most: float
) -> None:
    """Of a checkpoint in bfloat16, quantized, as it is, or converted; as shares of its size."""
    done = fresh.run(MEMORY.format(paths=[str(large), str(path)], options=options))
    assert done.returncode == 0, done.stderr
    peak, after = map(float, done.stdout.split())
    assert least < after < most
    assert peak < most


# ---- errors ----


FLOAT16 = {"dtype": "float16"}


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"quantization": "int5"}, ValueError, "must be one of int8, int4, .*not 'int5'"),
        ({"quantization": 8}, TypeError, "quantization must be a string, not 8"),
        ({"quantization": "int8", **FLOAT16}, ValueError, "'float16'; set dtype='bfloat16'"),
        ({"quantization": "int4", **FLOAT16}, ValueError, "'float16'; set dtype='bfloat16'"),
        ({**FLOAT16, "attention_backend": "sdpa"}, ValueError, "set dtype='bfloat16'"),
    ],
    ids=str,
)
def test_values_that_do_not_fit(
    path: Path, options: dict, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        random_llm(path, **{"quantization": "int8", **options})


# ---- quality ----


@pytest.fixture(scope="session")
def embedded_int8() -> LLM:
    return LLM(dtype="bfloat16", device="cpu", quantization="int8")


@pytest.mark.slow
def test_grades(embedded_int8: LLM, wrong_in_bf16: dict) -> None:
    """Of the answers in each task at most 1 of 100 more is wrong than in bfloat16."""
    for task, (failed, total) in wrong_by_task(embedded_int8).items():
        assert len(failed) <= len(wrong_in_bf16[task][0]) + total / 100, (task, failed[:3])


@pytest.mark.slow
def test_most_answers_in_int4_are_right() -> None:
    """Most answers of the embedded model are still right; its 3 million weights suffer most."""
    llm = LLM(dtype="bfloat16", device="cpu", quantization="int4")
    found = wrong_by_task(llm).values()
    wrong, total = sum(len(failed) for failed, _ in found), sum(number for _, number in found)
    print(f"{wrong} of {total} answers are wrong in int4")
    assert wrong < total / 3
