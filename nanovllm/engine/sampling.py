"""Sampling: the task that generates tokens, and their text.

The class that runs is SamplingWithRules of features/sampling/logit_rules/. It adds logit rules and
log-probabilities, and without them does the same as Sampling.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from nanovllm.engine.detokenizer import MAX_CONTEXT, Detokenizer
from nanovllm.engine.recovery import rewind_samples
from nanovllm.engine.request import Request, Sample, Task
from nanovllm.engine.result_kinds import make_fork
from nanovllm.engine.sequence import Sequence
from nanovllm.outputs import CompletionOutput, RequestOutput, StreamOutput
from nanovllm.plan import FILTERS, LogitRules, ResultKind, RowResult, RowSampling
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.engine.input_processor import InputProcessor


class Sampling(Task):
    params: SamplingParams
    result_kind = ResultKind.TOKEN

    def __init__(self, input_processor: InputProcessor, params: SamplingParams) -> None:
        """Check the parameters. Raises TypeError or ValueError."""
        input_processor.check_vocabulary("stop_token_ids has", params.stop_token_ids)
        if params.stop:
            input_processor.get_tokenizer()  # raises ValueError if there is none
        self.params = replace(params)  # checks the fields, which may have changed
        self.input_processor = input_processor
        self.eos_token_ids = frozenset() if params.ignore_eos else input_processor.eos_token_ids
        self.stop_token_ids = self.eos_token_ids | frozenset(params.stop_token_ids or ())
        self.tokenizer = input_processor.tokenizer if params.detokenize else None
        filters = {name: getattr(params, name) for name in FILTERS}
        if not 0 < params.top_k < input_processor.vocab_size:
            filters["top_k"] = FILTERS["top_k"]
        self.filters = tuple(filters.values())
        self.rules: LogitRules | None = None

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
            first.forks.append(make_fork(first, list(first.token_ids), sampling, index))
        request.samples += map(Sample, first.forks)
        needs_text = self.tokenizer is not None and bool(request.stream or params.stop)
        request.is_watched = request.stream or needs_text
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
        if sample.detokenizer is not None:
            self._add_text(sample, sample.detokenizer)
        if request.stream:
            request.progress.changed.add(request)

    def _add_text(self, sample: Sample, detokenizer: Detokenizer) -> None:
        """Append the text of the new tokens. Ends the sequence if a stop string is complete."""
        seq, text_ids = sample.seq, self.text_ids(sample.seq)
        for i in range(sample.num_detokenized, seq.num_output):
            start = len(sample.text)
            sample.text += detokenizer.add(text_ids[i : i + 1])
            sample.num_detokenized = i + 1
            if self._ends_with_stop(sample, start):
                del seq.token_ids[seq.num_prompt + i + 1 :]  # with drafts, a step yields several
                return

    def _ends_with_stop(self, sample: Sample, start: int) -> bool:
        """End a sequence if its text from `start` on completes a stop string. Returns whether."""
        seq, params = sample.seq, self.params
        if params.min_tokens and sample.num_detokenized <= params.min_tokens:
            return False  # as in vLLM, a stop string in these tokens does not end the sequence
        # The text ends at the stop string that is complete first, of several at the first given.
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
        return bool(matches)

    def text_ids(self, seq: Sequence) -> list[int]:
        """Return the output tokens to decode, without a stop token unless it is requested."""
        ends_with_stop_token = isinstance(seq.stop_reason, int)
        if ends_with_stop_token and not self.params.include_stop_str_in_output:
            return seq.output_ids[:-1]
        return seq.output_ids

    rewind = rewind_samples

    # ---- outputs ----

    def output(self, request: Request) -> RequestOutput:
        return self.request_output(request, [self.completion(sample) for sample in request.samples])

    def error_output(self, request: Request) -> RequestOutput:
        # Only the tokens are returned, because reading other data may raise the error again.
        outputs = [CompletionOutput(s.index, "", s.output_ids, "error") for s in request.seqs]
        return self.request_output(request, outputs)

    def request_output(self, request: Request, outputs: list[CompletionOutput]) -> RequestOutput:
        first = request.seqs[0]
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=first.token_ids[: first.num_prompt],
            outputs=outputs,
            finished=True,
            num_cached_tokens=first.num_cached_tokens,
            metrics=request.metrics,
        )

    def completion(self, sample: Sample) -> CompletionOutput:
        seq, text = sample.seq, sample.text
        if sample.detokenizer is None and self.tokenizer is not None:
            text = self.detokenizer(seq).add(self.text_ids(seq))
        return CompletionOutput(seq.index, text, seq.output_ids, *self.reasons(seq))

    def reasons(self, seq: Sequence) -> tuple[str | None, int | str | None]:
        """Return the finish_reason, and the stop_reason unless it is an end-of-sequence token."""
        is_eos = seq.stop_reason in self.eos_token_ids
        return seq.finish_reason, None if is_eos else seq.stop_reason

    def read_stream(self, request: Request) -> list[StreamOutput]:
        new = [self.read_sample(request, s) for s in request.samples if not s.stream_ended]
        return [part for part in new if part.token_ids or part.finish_reason]

    def read_sample(self, request: Request, sample: Sample) -> StreamOutput:
        """Return what is new in a sample. After its finish_reason, nothing is."""
        seq, end = sample.seq, len(sample.text)
        token_ids = seq.token_ids[seq.num_prompt + sample.tokens_streamed :]
        stops = () if self.params.include_stop_str_in_output else self.params.stop
        if seq.finish_reason is None and stops:
            # The last characters may begin a stop string, which the text does not include.
            end -= max(map(len, stops)) - 1
        text = sample.text[sample.chars_streamed : max(end, sample.chars_streamed)]
        sample.chars_streamed += len(text)
        sample.tokens_streamed += len(token_ids)
        sample.stream_ended = seq.finish_reason is not None
        return StreamOutput(request.number, seq.index, text, token_ids, *self.reasons(seq))


def signed64(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
