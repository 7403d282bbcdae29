"""LLMEngine: from requests to results.

    add_request --> InputProcessor --> Scheduler ---- plan ----> runner
                                       waiting, running          model, KV cache, rows
    RequestOutput <- OutputProcessor <- Scheduler.commit <- StepOutput

It owns the input processor, the scheduler and the output processor, and is given its runner. The
loop is that of EngineCore, from which it inherits. This folder imports no torch.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

from nanovllm.api.config import EngineConfig
from nanovllm.api.prompts import Prompt
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.core import EngineCore
from nanovllm.engine.input_processor import InputProcessor, Params
from nanovllm.engine.interrupt import defer_interrupt
from nanovllm.engine.output_processor import Output, OutputProcessor
from nanovllm.engine.request import Request, Search
from nanovllm.engine.scheduler import Scheduler
from nanovllm.plan import Runner, Yield


class LLMEngine(EngineCore):
    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        inputs: InputProcessor,
        blocks: BlockManager | None = None,
    ) -> None:
        """`blocks` manages the blocks of `runner`; None: a BlockManager."""
        if blocks is None:
            size = runner.num_blocks, config.kvcache_block_size
            blocks = BlockManager(*size, config.enable_prefix_caching)
        scheduler = Scheduler(
            blocks, config.max_num_seqs, config.max_num_batched_tokens, config.scheduling_policy
        )
        overlap = config.async_scheduling
        if overlap is None:
            overlap = runner.is_async
        outputs = OutputProcessor(inputs.tokenizer, inputs.eos_token_ids)
        super().__init__(scheduler, runner, outputs, overlap)
        self.inputs, self.tokenizer = inputs, inputs.tokenizer
        self.num_requests = 0

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
        if isinstance(request_id, Params):
            raise TypeError("the order is add_request(prompt, sampling_params, request_id)")
        request = self.submit(prompt, sampling_params, request_id=request_id, returned_by_step=True)
        return request.request_id

    def submit(
        self,
        prompt: Prompt,
        sampling_params: Params | None = None,
        stream: bool = False,
        search: Search | None = None,
        request_id: str | None = None,
        returned_by_step: bool = False,
    ) -> Request:
        """Queue a request whose caller reads `output` at its end, or `read_stream` while it runs.

        `search` chooses its tokens; without it they are sampled.
        """
        params = self.inputs.check_params(sampling_params)
        text, token_ids = self.inputs.tokenize(prompt, params)
        rules = self.inputs.logit_rules(params)  # without the lock: a grammar can take seconds
        with defer_interrupt(), self.lock:
            arrival, is_known = self.num_requests, self.outputs.is_known
            if request_id is None:
                request_id = next(i for i in map(str, itertools.count(arrival)) if not is_known(i))
            if not isinstance(request_id, str):
                raise TypeError(f"request_id must be a string, not {request_id!r}")
            if is_known(request_id):
                raise ValueError(f"request_id {request_id!r} is in use")
            seqs = self.inputs.make_sequences(request_id, arrival, token_ids, params, rules)
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
            if search is not None:
                search.start(seqs)
            self.scheduler.add(seqs[0])
            return self.outputs.add(seqs, text, params, returned_by_step, stream, search)

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

    # ---- the state of the engine ----

    def reset_prefix_cache(self) -> None:
        """Remove every block from the prefix cache. Running requests keep their blocks."""
        with self.lock:
            self.scheduler.blocks.reset_prefix_cache()

    def stats(self) -> dict[str, int | float]:
        """Counters of sequences, blocks and tokens, which docs/api.md explains."""
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
            } | blocks.stats()
