"""What needs a CUDA device: `pytest -m gpu`. Skipped without one."""

import gc
import inspect
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import delta_rule_cases
import numpy as np
import pytest
import references
import torch
from checkpoints import make_checkpoint
from hybrid_checkpoints import make_hybrid_checkpoint
from moe_checkpoints import make_moe_checkpoint
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from nanovllm import LLM, SamplingParams
from nanovllm.backends.int4 import Int4Weight
from nanovllm.backends.int8 import Int8Weight
from nanovllm.features.memory.host_cache import pool as host_pool
from nanovllm.features.models.moe.experts import expert_linear
from nanovllm.models import sampler
from nanovllm.models.backend import Backend
from nanovllm.models.batch import SamplingBatch
from nanovllm.models.fp8 import FP8
from nanovllm.models.layers import add_rms_norm, silu_and_mul
from nanovllm.plan import BlockCopy
from tools.training import data
from tools.training.grade import accuracy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda"
# ||found - wanted|| / ||wanted||, against a float32 reference on the same inputs.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True)
def exact_and_empty() -> Iterator[None]:
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    gc.collect()
    torch.cuda.empty_cache()


def needs_fp8() -> None:
    if torch.cuda.get_device_capability() < (8, 9) and not torch.version.hip:
        pytest.skip("no instructions for fp8")


