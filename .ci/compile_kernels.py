"""Compile every Triton kernel for GPUs that this machine does not have, and check the result.

    python .ci/compile_kernels.py               all targets, in two processes
    python .ci/compile_kernels.py --table       also print registers, spills and shared memory

Triton can compile without a GPU. The script calls the functions of nanovllm.gpu.kernels with tensors of
the real dtypes and intercepts each launch before Triton looks for a device. It therefore compiles
what a GPU would run, with the specializations that Triton derives from the arguments.

It checks that every kernel compiles within the shared memory of the target, that the bfloat16 and
float16 decode kernels spill no registers on sm_90, and that float32 kernels do not use TF32.
"""

import argparse
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from nanovllm.batch import SamplingBatch
from nanovllm.gpu.kernels import attention, pointwise, sampling, store
from nanovllm.gpu.kernels.configs import GpuInfo, decode_tile, prefill_tile

# (target, shared memory of one program in KiB, half-precision dtype). The limits are from the CUDA
# C++ Programming Guide, "Technical Specifications per Compute Capability", and AMD's CDNA3 ISA.
TARGETS = {
    "sm_75": (GPUTarget("cuda", 75, 32), 64, torch.float16),
    "sm_80": (GPUTarget("cuda", 80, 32), 163, torch.bfloat16),
    "sm_86": (GPUTarget("cuda", 86, 32), 99, torch.bfloat16),
    "sm_89": (GPUTarget("cuda", 89, 32), 99, torch.bfloat16),
    "sm_90": (GPUTarget("cuda", 90, 32), 227, torch.bfloat16),
    "sm_100": (GPUTarget("cuda", 100, 32), 227, torch.bfloat16),
    "sm_120": (GPUTarget("cuda", 120, 32), 99, torch.bfloat16),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64, torch.bfloat16),
}
# One head size for each row of the tile table, and on sm_90 also sizes that are padded.
HEAD_DIMS = (64, 128, 256)
PADDED_HEAD_DIMS = (32, 80, 96)


class Launch(NamedTuple):
    kernel: JITFunction
    args: tuple
    kwargs: dict
    label: str


