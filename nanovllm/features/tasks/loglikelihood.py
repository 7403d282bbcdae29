"""Log-likelihoods: the tokenization of prompts and continuations, and the task."""

import math
from collections.abc import Iterable

from nanovllm.engine.input_processor import InputProcessor
from nanovllm.engine.request import Request, Task, check_length
from nanovllm.engine.sequence import Sequence
from nanovllm.features.tasks.results import LoglikelihoodOutput
from nanovllm.inputs import Prompt, as_list, parse_prompt
from nanovllm.plan import ResultKind, RowResult
from nanovllm.sampling_params import ScoringParams
from nanovllm.utils.checks import located


def tokenize_pairs(
    input_processor: InputProcessor,
    prompts: Prompt | Iterable[Prompt],
    continuations: Prompt | Iterable[Prompt],
) -> list[tuple[Prompt, ScoringParams]]:
    """Return the token ids of each prompt with its continuation, and its ScoringParams."""
    prompts = as_list(prompts)
    continuations = as_list(continuations, "continuations")
    if len(prompts) == 1:
        prompts = prompts * len(continuations)
    if len(prompts) != len(continuations):
        raise ValueError(
            f"{len(prompts)} prompts but {len(continuations)} continuations; give one prompt for "
            "each continuation, or one for all"
        )
    pairs: list[tuple[Prompt, ScoringParams]] = []
    for i, (prompt, continuation) in enumerate(zip(prompts, continuations, strict=True)):
        with located(f"pair {i}: " * (len(prompts) > 1)):
            ids, new = tokenize_pair(input_processor, prompt, continuation)
        pairs.append(([*ids, *new], ScoringParams(len(new))))
    return pairs


def tokenize_pair(
    input_processor: InputProcessor, prompt: Prompt, continuation: Prompt
) -> tuple[list[int], list[int]]:
    """Return the token ids of a prompt and its continuation, of which neither may be empty.

    As in `_encode_pair` of lm_eval, spaces at the end of a text belong to the continuation. Text
    and continuation are encoded together, and the tokens after the text's tokens are returned.
    """
    encode = input_processor.encode
    text, ids = parse_prompt(prompt)
    new_text, new = parse_prompt(continuation)
    if ids is not None and new is None:
        raise TypeError(
            f"the continuation {new_text!r:.80} is text, and its prompt is token ids: "
            f"{prompt!r:.80}; give both as text, or the continuation as token ids"
        )
    if ids is None and new is not None:
        ids = encode(text or "")
    elif ids is None and new_text:
        start = (text or "").rstrip()
        ids = encode(start) if start else []
        new = encode((text or "") + new_text)[len(ids) :]
    if not new:
        raise ValueError("the continuation is empty; give at least one token")
    if not ids:
        raise ValueError("the prompt is empty; give at least one token")
    return ids, new


class Scoring(Task):
    """The task of a request that scores the last tokens of its prompt."""

    result_kind = ResultKind.NOTHING

    def __init__(self, params: ScoringParams) -> None:
        self.params = params

    def max_length(self, num_tokens: int, max_model_len: int) -> int:
        # The last token is scored but not computed.
        check_length(num_tokens, max_model_len + 1, max_model_len)
        return num_tokens - 1

    def start(self, request: Request) -> None:
        seq = request.samples[0].seq
        seq.first_target = seq.num_prompt - self.params.num_tokens
        seq.targets = seq.token_ids[seq.first_target :]
        seq.token_ids.pop()
        seq.num_prompt -= 1
        request.state = {}  # position -> (token, log-probability, rank)

    def receive(self, request: Request, seq: Sequence, result: RowResult) -> None:
        # After a preemption all positions are computed and received again.
        for position, entry in enumerate(result.prompt_logprobs, result.first_position):
            request.state[position] = entry[0]  # the token itself comes first
        if not seq.awaits_token:
            return  # more chunks follow
        if any(math.isnan(logprob) for _, logprob, _ in request.state.values()):
            raise ArithmeticError("there is no log-likelihood: the model computed NaN")
        seq.finish_reason = "stop"

    def output(self, request: Request) -> LoglikelihoodOutput:
        seq = request.samples[0].seq
        entries = [entry for _, entry in sorted(request.state.items())]
        return LoglikelihoodOutput(
            logprob=sum(logprob for _, logprob, _ in entries),
            is_greedy=all(rank == 1 for *_, rank in entries),
            token_logprobs=[logprob for _, logprob, _ in entries],
            token_ids=seq.targets,
            num_cached_tokens=seq.num_cached_tokens,
            request_id=request.request_id,
        )
