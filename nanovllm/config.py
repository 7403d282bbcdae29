"""EngineConfig: the options of the engine."""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any, Concatenate, ParamSpec, TypeAlias, get_args

from nanovllm.utils.checks import Positive, Seed, check_scalars, from_dict, unknown_name

EMBEDDED = "qwen3-nano"  # the model that ships with the package
P = ParamSpec("P")
Dtype: TypeAlias = Annotated[str, "auto", "float32", "bfloat16", "float16"]
DTYPES: tuple[str, ...] = get_args(Dtype)[1:]
DTYPE_ALIASES = {"float": "float32", "half": "float16"}

# Other names of options, which nano-vllm and vLLM use.
RENAMED = {
    "kvcache_block_size": "block_size",
    "num_kvcache_blocks": "num_kv_cache_blocks",
    "num_gpu_blocks_override": "num_kv_cache_blocks",
    "kv_offloading_size": "swap_space",
}
# Options that offline scripts for vLLM pass, and their values that describe what this engine does.
WITHOUT_EFFECT: dict[str, tuple[object, ...]] = {
    "disable_log_stats": (True, False),
    "distributed_executor_backend": ("external_launcher",),
    "enable_chunked_prefill": (True,),
    "language_model_only": (True,),
    "runner": ("auto", "generate", "pooling"),
    "trust_remote_code": (False,),
}
# Formats of quantized checkpoints. In vLLM, "_marlin" selects kernels.
FORMATS: tuple[str, ...] = ("fp8", "modelopt", "fbgemm_fp8", "compressed-tensors")
FORMATS += ("awq", "awq_marlin", "gptq", "gptq_marlin")

# The largest number of tokens of a step with drafts. With more, computation would limit its speed.
# The number for a GPU is an estimate.
MAX_DRAFT_STEP = {"cpu": 16, "cuda": 64}


@dataclass(frozen=True)
class SpeculativeConfig:
    """Speculation by n-grams: the option speculative_config, with the names of vLLM."""

    method: Annotated[str, "ngram"] = "ngram"
    num_speculative_tokens: Annotated[int, 1, 64] = 5  # the most drafts of a row in a step
    prompt_lookup_max: Annotated[int, 1, 64] = 4  # size of the longest n-gram that is looked up
    prompt_lookup_min: Annotated[int, 1, 64] = 2  # and of the shortest

    def __post_init__(self) -> None:
        check_scalars(self)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min={self.prompt_lookup_min} must be at most prompt_lookup_max="
                f"{self.prompt_lookup_max}; set both"
            )


