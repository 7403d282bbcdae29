"""Computes the layers of a hybrid model's decode step in one call, as fused_decode.py does.

A layer of attention, which here has an output gate, differs from a layer of linear attention in its
first half.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import typeof
from torch import Tensor

from nanovllm.backends.cpu.attention import NumbaAttention
from nanovllm.backends.cpu.jit import compiled
from nanovllm.backends.cpu.kernels import delta_rule
from nanovllm.backends.cpu.kernels.fused_decode import (
    INPUT_NORM,
    OUTPUT,
    OUTPUT_BIAS,
    QKV,
    FusedLayers,
    Step,
    attention,
    example_step,
    feed_forward,
    linear,
    norm,
    pointer,
    second_half,
)
from nanovllm.backends.cpu.kernels.parallel import address_for, in_parts
from nanovllm.backends.cpu.kernels.primitives import array, exp, f32, from_float32, to_float32
from nanovllm.backends.cpu.linear import address
from nanovllm.models.batch import ForwardBatch

# The columns of the addresses that follow the 12 of decode_layers. LAYER counts only the layers of
# linear attention. CONV1D is 0 for a layer of attention.
GATE, GATE_BIAS, LAYER, CONV1D, A_LOG, DT_BIAS, NORM = range(12, 19)


class States(NamedTuple):
    """The states of all layers, and the arguments that the layers of a hybrid model share."""

    conv: int  # the address of [layers, num_states, 3, C]
    rule: int  # the address of [layers, num_states, Hv, Dk, Dv] in float32
    rows: int  # the address of [rows] int64
    conv_bytes: int  # of a layer
    rule_bytes: int
    num_states: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    decode_heads: int  # the address of delta_rule.decode_heads
    gate: int  # the address of `gate_rows`


@compiled()
def gate_rows(x_ptr, gate_ptr, rows, size, example, start, stop):
    """Compute x *= sigmoid(gate), both [rows, size]."""
    x, gate = array(x_ptr, (rows, size), example), array(gate_ptr, (rows, size), example)
    for i in range(start, stop):
        for c in range(size):
            sigmoid = from_float32(f32(1) / (f32(1) + exp(-to_float32(gate[i, c]))), example)
            x[i, c] = from_float32(to_float32(x[i, c]) * to_float32(sigmoid), example)


@compiled()
def decode_hybrid_layers(code, step, addresses, states):
    """Compute all layers of a decode step, as `HybridLayer.forward` does, in one dtype.

    addresses [layers, 19]. x, residual and the states change in place, as in decode_layers.
    """
    rows, size, example, parts = step.rows, step.size, step.example, step.parts
    key_heads, value_heads = states.key_heads, states.value_heads
    key_dim, value_dim = states.key_dim, states.value_dim
    rule_size, attn_size = value_heads * value_dim, step.num_heads * step.shape[3]
    # The packed projections of linear attention are padded to whole blocks.
    width = 2 * (key_heads * key_dim + rule_size + value_heads)
    width = (width + code.width - 1) // code.width * code.width
    wide = max(width, attn_size + 2 * step.shape[1] * step.shape[3])
    projected, gate = np.full((rows, wide), example), np.full((rows, attn_size), example)
    mixed = np.full((rows, max(attn_size, rule_size)), example)
    gate_up = np.full((rows, 2 * step.intermediate_size), example)
    activated = np.full((rows, step.intermediate_size), example)
    for i in range(len(addresses)):
        at = addresses[i]
        projected_ptr, gate_ptr = np.int64(projected.ctypes.data), np.int64(gate.ctypes.data)
        gate_up_ptr, activated_ptr = np.int64(gate_up.ctypes.data), np.int64(activated.ctypes.data)
        mixed_ptr = np.int64(mixed.ctypes.data)
        norm(code, step, at[INPUT_NORM])
        if at[CONV1D] != 0:
            mixed_size = rule_size
            linear(code, step.x, at[QKV], np.int64(0), projected_ptr, rows, size, width, parts)
            arguments = (projected_ptr, at[CONV1D], at[A_LOG], at[DT_BIAS], at[NORM],
                         states.conv + at[LAYER] * states.conv_bytes,
                         states.rule + at[LAYER] * states.rule_bytes, states.rows, mixed_ptr, rows,
                         width, states.num_states, key_heads, value_heads, key_dim,
                         value_dim, step.eps, example)
            in_parts(states.decode_heads, arguments, rows * key_heads, parts)
        else:
            mixed_size = attn_size
            linear(code, step.x, at[GATE], at[GATE_BIAS], gate_ptr, rows, size, attn_size, parts)
            attention(code, step, at, projected_ptr, mixed_ptr)
            in_parts(states.gate, (mixed_ptr, gate_ptr, rows, attn_size, example), rows, parts)
        linear(code, mixed_ptr, at[OUTPUT], at[OUTPUT_BIAS], step.x, rows, mixed_size, size, parts)
        feed_forward(code, step, at, gate_up_ptr, activated_ptr)


class HybridLayers(FusedLayers):
    """Computes the layers of Qwen3.5 from the addresses of its weights and states."""

    @staticmethod
    def is_whole(layer: Any, width: int) -> bool:
        """Return the same. Queries and gate are two products. Linear attention may be padded."""
        attn, (projection, *others) = layer.self_attn, layer.linears()
        sizes = [len(module.weight) for module in others]
        if not is_linear(attn):
            sizes += [len(projection.weight), attn.q_size]
        return all(size % width == 0 for size in sizes)

    def all_addresses(self, attention: NumbaAttention) -> np.ndarray:
        return np.array([addresses(layer, attention) for layer in self.model.layers], np.int64)

    def compile(self) -> None:
        dtype = self.model.backend.dtype
        kernels = delta_rule.decode_heads, gate_rows
        self.kernels = [address_for(kernel, dtype, dtype) for kernel in kernels]
        step = example_step(self.example, self.weight_example)
        arguments = self.code, step, self.addresses, States._make([0] * 12)
        decode_hybrid_layers.compile(tuple(map(typeof, arguments)))

    def forward(self, batch: ForwardBatch, attention: NumbaAttention) -> Tensor:
        """Compute Qwen3_5.forward. Steps with chunks are left to it."""
        if batch.states is None or batch.states.rounds:
            return self.model.forward(batch, attention)
        return super().forward(batch, attention)

    def decode(self, step: Step, batch: ForwardBatch) -> None:
        config: Any = self.config
        assert batch.states is not None
        assert batch.states.rows is not None
        conv, rule = batch.states.states.conv, batch.states.states.rule
        states = (
            *(tensor.data_ptr() for tensor in (conv, rule, batch.states.rows)),
            *(conv[0].nbytes, rule[0].nbytes, conv.shape[1]),
            *(config.linear_num_key_heads, config.linear_num_value_heads),
            *(config.linear_key_head_dim, config.linear_value_head_dim),
            *self.kernels,
        )
        decode_hybrid_layers(self.code, step, self.addresses, States._make(states))


def is_linear(attn: Any) -> bool:
    """Return whether a layer's attention is features.models.hybrid.qwen3_5.LinearAttention."""
    return hasattr(attn, "conv1d")


def addresses(layer: Any, attention: NumbaAttention) -> list[int]:
    """Return the addresses of a layer for `decode_hybrid_layers`."""
    attn, first = layer.self_attn, pointer(layer.input_layernorm)
    if is_linear(attn):
        heads = attn.conv1d, attn.a_log, attn.dt_bias, attn.norm
        qkv, output = address(attn.in_proj.weight), address(attn.out_proj.weight)
        shared = [first, qkv, 0, 0, 0, output, 0, *second_half(layer), 0, 0]
        return [*shared, 0, 0, attn.layer, *(t.data_ptr() for t in heads)]
    proj, output = attn.qkv_gate_proj, attn.o_proj
    outputs, inputs = proj.weight.shape
    qkv, bias, before = address(proj.weight), pointer(proj.bias), outputs - attn.q_size
    # The gate is the last of the packed projections. Their blocks are in order.
    itemsize = proj.weight.itemsize
    gate = qkv + before * inputs * itemsize, bias and bias + before * itemsize
    return [
        *(first, qkv, bias, *(pointer(weight) for weight in attn.norms)),
        *(address(output.weight), pointer(output.bias), *second_half(layer)),
        *(*attention.kv_addresses[attn.layer], *gate, 0, 0, 0, 0, 0),
    ]
