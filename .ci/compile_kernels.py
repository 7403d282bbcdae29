"""Compile every Triton kernel for GPUs that this machine does not have, and check the result.

    python .ci/compile_kernels.py               all targets, in two processes
    python .ci/compile_kernels.py --table       also print registers, spills and shared memory

Triton can compile without a GPU. The script calls the functions of nanovllm.backends.gpu.kernels with
tensors of the real dtypes and intercepts each launch before Triton looks for a device. It therefore
compiles what a GPU would run, with the specializations that Triton derives from the arguments.
tests/helpers/dry_run.py runs whole engines and checks that this script compiles every variant that
they meet.

It checks that every kernel compiles within the shared memory of the target, that no kernel spills
registers but those of SPILLS, that as many decode programs fit a multiprocessor as configs.py says,
that float32 kernels do not use TF32, that no two products of a step add to one accumulator, and the
instructions of the loops that read the KV cache and weights in int8 (LIMITS).
"""

import argparse
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache, cached_property, partial
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from sass import product_loops, resources
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from nanovllm.backends.gpu.kernels import (
    attention,
    conversions,
    delta_rule,
    linear,
    pointwise,
    sampler,
    store,
)
from nanovllm.backends.gpu.kernels.configs import GpuInfo, decode_tile, prefill_tile
from nanovllm.backends.int4 import Int4Weight
from nanovllm.backends.int8 import Int8Weight
from nanovllm.models.batch import SamplingBatch
from nanovllm.models.fp8 import FP8

# (target, shared memory of one program in KiB, half-precision dtype). The limits are from the CUDA
# C++ Programming Guide, "Technical Specifications per Compute Capability", and AMD's CDNA3 ISA. For
# sm_86, which has as much shared memory as sm_89, Triton makes the same PTX.
TARGETS = {
    "sm_75": (GPUTarget("cuda", 75, 32), 64, torch.float16),
    "sm_80": (GPUTarget("cuda", 80, 32), 163, torch.bfloat16),
    "sm_89": (GPUTarget("cuda", 89, 32), 99, torch.bfloat16),
    "sm_90": (GPUTarget("cuda", 90, 32), 227, torch.bfloat16),
    "sm_100": (GPUTarget("cuda", 100, 32), 227, torch.bfloat16),
    "sm_120": (GPUTarget("cuda", 120, 32), 99, torch.bfloat16),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64, torch.bfloat16),
}
# One head size for each row of the tile table, and on sm_90 also one that is padded. The tiles of
# attention depend on the size and on the target's shared memory. The other kernels come with EVERY.
HEAD_DIMS = (64, 128, 256)
PADDED_HEAD_DIMS = (80,)
EVERY = 128
ATTENTION = (attention._attend, attention._attend_decode)
# Other kernels have the same tiles for all targets. They are compiled for one target of each kind of
# matrix units: sm_89 and sm_120 execute the instructions of sm_80, with less shared memory.
KINDS = ("sm_75", "sm_80", "sm_90", "sm_100", "gfx942")
LEAST_KIB = {"sm_80": 99}  # the least shared memory of those for which it stands
# The targets whose instructions convert fp8 (compute capability 8.9 and higher).
FP8_TARGETS = ("sm_89", "sm_90", "sm_100", "sm_120")
# (H, K): query heads and KV heads. The first is compiled for every target and head size, the others,
# whose groups are 1, 7 and 8 query heads, for sm_90 with a head size of 128 and no fp8.
HEADS = ((16, 8), (8, 8), (28, 4), (64, 8))
# Key heads and value heads of the delta rule.
DELTA_HEADS = (16, 32)

VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
# The assemblers of older versions also spill elsewhere. With them only decode and int8 are checked.
NEWEST = VERSION >= (3, 9)
# What may spill registers, by a regular expression of what `compile_one` calls it, and the reason.
SPILLS = {
    r"float32 .* fp8": "it uses no matrix units, and is for comparisons",
    r"_int[48]_linear .* ALIGNED=False": "layers whose inputs are no multiple of 16 are rare",
    r"_(solve|chunk_rule) \(float32 ": "it uses no matrix units, and is for comparisons",
    r"sm_(80|100): _(solve|chunk_rule) ": "at most 312 bytes; it has all 255 registers",
    r"sm_100: _attend \(bfloat16 D=64 G=2 WINDOW": "8 bytes, for the second bound of the mask",
    r"sm_80: _int4_linear .* G=128": "32 bytes of its two accumulators",
    r"sm_75: _expert_linear": "136 to 640 bytes with both tiles, in each kind of weights",
    r"sm_75: _int[48]_linear": "2 to 8 KB with every tile; use the dtype of the model there",
}
# Warp instructions in a loop for each KiB of keys and values, or of weights, at most: with Triton
# 3.6, and with later versions. More would be a regression, of a kernel or of the compiler.
LIMITS = {
    r"sm_90: _attend_decode \(bfloat16 D=64 G=2\)": (57, 50),
    r"sm_90: _attend_decode \(bfloat16 D=128 G=2\)": (47, 41),
    r"sm_90: _attend_decode \(bfloat16 D=64 fp8 ": (105, 100),
    r"sm_90: _attend_decode \(bfloat16 D=128 fp8 ": (95, 90),
    r"sm_90: _attend_decode \(bfloat16 D=256 fp8 ": (100, 100),
    r"sm_90: _int8_linear \(bfloat16 D=128 G=16 .*ALIGNED=True": (155, 145),
    r"sm_90: _int8_linear \(bfloat16 D=128 G=32 .*ALIGNED=True": (166, 166),
    r"sm_90: _int8_linear \(bfloat16 D=128 G=64 .*ALIGNED=True": (258, 248),
}
# Slow instructions that these loops do not need: conversions of integers, and loads of single bytes
# from shared memory.
SLOW = re.compile(r"I2F|LDS\.[US]8")
if not NEWEST:
    SPILLS[r"sm_120: _attend_decode \(bfloat16 D=128 fp8 "] = "16 bytes at 80 registers with 3.7"


@cache
def binder(kernel: JITFunction, target: GPUTarget) -> tuple[Any, Callable]:
    backend = make_backend(target)
    return backend, create_function_from_signature(kernel.signature, kernel.params, backend)


class Variant:
    """A kernel as Triton's JITFunction.run specializes it for the arguments of a launch."""

    def __init__(self, kernel: JITFunction, target: GPUTarget, args: tuple, kwargs: dict) -> None:
        backend, bind = binder(kernel, target)
        kwargs = kwargs | {"debug": False}
        self.kernel = kernel
        self.arguments, *rest = bind(*args, **kwargs)
        self.key = f"{kernel.__name__} {rest}"  # equal for launches that share a compiled kernel
        self.pack = partial(kernel._pack_args, backend, kwargs, self.arguments, *rest)

    @property
    def name(self) -> str:
        """The name of the kernel, and of `_linear` also the kind of weights."""
        if self.kernel is not linear._linear:
            return self.kernel.__name__
        kinds = {torch.int8: "_int8", torch.uint8: "_int4"}
        kind = kinds.get(self.arguments["weight"].dtype, "_invariant")
        return f"{'_expert' if self.arguments['EXPERTS'] else kind}_linear"

    @cached_property
    def packed(self) -> tuple[Any, dict[str, str], dict, dict]:
        """(options, type of each argument, constants and attributes by index of the argument)."""
        return self.pack()

    @property
    def flags(self) -> list[str]:
        """The constants that are no sizes: booleans, and numbers that Triton found to be 1.

        "WINDOW" if attention has one, whose size does not matter.
        """
        params, (_, _, constants, _) = self.kernel.params, self.packed
        named = [(params[at], value) for (at, *_), value in constants.items()]
        flags = [f"{p.name}={x}" for p, x in named if isinstance(x, bool) or not p.is_constexpr]
        return flags + [p.name for p, x in named if p.name == "WINDOW" and x]

    @property
    def group(self) -> int:
        """The query heads per KV head, or the rows, that a tile packs; the value heads; else 0."""
        if "M" in self.arguments:
            return self.arguments["H"] // self.arguments["K"]
        return self.arguments.get("ROWS", self.arguments.get("HV", 0))

    @property
    def step_kib(self) -> float:
        """KiB of keys and values, or of weights in int8, that a step of the loop reads; else 0."""
        if self.kernel is attention._attend_decode:
            cache = self.arguments["k_cache"]
            return 2 * self.arguments["TILE"] * cache.shape[-1] * cache.itemsize / 1024
        if self.name == "_int8_linear":
            return self.arguments["OUTPUTS"] * self.arguments["INPUTS"] / 1024
        return 0

    @property
    def text(self) -> str:
        """The variant apart from its sizes; ":16" marks what is a multiple of 16."""
        _, signature, _, attributes = self.packed
        types = [
            f"{name}:{dtype}{':16' if attributes.get((at,)) else ''}"
            for at, (name, dtype) in enumerate(signature.items())
            if dtype != "constexpr"
        ]
        return " ".join([self.kernel.__name__, *types, *self.flags])