@dataclass(frozen=True)
class EngineConfig:
    """The parameters of LLM(). Raises TypeError for a wrong type, ValueError for a wrong value."""

    # ---- the model ----

    model: str | os.PathLike[str] = EMBEDDED  # a directory, a hub id or "qwen3-nano"
    _: KW_ONLY
    device: str = "auto"  # "auto": "cuda" if torch finds a GPU, else "cpu"
    # "auto": the checkpoint's dtype on a GPU. On a CPU, bfloat16 if it is fast, else float32.
    dtype: Dtype = "auto"
    # "int8" and "int4": linear layers and head are quantized while loading. The other names are
    # formats; the checkpoint must have this format, which is read from its config.json anyway.
    quantization: Annotated[str, "int8", "int4", *FORMATS] | None = None
    adapter: str | os.PathLike[str] | None = None  # LoRA of PEFT: a directory or hub id
    tokenizer: str | None = None  # a directory or hub id; None: the tokenizer of the model
    revision: str | None = None  # branch, tag or commit of a hub id
    skip_tokenizer_init: bool = False  # work with token ids only
    seed: Seed = 0  # for requests without a seed, and for load_format="dummy"

    # Whether thinking is separated from the text; both names mean the same.
    reasoning_parser: Annotated[str, "qwen3", "deepseek_r1"] | None = None
    # Values that replace fields of config.json, such as rope_scaling for a longer context.
    hf_overrides: Mapping[str, Any] | None = None

    # ---- the capacity ----

    # Maximum number of prompt and output tokens together, at least one each. None: the maximum of
    # the checkpoint, or what the KV cache holds if that is less.
    max_model_len: Annotated[int, 2, math.inf] | None = None
    # Sequences that run at a time. The limit is the size of one dimension of a CUDA grid.
    max_num_seqs: Annotated[int, 1, 65_535] = 256
    # The token budget of one step. None: 2048 on a CPU, where the C library returns the memory of
    # larger activations to the system after each layer, and 8192 on a GPU.
    max_num_batched_tokens: Positive | None = None
    # Fraction of the GPU's memory that the engine may use.
    gpu_memory_utilization: Annotated[float, 0, 1] = 0.9
    # Size of the KV cache and of the states of linear attention. None: what the memory allows.
    kv_cache_memory_bytes: Positive | None = None
    # Number of KV blocks for requests, without the null block. None: what the memory allows.
    num_kv_cache_blocks: Positive | None = None
    # "auto": the same as `dtype`. "fp8" or "fp8_e4m3": 8 bits, half the size of bfloat16.
    kv_cache_dtype: Annotated[str, "auto", "fp8", "fp8_e4m3"] = "auto"
    # Number of states that are kept for the prefix cache, if the model has linear attention. None:
    # as many as the memory allows, at most two for each of max_num_seqs.
    num_state_slots: Annotated[int, 0, 2**20] | None = None
    # GiB of host memory to which evicted KV blocks are saved.
    swap_space: Annotated[float, 0, math.inf] = 0
    tensor_parallel_size: Positive = 1  # ranks that share the model, started by torchrun

    # ---- advanced ----

    block_size: Annotated[int, 1, 2**16] = 16  # tokens; kernels have 32-bit offsets in a block
    enable_prefix_caching: bool = True
    scheduling_policy: Annotated[str, "fcfs", "sjf"] = "fcfs"  # "sjf": shortest job first
    # Whether to plan and launch a step before the tokens of the previous step are read. None: True
    # on a GPU, where the host plans while the GPU works. False on a CPU, where it would compute an
    # unused token for each sequence.
    async_scheduling: bool | None = None
    enforce_eager: bool = False  # no CUDA graphs
    # Several tokens of a row in a step, if its text repeats: a dict of fields of SpeculativeConfig.
    speculative_config: Mapping[str, Any] | SpeculativeConfig | None = None
    # "triton" on a GPU, "numba" on a CPU; "sdpa" anywhere
    attention_backend: Annotated[str, "auto", "triton", "numba", "sdpa"] = "auto"
    # Whether a request has the same bits alone and in any batch: with kernels only.
    batch_invariant: bool = False
    # Whether each kernel is compared with plain torch at the start. On a CPU only the first start
    # after the kernels were compiled does that.
    check_kernels: bool = True
    # Largest `logprobs` of a request. -1: no limit.
    max_logprobs: Annotated[int, -1, math.inf] = 20
    # Whether `logprobs` are of the model, or of the distribution from which the token was drawn.
    logprobs_mode: Annotated[str, "raw_logprobs", "processed_logprobs"] = "raw_logprobs"
    # "auto" and "safetensors": the same. "dummy": random weights; needs config.json only.
    load_format: Annotated[str, "auto", "safetensors", "dummy"] = "auto"

    def __post_init__(self) -> None:
        # `dtype` may be a torch.dtype: str(torch.float32) is "torch.float32".
        dtype = str(self.dtype).removeprefix("torch.")
        object.__setattr__(self, "dtype", DTYPE_ALIASES.get(dtype, dtype))
        check_scalars(self)
        for name in ("model", "tokenizer", "adapter"):
            if getattr(self, name) == "":
                raise ValueError(f"{name} is empty; give a directory or a hub id")
        for name in ("hf_overrides", "speculative_config"):
            value = getattr(self, name)
            if not isinstance(value, Mapping | SpeculativeConfig | None):
                raise TypeError(f"{name} must be a dict, not {value!r:.80}")
        if isinstance(given := self.speculative_config, Mapping):
            speculation = from_dict(SpeculativeConfig, "speculative_config", given)
            object.__setattr__(self, "speculative_config", speculation)
        if self.batch_invariant and self.attention_backend == "sdpa":
            raise ValueError(
                "batch_invariant=True needs kernels, and attention_backend='sdpa' has none; leave "
                "one of them out"
            )
        if self.gpu_memory_utilization == 0:
            raise ValueError("gpu_memory_utilization must be more than 0, not 0")
        if not re.fullmatch(r"auto|cpu|cuda(:(\d|[1-9]\d))?", self.device):
            raise ValueError(
                f"device must be 'auto', 'cpu', 'cuda' or 'cuda:0', not {self.device!r}"
            )
        if self.num_kv_cache_blocks is not None and self.kv_cache_memory_bytes is not None:
            raise ValueError(
                f"num_kv_cache_blocks={self.num_kv_cache_blocks} and kv_cache_memory_bytes="
                f"{self.kv_cache_memory_bytes} both set the size of the KV cache; give one of them"
            )
        for name in ("num_state_slots", "swap_space"):
            if getattr(self, name) and not self.enable_prefix_caching:
                raise ValueError(
                    f"{name}={getattr(self, name)} needs the prefix cache; leave it out, or set "
                    "enable_prefix_caching=True"
                )

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> EngineConfig:
        """Return the configuration of `LLM(**options)`.

        None is the default of each option but `model`. The names of RENAMED and WITHOUT_EFFECT are
        accepted too. Raises TypeError for an unknown option, and TypeError or ValueError for a
        wrong value.
        """
        fields = cls.__dataclass_fields__
        values: dict[str, Any] = {}
        for name, value in options.items():
            option = RENAMED.get(name, name)
            if option not in fields and name not in WITHOUT_EFFECT:
                raise TypeError(unknown_name("option", name, fields))
            if value is None and name != "model":
                continue
            if (accepted := WITHOUT_EFFECT.get(name)) is not None:
                if value not in accepted:
                    raise ValueError(
                        f"{name}={value!r:.80} is not supported; the engine works as with "
                        f"{' or '.join(f'{name}={other!r}' for other in accepted)}"
                    )
            elif option in values and values[option] != value:
                raise ValueError(
                    f"{name}={value!r} sets {option}, which is {values[option]!r} already; give "
                    "one of them"
                )
            else:
                values[option] = value
        return cls(**values)

    @property
    def token_budget(self) -> int:
        """`max_num_batched_tokens`, which loading/make_engine.py sets for a CPU."""
        return self.max_num_batched_tokens or 8192

    @property
    def max_drafts(self) -> int:
        """The number of drafts that a row may have in a step."""
        config = self.speculative_config
        return config.num_speculative_tokens if isinstance(config, SpeculativeConfig) else 0

    @property
    def rank(self) -> int:
        """The rank of this process in tensor parallelism. torchrun sets RANK."""
        return int(os.environ["RANK"]) if self.tensor_parallel_size > 1 else 0


def with_parameters_of(
    source: Callable[P, object],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Give an `__init__` the signature of the class `source`, for help(), editors and mypy."""
    return functools.wraps(source.__init__, assigned=())
