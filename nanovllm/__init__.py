"""nanovllm: an offline LLM inference engine to read and to use.

    from nanovllm import LLM
    print(LLM().chat([{"role": "user", "content": "What is 12 + 30?"}])[0].outputs[0].text)

Importing it loads no torch, which `LLM()` needs and the control plane does not.
"""

__version__ = "0.2.0"

from nanovllm.cli.trace.trace import Trace
from nanovllm.features.sampling.repetition import RepetitionDetectionParams
from nanovllm.features.sampling.tool_calls import parse_tool_calls
from nanovllm.features.tasks.beam_search import BeamSearchOutput, BeamSearchSequence
from nanovllm.features.tasks.embeddings.pooling import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingParams,
)
from nanovllm.features.tasks.loglikelihood import LoglikelihoodOutput
from nanovllm.features.tasks.rerank import ScoringOutput, ScoringRequestOutput
from nanovllm.inputs import TextPrompt, TokensPrompt
from nanovllm.llm import LLM
from nanovllm.outputs import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    StreamOutput,
)
from nanovllm.sampling_params import BeamSearchParams, SamplingParams, StructuredOutputsParams
from nanovllm.utils.errors import GenerationError

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "GenerationError",
    "LoglikelihoodOutput",
    "Logprob",
    "PoolingParams",
    "RepetitionDetectionParams",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StreamOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "Trace",
    "parse_tool_calls",
]
