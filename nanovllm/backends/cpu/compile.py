"""Compiles the CPU's kernels for one dtype. Later processes load the code in less than a second."""

from typing import Any

import numpy as np
import torch
from filelock import FileLock
from llvmlite.binding import get_host_cpu_features
from numba import typeof

from nanovllm.backends.cpu import jit
from nanovllm.backends.cpu.jit import Kernel
from nanovllm.backends.cpu.kernel_files import marker
from nanovllm.backends.cpu.kernels import (
    decode_step,
    fused_layers,
    int4,
    int8,
    layer_tables,
    parallel,
    pointwise,
    product,
    sampler,
)
from nanovllm.backends.cpu.kernels.attention import (
    AttentionWork,
    QueryGroups,
    attend,
    attend_groups,
)
from nanovllm.backends.cpu.kernels.parallel import Types
from nanovllm.backends.cpu.kernels.primitives import DTYPE_EXAMPLE
from nanovllm.backends.cpu.kernels.simd import kernel_for
from nanovllm.utils.log import logger


def kernels_in_parts(dtype: torch.dtype) -> list[Kernel]:
    """Return the kernels that backends/cpu/kernels/parallel.py calls."""
    return [
        attend_groups,
        kernel_for(dtype)[0],
        pointwise.add_rms_norm_rows,
        pointwise.silu_and_mul_rows,
        pointwise.gelu_and_mul_rows,
        pointwise.norm_rope_store_rows,
        sampler.draw_rows,
        sampler._logprobs_of_rows,
        product.quantize_rows,
        int8.product_blocks,
        int4.int4_blocks,
    ]


def calls(dtype: torch.dtype, cache_dtype: torch.dtype) -> list[tuple[Kernel, Types]]:
    """Return all kernels for the dtypes of the model and the KV cache, with their arguments' types.

    The later ones call the earlier ones.
    """
    example, cached = DTYPE_EXAMPLE[dtype], DTYPE_EXAMPLE[cache_dtype]
    in_parts = [
        (kernel, parallel.example_arguments(kernel, dtype, cache_dtype))
        for kernel in kernels_in_parts(dtype)
    ]

    def make(kind: Any, **others: Any) -> Any:
        """Return an example of a NamedTuple; `others` are tuples among its fields."""
        values = parallel.examples(kind._fields, dtype, cache_dtype)
        return kind(*values)._replace(**others)

    groups = make(QueryGroups)
    work = make(AttentionWork, prefixes=groups, rest=groups)
    step = make(layer_tables.Step, attention=work, shape=(1, 1, 1, 1))
    none = make(product.Product)
    callers = [
        *((parallel.in_parts, (0, arguments, 1, 1)) for _, arguments in in_parts),
        (attend, (*[0] * 7, step.shape, step.attention, 0, 1.0, example, cached, 0, 1)),
        (product.compute, (none, *[0] * 9, example, 1)),
    ]
    if dtype is cache_dtype:
        kernels = make(layer_tables.LayerKernels, product=none)
        layers = kernels, step, np.empty(0, layer_tables.LAYER), layer_tables.NO_STATES
        host = make(decode_step.Host)
        head = make(decode_step.OutputLayer, product=none)
        rows = np.empty(0, np.int64)
        callers.append((fused_layers.compute_layers, layers))
        callers.append((decode_step.sample_tokens, (*layers, host, head, rows, rows, rows)))
    called = [(kernel, (*arguments, 0, 0)) for kernel, arguments in in_parts]
    return [(kernel, tuple(map(typeof, arguments))) for kernel, arguments in called + callers]


def compile_all(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    """Compile all kernels for the dtypes of the model and the KV cache, or load their code.

    No kernel is called.
    """
    with jit.guard():
        for kernel, argument_types in calls(dtype, cache_dtype):
            kernel.compile(argument_types)


def compile_now(dtype: torch.dtype) -> None:
    """Compile all kernels, or wait for the process that does, unless all are compiled."""
    path = marker(dtype)
    with FileLock(path.with_suffix(".lock")):
        if path.exists():
            return
        if get_host_cpu_features().get("f16c") is False:  # on x86, where LLVM would call abort
            raise RuntimeError("this processor has no F16C, which converts float16")
        logger.info("compiling the CPU kernels and keeping them, which takes 15 to 30 s")
        compile_all(dtype, dtype)
        path.touch()
