"""All layers of a decode step in one call, in bfloat16, with AMX or AVX512-BF16.

The rules and shapes are those of cpu/kernels.py, which has all parts but the products.
"""

import numpy as np
from numba import prange, types
from numba.extending import overload

from nanovllm.cpu import amx, avx512
from nanovllm.cpu.jit import compiled
from nanovllm.cpu.kernels import BFLOAT16, _add_rms_norm, _silu_and_mul, attend, norm_rope_store

# The columns of decode_layers' addresses; 0 means that the layer has no such weight.
(
    INPUT_NORM,
    QKV,
    QKV_BIAS,
    Q_NORM,
    K_NORM,
    OUTPUT,
    OUTPUT_BIAS,
    POST_ATTENTION_NORM,
    GATE_UP,
    DOWN,
    K_CACHE,
    V_CACHE,
) = range(12)


def select_linear_blocks(unit, *arguments):
    """Call linear_blocks of cpu/amx.py or cpu/avx512.py; see kernels.select_attend_packs."""
    raise NotImplementedError("compiled code only")


# The type of unit selects the kernel, because LLVM can compile only one of them.
@overload(select_linear_blocks)
def _select_linear_blocks(unit, *arguments):
    if unit == types.boolean:
        return lambda unit, *arguments: amx.linear_blocks(*arguments)
    return lambda unit, *arguments: avx512.linear_blocks(*arguments)


@compiled(parallel=True)
def linear(x_ptr, weight_ptr, bias_ptr, out_ptr, rows, inputs, outputs, unit, parts):
    blocks = outputs // (avx512.WIDTH if unit == avx512.UNIT else amx.WIDTH)
    for p in prange(parts):
        start, stop = p * blocks // parts, (p + 1) * blocks // parts
        select_linear_blocks(
            unit, x_ptr, weight_ptr, bias_ptr, out_ptr, rows, inputs, outputs, start, stop)


@compiled()
def decode_layers(addresses, x_ptr, residual_ptr, rows, size, cos_ptr, sin_ptr, intermediate_size,
                  num_heads, eps, shape, slot_mapping, work, unit, parts):
    """Compute all layers of a decode step in bfloat16, as models.qwen3.DecoderLayer does.

    addresses [layers, 12]; cos, sin [rows, D]. x and residual [rows, size] change in place: their
    sum is the embedding at first and the input of the final norm at the end.
    """
    _, num_kv_heads, _, dim = shape
    qkv_size, attn_size = (num_heads + 2 * num_kv_heads) * dim, num_heads * dim
    qkv, attn = np.empty((rows, qkv_size), np.uint16), np.empty((rows, attn_size), np.uint16)
    gate_up = np.empty((rows, 2 * intermediate_size), np.uint16)
    activated = np.empty((rows, intermediate_size), np.uint16)
    example, no_bias = BFLOAT16, np.int64(0)
    for i in range(len(addresses)):
        at = addresses[i]
        # They are read in the loop (see `instruction`). Without the cast from unsigned, Numba would
        # compile every kernel again for a second type of address.
        qkv_ptr, attn_ptr = np.int64(qkv.ctypes.data), np.int64(attn.ctypes.data)
        gate_up_ptr, activated_ptr = np.int64(gate_up.ctypes.data), np.int64(activated.ctypes.data)
        _add_rms_norm(x_ptr, residual_ptr, at[INPUT_NORM], rows, size, eps, example, parts)
        linear(x_ptr, at[QKV], at[QKV_BIAS], qkv_ptr, rows, size, qkv_size, unit, parts)
        norm_rope_store(qkv_ptr, at[Q_NORM], at[K_NORM], cos_ptr, sin_ptr, at[K_CACHE], at[V_CACHE],
                        slot_mapping, shape, num_heads, eps, example, example, (1.0, 1.0), parts)
        attend(qkv_ptr, rows, attn_ptr, num_heads, at[K_CACHE], at[V_CACHE], shape, work, example,
               example, unit, parts)
        linear(attn_ptr, at[OUTPUT], at[OUTPUT_BIAS], x_ptr, rows, attn_size, size, unit, parts)
        _add_rms_norm(x_ptr, residual_ptr, at[POST_ATTENTION_NORM], rows, size, eps, example, parts)
        linear(x_ptr, at[GATE_UP], no_bias, gate_up_ptr, rows, size, 2 * intermediate_size, unit,
               parts)
        _silu_and_mul(gate_up_ptr, activated_ptr, rows, intermediate_size, example, parts)
        linear(activated_ptr, at[DOWN], no_bias, x_ptr, rows, intermediate_size, size, unit,
               parts)
