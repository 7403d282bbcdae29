"""Computes how many KV blocks fit into memory."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from nanovllm.api.config import EngineConfig
from nanovllm.plan import FILTERS, Chunk, Join, LogitRules, RowSampling, StepPlan, Yield

# How torch reports a failed allocation on a CPU, where the error has no type of its own.
OUT_OF_MEMORY = ("out of memory", "allocate memory", "not enough memory")
# Device memory left for graph nodes, fragmentation and the workspaces of libraries, of which cuBLAS
# takes up to 32 MiB for each thread that runs steps. The profile sees those of one thread.
CUDA_MARGIN = 512 << 20
CPU_CACHE_BYTES = 4 << 30  # the default limit of a CPU's KV cache


@dataclass(frozen=True)
class Snapshot:
    """The memory of a device at one moment, in bytes."""

    device: torch.device
    free: int
    total: int

    @classmethod
    def of(cls, device: torch.device, ranks: int = 1) -> "Snapshot":
        """`ranks` processes share the memory of a CPU."""
        if device.type == "cuda":
            # Memory that an earlier engine has released must not count as another process's.
            gc.collect()
            torch.cuda.empty_cache()
            return cls(device, *torch.cuda.mem_get_info(device))
        free = available_host_memory() // ranks
        return cls(device, free, free)


def check_weights(name: str, size: int, dtype: torch.dtype, before: Snapshot) -> None:
    """Raise ValueError if the weights of the model `name` do not fit the free memory."""
    if size > before.free:
        raise ValueError(
            f"the weights of {name} take {size / 2**30:,.2f} GiB in {str(dtype)[6:]}, and "
            f"{before.free / 2**30:,.2f} GiB of memory are free on {before.device}; use a smaller "
            "model, end other programs, or set dtype='bfloat16', which takes half of float32, or "
            "quantization='int8', which takes half of that"
        )


def check_cache(config: EngineConfig, block_bytes: int, before: Snapshot) -> None:
    """Raise ValueError if the options ask for a KV cache that does not fit the free memory."""
    size = config.kv_cache_memory_bytes or 0
    if config.num_kvcache_blocks is not None:
        size = (config.num_kvcache_blocks + 1) * block_bytes
    if size > before.free:
        raise ValueError(
            f"a KV cache of {size:,} bytes does not fit the {before.free:,} that are free on "
            f"{before.device}; lower num_kvcache_blocks, kvcache_block_size or kv_cache_memory_bytes"
        )


def num_host_blocks(
    config: EngineConfig, block_bytes: int, weight_bytes: int, before: Snapshot
) -> int:
    """Return the number of blocks of the option swap_space.

    Raises ValueError if host memory does not hold them. On a CPU weights and KV cache take from it.
    """
    if not config.swap_space:
        return 0
    size = int(config.swap_space * 2**30)
    free, beside = available_host_memory() // config.tensor_parallel_size, ""
    if before.device.type == "cpu":
        cache = config.kv_cache_memory_bytes or 2 * block_bytes
        if config.num_kvcache_blocks is not None:
            cache = (config.num_kvcache_blocks + 1) * block_bytes
        free, beside = before.free - weight_bytes - cache, " beside weights and KV cache"
    if size > free:
        raise ValueError(
            f"swap_space={config.swap_space} takes {size:,} bytes of host memory, and {free:,} are "
            f"free{beside}; lower it, or end other programs"
        )
    if size < block_bytes:
        raise ValueError(
            f"swap_space={config.swap_space} has no room for one block: a block of "
            f"{config.kvcache_block_size} tokens takes {block_bytes:,} bytes; raise it to "
            f"{block_bytes / 2**30:.2g} or more, or set it to 0"
        )
    return size // block_bytes


def most_blocks(config: EngineConfig, block_bytes: int, weight_bytes: int, before: Snapshot) -> int:
    """An upper bound of `num_kv_blocks`, which is known before anything is allocated."""
    room = before.free - weight_bytes
    if before.device.type == "cpu":
        room = min(room, CPU_CACHE_BYTES // config.tensor_parallel_size)
    return max(1, room // block_bytes)


def num_kv_blocks(
    config: EngineConfig,
    max_model_len: int,
    block_bytes: int,
    before: Snapshot,
    run: Callable[[StepPlan], None],
) -> int:
    """Return the number of blocks for requests.

    `before` was taken before the weights were loaded. On a GPU the largest steps are run to measure
    scratch memory. All of it is reserved, because graphs use a pool of their own. Raises ValueError
    if there is no room for the shortest request or, on a GPU, for one of the option max_model_len.
    """
    scratch = 0
    if before.device.type == "cuda":
        scratch = sum(_scratch_bytes(run, plan) for plan in largest_plans(config, max_model_len))
    if config.num_kvcache_blocks is not None:
        return config.num_kvcache_blocks
    if config.kv_cache_memory_bytes is not None:
        num = config.kv_cache_memory_bytes // block_bytes - 1
        if num < 1:
            raise ValueError(
                f"kv_cache_memory_bytes={config.kv_cache_memory_bytes:,} has no room for one "
                f"block: a block of {config.kvcache_block_size} tokens takes {block_bytes:,} bytes "
                "and so does the null block; raise it, or lower kvcache_block_size"
            )
        return num
    per_sequence = -(-max_model_len // config.kvcache_block_size)
    # A prompt and an output have at least one token each.
    least = -(-2 // config.kvcache_block_size)
    what = "one block and the null block need" if least == 1 else "a request of 2 tokens needs"
    if before.device.type == "cuda":
        room, where = _cuda_room(config, before, scratch)
        if config.max_model_len is not None:
            least, what = per_sequence, f"one request of max_model_len={max_model_len} needs"
        remedy = (
            "Lower max_model_len, kvcache_block_size, max_num_batched_tokens or max_num_seqs, or "
            "raise gpu_memory_utilization"
        )
    else:
        # The other half is for activations and for other processes. The swap space of all ranks is
        # not written yet, and so still counted as free.
        swap = int(config.swap_space * 2**30) * config.tensor_parallel_size
        room = min(CPU_CACHE_BYTES, (available_host_memory() - swap) // 2)
        room //= config.tensor_parallel_size
        where = f"{room / 2**20:,.0f} MiB of memory, half of what is free and at most 4 GiB"
        remedy = "Lower kvcache_block_size, or end other programs"
    num = min(room // block_bytes - 1, per_sequence * config.max_num_seqs)
    if num < least:
        raise ValueError(
            f"too little memory for the KV cache: it may take {where}; {what} "
            f"{(least + 1) * block_bytes / 2**20:,.0f} MiB. {remedy}"
        )
    return num


def fitted_length(config: EngineConfig, max_model_len: int, num_blocks: int) -> int:
    """max_model_len, or what the cache holds, if the memory limits it and the user sets neither."""
    options = config.max_model_len, config.num_kvcache_blocks, config.kv_cache_memory_bytes
    if any(option is not None for option in options):
        return max_model_len
    return min(max_model_len, num_blocks * config.kvcache_block_size)


def largest_plans(config: EngineConfig, max_model_len: int) -> Iterator[StepPlan]:
    """Steps that need the most memory, and launch every variant of the kernels.

    A decode of all rows with rules, a decode of one row, and a step with as many tokens in as many
    rows as possible, which are scored. In this order: a decode computes the first positions of its
    rows, and the chunks may end with the last.
    """
    num_seqs, budget = config.max_num_seqs, config.max_num_batched_tokens
    num_rows = min(num_seqs, budget)
    length = min(budget // num_rows, max_model_len)
    table = [0] * -(-length // config.kvcache_block_size)

    def joins(num: int, rules: LogitRules | None) -> list[Join]:
        filters = tuple(1 if isinstance(off, int) else 0.5 for off in FILTERS.values())
        sampling = RowSampling(temperature=1.0, seed=0, filters=filters, rules=rules)
        return [Join(row, table, sampling, prompt=[0]) for row in range(num)]

    rules = LogitRules(
        repetition_penalty=2.0, logit_bias=((0, 1.0),), allowed_token_ids=(0,), logprobs=1
    )
    yield StepPlan(joins(num_seqs, rules), decode_rows=list(range(num_seqs)))
    yield StepPlan(joins(num_seqs, None), decode_rows=[0])
    tokens = [0] * length
    yield StepPlan(chunks=[Chunk(row, 0, tokens, Yield.TOKEN, tokens) for row in range(num_rows)])


def _scratch_bytes(run: Callable[[StepPlan], None], plan: StepPlan) -> int:
    """The memory that a step needs while it runs. Running it also compiles its kernels."""
    torch.cuda.reset_peak_memory_stats()
    allocated = torch.cuda.memory_allocated()
    run(plan)
    return torch.cuda.max_memory_allocated() - allocated


def _cuda_room(config: EngineConfig, before: Snapshot, scratch: int) -> tuple[int, str]:
    """(bytes that the KV cache may take, an explanation)."""
    now = Snapshot.of(before.device)
    # Memory taken since `before` is ours; memory taken earlier belongs to other processes.
    ours = before.free - now.free
    allowed = int(config.gpu_memory_utilization * now.total) - ours
    room = max(0, min(allowed, now.free - CUDA_MARGIN) - scratch)
    gib = 2**30
    return room, (
        f"{room / gib:.2f} GiB of the GPU's {now.total / gib:.2f}, of which {now.free / gib:.2f} "
        f"is free (weights hold {ours / gib:.2f}, the largest step needs {scratch / gib:.2f}, "
        f"gpu_memory_utilization={config.gpu_memory_utilization})"
    )


@contextmanager
def explain_out_of_memory(message: str) -> Iterator[None]:
    """Raise ValueError(message) if the block runs out of memory."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ValueError(message) from error
    except RuntimeError as error:
        if not any(words in str(error) for words in OUT_OF_MEMORY):
            raise
        raise ValueError(message) from error


def available_host_memory() -> int:
    """Bytes that can be allocated without swapping, within the container's limit."""
    info = dict(line.split()[:2] for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(info["MemAvailable:"]) * 1024  # it is in KiB
    group = Path("/sys/fs/cgroup")
    limit = group / "memory.max"
    if limit.is_file() and limit.read_text().strip() != "max":
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # Inactive file pages are the page cache, which the kernel reclaims.
        used = int((group / "memory.current").read_text()) - int(stat["inactive_file"])
        available = min(available, int(limit.read_text()) - used)
    return max(0, available)
