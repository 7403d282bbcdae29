"""Computes the memory of the weights, and how many KV blocks fit next to them."""

import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch

from nanovllm.config import EngineConfig
from nanovllm.models.backend import Backend
from nanovllm.models.qwen3 import Qwen3
from nanovllm.utils.host import available_host_memory

# Parts of the messages of the RuntimeError that torch raises if an allocation on a CPU fails.
OUT_OF_MEMORY = ("out of memory", "allocate memory", "not enough memory")
# Device memory left for graph nodes, fragmentation, penalties and workspaces of libraries. cuBLAS
# takes up to 32 MiB for each thread that runs steps, and the profile measures only one thread.
CUDA_MARGIN = 512 << 20
CPU_CACHE_BYTES = 4 << 30  # the default limit of a CPU's KV cache and states

# Options whose weights take less memory, each less than the one before it.
SMALLER = {
    "bfloat16": "dtype='bfloat16'",
    "int8": "quantization='int8'",
    "int4": "quantization='int4'",
}


def num_weights(model: Qwen3) -> int:
    """Return the number of weights. A head that is tied to the embeddings counts once."""
    return sum(math.prod(tensor.shape) for tensor in model.checkpoint_tensors())


def weight_bytes(model: Qwen3, backend: Backend) -> int:
    """Return the bytes of the weights as `backend` stores them before `after_load`."""
    meta = type(backend)(torch.device("meta"), backend.dtype)
    size, num_others = 0, num_weights(model)
    for linear in model.linears():
        outputs, inputs = linear.weight.shape
        size += meta.make_weight(outputs, inputs, [*linear.projections]).nbytes
        num_others -= outputs * inputs
    return size + num_others * backend.dtype.itemsize


