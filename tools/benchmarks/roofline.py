"""Roofline: the shortest time that a workload can take on this machine (Williams et al. 2009).

It assumes an ideal schedule with a perfect prefix cache: prefill of all prompts, followed by decode
of all requests together. Each phase takes as long as the slower of its FLOPs (compute-bound) and
its bytes (memory-bound):

    weights     read once in each step, LM head included; of experts those that the tokens of the
                step use, if all are equally likely
    KV          2 * layers * KV heads * head size values per token, read once in each decode step
    states      of linear attention: read and written once for each decoded token
    linear      2 FLOPs per used parameter and token; the LM head for sampled tokens only
    attention   4 FLOPs per layer, head, dimension and attended token
"""

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from os.path import commonprefix

import torch
from torch.utils.benchmark import Timer

from nanovllm.features.models.moe.moe_config import Experts
from nanovllm.models.model_config import ModelConfig
from tools.benchmarks.workloads import Workload

# Bytes of a quantized weight of a layer, and of the head. In int4 a group of 32 has a scale of two
# bytes; the few scales of int8 are not counted.
WEIGHT_SIZES = {"int8": (1.0, 1.0), "int4": (0.5625, 1.0)}


def costs(
    work: Workload,
    config: ModelConfig,
    itemsize: int,
    max_num_seqs: int,
    kv_itemsize: int | None = None,
    quantization: str | None = None,
) -> dict[str, int]:
    """Return the FLOPs and bytes of a workload. Decode steps read `kv_bytes` of the KV cache.

    itemsize: bytes of a number in the model's dtype. kv_itemsize: bytes of a KV value; None:
    `itemsize`. quantization: the option of the engine.
    """
    in_dtype = float(itemsize), float(itemsize)
    layer_size, head_size = WEIGHT_SIZES.get(quantization or "", in_dtype)
    model = config.model_class().on_meta(config)
    linears = [linear.weight.numel() for linear in model.linears()]
    head = linears.pop()
    experts = getattr(config, "experts", None)

    def layers_for(num_tokens: int) -> int:
        """Return the number of weights of the layers that a step of `num_tokens` reads."""
        unused = unused_weights(experts, config.hidden_size, num_tokens) if experts else 0
        return sum(linears) - round(unused)

    def bytes_for(num_tokens: int) -> float:
        return layers_for(num_tokens) * layer_size + head * head_size

    layers = layers_for(1)  # the weights that one token uses
    weight_bytes = round(sum(linears) * layer_size + head * head_size)
    kv_token = config.block_bytes(1, kv_itemsize or itemsize)
    flops_per_attended = 4 * len(config.kv_layers) * config.num_heads * config.head_dim

    # A perfect prefix cache contains the start of each prompt. In sorted order, each prompt follows
    # the one with which it shares the longest prefix.
    prompts = sorted(work.prompts)
    starts = [0, *(len(commonprefix(pair)) for pair in pairwise(prompts))]  # noqa: RUF071
    ends = list(map(len, prompts))
    computed = sum(ends) - sum(starts)
    attended = sum(n * (n + 1) // 2 for n in ends) - sum(n * (n + 1) // 2 for n in starts)
    linear = 2 * layers * computed + 2 * head * len(prompts)
    rows = decode_rows(work, max_num_seqs)
    read = round(sum(steps * bytes_for(num) for num, steps in rows.items()))
    kv_tokens = decoded = decode_attended = 0
    for round_ in work.rounds:
        # Prefill yields the first token of each output.
        outputs = [work.outputs[i] - 1 for i in round_]
        contexts = (range(len(work.prompts[i]) + 1, work.lengths[i]) for i in round_)
        round_attended = sum(map(sum, contexts))
        # Requests that decode together read the KV of their common prefix once in each step.
        shared = len(commonprefix([work.prompts[i] for i in round_]))  # noqa: RUF071
        shared = shared if 1 < len(round_) <= max_num_seqs else 0
        kv_tokens += round_attended - shared * (sum(outputs) - max(outputs))
        decoded += sum(outputs)
        decode_attended += round_attended
    num_rounds = len(work.rounds)
    state_bytes = 2 * decoded * config.state_bytes(itemsize)
    return {
        "prefill_tokens": computed,
        "prefill_flops": linear + flops_per_attended * attended,
        "prefill_bytes": round(num_rounds * bytes_for(computed // num_rounds))
        + computed * kv_token,
        "decode_steps": rows.total(),
        "decode_flops": 2 * (layers + head) * decoded + flops_per_attended * decode_attended,
        "decode_bytes": read + kv_tokens * kv_token + state_bytes,
        "weight_bytes": weight_bytes,
        "decode_weight_bytes": read,
        "kv_bytes": kv_tokens * kv_token,
        "state_bytes": state_bytes,
    }


def decode_rows(work: Workload, max_num_seqs: int) -> Counter[int]:
    """Return number of rows -> number of decode steps with it."""
    rows: Counter[int] = Counter()
    for round_ in work.rounds:
        outputs = [work.outputs[i] - 1 for i in round_]
        steps = max(*outputs, -(-sum(outputs) // max_num_seqs))
        if len(round_) <= max_num_seqs:
            rows.update(sum(n > step for n in outputs) for step in range(steps))
        else:  # more requests than rows: all steps have as many as possible
            rows[sum(outputs) // steps] += steps
    return rows


def experts_used(experts: Experts, num_tokens: int) -> float:
    """Return how many experts of a layer a step of `num_tokens` uses, if all are equally likely."""
    total = experts.num_experts
    return total * (1 - (1 - experts.num_per_token / total) ** num_tokens)


def unused_weights(experts: Experts, hidden_size: int, num_tokens: int) -> float:
    """Return how many weights of experts a step of `num_tokens` tokens is expected not to use.

    The projections of an expert have three weights for each hidden unit and inner unit.
    """
    unused = experts.num_experts - experts_used(experts, num_tokens)
    return len(experts.layers) * unused * 3 * hidden_size * experts.size


def expected_hits(work: Workload, experts: Experts, max_num_seqs: int) -> float:
    """Return how many of the `experts` of a layer an average decode step is expected to use."""
    rows = decode_rows(work, max_num_seqs)
    hits = sum(steps * experts_used(experts, num) for num, steps in rows.items())
    return hits / max(1, rows.total())


def bounds(cost: dict[str, int], peak: dict[str, float]) -> dict[str, tuple[float, str]]:
    """Return phase -> (shortest time in seconds, the resource that bounds it)."""
    return {
        phase: max(
            (cost[f"{phase}_flops"] / peak["flops"], "compute-bound"),
            (cost[f"{phase}_bytes"] / peak["bandwidth"], "memory-bound"),
        )
        for phase in ("prefill", "decode")
    }


def measure_peak(device: torch.device, dtype: torch.dtype, step_bytes: int) -> dict[str, float]:
    """Return bytes read and FLOPs per second of the fastest of many runs.

    It is the fastest because no workload may be faster than its roofline. The buffer has the
    `step_bytes` that a decode step reads, within limits. A small model stays in the processor's
    caches and is bounded by their bandwidth.
    """

    def fastest(run: Callable[[], object]) -> float:
        timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
        return min(timer.blocked_autorange(min_run_time=0.5).times)

    cuda = device.type == "cuda"
    size = min(max(step_bytes, 4 << 20), (4 << 30) if cuda else (1 << 30)) // 4096 * 1024
    buffer = torch.ones(size, device=device)
    vector = torch.ones(1024, device=device)
    read = min(fastest(buffer.sum), fastest(lambda: buffer.view(-1, 1024) @ vector))
    side = 8192 if cuda else 2048
    # The values are random, because a GPU draws less power and is faster if it multiplies ones.
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    flops = 2 * side**3 / fastest(lambda: a @ b.T)
    return {"bandwidth": 4 * size / read, "buffer_bytes": 4 * size, "flops": flops}
