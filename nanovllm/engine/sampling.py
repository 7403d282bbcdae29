"""Sampling: the task that generates tokens, their text and their log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from nanovllm.engine.detokenizer import CONTEXT, MAX_CONTEXT, Detokenizer, decode_token
from nanovllm.engine.recovery import rewind_samples
from nanovllm.engine.request import Request, Sample, Task
from nanovllm.engine.sequence import Sequence
from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput, StreamOutput
from nanovllm.plan import FILTERS, ResultKind, RowResult, RowSampling, TokenLogprobs
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.engine.input_processor import InputProcessor
    from nanovllm.plan import LogitRules

MakeRules: TypeAlias = (
    "Callable[[SamplingParams, InputProcessor, frozenset[int]], LogitRules | None]"
)


class Sampling(Task):
    params: SamplingParams
    result_kind = ResultKind.TOKEN

    def __init__(
        self,
        input_processor: InputProcessor,
        params: SamplingParams,
        make_rules: MakeRules | None = None,
    ) -> None:
        """Check the parameters and compile any grammar. Raises TypeError or ValueError.

        make_rules: returns the logit rules that the parameters request, or None.
        """
        input_processor.check_head()
        input_processor.check_vocabulary("stop_token_ids has", params.stop_token_ids)
        if (params.stop or params.bad_words) and input_processor.tokenizer is None:
            raise ValueError(
                "stop strings and bad words need a tokenizer (skip_tokenizer_init is set)"
            )
        self.params = replace(params)  # checks the fields, which may have changed
        self.input_processor = input_processor
        self.eos_token_ids = frozenset() if params.ignore_eos else input_processor.eos_token_ids
        self.stop_token_ids = self.eos_token_ids | frozenset(params.stop_token_ids or ())
        self.tokenizer = input_processor.tokenizer if params.detokenize else None
        filters = {name: getattr(params, name) for name in FILTERS}
        if not 0 < params.top_k < input_processor.vocab_size:
            filters["top_k"] = FILTERS["top_k"]
        self.filters = tuple(filters.values())
        arguments = self.params, input_processor, self.stop_token_ids
        self.rules = None if make_rules is None else make_rules(*arguments)
        self.num_prompt_logprobs = input_processor.num_logprobs(
            "prompt_logprobs", params.prompt_logprobs
        )

    # ---- from a prompt to sequences ----

    def start(self, request: Request) -> None:
        params, first = self.params, request.samples[0].seq
        # Requests without a seed get different seeds. The engine's seed makes a run repeatable if
        # the requests arrive in the same order.
        seed = params.seed
        if seed is None:
            seed = (self.input_processor.seed + 1) * 0x9E3779B97F4A7C15 + first.arrival
        first.stop_token_ids = self.stop_token_ids
        first.sampling = RowSampling(params.temperature, signed64(seed), self.filters, self.rules)
        for index in range(1, params.n):
            seed = signed64(first.sampling.seed + index * 0xD1B54A32D192ED03)
            sampling = replace(first.sampling, seed=seed)
            first.forks.append(first.forked(list(first.token_ids), sampling, index))
        request.samples += map(Sample, first.forks)
        if self.num_prompt_logprobs is not None:  # the first sample reports them for all samples
            first.targets = first.token_ids[1:]
            first.num_logprobs = self.num_prompt_logprobs
            request.state = {}  # position -> entry; after a preemption, they are computed again
        needs_text = self.tokenizer is not None and bool(request.stream or params.stop)
        request.is_watched = request.stream or needs_text or params.logprobs is not None
        if needs_text:
            for sample in request.samples:
                sample.detokenizer = self.detokenizer(sample.seq)

    def detokenizer(self, seq: Sequence) -> Detokenizer:
        assert self.tokenizer is not None
        prompt_ids = seq.token_ids[max(0, seq.num_prompt - MAX_CONTEXT) : seq.num_prompt]
        return Detokenizer(self.tokenizer, prompt_ids, self.params.skip_special_tokens)

    # ---- from tokens to text ----

    def receive(self, request: Request, seq: Sequence, result: RowResult) -> None:
        sample = request.samples[seq.index]
        # If the sequence ended while this token was in flight, its log-probabilities are dropped.
        if result.logprobs and len(sample.logprobs) < seq.num_output:
            position = seq.num_prompt + len(sample.logprobs)
            sample.logprobs.append(self.decode_logprobs(result.logprobs, seq, position))
        for i, entry in enumerate(result.prompt_logprobs, result.first_position):
            request.state[i] = self.decode_logprobs(entry, seq, i)
        if sample.detokenizer is not None:
            self._add_text(sample, sample.detokenizer)
        if request.stream:
            request.progress.changed.add(request)

    def _add_text(self, sample: Sample, detokenizer: Detokenizer) -> None:
        """Append the text of the new tokens. Ends the sequence if a stop string is complete."""
        seq, params = sample.seq, self.params
        start = len(sample.text)
        sample.text += detokenizer.add(self.text_ids(seq)[sample.num_detokenized :])
        sample.num_detokenized = seq.num_output
        if params.min_tokens and seq.num_output <= params.min_tokens:
            return
        # The text ends at the stop string that is complete first, as if characters were added one
        # by one. If one character completes several stop strings, the first in the list is used.
        matches = [
            (begin + len(stop), stop)
            for stop in params.stop or ()
            if (begin := sample.text.find(stop, max(0, start - len(stop) + 1))) >= 0
        ]
        if matches:
            end, stop = min(matches, key=lambda match: match[0])
            end -= 0 if params.include_stop_str_in_output else len(stop)
            sample.text = sample.text[:end]
            seq.finish_reason, seq.stop_reason = "stop", stop

    def text_ids(self, seq: Sequence) -> list[int]:
        """Return the output tokens to decode, without a stop token unless it is requested."""
        ends_with_stop_token = isinstance(seq.stop_reason, int)
        if ends_with_stop_token and not self.params.include_stop_str_in_output:
            return seq.output_ids[:-1]
        return seq.output_ids

    def stop_reason(self, seq: Sequence) -> int | str | None:
        return None if seq.stop_reason in self.eos_token_ids else seq.stop_reason

    def decode_logprobs(
        self, entry: TokenLogprobs, seq: Sequence, position: int
    ) -> dict[int, Logprob]:
        """Return the log-probabilities at a position of the prompt or of the output."""
        first = seq.num_prompt if position >= seq.num_prompt else 0
        before = seq.token_ids[max(first, position - CONTEXT) : position]

        def text(token: int) -> str | None:
            tokenizer = self.tokenizer
            return None if tokenizer is None else decode_token(tokenizer, token, before)

        return {token: Logprob(p, rank, text(token)) for token, p, rank in entry}

    def rewind(self, request: Request) -> list[Sequence]:
        return rewind_samples(self, request)

    # ---- outputs ----

    def output(self, request: Request) -> RequestOutput:
        return self._output(request, [self._completion(sample) for sample in request.samples])

    def error_output(self, request: Request) -> RequestOutput:
        # Only the tokens are returned, because reading other data may raise the error again.
        outputs = [CompletionOutput(s.index, "", s.output_ids, "error") for s in request.seqs]
        return self._output(request, outputs)

    def _output(self, request: Request, outputs: list[CompletionOutput]) -> RequestOutput:
        first = request.seqs[0]
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=first.token_ids[: first.num_prompt],
            outputs=outputs,
            finished=True,
            num_cached_tokens=first.num_cached_tokens,
            prompt_logprobs=prompt_logprobs(request),
            metrics=request.metrics,
        )

    def _completion(self, sample: Sample) -> CompletionOutput:
        seq, text = sample.seq, sample.text
        if sample.detokenizer is None and self.tokenizer is not None:
            text = self.detokenizer(seq).add(self.text_ids(seq))
        logprobs = None if self.params.logprobs is None else sample.logprobs
        return CompletionOutput(
            index=seq.index,
            text=text,
            token_ids=seq.output_ids,
            finish_reason=seq.finish_reason,
            stop_reason=self.stop_reason(seq),
            logprobs=logprobs,
            # The sampled token comes first in each entry.
            cumulative_logprob=None
            if logprobs is None
            else sum(next(iter(entry.values())).logprob for entry in logprobs),
        )

    def read_stream(self, request: Request, request_index: int) -> list[StreamOutput]:
        """Return the new output of each sample. After its finish_reason, a sample has none."""
        outputs = []
        for sample in request.samples:
            seq, end = sample.seq, len(sample.text)
            token_ids = seq.token_ids[seq.num_prompt + sample.tokens_streamed :]
            if sample.stream_ended or not (token_ids or seq.finish_reason):
                continue
            stops = () if self.params.include_stop_str_in_output else self.params.stop
            if seq.finish_reason is None and stops:
                # The last characters may begin a stop string, which the text does not include.
                end -= max(map(len, stops)) - 1
            text = sample.text[sample.chars_streamed : max(end, sample.chars_streamed)]
            logprobs = sample.logprobs[sample.tokens_streamed :]
            is_first = bool(token_ids) and sample.tokens_streamed == 0 and seq.parent is None
            outputs.append(
                StreamOutput(
                    request_index=request_index,
                    index=seq.index,
                    text=text,
                    token_ids=token_ids,
                    finish_reason=seq.finish_reason,
                    stop_reason=self.stop_reason(seq),
                    logprobs=None if self.params.logprobs is None else logprobs,
                    prompt_logprobs=prompt_logprobs(request) if is_first else None,
                )
            )
            sample.chars_streamed += len(text)
            sample.tokens_streamed += len(token_ids)
            sample.stream_ended = seq.finish_reason is not None
        return outputs


def prompt_logprobs(request: Request) -> list[dict[int, Logprob] | None] | None:
    """Return an entry for each prompt token, or None if not requested. The first entry is None."""
    return None if request.state is None else [None, *request.state.values()]


def signed64(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
