"""Embeddings: the settings of a checkpoint, and the task.

An embedding is the hidden state of the prompt's last token after the final norm. No token is
sampled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tokenizers.normalizers import Lowercase

from nanovllm.engine.request import Request, Task, check_length
from nanovllm.engine.sequence import Sequence
from nanovllm.features.tasks.results import EmbeddingOutput, EmbeddingRequestOutput
from nanovllm.inputs import ParsedPrompt
from nanovllm.plan import ResultKind, RowResult
from nanovllm.sampling_params import PoolingParams

if TYPE_CHECKING:
    from nanovllm.engine.input_processor import InputProcessor


@dataclass(frozen=True)
class PoolingSettings:
    """The embedding settings of a checkpoint. sentence_transformers.py reads them."""

    size: int = 0  # numbers in a hidden state
    refused: str = ""  # why the checkpoint has no embeddings; empty if it has
    dimensions: int | None = None
    normalize: bool = True
    prompts: Mapping[str, str] = field(default_factory=dict)  # name -> text
    prompt_name: str | None = None  # the default of PoolingParams.prompt_name
    factor: float = 1.0  # multiplies the hidden states of the model
    add_eos_token: bool = False  # whether the token ids of a text end with the EOS token
    max_seq_length: int | None = None  # tokens of a text that sentence-transformers reads
    lower_case: bool = False  # whether it changes a text to lower case
    others: Mapping[str, Any] = field(default_factory=dict)  # of which embeddings support none

    def complete(self, params: PoolingParams) -> PoolingParams:
        """Return checked parameters, with the settings in place of None except for `dimensions`."""
        params = replace(params)
        if self.refused:
            raise ValueError(self.refused)
        if (params.dimensions or 0) > self.size:
            raise ValueError(
                f"dimensions={params.dimensions} is more than the {self.size} of the model"
            )
        if params.prompt_name not in (None, *self.prompts):
            known = ", ".join(map(repr, self.prompts)) or "none"
            raise ValueError(
                f"the checkpoint has no prompt named {params.prompt_name!r}; it has {known}. Put "
                "the instruction before the text yourself"
            )
        params.dimensions = params.dimensions or self.dimensions
        params.normalize = self.normalize if params.normalize is None else params.normalize
        return params

    def prefix(self, params: PoolingParams) -> str:
        """Return the text that is prepended to a prompt."""
        return self.prompts.get(params.prompt_name or self.prompt_name or "", "")

    def check_length(self, num_tokens: int) -> None:
        """Raise ValueError for a text of which sentence-transformers would drop the end."""
        if num_tokens > (self.max_seq_length or num_tokens):
            raise ValueError(
                f"the text has {num_tokens} tokens, and sentence_bert_config.json allows "
                f"max_seq_length={self.max_seq_length}; shorten it"
            )


class Embedding(Task):
    """The task of a request for an embedding."""

    result_kind = ResultKind.HIDDEN_STATE

    def __init__(
        self, input_processor: InputProcessor, params: PoolingParams, settings: PoolingSettings
    ) -> None:
        """Check the parameters, and add the settings of the checkpoint."""
        self.input_processor = input_processor
        self.params = settings.complete(params)
        self.settings = settings
        self.prefix = settings.prefix(self.params)

    def prepare(self, prompt: ParsedPrompt) -> ParsedPrompt:
        """Prepend the prompt of the checkpoint to text. Raises ValueError for token ids."""
        text, token_ids = prompt
        if text is not None and token_ids is None:
            text = self.prefix + text
            if self.settings.lower_case:
                text = Lowercase().normalize_str(text)
            if not self.settings.add_eos_token:
                return text, None
            token_ids = self.input_processor.encode(text)
            eos = self.input_processor.get_tokenizer().eos_token_id
            return text, token_ids + [eos] * (eos is not None and token_ids[-1:] != [eos])
        if self.params.prompt_name is not None:
            raise ValueError(
                f"prompt_name={self.params.prompt_name!r} is prepended to text, and the prompt is "
                "token ids; pass text, or leave out prompt_name"
            )
        return prompt

    def max_length(self, num_tokens: int, max_model_len: int) -> int:
        check_length(num_tokens, max_model_len, max_model_len)
        self.settings.check_length(num_tokens)
        return num_tokens

    def receive(self, request: Request, seq: Sequence, result: RowResult) -> None:
        if result.hidden_state:
            hidden = [x * self.settings.factor for x in result.hidden_state]
            request.state = pool(hidden, self.params)
            seq.finish_reason = "stop"

    def output(self, request: Request) -> EmbeddingRequestOutput:
        seq = request.samples[0].seq
        return EmbeddingRequestOutput(
            request.request_id,
            seq.token_ids,
            EmbeddingOutput(request.state or []),
            True,
            seq.num_cached_tokens,
            request.metrics,
        )


def pool(hidden: list[float], params: PoolingParams) -> list[float]:
    """Return the embedding of a hidden state [E]. Raises ArithmeticError if it has NaN."""
    kept = hidden[: params.dimensions]
    length = math.hypot(*kept)
    if not math.isfinite(length):
        raise ArithmeticError("there is no embedding: the model computed NaN or infinity")
    return [x / length for x in kept] if params.normalize and length else kept
