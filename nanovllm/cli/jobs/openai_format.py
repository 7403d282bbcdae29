"""OpenAI's format: makes prompts and parameters from a request's body, and a response from outputs.

The endpoints are /v1/chat/completions, /v1/completions and /v1/embeddings. vLLM's additional fields
are known too. A field with the value null counts as left out. An unknown field or unsupported value
is an error: ignoring it would change what the caller asked for.
"""

from __future__ import annotations

import base64
import itertools
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from nanovllm.engine.request import Request
from nanovllm.features.requests.embeddings.pooling import EmbeddingRequestOutput, PoolingParams
from nanovllm.inputs import Prompt, as_list
from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput
from nanovllm.sampling_params import SamplingParams, StructuredOutputsParams
from nanovllm.utils.checks import check_scalar, unknown_name
from nanovllm.utils.errors import why_no_token

if TYPE_CHECKING:
    from nanovllm.llm import LLM

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
Fields = dict[str, Any]

# Fields of SamplingParams that a body does not have, or has with another type or default.
OTHER = {"max_tokens", "logprobs", "structured_outputs"}
SAMPLING = {f.name for f in fields(SamplingParams)} - OTHER - {"detokenize", "logits_processors"}
BOTH = SAMPLING | OTHER | {"response_format"}
TEMPLATE = {"add_generation_prompt", "continue_final_message", "chat_template"}
CHAT_ONLY = {"messages", "max_completion_tokens", "top_logprobs", "chat_template_kwargs"}
KNOWN = {
    CHAT: BOTH | TEMPLATE | CHAT_ONLY,
    COMPLETIONS: BOTH | {"prompt"},
    EMBEDDINGS: {f.name for f in fields(PoolingParams)} | {"input", "encoding_format"},
}
# Fields with a value that changes nothing. Another value is an error.
UNUSED = {"best_of": 1, "echo": False, "stream": False, "suffix": "", "tools": []}
NO_EFFECT = {"metadata", "parallel_tool_calls", "service_tier", "store", "tool_choice", "user"}


class UnknownModel(ValueError):
    """Raised if a body asks for a model that is not loaded."""


@dataclass(frozen=True)
class Job:
    """The prompts of a body, and the parameters for all of them."""

    url: str
    model: str
    prompts: list[Prompt]
    params: SamplingParams | PoolingParams
    num_top: int = 0  # log-probabilities of this many tokens are reported at each position
    encoding: str = "float"  # of embeddings: "float" or "base64"

    def submit(self, llm: LLM) -> list[Request]:
        """Queue all prompts. If one raises ValueError or TypeError, none is queued."""
        requests: list[Request] = []
        try:
            for prompt in self.prompts:
                requests.append(llm.engine.submit(prompt, self.params))
        except BaseException:
            llm.engine.abort(requests)
            raise
        return requests

    def response(self, name: str, requests: Iterable[Request]) -> Fields:
        """Return the body of the response to `requests`, which have ended.

        Raises the error of a request that has no result.
        """
        outputs = [checked_output(request) for request in requests]
        num_prompt = sum(len(out.prompt_token_ids) for out in outputs)
        body: Fields = {"id": name, "created": int(time.time()), "model": self.model}
        if self.url == EMBEDDINGS:
            data = [
                {"object": "embedding", "index": i, "embedding": self._encode(out)}
                for i, out in enumerate(outputs)
            ]
            return body | {"object": "list", "data": data, "usage": token_counts(num_prompt, 0)}
        chat = self.url == CHAT
        samples = [sample for out in outputs for sample in out.outputs]
        choices = [choice(sample, i, chat, self.num_top) for i, sample in enumerate(samples)]
        body["object"] = "chat.completion" if chat else "text_completion"
        body["choices"] = choices
        body["usage"] = token_counts(num_prompt, sum(len(s.token_ids) for s in samples))
        if outputs[0].prompt_logprobs is not None:
            # As in vLLM, the first sample of each prompt has them.
            owners = [body] if chat else choices[:: len(outputs[0].outputs)]
            for owner, out in zip(owners, outputs, strict=True):
                owner["prompt_logprobs"] = prompt_logprobs(out)
        return body

    def _encode(self, out: EmbeddingRequestOutput) -> list[float] | str:
        """Return an embedding as numbers, or as the base64 of little-endian float32 numbers."""
        embedding = out.outputs.embedding
        if self.encoding == "float":
            return embedding
        return base64.b64encode(np.asarray(embedding, "<f4").tobytes()).decode()


