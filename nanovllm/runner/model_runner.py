"""ModelRunner: executes plans on a device. It never sees a Sequence.

It owns the model, the KV cache (through its attention), the rows and the captured decode steps.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanovllm.batch import SamplingBatch, to_device
from nanovllm.config import EngineConfig
from nanovllm.models.backend import Attention
from nanovllm.models.checkpoint import weight_files
from nanovllm.models.config import ModelConfig
from nanovllm.models.logit_rules import RulesBatch
from nanovllm.models.qwen3 import Qwen3
from nanovllm.models.weights import load_weights, random_weights
from nanovllm.plan import Chunk, StepOutput, StepPlan, Yield
from nanovllm.runner import memory
from nanovllm.runner.backends import device_guard, pick_backend, pick_device, pick_dtype
from nanovllm.runner.openmp import check_openmp
from nanovllm.runner.pending import PendingOutput, start_copy
from nanovllm.runner.rows import Rows
from nanovllm.runner.threads import ThreadLimit


class ModelRunner:
    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        directory: Path,
        max_model_len: int,
        capture_decode: Callable[[Callable, Tensor], Any] | None = None,
    ) -> None:
        """capture_decode captures decode steps; None takes the backend's, unless enforce_eager."""
        check_openmp()
        self.device = pick_device(config.device)
        self.dtype = pick_dtype(config.dtype, self.device, model_config.dtype)
        self.is_async = self.device.type == "cuda"  # the device works while the host plans
        self.model_config = model_config
        self.guard = (
            ThreadLimit() if self.device.type == "cpu" else partial(device_guard, self.device)
        )
        remedy = "out of memory; lower max_num_seqs, max_model_len or max_num_batched_tokens"
        with device_guard(self.device), memory.explain_out_of_memory(remedy):
            self._start(config, directory, max_model_len, capture_decode)

    def _start(
        self,
        config: EngineConfig,
        directory: Path,
        max_model_len: int,
        capture_decode: Callable[[Callable, Tensor], Any] | None,
    ) -> None:
        model_config, block_size = self.model_config, config.kvcache_block_size
        num_seqs = config.max_num_seqs
        free_before = memory.Snapshot.of(self.device)
        backend = pick_backend(
            config.attention_backend, self.device, self.dtype, model_config.num_weights
        )
        # torch's defaults for dtype and device would apply to other threads too.
        backend = replace(backend, empty=partial(torch.empty, dtype=self.dtype, device=self.device))
        if capture_decode is None and not config.enforce_eager:
            capture_decode = backend.capture_decode
        self.backend_guard = backend.guard()
        self.sample, self.token_logprobs = backend.sample, backend.token_logprobs

        # 1. The model.
        weight_bytes = model_config.num_weights * self.dtype.itemsize
        memory.check_weights(directory.name, weight_bytes, self.dtype, free_before)
        block_bytes = self.block_bytes(block_size)
        memory.check_cache(config, block_bytes, free_before)
        self.model = Qwen3(model_config, max_model_len, backend)
        tensors = self.model.checkpoint_tensors()
        if config.load_format == "dummy":
            random_weights(tensors, config.seed)
        else:
            load_weights(tensors, weight_files(directory))
        # `tensors` would keep alive the weights that packing replaces.
        del tensors
        backend.pack_weights(self.model)

        # 2. The KV cache takes the memory that the weights and the largest steps leave.
        self.rows = Rows(
            num_seqs,
            -(-max_model_len // block_size),
            block_size,
            model_config.vocab_size,
            self.device,
            mirrored=backend.mirrors_rows or capture_decode is not None,
        )
        self.executor: Any = self.model  # the model, or what computes the same in fewer calls
        self.graphs: Any = None

        def make_attention(num_blocks: int) -> Attention:
            return backend.attention(model_config, num_blocks, block_size, self.dtype, self.device)

        def profile(plan: StepPlan) -> None:
            self.attention = make_attention(1)  # everything is written to the null block
            self.attention.copy_blocks([(0, 0)])
            self.run(plan)

        plans = memory.largest_plans(
            config.max_num_batched_tokens, num_seqs, max_model_len, block_size
        )
        self.num_blocks = memory.num_kv_blocks(
            config, max_model_len, block_bytes, free_before, plans, profile
        )
        with memory.explain_out_of_memory(
            f"a KV cache of {self.num_blocks} blocks takes {(self.num_blocks + 1) * block_bytes:,} "
            "bytes, more than the memory holds; lower num_kvcache_blocks or kv_cache_memory_bytes"
        ):
            self.attention = make_attention(self.num_blocks + 1)

        # 3. Compiled layers or captured graphs, which reduce a decode step to few calls.
        self.executor = backend.compile_layers(self.model, self.attention) or self.model
        if capture_decode is not None:
            hidden = torch.empty(
                (num_seqs, model_config.hidden_size), dtype=self.dtype, device=self.device
            )
            with (
                torch.inference_mode(),
                memory.explain_out_of_memory(
                    "the remaining memory does not hold the CUDA graphs; lower max_num_seqs, "
                    "gpu_memory_utilization or kv_cache_memory_bytes, or set enforce_eager=True"
                ),
            ):
                self.graphs = capture_decode(self._decode, hidden)

    def run(self, plan: StepPlan) -> Callable[[], StepOutput]:
        """Launch a step. Returns a function that waits for the device and returns the output."""
        with torch.inference_mode(), self.guard(), self.backend_guard:
            self.rows.apply(plan)
            if plan.block_moves:
                self.attention.copy_blocks(plan.block_moves)
            if self.rows.mirror is not None and not plan.chunks:
                return self._run_decode(plan.decode_rows).wait
            step = self.rows.build(plan)
            self.attention.prepare(step.forward)
            hidden = self.executor.forward(step.forward, self.attention)
            output = PendingOutput(list)
            if len(step.sampling_rows):
                last = hidden[step.forward.logits_indices]
                output = self._sample(last, step.sampling, step.sampling_rows, step.rules)
            self._yield_of_chunks(plan.chunks, hidden, output)
            return output.wait

    def _run_decode(self, decode_rows: list[int]) -> PendingOutput:
        """Execute a step without chunks, from the mirror of the rows."""
        self.rows.advance(decode_rows)
        if self.graphs is not None:
            hidden, tokens = self.graphs.replay(decode_rows)
        else:
            hidden, tokens = self._decode(to_device(np.array(decode_rows), self.device))
        rules = self.rows.with_rules(decode_rows)
        if rules is None:
            return PendingOutput(start_copy(tokens))
        rows = to_device(np.array(decode_rows), self.device)
        return self._sample(hidden, self.rows.sampling_batch(rows), rows, rules)

    def _decode(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Sample a token for each of `rows` [S] -> hidden states [S, E] and tokens [S]."""
        batch, sampling = self.rows.decode_batch(rows)
        self.attention.prepare(batch)
        hidden = self.model.forward(batch, self.attention)
        tokens = self.sample(self.model.logits(hidden), sampling)
        self.rows.last_tokens[rows] = tokens.clamp(min=0)  # -1 is an error; see models/sampler.py
        return hidden, tokens

    def _sample(
        self, hidden: Tensor, sampling: SamplingBatch, rows: Tensor, rules: RulesBatch | None
    ) -> PendingOutput:
        """Sample a token for each of `rows` [R] from hidden states [R, E]."""
        raw = logits = self.executor.logits(hidden)
        if rules is not None and rules.changes_logits:
            length = int(self.rows.positions[rules.rows].max()) + 1
            logits = rules.apply(raw, sampling.positions, length)
        tokens = self.sample(logits, sampling)
        output = PendingOutput(start_copy(tokens))
        tokens = tokens.clamp(min=0)  # -1 is an error; see models/sampler.py
        self.rows.last_tokens[rows] = tokens
        if rules is None:
            return output
        if rules.changes_logits:
            rules.append(sampling.positions, tokens)
            output.errors = rules.errors
        if rules.reported:
            at = rules.reported_index
            if len(at) < len(tokens):
                raw, tokens = raw[at], tokens[at]
            output.reported = rules.reported
            output.logprobs = start_copy(self.token_logprobs(raw, tokens, rules.num_logprobs))
        if rules.host_rules:
            token_ids = output.token_ids()
            for i, row in rules.host_rules:
                row.output.append(token_ids[i])
        return output

    def _yield_of_chunks(self, chunks: list[Chunk], hidden: Tensor, output: PendingOutput) -> None:
        """Add hidden states and log-probabilities of the chunks, from hidden states [T, E]."""
        start, wanted = 0, []
        for chunk in chunks:
            if targets := chunk.logprob_targets:
                k = self.rows.rules[chunk.row].rules.prompt_logprobs or 0
                ids = to_device(np.array(targets), self.device)
                # In parts, because the memory profile does not include the logits of a whole chunk.
                parts = zip(hidden[start : start + len(ids)].split(64), ids.split(64), strict=True)
                copies = [
                    start_copy(self.token_logprobs(self.model.logits(part), part_ids, k))
                    for part, part_ids in parts
                ]
                output.prompts.append((chunk.row, targets, k, copies))
            start += len(chunk.token_ids)
            if chunk.yields is Yield.HIDDEN_STATE:
                output.hidden_rows.append(chunk.row)
                wanted.append(start - 1)
        if wanted:
            output.hidden_states = start_copy(
                hidden[to_device(np.array(wanted), self.device)].float()
            )

    def block_bytes(self, block_size: int) -> int:
        c = self.model_config
        return 2 * c.num_layers * block_size * c.num_kv_heads * c.head_dim * self.dtype.itemsize
