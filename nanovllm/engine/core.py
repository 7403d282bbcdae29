"""EngineCore: one step, which is planned, launched and committed.

    while there is work:
        step = scheduler.schedule()             # changes queues, blocks, prefix cache
        get_output = runner.run(step.plan)      # launches the step: changes KV cache and rows
        scheduler.commit(step, get_output().token_ids)  # appends tokens to sequences

LLMEngine adds the requests, and threads.py lets one thread at a time run a step. This folder
imports no torch.
"""

from nanovllm.engine.observer import NO_OBSERVER
from nanovllm.engine.output_processor import OutputProcessor
from nanovllm.engine.request import Request
from nanovllm.engine.scheduler import InFlightStep, Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.task import Ending
from nanovllm.engine.threads import SharedEngine, hold_interrupt, run_by_one_thread
from nanovllm.plan import Runner, StepOutput


class EngineCore(SharedEngine):
    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        output_processor: OutputProcessor,
        async_scheduling: bool,
    ) -> None:
        """async_scheduling: plan and launch a step before the previous one is committed."""
        super().__init__()
        self.scheduler = scheduler
        self.runner = runner
        self.output_processor = output_processor
        self.async_scheduling = async_scheduling
        self.observer = NO_OBSERVER  # see nanovllm/cli/trace/trace.py

    @run_by_one_thread
    def run_step(self) -> None:
        """Plan and launch one step, and commit the steps whose results are due.

        With async scheduling, the results of the previous step are due while the device computes
        the new step. If no step can be launched, the results of all steps in flight are due.

        If another thread is running a step, this method only waits until that step ends. If a step
        fails or Ctrl-C interrupts it, the error is raised, the prefix cache is cleared, the
        running sequences return to the waiting queue, and the engine remains usable.
        """
        step = self._schedule()
        if step is not None:
            step.get_output = self.runner.run(step.plan)
        num_left = 1 if step is not None and self.async_scheduling else 0
        while len(self.scheduler.in_flight) > num_left:
            oldest = self.scheduler.in_flight[0]
            assert oldest.get_output is not None
            self._commit(oldest, oldest.get_output())

    def _schedule(self) -> InFlightStep | None:
        """Plan a step. This changes queues, blocks and the prefix cache."""
        with self.lock:
            self.observer.begin()
            step = self.scheduler.schedule()
            if step is None and self.output_processor.requests and not self.scheduler.has_work():
                raise RuntimeError("requests are unfinished but none can run: a bug in the engine")
            if step is not None:
                admitted = [step.seqs[new.row] for new in step.plan.new_rows]
                self.output_processor.record_scheduled(admitted)
            self.observer.scheduled(step)
        return step

    def _commit(self, step: InFlightStep, output: StepOutput) -> None:
        """Process the results of a step. This changes sequences, queues, blocks and requests."""
        with hold_interrupt(), self.lock:
            self.observer.begin()
            updated = self.scheduler.commit(step, output.token_ids)
            endings = self.output_processor.process(step, output, updated)
            if self.output_processor.queue_error is not None:
                # The queues may be inconsistent.
                self._revert(self.output_processor.queue_error)
                return
            self._finish(endings)
            self.output_processor.collect_finished([*updated, *endings])
            self.observer.committed(step, updated, output)

    def _finish(self, endings: dict[Sequence, Ending]) -> None:
        for seq, ending in endings.items():
            self.scheduler.finish(seq, ending.finish_reason, ending.stop_reason)

    def _revert(self, error: BaseException) -> None:
        """Restore a state from which all requests can continue. Any line may have failed."""
        self.scheduler.revert_in_flight(self.output_processor.rewind())
        self._finish(self.output_processor.endings)  # in case the failed commit has not done this
        requests = self.output_processor.requests.values()
        self.output_processor.collect_finished([seq for r in requests for seq in r.seqs])
        self.observer.reverted(error)

    def _abort_request(self, request: Request) -> None:
        """End a request in any state, unless it has ended."""
        if self.output_processor.requests.get(request.request_id) is request:
            for seq in request.seqs:
                self.scheduler.abort(seq)
            request.returned_by_step = False
            self.output_processor.collect_finished(request.seqs)
