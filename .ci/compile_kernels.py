"""Compile every kernel for GPUs that are not here, and check what comes out.

    python .ci/compile_kernels.py               all targets, two processes
    python .ci/compile_kernels.py --table       and print registers, spills and shared memory

Triton needs no GPU to compile. The launches are the package's own: each function is called with
tensors of the real dtypes, and the launch is caught where Triton would look for a device. So what is
compiled is what a GPU would run, with the specialisations that Triton derives from the arguments.

Checked: it compiles; shared memory is within the target's limit; the bf16 and fp16 decode kernels
spill no register on sm_90; float32 kernels use no tf32.
"""

import argparse
import functools
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from nanovllm.kernels import attention, blocks, pointwise, sampling, store
from nanovllm.kernels.configs import Card, decode_tile, prefill_tile
from nanovllm.runner.batch import SamplingBatch

# Shared memory that one program may have, KiB (CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability"; AMD CDNA3 ISA: 64 KiB of LDS).
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
HEAD_DIMS = (64, 128, 256)  # one for each row of the table of tiles
PADDED_HEAD_DIMS = (32, 80, 96)  # the others, on sm_90


@dataclass
class Launch:
    kernel: JITFunction
    args: tuple
    kwargs: dict
    what: str


def launches(card: Card, dtype: torch.dtype, head_dims: tuple[int, ...]) -> list[Launch]:
    """What the package launches for one card and dtype, caught on the way to the device."""
    caught: list[Launch] = []
    what = ""

    def catch(self, *args, grid, warmup, **kwargs):
        caught.append(Launch(self, args, kwargs, what))

    run, JITFunction.run = JITFunction.run, catch
    try:
        for dim in head_dims:
            what = f"{dtype} D={dim}".removeprefix("torch.")
            heads, kv_heads, block = 16, 8, 16
            cache = torch.empty((4, kv_heads, block, dim), dtype=dtype)
            q = torch.empty((32, heads, dim), dtype=dtype)
            tables = torch.zeros((32, 16), dtype=torch.int32)
            lens = torch.ones(32, dtype=torch.int64)
            starts = torch.arange(33, dtype=torch.int32)
            group = heads // kv_heads
            wide = prefill_tile(card, dim, dtype)
            tiles = attention.query_tiles(starts, 32, wide.rows // group)
            attention.attend(q, cache, cache, tiles, starts, lens, tables, wide, q)
            narrow = decode_tile(card, dim, dtype)
            attention.attend_decode(q, cache, cache, lens, tables, narrow, 8, q)
            qkv = torch.empty((32, (heads + 2 * kv_heads) * dim), dtype=dtype)
            weight = torch.empty(dim, dtype=dtype)
            turn = torch.empty((32, 1, dim), dtype=dtype)
            store.rope_store(qkv, weight, weight, 1e-6, turn, turn, lens, cache, cache)
        what = str(dtype).removeprefix("torch.")
        x = torch.empty((32, 4096), dtype=dtype)
        pointwise.add_rms_norm(x, x, x[0], 1e-6)
        pointwise.silu_and_mul(x)
        blocks.copy_blocks(torch.empty((2, 4, 8, 16, 64), dtype=dtype), lens[:2], lens[:2])
        row, ids = torch.ones(32), torch.ones(32, dtype=torch.int64)
        batch = SamplingBatch(row, ids, row, row, ids, ids, False, True, True, True)
        sampling.sample(torch.empty((32, 151_936), dtype=dtype), batch)
    finally:
        JITFunction.run = run
    unique = {}
    for launch in caught:
        unique.setdefault((launch.kernel.__name__, launch.what), launch)
    return list(unique.values())


@functools.cache
def binder(kernel: JITFunction, target: GPUTarget):
    backend = make_backend(target)
    return backend, create_function_from_signature(kernel.signature, kernel.params, backend)


def compile_one(name: str, launch: Launch) -> tuple[str, list[str]]:
    """(a row of the table, what is wrong)."""
    target, limit, _ = TARGETS[name]
    backend, bind = binder(launch.kernel, target)
    kwargs = launch.kwargs | {"debug": False}
    bound, specialization, options = bind(*launch.args, **kwargs)
    options, signature, constexprs, attrs = launch.kernel._pack_args(
        backend, kwargs, bound, specialization, options
    )
    start = time.perf_counter()
    source = ASTSource(launch.kernel, signature, constexprs, attrs)
    try:
        compiled = triton.compile(source, target=target, options=options.__dict__)
    except Exception as error:
        return f"{name} {launch.kernel.__name__} {launch.what}", [
            f"{name}: {launch.kernel.__name__} ({launch.what}): {type(error).__name__}: {error}"
        ]
    seconds = time.perf_counter() - start
    wrong = []
    shared = compiled.metadata.shared
    if shared > limit * 1024:
        wrong.append(f"shared memory {shared} of {limit * 1024}")
    registers = spills = "-"
    if name == "sm_90":
        registers, spills = resources(compiled.asm["cubin"])
        if "decode" in launch.kernel.__name__ and "float32" not in launch.what and int(spills):
            wrong.append(f"{spills} bytes of spills")
    if "float32" in launch.what and re.search(r"\btf32\b", compiled.asm.get("ptx", "")):
        wrong.append("tf32 in a float32 kernel")
    row = (
        f"{name:7} {launch.kernel.__name__:16} {launch.what:18} warps {options.num_warps:2} "
        f"stages {options.num_stages} shared {shared:6} registers {registers:>3} spills {spills:>3} "
        f"{seconds:5.1f} s"
    )
    return row, [f"{name}: {launch.kernel.__name__} ({launch.what}): {w}" for w in wrong]


def resources(cubin: bytes) -> tuple[str, str]:
    """(registers, bytes of local memory) of a kernel: without spills it has no local memory."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        out = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+).* LOCAL:(\d+)", out)
    assert found, out
    return found[1], str(int(found[2]) + int(found[3]))


def jobs(name: str) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    dtype = TARGETS[name][2]
    found = [(name, dtype, (dim,)) for dim in HEAD_DIMS]
    if name == "sm_90":
        found += [(name, dtype, (dim,)) for dim in PADDED_HEAD_DIMS]
        found += [(name, d, (dim,)) for d in (torch.float16, torch.float32) for dim in HEAD_DIMS]
    return found


def run_job(job: tuple[str, torch.dtype, tuple[int, ...]]) -> list[tuple[str, list[str]]]:
    name, dtype, dims = job
    card = Card(shared_kib=TARGETS[name][1])
    found = launches(card, dtype, dims)
    if dims != (64,):  # what does not depend on the head size is compiled once
        found = [launch for launch in found if "D=" in launch.what]
    return [compile_one(name, launch) for launch in found]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--table", action="store_true", help="print a row for every kernel")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    args = parser.parse_args()
    start = time.perf_counter()
    todo = [job for name in args.targets for job in jobs(name)]
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache  # compiled here and now, not found
        os.environ.pop("TRITON_INTERPRET", None)
        with multiprocessing.get_context("spawn").Pool(2) as pool:
            results = [r for rs in pool.imap_unordered(run_job, todo) for r in rs]
    if args.table:
        print("\n".join(sorted(row for row, _ in results)))
    wrong = [w for _, ws in results for w in ws]
    print(
        f"Triton {triton.__version__}: {len(results)} kernels for {', '.join(args.targets)} "
        f"in {time.perf_counter() - start:.0f} s, {len(wrong)} wrong"
    )
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
