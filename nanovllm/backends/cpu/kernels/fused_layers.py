"""Computes the layers of a step in one call, which on a GPU is the task of a CUDA graph.

Between two calls from Python only one thread works and the memory is idle. With AMX and 16
sequences at Qwen3-0.6B's shape a step took 88 ms layer by layer and 72 ms in one call. The rules
and shapes are in backends/cpu/kernels/pointwise.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numba
import numpy as np
import torch
from torch import Tensor

from nanovllm.backends.cpu.jit import compiled
from nanovllm.backends.cpu.kernels import pointwise
from nanovllm.backends.cpu.kernels.attention import AttentionWork, QueryGroups, attend
from nanovllm.backends.cpu.kernels.parallel import address_for, follow_torch, in_parts, parts_for
from nanovllm.backends.cpu.kernels.primitives import DTYPE_EXAMPLE
from nanovllm.backends.cpu.kernels.product import Product, compute, pointers
from nanovllm.models.batch import ForwardBatch
from nanovllm.models.qwen3 import Qwen3

if TYPE_CHECKING:
    from nanovllm.backends.cpu.attention import NumbaAttention

# Steps of more tokens are computed layer by layer, between which the number of threads may change.
FEW_TOKENS = 64
# The columns of the addresses of compute_layers; 0 means that the layer has no such weight. A
# product has three columns: weight, scale and bias. The last five are of linear attention: LAYER
# counts only its layers, and CONV1D is 0 in the others.
INPUT_NORM, POST_ATTENTION_NORM, Q_NORM, K_NORM, K_CACHE, V_CACHE = range(6)
PROJECTION, OUTPUT, GATE_UP, DOWN = range(6, 18, 3)
LAYER, CONV1D, A_LOG, DT_BIAS, NORM = range(18, 23)


class LayerKernels(NamedTuple):
    """The addresses of the kernels of a layer; see backends/cpu/kernels/parallel.py."""

    norm: int  # pointwise.add_rms_norm_rows
    store: int  # pointwise.norm_rope_store_rows
    attend_groups: int  # attention.attend_groups
    activation: int  # pointwise.silu_and_mul_rows
    product: Product


class Step(NamedTuple):
    """Arguments that all layers of a step share. The first nine are addresses."""

    x: int  # [rows, size], the input and the output of each part of a layer
    residual: int  # [rows, size]
    cos: int  # [rows, D]
    sin: int
    projected: int  # [rows, row_heads D], the queries, keys and values
    mixed: int  # [rows, H D], the result of attention
    gate_up: int  # [rows, 2F]
    activated: int  # [rows, F]
    work: int  # rows that products prepare
    rows: int
    size: int
    intermediate_size: int
    num_heads: int
    row_heads: int  # H + 2K or more
    eps: float
    shape: tuple[int, int, int, int]  # of the K cache
    slot_mapping: np.ndarray  # [rows] int64
    attention: AttentionWork
    example: Any  # of the dtype
    weight_example: Any  # of the dtype of the norms' weights
    cache_example: Any  # of the dtype of the KV cache
    parts: int


class States(NamedTuple):
    """The states of linear attention of all layers, and its sizes; zeros for other models."""

    conv: int = 0  # the address of [layers, num_states, 3, C]
    rule: int = 0  # the address of [layers, num_states, Hv, Dk, Dv] in float32
    segments: np.ndarray = np.empty((0, 3), np.int64)  # [rows, 3], of delta_rule.of_rows
    conv_bytes: int = 0  # of a layer
    rule_bytes: int = 0
    num_states: int = 0
    key_heads: int = 0
    value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    itemsize: int = 0  # of the model's dtype
    advance_heads: int = 0  # the address of delta_rule.advance_heads
    gate: int = 0  # the address of pointwise.gate_rows, or 0 if attention has no gate


NO_STATES = States()


def example_step(example: Any, weight_example: Any, cache_example: Any) -> Step:
    """Return a step with the types of every step of these dtypes."""
    none = np.empty((0, 0), np.int64)
    groups = QueryGroups(none, none, none.ravel(), none.astype(np.int32))
    addresses_and_sizes: Any = dict.fromkeys(Step._fields[:14], 0)
    return Step(
        **addresses_and_sizes,
        eps=0.0,
        shape=(1, 1, 1, 1),
        slot_mapping=none.ravel(),
        attention=AttentionWork(groups, groups, np.empty((0, 0, 0), np.float32)),
        example=example,
        weight_example=weight_example,
        cache_example=cache_example,
        parts=1,
    )


@compiled()
def project(kernels, step, at, column, x_ptr, out_ptr, inputs, outputs):
    compute(kernels.product, x_ptr, at[column], at[column + 1], at[column + 2], out_ptr, step.rows,
            inputs, outputs, step.work, step.example, step.parts)


@compiled()
def norm(kernels, step, weight_ptr):
    arguments = (step.x, step.residual, weight_ptr, step.rows, step.size, step.eps, step.example,
                 step.weight_example)
    in_parts(kernels.norm, arguments, step.rows, parts_for(step.rows * step.size, step.parts))


@compiled()
def linear_attention(kernels, step, at, states):
    """Compute `mixed` from the normed x, through `projected`. The states change in place."""
    key_heads, value_heads = states.key_heads, states.value_heads
    width = 2 * (key_heads * states.key_dim + value_heads * states.value_dim + value_heads)
    project(kernels, step, at, PROJECTION, step.x, step.projected, step.size, width)
    arguments = (step.projected, at[CONV1D], at[A_LOG], at[DT_BIAS], at[NORM],
                 states.conv + at[LAYER] * states.conv_bytes,
                 states.rule + at[LAYER] * states.rule_bytes, states.segments, step.mixed,
                 step.rows, width, states.num_states, key_heads, value_heads, states.key_dim,
                 states.value_dim, step.eps, step.example)
    in_parts(states.advance_heads, arguments, step.rows * key_heads, step.parts)


@compiled()
def attention(kernels, step, at, k_scale, v_scale, states):
    """Compute the same for a layer of attention. A hybrid model's gate follows the values."""
    num_blocks, num_kv_heads, block_size, dim = step.shape
    project(kernels, step, at, PROJECTION, step.x, step.projected, step.size, step.row_heads * dim)
    store = (step.projected, at[Q_NORM], at[K_NORM], step.cos, step.sin, at[K_CACHE], at[V_CACHE],
             step.slot_mapping, num_blocks, num_kv_heads, block_size, dim, step.num_heads,
             step.row_heads, step.eps, step.example, step.weight_example, step.cache_example,
             k_scale, v_scale)
    elements = step.rows * step.row_heads * dim
    in_parts(kernels.store, store, step.rows, parts_for(elements, step.parts))
    attend(step.projected, step.rows, step.row_heads, step.mixed, step.num_heads, at[K_CACHE],
           at[V_CACHE], step.shape, step.attention, v_scale, step.example, step.cache_example,
           kernels.attend_groups, step.parts)
    if states.gate != 0:
        size, stride = step.num_heads * dim, step.row_heads * dim
        gate = step.projected + (stride - size) * states.itemsize
        arguments = step.mixed, gate, step.rows, size, stride, step.example
        in_parts(states.gate, arguments, step.rows, step.parts)


