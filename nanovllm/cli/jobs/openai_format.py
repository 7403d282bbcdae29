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
from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput, why_no_token
from nanovllm.sampling_params import SamplingParams, StructuredOutputsParams
from nanovllm.utils.checks import check_scalar, unknown_name

if TYPE_CHECKING:
    from nanovllm.llm import LLM

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
Fields = dict[str, Any]

# Fields of a body that have the same name and meaning in SamplingParams.
SAME = (
    "n temperature top_p top_k min_p seed stop stop_token_ids min_tokens ignore_eos bad_words "
    "presence_penalty frequency_penalty repetition_penalty include_stop_str_in_output "
    "allowed_token_ids prompt_logprobs skip_special_tokens"
)
SAMPLING = set(SAME.split())
GENERATION = {"max_tokens", "logprobs", "logit_bias", "response_format", "structured_outputs"}
TEMPLATE = {"add_generation_prompt", "continue_final_message"}
CHAT_ONLY = {"messages", "max_completion_tokens", "top_logprobs", "chat_template"}
KNOWN = {
    CHAT: SAMPLING | GENERATION | TEMPLATE | CHAT_ONLY | {"chat_template_kwargs"},
    COMPLETIONS: SAMPLING | GENERATION | {"prompt"},
    EMBEDDINGS: {f.name for f in fields(PoolingParams)} | {"input", "encoding_format"},
}
# Fields without an effect: name -> the accepted values; empty: any value.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "stream": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "use_beam_search": (False,),
} | dict.fromkeys(("metadata", "parallel_tool_calls", "service_tier", "store", "user"), ())


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
        outputs = []
        for request in requests:
            check_end(request)
            outputs.append(request.output)
        body = {"id": name, "created": int(time.time()), "model": self.model}
        if self.url == EMBEDDINGS:
            return body | {"object": "list"} | embeddings(outputs, self.encoding)
        chat = self.url == CHAT
        samples = itertools.chain.from_iterable(out.outputs for out in outputs)
        choices = [choice(sample, i, chat, self.num_top) for i, sample in enumerate(samples)]
        body["object"] = "chat.completion" if chat else "text_completion"
        body["choices"], body["usage"] = choices, usage(outputs)
        if outputs[0].prompt_logprobs is not None:
            # As in vLLM, the first sample of each prompt has them.
            owners = [body] if chat else choices[:: len(outputs[0].outputs)]
            for owner, out in zip(owners, outputs, strict=True):
                owner["prompt_logprobs"] = prompt_logprobs(out)
        return body


def parse(llm: LLM, url: Any, body: Any, model: str, templates: bool = False) -> Job:
    """Return the job of a body.

    model: the name under which the model of `llm` is known.
    templates: whether the body may contain a chat template. A template is a program that may never
        end, so allow this only if its author may run programs here.

    Raises UnknownModel, ValueError or TypeError, and ImportError for a missing package.
    """
    if not isinstance(url, str) or url not in KNOWN:
        raise ValueError(f"url must be one of {', '.join(KNOWN)}, not {url!r:.80}")
    check_scalar("body", body, dict)
    given = {name: value for name, value in body.items() if value is not None}
    if (name := given.pop("model", model)) != model:
        raise UnknownModel(f"the model {name!r:.80} does not exist; the name is {model!r}")
    for name in [*given]:
        if name in NEUTRAL:
            value = given.pop(name)
            if NEUTRAL[name] and value not in NEUTRAL[name]:
                raise ValueError(f"{name}={value!r:.80} is not supported; leave it out")
        elif name not in KNOWN[url]:
            raise ValueError(unknown_name(f"field of {url}", name, sorted(KNOWN[url])))
    if url == EMBEDDINGS:
        prompts = plain_prompts(given, "input")
        encoding = given.pop("encoding_format", "float")
        check_scalar("encoding_format", encoding, str, ("float", "base64"))
        return Job(url, model, prompts, PoolingParams(**given), encoding=encoding)
    if not templates:
        refuse_template(given)
    prompts = [chat_prompt(llm, given)] if url == CHAT else plain_prompts(given, "prompt")
    params = sampling_params(given, llm.get_default_sampling_params(), url == CHAT)
    return Job(url, model, prompts, params, params.logprobs or 0)


