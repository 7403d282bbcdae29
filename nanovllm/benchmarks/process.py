"""What a process of the engine costs: memory at its peak, time to start, memory over many requests."""

import gc
import os
import random
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from nanovllm import LLM, SamplingParams

PAGE = os.sysconf("SC_PAGE_SIZE")


def rss() -> int:
    """Bytes of this process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with suppress(OSError):  # where it is not allowed, the peak is that of the process so far
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from now


def peak(device: torch.device) -> int:
    """Bytes at most since reset_peak: of torch on a GPU, of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return rss()


@dataclass(frozen=True)
class Startup:
    """Median seconds, each in fresh processes."""

    others: float  # importing torch, and transformers' config and tokenizer parts
    ours: float  # importing nanovllm's LLM after them
    ready: float  # LLM() on the embedded model after that


STARTUP = """
import time
a = time.perf_counter()
import torch
from transformers import AutoConfig, AutoTokenizer
b = time.perf_counter()
from nanovllm import LLM, SamplingParams
c = time.perf_counter()
LLM(device="cpu")
print(b - a, c - b, time.perf_counter() - c)
"""


def startup(times: int = 3) -> Startup:
    def once() -> list[float]:
        command = [sys.executable, "-c", STARTUP]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return [float(x) for x in done.stdout.split()]

    once()  # the files come into the page cache
    return Startup(*(median(p) for p in zip(*(once() for _ in range(times)), strict=True)))


def memory(dtype: str, requests: int = 10_000, batch: int = 200) -> list[tuple[int, int]]:
    """(requests served, bytes of the process) at the start, in the middle and at the end.

    Through the embedded model on the CPU, each request a prompt of its own. The start is after the
    first batches: they fill what is kept for good, the KV cache above all.
    """
    llm = LLM(device="cpu", dtype=dtype, num_kvcache_blocks=1024)
    rng, size, found = random.Random(0), llm.engine.model_config.vocab_size, []
    params = SamplingParams(temperature=0.6, max_tokens=4, ignore_eos=True)
    warm = requests // 10
    for served in range(0, warm + requests + 1, batch):
        if served in (warm, warm + requests // 2 // batch * batch, warm + requests):
            gc.collect()
            found.append((served - warm, rss()))
        prompts = [[rng.randrange(size) for _ in range(rng.randint(4, 24))] for _ in range(batch)]
        llm.generate(prompts, params, use_tqdm=False)
    return found