@compiled()
def feed_forward(kernels, step, at):
    """Compute the second half of a layer."""
    size, wide = step.size, step.intermediate_size
    norm(kernels, step, at[POST_ATTENTION_NORM])
    project(kernels, step, at, GATE_UP, step.x, step.gate_up, size, 2 * wide)
    activation = (step.gate_up, step.activated, step.rows, wide, step.example)
    in_parts(kernels.activation, activation, step.rows, parts_for(step.rows * wide, step.parts))
    project(kernels, step, at, DOWN, step.activated, step.x, wide, size)


@compiled()
def compute_layers(kernels, step, addresses, scales, states):
    """Compute layers of a step as the DecoderLayer of a model does.

    addresses [layers, 23], scales [layers, 2] float64 of K and V. x, residual and the states change
    in place: the sum of the first two is the embedding at first and the input of the final norm at
    the end.
    """
    for i in range(len(addresses)):
        at = addresses[i]
        norm(kernels, step, at[INPUT_NORM])
        if at[CONV1D] != 0:
            mixed_size = states.value_heads * states.value_dim
            linear_attention(kernels, step, at, states)
        else:
            mixed_size = step.num_heads * step.shape[3]
            attention(kernels, step, at, scales[i, 0], scales[i, 1], states)
        project(kernels, step, at, OUTPUT, step.mixed, step.x, mixed_size, step.size)
        feed_forward(kernels, step, at)


