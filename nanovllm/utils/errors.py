"""Errors of requests for which no token could be sampled."""

from collections.abc import Sequence
from typing import Any


class GrammarError(RuntimeError):
    """An output cannot be continued with its grammar. Only its request ends; others continue."""


class GenerationError(RuntimeError):
    """Raised if requests ended with finish_reason "error", because no token could be sampled.

    The model computed NaN, fields of SamplingParams excluded every token, or an output could not be
    continued with its grammar. `outputs` has the results of all requests of the call, in the order
    of its prompts.
    """

    def __init__(self, message: str, outputs: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.outputs = outputs
