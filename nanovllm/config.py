"""EngineConfig: the options of the engine. SamplingParams uses the same checks."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import logging
import math
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypeVar

EMBEDDED = "qwen3-nano"  # the model that ships with the package
DTYPES = ("auto", "float32", "bfloat16", "float16")
DTYPE_ALIASES = {"float": "float32", "half": "float16"}
logger = logging.getLogger("nanovllm")
KINDS = {
    int: "an int",
    float: "a number",
    bool: "True or False",
    str: "a string",
    list: "a list",
    dict: "an object",
}
T = TypeVar("T")
# Name -> (lowest, highest) value of a number, or the strings to choose from.
Limits = Mapping[str, tuple[Any, ...]]


@functools.cache
def scalar_fields(cls: type) -> dict[str, tuple[type, bool]]:
    """The int, float, bool and str fields of a dataclass: name -> (type, whether optional)."""
    fields = {}
    for name, hint in typing.get_type_hints(cls).items():
        is_union = isinstance(hint, types.UnionType)
        members = typing.get_args(hint) if is_union else (hint,)
        kinds = [kind for kind in members if kind is not type(None)]
        if len(kinds) == 1 and kinds[0] in KINDS:
            fields[name] = (kinds[0], len(members) > 1)
    return fields


def check_scalars(thing: Any, limits: Limits) -> None:
    """Check the type of every scalar field, and its value against `limits`."""
    cls: Any = type(thing)
    for name, (kind, optional) in scalar_fields(cls).items():
        value = getattr(thing, name)
        if value is not None or not optional:
            check_scalar(name, value, kind, limits.get(name, ()))


def check_scalar(name: str, value: Any, kind: type, limits: tuple[Any, ...]) -> None:
    """Raise TypeError or ValueError with the name, the value and what is accepted."""
    accepted: Any = (int, float) if kind is float else kind
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{name} must be {KINDS[kind]}, not {value!r}")
    if kind in (str, list, dict):
        if limits and value not in limits:
            raise ValueError(f"{name} must be one of {', '.join(limits)}, not {value!r}")
        return
    low, high = limits or (-math.inf, math.inf)
    if not (low <= value <= high and abs(value) < 1e30):  # NaN fails too
        if math.isfinite(high):
            bound = f"between {low} and {high}"
        else:
            bound = f"at least {low}" if kind is int else f"{low} or more, and finite"
        raise ValueError(f"{name} must be {bound}, not {value}")


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """Return an error message for an unknown name, with the most similar known one."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
    return f"unknown {kind} {name!r}; {hint}"


def refuse_unknown_fields(
    kind: str, elsewhere: Mapping[str, str] | None = None
) -> Callable[[type[T]], type[T]]:
    """A decorator of a dataclass, whose errors about unknown fields name a similar one.

    kind: what the messages call a field. elsewhere: name -> what to use instead. The decorated class
    raises TypeError for an argument, AttributeError for an attribute that is set.
    """

    def explain(cls: Any, name: str) -> str:
        if elsewhere and name in elsewhere:
            return f"there is no {kind} {name!r}; {elsewhere[name]}"
        return unknown_name(kind, name, cls.__dataclass_fields__)

    def decorate(cls: Any) -> Any:
        def new(cls: Any, *args: Any, **given: Any) -> Any:
            for name in given:
                if name not in cls.__dataclass_fields__:
                    raise TypeError(explain(cls, name))
            return object.__new__(cls)

        def set_field(self: Any, name: str, value: object) -> None:
            if name not in self.__dataclass_fields__:
                raise AttributeError(explain(self, name))
            object.__setattr__(self, name, value)

        # inspect.signature and help() follow __wrapped__ to the fields and their defaults.
        cls.__new__ = functools.update_wrapper(new, cls.__init__, assigned=(), updated=())
        if not cls.__dataclass_params__.frozen:
            cls.__setattr__ = set_field
        return cls

    return decorate


