"""LLMEngine: accepts requests and returns their results.

    prompts --> InputProcessor.check --> add --> Scheduler ---- plan ----> runner
                                                 waiting, running          model, KV cache, rows
    RequestOutput <- OutputProcessor <- Scheduler.commit <- StepOutput

It owns the input processor, the scheduler and the output processor. The caller passes the runner.
EngineCore has one step, `run_step`; `run` is the loop.
"""

import itertools
import time
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

from nanovllm.config import EngineConfig
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.core import EngineCore
from nanovllm.engine.input_processor import CheckedPrompt, InputProcessor
from nanovllm.engine.output_processor import Output, OutputProcessor
from nanovllm.engine.request import Progress, Request
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.threads import hold_interrupt
from nanovllm.inputs import Prompt
from nanovllm.outputs import RequestMetrics
from nanovllm.plan import Runner


class LLMEngine(EngineCore):
    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        input_processor: InputProcessor,
        block_manager: BlockManager | None = None,
    ) -> None:
        """Make the scheduler and the output processor for `runner`.

        block_manager: manages the blocks of the runner. None: a new BlockManager.
        """
        if block_manager is None:
            block_manager = BlockManager(
                runner.num_blocks, config.block_size, config.enable_prefix_caching
            )
        scheduler = Scheduler(
            block_manager,
            config.max_num_seqs,
            config.token_budget,
            config.scheduling_policy,
        )
        async_scheduling = config.async_scheduling
        if async_scheduling is None:
            async_scheduling = runner.async_scheduling
        super().__init__(scheduler, runner, OutputProcessor(), async_scheduling)
        self.input_processor = input_processor
        self.num_requests = 0

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an LLM cannot be copied or pickled, because it owns memory of its process and device; "
            "make another LLM, or use this one from several threads"
        )

    # ---- requests ----

    def add_request(
        self, prompt: Prompt, sampling_params: Any = None, request_id: str | None = None
    ) -> str:
        """Queue a request and return its id. Raises ValueError or TypeError if it can never run."""
        if isinstance(request_id, tuple(self.input_processor.task_factories)):
            raise TypeError("call add_request(prompt, sampling_params, request_id) in this order")
        request = self.submit(prompt, sampling_params, request_id=request_id, returned_by_step=True)
        return request.request_id

    def submit(
        self,
        prompt: Prompt,
        sampling_params: Any = None,
        stream: bool = False,
        request_id: str | None = None,
        returned_by_step: bool = False,
    ) -> Request:
        """Queue a request. The caller reads its `output` at the end, or its stream at any time."""
        [checked] = self.input_processor.check([(prompt, sampling_params)])
        with hold_interrupt(), self.lock:
            return self._add(checked, Progress(), stream, request_id, returned_by_step)

    def add(
        self,
        prompts: list[CheckedPrompt],
        requests: list[Request],
        progress: Progress,
        stream: bool = False,
    ) -> None:
        """Queue `prompts` and append their requests to `requests`.

        After Ctrl-C no further prompt is queued, and KeyboardInterrupt is raised.
        """
        with hold_interrupt() as pressed:
            for prompt in prompts:
                if pressed:
                    break
                with self.lock:
                    requests.append(self._add(prompt, progress, stream))

    def _add(
        self,
        prompt: CheckedPrompt,
        progress: Progress,
        stream: bool,
        request_id: str | None = None,
        returned_by_step: bool = False,
    ) -> Request:
        is_known = self.output_processor.is_known
        if request_id is None:
            numbers = map(str, itertools.count(self.num_requests))
            request_id = next(number for number in numbers if not is_known(number))
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a string, not {request_id!r}")
        if is_known(request_id):
            raise ValueError(f"request_id {request_id!r} is in use")
        request = Request(
            request_id=request_id,
            arrival=self.num_requests,
            task=prompt.task,
            prompt=prompt.text,
            metrics=RequestMetrics(time.monotonic()),
            returned_by_step=returned_by_step,
            stream=stream,
            progress=progress,
        )
        first = prompt.task.start(request, prompt.token_ids, prompt.max_length)
        self.num_requests += 1
        try:
            self.output_processor.requests[request_id] = request
            self.scheduler.add(first)
        except BaseException:
            self.output_processor.requests.pop(request_id, None)
            raise
        return request

    def abort_request(self, request_id: str | list[str]) -> None:
        """End one or several requests in any state, and free their blocks. Ignores unknown ids."""
        is_list = isinstance(request_id, Iterable) and not isinstance(request_id, str)
        ids: list[Any] = list(request_id) if is_list else [request_id]
        if not all(isinstance(i, str) for i in ids):
            raise TypeError(f"request_id must be a string or a list of strings, not {request_id!r}")
        known = self.output_processor.requests
        self.abort([known[i] for i in ids if i in known])

    def abort_all(self) -> None:
        self.abort(list(self.output_processor.requests.values()))

    def has_unfinished_requests(self) -> bool:
        """Return whether `step` has requests left to run or outputs to return."""
        self.run_pending_aborts()
        return bool(self.output_processor.requests or self.output_processor.finished)

    # ---- running requests ----

    def run(self, requests: list[Request]) -> Iterator[None]:
        """Run steps until the requests have ended. Yields after every step, also the last one."""
        num_ended = 0  # the first `num_ended` requests have ended
        while num_ended < len(requests):
            self.run_step()
            while num_ended < len(requests) and requests[num_ended].ended:
                num_ended += 1
            yield

    def step(self) -> list[Output]:
        """Run one step. Returns the outputs of requests that finished since the last call."""
        self.run_step()
        processor = self.output_processor
        finished: dict[str, Output] = {}
        try:
            with self.lock:
                finished, processor.finished = processor.finished, {}
            return list(finished.values())
        except BaseException:  # Ctrl-C between any two lines
            with self.lock:
                processor.finished = finished | processor.finished
            raise

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
            "prompt_tokens": self.output_processor.progress.num_prompt_tokens,
            "output_tokens": self.output_processor.progress.num_output_tokens,
        } | blocks.stats()
