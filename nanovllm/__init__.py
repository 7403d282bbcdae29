"""nanovllm: an offline LLM inference engine to read and to use.

    from nanovllm import LLM
    print(LLM().chat([{"role": "user", "content": "What is 12 + 30?"}])[0].outputs[0].text)

Names are loaded when they are first used (PEP 562), so that `import nanovllm.engine.scheduler`
loads no torch.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanovllm.cli.trace.trace import Trace as Trace
    from nanovllm.features.requests.beam_search import BeamSearchOutput as BeamSearchOutput
    from nanovllm.features.requests.beam_search import BeamSearchSequence as BeamSearchSequence
    from nanovllm.features.requests.embeddings.pooling import EmbeddingOutput as EmbeddingOutput
    from nanovllm.features.requests.embeddings.pooling import (
        EmbeddingRequestOutput as EmbeddingRequestOutput,
    )
    from nanovllm.features.requests.embeddings.pooling import PoolingParams as PoolingParams
    from nanovllm.features.requests.loglikelihood import LoglikelihoodOutput as LoglikelihoodOutput
    from nanovllm.features.requests.repetition import (
        RepetitionDetectionParams as RepetitionDetectionParams,
    )
    from nanovllm.features.requests.rerank import ScoringOutput as ScoringOutput
    from nanovllm.features.requests.rerank import ScoringRequestOutput as ScoringRequestOutput
    from nanovllm.features.requests.tool_calls import parse_tool_calls as parse_tool_calls
    from nanovllm.inputs import TextPrompt as TextPrompt
    from nanovllm.inputs import TokensPrompt as TokensPrompt
    from nanovllm.llm import LLM as LLM
    from nanovllm.outputs import CompletionOutput as CompletionOutput
    from nanovllm.outputs import Logprob as Logprob
    from nanovllm.outputs import RequestMetrics as RequestMetrics
    from nanovllm.outputs import RequestOutput as RequestOutput
    from nanovllm.outputs import StreamOutput as StreamOutput
    from nanovllm.sampling_params import BeamSearchParams as BeamSearchParams
    from nanovllm.sampling_params import SamplingParams as SamplingParams
    from nanovllm.sampling_params import StructuredOutputsParams as StructuredOutputsParams
    from nanovllm.utils.errors import GenerationError as GenerationError

__version__ = "0.1.0"
# The public names and their modules.
MODULES = {
    "BeamSearchOutput": "nanovllm.features.requests.beam_search",
    "BeamSearchParams": "nanovllm.sampling_params",
    "BeamSearchSequence": "nanovllm.features.requests.beam_search",
    "CompletionOutput": "nanovllm.outputs",
    "EmbeddingOutput": "nanovllm.features.requests.embeddings.pooling",
    "EmbeddingRequestOutput": "nanovllm.features.requests.embeddings.pooling",
    "GenerationError": "nanovllm.utils.errors",
    "LLM": "nanovllm.llm",
    "Logprob": "nanovllm.outputs",
    "LoglikelihoodOutput": "nanovllm.features.requests.loglikelihood",
    "PoolingParams": "nanovllm.features.requests.embeddings.pooling",
    "RepetitionDetectionParams": "nanovllm.features.requests.repetition",
    "RequestMetrics": "nanovllm.outputs",
    "RequestOutput": "nanovllm.outputs",
    "SamplingParams": "nanovllm.sampling_params",
    "ScoringOutput": "nanovllm.features.requests.rerank",
    "ScoringRequestOutput": "nanovllm.features.requests.rerank",
    "StreamOutput": "nanovllm.outputs",
    "StructuredOutputsParams": "nanovllm.sampling_params",
    "TextPrompt": "nanovllm.inputs",
    "TokensPrompt": "nanovllm.inputs",
    "Trace": "nanovllm.cli.trace.trace",
    "parse_tool_calls": "nanovllm.features.requests.tool_calls",
}
__all__ = list(MODULES)

if not TYPE_CHECKING:  # type checkers would otherwise accept every name

    def __getattr__(name: str) -> object:
        if name not in MODULES:
            raise AttributeError(f"module 'nanovllm' has no attribute {name!r}")
        return getattr(importlib.import_module(MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
