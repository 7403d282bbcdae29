"""ModelConfig: the validated fields of a checkpoint's config.json that the model needs."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.config import DTYPES, EngineConfig
from nanovllm.models.rope import RopeConfig
from nanovllm.utils.json_files import Fields, check_fields

if TYPE_CHECKING:
    from nanovllm.models.qwen3 import Qwen3

ANY: tuple[Any, ...] = ()
SIZE, LENGTH = (1, 2**31 - 1), (1, 10_000_000)
TIE = "tie_word_embeddings"
STORED = tuple(prefix + name for prefix in ("", "torch.") for name in (*DTYPES[1:], "float64"))
# The fields of config.json that are read, nested ones included, by type and range or choices.
FIELDS: Fields = {
    name: (kind, limits)
    for kind, limits, names in (
        (bool, ANY, "attention_bias mlp_bias tie_word_embeddings use_sliding_window"),
        (int, SIZE, "hidden_size intermediate_size vocab_size head_dim sliding_window"),
        (int, SIZE, "num_attention_heads num_key_value_heads"),
        (int, LENGTH, "max_position_embeddings original_max_position_embeddings"),
        (int, (1, 10_000), "num_hidden_layers"),
        (int, (0, math.inf), "max_window_layers"),
        (float, (0, math.inf), "attention_factor beta_fast beta_slow"),
        (float, (0, math.inf), "low_freq_factor high_freq_factor"),
        (float, (0, 1), "partial_rotary_factor rms_norm_eps"),
        (float, (1, math.inf), "factor rope_theta"),
        (str, STORED, "dtype torch_dtype"),
        (str, ("silu",), "hidden_act"),
        (str, ANY, "rope_type type"),
        (list, ANY, "architectures layer_types"),
        (dict, ANY, "quantization_config quantization rope_parameters rope_scaling"),
    )
    for name in names.split()
}


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
    sliding_window: int | None  # the number of tokens that a layer attends to; None: all
    dtype: str | None  # the stored dtype of the weights, if config.json names it

    @classmethod
    def from_json(cls, raw: dict[str, Any], path: Path) -> ModelConfig:
        """Create a ModelConfig from `raw`, the fields of the config.json at `path`.

        Raises ValueError for missing or unsupported fields.
        """
        fields = raw.keys()  # with the fields that are null
        raw = check_fields(raw, path, FIELDS)
        architectures = raw.get("architectures") or []
        known = [name for name in ARCHITECTURES if name in architectures]
        if not known:
            named = f"names the architecture {architectures!r}"
            if not architectures:
                named = f"has no 'architectures' (model_type is {raw.get('model_type')!r})"
            raise ValueError(f"{path} {named}; supported are {', '.join(ARCHITECTURES)}")
        traits = ARCHITECTURES[known[0]]

        def need(name: str) -> Any:
            if name not in raw:
                raise ValueError(f"{path} has no {name!r}")
            return raw[name]

        rope = _rope(raw, path)
        if raw.get("mlp_bias"):
            raise ValueError(f"{path}: mlp_bias is not supported")
        is_null = "sliding_window" in fields and "sliding_window" not in raw
        window = _sliding_window(raw, known[0], is_null)
        dtype = (raw.get("dtype") or raw.get("torch_dtype") or "").removeprefix("torch.")
        heads, hidden = need("num_attention_heads"), need("hidden_size")
        head_dim = raw.get("head_dim") or traits.get("head_dim") or hidden // heads
        kv_heads = raw.get("num_key_value_heads") or traits.get("num_kv_heads") or heads
        if heads % kv_heads:
            raise ValueError(f"{path}: {heads} query heads do not divide into {kv_heads} KV heads")
        if head_dim % 2 or not head_dim:
            raise ValueError(
                f"{path}: head_dim {head_dim} is odd or 0; rotary embedding needs pairs"
            )
        return cls(
            architecture=known[0],
            vocab_size=need("vocab_size"),
            hidden_size=hidden,
            intermediate_size=need("intermediate_size"),
            num_layers=need("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            rope=rope,
            max_position_embeddings=max(need("max_position_embeddings"), rope.extended_length),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            attention_bias=bool(traits.get("attention_bias", raw.get("attention_bias", False))),
            output_bias=bool("attention_bias" not in traits and raw.get("attention_bias")),
            qk_norm=bool(traits["qk_norm"]),
            sliding_window=window,
            dtype=dtype if dtype in DTYPES else None,
        )

    @property
    def feature(self) -> str:
        """The kind of model in features/, which tells a backend whether it can fuse the layers."""
        return ""

    def check_options(self, config: EngineConfig) -> None:
        """Raise ValueError for an option that the model does not support."""
        if config.num_state_slots is not None:
            raise ValueError(
                f"num_state_slots={config.num_state_slots} is an option for models with linear "
                f"attention, and {self.architecture} has none; leave it out"
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

    @property
    def inner_sizes(self) -> tuple[int, ...]:
        """The feed-forward sizes, which ranks of tensor parallelism divide."""
        return (self.intermediate_size,)

    def divide_mlps(self, parts: int) -> ModelConfig:
        """Return the config of a model whose feed-forward sizes are divided into `parts`."""
        return dataclasses.replace(self, intermediate_size=self.intermediate_size // parts)

    @property
    def weights_note(self) -> str:
        """Text that the log and an error append to the size of the weights."""
        return ""

    def block_bytes(self, block_size: int, itemsize: int) -> int:
        """Return the bytes of a KV block: keys and values of all layers, `itemsize` bytes each."""
        num_layers = len(self.kv_layers)
        return 2 * num_layers * block_size * self.num_kv_heads * self.head_dim * itemsize

    def state_bytes(self, itemsize: int) -> int:
        """Return the bytes of a sequence's state, which models with linear attention have."""
        return 0


