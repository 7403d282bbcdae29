"""The kernels that Numba compiles, compared with torch's functions on the same input."""

import fresh
import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint, random_llm

from nanovllm import LLM, SamplingParams
from nanovllm.models import raw_logprobs, sampler
from nanovllm.models.batch import SamplingBatch
from nanovllm.models.layers import add_rms_norm, silu_and_mul
from nanovllm.models.qwen3 import Qwen3

numba = pytest.importorskip("numba")  # a machine that only runs the GPU's tests may lack it

from nanovllm.backends.cpu.kernels import (  # noqa: E402
    amx,
    attention,
    fused_layers,
    int8,
    parallel,
    primitives,
    simd,
)
from nanovllm.backends.cpu.kernels import pointwise as cpu  # noqa: E402
from nanovllm.backends.cpu.kernels import sampler as cpu_sampler  # noqa: E402
from nanovllm.backends.cpu.kernels.attention import (  # noqa: E402
    AttentionWork,
    QueryGroups,
    attend,
)
from nanovllm.backends.cpu.kernels.fused_layers import FusedLayers  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16]


@numba.njit
def rounded(x, like):
    out = np.empty(len(x), np.uint16)
    for i in range(len(x)):
        out[i] = primitives.from_float32(x[i], like)
    return out


@numba.njit
def widened(x):
    out = np.empty(len(x), np.float32)
    for i in range(len(x)):
        out[i] = primitives.to_float32(x[i])
    return out


@numba.njit
def exps(x):
    out = np.empty_like(x)
    for i in range(len(x)):
        out[i] = primitives.exp(x[i])
    return out


def test_bfloat16_is_torchs() -> None:
    """Every bfloat16, and floats of all sizes: halfway between two, NaN and infinity among them."""
    every = np.arange(1 << 16).astype(np.uint16)
    as_torch = torch.from_numpy(every.copy()).view(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(widened(every), as_torch)
    bits = np.random.default_rng(0).integers(0, 1 << 32, 200_000, np.uint32)
    bits[:1000] = bits[:1000] & 0xFFFF0000 | 0x8000  # halfway
    bits[1000:1004] = (0x7F800000, 0xFF800000, 0x7FFFFFFF, 0x7F7FFFFF)
    floats = bits.view(np.float32)
    wanted = torch.from_numpy(floats.copy()).bfloat16()
    found = torch.from_numpy(rounded(floats, np.uint16(0))).view(torch.bfloat16)
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found[~found.isnan()], wanted[~wanted.isnan()])


def test_exp() -> None:
    # The last three: where e^x is no float.
    x = np.concatenate((np.linspace(-87, 87, 100_001), [-1e30, 1e30, -np.inf])).astype(np.float32)
    found = exps(x)
    error = np.abs(found[:-3] / np.exp(x[:-3].astype(np.float64)) - 1)
    assert (error < 3e-7 + 1e-7 * np.abs(x[:-3])).all()
    # So that the most likely token has the largest weight, and that weight is 1.
    below = -np.concatenate((np.logspace(-45, 2, 10_001), np.linspace(1e-7, 1e-3, 100_001)))
    assert exps(np.float32([0.0, -0.0])).tolist() == [1, 1]
    assert exps(below.astype(np.float32)).max() < 1
    assert found[-3] < 1e-37 and found[-1] < 1e-37 and 1e37 < found[-2] < np.inf  # noqa: PT018


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("few", [0, 1 << 30])
@pytest.mark.parametrize("rows", [1, 3, 7])
def test_between_the_products(dtype: torch.dtype, few: int, rows: int, monkeypatch) -> None:
    """On one thread and on all; a NaN stays in its row."""
    monkeypatch.setattr(parallel, "SERIAL_ELEMENTS", few)
    torch.manual_seed(0)
    x, residual, weight = (torch.randn(*s).to(dtype) for s in ((rows, 40), (rows, 40), (40,)))
    if rows > 1:
        x[0, 3] = torch.nan
    gate_up = torch.randn(rows, 80).to(dtype) * 4
    torch.testing.assert_close(cpu.silu_and_mul(gate_up), silu_and_mul(gate_up))
    wanted = add_rms_norm(x, residual, weight, 1e-3)
    found = cpu.add_rms_norm(x, residual, weight, 1e-3)
    torch.testing.assert_close(found, wanted, equal_nan=True)
    assert found[0] is x
    assert found[1] is residual
    alone = torch.randn(rows, 40).to(dtype)
    wanted = add_rms_norm(alone, None, weight, 1e-3)
    torch.testing.assert_close(cpu.add_rms_norm(alone.clone(), None, weight, 1e-3), wanted)


