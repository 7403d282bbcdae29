"""Families that differ by names: their numbers are transformers', however a prompt is computed."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import lora, save_adapter, with_factors
from checkpoints import check_greedy, edited, prompts_of, random_llm
from family_checkpoints import FAMILIES, LONG, make_family_checkpoint
from quantized_files import quantize_checkpoint
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from nanovllm import LLM, PoolingParams, SamplingParams
from nanovllm.loading.checkpoint import Checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=1)
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks, preemption": dict(max_num_batched_tokens=24, max_num_seqs=6, num_kv_cache_blocks=14),
    "drafts": dict(speculative_config={"method": "ngram", "num_speculative_tokens": 3}),
}
each_family = pytest.mark.parametrize("family", FAMILIES)


@pytest.mark.parametrize("backend", ["sdpa", "numba"])
@each_family
def test_parity(family: str, backend: str, tmp_path) -> None:
    """Log-probabilities and greedy tokens, and the same with a hit in the prefix cache."""
    model = make_family_checkpoint(tmp_path, family)
    prompts, params = prompts_of(1, 33, 70, 5, 64, 43), replace(GREEDY, max_tokens=40)
    for way, options in WAYS.items():
        llm = random_llm(tmp_path, attention_backend=backend, **options)
        check_greedy(model, llm.generate(prompts, params, use_tqdm=False))
        is_fused = type(llm.engine.runner.fused_model).__name__ == "FusedLayers"
        assert is_fused == (backend == "numba")
        assert (llm.stats()["preemptions"] > 0) == ("preemption" in way)
        assert ("accepted_tokens" in llm.stats()) == (way == "drafts")
        again = llm.generate(prompts[4:5], params, use_tqdm=False)
        assert way != "whole" or again[0].num_cached_tokens == 48
        check_greedy(model, again)


@each_family
def test_a_prompt_at_each_position(family: str, tmp_path) -> None:
    """All log-probabilities of a long prompt, and the hidden state of its last token."""
    model = make_family_checkpoint(tmp_path, family)
    [prompt] = prompts_of(150)
    llm = random_llm(tmp_path, attention_backend="numba")
    ids = torch.tensor([prompt["prompt_token_ids"]])
    with torch.no_grad():
        output = model(ids, output_hidden_states=True)
    wanted = output.logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    params = replace(GREEDY, max_tokens=1, prompt_logprobs=0)
    [found] = llm.generate([prompt], params, use_tqdm=False)
    logprobs = [
        e[t].logprob for e, t in zip(found.prompt_logprobs[1:], ids[0, 1:].tolist(), strict=True)
    ]
    torch.testing.assert_close(torch.tensor(logprobs), wanted, atol=1e-4, rtol=0)
    embedding = llm.embed([prompt], PoolingParams(normalize=False), use_tqdm=False)[
        0
    ].outputs.embedding
    hidden = output.hidden_states[-1][0, -1]
    torch.testing.assert_close(torch.tensor(embedding), hidden, atol=1e-4, rtol=1e-4)


# ---- other forms of weights ----


def tokens(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(prompts_of(5, 33, 20), replace(GREEDY, logprobs=None), use_tqdm=False)
    return [out.outputs[0].token_ids for out in outputs]


def saved(path: Path, like: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A checkpoint with the config of another one, and these weights."""
    path.mkdir()
    config = json.loads((like / "config.json").read_text()) | {"quantization_config": None}
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path


