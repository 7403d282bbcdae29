"""Runs a kernel on several threads, each of which computes a part of its items.

The last two arguments of such a kernel are (start, stop), the range of items that it computes.
Numba compiles a function again in each function that calls it, and three times in a parallel loop.
One parallel loop therefore calls all these kernels at their addresses: to compile all kernels for
float32 and bfloat16 takes 36 s of one core instead of 81 s (EPYC with AVX512-BF16).
"""

import inspect
from collections.abc import Iterable
from typing import Any, TypeAlias

import numba
import numpy as np
import torch
from numba import get_num_threads, prange, typeof, types
from numba._dispatcher import compute_fingerprint
from numba.core import cgutils
from numba.extending import intrinsic

from nanovllm.backends.cpu.jit import Kernel, compiled
from nanovllm.backends.cpu.kernels.llvm.emit import pointer_to
from nanovllm.backends.cpu.kernels.primitives import DTYPE_EXAMPLE

# The calling thread computes up to this many elements alone, because waking others takes 10 us.
SERIAL_ELEMENTS = 1 << 17

Types: TypeAlias = tuple[Any, ...]
# The addresses of the code of kernels for arguments with a fingerprint.
ADDRESSES: dict[tuple[Kernel, bytes], int] = {}


def examples(
    names: Iterable[str],
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    norm_dtype: torch.dtype | None = None,
) -> tuple[Any, ...]:
    """Return values that have the types of a kernel's arguments, or of a NamedTuple's fields.

    A name has the same type everywhere. A name that is not listed here is an address or a size. The
    dtypes are of the model, of the KV cache, and of the weights of norms (None: of the model).
    """
    example, cached = DTYPE_EXAMPLE[dtype], DTYPE_EXAMPLE[cache_dtype]
    arguments: dict[str, Any] = {
        **dict.fromkeys(("eps", "k_scale", "v_scale", "factor"), 0.0),
        **dict.fromkeys(("is_bf16", "is_prefix"), True),
        **{"example": example, "cache_example": cached},
        "weight_example": DTYPE_EXAMPLE[norm_dtype or dtype],
    }
    for element_type, dims, names_of_arrays in (
        (np.int64, 1, "slot_mapping seeds positions tokens last_tokens hits ends first_tokens"),
        (np.int64, 2, "queries context_lens places segments"),
        (np.int32, 2, "block_tables"),
        (np.float32, 1, "temperatures"),
        (np.float32, 2, "filters params"),
        (np.float64, 2, "packed"),
        (type(example), 3, "qkv out"),
        (np.float32, 3, "partial"),
        (type(cached), 4, "k_cache v_cache"),
    ):
        array = np.empty((0,) * dims, element_type)
        arguments |= dict.fromkeys(names_of_arrays.split(), array)
    return tuple(arguments.get(name, 0) for name in names)


def example_arguments(kernel: Kernel, *dtypes: torch.dtype) -> tuple[Any, ...]:
    """Return `examples` of a kernel's arguments without (start, stop)."""
    *names, _start, _stop = inspect.signature(kernel.py_func).parameters
    return examples(names, *dtypes)


def address_of(kernel: Kernel, arguments: tuple[Any, ...]) -> int:
    """Return the address of the code of a kernel for arguments of these types.

    `arguments` are without (start, stop). The kernel is compiled if necessary. The fingerprint, by
    which Numba itself tells types, is private to it: it takes less than 1 us, and `typeof` 100 us.
    """
    key = kernel, compute_fingerprint(arguments)
    if key not in ADDRESSES:
        argument_types = tuple(map(typeof, (*arguments, 0, 0)))
        kernel.compile(argument_types)
        result = kernel.overloads[argument_types]
        ADDRESSES[key] = result.library.get_pointer_to_function(result.fndesc.llvm_func_name)
    return ADDRESSES[key]


def address_for(kernel: Kernel, *dtypes: torch.dtype) -> int:
    """Return the address of the code of a kernel for the dtypes of `examples`."""
    return address_of(kernel, example_arguments(kernel, *dtypes))


@intrinsic
def call_at(typing: Any, address: Any, arguments: Any) -> Any:
    """Call the kernel at an address of `address_of`, which is compiled for these types.

    The last two `arguments` are (start, stop).
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        convention, values = context.call_conv, cgutils.unpack_tuple(builder, args[1])
        kind = convention.get_function_type(types.none, arguments.types)
        function = pointer_to(builder, args[0], kind)
        convention.call_function(builder, function, types.none, arguments.types, values)
        return context.get_dummy_value()

    return types.void(address, arguments), generate


@compiled(parallel=True)
def in_parts(kernel, arguments, items, parts):
    """Call the kernel at an address for `parts` equal parts of its items, in parallel.

    `arguments` are all but (start, stop). In a parallel loop Numba supports a tuple only if none of
    its elements is a tuple.
    """
    if items == 1 or parts == 1:
        call_at(kernel, (*arguments, np.int64(0), np.int64(items)))
    else:
        for p in prange(parts):
            call_at(kernel, (*arguments, p * items // parts, (p + 1) * items // parts))


@compiled()
def parts_for(elements, parts):
    """Return 1 instead of `parts` for a kernel with few elements, which other threads would delay.

    In a step in one call they are awake, and a parallel loop takes about 2 us.
    """
    return parts if elements > 1 << 13 else 1


def follow_torch() -> None:
    """Give Numba as many threads as torch has."""
    limit = numba.config.NUMBA_NUM_THREADS
    numba.set_num_threads(min(torch.get_num_threads(), limit))


def run(kernel: Kernel, arguments: tuple[Any, ...], items: int, elements: int) -> None:
    """Compute all items of a kernel, with several threads if it computes many elements."""
    parts = min(items, get_num_threads())
    if elements <= SERIAL_ELEMENTS or parts == 1:
        kernel(*arguments, 0, items)
    else:
        in_parts(address_of(kernel, arguments), arguments, items, parts)