@dataclass(frozen=True)
class MemoryBudget:
    """The memory that weights take, and that KV cache and states of linear attention may take."""

    config: EngineConfig
    device: torch.device
    free: int  # bytes that are free before the weights are loaded
    weight_bytes: int
    block_bytes: int
    state_bytes: int = 0  # of the states of linear attention, of all rows and slots
    num_state_slots: int = 0  # states for the prefix cache

    @property
    def free_after_load(self) -> int:
        """An estimate of the bytes that are free after the weights are loaded."""
        return self.free - self.weight_bytes

    def cache_bytes(self, free: int, scratch: int = 0) -> tuple[int, str]:
        """Return the bytes that KV cache and states may take together, and what limits them.

        free: bytes that are free next to the weights. scratch: bytes that the largest steps need.
        """
        config, gib = self.config, 2**30
        if (size := config.kv_cache_memory_bytes) is not None:
            return size, f"kv_cache_memory_bytes={size:,}"
        if self.device.type == "cpu":
            # Half is left for activations and for other processes. The swap space is subtracted,
            # because the system counts it as free until it is written.
            size = (free - int(config.swap_space * gib)) // 2
            size = max(0, min(CPU_CACHE_BYTES // config.tensor_parallel_size, size))
            return size, f"{size / 2**20:,.0f} MiB, half of the free memory and at most 4 GiB"
        total = torch.cuda.mem_get_info(self.device)[1]
        weights = self.free - free  # memory that was not free at first belongs to other processes
        utilization = config.gpu_memory_utilization
        size = min(int(utilization * total) - weights, free - CUDA_MARGIN) - scratch
        return max(0, size), (
            f"{max(0, size) / gib:.2f} GiB of the GPU's {total / gib:.2f}, of which "
            f"{free / gib:.2f} is free (weights hold {weights / gib:.2f}, the largest step needs "
            f"{scratch / gib:.2f}, gpu_memory_utilization={utilization})"
        )

    def num_kv_blocks(self, max_model_len: int, free: int, scratch: int = 0) -> int:
        """Return the number of KV blocks for requests; the null block is not counted.

        `free` and `scratch` are as in `cache_bytes`. Raises ValueError if the shortest request does
        not fit. On a GPU, a request of max_model_len must fit if that option is set.
        """
        config = self.config
        if config.num_kv_cache_blocks is not None:
            return config.num_kv_cache_blocks
        size, limit = self.cache_bytes(free, scratch)
        num = (size - self.state_bytes) // self.block_bytes - 1
        shortest, remedy = 2, "Lower block_size, or end other programs"  # a prompt and an output
        if config.kv_cache_memory_bytes is not None:
            remedy = "Raise kv_cache_memory_bytes, or lower block_size"
        elif self.device.type == "cuda":
            shortest = config.max_model_len or shortest
            remedy = (
                "Lower max_model_len, block_size, max_num_batched_tokens or max_num_seqs, or raise "
                "gpu_memory_utilization"
            )
        needed = -(-shortest // config.block_size)
        if num < needed:
            mib = (needed + 1) * self.block_bytes / 2**20
            states = f", and states {self.state_bytes:,} bytes" if self.state_bytes else ""
            raise ValueError(
                f"too little memory for the KV cache: it may take {limit}; the null block and a "
                f"request of {shortest:,} tokens need {mib:,.2f} MiB{states}. {remedy}"
            )
        if config.kv_cache_memory_bytes is not None:
            return num
        return min(num, -(-max_model_len // config.block_size) * config.max_num_seqs)

    @property
    def requested_bytes(self) -> int:
        """The bytes of the KV cache that an option requests, or 0."""
        if self.config.num_kv_cache_blocks is not None:
            return (self.config.num_kv_cache_blocks + 1) * self.block_bytes
        return self.config.kv_cache_memory_bytes or 0

    @cached_property  # the host cache takes the memory that was free
    def num_host_blocks(self) -> int:
        """The number of blocks in the host cache. Raises ValueError if they do not fit."""
        if not self.config.swap_space:
            return 0
        from nanovllm.features.memory.host_cache.pool import num_host_blocks

        cache = max(self.requested_bytes, 2 * self.block_bytes)
        is_cpu = self.device.type == "cpu"
        return num_host_blocks(
            self.config, self.block_bytes, self.free_after_load - cache if is_cpu else None
        )

    def check(self, name: str, dtype: torch.dtype) -> None:
        """Raise ValueError if the weights of `name`, or a cache of a requested size, do not fit."""
        if self.weight_bytes > self.free:
            kind = self.config.quantization or str(dtype)[6:]
            kinds = list(SMALLER)
            smaller = kinds[kinds.index(kind) + 1 :] if kind in kinds else kinds
            remedies = ["end other programs", *(f"set {SMALLER[other]}" for other in smaller)]
            raise ValueError(
                f"the weights of {name} take {self.weight_bytes / 2**30:,.2f} GiB in {kind}, "
                f"and {self.free / 2**30:,.2f} GiB of memory are free on {self.device}; "
                f"{', '.join(remedies)}, or use a smaller model"
            )
        if self.requested_bytes > self.free:
            raise ValueError(
                f"a KV cache of {self.requested_bytes:,} bytes does not fit in the {self.free:,} "
                f"bytes that are free on {self.device}; lower num_kv_cache_blocks, block_size or "
                "kv_cache_memory_bytes"
            )
        _ = self.num_host_blocks  # raises ValueError if they do not fit

    def fitted_length(self, max_model_len: int, num_blocks: int) -> int:
        """Return max_model_len, limited to the tokens that `num_blocks` hold.

        Raises ValueError if the option max_model_len is set to more.
        """
        config, num_tokens = self.config, num_blocks * self.config.block_size
        if config.max_model_len is not None and config.max_model_len > num_tokens:
            needed = -(-config.max_model_len // config.block_size)
            num_bytes = (needed + 1) * self.block_bytes + self.state_bytes
            raise ValueError(
                f"max_model_len={config.max_model_len:,} is more than the {num_tokens:,} tokens "
                f"that the KV cache holds; lower max_model_len to {num_tokens:,} or leave it out, "
                f"or set num_kv_cache_blocks to {needed:,}, or kv_cache_memory_bytes to "
                f"{num_bytes:,}, or to more"
            )
        return min(max_model_len, num_tokens)


def free_memory(device: torch.device, ranks: int = 1) -> int:
    """Return the free bytes of a device. `ranks` processes share the memory of a CPU."""
    if device.type != "cuda":
        return available_host_memory() // ranks
    # Memory that an earlier engine has released must not count as used by other processes.
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


@contextmanager
def explain_out_of_memory(message: str) -> Iterator[None]:
    """Raise ValueError(message) if the `with` block runs out of memory."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ValueError(message) from error
    except RuntimeError as error:
        if not any(words in str(error) for words in OUT_OF_MEMORY):
            raise
        raise ValueError(message) from error
