"""nanovllm: a minimal, offline LLM inference engine to read and to use.

    from nanovllm import LLM
    print(LLM().chat([{"role": "user", "content": "What is 12 + 30?"}])[0].outputs[0].text)

Names are loaded when they are first used (PEP 562), so that `import nanovllm.engine.scheduler`
loads no torch.
"""

import importlib._bootstrap
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from nanovllm.loading.optional import find_optional

if TYPE_CHECKING:
    from nanovllm.api.outputs import CompletionOutput as CompletionOutput
    from nanovllm.api.outputs import GenerationError as GenerationError
    from nanovllm.api.outputs import Logprob as Logprob
    from nanovllm.api.outputs import RequestMetrics as RequestMetrics
    from nanovllm.api.outputs import RequestOutput as RequestOutput
    from nanovllm.api.outputs import StreamOutput as StreamOutput
    from nanovllm.api.prompts import TextPrompt as TextPrompt
    from nanovllm.api.prompts import TokensPrompt as TokensPrompt
    from nanovllm.api.sampling_params import SamplingParams as SamplingParams
    from nanovllm.api.structured_outputs import StructuredOutputsParams as StructuredOutputsParams
    from nanovllm.features.beam_search import BeamSearchOutput as BeamSearchOutput
    from nanovllm.features.beam_search import BeamSearchParams as BeamSearchParams
    from nanovllm.features.beam_search import BeamSearchSequence as BeamSearchSequence
    from nanovllm.features.embeddings.pooling import EmbeddingOutput as EmbeddingOutput
    from nanovllm.features.embeddings.pooling import (
        EmbeddingRequestOutput as EmbeddingRequestOutput,
    )
    from nanovllm.features.embeddings.pooling import PoolingParams as PoolingParams
    from nanovllm.features.loglikelihood import LoglikelihoodOutput as LoglikelihoodOutput
    from nanovllm.llm import LLM as LLM
    from nanovllm.tools.trace.trace import Trace as Trace

__version__ = "0.1.0"
# The public names by module.
NAMES = {
    "features.beam_search": "BeamSearchOutput BeamSearchParams BeamSearchSequence",
    "llm": "LLM",
    "api.outputs": (
        "CompletionOutput GenerationError Logprob RequestMetrics RequestOutput StreamOutput"
    ),
    "features.embeddings.pooling": "EmbeddingOutput EmbeddingRequestOutput PoolingParams",
    "api.prompts": "TextPrompt TokensPrompt",
    "api.sampling_params": "SamplingParams",
    "features.loglikelihood": "LoglikelihoodOutput",
    "api.structured_outputs": "StructuredOutputsParams",
    "tools.trace.trace": "Trace",
}
HOMES = {name: module for module, names in NAMES.items() for name in names.split()}
FILES = {name: f"nanovllm/{module.replace('.', '/')}.py" for name, module in HOMES.items()}
ROOT = Path(__file__).parents[1]  # a directory or a zip file
# Without the names whose file is deleted, because `from nanovllm import *` gets all of them.
__all__ = [name for name, file in FILES.items() if ROOT.is_file() or (ROOT / file).is_file()]

# Hidden from type checkers, which would otherwise accept every name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name in __all__:
            return getattr(importlib.import_module(f"nanovllm.{HOMES[name]}"), name)
        names = find_optional("features.vllm_names")
        if name in HOMES:
            error = AttributeError(f"{name} needs {FILES[name]}, which this copy does not have")
        elif names is None:
            error = AttributeError(f"module 'nanovllm' has no attribute {name!r}")
        else:
            error = names.missing("module 'nanovllm'", name, __all__)
        # `from nanovllm import name` calls this from importlib, and would replace an
        # AttributeError by its own ImportError. No exception can be both.
        asked = sys._getframe(1).f_globals is vars(importlib._bootstrap)
        helps = name in HOMES or (names is not None and name in names.INSTEAD)
        raise ImportError(error) if asked and helps else error


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
