"""Makes the logit rules of a request, which the runner applies to its rows, from SamplingParams."""

from __future__ import annotations

import inspect

from nanovllm.engine.input_processor import InputProcessor
from nanovllm.features.sampling.thinking import make_thinking
from nanovllm.plan import LogitRules
from nanovllm.sampling_params import LogitsProcessor, SamplingParams


def make_rules(
    params: SamplingParams,
    input_processor: InputProcessor,
    stop_token_ids: frozenset[int],
    separates: bool = False,
) -> LogitRules | None:
    """Return the rules that the parameters request, or None. May compile a grammar.

    Raises TypeError or ValueError for a value that the model or its tokenizer cannot use.

    separates: whether thinking is separated from the text, so that the grammar is of the text.
    """
    bias = params.logit_bias or {}
    input_processor.check_vocabulary("logit_bias has", bias)
    input_processor.check_vocabulary("allowed_token_ids has", params.allowed_token_ids)
    input_processor.check_vocabulary("logprob_token_ids has", params.logprob_token_ids)
    stops = tuple(sorted(stop_token_ids))
    grammar = None
    if params.structured_outputs is not None:
        assert input_processor.grammars is not None, "make_engine sets it"
        grammar = input_processor.grammars.compile(params.structured_outputs, list(stops))
    for processor in params.logits_processors or ():
        takes_prompt(processor)
    allowed = params.allowed_token_ids
    rules = LogitRules(
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=tuple(bias.items()),
        allowed_token_ids=None if allowed is None else tuple(allowed),
        bad_words=bad_words(params, input_processor),
        min_tokens=min(params.min_tokens, input_processor.max_model_len),
        stops=stops if params.min_tokens else (),
        logprobs=num_logprobs(input_processor, "logprobs", params.logprobs),
        logprob_token_ids=tuple(params.logprob_token_ids or ()),
        logits_processors=tuple(params.logits_processors or ()),
        grammar=grammar,
        thinking=make_thinking(input_processor, params, separates),
    )
    return None if rules == LogitRules() else rules


def takes_prompt(processor: LogitsProcessor) -> bool:
    """Return whether a processor takes (prompt ids, output ids, logits), as in vLLM.

    If not, it takes (output ids, logits). Raises TypeError if it takes neither.
    """
    try:
        signature = inspect.signature(processor)
    except (TypeError, ValueError):
        return False  # a function in C has no signature
    for count in (2, 3):
        try:
            signature.bind(*range(count))
        except TypeError:
            continue
        return count == 3
    raise TypeError(
        "a logits processor is called with (output ids, logits) or "
        f"(prompt ids, output ids, logits), which {processor!r} does not take"
    )


def bad_words(
    params: SamplingParams, input_processor: InputProcessor
) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each bad word, without and with a leading space."""
    phrases = set()
    for word in params.bad_words or ():
        for text in (word, " " + word.lstrip()):
            ids = input_processor.encode(text, add_special_tokens=False)
            if not ids:
                raise ValueError(
                    f"bad_words has {word!r:.80}, for which the tokenizer has no tokens; remove it"
                )
            what = f"bad_words has {text!r:.80}, which is encoded with"
            input_processor.check_vocabulary(what, ids)
            phrases.add(tuple(ids))
    return tuple(sorted(phrases))


def num_logprobs(input_processor: InputProcessor, name: str, value: int | None) -> int | None:
    """Return how many log-probabilities a field requests. Raises ValueError for too many."""
    if value is None:
        return None
    size, limit = input_processor.vocab_size, input_processor.max_logprobs
    limit = size if limit == -1 else min(size, limit)
    num = size if value == -1 else value
    if num > limit:
        raise ValueError(
            f"{name}={value} is more than max_logprobs={limit}; ask for fewer (-1 is the whole "
            f"vocabulary of {size}), or give LLM() a larger max_logprobs (-1: no limit)"
        )
    return num
