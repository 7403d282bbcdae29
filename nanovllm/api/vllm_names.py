"""Names of vLLM and nano-vllm that do not exist here, and what to use instead.

The fields of SamplingParams are in sampling_params.py.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict, cast

from nanovllm.api.checks import similar, unknown_name

# Options of `LLM()` that have another name here, or two names there.
OTHER_NAMES = {"block_size": "kvcache_block_size", "kv_offloading_size": "swap_space"}

# What is accepted of an argument beside None, without an effect, and why other values are refused.
Unused = tuple[tuple[object, ...], str]
# Options of `LLM()`. Those without a reason accept every value.
GENERATES_TEXT = "nanovllm has text, embeddings and log-likelihoods, all from text"
ONE_DEVICE = "use 1; tensor_parallel_size divides the model among several devices"
EDIT_CONFIG = "edit config.json in a copy of the checkpoint"
ADAPTER = "merge the adapter into the checkpoint"
VLLM_OPTIONS: dict[str, Unused] = {
    "code_revision": ((), "nanovllm never runs the code of a checkpoint"),
    "config_format": (("auto", "hf"), "the configuration is read from config.json"),
    "convert": (("auto", "none", "embed"), GENERATES_TEXT),
    "cpu_offload_gb": ((0, 0.0), "the weights stay on one device; use a smaller model or dtype"),
    "data_parallel_size": ((1,), ONE_DEVICE),
    "download_dir": ((), "set the environment variable HF_HOME, or pass a directory as model"),
    "enable_lora": ((False,), ADAPTER),
    "enable_prompt_embeds": ((False,), GENERATES_TEXT),
    "enable_sleep_mode": ((False,), "`del llm` frees the memory"),
    "generation_config": (("auto",), "pass a SamplingParams to use other values than the file's"),
    "hf_overrides": (({},), EDIT_CONFIG),
    "hf_token": ((), "set the environment variable HF_TOKEN"),
    "kv_offloading_backend": (("native",), "features/host_tier/blocks.py is the only one"),
    "logits_processors": (([], ()), "set logits_processors of SamplingParams"),
    "logprobs_mode": (("raw_logprobs",), "log-probabilities are computed before all rules"),
    "model_impl": (("auto", "vllm"), "the models are those of nanovllm/models"),
    "num_gpu_blocks_override": ((), "use num_kvcache_blocks"),
    "override_generation_config": (({},), "pass a SamplingParams"),
    "pipeline_parallel_size": ((1,), ONE_DEVICE),
    "rope_scaling": (({},), EDIT_CONFIG),
    "rope_theta": ((), EDIT_CONFIG),
    "runner": (("auto", "generate", "pooling"), GENERATES_TEXT),
    "speculative_config": (({},), "there is no speculative decoding yet"),
    "task": (("auto", "generate", "embed"), GENERATES_TEXT),
    "tokenizer_mode": (("auto", "hf"), "transformers' AutoTokenizer reads the tokenizer"),
    "tokenizer_revision": ((), "download that revision and pass its directory as tokenizer"),
    "trust_remote_code": ((False,), "nanovllm never runs the code of a checkpoint"),
}
NO_EFFECT = (
    "compilation_config cudagraph_capture_sizes disable_async_output_proc disable_cascade_attn "
    "disable_custom_all_reduce disable_log_requests disable_log_stats distributed_executor_backend "
    "enable_chunked_prefill limit_mm_per_prompt max_cudagraph_capture_size "
    "max_parallel_loading_workers max_seq_len_to_capture optimization_level "
    "prefix_caching_hash_algo safetensors_load_strategy served_model_name use_tqdm_on_load"
)
VLLM_OPTIONS |= dict.fromkeys(NO_EFFECT.split(), ((), ""))

TEXT_ONLY = "nanovllm takes text and has no classification heads; use transformers"

# Attributes of LLM, and names that are imported from vllm.
_NAMES = {
    TEXT_ONLY: "classify reset_mm_cache reward ClassificationOutput ClassificationRequestOutput",
    "use embed, whose results are EmbeddingRequestOutput": "encode PoolingOutput "
    "PoolingRequestOutput",
    "use loglikelihood: docs/api.md shows a reranker's score with it": "score ScoringOutput "
    "ScoringRequestOutput",
    "its name is StructuredOutputsParams now, for structured_outputs of SamplingParams": "GuidedDecodingParams",
    ADAPTER: "LoRARequest",
    "use the methods of LLM(...).engine: add_request, step, has_unfinished_requests, "
    "abort_request": "LLMEngine abort_request add_request enqueue enqueue_chat exit "
    "has_unfinished_requests is_finished step wait_for_completion",
    "pass the options to LLM(model, **options)": "AsyncEngineArgs EngineArgs",
    "use LLM.stream for tokens as they are generated": "AsyncLLMEngine RequestOutputKind",
    "annotate with str, list[int], TextPrompt or TokensPrompt": "PromptType",
    "the models are those of nanovllm/models": "ModelRegistry",
    "use stats(), and the metrics of each RequestOutput": "get_metrics",
    "use Trace for the steps and torch.profiler for the kernels": "start_profile stop_profile",
    "`del llm` frees the memory; create another LLM later": "sleep wake_up",
    "no rank controls the others; each has llm.engine.runner.model, or "
    "llm.engine.runner.runner.model with tensor_parallel_size": "apply_model collective_rpc get_world_size initialize_ray_cluster",
    "read config.json, or use get_default_sampling_params": "default_sampling_params model_config",
    "use get_tokenizer().apply_chat_template": "preprocess_chat",
    "pass tokenizer=... to LLM()": "set_tokenizer",
}
INSTEAD = {name: sentence for sentence, names in _NAMES.items() for name in names.split()}


def missing(owner: str, name: str, known: Iterable[str]) -> AttributeError:
    """Return an error that says what to use instead of `name`, or names a similar one of `known`."""
    hint = INSTEAD.get(name) or similar(name, known)
    message = f"{owner} has no attribute {name!r}" + f"; {hint}" * bool(hint)
    # If `obj` were not None, Python would append a similar name itself.
    return AttributeError(message, name=name, obj=None)


class CallArguments(TypedDict, total=False):
    """Further arguments of vLLM's `generate` and `chat`, with the values that are accepted."""

    chat_template_content_format: Literal["auto"] | None
    lora_request: Sequence[None] | None
    mm_processor_kwargs: dict[str, Any] | None
    priority: Literal[0] | Sequence[Literal[0]] | None
    prompt_token_ids: None
    tokenization_kwargs: dict[str, Any] | None


