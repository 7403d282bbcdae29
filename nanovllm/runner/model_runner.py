"""ModelRunner: executes plans on a device. It never sees a Sequence.

It owns the model, the KV cache (through its attention), the rows and the captured decode steps.
"""

from collections.abc import Callable
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
from nanovllm.models.logit_rules import RowRules, token_logprobs
from nanovllm.models.qwen3 import Qwen3
from nanovllm.models.weights import load_weights, random_weights
from nanovllm.plan import FILTERS, Chunk, Join, RowSampling, StepOutput, StepPlan, TokenLogprobs
from nanovllm.runner import memory
from nanovllm.runner.backends import (
    device_guard,
    pick_backend,
    pick_device,
    pick_dtype,
    torch_defaults,
)
from nanovllm.runner.openmp import check_openmp
from nanovllm.runner.rows import Rows


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
        with device_guard(self.device):
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
        backend = pick_backend(config.attention_backend, self.device, self.dtype)
        if capture_decode is None and not config.enforce_eager:
            capture_decode = backend.capture_decode
        self.sample = backend.sample

        # 1. The model.
        weight_bytes = model_config.num_weights * self.dtype.itemsize
        memory.check_weights(directory.name, weight_bytes, self.dtype, free_before)
        with torch_defaults(self.device, self.dtype):
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

        plans = largest_plans(config.max_num_batched_tokens, num_seqs, max_model_len, block_size)
        if self.rows.mirror is None:
            del plans[0]  # without graphs a decode has no memory of its own
        block_bytes = self.block_bytes(block_size)
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

    def run(self, plan: StepPlan) -> StepOutput:
        """Execute a step. With the Triton backend it waits only for rules and prompt_logprobs."""
        with torch.inference_mode(), device_guard(self.device):
            self.rows.apply(plan)
            if plan.block_copies:
                self.attention.copy_blocks(plan.block_copies)
            if self.rows.mirror is not None and not plan.chunks:
                return self._run_decode(plan.decode_rows)
            step = self.rows.build(plan)
            self.attention.prepare(step.forward)
            hidden = self.executor.forward(step.forward, self.attention)
            output = StepOutput(list)
            if len(step.sampling_rows):
                last = hidden[step.forward.logits_indices]
                output = self._sample(last, step.sampling, step.sampling_rows, step.ruled)
            output.prompt_logprobs = self._prompt_logprobs(plan.chunks, hidden)
            return output

    def _run_decode(self, decode_rows: list[int]) -> StepOutput:
        """Execute a step without chunks, from the mirror of the rows."""
        self.rows.advance(decode_rows)
        if self.graphs is not None:
            hidden, tokens = self.graphs.replay(decode_rows)
        else:
            hidden, tokens = self._decode(to_device(np.array(decode_rows), self.device))
        ruled = self.rows.with_rules(decode_rows)
        if not ruled:
            return StepOutput(start_copy(tokens))
        rows = to_device(np.array(decode_rows), self.device)
        return self._sample(hidden, self.rows.sampling_batch(rows), rows, ruled)

    def _decode(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Sample a token for each of `rows` [S] -> hidden states [S, E] and tokens [S]."""
        batch, sampling = self.rows.decode_batch(rows)
        self.attention.prepare(batch)
        hidden = self.model.forward(batch, self.attention)
        tokens = self.sample(self.model.logits(hidden), sampling)
        self.rows.last_tokens[rows] = tokens
        return hidden, tokens

    def _sample(
        self,
        hidden: Tensor,
        sampling: SamplingBatch,
        rows: Tensor,
        ruled: list[tuple[int, RowRules]],
    ) -> StepOutput:
        """Sample a token for each of `rows` [R] from hidden states [R, E]."""
        logits = self.executor.logits(hidden)
        if ruled:
            logits = logits.float()
        raw = {i: logits[i].clone() for i, row in ruled if row.rules.logprobs is not None}
        for i, row in ruled:
            row.apply(logits[i])
        tokens = self.sample(logits, sampling)
        self.rows.last_tokens[rows] = tokens
        output = StepOutput(start_copy(tokens))
        token_ids = output.wait() if ruled else []
        for i, row in ruled:
            row.append(token_ids[i])
            if row.rules.logprobs is not None:
                output.logprobs[i] = token_logprobs(raw[i], token_ids[i], row.rules.logprobs)
        return output

    def _prompt_logprobs(
        self, chunks: list[Chunk], hidden: Tensor
    ) -> dict[int, list[TokenLogprobs]]:
        """Return the log-probabilities of the targets by index of the chunk. hidden [T, E]."""
        results, start = {}, 0
        for i, chunk in enumerate(chunks):
            targets = chunk.logprob_targets
            if targets:
                k = self.rows.rules[chunk.row].rules.prompt_logprobs or 0
                # In parts, because the memory profile does not include the logits of a whole chunk.
                parts = hidden[start : start + len(targets)].split(256)
                logits = (row for part in parts for row in self.model.logits(part).float())
                results[i] = [token_logprobs(*x, k) for x in zip(logits, targets, strict=True)]
            start += len(chunk.token_ids)
        return results

    def block_bytes(self, block_size: int) -> int:
        c = self.model_config
        return 2 * c.num_layers * block_size * c.num_kv_heads * c.head_dim * self.dtype.itemsize


def largest_plans(
    max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int, block_size: int
) -> list[StepPlan]:
    """A decode of all rows, and a step with as many tokens in as many rows as possible.

    In this order: the decode computes position 0 of each row, and the chunks may end with the last.
    """
    num_rows = min(max_num_seqs, max_num_batched_tokens)
    length = min(max_num_batched_tokens // num_rows, max_model_len)
    filters = tuple(1 if isinstance(off, int) else 0.5 for off in FILTERS.values())
    sampling = RowSampling(temperature=1.0, seed=0, filters=filters)
    table = [0] * -(-length // block_size)
    chunks = StepPlan(
        joins=[Join(row, table, sampling) for row in range(num_rows)],
        chunks=[Chunk(row, 0, [0] * length, sample=True) for row in range(num_rows)],
        num_tokens=num_rows * length,
    )
    return [StepPlan(decode_rows=list(range(max_num_seqs)), num_tokens=max_num_seqs), chunks]


def start_copy(tokens: Tensor) -> Callable[[], list[int]]:
    """Start copying tokens [R] to the host. Returns a function that waits for them."""
    if tokens.device.type != "cuda":
        return tokens.clone().tolist  # the next replay of a graph overwrites `tokens`
    host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
    host.copy_(tokens, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def wait() -> list[int]:
        copied.synchronize()
        token_ids: list[int] = host.tolist()
        return token_ids

    return wait