def variants(
    name: str, dtype: torch.dtype, head_dim: int, cache_dtype: torch.dtype
) -> list[Variant]:
    """The kernels of the package for TARGETS[name]; those without a head size come with EVERY.

    With an fp8 cache the kernel for prompts has the tile that it has without. It is compiled for the
    largest head size, which needs the most registers, and the kernel for decodes for each.
    """
    target, shared_memory_kib, half = TARGETS[name]
    gpu = GpuInfo(shared_memory_kib)
    caught: dict[tuple[str, int], Variant] = {}
    exact, is_fp8 = dtype == torch.float32, cache_dtype == FP8

    def is_wanted(kernel: JITFunction) -> bool:
        if is_fp8 and dtype == half and kernel is attention._attend:
            return head_dim == HEAD_DIMS[-1]
        return kernel in ATTENTION or head_dim in (EVERY, *PADDED_HEAD_DIMS)

    def catch(kernel, *args, grid, warmup, **kwargs):
        if not is_wanted(kernel):
            return
        variant = Variant(kernel, target, args, kwargs)
        caught.setdefault((variant.text, variant.group), variant)

    run, JITFunction.run = JITFunction.run, catch
    try:
        launch_layer(gpu, dtype, head_dim, cache_dtype, *HEADS[0])
        if (name, dtype, head_dim, cache_dtype) == ("sm_90", half, 128, half):
            for heads in HEADS[1:]:
                launch_layer(gpu, dtype, head_dim, cache_dtype, *heads)
        if head_dim == EVERY and name in KINDS and not is_fp8:
            x = torch.empty((32, 4096), dtype=dtype)
            pointwise.add_rms_norm(x, x, x[0], 1e-6)
            pointwise.add_rms_norm(x, None, x[0], 1e-6)
            pointwise.silu_and_mul(x)
            pointwise.gelu_and_mul(x)
            every = name == "sm_90" and dtype == half
            launch_delta_rule(dtype, *DELTA_HEADS, only_decode=name == "sm_75")
            launch_quantized(dtype, all_tiles=dtype == torch.bfloat16, odd=every or exact)
            launch_experts(dtype)
            for inputs in (4096, 70) if dtype == torch.bfloat16 else ():  # batch_invariant=True
                for bias in (x[0, :inputs], None):
                    module: Any = SimpleNamespace(weight=x[:, :inputs].contiguous(), bias=bias)
                    linear.invariant_linear(module.weight, module)
            # The vocabulary of the embedded model is a single chunk.
            for num_rows, vocab_size in ((32, 151_936), (1, 151_936), (32, 1042)):
                row, ids = torch.ones(num_rows), torch.ones(num_rows, dtype=torch.int64)
                batch = SamplingBatch(row, ids, ids, {"top_k": ids, "top_p": row, "min_p": row})
                sampler.sample(torch.empty((num_rows, vocab_size), dtype=dtype), batch)
    finally:
        JITFunction.run = run
    return list(caught.values())


