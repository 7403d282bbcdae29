"""Embeddings: the settings of a checkpoint, and the task.

An embedding is the hidden state of the prompt's last token after the final norm. No token is
sampled.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers.normalizers import Lowercase

from nanovllm.engine.input_processor import InputProcessor
from nanovllm.engine.request import Request, Task, check_length
from nanovllm.engine.sequence import Sequence
from nanovllm.features.tasks.results import EmbeddingOutput, EmbeddingRequestOutput
from nanovllm.inputs import ParsedPrompt
from nanovllm.plan import ResultKind, RowResult
from nanovllm.sampling_params import PoolingParams
from nanovllm.utils.json_files import Fields, check_field, check_fields, named, read_json, unusual

OLD = "pooling_mode_"
FIELDS: Fields = {
    "prompts": (dict, ()),
    "default_prompt_name": (str, ()),
    "truncate_dim": (int, (1, math.inf)),
}
# Fields of sentence_bert_config.json, which says how a text is read, and those without effect.
TEXT_FIELDS: Fields = {"max_seq_length": (int, (1, math.inf)), "do_lower_case": (bool, ())}
UNUSED = ("transformer_task", "module_output_name", "unpad_inputs")


@dataclass(frozen=True)
class PoolingSettings:
    """The settings of embeddings of a checkpoint."""

    size: int = 0  # numbers in a hidden state
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


def read_pooling_settings(directory: Path, size: int) -> PoolingSettings:
    """Return the settings of the checkpoint in `directory`. `size` is its hidden size.

    Without modules.json the defaults of PoolingSettings apply. Raises ValueError for a broken file.
    """
    path = directory / "config_sentence_transformers.json"
    raw = check_fields(read_json(path), path, FIELDS) if path.is_file() else {}
    prompts = raw.get("prompts", {})
    name = raw.get("default_prompt_name")
    for text in prompts.values():
        check_field(path, "a prompt", text, str, ())
    if name not in (None, *prompts):
        raise ValueError(f"{path}: default_prompt_name {name!r} is none of the prompts")
    modules = read_modules(directory)
    path = modules.get("Transformer", directory) / "sentence_bert_config.json"
    fields = check_fields(read_json(path), path, TEXT_FIELDS) if os.path.isfile(path) else {}
    if "message" not in fields.get("modality_config", {}):  # a text is no message of a chat
        fields.pop("modality_config", None)
    return PoolingSettings(
        size=size,
        dimensions=raw.get("truncate_dim"),
        normalize="Normalize" in modules or not modules,
        prompts=prompts,
        prompt_name=name,
        max_seq_length=fields.get("max_seq_length"),
        lower_case=fields.get("do_lower_case", False),
        others=unusual(fields, (*TEXT_FIELDS, *UNUSED)),
    )


def read_modules(directory: Path) -> dict[str, Path]:
    """Return the modules of a checkpoint: class -> directory. Empty without modules.json.

    Raises ValueError for a broken file.
    """
    path = directory / "modules.json"
    modules = {}
    for module in read_json(path, list) if path.is_file() else []:
        if not isinstance(module, dict) or not isinstance(module.get("type"), str):
            raise ValueError(f"{path}: the module {module!r:.80} has no 'type'")
        modules[module["type"].rpartition(".")[2]] = directory / str(module.get("path", ""))
    return modules


def check_embeddings(directory: Path, settings: PoolingSettings) -> None:
    """Raise ValueError if the checkpoint has modules or settings that are not supported."""
    modules = read_modules(directory)
    if not modules:
        return
    instead = "Use sentence-transformers for this checkpoint"
    if not {"Transformer", "Pooling"} <= modules.keys() <= {"Transformer", "Pooling", "Normalize"}:
        raise ValueError(
            f"no embeddings: {directory} has the modules {', '.join(modules)}; supported are "
            f"Transformer, Pooling and Normalize. {instead}"
        )
    path = modules["Pooling"] / "config.json"
    config = read_json(path) if os.path.isfile(path) else {}  # a name may be too long for Path
    # The older format has a bool for each mode.
    old = [name.removeprefix(OLD) for name, on in config.items() if name.startswith(OLD) and on]
    modes = config.get("pooling_mode", old or "mean")
    if modes not in ("lasttoken", ["lasttoken"]):
        raise ValueError(
            f"no embeddings: {path} has the pooling mode {modes!r}; only 'lasttoken' is supported. "
            f"{instead}"
        )
    if settings.others:
        raise ValueError(
            f"no embeddings: {named(settings.others)} of {directory} is not supported. {instead}"
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