class FusedLayers:
    """Computes the layers of a model from the addresses of its weights."""

    def __init__(self, model: Qwen3, attention: NumbaAttention) -> None:
        self.model = model
        self.config = model.config
        products = [module.weight.product for layer in model.layers for module in layer.linears()]
        dtype, cache_dtype = model.backend.dtype, attention.cache.dtype
        self.shape = attention.shape
        self.examples = [DTYPE_EXAMPLE[d] for d in (dtype, model.norm.dtype, cache_dtype)]
        self.kernels = LayerKernels(
            norm=address_for(pointwise.add_rms_norm_rows, dtype, dtype, model.norm.dtype),
            store=address_for(
                pointwise.norm_rope_store_rows, dtype, cache_dtype, model.norm.dtype
            ),
            attend_groups=attention.attend_groups,
            activation=address_for(pointwise.silu_and_mul_rows, dtype, dtype),
            product=max(products, key=lambda product: product.prepare),
        )
        layers = [self.layer_addresses(layer, attention) for layer in model.layers]
        self.addresses = np.array(layers, np.int64)
        self.scales = np.array([self.layer_scales(layer, attention) for layer in model.layers])
        self.buffers: list[Tensor] = []

    @property
    def row_heads(self) -> int:
        return self.config.num_heads + 2 * self.config.num_kv_heads

    def buffer_sizes(self) -> tuple[int, int]:
        """Return the numbers per row of the buffers `projected` and `mixed` of a step."""
        return self.row_heads * self.config.head_dim, self.config.num_heads * self.config.head_dim

    def layer_addresses(self, layer: Any, attention: NumbaAttention) -> list[int]:
        """Return the addresses of a layer for compute_layers."""
        attn = layer.self_attn
        norms = layer.input_layernorm, layer.post_attention_layernorm, *(attn.norms or (None, None))
        addresses = [0 if weight is None else weight.data_ptr() for weight in norms]
        addresses += attention.kv_addresses[attn.layer]
        for module in layer.linears():
            addresses += pointers(module)
        return addresses + [0] * 5

    def layer_scales(self, layer: Any, attention: NumbaAttention) -> tuple[float, float]:
        """Return the scales of K and V of a layer."""
        return attention.scales[layer.self_attn.layer]

    def forward(self, batch: ForwardBatch, attention: NumbaAttention) -> Tensor:
        """Compute Qwen3.forward."""
        plan = batch.attention_metadata
        model = self.model
        x = model.embed_tokens[batch.input_ids]
        inputs = x, torch.zeros_like(x), *model.rotary.at(batch.positions)
        step = self.make_step(inputs, plan.slot_mapping, plan.work)
        states = self.states(batch)
        if len(x) <= FEW_TOKENS:
            compute_layers(self.kernels, step, self.addresses, self.scales, states)
        else:
            for i in range(len(self.addresses)):
                model.backend.before_layer()
                follow_torch()
                step = step._replace(parts=numba.get_num_threads())
                layer = self.addresses[i : i + 1], self.scales[i : i + 1]
                compute_layers(self.kernels, step, *layer, states)
        return pointwise.add_rms_norm(x, inputs[1], model.norm, self.config.rms_norm_eps)[0]

    def make_step(
        self, inputs: tuple[Tensor, ...], slot_mapping: np.ndarray, work: AttentionWork
    ) -> Step:
        """Return a step with addresses of `inputs`, and of buffers that later steps use again.

        inputs are x, residual [T, E], cos and sin [T, D].
        """
        x = inputs[0]
        rows, size = x.shape
        config = self.config
        wide = config.intermediate_size
        if not self.buffers or len(self.buffers[0]) < rows:
            projected, mixed = self.buffer_sizes()
            widths = projected, mixed, 2 * wide, wide
            self.buffers = [x.new_empty(rows, width) for width in widths]
            work_bytes = self.kernels.product.work_bytes(max(size, mixed, wide))
            self.buffers.append(x.new_empty(rows * work_bytes, dtype=torch.uint8))
        x_at, residual, cos, sin = (tensor.data_ptr() for tensor in inputs)
        projected, mixed, gate_up, activated, work_at = (b.data_ptr() for b in self.buffers)
        example, weight_example, cache_example = self.examples
        return Step(
            x=x_at,
            residual=residual,
            cos=cos,
            sin=sin,
            projected=projected,
            mixed=mixed,
            gate_up=gate_up,
            activated=activated,
            work=work_at,
            rows=rows,
            size=size,
            intermediate_size=wide,
            num_heads=config.num_heads,
            row_heads=self.row_heads,
            eps=config.rms_norm_eps,
            shape=self.shape,
            slot_mapping=slot_mapping,
            attention=work,
            example=example,
            weight_example=weight_example,
            cache_example=cache_example,
            parts=numba.get_num_threads(),
        )

    def states(self, batch: ForwardBatch) -> States:
        """Return the states of the rows of a batch."""
        return NO_STATES

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden [R, E] to logits [R, V]."""
        return self.model.logits(hidden)
