"""ModelRunner: executes plans on a device. It never sees a Sequence.

It owns the model, the KV cache (through its attention), the rows and the captured decode steps.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanovllm.batch import SamplingBatch, to_device
from nanovllm.config import EngineConfig
from nanovllm.models.backend import Attention
from nanovllm.models.config import ModelConfig
from nanovllm.models.logit_rules import RulesBatch
from nanovllm.plan import Chunk, StepOutput, StepPlan, Yield
from nanovllm.runner import memory
from nanovllm.runner.backends import device_guard, pick_device, pick_dtype
from nanovllm.runner.model_loader import load_model
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
        remedy = "out of memory; lower max_num_seqs, max_model_len or max_num_batched_tokens"
        with device_guard(self.device), memory.explain_out_of_memory(remedy):
            free_before = memory.Snapshot.of(self.device)
            weight_bytes = model_config.num_weights * self.dtype.itemsize
            memory.check_weights(directory.name, weight_bytes, self.dtype, free_before)
            memory.check_cache(config, self.block_bytes(config.kvcache_block_size), free_before)
            self.model, self.backend = load_model(
                config, model_config, directory, max_model_len, self.dtype, self.device
            )
            self.limits = (
                ThreadLimit() if self.device.type == "cpu" else partial(device_guard, self.device)
            )
            self.guard = self.backend.guard()
            if capture_decode is None and not config.enforce_eager:
                capture_decode = self.backend.capture_decode
            self.rows = Rows(
                config.max_num_seqs,
                -(-max_model_len // config.kvcache_block_size),
                config.kvcache_block_size,
                model_config.vocab_size,
                self.device,
                mirrored=self.backend.mirrors_rows or capture_decode is not None,
            )
            # The model, or what computes the same in fewer calls.
            self.compiled_model: Any = self.model
            self.graphs: Any = None
            self._make_cache(config, max_model_len, free_before)
            compiled = self.backend.compile_layers(self.model, self.attention)
            self.compiled_model = compiled or self.model
            if capture_decode is not None:
                self._capture(config.max_num_seqs, capture_decode)

    def run(self, plan: StepPlan) -> Callable[[], StepOutput]:
        """Launch a step. Returns a function that waits for the device and returns the output."""
        with torch.inference_mode(), self.limits(), self.guard:
            self.rows.apply(plan)
            if plan.block_moves:
                self.attention.copy_blocks(plan.block_moves)
            if self.rows.mirror is not None and not plan.chunks:
                return self._run_decode(plan.decode_rows).wait
            step = self.rows.build(plan)
            self.attention.prepare(step.forward)
            hidden = self.compiled_model.forward(step.forward, self.attention)
            output = PendingOutput(list)
            if len(step.sampling_rows):
                last = hidden[step.forward.logits_indices]
                output = self._sample(last, step.sampling, step.sampling_rows, step.rules)
            self._yield_of_chunks(plan.chunks, hidden, output)
            return output.wait

    def _run_decode(self, decode_rows: list[int]) -> PendingOutput:
        """Execute a step without chunks, from the mirror of the rows."""
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
        hidden = self.compiled_model.forward(batch, self.attention)
        tokens = self.backend.sample(self.compiled_model.logits(hidden), sampling)
        self.rows.record(rows, tokens)
        return hidden, tokens

    def _sample(
        self, hidden: Tensor, sampling: SamplingBatch, rows: Tensor, rules: RulesBatch | None
    ) -> PendingOutput:
        """Sample a token for each of `rows` [R] from hidden states [R, E]."""
        raw = logits = self.compiled_model.logits(hidden)
        if rules is not None and rules.changes_logits:
            logits = rules.apply(raw, sampling.positions)
        tokens = self.backend.sample(logits, sampling)
        output = PendingOutput(start_copy(tokens))
        tokens = self.rows.record(rows, tokens)
        if rules is None:
            return output
        if rules.changes_logits:
            rules.append(sampling.positions, tokens, output.token_ids)
            output.errors = rules.errors
        if rules.reported:
            at = rules.reported_index
            if len(at) < len(tokens):
                raw, tokens = raw[at], tokens[at]
            output.reported = rules.reported
            packed = self.backend.token_logprobs(raw, tokens, rules.num_logprobs)
            output.logprobs = start_copy(packed)
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
                    start_copy(self.backend.token_logprobs(self.model.logits(part), part_ids, k))
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

    # ---- start-up ----

    def _make_cache(
        self, config: EngineConfig, max_model_len: int, free_before: memory.Snapshot
    ) -> None:
        """Make the KV cache, which takes the memory that weights and the largest steps leave."""
        block_size = config.kvcache_block_size

        def make_attention(num_blocks: int) -> Attention:
            return self.backend.attention(
                self.model_config, num_blocks, block_size, self.dtype, self.device
            )

        def profile(plan: StepPlan) -> None:
            self.attention = make_attention(1)  # everything is written to the null block
            self.attention.copy_blocks([(0, 0)])
            self.run(plan)

        plans = memory.largest_plans(
            config.max_num_batched_tokens, config.max_num_seqs, max_model_len, block_size
        )
        block_bytes = self.block_bytes(block_size)
        self.num_blocks = memory.num_kv_blocks(
            config, max_model_len, block_bytes, free_before, plans, profile
        )
        with memory.explain_out_of_memory(
            f"a KV cache of {self.num_blocks} blocks takes {(self.num_blocks + 1) * block_bytes:,} "
            "bytes, more than the memory holds; lower num_kvcache_blocks or kv_cache_memory_bytes"
        ):
            self.attention = make_attention(self.num_blocks + 1)

    def _capture(self, num_seqs: int, capture_decode: Callable[[Callable, Tensor], Any]) -> None:
        """Capture the decode steps, which makes each a single call."""
        shape = num_seqs, self.model_config.hidden_size
        hidden = torch.empty(shape, dtype=self.dtype, device=self.device)
        with (
            torch.inference_mode(),
            memory.explain_out_of_memory(
                "the remaining memory does not hold the CUDA graphs; lower max_num_seqs, "
                "gpu_memory_utilization or kv_cache_memory_bytes, or set enforce_eager=True"
            ),
        ):
            self.graphs = capture_decode(self._decode, hidden)