# Properties that follow from the name of the architecture and may be absent from config.json.
# Without attention_bias here, its value in config.json applies to all projections of attention.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Qwen3ForCausalLM": {"qk_norm": True, "head_dim": 128},
    "Qwen2ForCausalLM": {"qk_norm": False, "attention_bias": True},
    "LlamaForCausalLM": {"qk_norm": False},
    "MistralForCausalLM": {"qk_norm": False, "attention_bias": False, "num_kv_heads": 8},
}
# The same architectures without a head, unless the head is tied.
ARCHITECTURES |= {n.replace("ForCausalLM", "Model"): t for n, t in ARCHITECTURES.items()}
# The architectures of models in features/, with the folder that has the model.
FEATURES = {
    prefix + kind: folder
    for prefix, folder, kinds in (
        ("Qwen3_5", "hybrid", ("ForCausalLM", "ForConditionalGeneration", "TextModel", "Model")),
        ("Qwen3_5Moe", "hybrid", ("ForCausalLM", "ForConditionalGeneration", "TextModel")),
        ("Qwen3Moe", "moe", ("ForCausalLM", "Model")),
    )
    for kind in kinds
}
ARCHITECTURES |= {
    name: {"qk_norm": True} | ({} if folder == "moe" else {"head_dim": 256})
    for name, folder in FEATURES.items()
}


def with_text_config(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a config.json. Fields of its text_config, if any, take precedence."""
    text = raw.get("text_config")
    if not isinstance(text, dict):
        return raw
    own: dict[str, Any] = {
        name: raw[name] for name in ("architectures", "model_type") if name in raw
    }
    if TIE in raw and text.get(TIE) is not True:
        own[TIE] = raw[TIE]  # true if one of the two is true
    return raw | {name: value for name, value in text.items() if value is not None} | own


def _rope(raw: dict[str, Any], path: Path) -> RopeConfig:
    """Return the rope fields, from rope_parameters (new) or rope_theta and rope_scaling (old).

    Raises ValueError for a type or a field that would change the result and is not supported.
    """
    new, old = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
    if new and old and new != old:
        raise ValueError(f"{path} has both rope_parameters and rope_scaling; keep one of them")
    params = check_fields(new or old, path, FIELDS)
    kind = params.pop("type", "default")
    params = {"rope_type": kind, "rope_theta": raw.get("rope_theta", 10_000.0)} | params
    for name in ("partial_rotary_factor", "original_max_position_embeddings"):
        if name in raw:
            params[name] = raw[name]
    if params.pop("partial_rotary_factor", 1) != 1:
        raise ValueError(f"{path}: partial_rotary_factor is not supported; only 1 is")
    if params["rope_type"] in ("llama3", "yarn"):
        length = raw.get("max_position_embeddings", 1)
        params.setdefault("original_max_position_embeddings", length)
    return RopeConfig.from_params(params, path)


def _sliding_window(raw: dict[str, Any], architecture: str, is_null: bool) -> int | None:
    """Return the window in tokens, if any. The defaults are the same as in transformers."""
    if architecture.startswith("Mistral"):
        return None if is_null else raw.get("sliding_window", 4096)
    if not raw.get("use_sliding_window"):
        return None
    layers = raw.get("layer_types")
    if layers is None:
        slides = raw.get("max_window_layers", 28) < raw["num_hidden_layers"]
    else:
        slides = "sliding_attention" in layers
    return raw.get("sliding_window", 4096) if slides else None
