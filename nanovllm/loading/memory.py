"""Computes the memory of the weights, and how many KV blocks fit next to them."""

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from nanovllm.config import EngineConfig
from nanovllm.models.qwen3 import Qwen3
from nanovllm.plan import FILTERS, Chunk, LogitRules, NewRow, ResultKind, RowSampling, StepPlan
from nanovllm.utils.host import available_host_memory

# Parts of the messages of the RuntimeError that torch raises if an allocation on a CPU fails.
OUT_OF_MEMORY = ("out of memory", "allocate memory", "not enough memory")
# Device memory left for graph nodes, fragmentation, penalties and workspaces of libraries. cuBLAS
# takes up to 32 MiB for each thread that runs steps, and `num_kv_blocks` measures only one thread.
CUDA_MARGIN = 512 << 20
CPU_CACHE_BYTES = 4 << 30  # the default limit of a CPU's KV cache
INT4 = "quantization='int4', which takes about two thirds of int8"
INT8 = "quantization='int8', which takes about half of bfloat16"
# Kind of weights -> what takes less memory.
SMALLER = {
    "float32": ("dtype='bfloat16', which takes half", INT8, INT4),
    "bfloat16": (INT8, INT4),
    "float16": (INT8, INT4),
    "int8": (INT4,),
}


def num_weights(model: Qwen3) -> int:
    """Return the number of weights. A head that is tied to the embeddings counts once."""
    return sum(math.prod(tensor.shape) for tensor in model.checkpoint_tensors())


def weight_bytes(model: Qwen3) -> int:
    """Return the bytes of the weights as the backend stores them before `after_load`."""
    linears = [linear.weight for linear in model.linears()]
    num_others = num_weights(model) - sum(math.prod(weight.shape) for weight in linears)
    return sum(weight.nbytes for weight in linears) + num_others * model.norm.itemsize