def launch_layer(
    gpu: GpuInfo,
    dtype: torch.dtype,
    head_dim: int,
    cache_dtype: torch.dtype,
    heads: int,
    kv_heads: int,
) -> None:
    """The kernels between the projections: of 32 sequences and of one, with and without norms."""
    cache = torch.empty((4, kv_heads, 16, head_dim), dtype=cache_dtype)
    wide = prefill_tile(gpu, head_dim, dtype)
    narrow = decode_tile(gpu, head_dim, dtype, cache_dtype == FP8)
    weight = torch.empty(head_dim, dtype=dtype)
    for num in (32, 1):
        q = torch.empty((num, heads, head_dim), dtype=dtype)
        tables = torch.zeros((num, 16), dtype=torch.int32)
        lens = torch.ones(num, dtype=torch.int64)
        starts = torch.arange(num + 1, dtype=torch.int32)
        tiles = torch.zeros((num, 2), dtype=torch.int32)
        for window in (0, 512):
            options = q, 1.0, 1.0, window
            attention.attend(q, cache, cache, tiles, starts, lens, tables, wide, *options)
            if dtype == cache_dtype == torch.bfloat16:  # batch_invariant=True
                attention.attend(q, cache, cache, tiles, starts, lens, tables, wide, *options, 1)
            attention.attend_decode(q, cache, cache, lens, lens, tables, narrow, 8, *options)
        qkv = torch.empty((num, (heads + 2 * kv_heads) * head_dim), dtype=dtype)
        cos = torch.empty((num, 1, head_dim), dtype=dtype)
        for norm in (weight, None):
            store.norm_rope_store(qkv, norm, norm, 1e-6, cos, cos, lens, cache, cache)


def launch_quantized(dtype: torch.dtype, all_tiles: bool, odd: bool) -> None:
    """Linear layers with weights in int8 and int4: the tile of few rows, or all of them.

    With a bias and multiples of the tile's size; `odd`: also without a bias and of other sizes, for
    which only few rows are compiled.
    """
    empty = partial(torch.empty, dtype=dtype)
    for weight_class in (Int8Weight, Int4Weight):
        for outputs, inputs in ((4096, 1024), (70, 70)) if odd else ((4096, 1024),):
            weight = weight_class.empty(empty, outputs, inputs)
            for bias in (empty(outputs), None) if odd else (empty(outputs),):
                module = SimpleNamespace(weight=weight, bias=bias)
                linear.linear(empty(1, inputs), module)
                if all_tiles and outputs == 4096 and bias is not None:
                    for rows in linear.FLOAT32 if dtype == torch.float32 else linear.HALF:
                        linear.linear(empty(rows, inputs), module)


def launch_experts(dtype: torch.dtype) -> None:
    """Products with experts: both tiles in the dtype of x, and one of each quantized kind."""
    shape, ends = (256 * 64, 1024), torch.zeros(256, dtype=torch.int64)
    plain = torch.empty(shape, dtype=dtype)
    in_int8, in_int4 = (
        kind.empty(partial(torch.empty, dtype=dtype), *shape) for kind in (Int8Weight, Int4Weight)
    )
    many = linear.FEW.num_rows * len(ends)
    for weight, rows in ((plain, 1), (plain, many), (in_int8, 1), (in_int4, many)):
        x = torch.empty((rows, shape[1]), dtype=dtype)
        linear.expert_linear(x, SimpleNamespace(weight=weight), ends)


