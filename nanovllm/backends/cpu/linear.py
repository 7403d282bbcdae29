"""Linear layers on packed weights: oneDNN's blocked layout, made once instead of at every call.

For the same number of tokens the results equal the results of the plain layout, bit for bit. With
padding, sums may be formed in another order. On 2 cores with the shape of Qwen3-0.6B, products of 1
to 64 tokens with AMX read 1.2 to 1.5 times as many bytes per second as with plain weights, and with
AVX512-BF16 they take 0.75 to 0.85 of the time for 1 to 16 tokens. More tokens take the same time.
In float32, with AVX2, large weights take 0.5 to 1.0 of the time for 4 to 256 tokens and 0.9 to 1.15
for one. Small ones gain little or lose: they are packed only in the sizes that the kernel of
kernels/blocks.py reads.

torch.ops.mkldnn is private to torch, and its compiler is the only public way to packed weights. It
would compile the model. Where an operator is missing, and on other processors than x86, where none
of this was measured, weights stay plain.
"""

import ctypes
import platform

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from nanovllm.models.layers import Linear

# Up to this many tokens, oneDNN needs no new code for another number, so there is no padding.
EXACT_TOKENS = 16
# The number of tokens that the layout is optimized for: with 1, more than 16 would be slower.
PACKED_FOR = 64
LARGE = 1 << 18  # elements of a float32 weight


def linear(x: Tensor, module: Linear) -> Tensor:
    """Return x [T, I] times the weight [O, I], plain or packed: [T, O]."""
    return product(x, module.weight, module.bias)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not weight.is_mkldnn:
        return F.linear(x, weight, bias)
    tokens = len(x)
    linear_pointwise = torch.ops.mkldnn._linear_pointwise.default
    return linear_pointwise(padded(x), weight, bias, "none", [], None)[:tokens]


def padded(x: Tensor) -> Tensor:
    """Return x [T, I] with rows of any content after it, up to `padded_tokens`.

    The result of another product has these rows in its memory, like `new_padded`. Copying x for
    each product would take 8 % of the time of a prompt of 2,500 tokens.
    """
    (tokens, inputs), rows = x.shape, padded_tokens(len(x))
    if rows == tokens:
        return x
    end = (x.storage_offset() + rows * inputs) * x.itemsize
    if x.is_contiguous() and x.untyped_storage().nbytes() >= end:
        return x.as_strided((rows, inputs), (inputs, 1))
    return F.pad(x, (0, 0, 0, rows - tokens))


def new_padded(x: Tensor, tokens: int, *sizes: int) -> Tensor:
    """Return an uninitialized tensor [tokens, *sizes] like x, of which `padded` makes no copy."""
    return x.new_empty((padded_tokens(tokens), *sizes))[:tokens]


def padded_tokens(tokens: int) -> int:
    """Return for how many tokens a product is computed: at most 1/16 or 15 more than there are.

    There are about a hundred results. oneDNN compiles code for each and keeps it: 20 ms and a
    megabyte for each shape of a weight, while a product of 1,000 tokens takes 3 ms.
    """
    step = max(EXACT_TOKENS, 1 << tokens.bit_length() >> 5)
    return -(-tokens // step) * step if tokens > EXACT_TOKENS else tokens


def pack(module: Linear) -> None:
    """Pack the weight of a Linear. The table of a tied head stays as it is for the embedding."""
    module.weight = packed(module.weight)


def packed(weight: Tensor) -> Tensor:
    """Return a packed copy of a weight [O, I], or `weight` itself where packing does not help.

    torch's compiler uses the same operators when it freezes a model.
    """
    ops = torch.ops.mkldnn
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    names = "_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported"
    if not (is_x86 and all(hasattr(ops, name) for name in names)):
        return weight
    if weight.dtype is torch.bfloat16:
        fits = ops._is_mkldnn_bf16_supported()  # needs AVX-512
    else:
        outputs, inputs = weight.shape
        whole = outputs % 64 == 0 and inputs % 32 == 0
        fits = weight.dtype is torch.float32 and (whole or weight.numel() >= LARGE)
    return ops._reorder_linear_weight(weight, PACKED_FOR) if fits else weight


def repacked(weight: Tensor) -> Tensor:
    """Return a weight in the layout that oneDNN chooses for one thread.

    For several threads it makes the blocks of outputs narrower if each thread then has about as
    many outputs as the others: for 576 outputs and 6 threads, for 896 and 8. The kernels
    cannot read such blocks.
    """
    if not weight.is_mkldnn:
        return weight
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return packed(weight.to_dense(weight.dtype))
    finally:
        torch.set_num_threads(threads)


def is_packed_by(width: int, weight: Tensor) -> bool:
    """Return whether a packed weight [O, I] has the layout [blocks, I / n, width, n].

    The last block may be padded. n is 2 in bfloat16 and 1 in float32. The kernels read this layout.
    It is not documented. Products with unit vectors are columns of the weight, which confirm it.
    """
    ops, (outputs, inputs) = torch.ops.mkldnn, weight.shape
    num_blocks = -(-outputs // width)
    if not weight.is_mkldnn or not hasattr(ops, "data_ptr") or inputs % 32:
        return False
    if ops._nbytes(weight) != weight.itemsize * num_blocks * width * inputs:
        return False
    n, number = (2, ctypes.c_int16) if weight.dtype is torch.bfloat16 else (1, ctypes.c_float)
    pointer = ctypes.cast(address(weight), ctypes.POINTER(number))
    shape = (num_blocks, inputs // n, width, n)
    blocks = torch.from_numpy(np.ctypeslib.as_array(pointer, shape))
    columns = torch.from_numpy(np.linspace(0, inputs - 1, PACKED_FOR).astype(np.int64))
    units = F.one_hot(columns, inputs).to(weight.dtype)
    expected = blocks[:, columns // n, :, columns % n].flatten(1)[:, :outputs].view(weight.dtype)
    # AMX treats denormal numbers as 0.
    return bool(((product(units, weight) - expected).abs() < 1e-37).all())


def address(weight: Tensor) -> int:
    """Return the address of a packed weight's data."""
    return int(torch.ops.mkldnn.data_ptr(weight))
