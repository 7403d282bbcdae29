"""OutputProcessor: from the tokens of sequences to the results of requests.

It owns the requests: their text, log-probabilities, stop strings and metrics. It detects the stop
strings that end a sequence, and builds a RequestOutput when all samples of a request have finished.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from nanovllm.api.log import logger
from nanovllm.api.outputs import CompletionOutput, RequestMetrics, RequestOutput
from nanovllm.api.sampling_params import SamplingParams
from nanovllm.engine.detokenizer import Detokenizer, Tokenizer
from nanovllm.engine.input_processor import Params
from nanovllm.engine.request import Call, Request, Sample, Search
from nanovllm.engine.scheduler import InFlightStep
from nanovllm.engine.sequence import Sequence, Status
from nanovllm.features.embeddings.pooling import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingParams,
)
from nanovllm.features.loglikelihood import LoglikelihoodOutput, ScoringParams, check_logprobs
from nanovllm.features.structured import OutputComplete
from nanovllm.plan import StepOutput, Yield

# A RequestOutput, EmbeddingRequestOutput or LoglikelihoodOutput. A union would make every program that
# runs the loop check which of them it gets.
Output: TypeAlias = Any
NO_IDS: frozenset[int] = frozenset()  # each other empty frozenset takes 216 bytes
NO_TEXT = SamplingParams(detokenize=False)  # stands for those of a request that samples nothing


class OutputProcessor:
    def __init__(self, tokenizer: Tokenizer | None, eos_token_ids: frozenset[int]) -> None:
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.requests: dict[str, Request] = {}
        self.finished: dict[str, Output] = {}  # by the id of the request; not returned yet
        # Samples whose tokens are processed one by one: streams, stop strings, log-probabilities.
        self.per_token_samples: dict[Sequence, Sample] = {}
        # Of the last step: (sequence, finish_reason, stop_reason) of each that ends with a stop string,
        # its grammar or its prompt, and the requests whose own data raised an error.
        self.ended: list[tuple[Sequence, str, int | str | None]] = []
        self.failed: list[Request] = []
        self.num_prompt_tokens = 0  # of requests that have their first token
        self.num_output_tokens = 0

    def is_known(self, request_id: str) -> bool:
        return request_id in self.requests or request_id in self.finished

    def add(
        self,
        seqs: list[Sequence],
        prompt: str | None,
        asked: Params,
        returned_by_step: bool,
        stream: bool,
        search: Search | None = None,
        call: Call | None = None,
    ) -> Request:
        params, task = (asked, None) if isinstance(asked, SamplingParams) else (NO_TEXT, asked)
        request = Request(
            [Sample(seq) for seq in seqs],
            prompt,
            params,
            RequestMetrics(time.monotonic()),
            returned_by_step,
            stream,
            eos_token_ids=NO_IDS if params.ignore_eos else self.eos_token_ids,
            tokenizer=self.tokenizer if params.detokenize else None,
            search=search,
            task=task,
            call=call,
        )
        needs_text = request.tokenizer is not None and bool(stream or params.stop)
        if search is None and (stream or needs_text or params.logprobs is not None):
            for sample in request.samples:
                self.per_token_samples[sample.seq] = sample
                if needs_text and request.tokenizer is not None:
                    sample.detokenizer = Detokenizer(request.tokenizer, params.skip_special_tokens)
        self.requests[request.request_id] = request
        return request

    def remove(self, request: Request) -> None:
        for sample in request.samples:
            self.per_token_samples.pop(sample.seq, None)
        del self.requests[request.request_id]

    def note_scheduled(self, seqs: list[Sequence]) -> None:
        now = time.monotonic()
        for seq in seqs:
            metrics = self.requests[seq.request_id].metrics
            if metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = now

    def process(self, step: InFlightStep, output: StepOutput, updated: list[Sequence]) -> None:
        """Process the results of a step. `ends` then says which sequences end with it."""
        self.ended, self.failed = [], []
        prompts: list[Sequence] = []  # that are complete and sample nothing
        if step.plan.chunks:
            self._note_first_results(updated)
            prompts = [seq for seq in updated if seq.yields in (Yield.HIDDEN_STATE, Yield.NOTHING)]
        self.num_output_tokens += len(updated) - len(prompts)
        if -1 in output.token_ids:  # -1 stands for a token that could not be sampled
            self.num_output_tokens -= sum(seq.finish_reason == "error" for seq in updated)
        self.ended += [(seq, "stop", None) for seq in self._note_errors(step, output)]
        for row, candidates in output.candidates.items():
            request = self._request_of(step.seqs[row])
            if request is not None and request.search is not None:
                with self._contain_errors(request):
                    request.search.receive(request, step.seqs[row], candidates)
        self._add_logprobs(step, output)
        self._finish_prompts(prompts, step, output)
        for seq in updated if self.per_token_samples else ():
            request = self.requests[seq.request_id]
            if request.stream and request.call is not None:
                request.call.changed.add(request)
            with self._contain_errors(request):
                if (stop := self._detokenize(seq)) is not None:
                    self.ended.append((seq, "stop", stop))

    def ends(self) -> list[tuple[Sequence, str, int | str | None]]:
        """Return `ended`, and all samples of the requests that end with an error."""
        samples = [sample for request in self.failed for sample in request.samples]
        return [*self.ended, *((sample.seq, "error", None) for sample in samples)]

    def _note_first_results(self, seqs: list[Sequence]) -> None:
        now = time.monotonic()
        for seq in seqs:
            request = self.requests[seq.request_id]
            if request.metrics.first_token_time is None:
                request.metrics.first_token_time = now
                self.num_prompt_tokens += seq.num_prompt
                if request.call is not None:
                    request.call.num_prompt_tokens += seq.num_prompt
                    request.call.started.add(request)

    def _note_errors(self, step: InFlightStep, output: StepOutput) -> list[Sequence]:
        """Note the errors of rows, which got no token. Returns those that their grammars complete."""
        complete = []
        for row, error in output.errors.items():
            seq = step.seqs[row]
            if (request := self._request_of(seq)) is None:
                continue
            if not isinstance(error, OutputComplete):
                self._note_error(request, error)
            elif seq.finish_reason == "error":  # nothing else ended it before
                complete.append(seq)
        return complete

    def _finish_prompts(
        self, prompts: list[Sequence], step: InFlightStep, output: StepOutput
    ) -> None:
        """Make the embeddings, or check the log-probabilities, of prompts that are complete."""
        hidden = {step.seqs[row]: state for row, state in output.hidden_states.items()}
        for seq in prompts:
            request = self.requests[seq.request_id]
            with self._contain_errors(request):
                if isinstance(request.task, PoolingParams):
                    request.embedding = request.task.pool(hidden[seq])
                else:
                    check_logprobs(request.target_logprobs())
                self.ended.append((seq, "stop", None))

    def _request_of(self, seq: Sequence) -> Request | None:
        """The request of a sequence, unless it has ended. Another may have its id by now."""
        request = self.requests.get(seq.request_id)
        samples = request.samples[seq.index : seq.index + 1] if request else []
        return request if any(sample.seq is seq for sample in samples) else None

    @contextmanager
    def _contain_errors(self, request: Request) -> Iterator[None]:
        """Let an error in the block, which works on the data of one request only, end it alone."""
        try:
            yield
        except Exception as error:
            self._note_error(request, error)
            self.failed.append(request)

    def _note_error(self, request: Request, error: Exception) -> None:
        request.error = error
        if request.call is not None and request.call.error is None:
            request.call.error = error
        if request.returned_by_step:  # `step` returns the result with finish_reason "error"
            logger.error("request %s failed", request.request_id, exc_info=error)

    def sequences(self) -> list[Sequence]:
        return [sample.seq for request in self.requests.values() for sample in request.samples]

    def unfinished(self) -> list[Sequence]:
        """Return all sequences that a step can compute, after one that failed between two lines.

        Results that were committed and not processed are removed, and so computed again.
        """
        found = []
        for request in self.requests.values():
            for sample in request.samples:
                self._remove_unprocessed(sample, request)
            first, *others = [sample.seq for sample in request.samples]
            if request.search is None and first.status is not Status.FINISHED:
                first.forks = [] if first.num_output else others
            for seq in first.forks:
                seq.status = Status.NEW
            found += [first] if first.forks else [first, *others]
        return [seq for seq in found if seq.status is not Status.FINISHED]

    def _remove_unprocessed(self, sample: Sample, request: Request) -> None:
        seq, params, search = sample.seq, request.params, request.search
        if search is None or seq not in search.candidates:
            seq.awaits_token = False
        if seq not in self.per_token_samples:
            return
        processed = seq.num_output if params.logprobs is None else len(sample.logprobs)
        if sample.detokenizer is not None:
            processed = min(processed, sample.num_detokenized)
        if processed < seq.num_output:
            del seq.token_ids[seq.num_prompt + processed :], sample.logprobs[processed:]
            seq.status, seq.finish_reason, seq.stop_reason = Status.NEW, None, None

    def collect_finished(self, seqs: list[Sequence]) -> None:
        """Build the output of each request of `seqs` whose samples have all finished."""
        finished = [seq.request_id for seq in seqs if seq.status is Status.FINISHED]
        for request_id in dict.fromkeys(finished):
            request = self.requests[request_id]
            if request.num_unfinished == 0:
                self._make_output(request)
                if request.returned_by_step and request.output is not None:
                    self.finished[request_id] = request.output
                self._end(request)

    def end_aborted(self, request: Request) -> None:
        """Remove an aborted request. Its output ends here, and `step` does not return it."""
        for sample in request.samples:
            if sample.seq.finish_reason == "abort" and sample.detokenizer is not None:
                with self._contain_errors(request):
                    sample.text += sample.detokenizer.flush()
        self._make_output(request)
        self._end(request)

    def _end(self, request: Request) -> None:
        request.end()
        self.remove(request)

    def _make_output(self, request: Request) -> None:
        request.metrics.finished_time = time.monotonic()
        if request.stream:
            return
        search = request.search
        with self._contain_errors(request):
            request.output = search.output(request) if search else self._output(request)
        if request.output is None and search is None and request.task is None:
            # Nothing but its tokens is known not to raise an error.
            seqs = [sample.seq for sample in request.samples]
            outputs = [CompletionOutput(s.index, "", s.output_ids, "error") for s in seqs]
            ids = seqs[0].token_ids[: seqs[0].num_prompt]
            request.output = RequestOutput(
                request.request_id, request.prompt, ids, outputs, True, 0, None, request.metrics
            )

    def _add_logprobs(self, step: InFlightStep, output: StepOutput) -> None:
        for row, logprobs in output.logprobs.items():
            sample = self.per_token_samples.get(step.seqs[row])
            # A token that was sampled after the end of its sequence is not in the output.
            if sample is not None and len(sample.logprobs) < sample.seq.num_output:
                request, seq = self.requests[sample.seq.request_id], sample.seq
                position = seq.num_prompt + len(sample.logprobs)
                with self._contain_errors(request):
                    sample.logprobs.append(request.decode_logprobs(logprobs, seq, position))
        for chunk in step.plan.chunks:
            seq, targets = step.seqs[chunk.row], output.prompt_logprobs.get(chunk.row, [])
            if targets and (owner := self._request_of(seq)) is not None:
                with self._contain_errors(owner):
                    for i, entry in enumerate(targets, chunk.start + chunk.logprobs_from + 1):
                        owner.prompt_logprobs[i] = owner.decode_logprobs(entry, seq, i)

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

    def _output(self, request: Request) -> Output:
        seqs = [sample.seq for sample in request.samples]
        first, request_id = seqs[0], request.request_id
        cached, metrics = first.num_cached_tokens, request.metrics
        metrics.num_preemptions = sum(seq.preemptions for seq in seqs)
        if isinstance(request.task, PoolingParams):
            embedding = EmbeddingOutput(request.embedding or [])
            return EmbeddingRequestOutput(
                request_id, first.token_ids, embedding, True, cached, metrics
            )
        if isinstance(request.task, ScoringParams):
            entries = request.target_logprobs()
            return LoglikelihoodOutput(
                logprob=sum(entry.logprob for entry in entries),
                is_greedy=all(entry.rank == 1 for entry in entries),
                token_logprobs=[entry.logprob for entry in entries],
                token_ids=first.targets,
                num_cached_tokens=cached,
                request_id=request_id,
            )
        return RequestOutput(
            request_id=request_id,
            prompt=request.prompt,
            prompt_token_ids=first.token_ids[: first.num_prompt],
            outputs=[self._completion(sample, request) for sample in request.samples],
            finished=True,
            num_cached_tokens=cached,
            prompt_logprobs=request.all_prompt_logprobs(),
            metrics=metrics,
        )

    def _completion(self, sample: Sample, request: Request) -> CompletionOutput:
        seq, text, params = sample.seq, sample.text, request.params
        finish_reason = seq.finish_reason
        if sample.detokenizer is None and request.tokenizer is not None:
            finish_reason = "error"  # unless the text can be decoded
            with self._contain_errors(request):
                detokenizer = Detokenizer(request.tokenizer, params.skip_special_tokens)
                text, finish_reason = detokenizer.decode(request.text_ids(seq)), seq.finish_reason
        logprobs, total = None, None
        if params.logprobs is not None:
            logprobs = sample.logprobs
            # The sampled token comes first in each entry.
            total = sum(next(iter(entry.values())).logprob for entry in logprobs)
        return CompletionOutput(
            index=seq.index,
            text=text,
            token_ids=seq.output_ids,
            finish_reason=finish_reason,
            stop_reason=request.stop_reason(seq),
            logprobs=logprobs,
            cumulative_logprob=total,
        )
