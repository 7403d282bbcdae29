"""ModelRunner: runs the model over what a plan says.

Owns: the model, the KV cache (through the attention backend), the row buffers and the decode graphs.
Given: plans. Mutates: the KV cache and its own row buffers. It never sees a sequence.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nanovllm.attention.backend import AttentionBackend
from nanovllm.attention.sdpa import SdpaAttention
from nanovllm.checkpoint import weight_files
from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.models.qwen3 import Qwen3
from nanovllm.plan import StepPlan, TokenLogprobs
from nanovllm.runner import memory
from nanovllm.runner.batch import ForwardBatch, RowBuffers, SamplingBatch, send
from nanovllm.runner.choose import current, pick_device, pick_dtype, pick_kernels, torch_defaults
from nanovllm.runner.cuda_graph import Capture, CudaCapture, DecodeGraphs
from nanovllm.runner.logit_rules import token_logprobs
from nanovllm.runner.weights import load_weights, random_weights


@dataclass(slots=True)
class Forward:
    """What `forward` leaves for `sample`."""

    hidden: Tensor  # [R, E], of the rows that draw a token
    sampling: SamplingBatch | None  # None: nothing is left to draw
    prompt_logprobs: dict[int, list[TokenLogprobs]]  # chunk -> one for each of its targets
    tokens: Tensor | None = None  # [R], if a graph drew them already


@dataclass(slots=True)
class Drawn:
    tokens: Tensor  # [R] int64, on the host, but perhaps not there yet
    logprobs: dict[int, TokenLogprobs]  # of the R, those that asked
    prompt_logprobs: dict[int, list[TokenLogprobs]]  # chunk -> one for each of its targets
    arrived: torch.cuda.Event | None = None

    def read(self) -> list[int]:
        """The tokens; waits for the device."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.tokens.tolist()


