"""Roofline: the least time that a workload can take on this machine (Williams et al. 2009).

Given: a workload, a model's config, and what the machine did a moment ago. The floor is that of an ideal
schedule: every token that two prompts share is computed once, all prompts first, then all requests
decode together. Prefill takes as long as the slower of its FLOPs and its bytes; so does decode. (Hiding one
under the other could save the shorter of the two at most; no engine is known to.)

    weights   read once a step, the head with them     parameters * bytes
    KV        read once a step by every sequence       2 * layers * KV heads * head size * bytes a token
    GEMM      2 FLOPs a parameter and token            the head for tokens that are drawn alone
    attention 4 FLOPs a layer, head, dimension, and token looked at
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from nanovllm.benchmarks.workloads import Workload
from nanovllm.config import ModelConfig


@dataclass(frozen=True)
class Need:
    """What a workload cannot do without."""

    steps: int  # decode steps
    weight_bytes: int  # of one step
    kv_bytes: int  # read by all decode steps; a prefix that a whole round shares, once a step
    prefill_tokens: int
    prefill_bytes: int
    prefill_flops: int
    decode_flops: int

    @property
    def decode_bytes(self) -> int:
        return self.steps * self.weight_bytes + self.kv_bytes


def kv_token_bytes(config: ModelConfig, itemsize: int) -> int:
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize


def need(workload: Workload, config: ModelConfig, itemsize: int, max_num_seqs: int) -> Need:
    c = config
    qkv_out = c.hidden_size * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
    layers = c.num_layers * (qkv_out + 3 * c.hidden_size * c.intermediate_size)  # parameters
    head = c.vocab_size * c.hidden_size
    look = 4 * c.num_layers * c.num_heads * c.head_dim  # FLOPs for each token looked at
    kv_token = kv_token_bytes(config, itemsize)

    spans = workload.distinct()
    computed = sum(end - start for start, end in spans)
    looked_at = sum((end * (end + 1) - start * (start + 1)) // 2 for start, end in spans)
    prefill = 2 * layers * computed + 2 * head * len(workload.prompts) + look * looked_at

    steps = read = looks = decoded = 0
    for round_ in workload.rounds:
        outputs = [workload.outputs[i] for i in round_]
        prefix = workload.common_prefix(round_) if len(round_) <= max_num_seqs else 0
        # The first token of each comes from prefill.
        round_steps = max(max(outputs) - 1, -(-(sum(outputs) - len(outputs)) // max_num_seqs))
        steps += round_steps
        read += prefix * round_steps
        for i, n in zip(round_, outputs, strict=True):
            seen = sum(range(len(workload.prompts[i]) + 1, len(workload.prompts[i]) + n))
            looks += seen
            read += seen - prefix * (n - 1)
            decoded += n - 1
    return Need(
        steps=steps,
        weight_bytes=(layers + head) * itemsize,
        kv_bytes=read * kv_token,
        prefill_tokens=computed,
        prefill_bytes=len(workload.rounds) * (layers + head) * itemsize + computed * kv_token,
        prefill_flops=prefill,
        decode_flops=2 * (layers + head) * decoded + look * looks,
    )


@dataclass(frozen=True)
class Rates:
    """Measured here, a moment before."""

    bandwidth: float  # bytes a second, reading
    read_bytes: int  # from a buffer of this size
    matmul: float  # FLOPs a second, in the dtype of the run


@dataclass(frozen=True)
class Floor:
    """Seconds."""

    prefill: float
    decode: float

    @property
    def total(self) -> float:
        return self.prefill + self.decode


def floor(need: Need, rates: Rates) -> Floor:
    return Floor(
        max(need.prefill_flops / rates.matmul, need.prefill_bytes / rates.bandwidth),
        max(need.decode_flops / rates.matmul, need.decode_bytes / rates.bandwidth),
    )


def measure_rates(
    device: torch.device, dtype: torch.dtype, step_bytes: int, seconds: float = 0.5
) -> Rates:
    """The best of several tries of each: a floor must not be higher than what the machine can do.

    The buffer is as large as what one decode step reads, as far as that is sensible: a small model
    lives in the processor's caches, and its floor is theirs.
    """
    cuda = device.type == "cuda"
    size = min(max(step_bytes, 4 << 20), (4 << 30) if cuda else (1 << 30)) // 4
    buffer = torch.ones(size, device=device)
    matrix, ones = buffer[: size // 1024 * 1024].view(-1, 1024), torch.ones(1024, device=device)
    reads = {
        "sum": (lambda: buffer.sum(), size * 4),
        "product": (lambda: matrix @ ones, matrix.numel() * 4),
    }
    bandwidth = max(n / best(f, device, seconds) for f, n in reads.values())
    side = 8192 if cuda else 2048
    # Random: a GPU that multiplies ones saves power, and runs faster than on any real data.
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return Rates(bandwidth, size * 4, 2 * side**3 / best(lambda: a @ b.T, device, seconds))


def best(run: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Seconds of the fastest of many runs."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    run()
    found: list[float] = []
    end = time.perf_counter() + seconds
    while len(found) < 5 or time.perf_counter() < end:
        wait()
        start = time.perf_counter()
        run()
        wait()
        found.append(time.perf_counter() - start)
    return min(found)