def parse(llm: LLM, url: Any, body: Any, model: str, trust_chat_templates: bool = False) -> Job:
    """Return the job of a body.

    model: the name under which the model of `llm` is known.
    trust_chat_templates: whether the body may have a chat template, which is a program.

    Raises UnknownModel, ValueError or TypeError, and ImportError for a missing package.
    """
    if not isinstance(url, str) or url not in KNOWN:
        raise ValueError(f"url must be one of {', '.join(KNOWN)}, not {url!r:.80}")
    check_scalar("body", body, dict)
    given = {name: value for name, value in body.items() if value is not None}
    if (name := given.pop("model", model)) != model:
        raise UnknownModel(f"the model {name!r:.80} does not exist; the name is {model!r}")
    for name in sorted(given.keys() - KNOWN[url]):
        value = given.pop(name)
        if name in UNUSED and value != UNUSED[name]:
            raise ValueError(f"{name}={value!r:.80} is not supported; leave it out")
        if name not in UNUSED and name not in NO_EFFECT:
            raise ValueError(unknown_name(f"field of {url}", name, sorted(KNOWN[url])))
    if url != CHAT:
        name = "prompt" if url == COMPLETIONS else "input"
        prompts = as_list(given.pop(name, None), name)
        if not prompts:
            raise ValueError(f"{name} must have at least one prompt")
    if url == EMBEDDINGS:
        encoding = given.pop("encoding_format", "float")
        check_scalar("encoding_format", encoding, str, ("float", "base64"))
        return Job(url, model, prompts, PoolingParams(**given), encoding=encoding)
    if url == CHAT:
        more = given.get("chat_template_kwargs", {})
        check_scalar("chat_template_kwargs", more, dict)
        template = given.get("chat_template", more.get("chat_template"))
        if template is not None and not trust_chat_templates:
            raise ValueError(
                "chat_template is a program, which may never end; leave it out, or start run-batch "
                "with --trust-chat-templates"
            )
        prompts = [chat_prompt(llm, given)]
    params = sampling_params(given, llm.get_default_sampling_params(), url == CHAT)
    return Job(url, model, prompts, params, params.logprobs or 0)


def chat_prompt(llm: LLM, given: Fields) -> Prompt:
    messages = given.pop("messages", None)
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"messages must be a list of at least one message, not {messages!r:.80}")
    more = given.pop("chat_template_kwargs", None)
    variables: Fields = {"add_generation_prompt": True, "chat_template": None}
    variables |= {name: given.pop(name) for name in TEMPLATE & given.keys()}
    return llm.engine.input_processor.chat_prompt(messages, variables, more)


def sampling_params(given: Fields, defaults: SamplingParams, chat: bool) -> SamplingParams:
    """Return the parameters of a body. A missing field has the value of generation_config.json.

    As in vLLM, max_tokens is an exception: by default a completion has at most 16 tokens, and a
    chat has as many as max_model_len leaves.
    """
    fields = {name: value for name, value in given.items() if name in SAMPLING}
    max_tokens = given.get("max_tokens", None if chat else 16)
    fields["max_tokens"] = given.get("max_completion_tokens", max_tokens)
    fields["logprobs"] = given.get("logprobs")
    if chat:
        top, with_logprobs = given.get("top_logprobs", 0), given.get("logprobs", False)
        check_scalar("logprobs", with_logprobs, bool)
        check_scalar("top_logprobs", top, int, (-1, math.inf))
        if top and not with_logprobs:
            raise ValueError(f"top_logprobs={top!r} needs logprobs=true")
        fields["logprobs"] = top if with_logprobs else None
    fields["structured_outputs"] = structured_outputs(given)
    return replace(defaults, **fields)


