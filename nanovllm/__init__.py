"""nanovllm: an offline LLM inference engine to read and to use.

    from nanovllm import LLM
    print(LLM().chat([{"role": "user", "content": "What is 12 + 30?"}])[0].outputs[0].text)

Importing it loads no torch, which `LLM()` needs and the control plane does not.
"""

__version__ = "0.2.0"

from typing import TYPE_CHECKING, Any

from nanovllm.features.tasks.results import (
    BeamSearchOutput,
    BeamSearchSequence,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    LoglikelihoodOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from nanovllm.inputs import TextPrompt, TokensPrompt
from nanovllm.llm import LLM
from nanovllm.outputs import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    StreamOutput,
)
from nanovllm.sampling_params import (
    BeamSearchParams,
    PoolingParams,
    RepetitionDetectionParams,
    SamplingParams,
    StructuredOutputsParams,
)
from nanovllm.utils.errors import GenerationError

if TYPE_CHECKING:
    from nanovllm.cli.trace.trace import Trace
    from nanovllm.features.sampling.tool_calls import parse_tool_calls
else:  # with a `__getattr__`, a type checker would accept every name

    def __getattr__(name: str) -> Any:
        """Import a name that few programs use, when it is first used (PEP 562)."""
        if name == "Trace":
            from nanovllm.cli.trace.trace import Trace

            return Trace
        if name == "parse_tool_calls":
            from nanovllm.features.sampling.tool_calls import parse_tool_calls

            return parse_tool_calls
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
