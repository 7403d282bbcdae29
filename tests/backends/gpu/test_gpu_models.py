"""Answers of trained and of large models on a GPU."""

from dataclasses import replace

import pytest
import references
import torch
from gpu_cases import DEVICE, MARKS, needs_fp8
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from nanovllm import LLM, SamplingParams
from nanovllm.models.fp8 import FP8
from tools.training import data
from tools.training.grade import accuracy

pytestmark = MARKS

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


INT8 = {"quantization": "int8"}


@pytest.mark.parametrize(
    "options", [{}, {"kv_cache_dtype": "fp8"}, INT8, {**INT8, "enforce_eager": True}], ids=str
)
def test_most_answers_are_right(options: dict) -> None:
    """In bfloat16, with an fp8 cache, and with weights in int8, captured or not."""
    if "kv_cache_dtype" in options:
        needs_fp8()
    llm = LLM(dtype="bfloat16", device=DEVICE, **options)
    runner = llm.engine.runner
    assert (runner.attention.cache.dtype == FP8) == ("kv_cache_dtype" in options)
    is_plain = isinstance(runner.model.lm_head.weight, torch.Tensor)
    assert is_plain == ("quantization" not in options)
    for task, (right, total, failed) in accuracy(llm).items():
        assert right / total >= (0.97 if options else 0.98), (task, failed[:3])


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
def test_real_shapes_against_transformers(tmp_path, shape: dict, dtype: str) -> None:
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
