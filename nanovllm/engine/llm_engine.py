"""LLMEngine: from requests to results.

    add_request --> InputProcessor --> Scheduler ---- plan ----> runner
                                       waiting, running          model, KV cache, rows
    RequestOutput <- OutputProcessor <- Scheduler.commit <- StepOutput

It owns the input processor, the scheduler and the output processor, and is given its runner. The
loop is that of EngineCore, from which it inherits. This folder imports no torch.
"""

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from nanovllm.api.config import EngineConfig
from nanovllm.api.outputs import RequestMetrics
from nanovllm.api.prompts import Prompt
from nanovllm.api.sampling_params import SamplingParams
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.core import BATCH_SIZE, HANDOVER, EngineCore
from nanovllm.engine.input_processor import CheckedPrompt, InputProcessor
from nanovllm.engine.interrupt import defer_interrupt
from nanovllm.engine.output_processor import Output, OutputProcessor
from nanovllm.engine.request import Progress, Request
from nanovllm.engine.sampling import Sampling
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.task import Task, TaskFactory
from nanovllm.plan import Runner, Yield


class LLMEngine(EngineCore):
    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        inputs: InputProcessor,
        task_factories: Mapping[type, TaskFactory] | None = None,
        blocks: BlockManager | None = None,
    ) -> None:
        """task_factories: parameters -> what makes their task; None: sampling alone. blocks: of the
        runner; None: a new BlockManager.
        """
        if blocks is None:
            size = runner.num_blocks, config.kvcache_block_size
            blocks = BlockManager(*size, config.enable_prefix_caching)
        scheduler = Scheduler(
            blocks, config.max_num_seqs, config.max_num_batched_tokens, config.scheduling_policy
        )
        overlap = config.async_scheduling
        if overlap is None:
            overlap = runner.is_async
        super().__init__(scheduler, runner, OutputProcessor(), overlap)
        self.inputs, self.tokenizer = inputs, inputs.tokenizer
        self.task_factories = task_factories or {SamplingParams: Sampling}
        self.num_requests = 0

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an LLM cannot be copied or pickled, because it owns memory of its process and device; "
            "make another LLM, or use this one from several threads"
        )

    # ---- requests ----

    def make_task(self, params: Any) -> Task:
        """Return the task of checked parameters; None: the checkpoint's sampling parameters."""
        params = self.inputs.default_sampling_params if params is None else params
        for kind, factory in self.task_factories.items():
            if isinstance(params, kind):
                return factory(self, params)
        known = " or ".join(kind.__name__ for kind in self.task_factories)
        raise TypeError(f"sampling_params must be a {known}, not {params!r}")

    def add_request(
        self, prompt: Prompt, sampling_params: Any = None, request_id: str | None = None
    ) -> str:
        """Queue a request and return its id. Raises ValueError or TypeError if it can never run."""
        if isinstance(request_id, tuple(self.task_factories)):
            raise TypeError("the order is add_request(prompt, sampling_params, request_id)")
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
        """Queue a request whose caller reads `output` at its end, or a stream while it runs."""
        [checked] = self.check([(prompt, sampling_params)])
        with defer_interrupt(), self.lock:
            return self._add(checked, stream, None, request_id, returned_by_step)

    def check(self, pairs: Sequence[tuple[Prompt, Any]]) -> list[CheckedPrompt]:
        """Check prompts and their parameters, which `add` takes. Changes nothing in the engine.

        Raises ValueError or TypeError if one can never run. Does not hold the lock: a grammar can
        take seconds.
        """
        checked: list[CheckedPrompt] = []
        blocks = self.scheduler.blocks
        for prompt in self.inputs.check(pairs, self.make_task):
            # The KV of the last token is not needed if no token follows it.
            samples = prompt.task.yields in (Yield.TOKEN, Yield.CANDIDATES)
            num_slots = prompt.max_length - samples
            if num_slots > blocks.num_blocks * blocks.block_size:
                where = f"prompts[{len(checked)}]: " * (len(pairs) > 1)
                raise ValueError(
                    f"{where}a request of {prompt.max_length} tokens takes "
                    f"{-(-num_slots // blocks.block_size)} KV blocks of {blocks.block_size}; the "
                    f"cache has {blocks.num_blocks}. Lower max_tokens or raise num_kvcache_blocks or "
                    "kv_cache_memory_bytes (on a GPU also gpu_memory_utilization)"
                )
            checked.append(prompt)
        return checked

    def add(
        self,
        prompts: list[CheckedPrompt],
        requests: list[Request],
        progress: Progress | None = None,
        stream: bool = False,
    ) -> Iterator[None]:
        """Queue prompts, and append their requests. Yields after some, while the lock is free."""
        for start in range(0, len(prompts), BATCH_SIZE):
            if start:
                time.sleep(HANDOVER)
            with defer_interrupt(), self.lock:
                for prompt in prompts[start : start + BATCH_SIZE]:
                    requests.append(self._add(prompt, stream, progress))
            yield

    def _add(
        self,
        prompt: CheckedPrompt,
        stream: bool,
        progress: Progress | None,
        request_id: str | None = None,
        returned_by_step: bool = False,
    ) -> Request:
        arrival, is_known = self.num_requests, self.outputs.is_known
        if request_id is None:
            request_id = next(itertools.filterfalse(is_known, map(str, itertools.count(arrival))))
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a string, not {request_id!r}")
        if is_known(request_id):
            raise ValueError(f"request_id {request_id!r} is in use")
        request = Request(
            request_id,
            arrival,
            prompt.task,
            prompt.text,
            RequestMetrics(time.monotonic()),
            returned_by_step,
            stream,
            progress,
        )
        first = prompt.task.start(request, prompt.token_ids, prompt.max_length)
        self.num_requests += 1
        try:
            self.outputs.add(request)
            self.scheduler.add(first)
        except BaseException:
            self.outputs.remove(request)
            raise
        return request

    def abort_request(self, request_id: str | list[str]) -> None:
        """End a request, or several, in any state and free the blocks. Unknown ids are ignored."""
        given: Any = request_id
        ids = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
        if not all(isinstance(i, str) for i in ids):
            raise TypeError(f"request_id must be a string or a list of strings, not {given!r}")
        known = self.outputs.requests
        self.abort([known[i] for i in ids if i in known])

    def abort_all(self) -> None:
        self.abort(list(self.outputs.requests.values()))

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything left to do or to return."""
        self._abort_noted()
        return bool(self.outputs.requests or self.outputs.finished)

    # ---- running them ----

    def run(self, requests: list[Request]) -> Iterator[None]:
        """Run steps until the requests have ended. Yields after each, the last time after all ends."""
        num_ended = 0  # of the first requests; those after them are not looked at
        while num_ended < len(requests):
            self.run_step()
            while num_ended < len(requests) and requests[num_ended].ended:
                num_ended += 1
            yield

    def step(self) -> list[Output]:
        """Run one step. Returns the requests that have finished since the last call."""
        self.run_step()
        with self.lock:
            try:
                return list(self.outputs.finished.values())
            finally:  # not before it is returned: a signal handler may raise between two lines
                self.outputs.finished = {}

    # ---- the state of the engine ----

    def reset_prefix_cache(self) -> None:
        """Remove every block from the prefix cache, so that nothing computed before is shared.

        Running requests keep their blocks, and share them with no later request.
        """
        with defer_interrupt(), self.lock:
            self.scheduler.blocks.reset_prefix_cache()

    def stats(self) -> dict[str, int | float]:
        """Counters of sequences, blocks and tokens, which docs/api.md explains."""
        scheduler, blocks = self.scheduler, self.scheduler.blocks
        self._abort_noted()
        with self.lock:
            return {
                "running": len(scheduler.running),
                "waiting": scheduler.num_unfinished - len(scheduler.running),
                "blocks_in_use": blocks.num_blocks - blocks.num_available,
                "blocks_cached": len(blocks.evictable),
                "blocks_free": len(blocks.free),
                "prefix_hit_rate": scheduler.cached_tokens / max(1, scheduler.prompt_tokens),
                "preemptions": scheduler.preemptions,
                "evictions": blocks.evictions,
                "recomputed_tokens": scheduler.recomputed_tokens,
                "prompt_tokens": self.outputs.progress.num_prompt_tokens,
                "output_tokens": self.outputs.progress.num_output_tokens,
            } | blocks.stats()
