"""Scores of pairs of texts: of a reranker such as Qwen3-Reranker, or cosines of embeddings.

The score of a reranker is the probability of "yes" as the next token, where only "yes" and "no" are
possible. Scores with the tokens or the prompt of another model are wrong. A checkpoint of
sentence-transformers names both tokens, and has the prompt in its chat template. The prompts of
Qwen3-Reranker and Qwen3-VL-Reranker are in this file, as their authors write them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nanovllm.features.tasks.embeddings import (
    read_modules,
    read_pooling_settings,
)
from nanovllm.features.tasks.results import ScoringOutput, ScoringRequestOutput
from nanovllm.inputs import Prompt, as_list
from nanovllm.sampling_params import PoolingParams, SamplingParams
from nanovllm.utils.checks import check_scalar
from nanovllm.utils.json_files import named, read_json, unusual

if TYPE_CHECKING:
    from nanovllm.engine.llm_engine import LLMEngine
    from nanovllm.outputs import RequestOutput

PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
TEXT = "<Instruct>: {}\n<Query>: {}\n<Document>: {}"
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# The same for Qwen3-VL-Reranker.
VL_TEXT = "<Instruct>: {}<Query>:{}\n<Document>:{}"
VL_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n"
VL_INSTRUCTION = "Given a search query, retrieve relevant candidates that answer the query."


class Scorer:
    """The prompts that score pairs of texts, and their parameters.

    names: of the two arguments, for messages.

    Raises TypeError or ValueError for wrong texts, and for a model that has no scores.
    """

    def __init__(
        self,
        engine: LLMEngine,
        data_1: Any,
        data_2: Any,
        instruction: str | None = None,
        names: Sequence[str] = ("data_1", "data_2"),
    ) -> None:
        if instruction is not None:
            check_scalar("instruction", instruction, str)
        queries, documents = as_texts(data_1, names[0]), as_texts(data_2, names[1])
        if len(queries) not in (1, len(documents)):
            raise ValueError(
                f"{names[0]} has {len(queries)} texts and {names[1]} has {len(documents)}; give as "
                f"many of both, or one text as {names[0]}"
            )
        self.documents = documents
        self.num_queries = len(queries)
        self.params: SamplingParams | PoolingParams = PoolingParams()
        self.prompts: list[Prompt] = [*queries, *documents]  # of an embedding model
        sizes = zip(names, (len(queries), len(documents)), strict=True)
        self.names = [f"{name}[{i}]" for name, size in sizes for i in range(size)]
        modules = read_modules(engine.checkpoint.directory)
        if "Pooling" in modules:
            if instruction is not None:
                raise ValueError(
                    f"instruction={instruction!r:.80} is for rerankers, and this is an embedding "
                    f"model; put the instruction before each text of {names[0]}"
                )
            return
        pairs = list(zip(itertools.cycle(queries), documents, strict=False))
        make_prompts = sentence_transformers_prompts if modules else qwen3_prompts
        ids, self.prompts = make_prompts(engine, pairs, instruction)
        # At temperature 1 log-probabilities are the same with every logprobs_mode.
        self.params = SamplingParams(
            temperature=1, max_tokens=1, detokenize=False, logprob_token_ids=ids
        )
        self.names = self.names[len(queries) :]

    def outputs(self, outputs: list[Any]) -> list[ScoringRequestOutput]:
        """Return the score of each pair from the outputs of `prompts`.

        Raises ArithmeticError if the model computed NaN.
        """
        parts = [[output] for output in outputs]
        if isinstance(self.params, SamplingParams):
            scores = [probability(output, self.params) for (output,) in parts]
        else:
            queries = itertools.cycle(parts[: self.num_queries])
            pairs = zip(queries, parts[self.num_queries :], strict=False)
            parts = [[*query, *document] for query, document in pairs]
            scores = [cosine(*(output.outputs.embedding for output in part)) for part in parts]
        return [
            ScoringRequestOutput(
                request_id="_".join(output.request_id for output in part),
                prompt_token_ids=[token for output in part for token in output.prompt_token_ids],
                outputs=ScoringOutput(score),
                finished=True,
                num_cached_tokens=sum(output.num_cached_tokens for output in part),
            )
            for part, score in zip(parts, scores, strict=True)
        ]


def qwen3_prompts(
    engine: LLMEngine, pairs: list[tuple[str, str]], instruction: str | None
) -> tuple[list[int], list[Prompt]]:
    """Return the ids of "yes" and "no", and the prompts of Qwen3-(VL-)Reranker for pairs of texts.

    Raises ValueError for a model that nothing names as such a reranker.
    """
    inputs = engine.input_processor
    checkpoint = engine.checkpoint
    text, suffix, default = TEXT, SUFFIX, INSTRUCTION
    if is_vl := checkpoint.model_config.architecture.startswith("Qwen3VL"):
        text, suffix, default = VL_TEXT, VL_SUFFIX, VL_INSTRUCTION
    find = inputs.get_tokenizer().backend_tokenizer.token_to_id
    ids: list[Any] = [find("yes"), find("no")]
    is_named = checkpoint.config.get("is_original_qwen3_reranker") or (
        any("rerank" in name for name in checkpoint.names)
        and (is_vl or checkpoint.model_config.architecture == "Qwen3ForCausalLM")
    )
    tokens = checkpoint.config.get("classifier_from_token") or (["no", "yes"] if is_named else None)
    if tokens != ["no", "yes"] or None in ids:
        raise ValueError(
            "scores need an embedding model or a reranker: a checkpoint whose modules.json has "
            "Pooling or LogitScore, a Qwen3 or Qwen3-VL model with 'rerank' in its name, or "
            "hf_overrides={'is_original_qwen3_reranker': True, "
            "'classifier_from_token': ['no', 'yes']}; "
            f"nothing says so of this model (classifier_from_token={tokens!r:.80})"
        )
    start, end = (inputs.encode(x, add_special_tokens=False) for x in (PREFIX, suffix))
    parts = [text.format(instruction or default, *pair) for pair in pairs]
    return ids, [[*start, *part, *end] for part in inputs.encode_all(parts)]


def sentence_transformers_prompts(
    engine: LLMEngine, pairs: list[tuple[str, str]], instruction: str | None
) -> tuple[list[int], list[Prompt]]:
    """Return the ids of two tokens, and the prompts that the chat template renders for pairs.

    As with CrossEncoder of sentence-transformers, a query and a document are messages with these
    roles, and the instruction is the system message. Raises ValueError for other modules or
    settings, and for a template that leaves out a text.
    """
    inputs = engine.input_processor
    tokenizer = inputs.get_tokenizer()
    directory = engine.checkpoint.directory
    modules = read_modules(directory)
    settings = read_pooling_settings(directory, 0)
    path = modules.get("LogitScore", directory) / "config.json"
    head = read_json(path) if modules.keys() == {"Transformer", "LogitScore"} else {}
    ids = [head.pop("true_token_id", None), head.pop("false_token_id", None)]
    options = dict(settings.others.get("processing_kwargs", {}))
    variables = options.pop("chat_template", {})
    default = settings.prefix(PoolingParams())
    wrong = unusual(settings.others, ("modality_config", "processing_kwargs")) | options
    wrong |= unusual(head | {"do_lower_case": settings.lower_case}, ("module_input_name",))
    if wrong or not all(type(token) is int for token in ids):
        wrong = {"modules": [*modules], "true_token_id": ids[0], "false_token_id": ids[1]} | wrong
        raise ValueError(
            f"no scores: {directory} has {named(wrong)}; supported are Transformer and LogitScore "
            "with two tokens. Use sentence-transformers"
        )

    def render(query: str, document: str, task: str | None, as_parts: bool) -> str:
        contents = {"system": task or default, "query": query, "document": document}
        messages: list[Any] = [
            {"role": role, "content": [{"type": "text", "text": text}] if as_parts else text}
            for role, text in contents.items()
            if text or role != "system"
        ]
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **variables))

    def renders_all(as_parts: bool) -> bool:
        probes = ("a query", "a document", "a task" if instruction else "")
        try:
            rendered = render(*probes, as_parts)
        except Exception:  # a template can raise any error
            return False
        return all(text in rendered for text in probes)

    # A template takes texts, or lists of parts.
    as_parts = next(filter(renders_all, (False, True)), None)
    if as_parts is None:
        raise ValueError(
            f"no scores: the chat template of {directory} does not render the roles query, "
            "document and system"
        )
    texts = [render(*pair, instruction, as_parts) for pair in pairs]
    encoded = [inputs.encode(text, add_special_tokens=False) for text in texts]
    for token_ids in encoded:
        settings.check_length(len(token_ids))
    return ids, [*encoded]


def as_texts(data: Any, name: str) -> list[str]:
    """Return a string, or a list of strings, as a list."""
    items = [check_scalar(f"a text of {name}", item, str) for item in as_list(data, name)]
    if not items:
        raise ValueError(f"{name} is empty; give at least one text")
    return items


def probability(output: RequestOutput, params: SamplingParams) -> float:
    """Return the probability of the first of two named tokens after a prompt."""
    if output.outputs[0].finish_reason == "error" or not output.outputs[0].logprobs:
        raise ArithmeticError("there is no score: the model computed NaN")
    entry = output.outputs[0].logprobs[0]
    yes, no = (entry[token].logprob for token in params.logprob_token_ids or ())
    odds = math.exp(-abs(yes - no))  # of the less likely one
    return (1 if yes > no else odds) / (1 + odds)


def cosine(a: list[float], b: list[float]) -> float:
    lengths = math.hypot(*a) * math.hypot(*b)
    return sum(x * y for x, y in zip(a, b, strict=True)) / lengths if lengths else 0.0
