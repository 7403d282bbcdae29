"""LLMEngine: accepts requests, runs steps, and passes the results on.

    prompts --> InputProcessor.check --> add --> Scheduler ---- plan ----> runner
                                                 waiting, running          model, KV cache, rows
    RequestOutput <-- Task.receive, output <-- Scheduler.commit <-- StepOutput

It owns the scheduler and the requests. `run_step` is one step, and `run` is the loop.
"""

import time
from collections.abc import Iterable, Iterator
from typing import Any

from nanovllm.config import EngineConfig
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.input_processor import InputProcessor
from nanovllm.engine.observer import NO_OBSERVER
from nanovllm.engine.progress import Progress
from nanovllm.engine.recovery import revert_in_flight
from nanovllm.engine.request import Request
from nanovllm.engine.scheduler import InFlightStep, Scheduler
from nanovllm.engine.sequence import Sequence, Status
from nanovllm.engine.threads import SharedEngine, hold_interrupt, run_by_one_thread
from nanovllm.inputs import Prompt
from nanovllm.plan import RowResult, Runner, StepOutput
from nanovllm.utils.checks import check_scalar
from nanovllm.utils.errors import GrammarError
from nanovllm.utils.log import logger

ONLY_A_TOKEN = RowResult()


class LLMEngine(SharedEngine):
    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        input_processor: InputProcessor,
        block_manager: BlockManager | None = None,
    ) -> None:
        """block_manager: manages the blocks of the runner. None: a new BlockManager."""
        super().__init__()
        sizes = runner.num_blocks, config.block_size, config.enable_prefix_caching
        block_manager = block_manager or BlockManager(*sizes)
        self.input_processor = input_processor
        self.scheduler = Scheduler(
            block_manager, config.max_num_seqs, config.token_budget, config.scheduling_policy
        )
        self.runner = runner
        overlaps = config.async_scheduling
        self.async_scheduling = runner.async_scheduling if overlaps is None else overlaps
        self.observer = NO_OBSERVER  # see nanovllm/cli/trace/trace.py
        self.checkpoint: Any = None  # for features/kv/disk_cache.py
        self.requests = {}
        self.finished: dict[str, Any] = {}  # outputs that `step` has not returned yet, by id
        self.progress = Progress()  # of all requests
        self.num_requests = 0

    # ---- requests ----

    def add_request(
        self, prompt: Prompt, sampling_params: Any = None, request_id: str | None = None
    ) -> str:
        """Queue a request and return its id. Raises ValueError or TypeError if it can never run."""
        name = "request_id of add_request(prompt, sampling_params, request_id)"
        request_id = check_scalar(name, request_id or "", str)
        [request] = self.input_processor.check([(prompt, sampling_params)], Progress())
        request.request_id, request.returned_by_step = request_id, True
        self.add([request])
        return request.request_id

    def submit(self, prompt: Prompt, sampling_params: Any = None, stream: bool = False) -> Request:
        """Queue a request. The caller reads its `output` at the end, or its stream at any time."""
        [request] = self.input_processor.check([(prompt, sampling_params)], Progress(), stream)
        self.add([request])
        return request

    def add(self, requests: list[Request]) -> None:
        """Queue requests. After Ctrl-C no more are queued, and KeyboardInterrupt is raised."""
        with hold_interrupt() as pressed:
            for request in requests:
                if pressed:
                    break
                with self.lock:
                    self._add(request)

    def _add(self, request: Request) -> None:
        """Give a request its id, and queue its first sequence. The lock is held."""
        number = self.num_requests
        while not request.request_id and self._is_known(str(number)):  # a caller has chosen it
            number += 1
        request_id = request.request_id or str(number)
        if self._is_known(request_id):
            raise ValueError(f"request_id {request_id!r} is in use")
        first = request.samples[0].seq
        first.request, first.arrival = request, self.num_requests
        first.request_id = request.request_id = request_id
        request.metrics.arrival_time = time.monotonic()
        request.task.start(request)
        self.num_requests += 1
        try:
            self.requests[request_id] = request
            self.scheduler.add(first)
        except BaseException:
            self.requests.pop(request_id, None)
            raise

    def _is_known(self, request_id: str) -> bool:
        return request_id in self.requests or request_id in self.finished

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """End one or several requests in any state, and free their blocks. Ignores unknown ids."""
        ids = [request_id] if isinstance(request_id, str) else request_id
        self.abort([request for i in ids if (request := self.requests.get(i)) is not None])

    def abort_all(self) -> None:
        self.abort(list(self.requests.values()))

    def _abort_request(self, request: Request) -> None:
        if self.requests.get(request.request_id) is request:  # it has not ended
            request.returned_by_step = False
            for seq in request.seqs:
                self.scheduler.finish(seq, "abort")
            self._end([request])

    def has_unfinished_requests(self) -> bool:
        """Return whether `step` has requests left to run or outputs to return."""
        self.run_pending_aborts()
        return bool(self.requests or self.finished)

    # ---- steps ----

    def run(self, requests: list[Request]) -> Iterator[None]:
        """Run steps until the requests have ended. Yields after every step, also the last one."""
        num_ended = 0  # the first `num_ended` requests have ended
        while num_ended < len(requests):  # also if others ran the last steps since the last yield
            self.run_step()
            while num_ended < len(requests) and requests[num_ended].ended:
                num_ended += 1
            yield

    def step(self) -> list[Any]:
        """Run one step. Returns the outputs of requests that finished since the last call."""
        self.run_step()
        finished: dict[str, Any] = {}
        try:
            with self.lock:
                finished, self.finished = self.finished, {}
            return list(finished.values())
        except BaseException:  # Ctrl-C between any two lines
            with self.lock:
                self.finished = finished | self.finished
            raise

    @run_by_one_thread
    def run_step(self) -> None:
        """Plan and launch one step, and commit the steps whose results are due.

        With async scheduling, the previous step is due while the device computes the new one. All
        steps are due if none can be launched, or if the next plan depends on the drafts of this
        one. After an error or Ctrl-C, which this method raises, all requests can continue.
        """
        step = self._schedule()
        if step is not None:
            step.get_output = self.runner.run(step.plan)
        num_left = 1 if step is not None and self.async_scheduling and not step.is_due else 0
        while len(self.scheduler.in_flight) > num_left:
            oldest = self.scheduler.in_flight[0]
            assert oldest.get_output is not None
            self._commit(oldest, oldest.get_output())

    def _schedule(self) -> InFlightStep | None:
        """Plan a step. This changes queues, blocks and the prefix cache."""
        with self.lock:
            self.observer.begin()
            step = self.scheduler.schedule()
            if step is not None:
                for new_row in step.plan.new_rows:
                    metrics = step.seqs[new_row.row].request.metrics
                    metrics.first_scheduled_time = metrics.first_scheduled_time or time.monotonic()
            elif self.requests and not self.scheduler.has_work():
                raise RuntimeError("requests are unfinished but none can run: a bug in the engine")
            self.observer.scheduled(step)
        return step

    def _commit(self, step: InFlightStep, output: StepOutput) -> None:
        """Process the results of a step. This changes sequences, queues, blocks and requests."""
        with hold_interrupt(), self.lock:
            self.observer.begin()
            updated = self.scheduler.commit(step, output.token_ids)
            for seq in updated if step.plan.chunks else ():
                if (metrics := seq.request.metrics).first_token_time is None:
                    metrics.first_token_time = time.monotonic()
                    for progress in (self.progress, seq.request.progress):
                        progress.start(seq.request)
            for row, error in output.errors.items():
                if step.seqs[row].request is not None:  # it has not ended
                    self._record_error(step.seqs[row].request, error)
            results = {step.seqs[row]: result for row, result in output.results.items()}
            for seq in updated:
                if seq.request.is_watched:
                    results.setdefault(seq, ONLY_A_TOKEN)
            if self._receive(results):
                seqs = (*updated, *results)
                self._end([seq.request for seq in seqs if seq.finish_reason is not None])
                self.observer.committed(step, updated, output)

    def _receive(self, results: dict[Sequence, RowResult]) -> bool:
        """Pass results to the tasks. Returns False if an error reverted all steps in flight."""
        for seq, result in results.items():
            request = seq.request
            if request is None:  # it ended while the step was in flight
                continue
            try:
                request.task.receive(request, seq, result)
            except Exception as error:  # ends only this request
                self._record_error(request, error)
                for other in request.seqs:
                    other.finish_reason, other.stop_reason = "error", None
                if request.task.changes_queues:  # they may be inconsistent
                    self._revert(error)
                    return False
        return True

    def _record_error(self, request: Request, error: Exception) -> None:
        request.error = error
        progress = request.progress
        if progress.error is None and not isinstance(error, GrammarError):
            progress.error = error  # ends the call; with a GrammarError, other requests continue
        if request.returned_by_step:  # `step` returns the result with finish_reason "error"
            logger.error("request %s failed", request.request_id, exc_info=error)

    def _end(self, requests: Iterable[Request | None]) -> None:
        """Finish sequences with a finish reason. Make the output of each request that has ended."""
        for request in dict.fromkeys(requests):
            if request is None:  # it has ended before
                continue
            for seq in request.seqs:
                if seq.finish_reason is not None:
                    self.scheduler.finish(seq, seq.finish_reason, seq.stop_reason)
            if all(seq.status is Status.FINISHED for seq in request.seqs):
                self._make_output(request)
                request.ended = True
                for progress in (self.progress, request.progress):
                    progress.end(request)
                if request.stream:
                    request.progress.changed.add(request)
                self.requests.pop(request.request_id, None)
                # A step in flight refers to the sequences, but must not keep the request in memory.
                for seq in request.seqs:
                    seq.request = None

    def _make_output(self, request: Request) -> None:
        request.metrics.finished_time = time.monotonic()
        request.metrics.num_preemptions = sum(seq.preemptions for seq in request.seqs)
        if request.stream:
            return
        try:
            request.output = request.task.output(request)
        except Exception as error:
            self._record_error(request, error)
            request.output = request.task.error_output(request)
        if request.returned_by_step and request.output is not None:
            self.finished[request.request_id] = request.output

    def _revert(self, error: BaseException) -> None:
        """Restore a state from which all requests can continue. Any line may have failed."""
        requests = list(self.requests.values())
        revert_in_flight(self.scheduler, [seq for r in requests for seq in r.task.rewind(r)])
        self._end(requests)
        self.observer.reverted(error)

    # ---- the state of the engine ----

    def reset_prefix_cache(self) -> bool:
        """See `LLM.reset_prefix_cache`."""
        with hold_interrupt(), self.lock:
            return self.scheduler.block_manager.reset_prefix_cache()

    def stats(self) -> dict[str, int | float]:
        """See `LLM.stats`. Does not wait for the lock: a step may change counters meanwhile."""
        scheduler = self.scheduler
        blocks = scheduler.block_manager
        self.run_pending_aborts()
        others = {} if scheduler.speculation is None else scheduler.speculation.stats()
        return {
            "running": len(scheduler.running),
            "waiting": scheduler.num_unfinished - len(scheduler.running),
            "blocks_in_use": blocks.num_blocks - blocks.num_available,
            "blocks_evictable": len(blocks.evictable),
            "blocks_free": len(blocks.free),
            "prefix_hit_rate": scheduler.cached_tokens / max(1, scheduler.prompt_tokens),
            "preemptions": scheduler.preemptions,
            "evictions": blocks.evictions,
            "recomputed_tokens": scheduler.recomputed_tokens,
            "prompt_tokens": self.progress.num_prompt_tokens,
            "output_tokens": self.progress.num_output_tokens,
            **(blocks.stats() | others),
        }
