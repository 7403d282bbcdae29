"""Names of vLLM and nano-vllm that do not exist here, and what to use instead.

The options of `LLM()` are in config.py, and the fields of SamplingParams in sampling_params.py.
"""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypedDict

from nanovllm.config import unknown_name

TEXT_ONLY = "nanovllm takes text and has no classification heads; use transformers"
ADAPTER = "merge the adapter into the checkpoint"

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
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    hint = INSTEAD.get(name) or (f"did you mean {near[0]!r}?" if near else "")
    message = f"{owner} has no attribute {name!r}" + f"; {hint}" * bool(hint)
    # If `obj` were not None, Python would append a similar name itself.
    return AttributeError(message, name=name, obj=None)


class CallArguments(TypedDict, total=False):
    """Further arguments of vLLM's `generate` and `chat`, with the values that are accepted."""

    chat_template_content_format: Literal["auto"] | None
    lora_request: None
    mm_processor_kwargs: dict[str, Any] | None
    priority: Literal[0] | None
    prompt_token_ids: None
    tokenization_kwargs: dict[str, Any] | None


# Name -> (accepted values in addition to None, why other values are refused).
CALL_ARGUMENTS: dict[str, tuple[tuple[object, ...], str]] = {
    "chat_template_content_format": (("auto",), "it is derived from the chat template"),
    "lora_request": ((), ADAPTER),
    "mm_processor_kwargs": (({},), TEXT_ONLY),
    "priority": ((0,), "scheduling_policy sets the order; submit urgent requests first"),
    "prompt_token_ids": ((), "pass the token ids as `prompts`"),
    "tokenization_kwargs": (({},), "call get_tokenizer() and pass its token ids as `prompts`"),
}


def check_call(call: Callable[..., Any], arguments: Mapping[str, object]) -> None:
    """Raise TypeError for an unknown argument, ValueError for a value that would change a result."""
    for name, value in arguments.items():
        if name not in CALL_ARGUMENTS:
            own = list(inspect.signature(call).parameters)[:-1]  # without `**arguments`
            raise TypeError(unknown_name(f"argument of {call.__name__}", name, own))
        harmless, reason = CALL_ARGUMENTS[name]
        if value is not None and not any(type(value) is type(h) and value == h for h in harmless):
            raise ValueError(f"{name}={value!r:.80} is not supported: {reason}")