def plain_prompts(given: Fields, name: str) -> list[Prompt]:
    """Return the prompts of a field. It is a string, token ids, or a list of one of these."""
    value = given.pop(name, None)
    prompts = as_list(value, name) if isinstance(value, str | list) else []
    if not prompts or not all(isinstance(prompt, str | list) for prompt in prompts):
        raise ValueError(
            f"{name} must be a string, token ids, or a list of one of these, not {value!r:.80}"
        )
    return prompts


def refuse_template(given: Fields) -> None:
    """Raise ValueError if a body contains a chat template."""
    more = given.get("chat_template_kwargs")
    both = given | more if isinstance(more, dict) else given
    if "chat_template" in given or both.get("chat_template") is not None:
        raise ValueError(
            "chat_template is not accepted here, because it is a program; leave it out, or give "
            "run-batch the option --trust-chat-templates"
        )


def chat_prompt(llm: LLM, given: Fields) -> Prompt:
    messages = given.pop("messages", None)
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"messages must be a list of at least one message, not {messages!r:.80}")
    more = given.pop("chat_template_kwargs", None)
    variables: Fields = {"add_generation_prompt": True}
    variables |= {name: given.pop(name) for name in sorted(TEMPLATE) if name in given}
    for name, value in variables.items():
        check_scalar(name, value, bool)
    variables["chat_template"] = given.pop("chat_template", None)
    return llm.engine.input_processor.chat_prompt(messages, variables, more)


def sampling_params(given: Fields, defaults: SamplingParams, chat: bool) -> SamplingParams:
    """Return the parameters of a body. A missing field has the value of generation_config.json.

    As in vLLM, max_tokens is an exception: by default a completion has at most 16 tokens, and a
    chat has as many as max_model_len leaves.
    """
    fields = {name: value for name, value in given.items() if name in SAMPLING}
    fields["max_tokens"] = given.get("max_tokens", None if chat else 16)
    fields["max_tokens"] = given.get("max_completion_tokens", fields["max_tokens"])
    fields["logprobs"] = given.get("logprobs")
    if chat:
        top = given.get("top_logprobs", 0)
        with_logprobs = given.get("logprobs", False)
        check_scalar("logprobs", with_logprobs, bool)
        check_scalar("top_logprobs", top, int, (-1, math.inf))
        if top and not with_logprobs:
            raise ValueError(f"top_logprobs={top!r} needs logprobs=true")
        fields["logprobs"] = top if with_logprobs else None
    if (bias := given.get("logit_bias")) is not None:
        if not isinstance(bias, dict) or not all(token.isdecimal() for token in bias):
            raise ValueError(f"logit_bias must map token ids to numbers, not {bias!r:.80}")
        fields["logit_bias"] = {int(token): value for token, value in bias.items()}
    fields["structured_outputs"] = structured_outputs(given)
    return replace(defaults, **fields)


def structured_outputs(given: Fields) -> StructuredOutputsParams | None:
    """Return the grammar that `structured_outputs` and `response_format` ask for."""
    fields = given.get("structured_outputs", {})
    form = given.get("response_format", {"type": "text"})
    check_scalar("structured_outputs", fields, dict)
    check_scalar("response_format", form, dict)
    kind = form.get("type")
    if kind == "json_object":
        fields = fields | {"json_object": True}
    elif kind == "json_schema":
        schema = form.get("json_schema")
        if not isinstance(schema, dict) or not isinstance(schema.get("schema"), dict):
            raise ValueError("response_format of type 'json_schema' needs json_schema.schema")
        fields = fields | {"json": schema["schema"]}
    elif kind != "text":
        raise ValueError(
            "the type of response_format must be text, json_object or json_schema, not "
            f"{kind!r:.80}"
        )
    return StructuredOutputsParams(**fields) if fields else None