@dataclass(frozen=True)
class EngineConfig:
    """The parameters of LLM(). Raises TypeError for a wrong type, ValueError for a wrong value."""

    model: str | os.PathLike[str] = EMBEDDED  # a directory, a hub id or "qwen3-nano"
    _: KW_ONLY
    device: str = "auto"  # "auto": "cuda" if torch finds a GPU, else "cpu"
    # "auto": on a GPU the checkpoint's; on a CPU bfloat16 if that is fast, else float32.
    dtype: str = "auto"
    seed: int = 0  # for requests without a seed, and for load_format="dummy"
    # Prompt and output tokens. None: the checkpoint's maximum, or as many as fit the memory.
    max_model_len: int | None = None
    max_num_seqs: int = 256  # sequences that run at a time
    max_num_batched_tokens: int = 8192  # the token budget of one step
    gpu_memory_utilization: float = 0.9  # fraction of the GPU's memory that the engine may use
    kv_cache_dtype: str = "auto"  # "auto": `dtype`; "fp8" or "fp8_e4m3": half as large as bfloat16
    kv_cache_memory_bytes: int | None = None  # size of the KV cache; None: what the memory allows
    kvcache_block_size: int = 16  # tokens
    num_kvcache_blocks: int | None = None  # for requests; the null block is additional
    swap_space: float = 0  # GiB of host memory to which evicted KV blocks are saved
    # Fewer blocks are computed again and not loaded from there. None: measured at the start.
    swap_min_blocks: int | None = None
    enable_prefix_caching: bool = True
    enforce_eager: bool = False  # no CUDA graphs
    # Plan and launch a step before the tokens of the previous step are read. None: on a GPU only,
    # which works while the host plans. On a CPU it would compute an unused token for each sequence.
    async_scheduling: bool | None = None
    scheduling_policy: str = "fcfs"  # or "sjf", shortest job first
    attention_backend: str = "auto"  # "triton" on a GPU, "numba" on a CPU; "sdpa" anywhere
    tensor_parallel_size: int = 1  # ranks that share the model, started by torchrun
    load_format: str = "auto"  # "dummy": random weights; needs config.json only
    quantization: str | None = None  # "int8": linear layers and head are quantized while loading
    tokenizer: str | None = None  # a directory or hub id; None: the model's
    revision: str | None = None  # branch, tag or commit of a hub id
    skip_tokenizer_init: bool = False  # work with token ids only

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> EngineConfig:
        """Check the names of the options. Options of vLLM that change nothing here are ignored."""
        own: dict[str, Any] = {}
        known = [f.name for f in dataclasses.fields(cls)]
        options = dict(options)
        for other, name in OTHER_NAMES.items():
            if (value := options.pop(other, None)) is not None:
                given = options.setdefault(name, value)
                if given is not value and given != value:
                    raise ValueError(
                        f"{other}={value!r} and {name}={given!r} are two names of one option; "
                        "give one of them"
                    )
        for name, value in options.items():
            if name in known:
                own[name] = value
            elif name not in VLLM_OPTIONS:
                raise TypeError(unknown_name("option", name, known))
            else:
                harmless, reason = VLLM_OPTIONS[name]
                # An array has no truth value, so only plain values are compared.
                plain = isinstance(value, bool | int | float | str | list | tuple | dict)
                if reason and value is not None and not (plain and value in harmless):
                    raise ValueError(f"{name}={value!r} is not supported: {reason}")
                logger.debug(f"{name}={value!r} is an option of vLLM and changes nothing here")
        return cls(**own)

    def __post_init__(self) -> None:
        # A dtype may be torch's own: str(torch.float32) is "torch.float32".
        dtype = str(self.dtype).removeprefix("torch.")
        object.__setattr__(self, "dtype", DTYPE_ALIASES.get(dtype, dtype))
        check_scalars(self, LIMITS)
        if self.gpu_memory_utilization == 0:
            raise ValueError("gpu_memory_utilization must be more than 0, not 0")
        if not re.fullmatch(r"auto|cpu|cuda(:\d{1,2})?", self.device):
            raise ValueError(
                f"device must be 'auto', 'cpu', 'cuda' or 'cuda:0', not {self.device!r}"
            )
        if self.swap_space and not self.enable_prefix_caching:
            raise ValueError(
                f"swap_space={self.swap_space} needs the prefix cache, which finds the blocks again; "
                "set swap_space=0 or enable_prefix_caching=True"
            )
        if (size := self.tensor_parallel_size) > 1:
            started = os.environ.get("WORLD_SIZE", "1")
            script = os.path.basename(sys.argv[0]) or "script.py"
            if started != str(size):
                raise ValueError(
                    f"tensor_parallel_size={size} needs {size} processes, and WORLD_SIZE is "
                    f"{started}; start them with: torchrun --nproc-per-node {size} {script}"
                )
            if ":" in self.device:
                raise ValueError(
                    f"device={self.device!r} would be the GPU of all {size} ranks; use 'cuda', and "
                    "each takes that of its LOCAL_RANK"
                )
            if "RANK" not in os.environ:
                raise ValueError(
                    f"tensor_parallel_size={size} needs RANK, which is not set although WORLD_SIZE is; "
                    f"start the processes with: torchrun --nproc-per-node {size} {script}"
                )

    @property
    def rank(self) -> int:
        """Which of the processes that share the model this is. torchrun sets RANK."""
        return int(os.environ["RANK"]) if self.tensor_parallel_size > 1 else 0


