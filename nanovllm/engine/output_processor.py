"""OutputProcessor: from the tokens of sequences to the results of requests.

It owns the requests: their text, log-probabilities, stop strings and metrics. It detects the stop
strings that end a sequence, and builds a RequestOutput when all samples of a request have finished.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from nanovllm.detokenizer import Detokenizer
from nanovllm.engine.input_processor import Params
from nanovllm.engine.scheduler import InFlightStep
from nanovllm.engine.sequence import Sequence, Status
from nanovllm.outputs import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    StreamOutput,
)
from nanovllm.plan import StepOutput, TokenLogprobs, Yield
from nanovllm.pooling import EmbeddingOutput, EmbeddingRequestOutput, PoolingParams
from nanovllm.sampling_params import SamplingParams
from nanovllm.scoring import LoglikelihoodOutput, ScoringParams, check_logprobs
from nanovllm.structured import OutputComplete

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger("nanovllm")
# A RequestOutput, EmbeddingRequestOutput or LoglikelihoodOutput. A union would make every program that
# runs the loop check which of them it gets.
Output: TypeAlias = Any
NO_TEXT = SamplingParams(detokenize=False)  # stands for those of a request that samples nothing


@dataclass(slots=True)
class Sample:
    """One of the n samples of a request, and its data in addition to the tokens."""

    seq: Sequence
    detokenizer: Detokenizer | None = None  # for stop strings and streams
    text: str = ""
    num_detokenized: int = 0  # output tokens that `text` contains
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    # What `read_stream` has returned so far.
    chars_streamed: int = 0
    tokens_streamed: int = 0
    stream_ended: bool = False


class Search(Protocol):
    """Chooses the tokens of a request whose rows yield candidates: see nanovllm/beam_search.py."""

    def start(self, seqs: list[Sequence]) -> None: ...

    def receive(
        self, request: "Request", seq: Sequence, candidates: list[tuple[int, float]]
    ) -> None: ...

    def output(self, request: "Request") -> Any: ...


@dataclass(slots=True)
class Request:
    request_id: str
    samples: list[Sample]
    prompt: str | None
    params: SamplingParams
    metrics: RequestMetrics
    num_unfinished: int  # unfinished samples
    returned_by_step: bool  # else the caller has this object, and `step` does not return its output
    stream: bool  # read with `read_stream` while it runs; it has no output
    eos_token_ids: frozenset[int]  # end an output with stop_reason None; empty with ignore_eos
    tokenizer: "PreTrainedTokenizerBase | None"  # None with detokenize=False
    search: Search | None = None  # chooses its tokens and makes its output
    ended: bool = False
    output: Any = None  # an Output, or that of `search`, when it has ended
    error: Exception | None = None  # raised by its own data in a step, which ended it
    prompt_logprobs: dict[int, dict[int, Logprob]] = field(default_factory=dict)  # by position
    task: PoolingParams | ScoringParams | None = None  # what it asks for instead of new tokens
    embedding: list[float] = field(default_factory=list)

    def read_stream(self, request_index: int) -> list[StreamOutput]:
        """Return the output of each sample since the last call; nothing after its finish_reason."""
        outputs = []
        for sample in self.samples:
            seq, end = sample.seq, len(sample.text)
            token_ids = seq.output_ids[sample.tokens_streamed :]
            if sample.stream_ended or not (token_ids or seq.finish_reason):
                continue
            stops = () if self.params.include_stop_str_in_output else self.params.stop
            if seq.finish_reason is None and stops:
                # These characters may be the beginning of a stop string, which is left out.
                end -= max(map(len, stops)) - 1
            text = sample.text[sample.chars_streamed : end] if end > sample.chars_streamed else ""
            logprobs = sample.logprobs[sample.tokens_streamed :]
            first = token_ids and sample.tokens_streamed == 0 and seq.parent is None
            outputs.append(
                StreamOutput(
                    request_index=request_index,
                    index=seq.index,
                    text=text,
                    token_ids=token_ids,
                    finish_reason=seq.finish_reason,
                    stop_reason=self.stop_reason(seq),
                    logprobs=None if self.params.logprobs is None else logprobs,
                    prompt_logprobs=self.all_prompt_logprobs() if first else None,
                )
            )
            sample.chars_streamed += len(text)
            sample.tokens_streamed += len(token_ids)
            sample.stream_ended = seq.finish_reason is not None
        return outputs

    def stop_reason(self, seq: Sequence) -> int | str | None:
        return None if seq.stop_reason in self.eos_token_ids else seq.stop_reason

    def text_ids(self, seq: Sequence) -> list[int]:
        """Return the output tokens that the text contains: no stop token, unless requested."""
        hidden = isinstance(seq.stop_reason, int) and not self.params.include_stop_str_in_output
        return seq.output_ids[:-1] if hidden else seq.output_ids

    def target_logprobs(self) -> list[Logprob]:
        """Return the log-probabilities of the prompt's own tokens that are known, in their order."""
        entries = (self.prompt_logprobs[i] for i in sorted(self.prompt_logprobs))
        return [next(iter(entry.values())) for entry in entries]  # its own comes first

    def all_prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """Return one entry for each prompt token, None for the first; None if not requested."""
        if self.params.prompt_logprobs is None:
            return None
        return [None, *(self.prompt_logprobs[i] for i in sorted(self.prompt_logprobs))]

    def decode_logprobs(
        self, entry: TokenLogprobs, seq: Sequence, position: int
    ) -> dict[int, Logprob]:
        """Return the log-probabilities at a position of the prompt or of the output."""
        first = seq.num_prompt if position >= seq.num_prompt else 0
        before = seq.token_ids[max(first, position - 4) : position]  # UTF-8 has at most 4 bytes
        return {token: Logprob(p, rank, self.decode(token, before)) for token, p, rank in entry}

    def decode(self, token: int, before: list[int]) -> str | None:
        """Return the text of a token. As in vLLM, the last token of a character has all of it."""
        if self.tokenizer is None:
            return None
        texts = (
            str(self.tokenizer.decode([*before[n:], token])) for n in range(len(before), -1, -1)
        )
        return next((text for text in texts if not text.endswith("\ufffd")), "")

    @property
    def num_tokens(self) -> tuple[int, int]:
        """Prompt tokens (0 before the first output token), and output tokens of all samples."""
        started = self.metrics.first_token_time is not None
        num_output = sum(sample.seq.num_output for sample in self.samples)
        return self.samples[0].seq.num_prompt * started, num_output


