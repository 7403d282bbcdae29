"""nanovllm: a minimal, single-process, offline LLM inference engine.

    from nanovllm import LLM
    print(LLM().chat([{"role": "user", "content": "What is 12 + 30?"}])[0].outputs[0].text)

Names are loaded when they are first used (PEP 562), so that `import nanovllm.engine.scheduler`
loads no torch.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanovllm.llm import LLM
    from nanovllm.outputs import (
        CompletionOutput,
        GenerationError,
        Logprob,
        RequestMetrics,
        RequestOutput,
        StreamOutput,
    )
    from nanovllm.sampling_params import SamplingParams
    from nanovllm.trace import Trace

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "CompletionOutput",
    "GenerationError",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StreamOutput",
    "Trace",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    homes = {"LLM": "llm", "SamplingParams": "sampling_params", "Trace": "trace"}
    return getattr(importlib.import_module(f"nanovllm.{homes.get(name, 'outputs')}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
