"""Errors of requests for which no token could be sampled."""

from __future__ import annotations

from collections.abc import Mapping
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


def why_failed(requests: list[Request]) -> dict[int, str]:
    """Return for each request that ended with finish_reason "error", by its number, why."""
    return {
        i: str(request.error or why_no_token(request.task.params))
        for i, request in enumerate(requests)
        if any(sample.finish_reason == "error" for sample in request.output.outputs)
    }


class GrammarError(RuntimeError):
    """An output cannot be continued with its grammar. Only its request ends; others continue."""


class GenerationError(RuntimeError):
    """Raised if requests ended with finish_reason "error", because no token could be sampled.

    The model computed NaN, fields of SamplingParams excluded every token, or an output could not be
    continued with its grammar. `outputs` has the results of all requests of the call, in the order
    of its prompts.
    """

    def __init__(self, outputs: list[RequestOutput], reasons: Mapping[int, str]) -> None:
        """`reasons` says for each failed request, by its number, why it failed."""
        names = ", ".join(f"prompts[{i}] (request {outputs[i].request_id})" for i in reasons)
        super().__init__(
            f"no token could be sampled for {names}: {'; '.join(dict.fromkeys(reasons.values()))}; "
            "the attribute `outputs` of this error has the results of all requests"
        )
        self.outputs = outputs

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the class, the message and the attributes, for copy and pickle.

        By default, an Exception is made by a call of __init__ with the message alone.
        """
        return type(self).__new__, (type(self), *self.args), vars(self)
