"""LLMEngine: accepts requests, runs steps, and passes the results on.

    prompts --> InputProcessor.check --> add --> Scheduler ---- plan ----> runner
                                                 waiting, running          model, KV cache, rows
    RequestOutput <-- Task.receive, output <-- Scheduler.commit <-- StepOutput

It owns the scheduler and the requests. `run_step` is one step, and `run` is the loop.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from nanovllm.config import EngineConfig
from nanovllm.engine import results
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.input_processor import InputProcessor
from nanovllm.engine.observer import NO_OBSERVER
from nanovllm.engine.progress import Progress
from nanovllm.engine.recovery import revert_in_flight
from nanovllm.engine.request import Request
from nanovllm.engine.scheduler import InFlightStep, Scheduler
from nanovllm.engine.threads import EngineLocks, hold_interrupt
from nanovllm.inputs import Prompt
from nanovllm.plan import Runner, StepOutput
from nanovllm.utils.checks import check_scalar


class LLMEngine:
    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        input_processor: InputProcessor,
        block_manager: BlockManager | None = None,
    ) -> None:
        """block_manager: manages the blocks of the runner. None: a new BlockManager."""
        self._locks = EngineLocks()
        self.lock = self._locks.lock
        self._to_abort: deque[Request] = deque()
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
        self.blocked = ""  # why requests are refused now, as after `LLM.sleep`
        self.requests: dict[str, Request] = {}  # those that have not ended, by id
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
        request.request_id = request_id
        request.returned_by_step = True
        self.add([request])
        return request.request_id

    def submit(self, prompt: Prompt, sampling_params: Any = None, stream: bool = False) -> Request:
        """Queue a request. The caller reads its `output` at the end, or its stream at any time."""
        [request] = self.input_processor.check([(prompt, sampling_params)], Progress(), stream)
        self.add([request])
        return request

    def add(self, requests: list[Request]) -> None:
        """Queue requests."""
        self._locks.check_process()
        with hold_interrupt(), self.lock:
            self.check_blocked()
            for request in requests:
                self._add(request)

    def check_blocked(self) -> None:
        """Raise RuntimeError if requests are refused now."""
        if self.blocked:
            raise RuntimeError(self.blocked)

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
        except BaseException:  # as of a policy
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

    def abort(self, requests: Iterable[Request], wait: bool = True) -> None:
        """End the requests that are unfinished. A newer request with the same id is not affected.

        wait: whether to wait for the lock. A stream must not, because the garbage collector can
            close it while this thread holds the lock. Its requests then end before the next step.
        """
        self._to_abort.extend(requests)
        self._run_pending_aborts(wait)

    def _run_pending_aborts(self, wait: bool = True) -> None:
        if self._to_abort:
            with hold_interrupt():
                if self.lock.acquire(blocking=wait):
                    try:
                        while self._to_abort:
                            self._abort_request(self._to_abort.popleft())
                    finally:
                        self.lock.release()

    def _abort_request(self, request: Request) -> None:
        """End a request in any state, unless it has ended. The lock is held."""
        if self.requests.get(request.request_id) is request:  # it has not ended
            request.returned_by_step = False
            for seq in request.seqs:
                self.scheduler.finish(seq, "abort")
            results.end(self, [request])

    def has_unfinished_requests(self) -> bool:
        """Return whether `step` has requests left to run or outputs to return."""
        self._run_pending_aborts()
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

    def run_step(self) -> None:
        """Run one step for the requests of all threads, or wait for the one that another runs.

        After an error or Ctrl-C, which this method raises, all requests can continue. An error
        while results are committed, which is a bug in the engine, ends them.
        """
        with self._locks.one_step() as is_mine:
            if not is_mine:
                return
            try:
                if any(step.get_output is None for step in self.scheduler.in_flight):
                    with hold_interrupt(), self.lock:  # Ctrl-C came again before `_revert`
                        self._revert(KeyboardInterrupt())
                self._run_pending_aborts()
                self._run_step()
                self._run_pending_aborts()
            except BaseException as error:
                with hold_interrupt(), self.lock:
                    self._revert(error)
                raise

    def _run_step(self) -> None:
        """Plan and launch one step, and commit the steps whose results are due.

        With async scheduling, the previous step is due while the device computes the new one. All
        steps are due if none can be launched, or if the next plan depends on the drafts of this
        one.
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
            try:
                updated = self.scheduler.commit(step, output.token_ids)
                for seq in updated if step.plan.chunks else ():
                    if (metrics := seq.request.metrics).first_token_time is None:
                        metrics.first_token_time = time.monotonic()
                        for progress in (self.progress, seq.request.progress):
                            progress.start(seq.request)
                results.receive(self, step, updated, output)
            except Exception as error:  # it is not known what has been committed
                for request in self.requests.values():
                    results.fail(request, error)
                raise
            self.observer.committed(step, updated, output)

    def _revert(self, error: BaseException) -> None:
        """Restore a state from which all requests can continue. The lock is held."""
        requests = list(self.requests.values())
        # Samples that wait for the first one, which computes the prompt, are not queued.
        queued = (r.seqs[:1] if r.seqs[0].forks else r.seqs for r in requests)
        revert_in_flight(self.scheduler, [seq for seqs in queued for seq in seqs])
        results.end(self, requests)
        self.observer.reverted(error)

    # ---- the state of the engine ----

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Hold the lock while nothing runs: requests that are added meanwhile wait for the end.

        Raises RuntimeError if a request is unfinished or a step runs.
        """
        self._locks.check_process()
        self._run_pending_aborts()
        with self.lock:
            if self.requests or self._locks.is_stepping:
                raise RuntimeError(
                    "prefix cache and weights cannot be saved, loaded or freed while requests "
                    "run; wait for their end, or abort them"
                )
            yield

    def reset_prefix_cache(self) -> bool:
        """See `LLM.reset_prefix_cache`."""
        self._locks.check_process()
        self._run_pending_aborts()
        with hold_interrupt(), self.lock:
            return self.scheduler.block_manager.reset_prefix_cache()

    def stats(self) -> dict[str, int | float]:
        """See `LLM.stats`. Does not wait for the lock: a step may change counters meanwhile."""
        return self.progress.stats(self.scheduler)
