"""Kernels that compute a part of their items, and all items with several threads.

The last two arguments of such a kernel are (start, stop), the range of items that it computes.
Numba compiles a function again within each one that names it, and three times for a parallel loop.
A parallel loop therefore calls such a kernel at its address: to compile all kernels for float32 and
bfloat16 takes 36 s of one core instead of 81 s (EPYC with AVX512-BF16).
"""

import hashlib
from typing import Any, TypeAlias

import numpy as np
from numba import get_num_threads, prange, typeof, types
from numba._dispatcher import compute_fingerprint
from numba.core import cgutils
from numba.extending import intrinsic

from nanovllm.backends.cpu.jit import Kernel, compiled
from nanovllm.backends.cpu.llvm.calls import INT, element, pointer_to

# The calling thread computes up to this many elements alone, because waking others takes 10 us.
SERIAL_ELEMENTS = 1 << 17

Types: TypeAlias = tuple[Any, ...]
# What is at the addresses: [2] uint64, the address of the code and the number of its types.
CODE: dict[tuple[Kernel, Types], np.ndarray] = {}
ADDRESSES: dict[tuple[Kernel, bytes], int] = {}  # what `run` found


def number_of(argument_types: Types) -> int:
    """Return a number for the types of a kernel's arguments without (start, stop).

    It is the same in every process.
    """
    return int.from_bytes(hashlib.sha256(str(argument_types).encode()).digest()[:8], "little")


def address_of(kernel: Kernel, argument_types: Types) -> int:
    """Return the address by which a kernel is called. Compile it for these types if necessary."""
    key = kernel, argument_types
    if key not in CODE:
        kernel.compile(argument_types)
        code = kernel.overloads[argument_types]
        pointer = code.library.get_pointer_to_function(code.fndesc.llvm_func_name)
        found = np.array([pointer, number_of(argument_types[:-2])], np.uint64)
        CODE.setdefault(key, found)  # two threads can be here: the address must stay valid
    return int(CODE[key].ctypes.data)


@intrinsic
def code_at(typing: Any, address: Any, arguments: Any) -> Any:
    """Return the code at an address of `address_of`, for `call_at`.

    `arguments` are without (start, stop). Raises TypeError if the code takes arguments of other
    types. `call_at` cannot raise it, because a parallel loop drops errors.
    """
    number = number_of(tuple(arguments.types))

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        known = builder.load(element(builder, args[0], INT(1), 8, INT))
        with builder.if_then(builder.icmp_unsigned("!=", known, INT(number)), likely=False):
            message = f"a kernel is compiled for arguments of other types than {arguments}"
            context.call_conv.return_user_exc(builder, TypeError, (message,))
        return builder.load(pointer_to(builder, args[0], INT))

    return types.int64(address, arguments), generate


@intrinsic
def call_at(typing: Any, code: Any, arguments: Any) -> Any:
    """Call the code that `code_at` returned. The last two `arguments` are (start, stop)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        convention, values = context.call_conv, cgutils.unpack_tuple(builder, args[1])
        kind = convention.get_function_type(types.none, arguments.types)
        function = pointer_to(builder, args[0], kind)
        convention.call_function(builder, function, types.none, arguments.types, values)
        return context.get_dummy_value()

    return types.void(code, arguments), generate


@compiled(parallel=True)
def in_parts(kernel, arguments, items, parts):
    """Call the kernel at an address for `parts` equal parts of its items, in parallel.

    `arguments` are all but (start, stop). In a parallel loop Numba supports a tuple only if none of
    its elements is a tuple.
    """
    code = code_at(kernel, arguments)
    for p in prange(parts):
        call_at(code, (*arguments, p * items // parts, (p + 1) * items // parts))


def run(kernel: Kernel, arguments: tuple[Any, ...], items: int, elements: int) -> None:
    """Compute all items of a kernel, with several threads if it computes many elements.

    The address is kept for all arguments of the same types. Numba tells these by a fingerprint in
    less than 1 us; to derive the types takes 100 us.
    """
    parts = min(items, get_num_threads())
    if elements <= SERIAL_ELEMENTS or parts == 1:
        kernel(*arguments, 0, items)
        return
    key = kernel, compute_fingerprint(arguments)
    if key not in ADDRESSES:
        ADDRESSES[key] = address_of(kernel, tuple(map(typeof, (*arguments, 0, items))))
    in_parts(ADDRESSES[key], arguments, items, parts)