def sampling(rows: int, temperature: torch.Tensor) -> SamplingBatch:
    return SamplingBatch(temperature, torch.arange(rows) - 3, torch.arange(rows) * 7, {})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 4 * cpu_sampler.CHUNK, 5000])
def test_sample(dtype: torch.dtype, size: int) -> None:
    """Torch's tokens, but where a number falls on an edge that sums round to this side or that."""
    rows = 600
    torch.manual_seed(0)
    logits = (torch.randn(rows, size) * 3).to(dtype)
    logits[:, ::3][:, : size // 2] = -torch.inf
    temperature = torch.tensor([0.0, 1e-42, 0.3, 1.0, 2.5, 100.0]).repeat(100)
    batch = sampling(rows, temperature)
    found, wanted = cpu_sampler.sample(logits, batch), sampler.sample(logits, batch)
    assert (found != wanted).sum() <= 3
    assert torch.equal(found[temperature < 1e-3], wanted[temperature < 1e-3])
    if size > 1:
        assert (logits.gather(1, found[:, None]) > -torch.inf).all()


def test_a_filter_that_the_kernel_does_not_have(monkeypatch) -> None:
    """Plain torch applies it, with the others and in their order; see docs/contributing.md."""

    def keep_even(logits: torch.Tensor, on: torch.Tensor) -> torch.Tensor:
        odd = torch.arange(logits.shape[1]) % 2 == 1
        return logits.masked_fill(odd & (on > 0)[:, None], sampler.MASKED)

    monkeypatch.setitem(sampler.FILTER_FUNCTIONS, "even", keep_even)
    batch = sampling(60, torch.tensor([0.5, 0.0]).repeat(30))
    batch.filters = {"top_k": torch.full((60,), 9), "even": torch.tensor([1.0, 0.0, 1.0] * 20)}
    logits = torch.randn(60, 3000)
    found, wanted = cpu_sampler.sample(logits, batch), sampler.sample(logits, batch)
    assert torch.equal(found, wanted)
    assert (found[(batch.filters["even"] > 0) & (batch.temperature > 0)] % 2 == 0).all()
    assert torch.equal(found[1::2], logits[1::2].argmax(dim=-1))  # greedy: as without a filter


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_is_compiled_while_serving(dtype: str) -> None:
    """What `compile_all` compiled fits every call: prompts, decodes, a prefix in common."""
    llm = LLM(dtype=dtype, device="cpu")
    modules = cpu, attention, simd, amx, fused_layers, int8, parallel, cpu_sampler
    kernels = [k for m in modules for k in vars(m).values() if hasattr(k, "signatures")]
    before = [len(k.signatures) for k in kernels]
    assert max(before) > 0
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    llm.generate([[5] * 500 + [i] for i in range(4)] + [[1, 2]], params, use_tqdm=False)
    llm.generate([[9] * 1000, [3]], params, use_tqdm=False)
    llm.generate([[9, 3]], SamplingParams(max_tokens=4, logprobs=1), use_tqdm=False)
    assert [len(k.signatures) for k in kernels] == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [5, 16])
