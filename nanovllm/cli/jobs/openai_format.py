"""OpenAI's format: makes prompts and parameters from a request's body, and a response from outputs.

The endpoints are /v1/chat/completions, /v1/completions, /v1/embeddings, /v1/score and /v1/rerank.
vLLM's additional fields are accepted too. A field with the value null is treated as missing. An
unknown field or unsupported value is an error: ignoring it would change what the caller asked for.
"""

from __future__ import annotations

import math
import time
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from nanovllm.cli.jobs.openai_responses import (
    Fields,
    checked_output,
    choice,
    finite,
    token_counts,
)
from nanovllm.engine.chat_template import as_conversations
from nanovllm.engine.progress import Progress
from nanovllm.engine.request import Request
from nanovllm.features.sampling.tool_calls import ToolUse
from nanovllm.features.tasks.rerank import Scorer
from nanovllm.inputs import Prompt, as_list
from nanovllm.sampling_params import PoolingParams, SamplingParams, StructuredOutputsParams
from nanovllm.utils.checks import check_scalar, unknown_name

if TYPE_CHECKING:
    from nanovllm.llm import LLM

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
SCORE, RERANK = "/v1/score", "/v1/rerank"
# The names that the two lists of texts of a score can have.
PAIRS = ("data_1", "data_2"), ("queries", "documents"), ("text_1", "text_2")
TEMPLATE = ("add_generation_prompt", "continue_final_message", "chat_template")
CHAT_FIELDS = {"messages", "max_completion_tokens", "top_logprobs", "chat_template_kwargs"}
CHAT_FIELDS |= {*TEMPLATE, "tools", "tool_choice", "parallel_tool_calls"}
SAMPLING = {"response_format", *SamplingParams.__dataclass_fields__}
# A response always has text, and JSON cannot contain functions.
SAMPLING -= {"detokenize", "logits_processors"}
FIELDS = {
    CHAT: SAMPLING | CHAT_FIELDS,
    COMPLETIONS: SAMPLING | {"prompt"},
    EMBEDDINGS: {"input", "encoding_format", *PoolingParams.__dataclass_fields__},
    RERANK: {"query", "documents", "top_n", "instruction"},
}
# Fields that have no effect. Where a value is named, another value is an error.
UNUSED = {"best_of": 1, "echo": False, "stream": False, "suffix": ""} | dict.fromkeys(
    ("metadata", "service_tier", "store", "user")
)


@dataclass(frozen=True)
class Job:
    """The prompts of a body, and the parameters for all of them."""

    url: str
    model: str
    prompts: list[Prompt]
    params: SamplingParams | PoolingParams
    encoding: str = "float"  # of embeddings: "float" or "base64"
    tool_use: ToolUse | None = None  # of chats
    scorer: Scorer | None = None  # of scores
    top_n: int = 0  # the number of documents that a rerank returns, the best first; 0: all

    def submit(self, llm: LLM) -> list[Request]:
        """Queue all prompts. If one raises ValueError or TypeError, none is queued."""
        pairs = [(prompt, self.params) for prompt in self.prompts]
        names = [] if self.scorer is None else self.scorer.names
        requests = llm.engine.input_processor.check(pairs, Progress(), names=names)
        task: Any = requests[0].task  # all requests have the same one
        if self.url == COMPLETIONS:
            task.separates = False  # as in vLLM, the text includes the thinking
        if self.tool_use is not None:
            task.has_tools = self.tool_use.choice != "none"
        llm.engine.add(requests)
        return requests

    def response(self, name: str, requests: Sequence[Request]) -> Fields:
        """Return the response to `requests`, which have ended. Raises an error of them."""
        outputs = [checked_output(request) for request in requests]
        is_text = self.url in (CHAT, COMPLETIONS)
        samples = [sample for out in outputs for sample in out.outputs] if is_text else []
        num_prompt = sum(len(out.prompt_token_ids) for out in outputs)
        usage = token_counts(num_prompt, sum(len(s.token_ids) for s in samples))
        body = Fields(id=name, created=int(time.time()), model=self.model, usage=usage)
        if self.scorer is not None:
            scores = [output.outputs.score for output in self.scorer.outputs(outputs)]
            if self.url == SCORE:
                data = [Fields(object="score", index=i, score=x) for i, x in enumerate(scores)]
                return body | {"object": "list", "data": data}
            best = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
            documents = [{"text": text} for text in self.scorer.documents]
            ranked = [
                Fields(index=i, document=documents[i], relevance_score=scores[i]) for i in best
            ]
            return body | {"results": ranked[: self.top_n or None]}
        if isinstance(self.params, PoolingParams):
            vectors: list[Any] = [out.outputs.embedding for out in outputs]
            if self.encoding == "base64":  # the bytes of little-endian float32 numbers
                vectors = [b64encode(np.asarray(v, "<f4").tobytes()).decode() for v in vectors]
            data = [Fields(object="embedding", index=i, embedding=v) for i, v in enumerate(vectors)]
            return body | {"object": "list", "data": data}
        num_top = -1 if self.params.logprob_token_ids else self.params.logprobs or 0
        body["object"] = "chat.completion" if self.tool_use else "text_completion"
        task: Any = requests[0].task
        tool_use = self.tool_use and replace(self.tool_use, removed=[*task.markers().values()])
        body["choices"] = [choice(s, i, tool_use, num_top) for i, s in enumerate(samples)]
        if outputs[0].prompt_logprobs is not None:
            # As in vLLM, the first sample of each prompt has them.
            owners = [body] if self.tool_use else body["choices"][:: len(outputs[0].outputs)]
            for owner, out in zip(owners, outputs, strict=True):
                owner["prompt_logprobs"] = [
                    entry and {str(t): vars(e) | {"logprob": finite(e)} for t, e in entry.items()}
                    for entry in out.prompt_logprobs
                ]
        return body


