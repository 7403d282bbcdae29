"""ModelConfig: the validated fields of a checkpoint's config.json that the model needs."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.config import DTYPES, EngineConfig
from nanovllm.models.rope import REQUIRED, RopeConfig
from nanovllm.utils.json_files import Fields, check_fields, named, unusual

if TYPE_CHECKING:
    from nanovllm.models.qwen3 import Qwen3

SLIDING, FULL = "sliding_attention", "full_attention"  # layer_types
ANY: tuple[Any, ...] = ()
SIZE = (1, 2**31 - 1)
LENGTH = (1, 10_000_000)
STORED = tuple(prefix + name for prefix in ("", "torch.") for name in (*DTYPES[1:], "float64"))
# The fields of config.json that are read, nested ones included, by type and range or choices.
FIELDS: Fields = {
    name: (kind, limits)
    for kind, limits, names in (
        (bool, ANY, "attention_bias mlp_bias tie_word_embeddings use_sliding_window"),
        (bool, ANY, "is_causal is_original_qwen3_reranker"),
        (int, SIZE, "hidden_size intermediate_size vocab_size head_dim sliding_window"),
        (int, SIZE, "num_attention_heads num_key_value_heads"),
        (int, LENGTH, "max_position_embeddings original_max_position_embeddings"),
        (int, (1, 10_000), "num_hidden_layers"),
        (int, (0, math.inf), "max_window_layers"),
        (float, (0, math.inf), "attention_factor beta_fast beta_slow"),
        (float, (0, math.inf), "low_freq_factor high_freq_factor"),
        (float, (0, 1), "partial_rotary_factor rms_norm_eps"),
        (float, (0, math.inf), "mscale mscale_all_dim llama_4_scaling_beta"),
        (float, (1, math.inf), "factor rope_theta"),
        (str, STORED, "dtype torch_dtype"),
        (str, ("silu",), "hidden_act"),
        (str, ANY, "rope_type type"),
        (str, ("from_2_way_softmax",), "method"),
        (list, ANY, "architectures classifier_from_token layer_types"),
        (dict, ANY, "quantization_config compression_config quantization"),
        (dict, ANY, "rope_parameters rope_scaling"),
    )
    for name in names.split()
}
# Regular expressions of the other fields that change no result, or that only features/ reads.
HARMLESS = r"""
    (_|image|mtp|output_|return_dict|tokenizer|transformers|unsloth|video|vision).* .*dropout.*
    .*flash_att.* .*initializer.* .*_loss_coef .*pdrop .*_penalty .*token(_ids?|_index)? .*version
    .*projector.* architectures attn_implementation auto_map chunk_size_feed_forward do_sample
    early_stopping finetuning_task full_attn_mod id2label interpolate_factor is_decoder
    is_llama_config label2id language_model_only max_length max_seq(uence)?_len(gth)?
    model_(max_length|name|type) num_(beam.*|labels|nextn.*|return.*) prefix pretraining_tp
    problem_type sentence_transformers seq_length spatial_merge_size task_specific_params
    temperature text_config top_[kp] typical_p use_cache attn_output_gate decoder_sparse_step
    full_attention_interval linear_.* mamba_ssm_dtype mlp_only_layers moe_intermediate_size
    norm_topk_prob num_(local_)?experts(_per_tok)? scoring_func shared_expert_intermediate_size
