"""The time of a step: a roofline of a shape on a device, or a table measured on this machine."""

from __future__ import annotations

import tempfile
import time
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from nanovllm.engine.scheduler import InFlightStep


class Device(NamedTuple):
    """Numbers of a data sheet, without sparsity. Rates are per second."""

    memory: int  # bytes
    bandwidth: float  # bytes of its memory
    flops: float  # in bfloat16, accumulated in float32


# Sources: the makers' data sheets of H100 SXM5, H200 SXM, A100 SXM 80GB, L4, L40S and MI300X, and
# NVIDIA's whitepaper of the Ada architecture for the RTX 4090.
DEVICES = {
    "h100": Device(80_000_000_000, 3.35e12, 989e12),
    "h200": Device(141_000_000_000, 4.8e12, 989e12),
    "a100": Device(80_000_000_000, 2.039e12, 312e12),
    "l4": Device(24_000_000_000, 0.3e12, 121e12),
    "l40s": Device(48_000_000_000, 0.864e12, 362e12),
    "rtx4090": Device(24_000_000_000, 1.008e12, 165e12),
    "mi300x": Device(192_000_000_000, 5.3e12, 1307e12),
}


def attended(step: InFlightStep) -> tuple[int, int, int]:
    """Return (tokens, keys that their queries attend to, keys that are read) of a step."""
    pairs = read = 0
    for chunk in step.plan.chunks:
        end = chunk.start + len(chunk.token_ids)
        pairs += (end * (end + 1) - chunk.start * (chunk.start + 1)) // 2
        read += end
    decoded = sum(step.seqs[row].num_computed for row in step.plan.decode_rows)
    return step.plan.num_tokens, pairs + decoded, read + decoded


class Roofline:
    """The shortest time that a step can take in bfloat16; tools/benchmarks/roofline.py says why.

    Of a mixture, a step reads the experts that its tokens are expected to use. What an engine adds,
    such as launches, is not in it.
    """

    def __init__(self, shape: str, device: str) -> None:
        self.config = config = load_config(shape)
        self.device = DEVICES[device]
        linears = [x.weight.numel() for x in config.model_class().on_meta(config).linears()]
        self.head: float = linears.pop()
        self.layers: float = sum(linears)
        self.kv_bytes: int = config.block_bytes(1, 2)
        # Free for KV: what the weights leave of 90 % of the memory.
        self.cache_bytes = 0.9 * self.device.memory - 2 * (self.layers + self.head)
        self.flops_per_pair: int = 4 * len(config.kv_layers) * config.num_heads * config.head_dim

    def weights(self, num_tokens: int) -> float:
        """Return how many weights of the layers `num_tokens` tokens use."""
        from tools.benchmarks.roofline import unused_weights

        experts = getattr(self.config, "experts", None)
        unused = unused_weights(experts, self.config.hidden_size, num_tokens) if experts else 0.0
        return self.layers - float(unused)

    def __call__(self, step: InFlightStep) -> float:
        tokens, pairs, read = attended(step)
        flops = 2 * self.weights(1) * tokens + 2 * self.head * len(step.sampling_seqs)
        moved = 2 * (self.weights(tokens) + self.head) + self.kv_bytes * (read + tokens)
        compute = (flops + self.flops_per_pair * pairs) / self.device.flops
        return max(compute, moved / self.device.bandwidth)


@dataclass(frozen=True)
class Table:
    """Measured steps: seconds by the number of tokens, and the seconds for each attended key."""

    seconds: list[tuple[int, float]]  # sorted; interpolated, and extended beyond its ends
    per_key: float

    def __call__(self, step: InFlightStep) -> float:
        tokens, keys, _ = attended(step)
        place = bisect_left(self.seconds, (tokens, 0.0))
        place = min(max(place, 1), len(self.seconds) - 1)
        (n, low), (m, high) = self.seconds[place - 1 : place + 1]
        return low + (high - low) * (tokens - n) / (m - n) + self.per_key * keys


def load_config(shape: str) -> Any:
    from nanovllm.loading.checkpoint import Checkpoint
    from tools.benchmarks.workloads import write_shape

    with tempfile.TemporaryDirectory() as parent:
        return Checkpoint(write_shape(shape, Path(parent))).model_config


def measure(shape: str) -> dict[str, Any]:
    """Time steps of this machine's engine, with random weights, as the fields of a Table."""
    from nanovllm import LLM, SamplingParams
    from tools.benchmarks.workloads import write_shape

    with tempfile.TemporaryDirectory() as parent:
        model = str(write_shape(shape, Path(parent)))
        llm = LLM(model, load_format="dummy", skip_tokenizer_init=True, enable_prefix_caching=False)

    def step_time(rows: int, length: int, outputs: int) -> float:
        """Return the shortest time of a step: of a prompt, or of the decodes after it."""
        params = SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True)
        for _ in range(rows):
            llm.engine.add_request([1] * length, params)
        times = []
        while llm.engine.has_unfinished_requests():
            start = time.perf_counter()
            llm.engine.step()
            times.append(time.perf_counter() - start)
        return min(times[1:] or times)

    budget = llm.engine.scheduler.token_budget
    sizes = [n for n in (64, 128, 256, 512, 1024, 2048, 4096, 8192) if n <= budget]
    step_time(1, sizes[-1], 2)  # the first run prepares buffers
    long = step_time(8, 16, 16)
    per_key = max(0.0, step_time(8, 1024, 16) - long) / (8 * 1008)
    rows = [(n, step_time(n, 16, 12) - per_key * n * 24) for n in (1, 2, 4, 8, 16, 32)]
    prompts = [(n, min(step_time(1, n, 1) for _ in range(3)) - per_key * n * n / 2) for n in sizes]
    return {"shape": shape, "per_key": per_key, "seconds": rows + prompts}