def structured_outputs(given: Fields) -> StructuredOutputsParams | None:
    """Return the grammar that `structured_outputs` and `response_format` ask for."""
    fields = given.get("structured_outputs", {})
    form = given.get("response_format", {"type": "text"})
    check_scalar("structured_outputs", fields, dict)
    check_scalar("response_format", form, dict)
    kind, schema = form.get("type"), form.get("json_schema")
    check_scalar("the type of response_format", kind, str, ("text", "json_object", "json_schema"))
    if kind == "json_object":
        fields = fields | {"json_object": True}
    if kind == "json_schema":
        if not isinstance(schema, dict) or not isinstance(schema.get("schema"), dict):
            raise ValueError("response_format of type 'json_schema' needs json_schema.schema")
        fields = fields | {"json": schema["schema"]}
    return StructuredOutputsParams(**fields) if fields else None


# ---- responses ----


def checked_output(request: Request) -> Any:
    """Return the output of a request that has ended. Raises an error if it has no result."""
    if request.error is not None:
        raise request.error
    reasons = {sample.seq.finish_reason for sample in request.samples}
    if "error" in reasons:
        raise RuntimeError(f"no token could be sampled: {why_no_token(request.params)}")
    if "abort" in reasons:
        raise RuntimeError("the request was aborted")
    return request.output


def token_counts(prompt: int, new: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def choice(sample: CompletionOutput, index: int, chat: bool, num_top: int) -> Fields:
    shown: Fields = {"index": index}
    if chat:
        shown["message"] = {"role": "assistant", "content": sample.text, "refusal": None}
        shown["logprobs"] = chat_logprobs(sample, num_top)
    else:
        shown["text"], shown["logprobs"] = sample.text, completion_logprobs(sample)
    return shown | {"finish_reason": sample.finish_reason, "stop_reason": sample.stop_reason}


def chat_logprobs(sample: CompletionOutput, num_top: int) -> Fields | None:
    if sample.logprobs is None:
        return None

    def shown(item: tuple[int, Logprob]) -> Fields:
        text = token_text(*item)
        return {"token": text, "logprob": finite(item[1]), "bytes": list(text.encode())}

    content = []
    for entry in sample.logprobs:  # the sampled token is the first
        best = sorted(entry.items(), key=lambda item: item[1].rank)
        top = [shown(item) for item in best if num_top == -1 or item[1].rank <= num_top]
        content.append(shown(next(iter(entry.items()))) | {"top_logprobs": top})
    return {"content": content}


def completion_logprobs(sample: CompletionOutput) -> Fields | None:
    if sample.logprobs is None:
        return None
    top = [{token_text(*t): finite(t[1]) for t in entry.items()} for entry in sample.logprobs]
    texts = [token_text(*next(iter(entry.items()))) for entry in sample.logprobs]
    return {
        "text_offset": [0, *itertools.accumulate(map(len, texts))][: len(texts)],
        "token_logprobs": [finite(next(iter(entry.values()))) for entry in sample.logprobs],
        "tokens": texts,
        "top_logprobs": top,
    }


def prompt_logprobs(out: RequestOutput) -> list[Fields | None]:
    return [
        None
        if entry is None
        else {str(t): vars(e) | {"logprob": finite(e)} for t, e in entry.items()}
        for entry in out.prompt_logprobs or ()
    ]


def token_text(token: int, entry: Logprob) -> str:
    return f"token_id:{token}" if entry.decoded_token is None else entry.decoded_token


def finite(entry: Logprob) -> float:
    """Return a number that JSON has: -9999.0 for an impossible token, as OpenAI and vLLM do."""
    return entry.logprob if entry.logprob > -9999.0 else -9999.0


def error_body(error: Exception) -> Fields:
    """Return vLLM's description of an error, with the HTTP status as its code."""
    kind, code = "InternalServerError", 500
    if isinstance(error, UnknownModel):
        kind, code = "NotFoundError", 404
    elif isinstance(error, (TypeError, ValueError, ImportError)):
        kind, code = "BadRequestError", 400
    return {"error": {"message": str(error), "type": kind, "param": None, "code": code}}
