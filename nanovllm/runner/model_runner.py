"""ModelRunner: runs the model over what a plan says.

Owns: the model, the KV cache (through the attention backend) and the row buffers. Given: plans.
Mutates: the KV cache and its own row buffers. It never sees a sequence.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nanovllm.attention.sdpa import SdpaAttention
from nanovllm.checkpoint import weight_files
from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.models.qwen3 import Qwen3
from nanovllm.plan import StepPlan, TokenLogprobs
from nanovllm.runner.batch import RowBuffers, SamplingBatch
from nanovllm.runner.logit_rules import token_logprobs
from nanovllm.runner.sampler import sample
from nanovllm.runner.weights import load_weights, random_weights

logger = logging.getLogger("nanovllm")
CPU_CACHE_BYTES = 4 << 30  # what a CPU's KV cache takes at most, unless it is told a size


@dataclass(slots=True)
class Forward:
    """What `forward` leaves for `sample`."""

    hidden: Tensor  # [R, E], of the rows that draw a token
    sampling: SamplingBatch
    prompt_logprobs: dict[int, list[TokenLogprobs]]  # chunk -> one for each of its targets


@dataclass(slots=True)
class Drawn:
    tokens: Tensor  # [R] int64, on the device
    logprobs: dict[int, TokenLogprobs]  # of the R, those that asked
    prompt_logprobs: dict[int, list[TokenLogprobs]]  # chunk -> one for each of its targets


class ModelRunner:
    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, directory: Path, max_model_len: int
    ) -> None:
        self.device = pick_device(config.device)
        self.dtype = pick_dtype(config.dtype, self.device, model_config.dtype)
        self.model_config = model_config
        with torch_defaults(self.device, self.dtype):
            self.model = Qwen3(model_config, max_model_len)
        places = self.model.checkpoint_tensors()
        if config.load_format == "dummy":
            random_weights(places, config.seed)
        else:
            load_weights(places, weight_files(directory))
        del places
        self.model.pack()
        size = config.kvcache_block_size
        self.num_blocks = self._num_blocks(config, max_model_len)
        try:
            self.attention = SdpaAttention(
                model_config, self.num_blocks + 1, size, self.dtype, self.device
            )
        except RuntimeError as error:  # torch's out of memory, on either device
            raise ValueError(
                f"a KV cache of {self.num_blocks} blocks takes "
                f"{(self.num_blocks + 1) * self.block_bytes(size):,} bytes, more than there are; "
                "lower num_kvcache_blocks or kv_cache_memory_bytes"
            ) from error
        self.rows = RowBuffers(
            config.max_num_seqs,
            -(-max_model_len // size),
            size,
            model_config.vocab_size,
            self.device,
        )

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> "Forward":
        """Compute the plan's tokens."""
        self.rows.apply(plan)
        if plan.block_copies:
            self.attention.copy_blocks(plan.block_copies)
        batch, sampling = self.rows.build(plan)
        self.attention.prepare(batch)
        hidden = self.model(batch, self.attention)
        prompt_logprobs = {}
        for i, chunk in enumerate(plan.chunks):
            if chunk.targets:
                start = int(batch.query_start[i])
                logits = self.model.logits(hidden[start : start + len(chunk.targets)])
                rules = self.rows.rules[chunk.row].rules
                k = rules.prompt_logprobs or 0
                found = [
                    token_logprobs(x, t, k) for x, t in zip(logits, chunk.targets, strict=True)
                ]
                prompt_logprobs[i] = found
        return Forward(hidden[batch.logit_rows], sampling, prompt_logprobs)

    @torch.inference_mode()
    def sample(self, forward: "Forward") -> "Drawn":
        """Draw a token for each row that draws one."""
        drawn = Drawn(torch.empty(0, dtype=torch.int64), {}, forward.prompt_logprobs)
        if not forward.hidden.shape[0]:
            return drawn
        ruled = self.rows.ruled
        logits = self.model.logits(forward.hidden)
        raw = {i: logits[i].clone() for i, row in ruled if row.rules.logprobs is not None}
        for i, row in ruled:
            row.apply(logits[i])
        drawn.tokens = sample(logits, forward.sampling)
        self.rows.drawn(drawn.tokens)
        for i, row in ruled:
            token = int(drawn.tokens[i])
            row.drew(token)
            if row.rules.logprobs is not None:
                drawn.logprobs[i] = token_logprobs(raw[i], token, row.rules.logprobs)
        return drawn

    # ---- memory ----

    def block_bytes(self, block_size: int) -> int:
        c = self.model_config
        return 2 * c.num_layers * block_size * c.num_kv_heads * c.head_dim * self.dtype.itemsize

    def _num_blocks(self, config: EngineConfig, max_model_len: int) -> int:
        """Blocks for requests, from what the config asks for or the memory that is left."""
        block = self.block_bytes(config.kvcache_block_size)
        if config.num_kvcache_blocks is not None:
            return config.num_kvcache_blocks
        if config.kv_cache_memory_bytes is not None:
            num = config.kv_cache_memory_bytes // block - 1
            source = f"kv_cache_memory_bytes={config.kv_cache_memory_bytes:,}"
        else:
            memory = self._free_memory(config.gpu_memory_utilization)
            per_sequence = -(-max_model_len // config.kvcache_block_size)
            num = min(memory // block - 1, per_sequence * config.max_num_seqs)
            source = f"{memory / 2**20:,.0f} MiB of memory for it"
        if num < 1:
            raise ValueError(
                f"the KV cache has no room for one block: {source}, one block of "
                f"{config.kvcache_block_size} tokens needs {block:,} bytes, and so does the null "
                "block; raise gpu_memory_utilization or kv_cache_memory_bytes, or lower "
                "kvcache_block_size"
            )
        return num

    def _free_memory(self, utilization: float) -> int:
        """Bytes that the KV cache may take, now that the weights are loaded."""
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            return max(0, int(free - (1 - utilization) * total))
        # Half of what is left: activations, and whatever else the machine is used for.
        return min(CPU_CACHE_BYTES, available_host_memory() // 2)


def pick_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda' was asked for, but torch finds no GPU; use device='cpu'")
    return device


def pick_dtype(name: str, device: torch.device, stored: str | None) -> torch.dtype:
    if name == "auto":
        if device.type == "cpu":
            name = "bfloat16" if cpu_has_fast_bf16() else "float32"
        else:
            name = stored or "bfloat16"
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def cpu_has_fast_bf16() -> bool:
    """Whether the processor multiplies bf16 in hardware (AVX512-BF16, AMX, Arm's BF16)."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return any(f" {flag}" in flags for flag in ("avx512_bf16", "amx_bf16", "bf16"))


def available_host_memory() -> int:
    """Bytes that can be allocated without swapping, within the container's limit."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    group = Path("/sys/fs/cgroup")
    limit = group / "memory.max"
    if limit.is_file() and limit.read_text().strip() != "max":
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(
            stat["inactive_file"]
        )  # page cache
        available = min(available, int(limit.read_text()) - used)
    return max(0, available)


@contextmanager
def torch_defaults(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Build modules on the device and in the dtype that they end up in; never twice."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)
