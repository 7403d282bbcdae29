"""LLMEngine: the loop from requests to tokens.

    add_request --> InputProcessor --> Scheduler ---- plan ----> runner
                                       waiting, running          model, KV cache, rows
    RequestOutput <- OutputProcessor <- Scheduler.commit <- StepOutput

It owns the input processor, the scheduler and the output processor, and is given its runner. This
folder imports no torch.

Several threads may use an engine. One of them at a time runs a step, which serves the requests of
all; the others wait for its end. `lock` is not held while the runner works, so that requests can be
added and aborted during a step.
"""

import itertools
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from nanovllm.config import EngineConfig
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.input_processor import InputProcessor, Params, Prompt, request_ids
from nanovllm.engine.interrupt import DeferredInterrupt, defer_interrupt
from nanovllm.engine.observer import NO_OBSERVER
from nanovllm.engine.output_processor import Output, OutputProcessor, Request
from nanovllm.engine.scheduler import InFlightStep, Scheduler
from nanovllm.plan import Runner, StepOutput, Yield
from nanovllm.sampling_params import SamplingParams


class LLMEngine:
    def __init__(self, config: EngineConfig, runner: Runner, inputs: InputProcessor) -> None:
        self.runner = runner
        self.inputs = inputs
        self.tokenizer = inputs.tokenizer
        self.outputs = OutputProcessor(inputs.tokenizer, inputs.eos_token_ids)
        self.scheduler = Scheduler(
            BlockManager(
                runner.num_blocks, config.kvcache_block_size, config.enable_prefix_caching
            ),
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.scheduling_policy,
        )
        overlap = config.async_scheduling
        if overlap is None:
            overlap = runner.is_async
        self.max_in_flight = 1 if overlap else 0  # steps that `run_step` leaves uncommitted
        self.num_requests = 0
        self.observer = NO_OBSERVER  # see nanovllm/trace.py
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._to_abort: deque[Request] = deque()
        self._step_lock = threading.Lock()  # held by the thread that runs a step
        self._stepping: int | None = None  # that thread

    @property
    def lock(self) -> "threading.RLock":
        """Guards scheduler, requests and results. Raises RuntimeError in a forked process."""
        if os.getpid() != self._process:
            raise RuntimeError(
                "this LLM was made in another process and cannot be used in one forked from it; "
                "start the process with multiprocessing.get_context('spawn') and make an LLM there"
            )
        return self._lock

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an LLM cannot be copied or pickled, because it owns memory of its process and device; "
            "make another LLM, or use this one from several threads"
        )

    # ---- requests ----

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: Params | None = None,
        request_id: str | None = None,
    ) -> str:
        """Queue a request and return its id. Raises ValueError or TypeError if it can never run."""
        if isinstance(request_id, SamplingParams):
            raise TypeError("the order is add_request(prompt, sampling_params, request_id)")
        return self._add(prompt, sampling_params, request_id).request_id

    def submit(
        self, prompt: Prompt, sampling_params: Params | None = None, stream: bool = False
    ) -> Request:
        """Queue a request whose caller reads `output` at its end, or `read_stream` while it runs."""
        return self._add(prompt, sampling_params, returned_by_step=False, stream=stream)

    def _add(
        self,
        prompt: Prompt,
        sampling_params: Params | None,
        request_id: str | None = None,
        returned_by_step: bool = True,
        stream: bool = False,
    ) -> Request:
        params = self.inputs.check_params(sampling_params)
        text, token_ids = self.inputs.tokenize(prompt, params)
        with defer_interrupt(), self.lock:
            arrival, is_known = self.num_requests, self.outputs.is_known
            if request_id is None:
                request_id = next(i for i in map(str, itertools.count(arrival)) if not is_known(i))
            if not isinstance(request_id, str):
                raise TypeError(f"request_id must be a string, not {request_id!r}")
            if is_known(request_id):
                raise ValueError(f"request_id {request_id!r} is in use")
            seqs = self.inputs.make_sequences(request_id, arrival, token_ids, params)
            blocks, max_length = self.scheduler.blocks, seqs[0].max_length
            # The KV of the last token is not needed if it is sampled.
            needed = -(-(max_length - (seqs[0].yields is Yield.TOKEN)) // blocks.block_size)
            if needed > blocks.num_blocks:
                raise ValueError(
                    f"a request of {max_length} tokens takes {needed} KV blocks of "
                    f"{blocks.block_size}; the cache has {blocks.num_blocks}. Lower max_tokens or "
                    "raise num_kvcache_blocks or kv_cache_memory_bytes (on a GPU also "
                    "gpu_memory_utilization)"
                )
            self.num_requests += 1
            self.scheduler.add(seqs[0])
            return self.outputs.add(seqs, text, params, returned_by_step, stream)

    def abort_request(self, request_id: str | list[str]) -> None:
        """End a request, or several, in any state and free the blocks. Unknown ids are ignored."""
        known = self.outputs.requests
        self.abort([known[i] for i in request_ids(request_id) if i in known])

    def abort_all(self) -> None:
        self.abort(list(self.outputs.requests.values()))

    def abort(self, requests: Iterable[Request]) -> None:
        """End the given requests that are unfinished. A newer request with the same id is not affected.

        The garbage collector calls this for an abandoned stream, in the middle of any code. It
        therefore never waits: while another call holds the lock, it only records the requests. They
        then end with the current step or before the next one.
        """
        self._to_abort.extend(requests)
        self._abort_noted()

    def _abort_noted(self) -> None:
        if self._lock._is_owned():  # type: ignore[attr-defined]
            return
        with defer_interrupt():
            while self._to_abort and self._lock.acquire(blocking=False):
                try:
                    while self._to_abort:
                        request = self._to_abort.popleft()
                        if self.outputs.requests.get(request.request_id) is request:
                            for sample in request.samples:
                                self.scheduler.abort(sample.seq)
                            self.outputs.end_aborted(request)
                finally:
                    self._lock.release()

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything left to do or to return."""
        self._abort_noted()
        return bool(self.outputs.requests or self.outputs.finished)

    # ---- the loop ----

    def run(self, requests: list[Request]) -> Iterator[list[Request]]:
        """Run steps until the requests have ended. Yields those that were unfinished, after each."""
        while requests:
            self.run_step()
            # Another thread may end a request until the caller returns; it is yielded once more.
            unfinished = [request for request in requests if not request.ended]
            yield requests
            requests = unfinished

    def step(self) -> list[Output]:
        """Run one step. Returns the requests that have finished since the last call."""
        self.run_step()
        with self.lock:
            finished, self.outputs.finished = self.outputs.finished, []
        return finished

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
                    self.scheduler.revert_in_flight()
                    self.outputs.collect_finished(self.outputs.sequences())
                    self.observer.reverted(error)
                raise
            finally:
                self._stepping = None
                self._step_lock.release()
                self._abort_noted()

    def _schedule(self) -> InFlightStep | None:
        with self.lock:
            self.observer.begin()
            step = self.scheduler.schedule()
            if step is not None and step.plan.joins:
                # Whoever joined was admitted last, so that their chunks are the last.
                self.outputs.note_scheduled(step.chunked[-len(step.plan.joins) :])
            self.observer.scheduled(step)
        return step

    def _commit(self, step: InFlightStep, output: StepOutput) -> None:
        with self.lock:
            self.observer.begin()
            updated = self.scheduler.commit(step, output.token_ids)
            ended = self.outputs.process(step, output, updated)
            for seq, reason, stop_string in ended:
                self.scheduler.finish(seq, reason, stop_string)
            self.outputs.collect_finished([*updated, *(seq for seq, *_ in ended)])
            self.observer.committed(step, updated)

    # ---- the state of the engine ----

    def reset_prefix_cache(self) -> None:
        """Remove every block from the prefix cache. Running requests keep their blocks."""
        with self.lock:
            self.scheduler.blocks.reset_prefix_cache()

    def stats(self) -> dict[str, int | float]:
        """Counters: the first five describe the present, the others count since the start."""
        scheduler, blocks = self.scheduler, self.scheduler.blocks
        self._abort_noted()
        with self.lock:
            unfinished = sum(request.num_unfinished for request in self.outputs.requests.values())
            return {
                "running": len(scheduler.running),
                "waiting": unfinished - len(scheduler.running),
                "blocks_in_use": blocks.num_blocks - blocks.num_available,
                "blocks_cached": len(blocks.evictable),
                "blocks_free": len(blocks.free),
                "prefix_hit_rate": scheduler.cached_tokens / max(1, scheduler.prompt_tokens),
                "preemptions": scheduler.preemptions,
                "evictions": blocks.evictions,
                "recomputed_tokens": scheduler.recomputed_tokens,
                "prompt_tokens": self.outputs.num_prompt_tokens,
                "output_tokens": self.outputs.num_output_tokens,
            }
