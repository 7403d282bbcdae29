"""EngineCore: the loop.

    while there is work:
        step = scheduler.schedule()     # changes queues and blocks
        wait = runner.run(step.plan)    # launches the step: changes the KV cache and the rows
        scheduler.commit(step, wait().token_ids)  # appends tokens to sequences

It is given its scheduler, its runner and its output processor. LLMEngine adds the requests. This
folder imports no torch.

Several threads may use an engine. One of them at a time runs a step, which serves the requests of
all; the others wait for its end. `lock` is not held while the runner works, so that requests can be
added and aborted during a step.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from nanovllm.engine.interrupt import DeferredInterrupt, defer_interrupt
from nanovllm.engine.observer import NO_OBSERVER
from nanovllm.engine.output_processor import OutputProcessor
from nanovllm.engine.request import Request
from nanovllm.engine.scheduler import InFlightStep, Scheduler
from nanovllm.plan import Runner, StepOutput, Yield

# Of many requests, so many are added or aborted at a time. Then the lock is free for so many seconds:
# a thread that waits for it would not get it if it were taken again at once.
BATCH_SIZE, HANDOVER = 1000, 1e-4


class EngineCore:
    def __init__(
        self, scheduler: Scheduler, runner: Runner, outputs: OutputProcessor, overlap: bool
    ) -> None:
        """With `overlap`, a step is planned and launched before the previous one is committed."""
        self.scheduler, self.runner, self.outputs = scheduler, runner, outputs
        self.max_in_flight = 1 if overlap else 0  # steps that `run_step` leaves uncommitted
        self.observer = NO_OBSERVER  # see nanovllm/tools/trace/trace.py
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._to_abort: deque[Request] = deque()
        self._step_lock = threading.Lock()  # held by the thread that runs a step
        self._stepping: int | None = None  # that thread

    def run_step(self) -> None:
        """Plan and launch one step, and commit the steps whose results are due.

        If another thread is running a step, this only waits for its end. If a step fails, the
        running sequences return to the waiting queue and the error is raised. The
        engine remains usable. Ctrl-C is raised when the step is complete; a second one at once.
        """
        with self._claim_step() as interrupt:
            if interrupt is None:
                return
            step = self._schedule()  # changes blocks and queues
            if step is not None:
                with interrupt:
                    step.wait = self.runner.run(step.plan)  # changes KV cache and rows
            # If async, the previous step is committed while the device works; if not, this one.
            while len(self.scheduler.in_flight) > (0 if step is None else self.max_in_flight):
                oldest = self.scheduler.in_flight[0]
                assert oldest.wait is not None
                with interrupt:
                    output = oldest.wait()  # waits for the device
                self._commit(oldest, output)  # changes sequences and the prefix cache

    @contextmanager
    def _claim_step(self) -> Iterator[DeferredInterrupt | None]:
        """Make this the thread that runs a step. If another runs one, wait for it and yield None."""
        if self._stepping == threading.get_ident():
            raise RuntimeError(
                "a logits processor cannot run the engine that calls it; use another LLM"
            )
        with defer_interrupt() as interrupt:
            if not self._step_lock.acquire(blocking=False):
                with interrupt, self._step_lock:
                    pass
                yield None
                return
            self._stepping = threading.get_ident()
            try:
                self._abort_noted()
                yield interrupt
            except BaseException as error:
                with self.lock:
                    self._revert(error)
                raise
            finally:
                self._stepping = None
                self._step_lock.release()
                self._abort_noted()

    def _schedule(self) -> InFlightStep | None:
        with self.lock:
            self.observer.begin()
            step = self.scheduler.schedule()
            if step is None and self.outputs.requests and not self.scheduler.has_work():
                raise RuntimeError("requests wait for nothing, which is a bug of the engine")
            if step is not None:
                self.outputs.record_scheduled([step.seqs[join.row] for join in step.plan.joins])
            self.observer.scheduled(step)
        return step

    def _commit(self, step: InFlightStep, output: StepOutput) -> None:
        with self.lock:
            self.observer.begin()
            updated = self.scheduler.commit(step, output.token_ids)
            self.outputs.process(step, output, updated)
            for request in self.outputs.failed:
                if request.task.yields is Yield.CANDIDATES and request.error is not None:
                    # It was changing its beams, so the queues may be in any state.
                    self._revert(request.error)
                    return
            endings = self.outputs.endings()
            for seq, ending in endings:
                self.scheduler.finish(seq, *ending)
            self.outputs.collect_finished([*updated, *(seq for seq, _ in endings)])
            self.observer.committed(step, updated, output)

    def _revert(self, error: BaseException) -> None:
        """Return to a state from which all requests go on, whichever line has failed."""
        self.scheduler.revert_in_flight(self.outputs.rewind())
        for seq, ending in self.outputs.endings():  # those that were not finished yet
            self.scheduler.finish(seq, *ending)
        self.outputs.collect_finished(self.outputs.sequences())
        self.observer.reverted(error)

    @property
    def lock(self) -> "threading.RLock":
        """Guards scheduler, requests and results. Raises RuntimeError in a forked process."""
        if os.getpid() != self._process:
            raise RuntimeError(
                "this LLM was made in another process and cannot be used in one forked from it; "
                "start the process with multiprocessing.get_context('spawn') and make an LLM there"
            )
        return self._lock

    def abort(self, requests: Iterable[Request]) -> None:
        """End the given requests that are unfinished. A newer request with the same id is not affected.

        The garbage collector calls this for an abandoned stream, in the middle of any code. It
        therefore never waits: while another call holds the lock, it only records the requests. They
        then end with the current step or before the next one.
        """
        self._to_abort.extend(requests)
        self._abort_noted()

    def _abort_noted(self) -> None:
        if not self._to_abort or self._lock._is_owned():  # type: ignore[attr-defined]
            return
        with defer_interrupt():
            while self._to_abort and self._lock.acquire(blocking=False):
                try:
                    for _ in range(min(BATCH_SIZE, len(self._to_abort))):
                        request = self._to_abort.popleft()
                        if self.outputs.requests.get(request.request_id) is request:
                            for sample in request.samples:
                                self.scheduler.abort(sample.seq)
                            self.outputs.end_aborted(request)
                finally:
                    self._lock.release()
                if self._to_abort:
                    time.sleep(HANDOVER)
