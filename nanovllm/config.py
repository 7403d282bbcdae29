"""What the user asks for and what the checkpoint says: two frozen values, checked once.

Owns: `EngineConfig`, every option with its default and its check, and `ModelConfig`, the fields of
a checkpoint's config.json that a model needs. Nothing changes either after it is built.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

DTYPES = ("auto", "float32", "bfloat16", "float16")


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """An error message for a name that does not exist, with the nearest that does."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
    return f"unknown {kind} {name!r}; {hint}"


def check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, not {value!r}")
    if value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ValueError(f"{name} must be {bound}, not {value}")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")


class EngineOptions(TypedDict, total=False):
    """The options of `LLM(model, **options)`, for editors; see EngineConfig for what they mean."""

    device: str
    dtype: str
    seed: int
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    kv_cache_memory_bytes: int | None
    kvcache_block_size: int
    num_kvcache_blocks: int | None
    enable_prefix_caching: bool
    enforce_eager: bool
    async_scheduling: bool | None
    scheduling_policy: str
    attention_backend: str
    tensor_parallel_size: int
    load_format: str
    tokenizer: str | None
    revision: str | None
    skip_tokenizer_init: bool


@dataclass(frozen=True)
class EngineConfig:
    """Every option of the engine. Raises TypeError for a wrong type, ValueError for a wrong value."""

    device: str = "auto"  # "cuda" if there is one, else "cpu"
    # "auto": the checkpoint's on a GPU; bfloat16 on a CPU that is fast at it, else float32
    dtype: str = "auto"
    seed: int = 0  # of requests that name none, and of load_format="dummy"
    # tokens of prompt and output; None: what the checkpoint allows
    max_model_len: int | None = None
    max_num_seqs: int = 256  # sequences that hold blocks at a time
    max_num_batched_tokens: int = 8192  # the token budget of one step
    gpu_memory_utilization: float = 0.9  # share of the device's memory that the engine may use
    kv_cache_memory_bytes: int | None = None  # size of the KV cache, instead of what memory allows
    kvcache_block_size: int = 16  # tokens in a block
    num_kvcache_blocks: int | None = None  # blocks for requests; the null block comes on top
    enable_prefix_caching: bool = True
    enforce_eager: bool = False  # no CUDA graphs
    # Plan and launch step N+1 before step N's tokens are read. None: where the device works beside
    # the host, on CUDA; on a CPU it would only cost each sequence a token computed for nothing.
    async_scheduling: bool | None = None
    scheduling_policy: str = "fcfs"  # or "sjf", shortest job first
    attention_backend: str = "auto"  # "triton" on CUDA, "numba" on a CPU; "sdpa" anywhere
    tensor_parallel_size: int = 1
    load_format: str = "auto"  # "dummy": random weights, from a config.json alone
    tokenizer: str | None = None  # a directory or hub id of its own
    revision: str | None = None  # of a hub id
    skip_tokenizer_init: bool = False  # token ids in, token ids out

    @classmethod
    def from_options(cls, options: EngineOptions) -> EngineConfig:
        known = [f.name for f in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                raise TypeError(unknown_name("option", name, known))
        return cls(**options)

    def __post_init__(self) -> None:
        check_int("max_num_seqs", self.max_num_seqs, 1)
        check_int("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        check_int("kvcache_block_size", self.kvcache_block_size, 1)
        check_int("seed", self.seed, -(2**63), 2**64 - 1)
        for name in ("max_model_len", "kv_cache_memory_bytes", "num_kvcache_blocks"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1)
        for name in ("enable_prefix_caching", "enforce_eager", "skip_tokenizer_init"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, not {getattr(self, name)!r}")
        if not isinstance(self.async_scheduling, bool | None):
            raise TypeError(
                f"async_scheduling must be a bool or None, not {self.async_scheduling!r}"
            )
        for name in ("tokenizer", "revision"):
            if not isinstance(getattr(self, name), str | None):
                raise TypeError(f"{name} must be a string or None, not {getattr(self, name)!r}")
        utilization = self.gpu_memory_utilization
        if isinstance(utilization, bool) or not isinstance(utilization, int | float):
            raise TypeError(f"gpu_memory_utilization must be a number, not {utilization!r}")
        if not 0 < utilization <= 1:  # NaN fails here too
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], not {utilization}")
        if not isinstance(self.device, str):
            raise TypeError(f"device must be a string, not {self.device!r}")
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ValueError(
                f"device must be 'auto', 'cpu', 'cuda' or 'cuda:0', not {self.device!r}"
            )
        # Names may come as torch dtypes too: str(torch.float32) is "torch.float32".
        object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("scheduling_policy", self.scheduling_policy, ("fcfs", "sjf"))
        check_choice(
            "attention_backend", self.attention_backend, ("auto", "triton", "numba", "sdpa")
        )
        check_choice("load_format", self.load_format, ("auto", "dummy"))
        check_int("tensor_parallel_size", self.tensor_parallel_size, 1)
        if self.tensor_parallel_size != 1:
            raise ValueError(
                f"tensor_parallel_size={self.tensor_parallel_size} is not supported yet: nanovllm "
                "runs one process on one device; use tensor_parallel_size=1"
            )


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
    sliding_window: int | None  # tokens that a layer looks back at most; None: all
    dtype: str | None  # the dtype that the weights are stored in, if config.json says

    @classmethod
    def from_file(cls, path: Path) -> ModelConfig:
        """Read config.json. Raises ValueError for what it does not hold or we do not support."""
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


# What an architecture's name implies and its config.json need not say.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Qwen3ForCausalLM": {"qk_norm": True, "head_dim": 128},
    "Qwen2ForCausalLM": {"qk_norm": False, "attention_bias": True},
}


def _rope(raw: dict[str, Any], path: Path) -> tuple[float, float]:
    """(theta, factor), from `rope_parameters` (new) or `rope_theta` and `rope_scaling` (old)."""
    new, old = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
    if new and old and new != old:
        raise ValueError(f"{path} has both rope_parameters and rope_scaling; keep the one you mean")
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
    """The window, if any layer slides. The defaults are those of transformers' Qwen configs."""
    if not raw.get("use_sliding_window"):
        return None
    layers = raw.get("layer_types")
    if layers is None:
        slides = raw.get("max_window_layers", 28) < raw["num_hidden_layers"]
    else:
        slides = "sliding_attention" in layers
    return raw.get("sliding_window", 4096) if slides else None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError that names the file."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not JSON, or not even text
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path} is not valid: it must hold an object, not {type(raw).__name__}")
    return raw
