"""Scores of pairs of texts: of a reranker such as Qwen3-Reranker, or cosines of embeddings.

The score of a reranker is the probability of "yes" as the next token, where only "yes" and "no" are
possible. Scores without its prompt are wrong, so this file has it, as the model card writes it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanovllm.features.requests.embeddings.pooling import PoolingParams
from nanovllm.inputs import Prompt, as_list
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import check_scalar

if TYPE_CHECKING:
    from nanovllm.engine.llm_engine import LLMEngine
    from nanovllm.outputs import RequestOutput

PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


@dataclass(frozen=True)
class ScoringOutput:
    score: float


@dataclass(frozen=True)
class ScoringRequestOutput:
    """The score of one pair of texts, with vLLM's fields."""

    request_id: str
    prompt_token_ids: list[int]  # of the pair
    outputs: ScoringOutput
    finished: bool
    num_cached_tokens: int  # prompt tokens whose KV was in the prefix cache


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
        queries, documents = texts(data_1, names[0]), texts(data_2, names[1])
        if len(queries) not in (1, len(documents)):
            raise ValueError(
                f"{names[0]} has {len(queries)} texts and {names[1]} has {len(documents)}; give as "
                f"many of both, or one text as {names[0]}"
            )
        if instruction is not None:
            check_scalar("instruction", instruction, str)
        self.documents, self.num_queries = documents, len(queries)
        self.params: SamplingParams | PoolingParams = PoolingParams()
        self.prompts: list[Prompt] = [*queries, *documents]  # of an embedding model
        sizes = zip(names, (len(queries), len(documents)), strict=True)
        self.names = [f"{name}[{i}]" for name, size in sizes for i in range(size)]
        modules = engine.checkpoint.directory / "modules.json"
        if modules.is_file() and ".Pooling" in modules.read_text(encoding="utf-8"):
            if instruction is not None:
                raise ValueError(
                    f"instruction={instruction!r:.80} is for rerankers, and this is an embedding "
                    f"model; put the instruction before each text of {names[0]}"
                )
            return
        inputs = engine.input_processor
        find = inputs.get_tokenizer().backend_tokenizer.token_to_id
        ids: list[Any] = [find("yes"), find("no")]
        if None in ids:
            raise ValueError(
                "scores need a reranker such as Qwen3-Reranker, whose vocabulary has the tokens "
                "'yes' and 'no', or an embedding model with modules.json; this model is neither"
            )
        # At temperature 1 log-probabilities are the same with every logprobs_mode.
        self.params = SamplingParams(
            temperature=1, max_tokens=1, detokenize=False, logprob_token_ids=ids
        )
        start, end = (inputs.encode(text, add_special_tokens=False) for text in (PREFIX, SUFFIX))
        pairs = [
            f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
            for query, document in zip(itertools.cycle(queries), documents, strict=False)
        ]
        self.prompts = [[*start, *ids, *end] for ids in inputs.encode_all(pairs)]
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


def texts(data: Any, name: str) -> list[str]:
    """Return a string, or a list of strings, as a list."""
    given = data if hasattr(data, "tolist") or isinstance(data, list | tuple) else [data]
    items = [check_scalar(f"a text of {name}", item, str) for item in as_list(given, name)]
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