def test_a_query_sees_nothing_of_later_tokens(dtype: torch.dtype, count: int) -> None:
    """However large: the queries of a group read the same blocks, each only so far.

    Of few rows, and of many, whose weights are multiplied in pairs or in float32.
    """
    torch.manual_seed(0)
    n = 2 if dtype is torch.bfloat16 else 1  # numbers of a word of the cache
    shape, like = (2, 1, 16, 32), primitives.DTYPE_EXAMPLE[dtype]
    kernel = parallel.address_for(attention.attend_groups, dtype, dtype)
    qkv, k, v = (torch.randn(n).to(dtype) for n in ((count, 3, 32), shape, shape))
    none, first = np.empty((0, count), np.int64), np.zeros(1, np.int64)
    queries, contexts = np.arange(count)[None], np.arange(1, count + 1)[None]
    rest = QueryGroups(queries, contexts, first, np.array([[1]], np.int32))
    prefixes = QueryGroups(none, none, none.ravel(), none.astype(np.int32))
    reads = AttentionWork(
        np.arange(count), np.arange(count), prefixes, rest, np.empty((0, 0, 0), np.float32)
    )
    found = []
    for last in (0.0, 3e38):
        values = v[1, 0].view(16 // n, 32, n)
        values[(count - 1) // n, :, (count - 1) % n] = last
        out = torch.empty(count, 32, dtype=dtype)
        attend(
            qkv.data_ptr(),
            count,
            3,
            out.data_ptr(),
            1,
            k.data_ptr(),
            v.data_ptr(),
            shape,
            reads,
            0,
            1.0,
            like,
            like,
            kernel,
            2,
        )
        found.append(out)
    assert torch.equal(found[0][:-1], found[1][:-1])
    assert not torch.equal(found[0][-1], found[1][-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("tie", [False, True])
def test_fused_layers_are_the_models(tmp_path, family: str, tie: bool, dtype: torch.dtype) -> None:
    """Both compute the same bits: decodes of 1 to 70 sequences, a shared prefix, chunks."""
    make_checkpoint(tmp_path, family, tie=tie)
    llm = random_llm(tmp_path, dtype=str(dtype)[6:], num_kv_cache_blocks=1000)
    runner = llm.engine.runner
    model, compiled, sizes = runner.model, runner.fused_model, []
    assert isinstance(compiled, FusedLayers)

    class Both:
        logits = model.logits

        @staticmethod
        def forward(batch, attention):
            found = compiled.forward(batch, attention)
            wanted = model.forward(batch, attention)
            assert torch.equal(found, wanted)
            sizes.append(len(found))
            return wanted

    runner.fused_model, runner.fused_step = Both, lambda plan: None
    params = [SamplingParams(temperature=0, max_tokens=2 + i, ignore_eos=True) for i in range(70)]
    prompts = [[3] * 300 + [i] for i in range(4)] + [[1 + i] * (i % 50 + 1) for i in range(66)]
    llm.generate(prompts, params, use_tqdm=False)
    assert {1, 16, 17, 33, 64, 65} <= set(sizes)
    assert max(sizes) > 300


def test_models_of_the_same_layers_are_fused(path) -> None:
    """Whatever their classes are called, unless they compute something else."""
    runner = random_llm(path, dtype="float32").engine.runner
    model, mlp = runner.model, runner.model.layers[1].mlp
    model.__class__ = type("Other", (type(model),), {})
    mlp.__class__ = type("OtherMLP", (type(mlp),), {})
    assert isinstance(model.backend.fuse_layers(model, runner.attention), FusedLayers)
    model.__class__ = type("Scaled", (type(model),), {"forward": None})
    assert model.backend.fuse_layers(model, runner.attention) is None
    model.__class__ = Qwen3
    mlp.__class__ = type("Doubled", (type(mlp),), {"__call__": lambda self, x: 2 * x})
    assert model.backend.fuse_layers(model, runner.attention) is None


@pytest.mark.slow
def test_numba_leaves_torch_its_threads() -> None:
    """It sets OpenMP's number to all cores when it starts."""
    code = (
        "import torch; from nanovllm import LLM, SamplingParams\n"
        "llm = LLM(attention_backend='numba')  # which waits until its kernels are compiled\n"
        "llm.generate([[5]], SamplingParams(max_tokens=2), use_tqdm=False)\n"
        "assert torch.get_num_threads() == 1\n"
    )
    done = fresh.run(code, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("size", "k"), [(5, 5), (2048, 1), (5000, 0), (5000, 20), (5000, 1500)])
def test_token_logprobs(dtype: torch.dtype, size: int, k: int) -> None:
    """The plain function's, in which equal logits may come in another order."""
    torch.manual_seed(0)
    logits = (4 * torch.randn(7, size)).to(dtype)
    tokens = torch.cat((logits[:2].argmax(1), torch.randint(size, (5,))))
    found = cpu_sampler.token_logprobs(logits, tokens, k)
    wanted = raw_logprobs.token_logprobs(logits, tokens, k)
    torch.testing.assert_close(found[:, : 2 + k], wanted[:, : 2 + k], rtol=0, atol=1e-4)
    ids = found[:, 2 + k :].long()
    assert all(len(set(row)) == k for row in ids.tolist())
    torch.testing.assert_close(logits.gather(1, ids), logits.topk(k).values)
    # The same bits beside a row that asks for more, also of equal logits.
    few = min(k, 8)
    fewer = cpu_sampler.token_logprobs(logits, tokens, few)
    assert torch.equal(fewer, torch.cat((found[:, : 2 + few], found[:, 2 + k :][:, :few]), dim=1))
