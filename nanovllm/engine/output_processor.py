"""OutputProcessor: from the tokens of sequences to the results of requests.

It owns the requests: their text, log-probabilities, stop strings and metrics. It decides when a
stop string ends a sequence, and builds a RequestOutput when all samples of a request have finished.
"""

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nanovllm.detokenizer import Detokenizer
from nanovllm.engine.scheduler import InFlightStep
from nanovllm.engine.sequence import Sequence, Status
from nanovllm.outputs import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    StreamOutput,
)
from nanovllm.plan import TokenLogprobs
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(slots=True)
class Sample:
    """One of the n samples of a request, and its data beyond the tokens."""

    seq: Sequence
    detokenizer: Detokenizer | None = None  # for stop strings and streams
    text: str = ""
    num_detokenized: int = 0  # output tokens that `text` contains
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    # What `read_stream` has returned so far.
    chars_streamed: int = 0
    tokens_streamed: int = 0
    stream_ended: bool = False


@dataclass(slots=True)
class Request:
    request_id: str
    samples: list[Sample]
    prompt: str | None
    params: SamplingParams
    metrics: RequestMetrics
    num_unfinished: int  # unfinished samples
    held: bool  # its caller holds this object; `step` does not return its output
    stream: bool  # read with `read_stream` while it runs; it has no output
    output: RequestOutput | None = None  # when it has ended
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by position

    def read_stream(self, request_index: int) -> list[StreamOutput]:
        """Return what is new in each sample since the last call; nothing after finish_reason."""
        outputs = []
        for sample in self.samples:
            seq, end = sample.seq, len(sample.text)
            token_ids = seq.output_ids[sample.tokens_streamed :]
            if sample.stream_ended or not (token_ids or seq.finish_reason):
                continue
            if seq.finish_reason is None and self.params.stop:
                # These characters may begin a stop string, which is not part of the text.
                end -= max(map(len, self.params.stop)) - 1
            text = sample.text[sample.chars_streamed : end] if end > sample.chars_streamed else ""
            sample.chars_streamed += len(text)
            sample.tokens_streamed += len(token_ids)
            sample.stream_ended = seq.finish_reason is not None
            outputs.append(
                StreamOutput(request_index, seq.index, text, token_ids, seq.finish_reason)
            )
        return outputs

    @property
    def num_tokens(self) -> tuple[int, int]:
        """Prompt tokens, 0 before the first output token, and output tokens of all samples."""
        started = self.metrics.first_token_time is not None
        num_output = sum(sample.seq.num_output for sample in self.samples)
        return self.samples[0].seq.num_prompt * started, num_output

    @property
    def stream_ended(self) -> bool:
        return all(sample.stream_ended for sample in self.samples)