@dataclass(frozen=True)
class Room:
    """The memory for weights and KV blocks, computed before any of it is allocated."""

    config: EngineConfig
    device: torch.device
    free: int  # bytes that are free before the weights are loaded
    weight_bytes: int
    block_bytes: int
    state_bytes: int = 0  # of the states of linear attention, of all rows and slots
    num_state_slots: int = 0  # states for the prefix cache

    @cached_property
    def requested_blocks(self) -> int | None:
        """The number of KV blocks for requests, or None if no option sets it."""
        if self.config.num_kv_cache_blocks is not None:
            return self.config.num_kv_cache_blocks
        size = self.config.kv_cache_memory_bytes
        if size is None:
            return None
        num = (size - self.state_bytes) // self.block_bytes - 1
        if num < 1:
            states = f"the states take {self.state_bytes:,} bytes, " if self.state_bytes else ""
            raise ValueError(
                f"kv_cache_memory_bytes={size:,} has no room for one block: {states}a block of "
                f"{self.config.block_size} tokens takes {self.block_bytes:,} bytes, and "
                "the null block takes as many; raise it, or lower block_size"
            )
        return num

    @cached_property
    def max_bytes(self) -> int:
        """An upper bound on the bytes of the KV cache and the states."""
        size, requested = self.free - self.weight_bytes, self.config.kv_cache_memory_bytes
        if requested is not None:
            return min(size, requested)
        if self.device.type == "cpu":
            size = min(size, CPU_CACHE_BYTES // self.config.tensor_parallel_size)
        return size

    @cached_property
    def max_blocks(self) -> int:
        """An upper bound on `num_kv_blocks`."""
        num = (self.max_bytes - self.state_bytes) // self.block_bytes - 1  # and the null block
        return self.requested_blocks or max(1, num)

    @cached_property
    def num_host_blocks(self) -> int:
        """The number of blocks in the host cache. Raises ValueError if they do not fit."""
        if not self.config.swap_space:
            return 0
        free, where = available_host_memory() // self.config.tensor_parallel_size, ""
        if self.device.type == "cpu":
            cache = ((self.requested_blocks or 1) + 1) * self.block_bytes
            free, where = self.free - self.weight_bytes - cache, " next to weights and KV cache"
        from nanovllm.features.memory.host_cache.pool import num_host_blocks

        return num_host_blocks(self.config, self.block_bytes, free, where)

    def check(self, name: str, dtype: torch.dtype, note: str = "") -> None:
        """Raise ValueError if the weights of `name`, or a cache of a requested size, do not fit.

        `note` is what the message adds to the bytes of the weights.
        """
        if self.weight_bytes > self.free:
            kind = self.config.quantization or str(dtype)[6:]
            smaller = "".join(f", set {what}" for what in SMALLER.get(kind, ()))
            raise ValueError(
                f"the weights of {name} take {self.weight_bytes / 2**30:,.2f} GiB in {kind}{note}, "
                f"and {self.free / 2**30:,.2f} GiB of memory are free on {self.device}; "
                f"end other programs{smaller}, or use a smaller model"
            )
        size = ((self.requested_blocks or 0) + 1) * self.block_bytes
        if self.requested_blocks is not None and size > self.free:
            raise ValueError(
                f"a KV cache of {size:,} bytes does not fit in the {self.free:,} bytes that are "
                f"free on {self.device}; lower num_kv_cache_blocks, block_size or "
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
            option, value, more = "kv_cache_memory_bytes", config.kv_cache_memory_bytes, num_bytes
            if config.num_kv_cache_blocks is not None:
                option, value, more = "num_kv_cache_blocks", config.num_kv_cache_blocks, needed
            given = f" with {option}={value:,}" if value else ""
            is_sized_by_gpu = not value and self.device.type == "cuda"
            remedy = " (or raise gpu_memory_utilization)" * is_sized_by_gpu
            raise ValueError(
                f"max_model_len={config.max_model_len:,} is more than the {num_tokens:,} tokens "
                f"that the KV cache holds{given}; lower max_model_len to {num_tokens:,} or leave "
                f"it out, or set {option} to {more:,} or more{remedy}"
            )
        return min(max_model_len, num_tokens)

    def num_kv_blocks(self, max_model_len: int, run: Callable[[StepPlan], None]) -> int:
        """Return the number of KV blocks for requests. Call it after the weights are loaded.

        On a GPU, the largest steps are run to measure their scratch memory. The sum over the steps
        is reserved, because graphs use a separate memory pool. Raises ValueError if the shortest
        request does not fit. On a GPU, a request of max_model_len must fit if that option is set.
        """
        config, block_bytes = self.config, self.block_bytes
        scratch = 0
        if self.device.type == "cuda":
            plans = largest_plans(config, max_model_len)
            scratch = sum(_scratch_bytes(run, plan) for plan in plans)
        if self.requested_blocks is not None:
            return self.requested_blocks
        shortest = 2  # a prompt and an output have at least one token each
        if self.device.type == "cuda":
            size, where = _cuda_room(self, scratch)
            shortest = config.max_model_len or shortest
            remedy = (
                "Lower max_model_len, block_size, max_num_batched_tokens or max_num_seqs, "
                "or raise gpu_memory_utilization"
            )
        else:
            # Half is left for activations and for other processes. The swap space of all ranks is
            # subtracted, because the system counts it as free until it is written.
            swap = int(config.swap_space * 2**30) * config.tensor_parallel_size
            size = min(CPU_CACHE_BYTES, (available_host_memory() - swap) // 2)
            size = size // config.tensor_parallel_size - self.state_bytes
            where = f"{size / 2**20:,.0f} MiB of memory, half of what is free and at most 4 GiB"
            remedy = "Lower block_size, or end other programs"
        num = size // block_bytes - 1
        needed = -(-shortest // config.block_size)
        if num < needed:
            raise ValueError(
                f"too little memory for the KV cache: it may take {where}; the null block and a "
                f"request of {shortest:,} tokens need {(needed + 1) * block_bytes / 2**20:,.0f} "
                f"MiB. {remedy}"
            )
        return min(num, -(-max_model_len // config.block_size) * config.max_num_seqs)


def largest_plans(config: EngineConfig, max_model_len: int) -> Iterator[StepPlan]:
    """Yield the plans that need the most memory and together use every kernel variant.

    The first plan decodes all rows with rules, of which one has penalties, and the second decodes
    one row. The third computes as many tokens in as many rows as possible, and scores all of them.
    It is last, because a row may be full after it, and a decode needs a free position.
    """
    num_seqs, budget = config.max_num_seqs, config.max_num_batched_tokens
    num_rows = min(num_seqs, budget)
    length = min(budget // num_rows, max_model_len)
    table = [0] * -(-length // config.block_size)

    def new_rows(rules: list[LogitRules | None]) -> list[NewRow]:
        filters = tuple(1 if isinstance(off, int) else 0.5 for off in FILTERS.values())
        sampling = [RowSampling(1.0, seed=0, filters=filters, rules=each) for each in rules]
        return [NewRow(row, table, each, prompt=[0]) for row, each in enumerate(sampling)]

    rules = LogitRules(logit_bias=((0, 1.0),), allowed_token_ids=(0,), logprobs=1)
    # Penalties of all rows at the largest length would need gigabytes, which requests rarely use.
    penalized = replace(rules, repetition_penalty=2.0)
    new = new_rows([penalized, *[rules] * (num_seqs - 1)])
    yield StepPlan(new, decode_rows=list(range(num_seqs)))
    yield StepPlan(new_rows([None] * num_seqs), decode_rows=[0])
    tokens = [0] * length
    yield StepPlan(
        chunks=[Chunk(row, 0, tokens, ResultKind.TOKEN, tokens) for row in range(num_rows)]
    )


def _scratch_bytes(run: Callable[[StepPlan], None], plan: StepPlan) -> int:
    """Return the scratch memory of a step, in bytes. This runs it and compiles its kernels."""
    torch.cuda.reset_peak_memory_stats()
    allocated = torch.cuda.memory_allocated()
    run(plan)
    return torch.cuda.max_memory_allocated() - allocated


def free_memory(device: torch.device, ranks: int = 1) -> int:
    """Return the free bytes of a device. `ranks` processes share the memory of a CPU."""
    if device.type != "cuda":
        return available_host_memory() // ranks
    # Memory that an earlier engine has released must not count as used by other processes.
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def _cuda_room(room: Room, scratch: int) -> tuple[int, str]:
    """Return (bytes that the KV cache may take, explanation). Call it after loading the weights."""
    free, total = free_memory(room.device), torch.cuda.mem_get_info(room.device)[1]
    weights = room.free - free  # memory that was not free at first belongs to other processes
    utilization = room.config.gpu_memory_utilization
    size = max(0, min(int(utilization * total) - weights, free - CUDA_MARGIN) - scratch)
    gib = 2**30
    return size, (
        f"{size / gib:.2f} GiB of the GPU's {total / gib:.2f}, of which {free / gib:.2f} "
        f"is free (weights hold {weights / gib:.2f}, the largest step needs {scratch / gib:.2f}, "
        f"gpu_memory_utilization={utilization})"
    )


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
