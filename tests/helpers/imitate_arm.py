"""Importing this makes a process resemble one of a Mac with Arm cores, as far as kernels can tell.

It runs this processor's code. SDOT becomes other instructions with the same sums. Compiled kernels
must not be kept where other processes find them.
"""

import platform
import sys
from types import SimpleNamespace

import torch
from llvmlite import ir

platform.machine = lambda: "arm64"
# torch has no oneDNN there, and Numba neither OpenMP nor TBB.
torch.ops.mkldnn = SimpleNamespace()  # type: ignore[assignment]
torch.backends.mkldnn.is_available = lambda: False
for name in ("omppool", "tbbpool"):
    sys.modules[f"numba.np.ufunc.{name}"] = None  # type: ignore[assignment]

from nanovllm.utils import host  # noqa: E402

host.has_cpu_flag = lambda *names: False

from nanovllm.backends.cpu import jit  # noqa: E402

jit.get_host_cpu_features = dict
jit.get_host_cpu_name = lambda: "apple-m1"

from nanovllm.backends.cpu.kernels.llvm import emit  # noqa: E402

LLVM_CALL = emit.call


def call(builder, name, result, *arguments, **options):
    assert "x86" not in name
    if name != "aarch64.neon.sdot.v4i32.v16i8":
        return LLVM_CALL(builder, name, result, *arguments, **options)
    total, *vectors = arguments
    wide = ir.VectorType(emit.INT32, 16)
    products = builder.mul(*(builder.sext(vector, wide) for vector in vectors))
    for first in range(4):
        order = ir.Constant(ir.VectorType(emit.INT32, 4), [*range(first, 16, 4)])
        total = builder.add(total, builder.shuffle_vector(products, products, order))
    return total


emit.call = call
