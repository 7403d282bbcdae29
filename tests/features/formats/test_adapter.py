"""LoRA adapters, compared with PEFT and with the formula W + scale * B A."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import Tensors, lora, save_adapter, with_factors
from checkpoints import make_checkpoint, random_llm, weights_of
from moe_checkpoints import make_moe_checkpoint
from quantized_files import quantize_checkpoint
from safetensors.torch import load_file, save_file

from nanovllm import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9], [11] * 20]


def tokens(llm: LLM) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def pair(
    path: Path, modules: str = "_proj", family: str = "qwen3", moe: bool = False, scale: float = 2.0
) -> tuple[Path, Path, Path]:
    """A base model, an adapter of it, and the merged model."""
    for name in ("base", "merged"):
        (make_moe_checkpoint if moe else make_checkpoint)(path / name, *[] if moe else [family])
    base = load_file(path / "base" / "model.safetensors")
    tensors = lora(base, modules)
    adapter = save_adapter(path / "adapter", tensors, lora_alpha=4 * scale)
    save_file(with_factors(base, tensors, scale), path / "merged" / "model.safetensors")
    return path / "base", adapter, path / "merged"


@pytest.mark.parametrize(
    "options",
    [{}, {"attention_backend": "sdpa"}, {"quantization": "int8"}, {"quantization": "int4"}],
    ids=str,
)
def test_every_linear_layer(tmp_path: Path, options: dict[str, Any]) -> None:
    """Fused, packed and quantized weights are the merged ones, to rounding."""
    base, adapter, merged = pair(tmp_path, "_proj|lm_head")
    found = random_llm(base, adapter=adapter, **options)
    assert tokens(found) == tokens(random_llm(merged, **options)) != tokens(random_llm(base))
    if options.get("attention_backend"):
        weights, wanted = weights_of(found), weights_of(random_llm(merged, **options))
        assert weights.keys() == wanted.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(weight, wanted[name], rtol=1e-6, atol=1e-6)


def test_experts(tmp_path: Path) -> None:
    base, adapter, merged = pair(tmp_path, r"experts\.\d\.|q_proj", moe=True)
    wanted = tokens(random_llm(merged))
    assert tokens(random_llm(base, adapter=adapter)) == wanted != tokens(random_llm(base))


def test_ranks_and_scales_of_modules(tmp_path: Path) -> None:
    """A pattern is the end of a name or a regular expression; the first that matches counts."""
    make_checkpoint(tmp_path / "base")
    base = load_file(tmp_path / "base" / "model.safetensors")
    groups = {  # modules -> rank, alpha
        r"layers\.0.*(q|k|v)_proj": (2, 3.0),
        r"down_proj": (6, 8.0),
        r"layers\.1.*o_proj": (4, 5.0),
    }
    tensors, wanted = Tensors(), base
    for modules, (rank, alpha) in groups.items():
        factors = lora(base, modules, rank)
        tensors |= factors
        wanted = with_factors(wanted, factors, alpha / math.sqrt(rank))
    config = dict(
        lora_alpha=8,
        use_rslora=True,
        rank_pattern={r"^model.layers.0.self_attn.[qkv]_proj": 2, "down_proj": 6, "proj": 4},
        alpha_pattern={"self_attn.[qkv]_proj": 3, "layers.1.self_attn.o_proj": 5, "o_proj": 1},
        layers_to_transform=[0, 1],
        target_modules="all-linear",
        fan_in_fan_out=True,
        lora_dropout=0.5,
        megatron_core="megatron.core",
    )
    adapter = save_adapter(tmp_path / "adapter", tensors, **config)
    llm = random_llm(tmp_path / "base", adapter=str(adapter), attention_backend="sdpa")
    for name, weight in weights_of(llm).items():
        torch.testing.assert_close(weight, wanted[name], rtol=1e-6, atol=1e-6)


def test_tensors_that_replace_tensors(tmp_path: Path) -> None:
    """Of modules_to_save and biases, and of a module that is also the base of factors."""
    make_checkpoint(tmp_path / "base", "qwen2")
    base = load_file(tmp_path / "base" / "model.safetensors")
    q, k = (f"model.layers.1.self_attn.{name}_proj" for name in "qk")
    new = {
        name: torch.randn_like(base[name])
        for name in (f"{q}.bias", f"{k}.bias", "model.norm.weight", "lm_head.weight")
    }
    factors = lora(base, f"{k}.weight|lm_head")
    tensors = {
        name.replace("k_proj", "k_proj.base_layer").replace("lm_head", "lm_head.base_layer"): x
        for name, x in new.items()
    } | factors
    adapter = save_adapter(tmp_path / "adapter", tensors, bias="all", modules_to_save=["norm"])
    llm = random_llm(tmp_path / "base", adapter=adapter, attention_backend="sdpa")
    wanted = with_factors(base | new, factors, 2.0)
    for name, weight in weights_of(llm).items():
        torch.testing.assert_close(weight, wanted[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("prefix", ["", "model.language_model."])
def test_other_prefixes(tmp_path: Path, prefix: str) -> None:
    """Of an adapter that was trained without the head, or with a model that has a vision tower."""
    base, adapter, merged = pair(tmp_path)
    wanted, file = tokens(random_llm(merged)), adapter / "adapter_model.safetensors"
    renamed = {
        name.replace("model.layers", f"{prefix}layers"): x for name, x in load_file(file).items()
    }
    save_file(renamed, file)
    assert tokens(random_llm(base, adapter=adapter)) == wanted


def test_a_quantized_base_model(tmp_path: Path) -> None:
    """Its weights are decoded, merged, and quantized again if int4 is asked for."""
    make_checkpoint(tmp_path / "base")
    decoded = quantize_checkpoint(tmp_path / "base", "gptq")
    factors = lora(decoded, "q_proj|up_proj")
    adapter = save_adapter(tmp_path / "adapter", factors, lora_alpha=8)
    make_checkpoint(tmp_path / "merged")
    merged = with_factors({name: x.float() for name, x in decoded.items()}, factors, 2.0)
    save_file(merged, tmp_path / "merged" / "model.safetensors")
    llm = random_llm(tmp_path / "base", adapter=adapter, attention_backend="sdpa")
    for name, weight in weights_of(llm).items():
        torch.testing.assert_close(weight, merged[name], rtol=1e-6, atol=1e-6)
    wanted = tokens(random_llm(tmp_path / "merged", quantization="int4"))
    assert tokens(random_llm(tmp_path / "base", adapter=adapter, quantization="int4")) == wanted


def test_embeddings_and_head_that_are_one_tensor(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "base", tie=True)
    base = load_file(tmp_path / "base" / "model.safetensors")
    assert "lm_head.weight" not in base
    table = torch.randn_like(base["model.embed_tokens.weight"])
    saved = {"model.embed_tokens.weight": table, "lm_head.weight": table + 1}
    for tensors in (
        {"model.embed_tokens.weight": table},
        {"lm_head.weight": table},
        lora({"lm_head.weight": table}, ""),
        saved | lora({"lm_head.weight": table}, ""),
    ):
        adapter = save_adapter(tmp_path / "adapter", tensors)
        with pytest.raises(ValueError, match="embeddings and head are one tensor of the model"):
            random_llm(tmp_path / "base", adapter=adapter)
    adapter = save_adapter(tmp_path / "adapter", saved)
    llm = random_llm(tmp_path / "base", adapter=adapter, attention_backend="sdpa")
    for name, weight in weights_of(llm).items():
        torch.testing.assert_close(weight, (dict(model.state_dict()) | saved)[name])


PEFT = {"use_dora": True, "layer_replication": [[0, 2]], "trainable_token_indices": [3]}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        *[({name: value}, rf"{name}=.* is not supported; merge") for name, value in PEFT.items()],
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4' is not"),
        ({"a_new_field": 1, "another": 2}, "a_new_field=1, another=2 is not supported"),
        ({"peft_type": "LOHA"}, "peft_type must be one of LORA, not 'LOHA'"),
        ({"r": 0}, "r must be at least 1"),
        ({"alpha_pattern": [1]}, "alpha_pattern must be an object"),
        (
            {"r": 8},
            r"an adapter of 'the/base' with r=8, does not fit /.*/base in 28 tensors: .*"
            r"lora_A.weight is \[4, 96\], expected \[8, 96\]; ",
        ),
        ({"rank_pattern": {"k_proj": 3}}, r"k_proj.lora_A.* \[4, 64\], expected \[3, 64\]"),
    ],
    ids=str,
)
def test_what_is_not_supported(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    base, adapter, _ = pair(tmp_path)
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    with pytest.raises(ValueError, match=words):
        random_llm(base, adapter=adapter)


def test_an_adapter_of_another_model(tmp_path: Path, path: Path) -> None:
    make_checkpoint(tmp_path / "large", hidden_size=96)
    tensors = lora(load_file(tmp_path / "large" / "model.safetensors"), "layers.0.*q_proj")
    with pytest.raises(ValueError, match=r"lora_A.weight is \[4, 96\], expected \[4, 64"):
        random_llm(path, adapter=save_adapter(tmp_path / "a", tensors))
    unknown = {name.replace("layers.0", "layers.9"): x for name, x in tensors.items()}
    with pytest.raises(ValueError, match=r"layers.9.*\[4, 96\], expected no such tensor"):
        random_llm(path, adapter=save_adapter(tmp_path / "a", unknown))
    half = {name: x[..., :64] for name, x in tensors.items() if "lora_A" in name}
    with pytest.raises(ValueError, match=r"lora_B.weight is missing, expected \[128, 4\]"):
        random_llm(path, adapter=save_adapter(tmp_path / "a", half))
    for name in ("score.weight", "model.embed_tokens.lora_embedding_A"):
        with pytest.raises(ValueError, match=rf"{name} is \[1, 64\], expected no such"):
            random_llm(path, adapter=save_adapter(tmp_path / "a", {name: torch.ones(1, 64)}))
    with pytest.raises(ValueError, match="the file has no tensors"):
        random_llm(path, adapter=save_adapter(tmp_path / "a", {}))
    with pytest.raises(ValueError, match=r"norm.weight is \[5\], expected \[64\]"):
        random_llm(path, adapter=save_adapter(tmp_path / "a", {"model.norm.weight": torch.ones(5)}))


def test_files_that_are_missing_or_damaged(tmp_path: Path, path: Path) -> None:
    with pytest.raises(ValueError, match="adapter: there is no directory '/nowhere'"):
        random_llm(path, adapter="/nowhere")
    with pytest.raises(ValueError, match=r"adapter: .* has no adapter_config\.json; give a dir"):
        random_llm(path, adapter=path)
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.bin").touch()
    with pytest.raises(ValueError, match=r"has no adapter_model\.safetensors.*\*\.bin.* not read"):
        random_llm(path, adapter=tmp_path)
    (tmp_path / "adapter_model.safetensors").write_text("no")
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        random_llm(path, adapter=tmp_path)
    (tmp_path / "adapter_config.json").write_text("no")
    with pytest.raises(ValueError, match="adapter_config.json is not valid JSON"):
        random_llm(path, adapter=tmp_path)
    for several in (["a", "b"], {"a": "b"}, 3):
        with pytest.raises(TypeError, match="adapter must be one directory .* an LLM for each"):
            random_llm(path, adapter=several)


@pytest.mark.parametrize(
    ("family", "tie", "config"),
    [
        ("qwen3", False, {"target_modules": "all-linear"}),
        ("qwen3", False, {"target_modules": ["q_proj", "lm_head"], "use_rslora": True}),
        ("qwen2", False, {"target_modules": r".*\.(k|v|gate)_proj", "bias": "all"}),
        ("qwen2", False, {"target_modules": ["q_proj"], "bias": "lora_only"}),
        (
            "llama",
            True,
            {
                "target_modules": "all-linear",
                "modules_to_save": ["embed_tokens", "lm_head", "norm"],
            },
        ),
        (
            "llama",
            False,
            {
                "target_modules": ["q_proj", "down_proj"],
                "layers_to_transform": [1],
                "rank_pattern": {"down_proj": 8, "layers.1.self_attn.q_proj": 2},
                "alpha_pattern": {"q_proj": 3},
            },
        ),
    ],
    ids=str,
)
def test_peft(tmp_path: Path, family: str, tie: bool, config: dict[str, Any]) -> None:
    """The weights are those of merge_and_unload, bit for bit in float32."""
    peft = pytest.importorskip("peft")
    model = make_checkpoint(tmp_path / "base", family, tie=tie)
    settings = peft.LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **config)
    wrapped = peft.get_peft_model(model, settings)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter += torch.randn_like(parameter) * 0.2
    wrapped.save_pretrained(tmp_path / "adapter")
    merged = wrapped.merge_and_unload().state_dict()
    llm = random_llm(tmp_path / "base", adapter=tmp_path / "adapter", attention_backend="sdpa")
    for name, weight in weights_of(llm).items():
        assert torch.equal(weight, merged[name]), name