def logprobs(llm: LLM) -> torch.Tensor:
    """The log-probabilities of the tokens of prompts."""
    params = replace(GREEDY, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate(prompts_of(5, 33, 20), params, use_tqdm=False)
    steps = [step for output in outputs for step in output.prompt_logprobs[1:]]
    return torch.tensor([next(iter(step.values())).logprob for step in steps])


@pytest.mark.parametrize("kind", ["int8", "int4"])
@each_family
def test_quantized_weights(family: str, kind: str, tmp_path) -> None:
    """The weights are near transformers'. A CPU rounds x, too: its kernel as its reference does."""
    make_family_checkpoint(tmp_path, family)
    plain = random_llm(tmp_path, attention_backend="sdpa").engine.runner.model
    found = []
    for backend in ("sdpa", "numba"):
        make = partial(random_llm, tmp_path, attention_backend=backend, quantization=kind)
        llm = make()
        found.append(logprobs(llm))
        small = make(num_kv_cache_blocks=14, max_num_batched_tokens=24)
        assert tokens(small) == tokens(llm)
        if backend == "sdpa":
            pairs = zip(llm.engine.runner.model.linears(), plain.linears(), strict=True)
            for linear, exact in pairs:
                rounded = linear.weight.dequantized() - exact.weight
                assert rounded.norm() < (0.01 if kind == "int8" else 0.12) * exact.weight.norm()
    assert (found[0] - found[1]).abs().mean() < 0.1


@pytest.mark.parametrize("name", ["fp8 blocks", "fp8 of Ministral 3", "awq", "compressed W4A16"])
@each_family
def test_quantized_checkpoints(family: str, name: str, tmp_path) -> None:
    make_family_checkpoint(tmp_path / "base", family)
    decoded = quantize_checkpoint(tmp_path / "base", name)
    plain = saved(tmp_path / "plain", tmp_path / "base", decoded)
    assert tokens(random_llm(tmp_path / "base")) == tokens(random_llm(plain))


def test_packed_numbers_are_kept(tmp_path) -> None:
    """Of a tensor of q, k and v with 4 bits, whose rows are stored in another order."""
    make_family_checkpoint(tmp_path, "phi4mini")
    decoded = quantize_checkpoint(tmp_path, "gptq symmetric")
    model = random_llm(tmp_path, attention_backend="sdpa", quantization="int4").engine.runner.model
    name = "model.layers.0.self_attn.qkv_proj.weight"
    attn = model.layers[0].self_attn
    weight = attn.qkv_proj.weight.dequantized()
    torch.testing.assert_close(weight, decoded[name][attn.rows].float(), atol=1e-3, rtol=1e-3)


@each_family
def test_adapters(family: str, tmp_path) -> None:
    make_family_checkpoint(tmp_path / "base", family)
    base = load_file(tmp_path / "base" / "model.safetensors")
    factors = lora(base, r"^(?!.*vision).*layers.*_proj.weight|lm_head")
    merged = saved(tmp_path / "merged", tmp_path / "base", with_factors(base, factors, 2.0))
    adapter = save_adapter(tmp_path / "adapter", factors, lora_alpha=8)
    found = tokens(random_llm(tmp_path / "base", adapter=adapter))
    assert found == tokens(random_llm(merged)) != tokens(random_llm(tmp_path / "base"))


@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}], ids=str)
@each_family
def test_new_weights(family: str, options: dict[str, Any], tmp_path) -> None:
    """From a state_dict, a generator, and a directory, and after the weights slept."""
    make_family_checkpoint(tmp_path / "old", family)
    new = make_family_checkpoint(tmp_path / "new", family, seed=1)
    llm = random_llm(tmp_path / "old", **options)
    before, wanted = tokens(llm), tokens(random_llm(tmp_path / "new", **options))
    for weights in (new.state_dict(), iter(new.state_dict().items()), tmp_path / "new"):
        llm.load_weights(weights)
        assert tokens(llm) == wanted != before
        llm.load_weights(tmp_path / "old")
        assert tokens(llm) == before
    llm.sleep(level=2)
    llm.wake_up()
    llm.load_weights(tmp_path / "new")
    assert tokens(llm) == wanted


# ---- positions ----


