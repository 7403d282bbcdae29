"""The rows of `nanovllm check`, which run in a process of that command.

The comparisons are the functions of loading/check.py, which an engine runs when it starts. What is
timed is larger than the caches of a processor.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple, TextIO, TypeAlias

import torch
from torch import Tensor

from nanovllm.backends import int4, int8
from nanovllm.loading import check
from nanovllm.loading.check import Backends, Comparison
from nanovllm.loading.select_backend import pick_backend, pick_device
from nanovllm.models.backend import Backend
from nanovllm.runner.rows import sampling_batch

# (query heads, KV heads, head size): Qwen3-0.6B, Qwen2.5-7B, Qwen3.5, Llama 3.2.
HEADS = (16, 8, 128), (28, 4, 128), (8, 2, 256), (32, 8, 64)
# (Hk, Hv, Dk, Dv) of linear attention: Qwen3.5-0.8B and Qwen3.5-35B-A3B.
DELTA_RULE = (16, 16, 128, 128), (16, 32, 128, 128)
IN_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"


class Timed(NamedTuple):
    call: Callable[[], object]
    work: float  # bytes that are read and written, or operations
    unit: str = "GB/s"


# The comparisons of a row, and then what is timed, if anything.
Row: TypeAlias = Iterator[Comparison | Timed]


class Case(NamedTuple):
    kernel: str
    format: str
    dtype: torch.dtype
    row: Callable[[], Row]


def main(start: int, only: list[str], device_name: str) -> None:
    """Print the messages that cli/check.py reads, for the rows from number `start`."""
    messages = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no message
    threading.Thread(target=end_with_parent, daemon=True).start()
    device = pick_device(device_name)
    run(cases(device), start, only, device, messages)


def end_with_parent() -> None:
    """End this process when the command has ended, however it did."""
    sys.stdin.read()
    os._exit(1)


def run(
    rows: Iterator[Case], start: int, only: list[str], device: torch.device, messages: TextIO
) -> None:
    """Compare and time the rows from number `start` whose names contain all words of `only`."""

    def send(**message: Any) -> None:
        print(json.dumps(message), file=messages, flush=True)

    send(about=about(device))
    measured: set[torch.dtype] = set()
    for number, case in enumerate(rows):
        if number < start or not all(word in f"{case.kernel} {case.format}" for word in only):
            continue
        with torch.inference_mode():
            if case.dtype not in measured:
                send(peaks=peaks(device, case.dtype))
                measured.add(case.dtype)
            send(begin=number, kernel=case.kernel, format=case.format)
            send(**result(case, device))
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # an error that no later row survives ends the process
            torch.cuda.empty_cache()
    send(done=True)


def about(device: torch.device) -> str:
    if device.type == "cpu":
        return f"kernels of the CPU, {torch.get_num_threads()} threads"
    gpu, driver = torch.cuda.get_device_properties(device), "unknown"
    free, total = (size / 2**30 for size in torch.cuda.mem_get_info(device))
    if os.path.exists(path := "/proc/driver/nvidia/version"):
        with open(path) as file:
            driver = file.readline().removeprefix("NVRM version:").strip()
    return (
        f"GPU {gpu.name}, compute capability {gpu.major}.{gpu.minor}, {gpu.multi_processor_count} "
        f"multiprocessors, {free:.1f} of {total:.1f} GiB free, CUDA "
        f"{torch.version.cuda or torch.version.hip}, driver {driver}"
    )


def result(case: Case, device: torch.device) -> dict[str, Any]:
    """Return the message of a row."""
    message: dict[str, Any] = {"result": "right", "error": 0.0}
    compared = -1.0  # the error as a share of its limit
    try:
        for item in case.row():
            if isinstance(item, Timed):
                message |= {"work": item.work, "unit": item.unit}
                message |= {"seconds": seconds(item.call, device)}
                continue
            error, limit = item.error(), item.limit(case.dtype)
            share = error / limit if limit else float("inf") if error else 0.0
            if not share <= 1:  # also NaN
                why = f"{item.what}: the relative error is {error:.2g}, and {limit:.2g} is allowed"
                return {"result": "WRONG", "why": why}
            if share > compared:
                compared, message["error"] = share, error
    except NotImplementedError as error:
        return {"result": "-", "why": str(error)}
    except Exception as error:  # of Triton, of its compilers, of torch or of Numba
        first = next(iter(str(error).strip().splitlines()), "")
        what = "not timed" if compared >= 0 else "FAILED"
        message = message if compared >= 0 else {"result": what}
        message["why"] = f"{what}: {type(error).__name__}: {first:.300}"
    return message


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the time of a call: the shortest mean of five rounds of about a tenth of a second."""

    def mean(number: int) -> float:
        start = time.perf_counter()
        for _ in range(number):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - start) / number

    mean(2)
    number = max(1, min(1000, int(0.1 / mean(2))))
    return min(mean(number) for _ in range(5))