def parse(llm: LLM, url: Any, body: Any, model: str, trust_chat_templates: bool = False) -> Job:
    """Return the job of a body.

    model: the name under which the model of `llm` is known.
    trust_chat_templates: whether the body may have a chat template, which is a program.

    Raises ValueError or TypeError, and ImportError for a missing package.
    """
    check_scalar("url", url, str, (*FIELDS, SCORE))
    check_scalar("body", body, dict)
    given = {name: value for name, value in body.items() if value is not None}
    if (name := given.pop("model", model)) != model:
        raise ValueError(f"the model {name!r:.80} does not exist; the name is {model!r}")
    for name, only in UNUSED.items():
        if (value := given.pop(name, only)) != only and only is not None:
            raise ValueError(f"{name}={value!r:.80} is not supported; leave it out")
    pairs = [("query", "documents")] if url == RERANK else PAIRS
    pair = next((pair for pair in pairs if pair[0] in given), pairs[0])
    fields = FIELDS.get(url, {*pair, "instruction"})
    for name in given.keys() - fields:
        raise TypeError(unknown_name(f"field of {url}", name, sorted({*fields, "model"})))
    if url in (SCORE, RERANK):
        if url == RERANK:
            check_scalar("query", given.get("query"), str)
        top_n = check_scalar("top_n", given.get("top_n", 0), int, (0, math.inf))
        first, second = map(given.get, pair)
        scorer = Scorer(llm.engine, first, second, given.get("instruction"), pair)
        return Job(url, model, scorer.prompts, scorer.params, scorer=scorer, top_n=top_n)
    if url == CHAT:
        more = given.get("chat_template_kwargs", {})
        check_scalar("chat_template_kwargs", more, dict)
        template = given.get("chat_template", more.get("chat_template"))
        if template is not None and not trust_chat_templates:
            raise ValueError(
                "chat_template is a program; leave it out, or use --trust-chat-templates"
            )
        tools = given.pop("tools", [])
        parallel = given.pop("parallel_tool_calls", True)
        tool_use = ToolUse(tools, given.pop("tool_choice", "auto" if tools else "none"), parallel)
        prompts = [chat_prompt(llm, given, tools)]
    else:
        tool_use = None
        name = "prompt" if url == COMPLETIONS else "input"
        prompts = as_list(given.pop(name, None), name)
        if not prompts:
            raise ValueError(f"{name} must have at least one prompt")
    if url == EMBEDDINGS:
        encoding = given.pop("encoding_format", "float")
        check_scalar("encoding_format", encoding, str, ("float", "base64"))
        return Job(url, model, prompts, PoolingParams(**given), encoding)
    params = sampling_params(given, llm.get_default_sampling_params(), url == CHAT)
    if tool_use is not None and tool_use.is_forced:
        if params.structured_outputs is not None:
            raise ValueError("tool_choice forces a call by a grammar; leave out other grammars")
        params.structured_outputs = tool_use.grammar()
    return Job(url, model, prompts, params, tool_use=tool_use)


def chat_prompt(llm: LLM, given: Fields, tools: list[Fields] | None = None) -> Prompt:
    """Return the prompt of a chat, and remove the fields that describe it from `given`."""
    [messages] = as_conversations(given.pop("messages", None))
    variables: Fields = dict(add_generation_prompt=True, chat_template=None, tools=tools or None)
    variables |= {name: given.pop(name) for name in TEMPLATE if name in given}
    more = given.pop("chat_template_kwargs", None)
    return llm.engine.input_processor.chat_prompt(messages, variables, more)


def sampling_params(given: Fields, defaults: SamplingParams, chat: bool) -> SamplingParams:
    """Return the parameters of a body. A missing field has the value of generation_config.json.

    As in vLLM, max_tokens is an exception: by default a completion has at most 16 tokens, and a
    chat has as many as max_model_len leaves.
    """
    given = Fields(max_tokens=None if chat else 16, logprobs=None) | given
    if chat:
        given["max_tokens"] = given.pop("max_completion_tokens", given["max_tokens"])
        top = given.pop("top_logprobs", 0)
        with_logprobs = given["logprobs"] or False
        check_scalar("logprobs", with_logprobs, bool)
        check_scalar("top_logprobs", top, int, (-1, math.inf))
        if top and not with_logprobs:
            raise ValueError(f"top_logprobs={top!r} needs logprobs=true")
        given["logprobs"] = top if with_logprobs else None
    form = given.pop("response_format", {})
    given["structured_outputs"] = structured_outputs(given.get("structured_outputs", {}), form)
    return replace(defaults, **given)


def structured_outputs(fields: Fields, form: Fields) -> StructuredOutputsParams | None:
    """Return the grammar that `structured_outputs` and `response_format` of a body ask for."""
    check_scalar("structured_outputs", fields, dict)
    check_scalar("response_format", form, dict)
    kind = form.get("type", "text")
    schema = form.get("json_schema")
    check_scalar("the type of response_format", kind, str, ("text", "json_object", "json_schema"))
    if kind == "json_object":
        fields = fields | {"json_object": True}
    if kind == "json_schema":
        if not isinstance(schema, dict) or not isinstance(schema.get("schema"), dict):
            raise ValueError("response_format of type 'json_schema' needs json_schema.schema")
        fields = fields | {"json": schema["schema"]}
    return StructuredOutputsParams(**fields) if fields else None
