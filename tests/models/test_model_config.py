"""What config.json may say of a model."""

import json
import typing
from pathlib import Path

import pytest
from checkpoints import edited, random_llm
from wrong_values import GENERATION, WRONG

from nanovllm.loading.checkpoint import Checkpoint
from nanovllm.models.model_config import FIELDS, ModelConfig

MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    **{"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8},
}
CONFIGS = [
    ({"architectures": ["GemmaForCausalLM"]}, "Qwen3ForCausalLM, Qwen2ForCausalLM, Llama"),
    (
        {"architectures": None, "model_type": "gemma"},
        "architecture none .model_type is .*Qwen3ForCausalLM",
    ),
    ({"vocab_size": None}, "no 'vocab_size'"),
    ({"hidden_act": "gelu"}, "gelu"),
    ({"head_dim": 33}, "odd"),
    ({"num_key_value_heads": 3}, "do not divide"),
    ({"quantization_config": {"quant_method": "aqlm"}}, "quant_method='aqlm' is not supported"),
    ({"layer_types": ["full_attention"]}, r"layer_types must have 2 entries .*, and is \['full_a"),
    ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types must have 2 entries"),
    ({"layer_types": ["full_attention", []]}, "layer_types must have 2 entries"),
    ({"sliding_window": 0}, "sliding_window must be between 1 and"),
    ({"rope_parameters": {"rope_type": "linear"}}, "factor"),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "both"),
    ({"rope_parameters": {"rope_type": "yarn"}}, "'yarn' needs 'factor'"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 2, "alpha": 1}}, "rope field 'alpha'"),
    ({"rope_parameters": {"rope_type": "llama3", "factor": 8}}, "needs 'low_freq_factor'"),
    ({"rope_parameters": {"rope_type": "longrope", "factor": 4.0}}, "'longrope' is not supported"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported"),
    ({"is_causal": False}, "is_causal=False is not supported"),
    ({"logit_cap": 30, "x": 1}, r"logit_cap=30, x=1 is not.*\{'logit_cap': None, 'x': None\}"),
    ({"mlp_bias": True}, "mlp_bias is not supported"),
    ({"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
    ({"intermediate_size": 100}, "misshapen: .*gate_proj"),
    ({"num_hidden_layers": 3, "layer_types": None}, "missing: .*layers.2"),
    ({"num_hidden_layers": 1, "layer_types": None}, "unexpected: .*layers.1"),
]


@pytest.mark.parametrize(("changes", "word"), CONFIGS, ids=str)
def test_configs(path: Path, tmp_path, changes: dict, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        random_llm(edited(path, tmp_path, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": None},
        {"architectures": [], "is_causal": True},
        {"rope_parameters": {"rope_type": "mrope", "mrope_section": [4, 6, 6]}},
        {"unsloth_fixed": True, "logit_cap": 0, "sep_token_id": 3, "num_nextn_predict_layers": 1},
    ],
    ids=str,
)
def test_fields_that_change_nothing(path: Path, tmp_path, changes: dict) -> None:
    found = Checkpoint(edited(path, tmp_path, **changes)).model_config
    assert found == Checkpoint(path).model_config


@pytest.mark.parametrize("field", [name for name in FIELDS if name not in GENERATION])
def test_wrong_values_in_config(path: Path, tmp_path, field: str) -> None:
    kind, limits = FIELDS[field]
    for wrong in WRONG[kind] + ([limits[1] + 1] if kind is int else []):
        changes = {field: wrong}
        if field in ("factor", "rope_type", "type"):
            changes = {"rope_parameters": {"rope_type": "linear", "factor": 2} | changes}
        edited(path, tmp_path, **changes)
        with pytest.raises(ValueError, match=rf"config\.json: {field} must be"):
            _ = Checkpoint(tmp_path).model_config


def test_numbers_of_a_file_become_those_of_their_fields(path: Path, tmp_path) -> None:
    """JSON has one kind of number: 1 can stand for 1.0, and 64.0 for 64."""
    config = json.loads((edited(path, tmp_path) / "config.json").read_text())
    numbers = {n: float(v) for n, v in config.items() if type(v) is int and n in FIELDS}
    numbers |= {"rms_norm_eps": 1, "rope_theta": 10_000}
    assert len(numbers) > 8
    edited(path, tmp_path, **numbers, rope_parameters={"rope_type": "linear", "factor": 2})
    found = Checkpoint(tmp_path).model_config
    for name, kind in typing.get_type_hints(ModelConfig).items():
        value = getattr(found, name)
        assert value is None or kind not in (int, float, bool) or type(value) is kind, name
    assert (found.rms_norm_eps, found.rope.rope_theta, found.rope.factor) == (1, 10_000, 2)
    fields = {"do_sample": True, "temperature": 1, "top_k": 20.0, "top_p": 1, "max_new_tokens": 9.0}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5.0]} | fields))
    eos, sampling = Checkpoint(tmp_path).generation_defaults()
    assert [type(x) for x in (*eos, sampling.top_k, sampling.max_tokens)] == [int] * 3
    assert [type(x) for x in (sampling.temperature, sampling.top_p)] == [float] * 2
    options = dict(load_format="dummy", attention_backend="sdpa")
    llm = random_llm(tmp_path, **options)
    assert len(llm.generate([[1, 2]], use_tqdm=False)[0]["token_ids"]) <= 9


def test_stored_dtype_that_the_engine_does_not_run_in(path: Path, tmp_path) -> None:
    for stored, dtype in (("float64", None), ("torch.bfloat16", "bfloat16")):
        edited(path, tmp_path, dtype=stored)
        assert Checkpoint(tmp_path).model_config.dtype == dtype


@pytest.mark.parametrize("dtype", ["os.system", "auto", "int8", "torch", ""])
@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_stored_dtypes_that_are_none(path: Path, tmp_path, field: str, dtype: str) -> None:
    names = {"dtype": None, "torch_dtype": None, field: dtype}
    with pytest.raises(
        ValueError, match=rf"config\.json: {field} must be one of float32, bfloat16"
    ):
        random_llm(edited(path, tmp_path, **names))


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"max_window_layers": 1}, (0, 64)),
        ({"max_window_layers": 2}, (0, 0)),
        ({"max_window_layers": None}, (0, 0)),  # 28
        ({"layer_types": ["sliding_attention", "full_attention"]}, (64, 0)),
        ({"max_window_layers": 0, "sliding_window": 512}, (0, 0)),  # all positions are in one
        ({"max_window_layers": 0, "sliding_window": 511}, (511, 511)),
        ({"max_window_layers": 0, "use_sliding_window": False}, (0, 0)),
        (MOE, (64, 64)),
        ({"architectures": ["MistralForCausalLM"], "use_sliding_window": None}, (64, 64)),
        ({"architectures": ["LlamaForCausalLM"], "use_sliding_window": None}, (0, 0)),
    ],
    ids=str,
)
def test_windows(path: Path, tmp_path, changes: dict, windows: tuple[int, ...]) -> None:
    """As in transformers: which layers have a window, and when there is none."""
    slides = {"use_sliding_window": True, "layer_types": None, "sliding_window": 64}
    assert Checkpoint(edited(path, tmp_path, **slides | changes)).model_config.windows == windows
