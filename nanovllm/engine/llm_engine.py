"""LLMEngine: the straight line from requests to tokens.

Owns: the requests, the scheduler and the runner. Given: prompts and SamplingParams.

    add_request ---> Scheduler ----plan----> ModelRunner
                     waiting, running        model, KV cache, rows
                     BlockManager   <-tokens-
                         |
    RequestOutput <------+  when a sequence finishes
"""

import itertools
import logging
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nanovllm.checkpoint import GenerationDefaults, config_file, find_checkpoint
from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.detokenizer import Detokenizer
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.interrupt import interruptible
from nanovllm.engine.request import (
    Prompt,
    Request,
    Sample,
    fork_of,
    logit_rules,
    signed64,
    stop_ids,
    tokenize,
)
from nanovllm.engine.scheduler import InFlight, Scheduler
from nanovllm.engine.sequence import Sequence, Status
from nanovllm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from nanovllm.plan import RowSampling, StepPlan, TokenLogprobs
from nanovllm.runner.model_runner import Drawn, ModelRunner
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger("nanovllm")


class LLMEngine:
    def __init__(self, model: str, config: EngineConfig) -> None:
        directory = find_checkpoint(model, config.revision, weights=config.load_format != "dummy")
        self.model_config = ModelConfig.from_file(config_file(directory))
        longest = self.model_config.max_position_embeddings
        window = self.model_config.sliding_window
        self.max_model_len = config.max_model_len or longest
        if self.max_model_len > longest:
            raise ValueError(
                f"max_model_len={self.max_model_len} is more than the {longest} positions of the "
                f"model; use at most {longest}"
            )
        self.tokenizer = (
            None
            if config.skip_tokenizer_init
            else load_tokenizer(
                directory
                if config.tokenizer is None
                else find_checkpoint(config.tokenizer, weights=False)
            )
        )
        if window is not None and self.max_model_len > window:
            raise ValueError(
                f"{directory.name} attends over a sliding window of {window} tokens, which is not "
                f"supported; set max_model_len={window} or less to run it within one window"
            )
        defaults = GenerationDefaults.from_directory(directory)
        self.default_sampling_params = SamplingParams(**defaults.sampling)
        self.eos_token_ids = defaults.eos_token_ids
        if self.tokenizer is not None and self.tokenizer.eos_token_id is not None:
            self.eos_token_ids |= {self.tokenizer.eos_token_id}

        self.runner = ModelRunner(config, self.model_config, directory, self.max_model_len)
        size = config.kvcache_block_size
        self.scheduler = Scheduler(
            BlockManager(self.runner.num_blocks, size, config.enable_prefix_caching),
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.scheduling_policy,
        )
        self.seed = config.seed
        overlap = config.async_scheduling
        if overlap is None:
            overlap = self.runner.device.type == "cuda"
        self.depth = 1 if overlap else 0  # plans that a step leaves in flight
        self.requests: dict[str, Request] = {}
        self.samples: dict[Sequence, Sample] = {}  # of the requests that look at each token
        self.in_flight: deque[tuple[StepPlan, Drawn]] = deque()
        self.unclaimed: list[RequestOutput] = []  # finished and not handed out yet
        self.num_arrivals = 0
        self.num_prompt_tokens = 0  # of requests that got their first token
        self.num_output_tokens = 0
        device, blocks = self.runner.device, self.runner.num_blocks
        logger.info(
            "%s on %s in %s: %d blocks of %d tokens, KV cache of %s tokens (%.0f MiB)",
            directory.name, device, str(self.runner.dtype).removeprefix("torch."), blocks, size,
            f"{blocks * size:,}", (blocks + 1) * self.runner.block_bytes(size) / 2**20,
        )  # fmt: skip

    # ---- requests ----

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        stream: bool = False,
    ) -> str:
        """Queue a request and return its id. Raises ValueError or TypeError if it can never run.

        With `stream`, the text of its samples grows in `self.samples` as the tokens come.
        """
        params = self.default_sampling_params if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params must be a SamplingParams, not {params!r}")
        params = replace(params)  # checked once more, and ours: the caller may change his
        vocab_size = self.model_config.vocab_size
        text, token_ids = tokenize(prompt, self.tokenizer, vocab_size)
        arrival = self.num_arrivals
        if request_id is None:  # a number that nobody has given as an id of his own
            request_id = next(i for i in map(str, itertools.count(arrival)) if not self._taken(i))
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a string, not {request_id!r}")
        if self._taken(request_id):
            raise ValueError(f"request_id {request_id!r} is in use")
        room = self.max_model_len - len(token_ids)
        if room < 1:
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens, which leaves no room for an answer under "
                f"max_model_len={self.max_model_len}; shorten it or raise max_model_len"
            )
        max_length = len(token_ids) + min(params.max_tokens or room, room)
        blocks = self.scheduler.blocks
        needed = -(-(max_length - 1) // blocks.block_size)  # the last token's KV is never needed
        if needed > blocks.num_blocks:
            raise ValueError(
                f"the request may grow to {max_length} tokens, which takes {needed} KV blocks of "
                f"{blocks.block_size}; the cache has {blocks.num_blocks}. Lower max_tokens, or raise "
                "num_kvcache_blocks or kv_cache_memory_bytes (on a GPU also gpu_memory_utilization)"
            )
        # Unseeded requests differ from one another, and a run repeats under the same engine seed.
        seed = (
            (self.seed + 1) * 0x9E3779B97F4A7C15 + arrival if params.seed is None else params.seed
        )
        rules = logit_rules(params, self.tokenizer, vocab_size, self.eos_token_ids)
        first = Sequence(
            request_id=request_id,
            arrival=arrival,
            token_ids=token_ids,
            num_prompt=len(token_ids),
            max_length=max_length,
            stop_token_ids=stop_ids(params, self.eos_token_ids),
            sampling=RowSampling(
                temperature=params.temperature,
                top_k=params.top_k if 0 < params.top_k < vocab_size else 0,
                top_p=params.top_p,
                min_p=params.min_p,
                seed=signed64(seed),
                rules=rules,
            ),
        )
        seqs = [first, *(fork_of(first, index) for index in range(1, params.n))]
        request = Request(seqs, text, params, RequestMetrics(time.monotonic()), params.n, stream)
        self.requests[request_id] = request
        if stream or params.stop or params.logprobs is not None:
            for seq in seqs:
                self.samples[seq] = sample = Sample(seq, request)
                if self.tokenizer is not None and params.detokenize and (stream or params.stop):
                    sample.detokenizer = Detokenizer(self.tokenizer, params.skip_special_tokens)
        self.num_arrivals += 1
        self.scheduler.add(seqs[0])
        return request_id

    def _taken(self, request_id: str) -> bool:
        return request_id in self.requests or any(
            o.request_id == request_id for o in self.unclaimed
        )

    def abort_request(self, request_id: str) -> None:
        """End a request, whatever it is doing, and free its blocks. Unknown ids are ignored."""
        request = self.requests.pop(request_id, None)
        if request is not None:
            for seq in request.seqs:
                self.scheduler.abort(seq)
                self.samples.pop(seq, None)

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests or self.unclaimed)

    # ---- the loop ----

    def step(self) -> list[RequestOutput]:
        """Run one step; return the requests that it finished.

        If it fails, its requests go back to the waiting queue and the error is raised: the engine can
        go on, or the caller can abort them. Ctrl-C is raised when the step is done; what it finished
        comes with the next call.
        """
        with interruptible():  # an interrupt waits for the end of the step
            try:
                plan = self.scheduler.schedule()  # mutates: blocks, queues (admission, preemption)
                if plan is not None:
                    if plan.joins:
                        self._note_scheduled(len(plan.joins))
                    forward = self.runner.forward(plan)  # mutates: KV cache, row buffers
                    self.in_flight.append((plan, self.runner.sample(forward)))
                # With a plan just launched, the one before it is committed while the device works.
                while len(self.in_flight) > (self.depth if plan is not None else 0):
                    self._commit(*self.in_flight.popleft())
            except BaseException:
                self.in_flight.clear()
                self.scheduler.abandon()  # takes back all that was promised
                raise
        outputs, self.unclaimed = self.unclaimed, []
        return outputs

    def _commit(self, plan: StepPlan, drawn: Drawn) -> None:
        about = self.scheduler.in_flight[0]
        tokens = drawn.read()  # waits for the device
        progressed = self.scheduler.commit(plan, tokens)  # mutates: sequences, prefix index
        self.num_output_tokens += len(progressed)
        if plan.chunks:
            self._note_first_tokens(progressed)
        self._note_logprobs(about, drawn)
        if self.samples:
            self._note_text(progressed)
        for seq in progressed:
            if seq.status is Status.FINISHED:
                request = self.requests[seq.request_id]
                request.num_unfinished -= 1
                if request.num_unfinished == 0:
                    output = self._output(self.requests.pop(seq.request_id))
                    if not request.stream:
                        self.unclaimed.append(output)

    def _note_scheduled(self, joined: int) -> None:
        now = time.monotonic()
        for seq in self.scheduler.running[-joined:]:
            request = self.requests.get(seq.request_id)
            if request is not None and request.metrics.first_scheduled_time is None:
                request.metrics.first_scheduled_time = now

    def _note_first_tokens(self, progressed: list[Sequence]) -> None:
        now = time.monotonic()
        for seq in progressed:
            metrics = self.requests[seq.request_id].metrics
            if metrics.first_token_time is None:
                metrics.first_token_time = now
                self.num_prompt_tokens += seq.num_prompt

    def _note_logprobs(self, about: InFlight, drawn: Drawn) -> None:
        for i, found in drawn.logprobs.items():
            sample = self.samples.get(about.drawing[i])
            if sample is not None and len(sample.logprobs) < sample.seq.num_output:
                sample.logprobs.append(found)
        for i, targets in drawn.prompt_logprobs.items():
            request = self.requests.get(about.chunked[i].request_id)
            if request is not None:
                start = about.plan.chunks[i].start + 1
                request.prompt_logprobs |= {start + j: found for j, found in enumerate(targets)}

    def _note_text(self, progressed: list[Sequence]) -> None:
        """Detokenize what is new, and end a sequence whose text holds one of its stop strings."""
        for seq in progressed:
            sample = self.samples.get(seq)
            if sample is None or sample.detokenizer is None:
                continue
            params, start = sample.request.params, len(sample.text)
            sample.text += sample.detokenizer.add(seq.token_ids[seq.num_prompt + sample.num_seen :])
            sample.num_seen = seq.num_output
            if seq.status is Status.FINISHED:
                sample.text += sample.detokenizer.flush()
            if seq.num_output <= params.min_tokens and params.min_tokens:
                continue
            found = [
                (at, stop)
                for stop in params.stop
                if (at := sample.text.find(stop, max(0, start - len(stop) + 1))) >= 0
            ]
            if found:
                at, stop = min(found)
                sample.text = sample.text[: at + len(stop) * params.include_stop_str_in_output]
                self.scheduler.stop(seq, stop)

    def _output(self, request: Request) -> RequestOutput:
        first = request.seqs[0]
        request.metrics.finished_time = time.monotonic()
        request.metrics.num_preemptions = sum(s.preemptions for s in request.seqs)
        return RequestOutput(
            request_id=first.request_id,
            prompt=request.prompt,
            prompt_token_ids=first.token_ids[: first.num_prompt],
            outputs=[self._completion(request, seq) for seq in request.seqs],
            finished=True,
            num_cached_tokens=first.num_cached,
            prompt_logprobs=self._prompt_logprobs(request),
            metrics=request.metrics,
        )

    def _completion(self, request: Request, seq: Sequence) -> CompletionOutput:
        ids, text, params = seq.output_ids, "", request.params
        sample = self.samples.pop(seq, None)
        if sample is not None and sample.detokenizer is not None:
            text = sample.text
        elif self.tokenizer is not None and params.detokenize:
            text = str(self.tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens))
        stop = None if seq.stop_reason in self.eos_token_ids else seq.stop_reason
        if sample is None or params.logprobs is None:
            return CompletionOutput(seq.index, text, ids, seq.finish_reason, stop)
        total = sum(found[0][1] for found in sample.logprobs)
        logprobs = [self._named(found) for found in sample.logprobs]
        return CompletionOutput(seq.index, text, ids, seq.finish_reason, stop, logprobs, total)

    def _prompt_logprobs(self, request: Request) -> list[dict[int, Logprob] | None] | None:
        if request.params.prompt_logprobs is None:
            return None
        found = request.prompt_logprobs
        return [None, *(self._named(found[i]) for i in range(1, request.seqs[0].num_prompt))]

    def _named(self, found: TokenLogprobs) -> dict[int, Logprob]:
        decode = None if self.tokenizer is None else self.tokenizer.decode
        return {
            token: Logprob(logprob, rank, None if decode is None else str(decode([token])))
            for token, logprob, rank in found
        }

    def stats(self) -> dict[str, int | float]:
        """Counts as of now, and since the engine was made; token counts unless the name says else."""
        scheduler, blocks = self.scheduler, self.scheduler.blocks
        return {
            "running": len(scheduler.running),
            "waiting": sum(
                seq.status in (Status.NEW, Status.WAITING)
                for request in self.requests.values()
                for seq in request.seqs
            ),
            "blocks_in_use": blocks.num_blocks - blocks.num_available,
            "blocks_cached": len(blocks.cached),
            "blocks_free": len(blocks.free),
            "prefix_hit_rate": scheduler.cached_tokens / max(1, scheduler.prompt_tokens),
            "preemptions": scheduler.preemptions,
            "evictions": blocks.evictions,
            "recomputed_tokens": scheduler.recomputed_tokens,
        }


def load_tokenizer(directory: Path) -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer

    if not any(
        (directory / n).is_file() for n in ("tokenizer.json", "vocab.json", "tokenizer.model")
    ):
        raise ValueError(
            f"{directory} has no tokenizer files; name one with tokenizer=..., or set "
            "skip_tokenizer_init=True to give and get token ids"
        )
    return AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