"""
# Rope fields without effect. mrope is for images: for text, its three positions are equal.
UNUSED_IN_ROPE = ("mrope_section", "mrope_interleaved", "max_position_embeddings", "finetuned")
NEEDED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
)
# The beginnings of the supported architectures' names, such as "Qwen3" of "Qwen3ForCausalLM", with
# the values of fields that config.json does not have.
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3": {"head_dim": 128, "sliding_window": 4096},
    "Qwen2": {"sliding_window": 4096},
    "Llama": {},
    "Mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    # These are in features/models/.
    "Qwen3VL": {"head_dim": 128, "rope_theta": 500_000.0},
    "Mistral3": {"num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True},
    "Ministral3": {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
    "Phi3": {"original_max_position_embeddings": 4096, "partial_rotary_factor": 1.0},
    "SmolLM3": {"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True},
    "Granite": {},
    "Gemma3": {
        **{"vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "head_dim": 256},
        **{"num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4},
        **{"max_position_embeddings": 131_072, "rope_theta": 1e6, "sliding_window": 4096},
        "tie_word_embeddings": True,
    },
    "Qwen3Moe": {"sliding_window": 4096},
    "Qwen3_5": {"head_dim": 256, "partial_rotary_factor": 0.25},
    "Qwen3_5Moe": {"head_dim": 256, "partial_rotary_factor": 0.25},
}
NO_BIAS = ("Mistral", "Mistral3", "Ministral3", "Phi3")  # families without biases of attention


@dataclass(frozen=True)
class ModelConfig:
    """The fields of config.json that determine the model's computation."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool  # whether the query, key and value projections have a bias
    output_bias: bool  # whether the output projection of attention has a bias
    qk_norm: bool
    windows: tuple[int, ...]  # of each layer: the number of tokens that it attends to; 0: all
    dtype: str | None  # the stored dtype of the weights, if config.json names it
    usual_length: int | None = None  # the default of max_model_len; None: all positions
    ropes: tuple[RopeConfig, ...] = ()  # of each layer, if they are not all `rope`
    attention_scale: float = 1.0  # multiplies the products of queries and keys

    @classmethod
    def from_json(cls, raw: dict[str, Any], path: Path) -> ModelConfig:
        """Create a ModelConfig from `raw`, the fields of the config.json at `path`.

        Raises ValueError for missing or unsupported fields.
        """
        architecture, family = find_family(raw.get("architectures"))
        raw = check_fields(FAMILIES.get(family, {}) | raw, path, FIELDS)
        unknown = unknown_fields(raw)
        if raw.get("is_causal") is False:
            unknown["is_causal"] = False
        if unknown:
            raise ValueError(
                f"{path}: {named(unknown)} is not supported; if it changes no result, pass "
                f"hf_overrides={dict.fromkeys(unknown)}"
            )
        if missing := [name for name in NEEDED if name not in raw]:
            raise ValueError(f"{path} has no {missing[0]!r}")
        if raw.get("mlp_bias"):
            raise ValueError(f"{path}: mlp_bias is not supported")
        rope = _rope(raw, family, path)
        is_limited = rope.rope_type == "longrope" or rope.llama_4_scaling_beta > 0
        is_yarn = rope.rope_type == "yarn"  # which extends the context
        extended = int(rope.factor * rope.original_max_position_embeddings) if is_yarn else 0
        longest = max(raw["max_position_embeddings"], extended)
        dtype = (raw.get("dtype") or raw.get("torch_dtype") or "").removeprefix("torch.")
        heads = raw["num_attention_heads"]
        hidden = raw["hidden_size"]
        head_dim = raw.get("head_dim") or hidden // heads
        kv_heads = raw.get("num_key_value_heads") or heads
        if heads % kv_heads:
            raise ValueError(f"{path}: {heads} query heads do not divide into {kv_heads} KV heads")
        if head_dim % 2 or not head_dim:
            raise ValueError(
                f"{path}: head_dim {head_dim} is odd or 0; rotary embedding needs pairs"
            )
        has_bias = bool(raw.get("attention_bias"))
        return cls(
            architecture=architecture,
            vocab_size=raw["vocab_size"],
            hidden_size=hidden,
            intermediate_size=raw["intermediate_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            rope=rope,
            max_position_embeddings=longest,
            tie_word_embeddings=raw.get("tie_word_embeddings", False),
            attention_bias=family == "Qwen2" or (has_bias and family not in NO_BIAS),
            output_bias=has_bias and family not in ("Qwen2", *NO_BIAS),
            qk_norm=family.startswith(("Qwen3", "Gemma3")),
            windows=_windows(raw, family, longest, path),
            dtype=dtype if dtype in DTYPES else None,
            usual_length=rope.original_max_position_embeddings if is_limited else None,
        )

    def check_options(self, config: EngineConfig) -> None:
        """Raise ValueError for an option that the model does not support."""
        if config.num_state_slots is not None:
            raise ValueError(
                f"num_state_slots={config.num_state_slots} is for models with linear attention, "
                f"and {self.architecture} has none; leave it out"
            )

    def model_class(self) -> type[Qwen3]:
        """Return the class of the model that this config describes."""
        from nanovllm.models.qwen3 import Qwen3

        return Qwen3

    @property
    def kv_layers(self) -> list[int]:
        """The indices of the layers with a KV cache."""
        return list(range(self.num_layers))

    def select_tensors(self, files: dict[Path, Any]) -> dict[Path, Any]:
        """Return the open files without the tensors that the model does not have."""
        return files

    def block_bytes(self, block_size: int, itemsize: int) -> int:
        """Return the bytes of a KV block: keys and values of all layers, `itemsize` bytes each."""
        num_layers = len(self.kv_layers)
        return 2 * num_layers * block_size * self.num_kv_heads * self.head_dim * itemsize

    def state_bytes(self, itemsize: int) -> int:
        """Return the bytes of a sequence's state, which models with linear attention have."""
        return 0


def unknown_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a config.json that may change the result, and that are not read."""
    harmless = re.compile("|".join(HARMLESS.split()))
    return unusual(raw, {*FIELDS, *filter(harmless.fullmatch, raw)})


def find_family(architectures: Any) -> tuple[str, str]:
    """Return the supported one of `architectures` and its family, or two empty strings."""
    names = architectures if isinstance(architectures, list) else []
    for family in FAMILIES:
        for suffix in ("ForCausalLM", "ForConditionalGeneration", "TextModel", "Model"):
            if family + suffix in names:
                return family + suffix, family
    return "", ""


def name_architectures(raw: dict[str, Any]) -> Any:
    """Return the architectures of a config.json, or the ones that its other fields imply."""
    names = raw.get("architectures")
    if names in (None, []):
        kind = str(raw.get("model_type")).removesuffix("_text").replace("_", "")
        known = [name for name in FAMILIES if name.replace("_", "").lower() == kind]
        return [f"{name}ForCausalLM" for name in known]
    if raw.get("classifier_from_token") and isinstance(names, list):
        # vLLM computes the same scores with a classifier made of the head.
        return [str(name).replace("ForSequenceClassification", "ForCausalLM") for name in names]
    return names


def _rope(raw: dict[str, Any], family: str, path: Path) -> RopeConfig:
    """Return the rope fields, from rope_parameters (new) or rope_theta and rope_scaling (old).

    Raises ValueError for a type or a field that would change the result and is not supported.
    """
    new, old = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
    if new and old and new != old:
        raise ValueError(f"{path} has both rope_parameters and rope_scaling; keep one of them")
    params = check_fields(new or old, path, FIELDS)
    params = {name: value for name, value in params.items() if name not in UNUSED_IN_ROPE}
    outside = "original_max_position_embeddings"
    params = {
        "rope_type": params.pop("type", "default"),
        "rope_theta": raw.get("rope_theta", 10_000.0),
        "partial_rotary_factor": raw.get("partial_rotary_factor", 1.0),
        **params,
        outside: raw.get(outside, params.get(outside, raw["max_position_embeddings"])),
    }
    if params["partial_rotary_factor"] != 1 and "partial_rotary_factor" not in FAMILIES[family]:
        raise ValueError(f"{path}: partial_rotary_factor is not supported; only 1 is")
    if params["rope_type"] == "mrope":  # an old name
        params["rope_type"] = "default"
    kind = params["rope_type"]
    kinds = [x for x in REQUIRED if x != "longrope" or family == "Phi3"]
    if kind not in kinds:
        raise ValueError(
            f"{path}: rope type {kind!r} is not supported, only {', '.join(kinds)}; without it "
            "the model runs at its original length, and 'yarn' extends this length"
        )
    if unknown := params.keys() - RopeConfig.__dataclass_fields__.keys():
        raise ValueError(f"{path}: the rope field {min(unknown)!r} is not supported")
    if missing := [name for name in REQUIRED[kind] if name not in params]:
        raise ValueError(f"{path}: rope type {kind!r} needs {missing[0]!r}")
    return RopeConfig(**params)


def _windows(raw: dict[str, Any], family: str, longest: int, path: Path) -> tuple[int, ...]:
    """Return the window of each layer, which is 0 if it is not below `longest`, the context.

    The defaults are the same as in transformers. Raises ValueError for wrong layer_types.
    """
    num = raw["num_hidden_layers"]
    first = 0 if family in ("Qwen3Moe", *NO_BIAS) else raw.get("max_window_layers", 28)
    types = raw.get("layer_types", [SLIDING if i >= first else FULL for i in range(num)])
    if len(types) != num or any(kind not in (SLIDING, FULL) for kind in types):
        raise ValueError(
            f"{path}: layer_types must have {num} entries {SLIDING!r} or {FULL!r}, and is {types}"
        )
    is_used = family in NO_BIAS or raw.get("use_sliding_window")
    window = raw.get("sliding_window", 0) if is_used else 0
    return tuple(window * (kind == SLIDING and window < longest) for kind in types)