LIMITS: Limits = {
    "dtype": DTYPES,
    "kv_cache_dtype": ("auto", "fp8", "fp8_e4m3"),
    "seed": (-(2**63), 2**64 - 1),
    "gpu_memory_utilization": (0, 1),
    "scheduling_policy": ("fcfs", "sjf"),
    "attention_backend": ("auto", "triton", "numba", "sdpa"),
    "load_format": ("auto", "dummy"),
    "quantization": ("int8",),
    "swap_space": (0, math.inf),
    "max_num_seqs": (1, 2**20),
    "kvcache_block_size": (1, 2**20),
    "max_model_len": (2, math.inf),  # a prompt and an output have at least one token each
} | dict.fromkeys(
    (
        "max_num_batched_tokens",
        "kv_cache_memory_bytes",
        "num_kvcache_blocks",
        "swap_min_blocks",
        "tensor_parallel_size",
    ),
    (1, math.inf),
)

# vLLM's names of options that have another name here, or two names there.
OTHER_NAMES = {"block_size": "kvcache_block_size", "kv_offloading_size": "swap_space"}

# Options of vLLM that do not exist here: name -> (accepted values, why other values are refused).
# None is accepted by all of them. Options without a reason accept every value. Accepted values have
# no effect.
TEXT_ONLY = "nanovllm has text, embeddings and log-likelihoods, all from text"
ONE_DEVICE = "use 1; tensor_parallel_size divides the model among several devices"
EDIT_CONFIG = "edit config.json in a copy of the checkpoint"
VLLM_OPTIONS: dict[str, tuple[tuple[object, ...], str]] = {
    "code_revision": ((), "nanovllm never runs the code of a checkpoint"),
    "config_format": (("auto", "hf"), "the configuration is read from config.json"),
    "convert": (("auto", "none", "embed"), TEXT_ONLY),
    "cpu_offload_gb": ((0,), "the weights stay on one device; use a smaller model or dtype"),
    "data_parallel_size": ((1,), ONE_DEVICE),
    "download_dir": ((), "set the environment variable HF_HOME, or pass a directory as model"),
    "enable_lora": ((False,), "merge the adapter into the checkpoint"),
    "enable_prompt_embeds": ((False,), TEXT_ONLY),
    "enable_sleep_mode": ((False,), "`del llm` frees the memory"),
    "generation_config": (("auto",), "pass a SamplingParams to use other values than the file's"),
    "hf_overrides": (({},), EDIT_CONFIG),
    "hf_token": ((), "set the environment variable HF_TOKEN"),
    "kv_offloading_backend": (("native",), "engine/host_tier.py is the only one"),
    "logits_processors": (([], ()), "set logits_processors of SamplingParams"),
    "logprobs_mode": (("raw_logprobs",), "log-probabilities are computed before all rules"),
    "model_impl": (("auto", "vllm"), "the models are those of nanovllm/models"),
    "num_gpu_blocks_override": ((), "use num_kvcache_blocks"),
    "override_generation_config": (({},), "pass a SamplingParams"),
    "pipeline_parallel_size": ((1,), ONE_DEVICE),
    "rope_scaling": (({},), EDIT_CONFIG),
    "rope_theta": ((), EDIT_CONFIG),
    "runner": (("auto", "generate", "pooling"), TEXT_ONLY),
    "speculative_config": (({},), "there is no speculative decoding yet"),
    "task": (("auto", "generate", "embed"), TEXT_ONLY),
    "tokenizer_mode": (("auto", "hf"), "transformers' AutoTokenizer reads the tokenizer"),
    "tokenizer_revision": ((), "download that revision and pass its directory as tokenizer"),
    "trust_remote_code": ((False,), "nanovllm never runs the code of a checkpoint"),
} | dict.fromkeys(
    (
        "compilation_config",
        "cudagraph_capture_sizes",
        "disable_async_output_proc",
        "disable_cascade_attn",
        "disable_custom_all_reduce",
        "disable_log_requests",
        "disable_log_stats",
        "distributed_executor_backend",
        "enable_chunked_prefill",
        "limit_mm_per_prompt",
        "max_cudagraph_capture_size",
        "max_logprobs",
        "max_parallel_loading_workers",
        "max_seq_len_to_capture",
        "optimization_level",
        "prefix_caching_hash_algo",
        "safetensors_load_strategy",
        "served_model_name",
        "use_tqdm_on_load",
    ),
    ((), ""),
)