def launch_delta_rule(
    dtype: torch.dtype, key_heads: int, value_heads: int, only_decode: bool
) -> None:
    """The kernels of linear attention with heads of 128."""
    half = partial(torch.empty, dtype=dtype)
    size, heads = value_heads * 128, torch.empty(value_heads)
    channels = 2 * key_heads * 128 + size
    layer = SimpleNamespace(
        sizes=(key_heads, value_heads, 128, 128), eps=1e-6, norm=torch.empty(128)
    )
    layer.conv1d, layer.a_log, layer.dt_bias = torch.empty((4, channels)), heads, heads
    x, conv = half((8, channels + size + 2 * value_heads)), half((1, 3, channels))
    rule = torch.empty((1, value_heads, 128, 128))
    delta_rule.decode(layer, x, conv, rule, torch.zeros(8, dtype=torch.int64))
    if not only_decode:
        segments = SimpleNamespace(rows=[0], starts=[0], ends=[8], is_first=[True], tensors=None)
        delta_rule.chunk(layer, x, conv, rule, segments, half((8, size)))


def compile_one(name: str, label: str, variant: Variant) -> tuple[str, str, list[str]]:
    """Compile for TARGETS[name]; return (row of the table, errors)."""
    target, limit_kib, _ = TARGETS[name]
    kernel, (options, *specialized) = variant.kernel, variant.packed
    if kernel not in ATTENTION:
        limit_kib = LEAST_KIB.get(name, limit_kib)
    title, start = f"{name}: {variant.name} ({label})", time.perf_counter()
    conversions.PTX = tl.constexpr(target.backend == "cuda")
    try:
        compiled = triton.compile(ASTSource(kernel, *specialized), target, options.__dict__)
    except Exception as error:
        return title, title, [f"{title}: {type(error).__name__}: {error}"]
    seconds = time.perf_counter() - start
    errors = []
    shared = compiled.metadata.shared
    if shared > limit_kib * 1024:
        errors.append(f"{title}: shared memory {shared}, limit {limit_kib * 1024}")
    registers = spills = fit = per_kib = "-"
    if target.backend == "cuda":
        registers, spills = resources(compiled.asm["cubin"])
        fit = resident(target, limit_kib, shared, options.num_warps, registers)
        checked = NEWEST or ("float32" not in label and variant.step_kib)
        if spills and checked and not any(re.search(x, title) for x in SPILLS):
            errors.append(f"{title}: {spills} bytes of spills")
        if kernel is attention._attend_decode:
            q, fp8 = variant.arguments["q"], "fp8" in label
            tile = decode_tile(GpuInfo(limit_kib), q.shape[-1], q.dtype, fp8)
            if fit < tile.programs_per_sm:
                errors.append(f"{title}: programs_per_sm={tile.programs_per_sm}, and {fit} fit")
    # Compute capability 7.5 and float32 use no matrix units; the tiles of int8 are for 16 bytes.
    if (
        variant.step_kib
        and target.backend == "cuda"
        and target.arch >= 80
        and not re.search("float32|ALIGNED=False", label)
    ):
        loops = product_loops(compiled.asm["cubin"])
        errors += [] if loops else [f"{title}: no loop with a product"]
        slow = [name for loop in loops for name in loop if SLOW.search(name)]
        errors += [f"{title}: slow instructions {slow}"] if slow else []
        count = min((loop.total() for loop in loops), default=0)  # of the innermost loop
        per_kib = round(count * options.num_warps / variant.step_kib, 1)
        limits = [limit for x, limit in LIMITS.items() if re.search(x, title)]
        if limits and per_kib > limits[0][VERSION >= (3, 7)]:
            errors.append(f"{title}: {per_kib} instructions per KiB, limit {limits[0]}")
    # Two products of a loop that add to one accumulator are compiled wrongly for tcgen05, the matrix
    # units of sm_100, by Triton 3.6 to 3.7.1 (triton-lang/triton#10821).
    dots = re.findall(r"(%\w+) = tt\.dot %\w+, %\w+, (%\w+)", compiled.asm["ttir"])
    if {result for result, _ in dots} & {added for _, added in dots}:
        errors.append(f"{title}: two products of a step add to one accumulator")
    if "float32" in label and re.search(r"\btf32\b", compiled.asm.get("ptx", "")):
        errors.append(f"{title}: TF32 in a float32 kernel")
    row = (
        f"{name:7} {variant.name:16} {label:34} warps {options.num_warps:2} stages "
        f"{options.num_stages} shared {shared:6} registers {registers:>3} spills {spills:>3} "
        f"fit {fit:>2} per KiB {per_kib:>5} {seconds:5.1f} s"
    )
    return title, row, errors


