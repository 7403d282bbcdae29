"""Mixtures of experts: their numbers are transformers', however a prompt is computed."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from checkpoints import check_greedy, edited, prompts_of, random_llm
from moe_checkpoints import make_moe_checkpoint
from quantized_files import quantize_checkpoint
from safetensors.torch import load_file, save_file

from nanovllm import LLM, SamplingParams
from nanovllm.loading import memory
from tools.benchmarks.workloads import write_shape

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=1)


HYBRID = dict(layer_types="LFL")
SHAPES = [
    dict(num_experts=4, num_experts_per_tok=1),
    dict(num_experts=60, num_experts_per_tok=8),
    dict(num_experts=5, num_experts_per_tok=5, norm_topk_prob=False),
    dict(mlp_only_layers=[1]),
    dict(decoder_sparse_step=2),
    dict(hybrid=True, **HYBRID),
]


@pytest.mark.parametrize("backend", ["sdpa", "numba"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_parity(shape: dict[str, Any], backend: str, tmp_path) -> None:
    """Batches with chunked prefill, decodes and preemption."""
    model = make_moe_checkpoint(tmp_path, **shape)
    options = dict(max_num_batched_tokens=24, max_num_seqs=6, num_kv_cache_blocks=14)
    llm = random_llm(tmp_path, attention_backend=backend, **options)
    params = replace(GREEDY, max_tokens=40)
    check_greedy(model, llm.generate(prompts_of(1, 33, 70, 5, 64, 43), params, use_tqdm=False))
    assert llm.stats()["preemptions"] > 0


def test_equal_scores_choose_the_experts_of_transformers(tmp_path) -> None:
    model = make_moe_checkpoint(tmp_path)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight[1:] = layer.mlp.gate.weight[0]
    model.save_pretrained(tmp_path)
    check_greedy(model, random_llm(tmp_path).generate(prompts_of(9, 30), GREEDY, use_tqdm=False))


@pytest.mark.parametrize("hybrid", [False, True])
def test_stacked_tensors(hybrid: bool, tmp_path) -> None:
    """The tensors of all experts may be one tensor, as transformers 5 has them in memory."""
    model = make_moe_checkpoint(tmp_path, hybrid=hybrid, **(HYBRID if hybrid else {}))
    save_file(
        {name: tensor.contiguous() for name, tensor in model.state_dict().items()},
        tmp_path / "model.safetensors",
    )
    assert any("experts.gate_up_proj" in name for name in load_file(tmp_path / "model.safetensors"))
    check_greedy(model, random_llm(tmp_path).generate(prompts_of(9, 30), GREEDY, use_tqdm=False))


@pytest.mark.parametrize("name", ["fp8 blocks", "awq"])
def test_quantized_checkpoints(name: str, tmp_path) -> None:
    """Each expert has its own scales, as in Qwen's FP8 checkpoints."""
    quantized, plain = tmp_path / "quantized", tmp_path / "plain"
    for path in (quantized, plain):
        make_moe_checkpoint(path, moe_intermediate_size=64)
    decoded = quantize_checkpoint(quantized, name, shards=2)
    assert "model.layers.0.mlp.experts.7.up_proj.weight" in decoded
    save_file(decoded, plain / "model.safetensors")
    found, wanted = (
        random_llm(path).generate(prompts_of(9, 30), GREEDY, use_tqdm=False)
        for path in (quantized, plain)
    )
    for output, expected in zip(found, wanted, strict=True):
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        assert output.outputs[0].cumulative_logprob == expected.outputs[0].cumulative_logprob


@pytest.mark.parametrize(("quantization", "gib"), [(None, "56.87"), ("int8", "28.82")])
def test_a_message_says_what_a3b_needs(
    quantization: str | None, gib: str, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda *_: 24 << 30)
    path = write_shape("qwen3-30b-a3b", tmp_path)
    options = dict(dtype="bfloat16", quantization=quantization, attention_backend="sdpa")
    message = f"take {gib} GiB in {quantization or 'bfloat16'}, and 24.00 GiB of memory"
    with pytest.raises(ValueError, match=message) as error:
        LLM(str(path), device="cpu", load_format="dummy", skip_tokenizer_init=True, **options)
    remedies = str(error.value).split("free on cpu")[1]  # only what takes less memory
    named = [kind for kind in ("bfloat16'", "int8'", "int4'") if kind in remedies]
    assert named == (["int4'"] if quantization else ["int8'", "int4'"])


WRONG = [
    ({"moe_intermediate_size": None}, "has no 'moe_intermediate_size'"),
    ({"num_experts": 0}, "num_experts"),
    ({"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not supported"),
    ({"num_experts": 6}, "unexpected: model.layers.0.mlp.experts.6"),
    ({"num_experts": 12}, "missing: model.layers.0.mlp.experts.8"),
    ({"moe_intermediate_size": 40}, "experts.0.gate_proj.weight"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG, ids=str)
def test_wrong_config(fields: dict[str, Any], message: str, tmp_path) -> None:
    original, copy = tmp_path / "original", tmp_path / "copy"
    make_moe_checkpoint(original)
    copy.mkdir()
    path = edited(original, copy)
    raw = json.loads((path / "config.json").read_text())
    raw.pop("num_local_experts", None)
    (path / "config.json").write_text(json.dumps({"num_experts": 8} | raw | fields))
    with pytest.raises(ValueError, match=message):
        random_llm(path)
