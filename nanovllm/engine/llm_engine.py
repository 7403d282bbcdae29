"""LLMEngine: the loop from requests to tokens.

    add_request --> InputProcessor --> Scheduler ---- plan ----> runner
                                       waiting, running          model, KV cache, rows
    RequestOutput <- OutputProcessor <- Scheduler.commit <- StepOutput

It owns the input processor, the scheduler and the output processor, and is given its runner. This
folder imports no torch.
"""

import itertools
from collections.abc import Iterable

from nanovllm.config import EngineConfig
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.input_processor import InputProcessor, Prompt
from nanovllm.engine.interrupt import defer_interrupt
from nanovllm.engine.output_processor import OutputProcessor, Request
from nanovllm.engine.scheduler import Scheduler
from nanovllm.outputs import RequestOutput
from nanovllm.plan import Runner
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
        self.max_in_flight = 1 if overlap else 0  # steps that `advance` leaves uncommitted
        self.num_requests = 0

    # ---- requests ----

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> str:
        """Queue a request and return its id. Raises ValueError or TypeError if it can never run."""
        if isinstance(request_id, SamplingParams):
            raise TypeError("the order is add_request(prompt, sampling_params, request_id)")
        return self._add(prompt, sampling_params, request_id, stream=False).request_id

    def add_stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Request:
        """Queue a request that is read with `read_stream` while it runs."""
        return self._add(prompt, sampling_params, None, stream=True)

    def _add(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        request_id: str | None,
        stream: bool,
    ) -> Request:
        params = self.inputs.check_params(sampling_params)
        text, token_ids = self.inputs.tokenize(prompt)
        arrival, is_known = self.num_requests, self.outputs.is_known
        if request_id is None:
            request_id = next(i for i in map(str, itertools.count(arrival)) if not is_known(i))
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a string, not {request_id!r}")
        if is_known(request_id):
            raise ValueError(f"request_id {request_id!r} is in use")
        seqs = self.inputs.make_sequences(request_id, arrival, token_ids, params)
        blocks, max_length = self.scheduler.blocks, seqs[0].max_length
        needed = -(-(max_length - 1) // blocks.block_size)  # the KV of the last token is not needed
        if needed > blocks.num_blocks:
            raise ValueError(
                f"a request of {max_length} tokens takes {needed} KV blocks of {blocks.block_size};"
                f" the cache has {blocks.num_blocks}. Lower max_tokens or raise num_kvcache_blocks "
                "or kv_cache_memory_bytes (on a GPU also gpu_memory_utilization)"
            )
        self.num_requests += 1
        request = self.outputs.add(seqs, text, params, stream)
        self.scheduler.add(seqs[0])
        return request

    def abort_request(self, request_id: str) -> None:
        """End a request in any state and free its blocks. Unknown ids are ignored."""
        for seq in self.outputs.remove(request_id):
            self.scheduler.abort(seq)

    def abort_all(self) -> None:
        for request_id in list(self.outputs.requests):
            self.abort_request(request_id)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything left to do or to return."""
        return bool(self.outputs.requests or self.outputs.finished)

    # ---- the loop ----

    def step(self) -> list[RequestOutput]:
        """Run one step. Returns the requests that have finished since the last call."""
        self.advance()
        return self.pop_finished()

    def advance(self) -> None:
        """Plan and launch one step, and commit the steps whose tokens are due.

        If it fails, the sequences of the steps in flight return to the waiting queue and the error
        is raised. The engine remains usable. Ctrl-C is raised when the step is complete.
        """
        scheduler = self.scheduler
        with defer_interrupt():
            try:
                step = scheduler.schedule()  # changes blocks and queues
                if step is not None:
                    if step.plan.joins:
                        self.outputs.note_scheduled(scheduler.running[-len(step.plan.joins) :])
                    step.wait = self.runner.run(step.plan)  # changes KV cache and rows
                # If async, the previous step is committed while the device works; if not, this one.
                while len(scheduler.in_flight) > (self.max_in_flight if step is not None else 0):
                    self._commit()
            except BaseException:
                scheduler.abandon()
                raise

    def _commit(self) -> None:
        step = self.scheduler.in_flight[0]
        assert step.wait is not None
        output = step.wait()  # waits for the device
        progressed = self.scheduler.commit(
            step, output.token_ids
        )  # changes sequences, prefix cache
        for seq, stop_string in self.outputs.process(step, output, progressed):
            self.scheduler.stop(seq, stop_string)
        self.outputs.collect_finished(progressed)

    def pop_finished(self, request_ids: Iterable[str] | None = None) -> list[RequestOutput]:
        """Remove and return the outputs of finished requests: of these, or of all."""
        outputs, self.outputs.finished = self.outputs.finished, []
        if outputs and request_ids is not None:
            wanted = set(request_ids)
            self.outputs.finished = [o for o in outputs if o.request_id not in wanted]
            outputs = [o for o in outputs if o.request_id in wanted]
        return outputs

    # ---- the state of the engine ----

    def reset_prefix_cache(self) -> None:
        """Remove every block from the prefix cache. Running requests keep their blocks."""
        self.scheduler.blocks.reset_prefix_cache()

    def stats(self) -> dict[str, int | float]:
        """Counters: the first five describe the present, the others count since the start."""
        scheduler, blocks = self.scheduler, self.scheduler.blocks
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