def error(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape
    difference = float((found.float() - wanted.float()).norm() / wanted.float().norm())
    assert difference == difference, "NaN"
    return difference


def paged(contexts: list[int], kv_heads: int, dim: int, size: int, dtype: torch.dtype) -> tuple:
    """(k, v, block tables, contexts): blocks in random order, NaN in slots that nobody wrote."""
    counts = [-(-n // size) for n in contexts]
    order = (torch.randperm(sum(counts)) + 1).int()
    tables = torch.zeros((len(contexts), max(counts)), dtype=torch.int32)
    shape = (sum(counts) + 1, kv_heads, size, dim)
    k, v = (torch.randn(shape, device=DEVICE).to(dtype) for _ in range(2))
    k[0], v[0] = float("nan"), float("nan")
    for seq, count in enumerate(counts):
        start = sum(counts[:seq])
        tables[seq, :count] = order[start : start + count]
        last, used = int(tables[seq, count - 1]), contexts[seq] - (count - 1) * size
        k[last, :, used:], v[last, :, used:] = float("nan"), float("nan")
    return k, v, tables.to(DEVICE), torch.tensor(contexts, device=DEVICE)


SHAPES = [
    (16, 8, 128),
    (32, 8, 128),
    (28, 4, 128),
    (4, 2, 64),
    (5, 5, 80),
    (8, 1, 96),
    (16, 1, 256),
]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("size", [16, 256])
@pytest.mark.parametrize("fp8", [False, True])
def test_attention(shape: tuple[int, int, int], size: int, dtype: torch.dtype, fp8: bool) -> None:
    """In fp8 against the reference on the same numbers, which it multiplies by the scales."""
    from nanovllm.backends.gpu.kernels import attention
    from nanovllm.backends.gpu.kernels.configs import GpuInfo, decode_tile, prefill_tile

    heads, kv_heads, dim = shape
    torch.manual_seed(0)
    gpu = GpuInfo.of(torch.device(DEVICE))
    contexts = [1, 15, 16, 17, 255, 256, 257, 1000, 3001]
    cache_dtype, scales = dtype, (1.0, 1.0)
    if fp8:
        needs_fp8()
        cache_dtype, scales = FP8, (0.3, 1.7)
    k, v, tables, lens = paged(contexts, kv_heads, dim, size, cache_dtype)
    narrow = decode_tile(gpu, dim, dtype, fp8)
    wide = prefill_tile(gpu, dim, dtype)
    for queries in ([1] * 9, [1, 15, 1, 17, 200, 1, 257, 129, 500]):
        starts = torch.tensor([0, *torch.tensor(queries).cumsum(0)], dtype=torch.int32).to(DEVICE)
        q = torch.randn(sum(queries), heads, dim, device=DEVICE).to(dtype)
        wanted = references.attend(q.float(), k, v, starts, lens, tables, *scales)
        per_tile = wide.num_rows // (heads // kv_heads)
        tiles = torch.from_numpy(attention.query_tiles(np.array(queries), per_tile)).to(DEVICE)
        found = torch.full_like(q, float("nan"))
        attention.attend(q, k, v, tiles, starts, lens, tables, wide, found, *scales)
        assert error(found, wanted) < TOLERANCE[dtype]
        if queries[-1] == 1:
            for splits in (1, 2, 7, 64):
                found.fill_(float("nan"))
                attention.attend_decode(
                    q, k, v, lens.argsort(), lens, tables, narrow, splits, found, *scales
                )
                assert error(found, wanted) < TOLERANCE[dtype], splits


def test_a_cache_of_more_than_2_31_elements() -> None:
    from nanovllm.backends.gpu.kernels import attention
    from nanovllm.backends.gpu.kernels.configs import GpuInfo, decode_tile

    blocks, kv_heads, size, dim = 140_000, 8, 16, 128  # 2.3e9 elements, 4.6 GB each
    k, v = (
        torch.empty((blocks, kv_heads, size, dim), dtype=torch.bfloat16, device=DEVICE)
        for _ in "kv"
    )
    last = torch.arange(blocks - 4, blocks, dtype=torch.int32, device=DEVICE)[None]
    k[-4:], v[-4:] = torch.randn_like(k[-4:]), torch.randn_like(v[-4:])
    q = torch.randn(1, 16, dim, device=DEVICE).bfloat16()
    lens = torch.tensor([64], device=DEVICE)
    starts = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    tile = decode_tile(GpuInfo.of(torch.device(DEVICE)), dim, torch.bfloat16)
    found = torch.empty_like(q)
    attention.attend_decode(q, k, v, lens.argsort(), lens, last, tile, 2, found)
    assert error(found, references.attend(q.float(), k, v, starts, lens, last)) < 1e-2


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_pointwise_and_store(dtype: torch.dtype) -> None:
    from nanovllm.backends.gpu.kernels import pointwise, store

    torch.manual_seed(0)
    x, residual = (torch.randn(300, 4096, device=DEVICE).to(dtype) for _ in range(2))
    weight = torch.rand(4096, device=DEVICE).to(dtype)
    for given in (None, residual):
        found = pointwise.add_rms_norm(x, given, weight, 1e-6)
        wanted = add_rms_norm(x, given, weight, 1e-6)
        assert error(found[0], wanted[0]) < TOLERANCE[dtype]
        assert torch.equal(found[1], wanted[1])
    assert error(pointwise.silu_and_mul(x), silu_and_mul(x)) < TOLERANCE[dtype]

    heads, kv_heads, dim = 16, 8, 128
    qkv = torch.randn(300, (heads + 2 * kv_heads) * dim, device=DEVICE).to(dtype)
    q_weight, k_weight = (torch.rand(dim, device=DEVICE).to(dtype) for _ in range(2))
    angle = torch.rand(300, 1, dim // 2, device=DEVICE) * 6
    cos = torch.cat((angle.cos(), angle.cos()), dim=-1).to(dtype)
    sin = torch.cat((-angle.sin(), angle.sin()), dim=-1).to(dtype)
    slots = torch.randperm(40 * 16, device=DEVICE)[:300]
    caches = [torch.zeros(40, kv_heads, 16, dim, dtype=dtype, device=DEVICE) for _ in range(4)]
    q = store.norm_rope_store(qkv, q_weight, k_weight, 1e-6, cos, sin, slots, *caches[:2])
    wanted_q = references.norm_rope_store(
        qkv, q_weight, k_weight, 1e-6, cos, sin, slots, *caches[2:]
    )
    assert error(q, wanted_q) < TOLERANCE[dtype]
    assert error(caches[0], caches[2]) < TOLERANCE[dtype]
    assert torch.equal(caches[1], caches[3])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_store_in_fp8(dtype: torch.dtype) -> None:
    """Every rounding: beyond 448 saturates, NaN remains NaN. Without a rotation k is exact too."""
    from nanovllm.backends.gpu.kernels import store

    needs_fp8()
    torch.manual_seed(0)
    heads, kv_heads, dim, tokens = 4, 8, 128, 300
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, device=DEVICE)
    qkv = (qkv * torch.exp(3 * torch.randn_like(qkv))).to(dtype)
    qkv[:, 0::97], qkv[:, 1::97], qkv[:, 2::97] = float("nan"), 6e4, -6e4
    ones = torch.ones(tokens, 1, dim, dtype=dtype, device=DEVICE)
    slots = torch.randperm(40 * 16, device=DEVICE)[:tokens]
    for scales in ((1.0, 1.0), (0.25, 4.0)):  # powers of 2, so that a division is exact
        shape = (40, kv_heads, 16, dim)
        caches = [torch.zeros(shape, device=DEVICE).to(FP8) for _ in range(4)]
        arguments = (qkv, None, None, 0.0, ones, ones - 1, slots)
        store.norm_rope_store(*arguments, *caches[:2], *scales)
        references.norm_rope_store(*arguments, *caches[2:], *scales)
        for found, wanted in zip(caches[:2], caches[2:], strict=True):
            found, wanted = found.float(), wanted.float()
            assert torch.equal(found.isnan(), wanted.isnan())
            assert torch.equal(found.nan_to_num(), wanted.nan_to_num())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("sizes", [(16, 32, 128, 128), (16, 48, 128, 128), (2, 2, 16, 24)], ids=str)
@pytest.mark.parametrize("same_key", [False, True])
def test_delta_rule(sizes: tuple[int, int, int, int], dtype: torch.dtype, same_key: bool) -> None:
    """The tolerance is higher, because outputs are rounded before their norm, and TF32 is used."""
    from nanovllm.backends.gpu.kernels import delta_rule

    def compare(found: Tensor, wanted: Tensor) -> None:
        assert error(found, wanted) < max(4 * TOLERANCE[dtype], 1e-4)

    torch.manual_seed(0)
    layer = delta_rule_cases.make_layer(sizes, dtype, DEVICE)
    delta_rule_cases.check_decode(delta_rule, layer, [4, 0, 3], compare)
    lengths = [(64, False), (0, True), (2, False), (1000, True), (1, False)]
    delta_rule_cases.check_chunk(delta_rule, layer, lengths, compare, same_key)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(4096, 1024), (1024, 3072), (199, 70), (151_936, 1024)], ids=str)
@pytest.mark.parametrize("weights", [Int8Weight, Int4Weight])
def test_quantized_linear(weights: type, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Against the reference in float32, with the weights as they are stored.

    More than 512 rows are multiplied by torch, a part of the weights at a time.
    """
    from nanovllm.backends.gpu.kernels import int4

    torch.manual_seed(0)
    weight = weights.empty(partial(torch.empty, dtype=dtype, device=DEVICE), *shape)
    weight.copy_(torch.randn(shape, device=DEVICE))
    exact = replace(weight, dtype=torch.float32).dequantized()
    for bias in (None, torch.randn(shape[0], device=DEVICE).to(dtype)):
        layer = SimpleNamespace(weight=weight, bias=bias)
        for rows in (1, 2, 15, 16, 17, 32, 33, 64, 65, 128, 129, 256, 300, 512, 513):
            x = torch.randn(rows, shape[1], device=DEVICE).to(dtype)
            wanted = F.linear(x.float(), exact, None if bias is None else bias.float())
            assert error(int4.linear(x, layer), wanted) < TOLERANCE[dtype], rows


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("weights", [None, Int8Weight, Int4Weight])
def test_expert_linear(weights: type | None, dtype: torch.dtype) -> None:
    """Experts of Qwen3-30B-A3B's size with random numbers of rows, and one expert with all rows."""
    from nanovllm.backends.gpu.kernels import experts

    torch.manual_seed(0)
    outputs, inputs, num = 768, 2048, 16
    weight = torch.randn(num * outputs, inputs, device=DEVICE).to(dtype) / inputs**0.5
    stored, wide = weight, weight.float()
    if weights is not None:
        stored = weights.empty(partial(torch.empty, dtype=dtype, device=DEVICE), *weight.shape)
        stored.copy_(weight)
        wide = replace(stored, dtype=torch.float32).dequantized()
    module = SimpleNamespace(weight=stored)
    plain = SimpleNamespace(weight=wide, backend=Backend(torch.device(DEVICE), torch.float32))
    for rows in (1, 8, 100, 1000):
        for choices in (torch.randint(num, (rows,)), torch.full((rows,), num - 1)):
            ends = choices.bincount(minlength=num).cumsum(0).to(DEVICE)
            x = torch.randn(rows, inputs, device=DEVICE).to(dtype)
            found = experts.expert_linear(x, module, ends)
            assert error(found, expert_linear(x.float(), plain, ends)) < TOLERANCE[dtype]


@pytest.mark.parametrize("hybrid", [False, True])
def test_experts_have_the_tokens_of_transformers_captured_and_eager(
    hybrid: bool, tmp_path: Path
) -> None:
    sizes = dict(moe_intermediate_size=64, shared_expert_intermediate_size=64)
    model = make_moe_checkpoint(tmp_path, hybrid=hybrid, **sizes)
    prompts = [[i + 1] * (3 * i + 1) for i in range(12)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    options = dict(dtype="float32", device=DEVICE, skip_tokenizer_init=True, max_num_seqs=16)
    for eager in (False, True):
        llm = LLM(str(tmp_path), num_kv_cache_blocks=400, enforce_eager=eager, **options)
        for output in llm.generate(prompts, params, use_tqdm=False):
            prompt, ids = output.prompt_token_ids, output.outputs[0].token_ids
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *ids]]), use_cache=False).logits[0]
            assert [*ids] == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize("eager", [False, True])