def resident(target: GPUTarget, limit_kib: int, shared: int, warps: int, registers: int) -> int:
    """How many programs fit a multiprocessor at a time: shared memory, 64K registers and threads.

    CUDA C++ Programming Guide: from compute capability 8.0 a program takes 1 KiB more, and the
    multiprocessor has 1 KiB more than a program; a warp's registers are allotted by 256. It has at
    least 48 warps, or 32 of compute capability 7.5.
    """
    reserved = 1024 * (target.arch >= 80)
    by_shared = (limit_kib * 1024 + reserved) // max(1, shared + reserved)
    by_registers = 2**16 // (warps * -(-32 * registers // 256) * 256)
    return min(by_shared, by_registers, (48 if target.arch >= 80 else 32) // warps)


def jobs(name: str) -> list[tuple[str, torch.dtype, int, torch.dtype]]:
    """The dtypes, head sizes and dtypes of the cache that are compiled for TARGETS[name]."""
    half = TARGETS[name][2]
    cases = [(half, head_dim) for head_dim in HEAD_DIMS]
    if name == "sm_90":
        cases += [(half, head_dim) for head_dim in PADDED_HEAD_DIMS]
        cases += [(torch.float16, 64)] + [(torch.float32, head_dim) for head_dim in HEAD_DIMS]
    found = [(name, dtype, head_dim, dtype) for dtype, head_dim in cases]
    if name in FP8_TARGETS:
        found += [(name, half, head_dim, FP8) for head_dim in HEAD_DIMS]
    if name == "sm_90":
        found += [(name, dtype, 128, FP8) for dtype in (torch.float16, torch.float32)]
    return found


def run_job(job: tuple[str, torch.dtype, int, torch.dtype]) -> list[tuple[str, str, list[str]]]:
    name, dtype, head_dim, cache_dtype = job
    size = f"{dtype} D={head_dim}{' fp8' * (cache_dtype == FP8)}".removeprefix("torch.")
    return [
        compile_one(name, " ".join([size, f"G={variant.group}", *variant.flags]), variant)
        for variant in variants(*job)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--table", action="store_true", help="print one row per kernel")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    args = parser.parse_args()
    start = time.perf_counter()
    todo = [job for name in args.targets for job in jobs(name)]
    todo.sort(key=lambda job: job[2] != EVERY)  # those with most kernels come first
    with tempfile.TemporaryDirectory() as cache:
        # An empty cache makes Triton compile every kernel.
        os.environ["TRITON_CACHE_DIR"] = cache
        os.environ.pop("TRITON_INTERPRET", None)
        with multiprocessing.get_context("spawn").Pool(2) as pool:
            results = [r for rs in pool.imap_unordered(run_job, todo) for r in rs]
    if args.table:
        print("\n".join(sorted(row for _, row, _ in results)))
    errors = [error for _, _, messages in results for error in messages]
    titles = "\n".join(title for title, _, _ in results)
    if "sm_90" in args.targets:  # a limit that no kernel has would check nothing
        errors += [f"no kernel is called {x}" for x in LIMITS if not re.search(x, titles)]
    print(
        f"Triton {triton.__version__}: {len(results)} kernels for {', '.join(args.targets)} "
        f"in {time.perf_counter() - start:.0f} s, {len(errors)} errors"
    )
    print("\n".join(errors), file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
