"""The parts of responses in OpenAI's format: choices, log-probabilities, usage and errors."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from nanovllm.engine.request import Request
from nanovllm.engine.results import why_no_token
from nanovllm.outputs import CompletionOutput, Logprob

if TYPE_CHECKING:
    from nanovllm.features.sampling.tool_calls import ToolUse

Fields = dict[str, Any]


def checked_output(request: Request) -> Any:
    """Return the output of a request that has ended. Raises an error if it has no result."""
    if request.error is not None:
        raise request.error
    if any(sample.seq.finish_reason == "error" for sample in request.samples):
        raise RuntimeError(f"no token could be sampled: {why_no_token(request.task.params)}")
    return request.output


def token_counts(prompt: int, new: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def choice(sample: CompletionOutput, index: int, tool_use: ToolUse | None, num_top: int) -> Fields:
    """Return a choice of a response. `tool_use` is None for a completion."""
    shown: Fields = {"index": index, "stop_reason": sample.stop_reason}
    reason = sample.finish_reason
    if tool_use is not None:
        text, calls = tool_use.parse(sample.text)
        content = text or None if calls else text
        message: Fields = {"role": "assistant", "content": content, "refusal": None}
        message |= {} if sample.reasoning is None else {"reasoning": sample.reasoning}
        if calls:
            message["tool_calls"] = calls
            reason = "tool_calls"
        shown |= {"message": message, "logprobs": chat_logprobs(sample, num_top)}
    else:
        shown["text"] = sample.text
        shown["logprobs"] = completion_logprobs(sample)
    return shown | {"finish_reason": reason}


def chat_logprobs(sample: CompletionOutput, num_top: int) -> Fields | None:
    if sample.logprobs is None:
        return None
    content = []
    for entry in sample.logprobs:
        shown = [
            {"token": text, "logprob": finite(logprob), "bytes": list(text.encode())}
            for text, logprob in token_texts(entry)
        ]
        ranked = sorted(zip(entry.values(), shown, strict=True), key=lambda pair: pair[0].rank)
        top = [token for logprob, token in ranked if num_top == -1 or logprob.rank <= num_top]
        content.append(shown[0] | {"top_logprobs": top})
    return {"content": content}


def completion_logprobs(sample: CompletionOutput) -> Fields | None:
    if sample.logprobs is None:
        return None
    entries = [token_texts(entry) for entry in sample.logprobs]
    texts = [text for (text, _), *_ in entries]
    return {
        "text_offset": [0, *itertools.accumulate(map(len, texts))][: len(texts)],
        "token_logprobs": [finite(logprob) for (_, logprob), *_ in entries],
        "tokens": texts,
        "top_logprobs": [{text: finite(logprob) for text, logprob in entry} for entry in entries],
    }


def token_texts(entry: dict[int, Logprob]) -> list[tuple[str, Logprob]]:
    """Return the texts of the tokens of one position, the sampled token first."""
    return [
        (f"token_id:{token}" if logprob.decoded_token is None else logprob.decoded_token, logprob)
        for token, logprob in entry.items()
    ]


def finite(entry: Logprob) -> float:
    """Return a number that JSON has: -9999.0 for an impossible token, as OpenAI and vLLM do."""
    return entry.logprob if entry.logprob > -9999.0 else -9999.0


def error_body(error: Exception) -> Fields:
    """Return vLLM's description of an error, with the HTTP status as its code."""
    is_bad_request = isinstance(error, (TypeError, ValueError, ImportError))
    kind, code = ("BadRequestError", 400) if is_bad_request else ("InternalServerError", 500)
    return {"error": {"message": str(error), "type": kind, "param": None, "code": code}}
