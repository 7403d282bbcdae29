"""The rows of `nanovllm check`, which run in a process of that command.

They compare as features/kernel_check/comparisons.py does, and time what is larger than the caches
of a processor.
"""

import faulthandler
import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from nanovllm.backends import int4, int8
from nanovllm.cli.check import MARK
from nanovllm.features.kernel_check import comparisons as compare
from nanovllm.features.kernel_check.at_start import system
from nanovllm.features.kernel_check.comparisons import Backends, Comparison
from nanovllm.loading.select_backend import pick_backend, pick_device
from nanovllm.models.backend import Backend
from nanovllm.runner.rows import sampling_batch

# (query heads, KV heads, head size): Qwen3-0.6B, Qwen2.5-7B, Qwen3.5, Llama 3.2.
HEADS = (16, 8, 128), (28, 4, 128), (8, 2, 256), (32, 8, 64)
DELTA_RULE = 16, 32, 128, 128  # (Hk, Hv, Dk, Dv) of linear attention in Qwen3.5-35B-A3B
MAX_SECONDS = 300  # of a row; then the process ends
IN_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"


class Timed(NamedTuple):
    call: Callable[[], object]
    work: float  # bytes that are read and written, or operations
    unit: str = "GB/s"


Row: TypeAlias = Iterator[Comparison | Timed]  # what is timed comes last
Case: TypeAlias = tuple[str, str, torch.dtype, Callable[[], Row]]  # kernel, format, dtype, row


def main(start: int, only: list[str]) -> None:
    """Print the messages for cli/check.py: of rows from number `start` with all words of `only`."""
    faulthandler.dump_traceback_later(MAX_SECONDS, exit=True)

    def send(**message: Any) -> None:
        print(f"\n{MARK}{json.dumps(message)}", flush=True)

    device = pick_device("auto")
    every = list(cases(device))
    names = [f"{kernel} {name}".lower() for kernel, name, *_ in every]
    chosen = [i for i, name in enumerate(names) if all(word.lower() in name for word in only)]
    if not chosen:
        kernels = "; ".join(dict.fromkeys(kernel for kernel, *_ in every))
        formats = "; ".join(dict.fromkeys(name for _, name, *_ in every))
        words = " and ".join(map(repr, only))
        send(refused=f"no row has {words}; kernels: {kernels}; formats: {formats}")
        return
    send(about=about(device))
    for number in (i for i in chosen if i >= start):
        kernel, name, dtype, row = every[number]
        send(begin=number, kernel=kernel, format=name)
        faulthandler.dump_traceback_later(MAX_SECONDS, exit=True)
        with torch.inference_mode():
            send(**result(row, dtype, device))
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # an error that no later row survives ends the process
            torch.cuda.empty_cache()
    send(done=True)


def about(device: torch.device) -> str:
    if device.type == "cpu":
        place = "Triton's interpreter on " * IN_INTERPRETER
        layer = ""
        if not IN_INTERPRETER:
            with suppress(ImportError):  # without Numba, each row fails with the reason
                from nanovllm.backends.cpu.jit import threading_layer

                layer = f" ({threading_layer()})"
        return f"Kernels of {place}{system(device)}, {torch.get_num_threads()} threads{layer}"
    free, total = (size / 2**30 for size in torch.cuda.mem_get_info(device))
    driver = Path("/proc/driver/nvidia/version")
    version = driver.read_text().partition("\n")[0] if driver.exists() else "unknown driver"
    return f"Kernels of {system(device)}, {free:.1f} of {total:.1f} GiB free; {version}"


