"""All layers of a decode step in one call, in bfloat16, with AMX or AVX512-BF16.

The rules and shapes are those of cpu/kernels.py.
"""

from typing import NamedTuple

import numpy as np

from nanovllm.backends.cpu.jit import compiled
from nanovllm.backends.cpu.packs import attend
from nanovllm.backends.cpu.parallel import in_parts
from nanovllm.backends.cpu.primitives import BFLOAT16

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


class Code(NamedTuple):
    """The addresses of the kernels of a layer; see cpu/parallel.py."""

    norm: int  # kernels.add_rms_norm_rows
    store: int  # kernels.norm_rope_store_rows
    packs: int  # attend_packs of cpu/packs.py, cpu/amx.py or cpu/avx512.py
    linear: int  # linear_blocks of cpu/amx.py or cpu/avx512.py
    width: int  # the outputs of a block of the latter
    activation: int  # kernels.silu_and_mul_rows


@compiled()
def linear(code, x_ptr, weight_ptr, bias_ptr, out_ptr, rows, inputs, outputs, parts):
    arguments = (x_ptr, weight_ptr, bias_ptr, out_ptr, rows, inputs, outputs)
    in_parts(code.linear, arguments, outputs // code.width, parts)


@compiled()
def decode_layers(code, addresses, x_ptr, residual_ptr, rows, size, cos_ptr, sin_ptr,
                  intermediate_size, num_heads, eps, shape, slot_mapping, work, parts):
    """Compute all layers of a decode step in bfloat16, as models.qwen3.DecoderLayer does.

    addresses [layers, 12]; cos, sin [rows, D]. x and residual [rows, size] change in place: their
    sum is the embedding at first and the input of the final norm at the end.
    """
    num_blocks, num_kv_heads, block_size, dim = shape
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
        norm = (x_ptr, residual_ptr, at[INPUT_NORM], rows, size, eps, example)
        in_parts(code.norm, norm, rows, parts)
        linear(code, x_ptr, at[QKV], at[QKV_BIAS], qkv_ptr, rows, size, qkv_size, parts)
        store = (qkv_ptr, at[Q_NORM], at[K_NORM], cos_ptr, sin_ptr, at[K_CACHE], at[V_CACHE],
                 slot_mapping, num_blocks, num_kv_heads, block_size, dim, num_heads, eps, example,
                 example, 1.0, 1.0)
        in_parts(code.store, store, rows, parts)
        attend(qkv_ptr, rows, attn_ptr, num_heads, at[K_CACHE], at[V_CACHE], shape, work, example,
               example, code.packs, parts)
        linear(code, attn_ptr, at[OUTPUT], at[OUTPUT_BIAS], x_ptr, rows, attn_size, size, parts)
        norm = (x_ptr, residual_ptr, at[POST_ATTENTION_NORM], rows, size, eps, example)
        in_parts(code.norm, norm, rows, parts)
        linear(code, x_ptr, at[GATE_UP], no_bias, gate_up_ptr, rows, size, 2 * intermediate_size,
               parts)
        activation = (gate_up_ptr, activated_ptr, rows, intermediate_size, example)
        in_parts(code.activation, activation, rows, parts)
        linear(code, activated_ptr, at[DOWN], no_bias, x_ptr, rows, intermediate_size, size, parts)
