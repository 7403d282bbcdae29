"""nanovllm: a minimal, offline LLM inference engine to read and to use.

    from nanovllm import LLM
    print(LLM().chat([{"role": "user", "content": "What is 12 + 30?"}])[0].outputs[0].text)

Names are loaded when they are first used (PEP 562), so that `import nanovllm.engine.scheduler`
loads no torch.
"""

import importlib._bootstrap
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanovllm.cli.trace.trace import Trace as Trace
    from nanovllm.features.requests.beam_search import BeamSearchOutput as BeamSearchOutput
    from nanovllm.features.requests.beam_search import BeamSearchParams as BeamSearchParams
    from nanovllm.features.requests.beam_search import BeamSearchSequence as BeamSearchSequence
    from nanovllm.features.requests.embeddings.pooling import EmbeddingOutput as EmbeddingOutput
    from nanovllm.features.requests.embeddings.pooling import (
        EmbeddingRequestOutput as EmbeddingRequestOutput,
    )
    from nanovllm.features.requests.embeddings.pooling import PoolingParams as PoolingParams
    from nanovllm.features.requests.loglikelihood import LoglikelihoodOutput as LoglikelihoodOutput
    from nanovllm.inputs import TextPrompt as TextPrompt
    from nanovllm.inputs import TokensPrompt as TokensPrompt
    from nanovllm.llm import LLM as LLM
    from nanovllm.outputs import CompletionOutput as CompletionOutput
    from nanovllm.outputs import GenerationError as GenerationError
    from nanovllm.outputs import Logprob as Logprob
    from nanovllm.outputs import RequestMetrics as RequestMetrics
    from nanovllm.outputs import RequestOutput as RequestOutput
    from nanovllm.outputs import StreamOutput as StreamOutput
    from nanovllm.sampling_params import SamplingParams as SamplingParams
    from nanovllm.sampling_params import StructuredOutputsParams as StructuredOutputsParams

__version__ = "0.1.0"
# The public names by module.
NAMES = {
    "features.requests.beam_search": "BeamSearchOutput BeamSearchParams BeamSearchSequence",
    "llm": "LLM",
    "outputs": (
        "CompletionOutput GenerationError Logprob RequestMetrics RequestOutput StreamOutput"
    ),
    "features.requests.embeddings.pooling": "EmbeddingOutput EmbeddingRequestOutput PoolingParams",
    "inputs": "TextPrompt TokensPrompt",
    "sampling_params": "SamplingParams StructuredOutputsParams",
    "features.requests.loglikelihood": "LoglikelihoodOutput",
    "cli.trace.trace": "Trace",
}
HOMES = {name: module for module, names in NAMES.items() for name in names.split()}
__all__ = [*HOMES]

# Hidden from type checkers, which would otherwise accept every name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name in HOMES:
            return getattr(importlib.import_module(f"nanovllm.{HOMES[name]}"), name)
        from nanovllm.features import vllm_names

        error = vllm_names.missing("module 'nanovllm'", name, __all__)
        # `from nanovllm import name` calls this from importlib, and would replace an
        # AttributeError by its own ImportError. No exception can be both.
        asked = sys._getframe(1).f_globals is vars(importlib._bootstrap)
        raise ImportError(error) if asked and name in vllm_names.INSTEAD else error


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
