"""Makes the logit rules of a request, which the runner applies to its rows, from SamplingParams."""

import inspect

from nanovllm.engine.input_processor import InputProcessor
from nanovllm.engine.thinking import make_thinking
from nanovllm.engine.token_logprobs import num_logprobs
from nanovllm.plan import LogitRules
from nanovllm.sampling_params import LogitsProcessor, SamplingParams


def make_rules(
    params: SamplingParams,
    inputs: InputProcessor,
    stop_token_ids: frozenset[int],
    separates: bool = False,
) -> LogitRules | None:
    """Return the rules that the parameters request, or None. May compile a grammar.

    Raises TypeError or ValueError for a value that the model or its tokenizer cannot use.

    separates: whether thinking is separated from the text, so that the grammar is of the text.
    """
    bias = params.logit_bias or {}
    inputs.check_vocabulary("logit_bias has", bias)
    inputs.check_vocabulary("allowed_token_ids has", params.allowed_token_ids)
    inputs.check_vocabulary("logprob_token_ids has", params.logprob_token_ids)
    stops = tuple(sorted(stop_token_ids))
    grammar = None
    if params.structured_outputs is not None:
        grammar = inputs.grammars().compile(params.structured_outputs, list(stops))
    for processor in params.logits_processors or ():
        takes_prompt(processor)
    allowed = params.allowed_token_ids
    rules = LogitRules(
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=tuple(bias.items()),
        allowed_token_ids=None if allowed is None else tuple(allowed),
        bad_words=bad_words(params, inputs),
        min_tokens=min(params.min_tokens, inputs.max_model_len),
        stops=stops if params.min_tokens else (),
        logprobs=num_logprobs(inputs, "logprobs", params.logprobs),
        logprob_token_ids=tuple(params.logprob_token_ids or ()),
        logits_processors=tuple(params.logits_processors or ()),
        grammar=grammar,
        thinking=make_thinking(inputs, params, separates),
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


def bad_words(params: SamplingParams, inputs: InputProcessor) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each bad word, without and with a leading space."""
    phrases = set()
    for word in params.bad_words or ():
        for text in (word, " " + word.lstrip()):
            ids = inputs.encode(text, add_special_tokens=False)
            if not ids:
                raise ValueError(
                    f"bad_words has {word!r:.80}, for which the tokenizer has no tokens; remove it"
                )
            what = f"bad_words has {text!r:.80}, which is encoded with"
            inputs.check_vocabulary(what, ids)
            phrases.add(tuple(ids))
    return tuple(sorted(phrases))