class OutputProcessor:
    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase | None", eos_token_ids: frozenset[int]
    ) -> None:
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.requests: dict[str, Request] = {}
        self.finished: list[Output] = []  # not returned to the caller yet
        # Samples whose tokens are processed one by one: streams, stop strings, log-probabilities.
        self.per_token_samples: dict[Sequence, Sample] = {}
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
        asked: Params,
        returned_by_step: bool,
        stream: bool,
        search: Search | None = None,
    ) -> Request:
        params, task = (asked, None) if isinstance(asked, SamplingParams) else (NO_TEXT, asked)
        samples = [Sample(seq) for seq in seqs]
        metrics = RequestMetrics(time.monotonic())
        request_id = seqs[0].request_id
        request = Request(
            request_id,
            samples,
            prompt,
            params,
            metrics,
            num_unfinished=len(samples),
            returned_by_step=returned_by_step,
            stream=stream,
            eos_token_ids=frozenset() if params.ignore_eos else self.eos_token_ids,
            tokenizer=self.tokenizer if params.detokenize else None,
            search=search,
            task=task,
        )
        self.requests[request_id] = request
        needs_text = request.tokenizer is not None and bool(stream or params.stop)
        if search is None and (needs_text or params.logprobs is not None):
            for sample in samples:
                self.per_token_samples[sample.seq] = sample
                if needs_text and request.tokenizer is not None:
                    sample.detokenizer = Detokenizer(request.tokenizer, params.skip_special_tokens)
        return request

    def note_scheduled(self, seqs: list[Sequence]) -> None:
        now = time.monotonic()
        for seq in seqs:
            metrics = self.requests[seq.request_id].metrics
            if metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = now

    def process(
        self, step: InFlightStep, output: StepOutput, updated: list[Sequence]
    ) -> list[tuple[Sequence, str, str | None]]:
        """Process the results of a step. Returns (sequence, finish_reason, stop_reason) for each
        sequence that ends with a stop string, its grammar or its prompt, and for all samples of a
        request that ends with an error.
        """
        prompts: list[Sequence] = []  # that are complete and sample nothing
        if step.plan.chunks:
            self._note_first_tokens(updated)
            prompts = [seq for seq in updated if seq.yields in (Yield.HIDDEN_STATE, Yield.NOTHING)]
        self.num_output_tokens += len(updated) - len(prompts)
        failed: list[Request] = []
        ended: list[tuple[Sequence, str, str | None]] = [(seq, "stop", None) for seq in prompts]
        reported = output.logprobs or output.prompt_logprobs or output.candidates
        if prompts or output.errors or reported:
            sequences = step.sequences()
            for row, error in output.errors.items():  # it got no token, which ended it
                seq = sequences[row]
                if (request := self._request_of(seq)) is None:
                    continue
                if not isinstance(error, OutputComplete):
                    self._note_error(request, error)
                elif seq.finish_reason == "error":  # and nothing else ended it before
                    ended.append((seq, "stop", None))
            for row, candidates in output.candidates.items():
                request = self._request_of(sequences[row])
                if request is not None and request.search is not None:
                    request.search.receive(request, sequences[row], candidates)
            self._add_logprobs(step, output, sequences, failed)
            self._complete_tasks(prompts, output, sequences, failed)
        for seq in updated if self.per_token_samples else ():
            with self._contain_errors(self.requests[seq.request_id], failed):
                if (stop := self._detokenize(seq)) is not None:
                    ended.append((seq, "stop", stop))
        return ended + [(sample.seq, "error", None) for r in failed for sample in r.samples]

    def _request_of(self, seq: Sequence) -> Request | None:
        """The request of a sequence, unless it has ended. Another may have its id by now."""
        request = self.requests.get(seq.request_id)
        samples = request.samples[seq.index : seq.index + 1] if request else []
        return request if any(sample.seq is seq for sample in samples) else None

    @contextmanager
    def _contain_errors(self, request: Request, failed: list[Request]) -> Iterator[None]:
        """Add the request to `failed` if the block, which works on its data only, raises."""
        try:
            yield
        except Exception as error:
            self._note_error(request, error)
            failed.append(request)

    def _note_error(self, request: Request, error: Exception) -> None:
        request.error = error
        if request.returned_by_step:  # `step` returns the result with finish_reason "error"
            logger.error("request %s failed", request.request_id, exc_info=error)

    def sequences(self) -> list[Sequence]:
        return [sample.seq for request in self.requests.values() for sample in request.samples]

    def collect_finished(self, seqs: list[Sequence]) -> None:
        """Build the output of each request of `seqs` whose samples have all finished."""
        finished = [seq.request_id for seq in seqs if seq.status is Status.FINISHED]
        for request_id in dict.fromkeys(finished):
            request = self.requests[request_id]
            samples = request.samples
            request.num_unfinished = sum(s.seq.status is not Status.FINISHED for s in samples)
            if request.num_unfinished == 0:
                self._end(request)
                if request.returned_by_step and request.output is not None:
                    self.finished.append(request.output)

    def end_aborted(self, request: Request) -> None:
        """Remove an aborted request. Its output ends here, and `step` does not return it."""
        for sample in request.samples:
            if sample.seq.finish_reason == "abort" and sample.detokenizer is not None:
                with self._contain_errors(request, []):
                    sample.text += sample.detokenizer.flush()
        self._end(request)

    def _end(self, request: Request) -> None:
        del self.requests[request.request_id]
        for sample in request.samples:
            self.per_token_samples.pop(sample.seq, None)
        request.metrics.finished_time = time.monotonic()
        if not request.stream:
            search = request.search
            request.output = search.output(request) if search else self._request_output(request)
        request.ended = True

    def _note_first_tokens(self, updated: list[Sequence]) -> None:
        now = time.monotonic()
        for seq in updated:
            metrics = self.requests[seq.request_id].metrics
            if metrics.first_token_time is None:
                metrics.first_token_time = now
                self.num_prompt_tokens += seq.num_prompt

    def _add_logprobs(
        self,
        step: InFlightStep,
        output: StepOutput,
        sequences: dict[int, Sequence],
        failed: list[Request],
    ) -> None:
        for row, logprobs in output.logprobs.items():
            sample = self.per_token_samples.get(sequences[row])
            # A token that was sampled after the end of its sequence is not in the output.
            if sample is not None and len(sample.logprobs) < sample.seq.num_output:
                request, seq = self.requests[sample.seq.request_id], sample.seq
                position = seq.num_prompt + len(sample.logprobs)
                with self._contain_errors(request, failed):
                    sample.logprobs.append(request.decode_logprobs(logprobs, seq, position))
        for seq, chunk in zip(step.chunked, step.plan.chunks, strict=True):
            targets = output.prompt_logprobs.get(chunk.row, [])
            owner = self._request_of(seq)
            if targets and owner is not None:
                with self._contain_errors(owner, failed):
                    for position, entry in enumerate(
                        targets, chunk.start + chunk.logprobs_from + 1
                    ):
                        decoded = owner.decode_logprobs(entry, seq, position)
                        owner.prompt_logprobs[position] = decoded

    def _complete_tasks(
        self,
        prompts: list[Sequence],
        output: StepOutput,
        sequences: dict[int, Sequence],
        failed: list[Request],
    ) -> None:
        rows = {sequences[row]: row for row in output.hidden_states}
        for seq in prompts:
            request = self.requests[seq.request_id]
            with self._contain_errors(request, failed):
                if isinstance(request.task, PoolingParams):
                    request.embedding = request.task.pool(output.hidden_states[rows[seq]])
                else:
                    check_logprobs(request.target_logprobs())

    def _detokenize(self, seq: Sequence) -> str | None:
        """Append the text of the new tokens. Returns the stop string that it contains, if any."""
        sample = self.per_token_samples.get(seq)
        if sample is None or sample.detokenizer is None:
            return None
        request, start = self.requests[seq.request_id], len(sample.text)
        params = request.params
        sample.text += sample.detokenizer.add(request.text_ids(seq)[sample.num_detokenized :])
        sample.num_detokenized = seq.num_output
        if seq.status is Status.FINISHED:
            sample.text += sample.detokenizer.flush()
        if params.min_tokens and seq.num_output <= params.min_tokens:
            return None
        # The stop string that is complete first ends the text, as if characters were added one by
        # one. If several are complete at the same character, the first in the list does.
        matches = [
            (at + len(stop), stop)
            for stop in params.stop or ()
            if (at := sample.text.find(stop, max(0, start - len(stop) + 1))) >= 0
        ]
        if not matches:
            return None
        end, stop = min(matches, key=lambda match: match[0])
        sample.text = sample.text[: end if params.include_stop_str_in_output else end - len(stop)]
        return stop

    def _request_output(self, request: Request) -> Output:
        seqs = [sample.seq for sample in request.samples]
        request.metrics.num_preemptions = sum(seq.preemptions for seq in seqs)
        first = seqs[0]
        if isinstance(request.task, PoolingParams):
            return EmbeddingRequestOutput(
                request_id=first.request_id,
                prompt_token_ids=first.token_ids,
                outputs=EmbeddingOutput(request.embedding),
                finished=True,
                num_cached_tokens=first.num_cached_tokens,
                metrics=request.metrics,
            )
        if isinstance(request.task, ScoringParams):
            entries = request.target_logprobs()
            return LoglikelihoodOutput(
                logprob=sum(entry.logprob for entry in entries),
                is_greedy=all(entry.rank == 1 for entry in entries),
                token_logprobs=[entry.logprob for entry in entries],
                token_ids=first.targets,
                num_cached_tokens=first.num_cached_tokens,
                request_id=first.request_id,
            )
        return RequestOutput(
            request_id=first.request_id,
            prompt=request.prompt,
            prompt_token_ids=first.token_ids[: first.num_prompt],
            outputs=[self._completion(sample, request) for sample in request.samples],
            finished=True,
            num_cached_tokens=first.num_cached_tokens,
            prompt_logprobs=request.all_prompt_logprobs(),
            metrics=request.metrics,
        )

    def _completion(self, sample: Sample, request: Request) -> CompletionOutput:
        seq, text, params = sample.seq, sample.text, request.params
        failed: list[Request] = []
        if sample.detokenizer is None and request.tokenizer is not None:
            with self._contain_errors(request, failed):
                detokenizer = Detokenizer(request.tokenizer, params.skip_special_tokens)
                text = detokenizer.decode(request.text_ids(seq))
        logprobs, total = None, None
        if params.logprobs is not None:
            logprobs = sample.logprobs
            # The sampled token comes first in each entry.
            total = sum(next(iter(entry.values())).logprob for entry in logprobs)
        return CompletionOutput(
            index=seq.index,
            text=text,
            token_ids=seq.output_ids,
            finish_reason="error" if failed else seq.finish_reason,
            stop_reason=request.stop_reason(seq),
            logprobs=logprobs,
            cumulative_logprob=total,
        )