def test_longrope_is_chosen_by_the_longest_request(tmp_path) -> None:
    """transformers chooses by the length of a sequence. Both agree beyond the original length."""
    model = make_family_checkpoint(tmp_path, "phi4mini")
    assert random_llm(tmp_path).engine.input_processor.max_model_len == 160
    llm = random_llm(tmp_path, max_model_len=161)
    check_greedy(model, llm.generate(prompts_of(161 - 1), replace(GREEDY, max_tokens=1)))
    llm = random_llm(tmp_path, max_model_len=300)
    prompts = prompts_of(170, 200)
    check_greedy(model, llm.generate(prompts, GREEDY, use_tqdm=False))
    with pytest.raises(AssertionError):
        check_greedy(model, llm.generate(prompts_of(30), GREEDY, use_tqdm=False))


def test_the_factor_of_later_queries_is_refused(tmp_path) -> None:
    make_family_checkpoint(tmp_path, "ministral3")
    assert random_llm(tmp_path).engine.input_processor.max_model_len == 256
    with pytest.raises(
        ValueError, match="257 is more than the 256 original positions .*llama_4_scaling_beta"
    ):
        random_llm(tmp_path, max_model_len=257)


# ---- files of the form of released ones ----

PHI4_MINI = {
    "architectures": ["Phi3ForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
    "rope_parameters": None,
    "rope_scaling": {"type": "longrope"} | {k: LONG[k] for k in ("short_factor", "long_factor")},
    **{
        "interpolate_factor": 1,
        "full_attn_mod": 1,
        "lm_head_bias": False,
        "mlp_bias": False,
        "attention_bias": False,
    },
    **{"embd_pdrop": 0.0, "resid_pdrop": 0.0, "partial_rotary_factor": 0.75, "rope_theta": 1e4},
    **{"sliding_window": 262144, "original_max_position_embeddings": 160},
}
WRONG: list[tuple[str, dict[str, Any], str]] = [
    (
        "phi4mini",
        {"rope_scaling": {"type": "longrope", "long_factor": [1] * 9}},
        "'longrope' needs 'short_factor'",
    ),
    (
        "phi4mini",
        {"rope_scaling": PHI4_MINI["rope_scaling"] | {"long_factor": [1.0] * 8}},
        "long_factor must have 9 numbers, not 8",
    ),
    (
        "phi4mini",
        {"rope_scaling": PHI4_MINI["rope_scaling"] | {"short_factor": ["1"] * 9}},
        "short_factor must be a",
    ),
    ("phi4mini", {"partial_rotary_factor": 0.4}, "the 9 rotated numbers"),
    (
        "phi4mini",
        {"architectures": ["Phi4MMForCausalLM"], "embd_layer": {"x": 1}},
        "nearest is Phi3ForCausalLM, and this model differs by embd_layer",
    ),
    (
        "smollm3",
        {"no_rope_layers": [1, 0]},
        r"no_rope_layers must have 3 entries 0 or 1, not \[1, 0\]",
    ),
    ("smollm3", {"no_rope_layers": [1, 0, 2]}, "no_rope_layers must have 3"),
    (
        "granite",
        {"architectures": ["GraniteMoeHybridForCausalLM"], "mamba_d_conv": 4},
        "GraniteMoeHybridForCausalLM.* is not supported.*nearest is GraniteForCausalLM, and this model differs by mamba_d_conv=4",
    ),
    ("granite", {"residual_multiplier": 0}, "residual_multiplier must be"),
    (
        "gemma3",
        {"architectures": ["Gemma3nForConditionalGeneration"], "altup_num_inputs": 4},
        "Gemma3nForConditionalGeneration.* is not supported.*nearest is Gemma3ForC.*altup_num_inputs=4",
    ),
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not"),
    ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0 is not supported"),
    ("gemma3", {"hidden_activation": "gelu"}, "hidden_activation must be one of gelu_pytorch_tanh"),
    ("gemma3", {"layer_types": ["full_attention"]}, "layer_types must have 3 entries"),
    ("gemma3", {"layer_types": ["full_attention", "x", "x"]}, "layer_types must have 3 entries"),
    ("gemma3", {"sliding_window": 0}, "sliding_window must be between 1"),
    ("gemma3", {"rope_parameters": {"rope_type": "linear", "factor": 2}}, "has 'factor'; rope_sc"),
]


@pytest.mark.parametrize(("family", "changes", "words"), WRONG, ids=str)
def test_what_is_refused(family: str, changes: dict[str, Any], words: str, tmp_path) -> None:
    (tmp_path / "wrong").mkdir()
    make_family_checkpoint(tmp_path, family)
    form = PHI4_MINI if family == "phi4mini" else {}
    with pytest.raises(ValueError, match=words):
        Checkpoint(edited(tmp_path, tmp_path / "wrong", **form | changes))


def test_the_form_of_phi4_mini(tmp_path) -> None:
    (tmp_path / "form").mkdir()
    make_family_checkpoint(tmp_path, "phi4mini")
    found = Checkpoint(edited(tmp_path, tmp_path / "form", **PHI4_MINI)).model_config
    assert found == Checkpoint(tmp_path).model_config


GEMMA3 = {  # without rope_parameters and layer_types, as it was released
    **{"rope_parameters": None, "rope_theta": 1_000_000, "rope_local_base_freq": 10_000},
    **{"layer_types": None, "sliding_window_pattern": 2, "cache_implementation": "hybrid"},
    **{"attn_logit_softcapping": None, "final_logit_softcapping": None, "rope_scaling": None},
}


def test_the_form_of_gemma_3(tmp_path) -> None:
    (tmp_path / "form").mkdir()
    make_family_checkpoint(tmp_path, "gemma3")
    found = Checkpoint(edited(tmp_path, tmp_path / "form", **GEMMA3)).model_config
    assert found == Checkpoint(tmp_path).model_config
    assert found.windows == (20, 0, 20)
    text = {"hidden_size": 5376, "num_hidden_layers": 62, "num_attention_heads": 32}
    text |= {"head_dim": 128, "num_key_value_heads": 16, "query_pre_attn_scalar": 168}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    whole |= {"text_config": text, "vision_config": {"hidden_size": 4}, "mm_tokens_per_image": 256}
    (tmp_path / "form" / "config.json").write_text(json.dumps(whole))
    found = Checkpoint(tmp_path / "form").model_config
    assert found.windows == ((1024,) * 5 + (0,)) * 10 + (1024,) * 2
    assert [found.ropes[i].factor for i in (4, 5)] == [1.0, 8.0]
    assert found.attention_scale == (128 / 168) ** 0.5
    assert found.tie_word_embeddings


def test_a_chat_of_gemma_3(tmp_path) -> None:
    """The template writes <bos>, as the tokenizer does before a text. Two tokens end an answer."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    letters = [chr(c) for c in (10, *range(97, 123))] + ["▁"]
    vocab = {token: i for i, token in enumerate([*special, *letters])}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Replace("▁", " ")
    tokenizer.add_special_tokens([AddedToken(x, special=True, normalized=False) for x in special])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 2)]
    )
    make_family_checkpoint(tmp_path, "gemma3", eos_token_id=[1, 5], bos_token_id=2)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "tokenizer_class": "GemmaTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    (tmp_path / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + m.role + '\n' + (m.content if "
        "m.content is string else m.content[0].text) | trim + '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
    )
    llm = random_llm(tmp_path, skip_tokenizer_init=False)
    [chat] = llm.chat([{"role": "user", "content": "say it "}], GREEDY, use_tqdm=False)
    ids = [vocab.get(x, 3) for x in "user\nsay▁it"]
    model = [vocab[x] for x in "model\n"]
    assert chat.prompt_token_ids == [2, 4, *ids, 5, vocab["\n"], 4, *model]
    assert llm.generate("it", GREEDY, use_tqdm=False)[0].prompt_token_ids[0] == 2
    assert llm.engine.input_processor.eos_token_ids == {1, 5}