def test_int8_engine(eager: bool) -> None:
    """Captured or not, the embedded model in int8 is right, in half of the memory."""
    llm = LLM(dtype="bfloat16", device=DEVICE, quantization="int8", enforce_eager=eager)
    for task, (right, total, failed) in accuracy(llm).items():
        assert right / total >= 0.97, (task, failed[:3])
    assert llm.engine.runner.model.lm_head.weight.values.dtype == torch.int8


@pytest.mark.parametrize("model", ["qwen3", "hybrid"])
def test_captured_and_eager_steps_are_close_in_bfloat16(model: str, tmp_path: Path) -> None:
    """Log-probabilities of the first tokens: of graphs of chunks, and of the delta rule."""
    make_hybrid_checkpoint(tmp_path) if model == "hybrid" else make_checkpoint(tmp_path)
    options = dict(dtype="bfloat16", device=DEVICE, skip_tokenizer_init=True, max_num_seqs=16)
    prompts = [[i + 1] * (11 * i + 1) for i in range(12)]
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    found = []
    for eager in (True, False):
        llm = LLM(str(tmp_path), num_kv_cache_blocks=400, enforce_eager=eager, **options)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        entries = [entry for o in outputs for entry in o.prompt_logprobs[1:]]
        found.append(torch.tensor([x.logprob for entry in entries for x in entry.values()]))
    assert error(found[1], found[0]) < 2e-2


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_tokens_are_the_same_captured_and_eager(
    tmp_path: Path, quantization: str
) -> None:
    make_checkpoint(tmp_path, tie=True)
    prompts = [[i + 1] * (3 * i + 1) for i in range(12)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    answers = []
    for options in ({}, {"enforce_eager": True}, {"max_num_batched_tokens": 16}):
        llm = LLM(
            str(tmp_path),
            dtype="float32",
            device=DEVICE,
            skip_tokenizer_init=True,
            quantization=quantization,
            max_num_seqs=16,
            num_kv_cache_blocks=400,
            **options,
        )
        answers.append([o["token_ids"] for o in llm.generate(prompts, params, use_tqdm=False)])
    assert answers[1] == answers[0]
    assert answers[2] == answers[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sampler(dtype: torch.dtype) -> None:
    """The reference's tokens, but where sums in another order fall on the other side of an edge."""
    from nanovllm.backends.gpu.kernels.sampler import sample

    torch.manual_seed(0)
    rows, size = 256, 151_936
    logits = (4 * torch.randn(rows, size, device=DEVICE)).to(dtype)

    def pick(*values: float) -> Tensor:
        return torch.tensor(values, device=DEVICE)[torch.randint(len(values), (rows,))]

    batch = SamplingBatch(
        temperature=pick(0.0, 0.6, 1.0),
        filters={
            "top_k": pick(0, 0, 1, 20, 50, 5000).long(),  # 5000 is more than the chunks
            "top_p": pick(1.0, 0.95, 0.5),
            "min_p": pick(0.0, 0.05),
        },
        seeds=torch.randint(2**62, (rows,), device=DEVICE),
        positions=torch.randint(10_000, (rows,), device=DEVICE),
    )
    found = sample(logits, batch)
    wanted = sampler.sample(logits.float(), batch)
    assert float((found == wanted).float().mean()) > 0.98


CHATS = [
    [{"role": "user", "content": s.question}]
    for task in data.ALL_TASKS
    for s in data.graded_samples(task, 6)[:6]
]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("eager", [False, True])
def test_cuda_equals_cpu(embedded: LLM, eager: bool, asynchronous: bool) -> None:
    """In float32 the answers of the embedded model are the CPU's, up to near-ties."""
    llm = LLM(dtype="float32", device=DEVICE, async_scheduling=asynchronous, enforce_eager=eager)
    greedy = SamplingParams(temperature=0, max_tokens=256)
    # On the GPU without logprobs: with them a captured step samples its tokens again.
    wanted, found = (
        [o.outputs[0] for o in engine.chat(CHATS, params, use_tqdm=False)]
        for engine, params in ((embedded, replace(greedy, logprobs=2)), (llm, greedy))
    )
    assert references.count_near_ties(wanted, found) <= 1 + len(CHATS) // 50


def test_what_graphs_read_is_not_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as torch sees it: tests/helpers/dry_run.py checks what Triton's kernels read."""
    graph = torch.cuda.graph
    if "check_input_liveness" not in inspect.signature(graph).parameters:
        pytest.skip("this torch does not check it")
    monkeypatch.setattr(torch.cuda, "graph", partial(graph, check_input_liveness=True))
    make_checkpoint(tmp_path)
    llm = LLM(str(tmp_path), device=DEVICE, skip_tokenizer_init=True, max_num_seqs=4)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    assert len(llm.generate([[1, 2, 3]] * 4, params, use_tqdm=False)) == 4


def test_bf16_is_right_too() -> None:
    for task, (right, total, failed) in accuracy(LLM(dtype="bfloat16", device=DEVICE)).items():
        assert right / total >= 0.98, (task, failed[:3])


@pytest.mark.parametrize("eager", [False, True])
def test_fp8_against_the_cpu(eager: bool) -> None:
    """Prompts, chunks and decodes, in float32 with an fp8 cache on both devices.

    A sum in another order can move a number over an edge, so that it is rounded to another
    neighbour in fp8; nearly all log-probabilities are those of the CPU.
    """
    needs_fp8()
    params = SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, logprobs=0, prompt_logprobs=0
    )
    prompts = [[5 + (3 * i + n) % 900 for i in range(n)] for n in (3, 16, 40, 333)]
    numbers = []
    for device in ("cpu", DEVICE):
        llm = LLM(
            dtype="float32",
            device=device,
            kv_cache_dtype="fp8",
            enforce_eager=eager,
            max_num_batched_tokens=128,
        )
        outputs = llm.generate(prompts, params, use_tqdm=False)
        numbers.append(
            [
                max(entry.values(), key=lambda x: -x.rank).logprob
                for o in outputs
                for entry in [*o.prompt_logprobs[1:], *o.outputs[0].logprobs]
            ]
        )
    difference = (torch.tensor(numbers[0]) - torch.tensor(numbers[1])).abs()
    assert float((difference < 1e-2).float().mean()) > 0.9


def test_fp8_is_right_too() -> None:
    needs_fp8()
    llm = LLM(dtype="bfloat16", device=DEVICE, kv_cache_dtype="fp8")
    assert llm.engine.runner.attention.cache.dtype == FP8
    for task, (right, total, failed) in accuracy(llm).items():
        assert right / total >= 0.97, (task, failed[:3])


QWEN3_06B = dict(
    vocab_size=151_936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    tie_word_embeddings=True,
    max_position_embeddings=4096,
)
# Of the 8B model a few layers: what a layer does does not change with their number.
QWEN3_8B = QWEN3_06B | dict(
    hidden_size=4096,
    intermediate_size=12_288,
    num_hidden_layers=4,
    num_attention_heads=32,
    tie_word_embeddings=False,
)


@pytest.mark.parametrize("shape", [QWEN3_06B, QWEN3_8B], ids=["0.6b", "8b"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_real_shapes_against_transformers(tmp_path: Path, shape: dict, dtype: str) -> None:
    """Log-probabilities of prompts, by transformers on the same card."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        Qwen3ForCausalLM(Qwen3Config(**shape)).to(getattr(torch, dtype)).save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).to(DEVICE).eval()
    prompts = [torch.randint(150_000, (n,)).tolist() for n in (7, 64, 129, 700)]
    llm = LLM(
        str(tmp_path),
        dtype=dtype,
        device=DEVICE,
        skip_tokenizer_init=True,
        max_num_batched_tokens=512,
        gpu_memory_utilization=0.6,
    )
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
    for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        tokens = output.outputs[0].token_ids
        with torch.inference_mode():
            ids = torch.tensor([prompt + tokens], device=DEVICE)
            logprobs = theirs(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        wanted = logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0]
        entries = zip(tokens, output.outputs[0].logprobs, strict=True)
        found = torch.tensor([at[token].logprob for token, at in entries], device=DEVICE)
        limit = 2e-3 if dtype == "float32" else 0.15
        assert float((found - wanted).abs().max()) < limit
        # The most likely tokens, or one of a near-tie.
        assert float((logprobs.amax(-1) - wanted).max()) < limit


def test_steady_decode_never_waits(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, max_position_embeddings=1024)
    llm = LLM(str(tmp_path), device=DEVICE, skip_tokenizer_init=True, max_num_seqs=8)
    params = SamplingParams(temperature=0.7, top_k=20, top_p=0.9, ignore_eos=True, max_tokens=400)
    for i in range(8):
        llm.engine.add_request([i + 1] * 5, params)
    for _ in range(5):
        llm.engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(200):
            llm.engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("num", [1, 2, 7, 8, 64, 100, 256, 512])
def test_capture_sizes(tmp_path: Path, num: int) -> None:
    """A batch as large as can be, its rows in every combination as they end.

    Matrix products of other sizes round differently.
    """
    make_checkpoint(tmp_path)
    prompts = [[i % 190 + 1, 2, 3] for i in range(num)]
    params = [
        SamplingParams(temperature=0, max_tokens=1 + i % 60, ignore_eos=True, logprobs=2)
        for i in range(num)
    ]
    answers = []
    for eager in (True, False):
        llm = LLM(
            str(tmp_path),
            dtype="float32",
            device=DEVICE,
            skip_tokenizer_init=True,
            max_num_seqs=num,
            enforce_eager=eager,
            gpu_memory_utilization=0.3,
        )
        answers.append([o.outputs[0] for o in llm.generate(prompts, params, use_tqdm=False)])
        del llm
    for wanted, found in zip(*answers, strict=True):
        assert len(found.token_ids) == len(wanted.token_ids)
    assert references.count_near_ties(*answers) <= 1 + num // 50


def test_a_full_pool(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    prompts = [[i + 1] * 20 for i in range(40)]
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=100, ignore_eos=True)
    answers = []
    for blocks in (400, 30):
        llm = LLM(
            str(tmp_path),
            dtype="float32",
            device=DEVICE,
            skip_tokenizer_init=True,
            max_num_seqs=16,
            num_kv_cache_blocks=blocks,
        )
        outputs = llm.generate(prompts, params, use_tqdm=False)
        answers.append([o.outputs[0].token_ids for o in outputs])
    assert llm.stats()["preemptions"] > 0
    assert answers[1] == answers[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8], ids=str)
def test_copies_of_the_host_pool(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Blocks that are saved, overwritten at once, and loaded elsewhere, several times over."""
    monkeypatch.setattr(host_pool, "STAGING_BYTES", 3 * 3 * 2 * 2 * 16 * 64 * dtype.itemsize)
    monkeypatch.setattr(host_pool, "CHUNK_BYTES", 7 * 3 * 2 * 2 * 16 * 64 * dtype.itemsize)
    cache = torch.randn(3, 2, 40, 2, 16, 64, device=DEVICE).to(dtype)
    pool = host_pool.PinnedPool(30, cache[:, :, 0])
    bits = cache.view(torch.uint8)
    with torch.inference_mode():
        for _ in range(20):
            before, blocks, slots = bits.clone(), torch.randperm(40), torch.randperm(30)[:20]
            pool.save(cache, [BlockCopy(*m) for m in zip(blocks.tolist(), slots.tolist())])  # noqa: B905
            bits.fill_(255)
            moves = zip(slots.tolist(), blocks.tolist()[20:])  # noqa: B905
            pool.load(cache, [BlockCopy(*move) for move in moves])
            assert torch.equal(bits[:, :, blocks[20:]], before[:, :, blocks[:20]])
            assert (bits[:, :, blocks[:20]] == 255).all()
            bits.copy_(before)


@pytest.mark.parametrize("eager", [True, False])
def test_tokens_with_a_host_cache(tmp_path: Path, eager: bool) -> None:
    make_checkpoint(tmp_path)
    options = dict(dtype="float32", skip_tokenizer_init=True, max_num_seqs=4, max_model_len=300)
    options |= dict(block_size=16, enforce_eager=eager)
    prompts = [[(7 * i + j) % 190 + 1 for j in range(40 + 15 * i)] for i in range(10)]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)

    def tokens(**more: object) -> tuple[list[list[int]], dict]:
        llm = LLM(str(tmp_path), device=DEVICE, **options, **more)
        rounds = [llm.generate(prompts, params, use_tqdm=False) for _ in range(2)]
        return [out.outputs[0].token_ids for outs in rounds for out in outs], llm.stats()

    wanted, _ = tokens(num_kv_cache_blocks=400)
    found, stats = tokens(num_kv_cache_blocks=24, swap_space=2**-6)
    assert found == wanted
    assert stats["host_loads"] > 20


def test_too_little_memory_is_a_clear_error() -> None:
    for options, what in (
        ({}, "too little memory for the KV cache"),
        ({"max_model_len": 512}, "a request of 512 tokens need"),
    ):
        with pytest.raises(ValueError, match=rf"{what}.*gpu_memory_util"):
            LLM(device=DEVICE, gpu_memory_utilization=1e-5, **options)
    answer = LLM(device=DEVICE, gpu_memory_utilization=0.3).chat(CHATS[0], use_tqdm=False)
    assert answer[0].outputs[0].text