def peaks(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Return torch's rates of a copy or sum, in bytes, and of a product, in operations."""
    rows, side = (large(device), 8192) if device.type == "cuda" else (large(device), 1024)
    x = torch.zeros(rows, 4096, device=device)
    y, (a, b) = torch.empty_like(x), torch.randn(2, side, side, device=device).to(dtype)
    copied, read = seconds(lambda: y.copy_(x), device), seconds(x.sum, device)
    product = 2 * side**3 / seconds(lambda: a @ b, device)
    return {"GB/s": max(2 * x.nbytes / copied, x.nbytes / read), "TFLOP/s": product}


def cases(device: torch.device) -> Iterator[Case]:
    """Yield all rows for a device, first those in the dtype of most models."""
    on_gpu, has_fp8 = device.type == "cuda" or IN_INTERPRETER, True
    dtypes = [torch.bfloat16, torch.float32]
    if IN_INTERPRETER:  # it computes bfloat16 incorrectly
        dtypes = [torch.float32]
    elif device.type == "cuda" and not torch.version.hip:
        capability = torch.cuda.get_device_capability(device)
        has_fp8 = capability >= (8, 9)
        dtypes = [*dtypes[: 1 if capability >= (8, 0) else 0], torch.float16, torch.float32]

    @cache
    def backends(dtype: torch.dtype, weights: str) -> Backends:
        backend = pick_backend("triton" if on_gpu else "numba", device, dtype, 10**9)
        quantized: dict[str, Callable[[Backend], Backend]]
        quantized = {"": lambda x: x, "int8": int8.quantized, "int4": int4.quantized}
        return quantized[weights](backend), quantized[weights](Backend(device, dtype))

    for dtype in dtypes:
        heads = HEADS if dtype == dtypes[0] and not IN_INTERPRETER else HEADS[:1]

        def case(
            kernel: str, row: Callable[..., Row], *sizes: Any, note: str = "", weights: str = ""
        ) -> Case:
            name = str(dtype).removeprefix("torch.") + (note or (weights and f", {weights}"))  # noqa: B023
            pair = partial(backends, dtype, weights)  # noqa: B023
            return Case(kernel, name, dtype, lambda: row(pair(), *sizes))  # noqa: B023

        yield case("add_rms_norm", norm_row)
        yield case("silu_and_mul", silu_row)
        for is_fp8 in (False, True):
            note = ", fp8 KV" * is_fp8
            if is_fp8 and not has_fp8:
                yield case("attend", unsupported, note=note)
                continue
            yield case("norm_rope_store", store_row, heads, is_fp8, note=note)
            yield case("attend, decodes", attention_row, heads, is_fp8, True, note=note)
            yield case("attend, a chunk", attention_row, heads, is_fp8, False, note=note)
        for weights in ("", "int8", "int4"):
            if weights or not on_gpu:  # else the products are torch's
                yield case("linear", linear_row, weights=weights)
            yield case("expert_mlp", experts_row, weights=weights)
        yield case("delta_rule", delta_rule_row)
        yield case("sample", sample_row)
        if on_gpu:
            yield case("decode_inputs", lambda pair: check.decode_inputs(pair, 16))


# ---- rows ----


def large(device: torch.device) -> int:
    """Return a number of rows of 4,096 numbers that a processor's caches do not hold."""
    return 64 if IN_INTERPRETER else 16_384 if device.type == "cuda" else 4096


def new(kernels: Backend, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    return torch.randn(shape, dtype=dtype or kernels.dtype, device=kernels.device)


def unsupported(pair: Backends) -> Row:
    raise NotImplementedError("an fp8 KV cache needs compute capability 8.9 or higher")


def norm_row(pair: Backends) -> Row:
    kernels, _ = pair
    for size in (1024, 5120):
        yield from check.add_rms_norm(pair, size, kernels.dtype)
    x, residual, weight = new(kernels, 3, large(kernels.device), 4096)
    yield Timed(lambda: kernels.add_rms_norm(x, residual, weight[0], 1e-6), 4 * x.nbytes)


def silu_row(pair: Backends) -> Row:
    kernels, _ = pair
    for size in (3072, 1100):
        yield from check.silu_and_mul(pair, size)
    x = new(kernels, large(kernels.device), 8192)
    yield Timed(lambda: kernels.silu_and_mul(x), 1.5 * x.nbytes)


def sample_row(pair: Backends) -> Row:
    kernels, rows = pair[0], max(1, large(pair[0].device) // 64)
    yield from check.sample(pair, 151_936)
    logits, row = new(kernels, rows, 151_936), torch.ones(rows, device=kernels.device)
    params = torch.stack([0.6 * row, 50 * row, 0.95 * row, 0 * row])  # as in plan.FILTERS
    batch = sampling_batch(params, row.long(), row.long())
    yield Timed(lambda: kernels.sample(logits, batch), logits.nbytes)


def attention_step(pair: Backends, is_fp8: bool, contexts: list[int], queries: list[int]) -> Any:
    """Return the attention of the kernels, the result of its `norm_rope_store`, and the batch."""
    lengths: dict[str, Any] = dict(contexts=contexts, query_lens=queries)
    return next(check.attention_step(pair, HEADS[0], None, 16, is_fp8, empty=0.0, **lengths))


def store_row(pair: Backends, heads: tuple[Any, ...], is_fp8: bool) -> Row:
    kernels, tokens, (num, kv_heads, dim) = pair[0], large(pair[0].device), HEADS[0]
    for each in heads:
        for norm in (kernels.dtype, None):
            yield from check.norm_rope_store(pair, each, norm, 16, is_fp8)
    attention, _, batch = attention_step(pair, is_fp8, [tokens], [tokens])
    qkv, norms = new(kernels, tokens, (num + 2 * kv_heads) * dim), new(kernels, 2, dim)
    rope, stored = new(kernels, 2, tokens, 1, dim), 2 * kv_heads * attention.cache.itemsize
    work = qkv.nbytes + tokens * dim * (num * qkv.itemsize + stored)
    args = qkv, (norms[0], norms[1]), (rope[0], rope[1]), batch
    yield Timed(lambda: attention.norm_rope_store(0, *args), work)


def attention_row(pair: Backends, heads: tuple[Any, ...], is_fp8: bool, decodes: bool) -> Row:
    """Decodes are timed by the bytes of keys and values, and a chunk by its products."""
    tokens, (num, kv_heads, dim) = large(pair[0].device), HEADS[0]
    for each in heads:
        compared = check.attend(pair, each, None, 16, is_fp8)
        yield from (x for x in compared if x.what == ("decodes" if decodes else "a chunk"))
    if decodes:
        rows = max(1, tokens // 512)
        attention, q, batch = attention_step(pair, is_fp8, [2048] * rows, [1] * rows)
        work = 2 * 2048 * rows * kv_heads * dim * attention.cache.itemsize
        yield Timed(lambda: attention.attend(0, q, batch), work)
    else:
        length = tokens // 4
        attention, q, batch = attention_step(pair, is_fp8, [length], [length])
        work = 2 * num * dim * length * (length + 1)
        yield Timed(lambda: attention.attend(0, q, batch), work, "TFLOP/s")


def linear_row(pair: Backends) -> Row:
    """The product of one row is timed, which reads all weights."""
    kernels, outputs = pair[0], 8 * large(pair[0].device)
    yield from check.linear(pair, "q_proj", 256, 1024, True)
    yield from check.linear(pair, "lm_head", 250, 1100)
    size = kernels.make_weight(outputs, 2048, ["q_proj"]).nbytes
    module = check.filled((kernels, kernels), {"q_proj": outputs}, new(kernels, outputs, 2048))[0]
    x = new(kernels, 1, 2048)
    yield Timed(lambda: module(x), size)


def experts_row(pair: Backends) -> Row:
    """Two rows of each expert are timed."""
    from nanovllm.features.models.moe.experts import expert_mlp

    kernels, num, size, hidden = pair[0], 32, max(64, large(pair[0].device) // 16), 2048
    yield from check.expert_mlp(pair, 16, 64, 128)
    modules, work = [], 0
    for kinds, outputs, inputs in (("gate", "up"), size, hidden), (("down",), hidden, size):
        names = [f"experts.{i}.{kind}_proj" for i in range(num) for kind in kinds]
        weight = new(kernels, outputs * len(names), inputs)
        work += kernels.make_weight(*weight.shape, names).nbytes
        modules.append(check.filled((kernels, kernels), dict.fromkeys(names, outputs), weight)[0])
    x, weights = new(kernels, num, hidden), new(kernels, num, 2)
    choices = torch.arange(2 * num, device=x.device).view(num, 2) % num
    mlp = kernels.expert_mlp(modules[0], modules[1]) or expert_mlp
    yield Timed(lambda: mlp(x, weights, choices, *modules), work)


def delta_rule_row(pair: Backends) -> Row:
    """Decodes are timed, which read and write their states."""
    from nanovllm.features.models.hybrid.states import kernels_of

    for sizes in DELTA_RULE:
        yield from check.delta_rule(pair, sizes)
    rows, decode = max(1, large(pair[0].device) // 128), kernels_of(pair[0])[0]
    layer, x, conv, rule = check.linear_attention(partial(new, pair[0]), sizes, rows, rows)
    index = torch.arange(rows, device=x.device)
    yield Timed(lambda: decode(layer, x, conv, rule, index), 2 * rule.nbytes)
