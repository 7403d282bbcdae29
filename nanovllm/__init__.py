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
        Logprob,
        RequestMetrics,
        RequestOutput,
        StreamOutput,
    )
    from nanovllm.sampling_params import SamplingParams

__version__ = "0.1.0"

_HOMES = {
    "LLM": "nanovllm.llm",
    "SamplingParams": "nanovllm.sampling_params",
    "CompletionOutput": "nanovllm.outputs",
    "Logprob": "nanovllm.outputs",
    "RequestMetrics": "nanovllm.outputs",
    "RequestOutput": "nanovllm.outputs",
    "StreamOutput": "nanovllm.outputs",
}
__all__ = [
    "LLM",
    "CompletionOutput",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StreamOutput",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
