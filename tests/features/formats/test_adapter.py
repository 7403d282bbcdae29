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
from nanovllm.features.formats.adapter import Adapter
from nanovllm.loading.checkpoint import Checkpoint, find_checkpoint

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
def test_every_linear_layer(tmp_path, options: dict[str, Any]) -> None:
    """Fused, packed and quantized weights are the merged ones, to rounding."""
    base, adapter, merged = pair(tmp_path, "_proj|lm_head")
    found = random_llm(base, adapter=adapter, **options)
    assert tokens(found) == tokens(random_llm(merged, **options)) != tokens(random_llm(base))
    if options.get("attention_backend"):
        weights, wanted = weights_of(found), weights_of(random_llm(merged, **options))
        assert weights.keys() == wanted.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(weight, wanted[name], rtol=1e-6, atol=1e-6)


def test_experts(tmp_path) -> None:
    base, adapter, merged = pair(tmp_path, r"experts\.\d\.|q_proj", moe=True)
    wanted = tokens(random_llm(merged))
    assert tokens(random_llm(base, adapter=adapter)) == wanted != tokens(random_llm(base))


@pytest.mark.parametrize("version", [None, "0.18.1", "0.21.2"])
@pytest.mark.parametrize(("kind", "sizes"), [("both", (48, 64)), ("gate_up_proj", (32, 64))])
def test_stacked_experts(tmp_path, version: str | None, kind: str, sizes: tuple[int, int]) -> None:
    """One factor has all experts. Old versions of PEFT exchange inputs and outputs."""
    inner, hidden = sizes  # of a square parameter, only the version says its order
    make_moe_checkpoint(tmp_path / "base", moe_intermediate_size=inner, num_hidden_layers=1)
    base = load_file(tmp_path / "base" / "model.safetensors")
    module, ranks = "model.layers.0.mlp.experts", {"gate_up_proj": 3, "down_proj": 2}
    tensors, wanted = Tensors(), dict(base)
    for name, (outputs, inputs), parts in (
        ("gate_up_proj", (2 * inner, hidden), ("gate_proj", "up_proj")),
        ("down_proj", (hidden, inner), ("down_proj",)),
    ):
        if kind not in ("both", name):
            continue
        is_old = version != "0.21.2"
        rank, rows, columns = ranks[name], *((inputs, outputs) if is_old else (outputs, inputs))
        a, b = torch.randn(8 * rank, columns) / 9, torch.randn(rows, rank * 8)
        layer = ".base_layer" * (kind == "both" and name == "gate_up_proj")
        tensors |= {f"{module}{layer}.lora_A.weight": a, f"{module}{layer}.lora_B.weight": b}
        stacked = b.view(rows, rank, 8), a.view(8, rank, columns)
        deltas = torch.einsum(f"ore,eri->{'eio' if is_old else 'eoi'}", *stacked)
        for expert, delta in enumerate(deltas):
            for part, rows_of_part in zip(parts, delta.chunk(len(parts)), strict=True):
                wanted[f"{module}.{expert}.{part}.weight"] += 8 / rank * rows_of_part
    config = {"peft_version": version, "target_parameters": ["mlp.experts.gate_up_proj"]}
    patterns = {f"experts.{name}": rank for name, rank in ranks.items()}
    adapter = save_adapter(
        tmp_path / "adapter", tensors, lora_alpha=8, rank_pattern=patterns, **config
    )
    checkpoint = Checkpoint(tmp_path / "base")
    checkpoint.adapter = Adapter(adapter, find_checkpoint)
    with checkpoint.open_weights() as files:
        for file in files.values():
            for name in file.keys():  # noqa: SIM118
                torch.testing.assert_close(file.get_tensor(name), wanted[name])


def test_ranks_and_scales_of_modules(tmp_path) -> None:
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


def test_tensors_that_replace_tensors(tmp_path) -> None:
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
def test_other_prefixes(tmp_path, prefix: str) -> None:
    """Of an adapter that was trained without the head, or with a model that has a vision tower."""
    base, adapter, merged = pair(tmp_path)
    wanted, file = tokens(random_llm(merged)), adapter / "adapter_model.safetensors"
    renamed = {
        name.replace("model.layers", f"{prefix}layers"): x for name, x in load_file(file).items()
    }
    if prefix:  # and LoRA of this tower, which is not in the base model
        renamed["base_model.model.model.visual.blocks.0.qkv.lora_A.weight"] = torch.ones(4, 8)
    save_file(renamed, file)
    assert tokens(random_llm(base, adapter=adapter)) == wanted


