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
    DOWN,
    INPUT_NORM,
    OUTPUT,
    PROJECTION,
    FusedLayers,
    Pointers,
    Step,
    attention,
    example_step,
    feed_forward,
    linear,
    norm,
)
from nanovllm.backends.cpu.kernels.parallel import address_for, in_parts
from nanovllm.backends.cpu.kernels.primitives import array, exp, f32, from_float32, to_float32
from nanovllm.models.batch import ForwardBatch

# The columns of the addresses after the columns of decode_layers. LAYER counts only the layers of
# linear attention. CONV1D is 0 for a layer of attention.
LAYER, CONV1D, A_LOG, DT_BIAS, NORM = range(DOWN + 3, DOWN + 8)


class States(NamedTuple):
    """The states of all layers, and the arguments that the layers of a hybrid model share."""

    conv: int  # the address of [layers, num_states, 3, C]
    rule: int  # the address of [layers, num_states, Hv, Dk, Dv] in float32
    segments: np.ndarray  # [rows, 3] int64, of delta_rule.of_rows
    conv_bytes: int  # of a layer
    rule_bytes: int
    num_states: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    itemsize: int  # of the model's dtype
    advance_heads: int  # the address of delta_rule.advance_heads
    gate: int  # the address of `gate_rows`


@compiled()
def gate_rows(x_ptr, gate_ptr, rows, size, stride, example, start, stop):
    """Compute x *= sigmoid(gate), both [rows, size]. Rows of gate are `stride` numbers apart."""
    x, gate = array(x_ptr, (rows, size), example), array(gate_ptr, (rows, stride), example)
    for i in range(start, stop):
        for c in range(size):
            sigmoid = from_float32(f32(1) / (f32(1) + exp(-to_float32(gate[i, c]))), example)
            x[i, c] = from_float32(to_float32(x[i, c]) * to_float32(sigmoid), example)


@compiled()
def decode_hybrid_layers(code, step, addresses, states):
    """Compute all layers of a decode step, as qwen3_5.py does, in one dtype.

    addresses [layers, 23]. x, residual and the states change in place, as in decode_layers.
    """
    rows, size, example, parts = step.rows, step.size, step.example, step.parts
    key_heads, value_heads = states.key_heads, states.value_heads
    key_dim, value_dim = states.key_dim, states.value_dim
    rule_size, attn_size = value_heads * value_dim, step.num_heads * step.shape[3]
    width, stride = (
        2 * (key_heads * key_dim + rule_size + value_heads), step.row_heads * step.shape[3])
    for i in range(len(addresses)):
        at = addresses[i]
        norm(code, step, at[INPUT_NORM])
        if at[CONV1D] != 0:
            mixed_size = rule_size
            linear(code, step, at, PROJECTION, step.x, step.projected, size, width)
            arguments = (step.projected, at[CONV1D], at[A_LOG], at[DT_BIAS], at[NORM],
                         states.conv + at[LAYER] * states.conv_bytes,
                         states.rule + at[LAYER] * states.rule_bytes, states.segments, step.mixed,
                         rows, width, states.num_states, key_heads, value_heads, key_dim,
                         value_dim, step.eps, example)
            in_parts(states.advance_heads, arguments, rows * key_heads, parts)
        else:
            mixed_size = attn_size
            attention(code, step, at)
            gate = step.projected + (stride - attn_size) * states.itemsize
            in_parts(states.gate, (step.mixed, gate, rows, attn_size, stride, example), rows, parts)
        linear(code, step, at, OUTPUT, step.mixed, step.x, mixed_size, size)
        feed_forward(code, step, at)


class HybridLayers(FusedLayers):
    """Computes the layers of Qwen3.5 from the addresses of its weights and states."""

    config: Any

    @property
    def row_heads(self) -> int:
        """The gate follows the queries, keys and values."""
        return 2 * (self.config.num_heads + self.config.num_kv_heads)

    def buffer_sizes(self) -> tuple[int, int]:
        projected, mixed = super().buffer_sizes()
        size, heads = self.config.value_size, self.config.linear_num_value_heads
        linear = self.config.conv_size + size + 2 * heads
        return max(projected, linear), max(mixed, size)

    def layer_addresses(self, layer: Any, attention: NumbaAttention, find: Pointers) -> list[int]:
        attn = layer.self_attn
        if not hasattr(attn, "conv1d"):
            return [*super().layer_addresses(layer, attention, find), *[0] * 5]
        norms = layer.input_layernorm, layer.post_attention_layernorm
        products = (address for module in layer.linears() for address in find(module))
        heads = attn.conv1d, attn.a_log, attn.dt_bias, attn.norm
        before = *(weight.data_ptr() for weight in norms), *[0] * 4, *products
        return [*before, attn.layer, *(weight.data_ptr() for weight in heads)]

    def compile(self) -> None:
        dtype = self.model.backend.dtype
        kernels = delta_rule.advance_heads, gate_rows
        self.kernels = [address_for(kernel, dtype, dtype) for kernel in kernels]
        step = example_step(self.example, self.weight_example)
        states = 0, 0, np.empty((0, 3), np.int64), *[0] * 10
        arguments = self.code, step, self.addresses, States._make(states)
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
            *(conv.data_ptr(), rule.data_ptr(), delta_rule.of_rows(batch.states.rows.numpy())),
            *(conv[0].nbytes, rule[0].nbytes, conv.shape[1]),
            *(config.linear_num_key_heads, config.linear_num_value_heads),
            *(config.linear_key_head_dim, config.linear_value_head_dim),
            *(conv.itemsize, *self.kernels),
        )
        decode_hybrid_layers(self.code, step, self.addresses, States._make(states))
