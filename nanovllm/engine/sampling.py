"""Sampling: the task that generates tokens, with their text and log-probabilities.

start                 makes a sequence for each sample
receive               after a step: log-probabilities, then repetitions and stop strings
read_stream, output   separate the thinking from the text, and return what the caller gets
"""

from copy import copy
from dataclasses import replace

from nanovllm.engine.detokenizer import MAX_CONTEXT, Detokenizer
from nanovllm.engine.input_processor import InputProcessor
from nanovllm.engine.logit_rules import make_rules
from nanovllm.engine.repetition import as_params, find_repetition
from nanovllm.engine.request import Request, Sample, Task
from nanovllm.engine.result_kinds import make_fork
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.thinking import Splitter, kept_markers, opened
from nanovllm.engine.token_logprobs import decode_logprobs, num_logprobs
from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput, StreamOutput
from nanovllm.plan import FILTERS, ResultKind, RowResult, RowSampling
from nanovllm.sampling_params import RepetitionDetectionParams, SamplingParams


class Sampling(Task):
    params: SamplingParams
    result_kind = ResultKind.TOKEN
    has_tools = False  # whether the caller parses tool calls; set by cli/jobs/openai_format.py

    def __init__(
        self, inputs: InputProcessor, params: SamplingParams, separates: bool = False
    ) -> None:
        """Check the parameters. Raises TypeError or ValueError. May compile a grammar.

        separates: whether thinking is separated from the text, as by `reasoning_parser`.
        """
        inputs.check_vocabulary("stop_token_ids has", params.stop_token_ids)
        if params.stop:
            inputs.get_tokenizer()  # raises ValueError if there is none
        self.params = params = replace(params)  # checks the fields, which may have changed
        if params.logprob_token_ids and params.logprobs is None:
            params.logprobs = 0
        self.seed = inputs.seed
        self.tokenizer = inputs.tokenizer if params.detokenize else None
        self.eos_token_ids = frozenset() if params.ignore_eos else inputs.eos_token_ids
        self.stop_token_ids = self.eos_token_ids | frozenset(params.stop_token_ids or ())
        filters = {name: getattr(params, name) for name in FILTERS}
        if not 0 < params.top_k < inputs.vocab_size:
            filters["top_k"] = FILTERS["top_k"]
        self.filters = tuple(filters.values())
        self.repetition = as_params(params.repetition_detection)
        self.separates = separates and params.detokenize
        self.rules = make_rules(params, inputs, self.stop_token_ids, separates)
        self.num_prompt_logprobs = num_logprobs(inputs, "prompt_logprobs", params.prompt_logprobs)

    # ---- from a prompt to sequences ----

    def start(self, request: Request) -> None:
        params, first = self.params, request.samples[0].seq
        # Requests without a seed get different seeds. The engine's seed makes a run repeatable if
        # the requests arrive in the same order.
        seed = params.seed
        if seed is None:
            seed = (self.seed + 1) * 0x9E3779B97F4A7C15 + first.arrival
        first.stop_token_ids = self.stop_token_ids
        first.sampling = RowSampling(params.temperature, signed64(seed), self.filters, self.rules)
        for index in range(1, params.n):
            seed = signed64(first.sampling.seed + index * 0xD1B54A32D192ED03)
            sampling = replace(first.sampling, seed=seed)
            first.forks.append(make_fork(first, list(first.token_ids), sampling, index))
        request.samples += map(Sample, first.forks)
        if self.num_prompt_logprobs is not None:  # the first sample reports them for all samples
            first.targets = first.token_ids[1:]
            first.num_logprobs = self.num_prompt_logprobs
            request.prompt_logprobs = {}  # after a preemption, they are computed again
        needs_text = self.tokenizer is not None and bool(request.stream or params.stop)
        watches = needs_text, params.logprobs is not None, self.repetition is not None
        request.is_watched = request.stream or any(watches)
        splitter = self.splitter(first.token_ids)
        for sample in request.samples:
            sample.splitter = copy(splitter)
            if needs_text:
                sample.detokenizer = self.detokenizer(sample.seq)

    def splitter(self, prompt: list[int]) -> Splitter | None:
        """Return what separates the thinking of the outputs from their texts, if requested."""
        if self.tokenizer is None or not self.separates:
            return None
        is_open = opened(self.tokenizer, prompt) is not None
        removed = [m for m in self.markers().values() if not self.has_tools or "tool" not in m]
        return Splitter(is_open, self.params.structured_outputs is None, removed)

    def detokenizer(self, seq: Sequence) -> Detokenizer:
        assert self.tokenizer is not None
        prompt_ids = seq.token_ids[max(0, seq.num_prompt - MAX_CONTEXT) : seq.num_prompt]
        detokenizer = Detokenizer(self.tokenizer, prompt_ids, self.params.skip_special_tokens)
        detokenizer.kept = self.markers()
        return detokenizer

    def markers(self) -> dict[int, str]:
        """Return the special tokens that texts keep until their parsers have seen them."""
        if self.tokenizer is None or not self.params.skip_special_tokens:
            return {}
        return kept_markers(self.tokenizer, self.separates, self.has_tools)

    # ---- from the results of a step to text and log-probabilities ----

    def receive(self, request: Request, seq: Sequence, result: RowResult) -> None:
        sample = request.samples[seq.index]
        self._add_logprobs(request, sample, result)
        if self.repetition is not None:
            self._end_repetition(sample, self.repetition)
        if sample.detokenizer is not None:
            self._add_text(sample, sample.detokenizer)
        sample.num_received = seq.num_output
        del sample.logprobs[seq.num_output :]  # of tokens after a stop string or a repetition
        if request.stream:
            request.progress.changed.add(request)

    def _add_logprobs(self, request: Request, sample: Sample, result: RowResult) -> None:
        seq = sample.seq
        # If the sequence ended while this token was in flight, its log-probabilities are dropped.
        for entry in result.logprobs[: seq.num_output - len(sample.logprobs)]:
            position = seq.num_prompt + len(sample.logprobs)
            sample.logprobs.append(decode_logprobs(self.tokenizer, entry, seq, position))
        for i, entry in enumerate(result.prompt_logprobs, result.first_position):
            assert request.prompt_logprobs is not None, "`start` sets it"
            request.prompt_logprobs[i] = decode_logprobs(self.tokenizer, entry, seq, i)

    def _end_repetition(self, sample: Sample, params: RepetitionDetectionParams) -> None:
        """End the sequence if its new tokens complete a repetition."""
        seq = sample.seq
        start = max(sample.num_received, self.params.min_tokens - 1)
        length = find_repetition(seq, start, params)
        # As in vLLM, a stop token or the largest length takes precedence at the same token.
        if length is not None and (length < seq.num_output or seq.finish_reason is None):
            del seq.token_ids[seq.num_prompt + length :]  # with drafts, a step yields several
            seq.finish_reason, seq.stop_reason = "repetition", "repetition_detected"

    def _add_text(self, sample: Sample, detokenizer: Detokenizer) -> None:
        """Append the text of the new tokens. Ends the sequence if a stop string is complete."""
        seq, text_ids = sample.seq, self.text_ids(sample.seq)
        for i in range(sample.num_received, seq.num_output):
            start = len(sample.text)
            sample.text += detokenizer.add(text_ids[i : i + 1])
            # As in vLLM, a stop string in the first `min_tokens` does not end the sequence.
            if i >= self.params.min_tokens and self._ends_with_stop(sample, start):
                del seq.token_ids[seq.num_prompt + i + 1 :]  # with drafts, a step yields several
                return

    def _ends_with_stop(self, sample: Sample, start: int) -> bool:
        """End a sequence if its text from `start` on completes a stop string. Returns whether."""
        seq, params = sample.seq, self.params
        # The stop string that is completed first ends the text; if several are, the first given.
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
            prompt_logprobs=prompt_logprobs(request),
        )

    def completion(self, sample: Sample) -> CompletionOutput:
        seq, text = sample.seq, sample.text
        reasoning = logprobs = total = None
        if sample.detokenizer is None and self.tokenizer is not None:
            text = self.detokenizer(seq).add(self.text_ids(seq))
        if sample.splitter is not None:
            splitter = copy(sample.splitter)  # another call then gives the same
            thought, text = splitter.add(text, is_last=True)
            reasoning = thought if splitter.has_thought else None
        if self.params.logprobs is not None:
            logprobs = sample.logprobs
            # The sampled token comes first in each entry.
            total = sum(next(iter(entry.values())).logprob for entry in logprobs)
        return CompletionOutput(
            seq.index, text, seq.output_ids, *self.reasons(seq), logprobs, total, reasoning
        )

    def reasons(self, seq: Sequence) -> tuple[str | None, int | str | None]:
        """Return the finish_reason, and the stop_reason unless it is an end-of-sequence token."""
        is_eos = seq.stop_reason in self.eos_token_ids
        return seq.finish_reason, None if is_eos else seq.stop_reason

    def read_stream(self, request: Request) -> list[StreamOutput]:
        new = [self.read_sample(request, s) for s in request.samples if not s.stream_ended]
        return [part for part in new if part.token_ids or part.finish_reason]

    def read_sample(self, request: Request, sample: Sample) -> StreamOutput:
        """Return what is new in a sample. After its finish_reason, nothing is."""
        seq, start, end = sample.seq, sample.tokens_streamed, len(sample.text)
        token_ids = seq.token_ids[seq.num_prompt + start :]
        stops = () if self.params.include_stop_str_in_output else self.params.stop
        if seq.finish_reason is None and stops:
            # The last characters may begin a stop string, which the text does not include.
            end -= max(map(len, stops)) - 1
        text, reasoning = sample.text[sample.chars_streamed : max(end, sample.chars_streamed)], ""
        sample.chars_streamed += len(text)
        sample.tokens_streamed += len(token_ids)
        sample.stream_ended = seq.finish_reason is not None
        if sample.splitter is not None:
            reasoning, text = sample.splitter.add(text, is_last=sample.stream_ended)
        is_first = start == 0 and bool(token_ids) and seq.parent is None
        return StreamOutput(
            request.number,
            seq.index,
            text,
            token_ids,
            *self.reasons(seq),
            logprobs=None if self.params.logprobs is None else sample.logprobs[start:],
            prompt_logprobs=prompt_logprobs(request) if is_first else None,
            reasoning=reasoning,
        )


def prompt_logprobs(request: Request) -> list[dict[int, Logprob] | None] | None:
    """Return an entry for each prompt token, or None if not requested. The first entry is None."""
    entries = request.prompt_logprobs
    return None if entries is None else [None, *entries.values()]


def signed64(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