class ModelRunner:
    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        directory: Path,
        max_model_len: int,
        capture: Capture | None = None,
    ) -> None:
        """`capture` records decode; None: CUDA's own where the device has it."""
        self.device = pick_device(config.device)
        self.dtype = pick_dtype(config.dtype, self.device, model_config.dtype)
        self.model_config = model_config
        with current(self.device):
            self._load(config, directory, max_model_len, capture)

    def _load(
        self, config: EngineConfig, directory: Path, max_model_len: int, capture: Capture | None
    ) -> None:
        model_config = self.model_config
        before = memory.Snapshot.of(self.device)
        backend, ops, self.draw = pick_kernels(config.attention_backend, self.device, self.dtype)
        with torch_defaults(self.device, self.dtype):
            self.model = Qwen3(model_config, max_model_len, ops)
        places = self.model.checkpoint_tensors()
        if config.load_format == "dummy":
            random_weights(places, config.seed)
        else:
            load_weights(places, weight_files(directory))
        del places
        self.model.pack()
        # torch's attention is called with lengths that the host must know: no graph can hold that.
        recordable = self.device.type == "cuda" and backend is not SdpaAttention
        if capture is None and recordable and not config.enforce_eager:
            capture = CudaCapture()

        def make_attention(num_blocks: int) -> AttentionBackend:
            size = config.kvcache_block_size
            return backend(model_config, num_blocks, size, self.dtype, self.device)

        def largest_step(num_tokens: int) -> None:
            attention = make_attention(1)
            attention.copy_blocks([(0, 0)])
            self._largest_step(attention, num_tokens, config, max_model_len)

        steps = [config.max_num_batched_tokens]  # a graph's memory is not shared with the others'
        steps += [config.max_num_seqs] if capture is not None else []
        self.num_blocks = memory.num_kv_blocks(
            config, max_model_len, self.block_bytes(config.kvcache_block_size), before,
            [lambda tokens=tokens: largest_step(tokens) for tokens in steps],  # type: ignore[misc]
        )  # fmt: skip
        with memory.needed(
            f"a KV cache of {self.num_blocks} blocks takes "
            f"{(self.num_blocks + 1) * self.block_bytes(config.kvcache_block_size):,} bytes, more "
            "than there are; lower num_kvcache_blocks or kv_cache_memory_bytes"
        ):
            self.attention = make_attention(self.num_blocks + 1)
        # The model, or what computes the same in fewer calls.
        self.layers = ops.compile_layers(self.model, self.attention) or self.model
        self.rows = RowBuffers(
            config.max_num_seqs,
            -(-max_model_len // config.kvcache_block_size),
            config.kvcache_block_size,
            model_config.vocab_size,
            self.device,
        )
        self.graphs: DecodeGraphs | None = None
        if capture is not None:
            hidden = torch.empty(
                (config.max_num_seqs, model_config.hidden_size),
                dtype=self.dtype, device=self.device,
            )  # fmt: skip
            with (
                torch.inference_mode(),
                memory.needed(
                    "the memory left does not hold the CUDA graphs; lower gpu_memory_utilization, "
                    "kv_cache_memory_bytes or max_num_seqs, or set enforce_eager=True"
                ),
            ):
                self.graphs = DecodeGraphs(self.rows, hidden, self._decode, capture)

    def forward(self, plan: StepPlan) -> "Forward":
        """Compute the plan's tokens."""
        with torch.inference_mode(), current(self.device):
            return self._forward(plan)

    def _forward(self, plan: StepPlan) -> "Forward":
        self.rows.apply(plan)
        if self.graphs is not None:
            self.graphs.apply(plan, self.rows)
        if plan.block_copies:
            self.attention.copy_blocks(plan.block_copies)
        if self.graphs is not None and not plan.chunks:
            return self._replay(self.graphs, plan)
        batch, sampling = self.rows.build(plan)
        if self.graphs is not None:
            self.graphs.moved(plan, self.rows)
        self.attention.prepare(batch)
        hidden = self.layers.forward(batch, self.attention)
        prompt_logprobs = {}
        for i, chunk in enumerate(plan.chunks):
            if chunk.targets:
                start = int(batch.query_start[i])
                rules = self.rows.rules[chunk.row].rules
                k = rules.prompt_logprobs or 0
                of_chunk = hidden[start : start + len(chunk.targets)]
                # In parts: the logits of a whole chunk would be gigabytes, which no profile counts.
                logits = (
                    x for part in of_chunk.split(256) for x in self.model.logits(part).float()
                )
                prompt_logprobs[i] = [
                    token_logprobs(x, t, k) for x, t in zip(logits, chunk.targets, strict=True)
                ]
        return Forward(hidden[batch.logit_rows], sampling, prompt_logprobs)

    def _replay(self, graphs: DecodeGraphs, plan: StepPlan) -> "Forward":
        """A decode by its graph, the sampler included; rows with rules are sampled again, by `sample`."""
        if self.rows.rules.keys().isdisjoint(plan.decode_rows):
            self.rows.advance(plan.decode_rows)
            hidden, tokens = graphs.replay(plan.decode_rows)
            return Forward(hidden, None, {}, tokens)
        _, sampling = self.rows.build(plan)
        hidden, tokens = graphs.replay(plan.decode_rows)
        return Forward(hidden, sampling, {}, None if self.rows.ruled else tokens)

    def _decode(self, batch: ForwardBatch, sampling: SamplingBatch) -> tuple[Tensor, Tensor]:
        """What a graph holds: hidden states [S, E] and tokens [S] of a batch without chunks."""
        self.attention.prepare(batch)
        hidden = self.model.forward(batch, self.attention)
        return hidden, self.draw(self.model.logits(hidden), sampling)

    def sample(self, forward: "Forward") -> "Drawn":
        """Draw a token for each row that draws one."""
        with torch.inference_mode(), current(self.device):
            return self._sample(forward)

    def _sample(self, forward: "Forward") -> "Drawn":
        drawn = Drawn(torch.empty(0, dtype=torch.int64), {}, forward.prompt_logprobs)
        if not forward.hidden.shape[0]:
            return drawn
        if forward.tokens is not None:
            return to_host(forward.tokens, drawn)
        assert forward.sampling is not None
        ruled = self.rows.ruled
        logits = self.layers.logits(forward.hidden)
        if ruled:
            logits = logits.float()
        raw = {i: logits[i].clone() for i, row in ruled if row.rules.logprobs is not None}
        for i, row in ruled:
            row.apply(logits[i])
        tokens = self.draw(logits, forward.sampling)
        self.rows.drawn(tokens)
        to_host(tokens, drawn)
        known = drawn.read() if ruled else []
        for i, row in ruled:
            row.drew(known[i])
            if row.rules.logprobs is not None:
                drawn.logprobs[i] = token_logprobs(raw[i], known[i], row.rules.logprobs)
        return drawn

    def block_bytes(self, block_size: int) -> int:
        c = self.model_config
        return 2 * c.num_layers * block_size * c.num_kv_heads * c.head_dim * self.dtype.itemsize

    @torch.inference_mode()
    def _largest_step(
        self, attention: AttentionBackend, num_tokens: int, config: EngineConfig, longest: int
    ) -> None:
        """A step of `num_tokens` in as many sequences as there can be, all in the null block."""
        seqs = min(config.max_num_seqs, num_tokens)
        lens = np.full(seqs, min(num_tokens // seqs, longest), np.int64)
        positions = np.concatenate([np.arange(n) for n in lens])
        ends = np.cumsum(lens)
        zeros = send(np.zeros(len(positions), np.int64), self.device)
        batch = ForwardBatch(
            input_ids=zeros,
            positions=send(positions, self.device),
            slots=send(positions % config.kvcache_block_size, self.device),
            query_start=send(np.concatenate(([0], ends)).astype(np.int32), self.device),
            context_lens=send(lens, self.device),
            block_tables=torch.zeros(
                (seqs, -(-int(lens[0]) // config.kvcache_block_size)),
                dtype=torch.int32, device=self.device,
            ),
            logit_rows=send(ends - 1, self.device),
            num_decodes=seqs if seqs == len(positions) else 0,
        )  # fmt: skip
        row = torch.ones(seqs, device=self.device)
        sampling = SamplingBatch(
            row, zeros[:seqs] + 1, row / 2, row / 2, zeros[:seqs], zeros[:seqs],
            all_greedy=False, any_top_k=True, any_top_p=True, any_min_p=True,
        )  # fmt: skip
        attention.prepare(batch)
        hidden = self.model.forward(batch, attention)[batch.logit_rows]
        self.draw(self.model.logits(hidden), sampling)


def to_host(tokens: Tensor, drawn: Drawn) -> Drawn:
    """Start copying the tokens to the host; `drawn` knows when they are there."""
    if tokens.device.type != "cuda":
        drawn.tokens = tokens.clone()  # a replay overwrites its own
        return drawn
    drawn.tokens = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
    drawn.tokens.copy_(tokens, non_blocking=True)
    drawn.arrived = torch.cuda.Event()
    drawn.arrived.record()
    return drawn
