"""Errors of requests for which no token could be sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanovllm.engine.request import Request
    from nanovllm.outputs import RequestOutput

# Fields of SamplingParams that exclude tokens. One or several of them can exclude every token.
MASKS = "structured_outputs", "allowed_token_ids", "bad_words", "min_tokens", "logits_processors"


def why_no_token(params: Any) -> str:
    """Return why no token could be sampled for a request with these SamplingParams."""
    masks = [name for name in MASKS if getattr(params, name)]
    return "the model computed NaN" + f", or {' and '.join(masks)} hid every token" * bool(masks)


def check_generated(requests: list[Request]) -> None:
    """Raise GenerationError if requests have ended with finish_reason "error"."""
    outputs = [request.output for request in requests]
    reasons = {
        f"prompts[{i}] (request {request.request_id})": str(
            request.error or why_no_token(request.task.params)
        )
        for i, request in enumerate(requests)
        if any(sample.finish_reason == "error" for sample in request.output.outputs)
    }
    if reasons:
        message = (
            f"no token could be sampled for {', '.join(reasons)}: "
            f"{'; '.join(dict.fromkeys(reasons.values()))}; the attribute `outputs` of this error "
            "has the results of all requests"
        )
        raise GenerationError(message, outputs)


class GrammarError(RuntimeError):
    """An output cannot be continued with its grammar. Only its request ends; others continue."""


class GenerationError(RuntimeError):
    """Raised if requests ended with finish_reason "error", because no token could be sampled.

    The model computed NaN, fields of SamplingParams excluded every token, or an output could not be
    continued with its grammar. `outputs` has the results of all requests of the call, in the order
    of its prompts.
    """

    def __init__(self, message: str, outputs: Sequence[RequestOutput] = ()) -> None:
        super().__init__(message)
        self.outputs = outputs