def pop_stream(body: Any) -> tuple[bool, bool]:
    """Remove `stream` and `stream_options` from a body.

    Returns whether the body asks for a stream, and whether the stream ends with the usage.
    """
    if not isinstance(body, dict):
        return False, False  # `parse` raises
    stream = body.pop("stream", None)
    options = body.pop("stream_options", None)
    if stream is not None:
        check_scalar("stream", stream, bool)
    if options is None:
        return bool(stream), False
    check_scalar("stream_options", options, dict)
    if not stream:
        raise ValueError("stream_options needs stream=true")
    for name in options.keys() - {"include_usage"}:
        raise ValueError(unknown_name("field of stream_options", name, ["include_usage"]))
    with_usage = options.get("include_usage", False)
    check_scalar("include_usage", with_usage, bool)
    return stream, with_usage


# ---- responses ----


def check_end(request: Request) -> None:
    """Raise an error if the request ended without a result."""
    if request.error is not None:
        raise request.error
    reasons = {sample.seq.finish_reason for sample in request.samples}
    if "error" in reasons:
        raise RuntimeError(f"no token could be sampled: {why_no_token(request.params)}")
    if "abort" in reasons:
        raise RuntimeError("the request was aborted")


def usage(outputs: list[RequestOutput]) -> dict[str, int]:
    prompt = sum(len(out.prompt_token_ids) for out in outputs)
    new = sum(len(sample.token_ids) for out in outputs for sample in out.outputs)
    return token_counts(prompt, new)


def token_counts(prompt: int, new: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def embeddings(outputs: list[EmbeddingRequestOutput], encoding: str) -> Fields:
    """Return the data and usage of embeddings. "base64" encodes little-endian float32 numbers."""
    data = []
    for index, out in enumerate(outputs):
        value: Any = out.outputs.embedding
        if encoding == "base64":
            value = base64.b64encode(np.asarray(value, "<f4").tobytes()).decode()
        data.append({"object": "embedding", "index": index, "embedding": value})
    tokens = sum(len(out.prompt_token_ids) for out in outputs)
    return {"data": data, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}


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
    content = []
    for entry in sample.logprobs:
        sampled = one_logprob(*next(iter(entry.items())))
        best = sorted(entry.items(), key=lambda item: item[1].rank)
        top = [one_logprob(*item) for item in best if num_top == -1 or item[1].rank <= num_top]
        content.append(sampled | {"top_logprobs": top})
    return {"content": content}


def one_logprob(token: int, entry: Logprob) -> Fields:
    text = token_text(token, entry)
    return {"token": text, "logprob": finite(entry.logprob), "bytes": list(text.encode())}


def completion_logprobs(sample: CompletionOutput) -> Fields | None:
    if sample.logprobs is None:
        return None
    sampled = [next(iter(entry.items())) for entry in sample.logprobs]
    texts = [token_text(*item) for item in sampled]
    return {
        "text_offset": [0, *itertools.accumulate(map(len, texts))][: len(texts)],
        "token_logprobs": [finite(entry.logprob) for _, entry in sampled],
        "tokens": texts,
        "top_logprobs": [
            {token_text(*item): finite(item[1].logprob) for item in entry.items()}
            for entry in sample.logprobs
        ],
    }


def prompt_logprobs(out: RequestOutput) -> list[Fields | None]:
    return [
        None
        if entry is None
        else {str(t): vars(e) | {"logprob": finite(e.logprob)} for t, e in entry.items()}
        for entry in out.prompt_logprobs or ()
    ]


def token_text(token: int, entry: Logprob) -> str:
    return f"token_id:{token}" if entry.decoded_token is None else entry.decoded_token


def finite(logprob: float) -> float:
    """Return a number that JSON has: -9999.0 for an impossible token, as OpenAI and vLLM do."""
    return logprob if logprob > -9999.0 else -9999.0


def error_body(error: Exception) -> Fields:
    """Return vLLM's description of an error, with the HTTP status as its code."""
    kind, code = "InternalServerError", 500
    if isinstance(error, UnknownModel):
        kind, code = "NotFoundError", 404
    elif isinstance(error, (TypeError, ValueError, ImportError)):
        kind, code = "BadRequestError", 400
    return {"error": {"message": str(error), "type": kind, "param": None, "code": code}}