def result(row: Callable[[], Row], dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Return the message of a row."""
    message: dict[str, Any] = {"result": "FAILED"}
    try:
        for item in row():
            if isinstance(item, Timed):
                message |= {} if IN_INTERPRETER else timed(item, device, dtype)
            else:
                error = max(item.check(dtype), message.get("error", 0.0))
                message = {"result": "right", "error": error}
    except ArithmeticError as error:
        return {"result": "WRONG", "why": str(error)}
    except torch.OutOfMemoryError as error:  # the comparisons are small
        return message | {"why": f"not timed: {error!r:.200}"}
    except Exception as error:  # of Triton, of its compilers, of torch or of Numba
        return {"result": "FAILED", "why": f"{type(error).__name__}: {error!s:.500}"}
    return message


def seconds(call: Callable[[], object]) -> float:
    """Return the shortest time of a call, the mean of some calls if they are short."""
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return min(timer.blocked_autorange(min_run_time=0.1).times)


def captured(item: Timed) -> Timed:
    """Return ten calls of `item` as the replay of a CUDA graph."""
    from nanovllm.backends.gpu.graphs import CudaCapture

    def calls() -> None:
        for _ in range(10):
            item.call()

    return Timed(CudaCapture()(calls), 10 * item.work, item.unit)


def timed(item: Timed, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Return the best rate of three runs, and its share of the best rate of torch.

    Runs of the kernel and of torch take turns. The share is None if the machine is busy: then
    torch's rates differ between the turns, or the kernel had a better turn than torch. On a GPU a
    run is a replay of a CUDA graph, because Python takes longer than some kernels.
    """
    if item.unit == "TFLOP/s":
        side = 8192 if device.type == "cuda" else 1024
        a, b = torch.randn(2, side, side, device=device).to(dtype)
        peers = [Timed(lambda: a @ b, 2.0 * side**3)]
    else:
        x, y = torch.zeros(2, large(device), 4096, device=device)
        peers = [Timed(x.sum, x.nbytes), Timed(lambda: y.copy_(x), 2 * x.nbytes)]
    each_run = [captured(x) if device.type == "cuda" else x for x in (item, *peers)]
    runs = [[each.work / seconds(each.call) for each in each_run] for _ in range(3)]
    rate = max(run[0] for run in runs)
    best = [max(run[1:]) for run in runs]
    is_busy = max(best) > 1.25 * min(best) or rate > 1.1 * max(best)
    share = None if is_busy else rate / max(best)
    return {"seconds": item.work / rate, "rate": rate, "unit": item.unit, "share": share}


def cases(device: torch.device) -> Iterator[Case]:
    """Yield all rows for a device, first those in the dtype of most models."""
    # The interpreter computes bfloat16 and rounds to fp8 incorrectly.
    on_gpu = device.type == "cuda" or IN_INTERPRETER
    has_fp8 = not IN_INTERPRETER
    dtypes = [torch.float32] if IN_INTERPRETER else [torch.bfloat16, torch.float32]
    if device.type == "cuda" and not torch.version.hip:
        capability = torch.cuda.get_device_capability(device)
        has_fp8 = capability >= (8, 9)
        dtypes = [*dtypes[: 1 if capability >= (8, 0) else 0], torch.float16, torch.float32]
    quantized: Any = {"": lambda backend: backend, "int8": int8.quantized, "int4": int4.quantized}

    @cache
    def backends(dtype: torch.dtype, weights: str) -> Backends:
        backend = pick_backend("triton" if on_gpu else "numba", device, dtype, lambda: 10**9)
        plain: Any = quantized[weights](Backend(device, dtype))
        plain.rounds_inputs = not on_gpu  # the interpreter's kernels are a GPU's, and do not
        return quantized[weights](backend), plain

    def case(
        dtype: torch.dtype, kernel: str, row: Callable[..., Row], *sizes: Any, weights: str = ""
    ) -> Case:
        notes = [weights] * bool(weights) + ["fp8 KV"] * (True in sizes)
        name = ", ".join([str(dtype).removeprefix("torch."), *notes])
        return kernel, name, dtype, lambda: row(backends(dtype, weights), *sizes)

    for dtype in dtypes:
        heads = HEADS if dtype == dtypes[0] and not IN_INTERPRETER else HEADS[:1]
        yield case(dtype, "add_rms_norm", norm_row)
        yield case(dtype, "silu_and_mul", silu_row)
        for is_fp8 in (False, True) if has_fp8 else (False,):
            yield case(dtype, "norm_rope_store", store_row, heads, is_fp8)
            yield case(dtype, "attend, decodes", attention_row, heads, is_fp8, "decodes")
            yield case(dtype, "attend, a chunk", attention_row, heads, is_fp8, "a chunk")
        for weights in quantized:
            if weights or not on_gpu:  # else the products are torch's
                yield case(dtype, "linear", linear_row, weights=weights)
            yield case(dtype, "expert_mlp", experts_row, weights=weights)
        yield case(dtype, "delta_rule", delta_rule_row)
        yield case(dtype, "sample", sample_row)


def large(device: torch.device) -> int:
    """Return a number of rows of 4,096 numbers that a processor's caches do not hold."""
    return 64 if IN_INTERPRETER else 16_384 if device.type == "cuda" else 4096


def new(kernels: Backend, *shape: int, dtype: Any = None) -> Tensor:
    return torch.randn(shape, dtype=dtype or kernels.dtype, device=kernels.device)


def norm_row(pair: Backends) -> Row:
    kernels, _ = pair
    yield from compare.add_rms_norm(pair, 5120, kernels.dtype)
    x, residual, weight = new(kernels, 3, large(kernels.device), 4096)
    yield Timed(lambda: kernels.add_rms_norm(x, residual, weight[0], 1e-6), 4 * x.nbytes)


def silu_row(pair: Backends) -> Row:
    kernels, _ = pair
    yield from compare.activation(pair, "silu_and_mul", 3072)
    x = new(kernels, large(kernels.device), 8192)
    yield Timed(lambda: kernels.silu_and_mul(x), 1.5 * x.nbytes)


def sample_row(pair: Backends) -> Row:
    kernels, _ = pair
    rows = large(kernels.device) // 64
    yield from compare.sample(pair, 151_936)
    logits = new(kernels, rows, 151_936)
    row = torch.ones(rows, device=kernels.device)
    params = torch.stack([0.6 * row, 50 * row, 0.95 * row, 0 * row])  # as in plan.FILTERS
    batch = sampling_batch(params, row.long(), row.long())
    yield Timed(lambda: kernels.sample(logits, batch), logits.nbytes)


def store_row(pair: Backends, heads: tuple[Any, ...], is_fp8: bool) -> Row:
    kernels, _ = pair
    tokens = large(kernels.device)
    num, kv_heads, dim = HEADS[0]
    for each in heads:
        for norm in (kernels.dtype, None):
            yield from compare.norm_rope_store(pair, each, norm, 16, is_fp8)
    shape: dict[str, Any] = dict(empty=0.0, contexts=[tokens], query_lens=[tokens])
    attention, _, batch = next(compare.attention_step(pair, HEADS[0], None, 16, is_fp8, **shape))
    qkv = new(kernels, tokens, (num + 2 * kv_heads) * dim)
    norms = new(kernels, 2, dim).unbind()
    rope = new(kernels, 2, tokens, 1, dim).unbind()
    kv_bytes = 2 * kv_heads * attention.cache.itemsize
    work = qkv.nbytes + tokens * dim * (num * qkv.itemsize + kv_bytes)
    args: Any = qkv, norms, rope, batch
    yield Timed(lambda: attention.norm_rope_store(0, *args), work)


def attention_row(pair: Backends, heads: tuple[Any, ...], is_fp8: bool, what: str) -> Row:
    """Decodes are timed by the bytes of keys and values, and a chunk by its products."""
    size = large(pair[0].device)
    num, kv_heads, dim = HEADS[0]
    for each in heads:
        yield from (x for x in compare.attend(pair, each, None, 16, is_fp8) if x.what == what)
    rows, length = (max(1, size // 512), 2048) if what == "decodes" else (1, size // 4)
    queries = [1 if what == "decodes" else length] * rows
    shape: dict[str, Any] = dict(empty=0.0, contexts=[length] * rows, query_lens=queries)
    attention, q, batch = next(compare.attention_step(pair, HEADS[0], None, 16, is_fp8, **shape))
    num_bytes = 2 * rows * length * kv_heads * dim * attention.cache.itemsize
    flops = 2 * num * dim * length * (length + 1)
    work = (num_bytes, "GB/s") if what == "decodes" else (flops, "TFLOP/s")
    yield Timed(lambda: attention.attend(0, q, batch), *work)


def linear_row(pair: Backends) -> Row:
    """The product of one row is timed, which reads all weights."""
    kernels, _ = pair
    outputs = 8 * large(kernels.device)
    inputs = 2048
    yield from compare.linear(pair, "q_proj", 256, 1024, True)
    yield from compare.linear(pair, "lm_head", 250, 1100)
    [module] = compare.filled([kernels], {"q_proj": outputs}, new(kernels, outputs, inputs))
    x = new(kernels, 1, inputs)
    yield Timed(lambda: module(x), module.weight.nbytes)


def experts_row(pair: Backends) -> Row:
    """Two rows of each expert are timed, which read all weights."""
    from nanovllm.features.models.moe.experts import expert_mlp

    kernels, _ = pair
    num = 32
    size = max(64, large(kernels.device) // 16)
    hidden = 2048
    yield from compare.expert_mlp(pair, 16, 64, 128)
    [up], [down] = compare.expert_linears([kernels], partial(new, kernels), num, size, hidden)
    x = new(kernels, num, hidden)
    weights = new(kernels, num, 2)
    choices = torch.arange(2 * num, device=x.device).view(num, 2) % num
    mlp = kernels.expert_mlp(up, down) or expert_mlp
    yield Timed(lambda: mlp(x, weights, choices, up, down), up.weight.nbytes + down.weight.nbytes)


def delta_rule_row(pair: Backends) -> Row:
    """Decodes are timed, which read and write their states."""
    from nanovllm.features.models.hybrid.states import kernels_of

    yield from compare.delta_rule(pair, DELTA_RULE)
    rows = max(1, large(pair[0].device) // 128)
    decode = kernels_of(pair[0])[0]
    layer, x, conv, rule = compare.linear_attention(partial(new, pair[0]), DELTA_RULE, rows, rows)
    index = torch.arange(rows, device=x.device)
    yield Timed(lambda: decode(layer, x, conv, rule, index), 2 * rule.nbytes)