def test_a_quantized_base_model(tmp_path) -> None:
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


@pytest.mark.parametrize("keeps_tied", [False, True])
def test_embeddings_and_head_that_are_one_tensor(tmp_path, keeps_tied: bool) -> None:
    """They differ if one of them changes, unless ensure_weight_tying asks for one tensor."""
    model = make_checkpoint(tmp_path / "base", tie=True)
    embed, head = "model.embed_tokens.weight", "lm_head.weight"
    old = dict(model.state_dict())[head]
    new = torch.randn_like(old)
    of_head = lora({head: old}, "")
    merged = with_factors({head: old}, of_head, 2.0)[head]
    of_table = {
        "model.embed_tokens.lora_embedding_A": of_head["lm_head.lora_B.weight"].T,
        "model.embed_tokens.lora_embedding_B": of_head["lm_head.lora_A.weight"].T,
    }
    for tensors, table, wanted_head in (
        ({embed: new}, new, new if keeps_tied else old),
        ({head: new}, old, new),
        ({embed: new, head: new + 1}, new, new + 1),
        ({embed: new, head: new.clone()}, new, new),
        (of_head, old, merged),
        ({"lm_head.base_layer.weight": old} | of_head, old, merged),
        ({embed: new} | of_head, new, merged),
        (of_table, merged, old),
        (of_table | of_head, merged, merged),
    ):
        adapter = save_adapter(tmp_path / "adapter", tensors, ensure_weight_tying=keeps_tied)
        weights = weights_of(
            random_llm(tmp_path / "base", adapter=adapter, attention_backend="sdpa")
        )
        for name, wanted in ((embed, table), (head, wanted_head)):
            found = weights.get(name, weights[embed])  # of tied ones, one is stored
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


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
def test_what_is_not_supported(tmp_path, config: dict[str, Any], words: str) -> None:
    base, adapter, _ = pair(tmp_path)
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    with pytest.raises(ValueError, match=words):
        random_llm(base, adapter=adapter)


@pytest.mark.parametrize(
    ("base", "level"), [("/x/Base", "INFO"), (None, "INFO"), ("org/Other-1B", "WARNING")]
)
def test_the_log_names_the_base_model(tmp_path, caplog, base: str | None, level: str) -> None:
    path, adapter, _ = pair(tmp_path)
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = base
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    random_llm(path, adapter=adapter)
    (record,) = [x for x in caplog.records if f"made for the base model {base}," in x.message]
    assert record.levelname == level


def test_an_adapter_of_another_model(tmp_path, path: Path) -> None:
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
    for name in ("score.weight", "model.norm.lora_A.weight"):
        with pytest.raises(ValueError, match=rf"{name} is \[1, 64\], expected no such"):
            random_llm(path, adapter=save_adapter(tmp_path / "a", {name: torch.ones(1, 64)}))
    for none in ({}, {"model.visual.a.lora_A.weight": torch.ones(1, 1)}):
        with pytest.raises(ValueError, match="it has no tensors of the text model"):
            random_llm(path, adapter=save_adapter(tmp_path / "a", none))
    with pytest.raises(ValueError, match=r"norm.weight is \[5\], expected \[64\]"):
        random_llm(path, adapter=save_adapter(tmp_path / "a", {"model.norm.weight": torch.ones(5)}))


def test_files_that_are_missing_or_damaged(tmp_path, path: Path) -> None:
    with pytest.raises(ValueError, match="adapter: there is no directory '/nowhere'"):
        random_llm(path, adapter="/nowhere")
    with pytest.raises(ValueError, match=r"adapter_config\.json cannot be read \(No such file"):
        random_llm(path, adapter=path)
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.bin").touch()
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors cannot be read \(No such"):
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
            True,
            {
                "target_modules": ["q_proj"],
                "modules_to_save": ["embed_tokens"],
                "ensure_weight_tying": True,
            },
        ),
        ("llama", True, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
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
def test_peft(tmp_path, family: str, tie: bool, config: dict[str, Any]) -> None:
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
