"""nanovllm: a minimal, single-process, offline LLM inference engine.

    from nanovllm import LLM
    print(LLM().chat([{"role": "user", "content": "What is 12 + 30?"}])[0].outputs[0].text)

Names are loaded when they are first used (PEP 562), so that `import nanovllm.engine.scheduler`
loads no torch.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanovllm.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from nanovllm.engine.input_processor import TextPrompt, TokensPrompt
    from nanovllm.llm import LLM
    from nanovllm.outputs import (
        CompletionOutput,
        GenerationError,
        Logprob,
        RequestMetrics,
        RequestOutput,
        StreamOutput,
    )
    from nanovllm.pooling import EmbeddingOutput, EmbeddingRequestOutput, PoolingParams
    from nanovllm.sampling_params import SamplingParams
    from nanovllm.scoring import LoglikelihoodOutput
    from nanovllm.structured import StructuredOutputsParams
    from nanovllm.trace import Trace

__version__ = "0.1.0"
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
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StreamOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "Trace",
]
HOMES = {"LLM": "llm", "SamplingParams": "sampling_params", "Trace": "trace"}
HOMES["StructuredOutputsParams"] = "structured"
HOMES |= dict.fromkeys(("TextPrompt", "TokensPrompt"), "engine.input_processor")
HOMES |= dict.fromkeys(("EmbeddingOutput", "EmbeddingRequestOutput", "PoolingParams"), "pooling")
HOMES["LoglikelihoodOutput"] = "scoring"
HOMES |= dict.fromkeys((name for name in __all__ if name.startswith("Beam")), "beam_search")

# Hidden from type checkers, which would take every name to exist.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in __all__:
            names = importlib.import_module("nanovllm.vllm_names")
            error = names.missing("module 'nanovllm'", name, __all__)
            # `from nanovllm import name` would replace an AttributeError by one of its own.
            raise ImportError(error) if name in names.INSTEAD else error
        return getattr(importlib.import_module(f"nanovllm.{HOMES.get(name, 'outputs')}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