def launches(gpu: GpuInfo, dtype: torch.dtype, head_dim: int) -> list[Launch]:
    """The launches of the package for one head size; kernels without one are included with 64."""
    caught: dict[str, Launch] = {}
    label = f"{dtype} D={head_dim}".removeprefix("torch.")

    def catch(self, *args, grid, warmup, **kwargs):
        caught.setdefault(self.__name__, Launch(self, args, kwargs, label))

    run, JITFunction.run = JITFunction.run, catch
    try:
        num_heads, num_kv_heads, block_size = 16, 8, 16
        cache = torch.empty((4, num_kv_heads, block_size, head_dim), dtype=dtype)
        q = torch.empty((32, num_heads, head_dim), dtype=dtype)
        tables = torch.zeros((32, 16), dtype=torch.int32)
        lens = torch.ones(32, dtype=torch.int64)
        starts = torch.arange(33, dtype=torch.int32)
        tile = prefill_tile(gpu, head_dim, dtype)
        tiles = attention.query_tiles(starts, 32, tile.num_rows // (num_heads // num_kv_heads))
        attention.attend(q, cache, cache, tiles, starts, lens, tables, tile, q)
        tile = decode_tile(gpu, head_dim, dtype)
        attention.attend_decode(q, cache, cache, lens, tables, tile, 8, q)
        qkv = torch.empty((32, (num_heads + 2 * num_kv_heads) * head_dim), dtype=dtype)
        weight, cos = (
            torch.empty(head_dim, dtype=dtype),
            torch.empty((32, 1, head_dim), dtype=dtype),
        )
        store.norm_rope_store(qkv, weight, weight, 1e-6, cos, cos, lens, cache, cache)
        if head_dim == HEAD_DIMS[0]:
            label = label.split()[0]
            x = torch.empty((32, 4096), dtype=dtype)
            pointwise.add_rms_norm(x, x, x[0], 1e-6)
            pointwise.silu_and_mul(x)
            row, ids = torch.ones(32), torch.ones(32, dtype=torch.int64)
            batch = SamplingBatch(row, ids, ids, {"top_k": ids, "top_p": row, "min_p": row})
            sampling.sample(torch.empty((32, 151_936), dtype=dtype), batch)
    finally:
        JITFunction.run = run
    return list(caught.values())


def compile_one(name: str, launch: Launch) -> tuple[str, list[str]]:
    """Compile for TARGETS[name]; return (row of the table, errors)."""
    target, limit_kib, _ = TARGETS[name]
    kernel, label = launch.kernel, launch.label
    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    kwargs = launch.kwargs | {"debug": False}
    bound, specialization, options = bind(*launch.args, **kwargs)
    options, signature, constexprs, attrs = kernel._pack_args(
        backend, kwargs, bound, specialization, options
    )
    title, start = f"{name}: {kernel.__name__} ({label})", time.perf_counter()
    try:
        compiled = triton.compile(
            ASTSource(kernel, signature, constexprs, attrs), target, options.__dict__
        )
    except Exception as error:
        return title, [f"{title}: {type(error).__name__}: {error}"]
    seconds = time.perf_counter() - start
    errors = []
    shared = compiled.metadata.shared
    if shared > limit_kib * 1024:
        errors.append(f"{title}: shared memory {shared}, limit {limit_kib * 1024}")
    registers = spills = "-"
    if name == "sm_90":
        registers, spills = resources(compiled.asm["cubin"])
        if "decode" in kernel.__name__ and "float32" not in label and int(spills):
            errors.append(f"{title}: {spills} bytes of spills")
    if "float32" in label and re.search(r"\btf32\b", compiled.asm.get("ptx", "")):
        errors.append(f"{title}: TF32 in a float32 kernel")
    row = (
        f"{name:7} {kernel.__name__:16} {label:18} warps {options.num_warps:2} stages "
        f"{options.num_stages} shared {shared:6} registers {registers:>3} spills {spills:>3} "
        f"{seconds:5.1f} s"
    )
    return row, errors


def resources(cubin: bytes) -> tuple[str, str]:
    """(registers, bytes of local memory) of a kernel; without spills it uses no local memory."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+).* LOCAL:(\d+)", out)
    assert match, out
    return match[1], str(int(match[2]) + int(match[3]))


def jobs(name: str) -> list[tuple[str, torch.dtype, int]]:
    """The dtypes and head sizes that are compiled for TARGETS[name]."""
    half = TARGETS[name][2]
    cases = [(half, head_dim) for head_dim in HEAD_DIMS]
    if name == "sm_90":
        cases += [(half, head_dim) for head_dim in PADDED_HEAD_DIMS]
        cases += [(d, head_dim) for d in (torch.float16, torch.float32) for head_dim in HEAD_DIMS]
    return [(name, *case) for case in cases]


def run_job(job: tuple[str, torch.dtype, int]) -> list[tuple[str, list[str]]]:
    name, dtype, head_dim = job
    gpu = GpuInfo(shared_memory_kib=TARGETS[name][1])
    return [compile_one(name, launch) for launch in launches(gpu, dtype, head_dim)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--table", action="store_true", help="print one row per kernel")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    args = parser.parse_args()
    start = time.perf_counter()
    todo = [job for name in args.targets for job in jobs(name)]
    with tempfile.TemporaryDirectory() as cache:
        # An empty cache makes Triton compile every kernel.
        os.environ["TRITON_CACHE_DIR"] = cache
        os.environ.pop("TRITON_INTERPRET", None)
        with multiprocessing.get_context("spawn").Pool(2) as pool:
            results = [r for rs in pool.imap_unordered(run_job, todo) for r in rs]
    if args.table:
        print("\n".join(sorted(row for row, _ in results)))
    errors = [error for _, messages in results for error in messages]
    print(
        f"Triton {triton.__version__}: {len(results)} kernels for {', '.join(args.targets)} "
        f"in {time.perf_counter() - start:.0f} s, {len(errors)} errors"
    )
    print("\n".join(errors), file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