class OutputProcessor:
    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase | None", eos_token_ids: frozenset[int]
    ) -> None:
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.requests: dict[str, Request] = {}
        self.finished: list[RequestOutput] = []  # not returned to the caller yet
        # Samples whose tokens are processed one by one: streams, stop strings, log-probabilities.
        self.watched: dict[Sequence, Sample] = {}
        self.num_prompt_tokens = 0  # of requests that have their first token
        self.num_output_tokens = 0

    def is_known(self, request_id: str) -> bool:
        return request_id in self.requests or any(
            output.request_id == request_id for output in self.finished
        )

    def add(
        self,
        seqs: list[Sequence],
        prompt: str | None,
        params: SamplingParams,
        held: bool,
        stream: bool,
    ) -> Request:
        samples = [Sample(seq) for seq in seqs]
        metrics = RequestMetrics(time.monotonic())
        request_id = seqs[0].request_id
        request = Request(request_id, samples, prompt, params, metrics, len(samples), held, stream)
        self.requests[request_id] = request
        needs_text = self.tokenizer is not None and params.detokenize and (stream or params.stop)
        if needs_text or params.logprobs is not None:
            for sample in samples:
                self.watched[sample.seq] = sample
                if needs_text and self.tokenizer is not None:
                    sample.detokenizer = Detokenizer(self.tokenizer, params.skip_special_tokens)
        return request

    def note_scheduled(self, seqs: list[Sequence]) -> None:
        now = time.monotonic()
        for seq in seqs:
            metrics = self.requests[seq.request_id].metrics
            if metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = now

    def process(self, step: InFlightStep, progressed: list[Sequence]) -> list[tuple[Sequence, str]]:
        """Process the results of a step. Returns the sequences that a stop string ends."""
        self.num_output_tokens += len(progressed)
        if step.plan.chunks:
            self._note_first_tokens(progressed)
        self._add_logprobs(step)
        if not self.watched:
            return []
        return [(seq, stop) for seq in progressed if (stop := self._detokenize(seq)) is not None]

    def sequences(self) -> list[Sequence]:
        return [sample.seq for request in self.requests.values() for sample in request.samples]

    def collect_finished(self, seqs: list[Sequence]) -> None:
        """Build the output of each request whose samples, one of them in `seqs`, have finished."""
        finished = [seq.request_id for seq in seqs if seq.status is Status.FINISHED]
        for request_id in dict.fromkeys(finished):
            request = self.requests[request_id]
            samples = request.samples
            request.num_unfinished = sum(s.seq.status is not Status.FINISHED for s in samples)
            if request.num_unfinished == 0:
                self._end(request)
                if not request.held and request.output is not None:
                    self.finished.append(request.output)

    def end_aborted(self, request: Request) -> None:
        """Remove an aborted request. Its output, which `step` does not return, has what there is."""
        for sample in request.samples:
            if sample.seq.finish_reason == "abort" and sample.detokenizer is not None:
                sample.text += sample.detokenizer.flush()
        self._end(request)

    def _end(self, request: Request) -> None:
        del self.requests[request.request_id]
        for sample in request.samples:
            self.watched.pop(sample.seq, None)
        request.metrics.finished_time = time.monotonic()
        if not request.stream:
            request.output = self._request_output(request)

    def _note_first_tokens(self, progressed: list[Sequence]) -> None:
        now = time.monotonic()
        for seq in progressed:
            metrics = self.requests[seq.request_id].metrics
            if metrics.first_token_time is None:
                metrics.first_token_time = now
                self.num_prompt_tokens += seq.num_prompt

    def _add_logprobs(self, step: InFlightStep) -> None:
        assert step.output is not None
        for i, logprobs in step.output.logprobs.items():
            sample = self.watched.get(step.sampling[i])
            # A token that was sampled after the end of its sequence is not in the output.
            if sample is not None and len(sample.logprobs) < sample.seq.num_output:
                sample.logprobs.append(logprobs)
        for i, targets in step.output.prompt_logprobs.items():
            request = self.requests.get(step.chunked[i].request_id)
            if request is not None:
                first = step.plan.chunks[i].start + 1
                request.prompt_logprobs |= dict(enumerate(targets, first))

    def _detokenize(self, seq: Sequence) -> str | None:
        """Append the text of the new tokens. Returns the stop string that it contains, if any."""
        sample = self.watched.get(seq)
        if sample is None or sample.detokenizer is None:
            return None
        params, start = self.requests[seq.request_id].params, len(sample.text)
        sample.text += sample.detokenizer.add(seq.output_ids[sample.num_detokenized :])
        sample.num_detokenized = seq.num_output
        if seq.status is Status.FINISHED:
            sample.text += sample.detokenizer.flush()
        if params.min_tokens and seq.num_output <= params.min_tokens:
            return None
        matches = [
            (at, stop)
            for stop in params.stop
            if (at := sample.text.find(stop, max(0, start - len(stop) + 1))) >= 0
        ]
        if not matches:
            return None
        at, stop = min(matches)
        sample.text = sample.text[: at + len(stop) * params.include_stop_str_in_output]
        return stop

    def _request_output(self, request: Request) -> RequestOutput:
        seqs = [sample.seq for sample in request.samples]
        request.metrics.num_preemptions = sum(seq.preemptions for seq in seqs)
        first, prompt_logprobs = seqs[0], None
        if request.params.prompt_logprobs is not None:
            rest = [request.prompt_logprobs[i] for i in sorted(request.prompt_logprobs)]
            prompt_logprobs = [None, *map(self._decode_logprobs, rest)]
        return RequestOutput(
            request_id=first.request_id,
            prompt=request.prompt,
            prompt_token_ids=first.token_ids[: first.num_prompt],
            outputs=[self._completion(sample, request.params) for sample in request.samples],
            finished=True,
            num_cached_tokens=first.num_cached,
            prompt_logprobs=prompt_logprobs,
            metrics=request.metrics,
        )

    def _completion(self, sample: Sample, params: SamplingParams) -> CompletionOutput:
        seq, text, skip = sample.seq, sample.text, params.skip_special_tokens
        if sample.detokenizer is None and self.tokenizer is not None and params.detokenize:
            text = str(self.tokenizer.decode(seq.output_ids, skip_special_tokens=skip))
        logprobs, total = None, None
        if params.logprobs is not None:
            logprobs = [self._decode_logprobs(entry) for entry in sample.logprobs]
            total = sum(entry[0][1] for entry in sample.logprobs)
        return CompletionOutput(
            index=seq.index,
            text=text,
            token_ids=seq.output_ids,
            finish_reason=seq.finish_reason,
            stop_reason=None if seq.stop_reason in self.eos_token_ids else seq.stop_reason,
            logprobs=logprobs,
            cumulative_logprob=total,
        )

    def _decode_logprobs(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        decode = None if self.tokenizer is None else self.tokenizer.decode
        return {
            token: Logprob(logprob, rank, None if decode is None else str(decode([token])))
            for token, logprob, rank in entry
        }
