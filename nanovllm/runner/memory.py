"""How many KV blocks fit.

Owns: nothing. Given: the config, and functions that run the largest steps, whose memory is measured.
Mutates: nothing, but the steps' scratch memory comes and goes.
"""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from nanovllm.config import EngineConfig

NO_MEMORY = ("out of memory", "allocate memory", "not enough memory")  # torch's words on a CPU
CUDA_MARGIN = 512 << 20  # free memory left alone: graphs' nodes, library workspaces, fragments
CPU_CACHE_BYTES = 4 << 30  # what a CPU's KV cache takes at most, unless it is told a size


@dataclass(frozen=True)
class Snapshot:
    """The memory of a device at one moment, in bytes."""

    device: torch.device
    free: int
    total: int

    @classmethod
    def of(cls, device: torch.device) -> "Snapshot":
        if device.type == "cuda":
            # What an engine before this one has let go of must not count as another process's.
            gc.collect()
            torch.cuda.empty_cache()
            return cls(device, *torch.cuda.mem_get_info(device))
        free = available_host_memory()
        return cls(device, free, free)


def num_kv_blocks(
    config: EngineConfig,
    max_model_len: int,
    block_bytes: int,
    before: Snapshot,
    steps: list[Callable[[], None]],
) -> int:
    """Blocks for requests; the null block comes on top of them.

    `before` was taken before the weights were loaded. `steps` run the largest steps that can occur;
    each holds its memory apart from the others. Raises ValueError if there is too little memory.
    """
    scratch = sum(map(_scratch, steps)) if before.device.type == "cuda" else 0
    if config.num_kvcache_blocks is not None:
        return config.num_kvcache_blocks
    if config.kv_cache_memory_bytes is not None:
        num = config.kv_cache_memory_bytes // block_bytes - 1
        if num < 1:
            raise ValueError(
                f"kv_cache_memory_bytes={config.kv_cache_memory_bytes:,} has no room for one block: "
                f"a block of {config.kvcache_block_size} tokens takes {block_bytes:,} bytes, and so "
                "does the null block; raise it, or lower kvcache_block_size"
            )
        return num
    per_sequence = -(-max_model_len // config.kvcache_block_size)
    if before.device.type == "cuda":
        room, where = _cuda_room(config, before, scratch)
    else:
        # Half of what is left: activations, and whatever else the machine is used for.
        room = min(CPU_CACHE_BYTES, available_host_memory() // 2)
        where = f"{room / 2**20:,.0f} MiB of memory, half of what is free and at most 4 GiB"
    num = min(room // block_bytes - 1, per_sequence * config.max_num_seqs)
    if num < 1 or (before.device.type == "cuda" and num < per_sequence):
        raise ValueError(
            f"too little memory for the KV cache: it may take {where}; one request of "
            f"max_model_len={max_model_len} needs {(per_sequence + 1) * block_bytes / 2**20:,.0f} "
            "MiB. Lower max_model_len, max_num_batched_tokens or max_num_seqs, or raise "
            "gpu_memory_utilization"
        )
    return num


def _scratch(step: Callable[[], None]) -> int:
    """Bytes that a step needs while it runs. It also compiles what a first request would wait for."""
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    step()
    return torch.cuda.max_memory_allocated() - held


def _cuda_room(config: EngineConfig, before: Snapshot, scratch: int) -> tuple[int, str]:
    """(bytes that the KV cache may take, how they come about)."""
    now = Snapshot.of(before.device)
    # What is gone since `before` is ours; what was gone then is other processes'.
    ours = before.free - now.free
    allowed = int(config.gpu_memory_utilization * now.total) - ours
    room = max(0, min(allowed, now.free - CUDA_MARGIN) - scratch)
    gib = 2**30
    return room, (
        f"{room / gib:.2f} GiB of the card's {now.total / gib:.2f}, of which {now.free / gib:.2f} are "
        f"free (weights hold {ours / gib:.2f}, a largest step needs {scratch / gib:.2f}, "
        f"gpu_memory_utilization={config.gpu_memory_utilization})"
    )


@contextmanager
def needed(message: str) -> Iterator[None]:
    """Say `message` if what happens inside runs out of memory."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:  # a GPU's, numpy's
        raise ValueError(message) from error
    except RuntimeError as error:  # a CPU's has no type of its own
        if not any(words in str(error) for words in NO_MEMORY):
            raise
        raise ValueError(message) from error


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