CALL_ARGUMENTS: dict[str, Unused] = {
    "chat_template_content_format": (("auto",), "it is derived from the chat template"),
    "lora_request": ((), ADAPTER),
    "mm_processor_kwargs": (({},), TEXT_ONLY),
    "priority": ((0,), "scheduling_policy sets the order; submit urgent requests first"),
    "prompt_token_ids": ((), "pass the token ids as `prompts`"),
    "tokenization_kwargs": (({},), "call get_tokenizer() and pass its token ids as `prompts`"),
}
ONE_FOR_EACH = "lora_request", "priority"  # a list has one for each prompt


def check_call(call: Callable[..., Any], arguments: Mapping[str, object]) -> None:
    """Raise TypeError for an unknown argument, ValueError for a value that would change a result."""
    for name, value in arguments.items():
        if name not in CALL_ARGUMENTS:
            own = list(inspect.signature(call).parameters)[:-1]  # without `**arguments`
            raise TypeError(unknown_name(f"argument of {call.__name__}", name, own))
        several = isinstance(value, list | tuple) and name in ONE_FOR_EACH
        for one in cast("list[object]", value) if several else [value]:
            check_unused(name, one, *CALL_ARGUMENTS[name])


def check_unused(name: str, value: object, accepted: tuple[object, ...], reason: str) -> None:
    """Raise ValueError with the reason, if there is one, for a value that is not accepted."""
    # Types are compared first, because the comparison of an array has no truth value.
    known = value is None or any(type(value) is type(x) and value == x for x in accepted)
    if reason and not known:
        raise ValueError(f"{name}={value!r:.80} is not supported: {reason}")
