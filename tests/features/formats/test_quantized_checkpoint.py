"""Quantized checkpoints compared with references that are written from the formats' descriptions."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import edited, make_checkpoint, random_llm, weights_of
from hybrid_checkpoints import make_hybrid_checkpoint
from moe_checkpoints import make_moe_checkpoint
from quantized_files import (
    AUTO_ROUND,
    AWQ,
    FORMATS,
    FP8_BLOCKS,
    GPTQ,
    fp8,
    gptq,
    packed,
    quantize_checkpoint,
    quantize_layers,
    scheme,
)
from safetensors.torch import load_file, save_file

from nanovllm import SamplingParams
from nanovllm.features.formats.quantized_checkpoint import WeightFormat

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9], [11] * 20]


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name: str, tmp_path) -> None:
    """The weights are equal bit for bit, and so are the tokens of the decoded checkpoint."""
    make_checkpoint(tmp_path)
    decoded = quantize_checkpoint(tmp_path, name, shards=3)
    llm = random_llm(tmp_path, attention_backend="sdpa")  # which does not pack the weights
    weights = weights_of(llm)
    assert weights.keys() == decoded.keys()
    for key, weight in weights.items():
        assert torch.equal(weight, decoded[key].float()), key
    outputs = [out.outputs[0].token_ids for out in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]

    plain = tmp_path / "plain"
    make_checkpoint(plain)
    save_file(decoded, plain / "model.safetensors")
    wanted = random_llm(plain, attention_backend="sdpa").generate(PROMPTS, GREEDY, use_tqdm=False)
    assert outputs == [out.outputs[0].token_ids for out in wanted]


@pytest.mark.parametrize(
    ("place", "name"),
    [("compression_config", "compressed W8A8"), ("hf_quant_config.json", "modelopt channel")],
)
def test_other_places_of_the_config(tmp_path, place: str, name: str) -> None:
    """The old field of compressed-tensors, and the file of ModelOpt, which may be alone."""
    make_checkpoint(tmp_path)
    decoded = quantize_checkpoint(tmp_path, name)
    raw = json.loads((tmp_path / "config.json").read_text())
    config = raw.pop("quantization_config")
    if place.endswith(".json"):
        (tmp_path / place).write_text(json.dumps(config))
    else:
        raw[place] = config
    (tmp_path / "config.json").write_text(json.dumps(raw))
    weights = weights_of(random_llm(tmp_path, attention_backend="sdpa"))
    assert all(torch.equal(weight, decoded[key].float()) for key, weight in weights.items())


def test_modelopt_may_quantize_only_the_cache(path: Path, tmp_path) -> None:
    edited(path, tmp_path)
    (tmp_path / "hf_quant_config.json").write_text(
        '{"quantization": {"quant_algo": null, "kv_cache_quant_algo": "FP8"}}'
    )
    assert len(random_llm(tmp_path).generate([1], GREEDY, use_tqdm=False)) == 1


def test_dummy_weights(tmp_path) -> None:
    make_checkpoint(tmp_path)
    quantize_checkpoint(tmp_path, "gptq")
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    assert random_llm(tmp_path, load_format="dummy").generate(PROMPTS, GREEDY, use_tqdm=False)


@pytest.mark.parametrize(
    ("name", "method"),
    [("awq", "awq"), ("awq", "awq_marlin"), ("gptq", "gptq"), ("fp8", "fp8"), ("fp8", "modelopt")],
)
def test_the_name_of_the_format_as_quantization(tmp_path, name: str, method: str) -> None:
    """As in scripts for vLLM: it is accepted for a checkpoint that has this format."""
    make_checkpoint(tmp_path)
    key = next(key for key in FORMATS if key.startswith(name))
    quantize_checkpoint(tmp_path, key)
    wanted = random_llm(tmp_path).generate(PROMPTS, GREEDY, use_tqdm=False)
    found = random_llm(tmp_path, quantization=method).generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [out["token_ids"] for out in found] == [out["token_ids"] for out in wanted]
    with pytest.raises(ValueError, match=f"'fbgemm_fp8' is a format .* has '{name}'; leave it out"):
        random_llm(tmp_path, quantization="fbgemm_fp8")


def test_a_format_that_the_checkpoint_does_not_have(path: Path) -> None:
    with pytest.raises(
        ValueError, match="quantization='fp8' is a format .* has None; leave it out"
    ):
        random_llm(path, quantization="fp8")


LIST = "can be 'fp8', 'fbgemm_fp8', 'modelopt', 'compressed-tensors', 'awq', 'gptq', 'auto-round'"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "bitsandbytes"}, f"'bitsandbytes' is not .*{LIST}.*'int8' or 'int4'"),
        ({"bits": 4}, f"quant_method=None is not supported; quant_method {LIST}"),
        ({"quantization": {"quant_algo": "NVFP4"}}, "NVFP4' is not .* can be 'FP8', 'FP8_PER_CHA"),
        (AWQ | {"version": "gemv"}, "version='gemv' is not supported; version can be 'gemm'"),
        (AUTO_ROUND | {"packing_format": "auto_round"}, "packing_format='auto_round' is not"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format='marlin' is not supported"),
        (scheme("marlin-24"), "format='marlin-24' is not supported"),
        (
            scheme("int-quantized", strategy="channel") | {"transform_config": {"a": 1}},
            "transform_config=.* is not supported",
        ),
    ],
)
def test_formats_that_are_not_supported(config: dict, words: str, tmp_path) -> None:
    """They are refused before the weights or the tokenizer are read."""
    make_checkpoint(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))
    with pytest.raises(ValueError, match=words):
        random_llm(tmp_path, load_format="dummy")


Q_PROJ = "model.layers.0.self_attn.q_proj."


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("awq", {"scales": None}, "q_proj.weight has no scales, which quant_method='awq' needs"),
        ("gptq desc_act", {"g_idx": None}, "q_proj.weight has no g_idx"),
        ("awq", {"qweight": None}, "missing: model.layers.0.self_attn.q_proj.weight"),
        ("fp8 blocks", {"weight_scale_inv": None}, "has no weight_scale or weight_scale_inv"),
        ("fp8 blocks", {"weight": torch.ones(128, 64)}, "scale_inv is of a quantized weight"),
        ("compressed W4A16", {"weight_shape": None}, "has no weight_shape"),
        ("awq", {"scales": torch.ones(3, 128).half()}, r"scales of shape \[128, 3\] and zeros of"),
        ("awq", {"scales": torch.ones(2, 128).long()}, "of torch.int64, expected"),
        ("gptq", {"qzeros": torch.ones(2, 12).int()}, "packs 128 numbers into 12 words .* 4 and 8"),
    ],
)
def test_tensors_that_do_not_fit(name: str, changes: dict, words: str, tmp_path) -> None:
    make_checkpoint(tmp_path)
    quantize_checkpoint(tmp_path, name)
    path = next(tmp_path.glob("*.safetensors"))
    tensors = load_file(path)
    for suffix, tensor in changes.items():
        tensors.pop(Q_PROJ + suffix)
        if tensor is not None:
            tensors[Q_PROJ + suffix] = tensor
    save_file(tensors, path)
    with pytest.raises(ValueError, match=words):
        random_llm(tmp_path)


def test_biases_that_are_zero(tmp_path) -> None:
    """AutoGPTQ adds them to layers without a bias. Other biases that the model lacks are refused."""
    make_checkpoint(tmp_path)
    quantize_checkpoint(tmp_path, "gptq")
    path = next(tmp_path.glob("*.safetensors"))
    tensors = load_file(path)
    save_file(tensors | {Q_PROJ + "bias": torch.zeros(128)}, path)
    random_llm(tmp_path)
    save_file(tensors | {Q_PROJ + "bias": torch.ones(128)}, path)
    with pytest.raises(ValueError, match="unexpected: .*q_proj.bias"):
        random_llm(tmp_path)


def test_a_config_whose_weights_are_not_quantized(tmp_path) -> None:
    make_checkpoint(tmp_path)
    wanted = weights_of(random_llm(tmp_path, attention_backend="sdpa"))
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": AWQ}))
    found = weights_of(random_llm(tmp_path, attention_backend="sdpa"))
    for name, weight in found.items():
        assert torch.equal(weight, wanted[name])


MIXED_GROUPS = {
    "group_0": {"weights": {"num_bits": 8, "strategy": "group", "group_size": 16}},
    "group_1": {"weights": {"num_bits": 4, "strategy": "group", "group_size": 32}},
}


@pytest.mark.parametrize(
    ("config", "encode"),
    [
        (GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8, "group_size": 16}}}, gptq),
        (AUTO_ROUND | {"extra_config": {"a.down_proj": {"bits": 8, "group_size": 16}}}, gptq),
        (scheme("pack-quantized") | {"config_groups": MIXED_GROUPS}, packed),
    ],
)
def test_layers_that_differ_in_bits_and_groups(config: dict, encode: Any, tmp_path) -> None:
    def differ(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        is_down = weight.shape[1] == 96
        return encode(weight, bits=8, group=16) if is_down else encode(weight)

    make_checkpoint(tmp_path)
    decoded = quantize_layers(tmp_path, config, differ)
    assert any(weight.shape[-1] == 96 for weight in decoded.values())
    for key, weight in weights_of(random_llm(tmp_path, attention_backend="sdpa")).items():
        assert torch.equal(weight, decoded[key].float()), key


def test_float8_with_more_exponent_bits(tmp_path) -> None:
    tensors, _ = fp8(torch.randn(32, 16), (32, 16))
    tensors["weight"] = tensors["weight"].to(torch.float8_e5m2)
    found = WeightFormat.from_config(FP8_BLOCKS, tmp_path).read("x.weight", tensors)
    wanted = tensors["weight"].float() * tensors["weight_scale_inv"]
    assert torch.equal(found.dequantized(), wanted)


@pytest.mark.extra
def test_compressed_tensors_gives_the_same_weights() -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import (
        FloatQuantizationCompressor,
        IntQuantizationCompressor,
        PackedQuantizationCompressor,
    )
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    torch.manual_seed(0)
    block = dict(num_bits=8, strategy="block", block_structure=[32, 64], type="float")
    cases: list[tuple[Any, str, dict[str, Any], tuple[int, ...]]] = [
        (PackedQuantizationCompressor, "pack-quantized", dict(group_size=32), (48, 4)),
        (IntQuantizationCompressor, "int-quantized", dict(num_bits=8, strategy="tensor"), (1,)),
        (FloatQuantizationCompressor, "float-quantized", block, (2, 2)),
    ]
    for compressor, layout, fields, shape in cases:
        for symmetric in (True, False)[: 1 + (layout != "float-quantized")]:
            args = QuantizationArgs(**{"num_bits": 4} | fields, symmetric=symmetric)
            whole = QuantizationScheme(targets=["Linear"], weights=args)
            state = {"weight": torch.randn(48, 128), "weight_scale": torch.rand(shape) * 0.1 + 0.05}
            if layout != "float-quantized":
                zeros = torch.randint(-4, 4, shape) * (not symmetric)
                state["weight_zero_point"] = zeros.to(torch.int8)
            compressed = compressor.compress(state, whole)
            wanted = compressor.decompress(compressed, whole)["weight"]
            config = scheme(layout) | {"config_groups": {"group_0": {"weights": args.model_dump()}}}
            weight_format = WeightFormat.from_config(config, Path("config.json"))
            found = weight_format.read("x.weight", compressed).dequantized()
            assert torch.equal(found, wanted), (layout, fields, symmetric)


@pytest.mark.parametrize(
    ("name", "is_kept"),
    [
        ("compressed W4A16", True),
        ("gptq symmetric", True),
        ("gptq", False),
        ("compressed W4A16 asymmetric", False),
        ("compressed W4A16 ordered", False),
        ("compressed W8A8", False),
    ],
)
def test_int4_keeps_the_numbers(name: str, is_kept: bool, tmp_path) -> None:
    """Weights in symmetric groups of 32 inputs or more are not quantized a second time."""
    make_checkpoint(tmp_path)
    decoded = quantize_checkpoint(tmp_path, name)
    options: Any = {"quantization": "int4", "attention_backend": "sdpa"}
    llm = random_llm(tmp_path, **options)
    for key, weight in weights_of(llm).items():
        if key.endswith("_proj.weight"):
            found = weight[torch.arange(weight.shape[0])]
            rounded = found.to(decoded[key].dtype)  # as the decoded weight is
            assert torch.equal(rounded, decoded[key]) == is_kept, key
    assert llm.generate(PROMPTS, GREEDY, use_tqdm=False)


@pytest.mark.parametrize("name", ["compressed W4A16", "gptq symmetric", "awq", "gptq"])
def test_int4_of_a_quantized_hybrid_model(name: str, tmp_path) -> None:
    """Its layers reorder the rows of some weights. Symmetric weights keep their numbers."""
    make_hybrid_checkpoint(tmp_path, "LF")
    decoded = quantize_checkpoint(tmp_path, name)
    options: Any = {"quantization": "int4", "attention_backend": "sdpa"}
    llm = random_llm(tmp_path, **options)
    assert llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    plain = tmp_path / "plain"
    make_hybrid_checkpoint(plain, "LF")
    save_file(decoded, plain / "model.safetensors")
    wanted = random_llm(plain, attention_backend="sdpa").engine.runner.model.layers[1]
    attention = llm.engine.runner.model.layers[1].self_attn
    for part in ("qkv_gate_proj", "o_proj"):
        weight = getattr(attention, part).weight
        found = weight[torch.arange(weight.shape[0])]
        expected = getattr(wanted.self_attn, part).weight
        if name in ("awq", "gptq"):
            assert (found - expected).norm() < 0.1 * expected.norm()
        else:
            dtype = decoded["model.layers.1.self_attn.o_proj.weight"].dtype
            assert torch.equal(found.to(dtype), expected.to(dtype)), part


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_weights_that_are_no_linear_layers(quantization: str | None, tmp_path) -> None:
    """A router, the gate of a shared expert and embeddings can be quantized too."""
    config, encode = FORMATS["compressed W4A16"]
    suffixes = ("_proj.weight", "gate.weight", "embed_tokens.weight")
    make_moe_checkpoint(tmp_path)
    decoded = quantize_layers(tmp_path, config, encode, suffixes=suffixes)
    llm = random_llm(tmp_path, quantization=quantization, attention_backend="sdpa")
    model = llm.engine.runner.model
    assert torch.equal(model.embed_tokens, decoded["model.embed_tokens.weight"].float())
    router = decoded["model.layers.0.mlp.gate.weight"].float()
    assert torch.equal(model.layers[0].mlp.router, router)
    assert llm.generate(PROMPTS, GREEDY, use_tqdm=False)


def test_slices_of_int4_groups(tmp_path) -> None:
    """A rank keeps the numbers of its rows, and of its columns if they begin with a group."""
    tensors, decoded = packed(torch.randn(16, 128), group=64)
    config = scheme("pack-quantized", 4, strategy="group", group_size=64)
    weight = WeightFormat.from_config(config, tmp_path).read("x.weight", tensors)
    for slices in ((slice(4, 9),), (slice(None), slice(32, 96))):
        values, scales = weight[slices].int4_groups()
        found = (values * scales.float()[:, :, None]).flatten(1)
        assert torch.equal(found.to(decoded.dtype), decoded[slices])
    assert weight[slice(None), slice(16, 112)].int4_groups() is None
