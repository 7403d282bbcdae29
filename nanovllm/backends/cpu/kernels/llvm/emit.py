"""Emits calls of LLVM's functions, pointers and conversions that Numba cannot express in Python.

A function with the argument `builder` emits code while a kernel is compiled. Kernels call the
intrinsics at the end of this file.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

FLOAT, HALF, VOID = ir.FloatType(), ir.HalfType(), ir.VoidType()
BYTE, INT16, INT32, INT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)


def call(builder, name, result, *arguments, fastmath=()):
    """Call a function of LLVM."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}")
    return builder.call(function, arguments, fastmath=fastmath)


def without_result(emit):
    """Return the generator of an intrinsic without a result from emit(builder, *arguments)."""

    def generate(context, builder, signature, args):
        emit(builder, *args)
        return context.get_dummy_value()

    return generate


def instruction(name, kinds, *operands):
    """Return the signature and the code that @intrinsic expects of an LLVM call without result.

    `kinds` has the kind of each operand: a tile (whose number must be a literal), an address, an
    array or a number.
    """

    def generate(context, builder, signature, args):
        def convert(kind, operand, arg):
            if kind == "tile":
                return BYTE(operand.literal_value)
            if kind == "array":
                data = context.make_array(operand)(context, builder, arg).data
                return builder.bitcast(data, BYTE.as_pointer())
            number = context.cast(builder, arg, operand, types.int64)
            return pointer_to(builder, number) if kind == "address" else number

        call(builder, name, VOID, *map(convert, kinds.split(), operands, args))
        return context.get_dummy_value()

    return types.void(*operands), generate


def pointer_to(builder, address, kind=BYTE):
    """Return the pointer to a value of type `kind` at an address, which is a number."""
    return builder.inttoptr(address, kind.as_pointer())


def element(builder, address, index, size, kind):
    """Return the pointer to an element of an array at an address. Elements have `size` bytes."""
    offset = builder.mul(index, INT(size))
    return pointer_to(builder, builder.add(address, offset), kind)


def prefetch_line(builder, pointer):
    """Load the cache line of a pointer without waiting: to read, into all levels, as data."""
    call(builder, "prefetch.p0", VOID, pointer, INT32(0), INT32(3), INT32(1))


def stored_to_float32(builder, x):
    """Convert a stored number, or a vector of them: a byte is fp8, and 16 bits are bfloat16.

    For fp8 the processor converts float16, which has the same order of fields, one more bit of
    exponent (0 here) and seven more of mantissa. The exponent of float16 means 2^8 less.
    """
    lanes = x.type.count if isinstance(x.type, ir.VectorType) else 0
    stored = x.type.element if lanes else x.type

    def like(kind):
        return ir.VectorType(kind, lanes) if lanes else kind

    def constant(kind, value):
        return ir.Constant(like(kind), [value] * lanes if lanes else value)

    if stored == FLOAT:
        return x
    if stored == INT16:
        shifted = builder.shl(builder.zext(x, like(INT32)), constant(INT32, 16))
        return builder.bitcast(shifted, like(FLOAT))
    x = builder.shl(builder.sext(x, like(INT16)), constant(INT16, 7))
    x = builder.and_(x, constant(INT16, ~0x4000))
    exponent = constant(INT16, 0x3F80)
    is_nan = builder.icmp_signed("==", builder.and_(x, exponent), exponent)
    x = builder.select(is_nan, builder.or_(x, constant(INT16, 0x7E00)), x)
    half = builder.fpext(builder.bitcast(x, like(HALF)), like(FLOAT))
    return builder.fmul(half, constant(FLOAT, 256.0))


@intrinsic
def prefetch(typing, address):
    """Load the cache line of an address without waiting."""

    def emit(builder, address):
        prefetch_line(builder, pointer_to(builder, address))

    return types.void(address), without_result(emit)


@intrinsic
def pointer(typing, address, example):
    """Cast an address to a pointer to numbers of the type of `example`."""

    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(example)(address, example), generate


@intrinsic
def to_float32(typing, x):
    """Convert a number as it is stored: uint8 is fp8, and uint16 is bfloat16."""

    def generate(context, builder, signature, args):
        return stored_to_float32(builder, args[0])

    return types.float32(x), generate
