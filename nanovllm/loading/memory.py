"""Computes the memory of the weights, and how many KV blocks fit next to them."""

import gc
import math
from dataclasses import dataclass, replace

import torch

from nanovllm.config import EngineConfig
from nanovllm.models.backend import Backend
from nanovllm.models.fp8 import FP8
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.qwen3 import Qwen3
from nanovllm.utils.host import available_host_memory

# Device memory that is left for CUDA graphs, whose number it limits, for fragmentation, penalties,
# and workspaces of libraries. cuBLAS takes up to 32 MiB for each thread that runs steps, and the
# profile measures only one thread.
CUDA_MARGIN = 512 << 20
CPU_CACHE_BYTES = 4 << 30  # the default limit of a CPU's KV cache and states


def num_weights(model: Qwen3) -> int:
    """Return the number of weights. A head that is tied to the embeddings counts once."""
    return sum(math.prod(tensor.shape) for tensor in model.checkpoint_tensors())


def weight_bytes(model: Qwen3) -> int:
    """Return the bytes of the weights of a model that is not loaded."""
    return sum(tensor.nbytes for tensor in model.tensors())


@dataclass
class MemoryBudget:
    """The sizes of weights, KV blocks and states, and the memory that was free before them."""

    config: EngineConfig
    device: torch.device
    free: int  # bytes that are free before the weights are loaded
    weight_bytes: int
    block_bytes: int
    num_host_blocks: int = 0  # of the host cache
    state_bytes: int = 0  # of the states of linear attention, of all rows and slots
    num_state_slots: int = 0  # states for the prefix cache

    def cache_bytes(self, free: int, scratch: int = 0) -> int:
        """Return the bytes that KV cache and states may take together.

        free: bytes that are free next to the weights. scratch: bytes that the largest steps need.
        """
        config = self.config
        if config.kv_cache_memory_bytes is not None:
            return config.kv_cache_memory_bytes
        if self.device.type == "cuda":
            total = torch.cuda.mem_get_info(self.device)[1]
            weights = self.free - free  # memory that was not free at first is not the engine's
            limit = int(config.gpu_memory_utilization * total) - weights
            return max(0, min(limit, free - CUDA_MARGIN) - scratch)
        # Half is left for activations and for other processes. The swap space is subtracted,
        # because the system counts it as free until it is written.
        size = (free - int(config.swap_space * 2**30)) // 2
        return max(0, min(size, CPU_CACHE_BYTES // config.tensor_parallel_size))

    def num_kv_blocks(self, max_model_len: int, free: int, scratch: int = 0) -> int:
        """Return the number of KV blocks for requests; the null block is not counted.

        `free` and `scratch` are as in `cache_bytes`. Raises ValueError if no request fits.
        """
        config = self.config
        if config.num_kv_cache_blocks is not None:
            return config.num_kv_cache_blocks
        size = self.cache_bytes(free, scratch)
        num = (size - self.state_bytes) // self.block_bytes - 1
        fewest = -(-2 // config.block_size)  # for a prompt and an output of one token each
        if num < fewest:
            needed = (fewest + 1) * self.block_bytes + self.state_bytes
            is_share = config.kv_cache_memory_bytes is None and self.device.type == "cuda"
            option = "gpu_memory_utilization" if is_share else "kv_cache_memory_bytes"
            raise ValueError(
                f"too little memory for the KV cache: it may take {size:,} of {free:,} free bytes, "
                f"and needs {needed:,} for the null block and a request of 2 tokens; raise "
                f"{option}, or lower block_size, max_num_seqs or max_num_batched_tokens"
            )
        if config.kv_cache_memory_bytes is not None:
            return num
        return min(num, -(-max_model_len // config.block_size) * config.max_num_seqs)

    def fitted_length(self, max_model_len: int, num_blocks: int) -> int:
        """Return max_model_len, limited to the tokens that `num_blocks` hold.

        Raises ValueError if the option max_model_len is set to more.
        """
        config = self.config
        num_tokens = num_blocks * self.config.block_size
        if config.max_model_len is not None and config.max_model_len > num_tokens:
            needed = -(-config.max_model_len // config.block_size)
            num_bytes = (needed + 1) * self.block_bytes + self.state_bytes
            raise ValueError(
                f"max_model_len={config.max_model_len:,} is more than the {num_tokens:,} tokens "
                f"that the KV cache holds; lower it to {num_tokens:,} or leave it out, or set "
                f"num_kv_cache_blocks to {needed:,}, or kv_cache_memory_bytes to {num_bytes:,}, or "
                "to more"
            )
        return min(max_model_len, num_tokens)


def plan_memory(
    config: EngineConfig, model_config: ModelConfig, backend: Backend, free: int, name: str
) -> MemoryBudget:
    """Divide `free` bytes between weights, states and KV cache, before they are allocated.

    name: the name of the model in messages.

    Raises ValueError if something does not fit.
    """
    dtype, device = backend.dtype, backend.device
    weights = weight_bytes(model_config.model_class().on_meta(model_config, like=backend))
    if weights > free:
        kind = config.quantization or str(dtype).removeprefix("torch.")
        smaller = ["dtype='bfloat16'", "quantization='int8'", "quantization='int4'"]
        while any(kind in option for option in smaller):
            del smaller[0]
        raise ValueError(
            f"the weights of {name} take {weights / 2**30:,.2f} GiB in {kind}, and "
            f"{free / 2**30:,.2f} GiB of memory are free on {device}; "
            f"{', '.join([*smaller, 'end other programs'])} or use a smaller model"
        )
    cache_dtype = dtype if config.kv_cache_dtype == "auto" else FP8
    block_bytes = max(1, model_config.block_bytes(config.block_size, cache_dtype.itemsize))
    requested = config.kv_cache_memory_bytes or 0
    if config.num_kv_cache_blocks is not None:
        requested = (config.num_kv_cache_blocks + 1) * block_bytes
    if requested > free:
        raise ValueError(
            f"a KV cache of {requested:,} bytes does not fit: {free:,} are free on {device}; "
            "lower num_kv_cache_blocks, block_size or kv_cache_memory_bytes"
        )
    budget = MemoryBudget(config, device, free, weights, block_bytes)
    if config.swap_space:
        from nanovllm.features.kv.host_cache.pool import num_host_blocks

        left = free - weights - max(requested, 2 * block_bytes)
        free_of_cpu = left if device.type == "cpu" else None
        budget.num_host_blocks = num_host_blocks(config, block_bytes, free_of_cpu)
    if state_bytes := model_config.state_bytes(dtype.itemsize):
        from nanovllm.features.models.hybrid.states import num_states

        limit = budget.cache_bytes(free - weights)
        rows, budget.num_state_slots, budget.state_bytes = num_states(config, state_bytes, limit)
        budget.config = replace(config, max_num_seqs=rows)
    return budget


def free_memory(device: torch.device, ranks: int = 1) -> int:
    """Return the free bytes of a device. `ranks` processes share the memory of a CPU."""
    if device.type != "cuda":
        return available_host_memory() // ranks
    # Memory that an earlier engine has released must not count as used by other processes.
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
