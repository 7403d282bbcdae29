"""Kernels that compute a part of their items, and all items with several threads.

The last two arguments of such a kernel are (start, stop), the range of items that it computes. Numba
compiles a function again within each one that names it, and three times for a parallel loop. A
parallel loop therefore calls such a kernel at its address: to compile all kernels for float32 and
bfloat16 takes 36 s of one core instead of 81 s (EPYC with AVX512-BF16).
"""

from typing import Any, TypeAlias

from numba import errors, get_num_threads, prange, typeof, types
from numba.core import cgutils
from numba.extending import intrinsic

from nanovllm.backends.cpu.jit import compiled

# The calling thread computes up to this many elements alone, because waking others takes 10 us.
SERIAL_ELEMENTS = 1 << 17

Types: TypeAlias = tuple[Any, ...]
# The argument types of kernels that are called at their addresses.
CALLED_AT: set[Types] = set()
ADDRESSES: dict[tuple[Any, Any], int] = {}  # what `run` found


def address_of(kernel: Any, argument_types: Types) -> int:
    """The address of a kernel for `in_parts`. It is compiled for these types if it was not yet."""
    CALLED_AT.add(argument_types)
    kernel.compile(argument_types)
    code = kernel.overloads[argument_types]
    return int(code.library.get_pointer_to_function(code.fndesc.llvm_func_name))


@intrinsic
def call_at(typing: Any, address: Any, arguments: Any) -> Any:
    """Call the kernel at an address with a tuple of arguments.

    The types must be those that it is compiled for; types that `address_of` never got are refused.
    """
    if tuple(arguments.types) not in CALLED_AT:
        raise errors.TypingError(f"no kernel that is called at its address takes {arguments}")

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        convention, values = context.call_conv, cgutils.unpack_tuple(builder, args[1])
        kind = convention.get_function_type(types.none, arguments.types).as_pointer()
        code = builder.inttoptr(args[0], kind)
        convention.call_function(builder, code, types.none, arguments.types, values)
        return context.get_dummy_value()

    return types.void(address, arguments), generate


@compiled(parallel=True)
def in_parts(kernel, arguments, items, parts):
    """Call the kernel at an address for `parts` equal parts of its items, in parallel.

    `arguments` are all but (start, stop). In a parallel loop Numba supports a tuple only if none of
    its elements is a tuple.
    """
    for p in prange(parts):
        call_at(kernel, (*arguments, p * items // parts, (p + 1) * items // parts))


def run(kernel: Any, dtypes: Any, arguments: tuple[Any, ...], items: int, elements: int) -> None:
    """Compute all items of a kernel, with several threads if it computes many elements.

    The types of the arguments follow from `dtypes`: to derive them at every call takes 200 us.
    """
    parts = min(items, get_num_threads())
    if elements <= SERIAL_ELEMENTS or parts == 1:
        kernel(*arguments, 0, items)
        return
    if (kernel, dtypes) not in ADDRESSES:
        argument_types = tuple(map(typeof, (*arguments, 0, items)))
        ADDRESSES[kernel, dtypes] = address_of(kernel, argument_types)
    in_parts(ADDRESSES[kernel, dtypes], arguments, items, parts)
