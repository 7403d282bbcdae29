"""Names of vLLM and nano-vllm that do not exist here, and what to use instead.

For the fields of SamplingParams see `ELSEWHERE` in sampling_params.py.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from nanovllm.utils.checks import similar, unknown_name
from nanovllm.utils.log import logger

# Options of `LLM()` that have another name here, or two names there.
OTHER_NAMES = {"block_size": "kvcache_block_size", "kv_offloading_size": "swap_space"}

# (ignored values, reason): values that are ignored, in addition to None, and why any other value
# is an error. Without a reason any value is ignored.
Unused = tuple[tuple[object, ...], str]
GENERATES_TEXT = "nanovllm has text, embeddings and log-likelihoods, all from text"
ONE_DEVICE = "use 1; tensor_parallel_size divides the model among several devices"
OVERRIDE = "set it by hf_overrides"
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
    "hf_token": ((), "set the environment variable HF_TOKEN"),
    "kv_offloading_backend": (("native",), "features/memory/host_cache/blocks.py is the only one"),
    "logits_processors": (([], ()), "set logits_processors of SamplingParams"),
    "logprobs_mode": (("raw_logprobs",), "log-probabilities are computed before all rules"),
    "mamba_block_size": ((), "states are saved after blocks of kvcache_block_size tokens"),
    "mamba_cache_dtype": (("auto",), "inputs of the convolution have the dtype of the model"),
    "mamba_cache_mode": (("align",), "num_state_slots=0 keeps no states for the prefix cache"),
    "mamba_ssm_cache_dtype": (("auto", "float32"), "states are in float32"),
    "model_impl": (("auto", "vllm"), "nanovllm has its own models"),
    "num_gpu_blocks_override": ((), "use num_kvcache_blocks"),
    "override_generation_config": (({},), "pass a SamplingParams"),
    "pipeline_parallel_size": ((1,), ONE_DEVICE),
    "rope_scaling": (({},), OVERRIDE),
    "rope_theta": ((), OVERRIDE),
    "runner": (("auto", "generate", "pooling"), GENERATES_TEXT),
    "speculative_config": (({},), "there is no speculative decoding yet"),
    "task": (("auto", "generate", "embed"), GENERATES_TEXT),
    "tokenizer_mode": (("auto", "hf"), "transformers' AutoTokenizer reads the tokenizer"),
    "tokenizer_revision": ((), "download that revision and pass its directory as tokenizer"),
    "trust_remote_code": ((False,), "nanovllm never runs the code of a checkpoint"),
}
# Options of vLLM that accept any value and change nothing here.
NO_EFFECT = (
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
    "max_parallel_loading_workers",
    "max_seq_len_to_capture",
    "optimization_level",
    "prefix_caching_hash_algo",
    "safetensors_load_strategy",
    "served_model_name",
    "use_tqdm_on_load",
)
VLLM_OPTIONS |= dict.fromkeys(NO_EFFECT, ((), ""))
# Values of vLLM's `quantization` that name the format of a checkpoint.
CHECKPOINT_FORMATS = ("awq", "awq_marlin", "compressed-tensors", "fp8", "gptq", "gptq_marlin")


def translate(options: Mapping[str, Any]) -> dict[str, Any]:
    """Translate options of `LLM()` to their names here, and remove those that change nothing.

    Unknown names are returned as they are. Raises ValueError for a value that would have an effect
    in vLLM, and for one option that is given under two names with different values.
    """
    values = dict(options)
    for other, name in OTHER_NAMES.items():
        if (value := values.pop(other, None)) is not None:
            given = values.setdefault(name, value)
            if given is not value and given != value:
                raise ValueError(
                    f"{other}={value!r} and {name}={given!r} are two names of one option; "
                    "give one of them"
                )
    for name in [name for name in values if name in VLLM_OPTIONS]:
        value = values.pop(name)
        check_unused(name, value, *VLLM_OPTIONS[name])
        logger.debug(f"{name}={value!r} is an option of vLLM and changes nothing here")
    if (method := values.get("quantization")) in CHECKPOINT_FORMATS:
        raise ValueError(
            f"quantization={method!r} is not needed: the format of a quantized checkpoint is read "
            "from its config.json; leave it out, or use 'int8' to quantize another checkpoint"
        )
    return values


TEXT_ONLY = "nanovllm takes text and has no classification heads; use transformers"

# What to use instead of attributes of LLM, and of names that are imported from vllm.
USE_EMBED = "use embed, whose results are EmbeddingRequestOutput"
USE_LOGLIKELIHOOD = "use loglikelihood: docs/api.md shows a reranker's score with it"
USE_ENGINE = (
    "use the methods of LLM(...).engine: add_request, step, has_unfinished_requests, abort_request"
)
USE_OPTIONS = "pass the options to LLM(model, **options)"
USE_STREAM = "use LLM.stream for tokens as they are generated"
USE_TRACE = "use Trace for the steps and torch.profiler for the kernels"
USE_DEL = "`del llm` frees the memory; create another LLM later"
NO_CONTROLLER = (
    "no rank controls the others; each has llm.engine.runner.model, or "
    "llm.engine.runner.runner.model with tensor_parallel_size"
)
READ_CONFIG = "read config.json, or use get_default_sampling_params"
INSTEAD = {
    "abort_request": USE_ENGINE,
    "add_request": USE_ENGINE,
    "apply_model": NO_CONTROLLER,
    "AsyncEngineArgs": USE_OPTIONS,
    "AsyncLLMEngine": USE_STREAM,
    "ClassificationOutput": TEXT_ONLY,
    "ClassificationRequestOutput": TEXT_ONLY,
    "classify": TEXT_ONLY,
    "collective_rpc": NO_CONTROLLER,
    "default_sampling_params": READ_CONFIG,
    "encode": USE_EMBED,
    "EngineArgs": USE_OPTIONS,
    "enqueue": USE_ENGINE,
    "enqueue_chat": USE_ENGINE,
    "exit": USE_ENGINE,
    "get_metrics": "use stats(), and the metrics of each RequestOutput",
    "get_world_size": NO_CONTROLLER,
    "GuidedDecodingParams": "its name is StructuredOutputsParams now, for structured_outputs of "
    "SamplingParams",
    "has_unfinished_requests": USE_ENGINE,
    "initialize_ray_cluster": NO_CONTROLLER,
    "is_finished": USE_ENGINE,
    "LLMEngine": USE_ENGINE,
    "LoRARequest": ADAPTER,
    "model_config": READ_CONFIG,
    "ModelRegistry": "all models are in nanovllm/models",
    "PoolingOutput": USE_EMBED,
    "PoolingRequestOutput": USE_EMBED,
    "preprocess_chat": "use get_tokenizer().apply_chat_template",
    "PromptType": "annotate with str, list[int], TextPrompt or TokensPrompt",
    "RequestOutputKind": USE_STREAM,
    "reset_mm_cache": TEXT_ONLY,
    "reward": TEXT_ONLY,
    "score": USE_LOGLIKELIHOOD,
    "ScoringOutput": USE_LOGLIKELIHOOD,
    "ScoringRequestOutput": USE_LOGLIKELIHOOD,
    "set_tokenizer": "pass tokenizer=... to LLM()",
    "sleep": USE_DEL,
    "start_profile": USE_TRACE,
    "step": USE_ENGINE,
    "stop_profile": USE_TRACE,
    "wait_for_completion": USE_ENGINE,
    "wake_up": USE_DEL,
}


def missing(owner: str, name: str, known: Iterable[str]) -> AttributeError:
    """Return an error that says what to use instead of `name`, or suggests a name of `known`."""
    hint = INSTEAD.get(name) or similar(name, known)
    message = f"{owner} has no attribute {name!r}" + f"; {hint}" * bool(hint)
    # If `obj` were not None, Python would append a similar name itself.
    return AttributeError(message, name=name, obj=None)


# The arguments in CallArguments of inputs.py.
CALL_ARGUMENTS: dict[str, Unused] = {
    "chat_template_content_format": (("auto",), "it is derived from the chat template"),
    "lora_request": ((), ADAPTER),
    "mm_processor_kwargs": (({},), TEXT_ONLY),
    "priority": ((0,), "scheduling_policy sets the order; submit urgent requests first"),
    "prompt_token_ids": ((), "pass the token ids as `prompts`"),
    "tokenization_kwargs": (({},), "call get_tokenizer() and pass its token ids as `prompts`"),
}
ONE_FOR_EACH = ("lora_request", "priority")  # may be lists with an item for each prompt


def check_call(call: Callable[..., Any], arguments: Mapping[str, object]) -> None:
    """Raise TypeError for an unknown argument, ValueError for a value with an effect."""
    for name, value in arguments.items():
        if name not in CALL_ARGUMENTS:
            known = list(inspect.signature(call).parameters)[:-1]  # without `**arguments`
            raise TypeError(unknown_name(f"argument of {call.__name__}", name, known))
        several = isinstance(value, list | tuple) and name in ONE_FOR_EACH
        for item in cast("list[object]", value) if several else [value]:
            check_unused(name, item, *CALL_ARGUMENTS[name])


def check_unused(name: str, value: object, accepted: tuple[object, ...], reason: str) -> None:
    """Raise ValueError with the reason, if there is one, for a value that is not accepted."""
    # Types are compared first, because the comparison of an array has no truth value.
    known = value is None or any(type(value) is type(x) and value == x for x in accepted)
    if reason and not known:
        raise ValueError(f"{name}={value!r:.80} is not supported: {reason}")
