"""ModelConfig: the fields of a checkpoint's config.json that a model needs, checked once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ModelConfig:
    """The fields of config.json that decide what the model computes."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_factor: float  # positions are divided by it; 1 unless rope_type is "linear"
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool  # of the query, key and value projections
    output_bias: bool  # of attention's output projection
    qk_norm: bool
    sliding_window: int | None  # tokens that a layer attends to at most; None: all
    dtype: str | None  # the stored dtype of the weights, if config.json names it

    @classmethod
    def from_file(cls, path: Path) -> ModelConfig:
        """Read config.json. Raises ValueError for missing or unsupported fields."""
        raw = read_json(path)
        architectures = raw.get("architectures") or []
        known = [a for a in architectures if a in ARCHITECTURES]
        if not known:
            raise ValueError(
                f"{path} names the architecture {architectures or raw.get('model_type')!r}; "
                f"supported are {', '.join(ARCHITECTURES)}"
            )
        traits = ARCHITECTURES[known[0]]

        def need(name: str) -> Any:
            if raw.get(name) is None:
                raise ValueError(f"{path} has no {name!r}")
            return raw[name]

        act = raw.get("hidden_act", "silu")
        if act != "silu":
            raise ValueError(f"{path}: hidden_act {act!r} is not supported, only 'silu'")
        if raw.get("quantization_config"):
            raise ValueError(f"{path}: quantized checkpoints are not supported; use the bf16 one")
        theta, factor = _rope(raw, path)
        dtype = raw.get("dtype") or raw.get("torch_dtype")
        heads, hidden = need("num_attention_heads"), need("hidden_size")
        head_dim = raw.get("head_dim") or traits.get("head_dim") or hidden // heads
        kv_heads = raw.get("num_key_value_heads") or heads
        if heads % kv_heads:
            raise ValueError(f"{path}: {heads} query heads do not divide into {kv_heads} KV heads")
        if head_dim % 2:
            raise ValueError(f"{path}: head_dim {head_dim} is odd; rotary embedding needs pairs")
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
            rope_theta=theta,
            rope_factor=factor,
            max_position_embeddings=need("max_position_embeddings"),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            attention_bias=bool(traits.get("attention_bias", raw.get("attention_bias", False))),
            output_bias=bool(traits["qk_norm"] and raw.get("attention_bias")),
            qk_norm=bool(traits["qk_norm"]),
            sliding_window=_sliding_window(raw),
            dtype=dtype.removeprefix("torch.") if isinstance(dtype, str) else None,
        )


# Properties that follow from the architecture's name and may be absent in config.json.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Qwen3ForCausalLM": {"qk_norm": True, "head_dim": 128},
    "Qwen2ForCausalLM": {"qk_norm": False, "attention_bias": True},
}


def _rope(raw: dict[str, Any], path: Path) -> tuple[float, float]:
    """(theta, factor), from `rope_parameters` (new) or `rope_theta` and `rope_scaling` (old)."""
    new, old = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
    if new and old and new != old:
        raise ValueError(f"{path} has both rope_parameters and rope_scaling; keep one of them")
    params = new or old
    kind = params.get("rope_type", params.get("type", "default"))
    theta = float(params.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    if kind == "default":
        return theta, 1.0
    if kind == "linear":
        factor = params.get("factor")
        if not isinstance(factor, int | float) or factor < 1:
            raise ValueError(
                f"{path}: linear rope scaling needs a factor of 1 or more, not {factor!r}"
            )
        return theta, float(factor)
    raise ValueError(
        f"{path}: rope scaling {kind!r} is not supported, only 'default' and 'linear'; remove it "
        "from config.json to run the model at its original length"
    )


def _sliding_window(raw: dict[str, Any]) -> int | None:
    """Return the window, if any. The defaults are those of transformers' Qwen configs."""
    if not raw.get("use_sliding_window"):
        return None
    layers = raw.get("layer_types")
    if layers is None:
        slides = raw.get("max_window_layers", 28) < raw["num_hidden_layers"]
    else:
        slides = "sliding_attention" in layers
    return raw.get("sliding_window", 4096) if slides else None


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises ValueError with the file's name."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not JSON, or not even text
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path} is not valid: it must hold an object, not {type(raw).__name__}")
    return raw
