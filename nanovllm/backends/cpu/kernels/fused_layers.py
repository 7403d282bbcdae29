"""Computes the layers of a step in one call, which on a GPU is the task of a CUDA graph.

Between two calls from Python only one thread works and the memory is idle. With AMX and 16
sequences at Qwen3-0.6B's shape a step took 88 ms layer by layer and 72 ms in one call. The rules
and shapes are in backends/cpu/kernels/pointwise.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba
import numpy as np
import torch
from torch import Tensor

from nanovllm.backends.cpu.jit import compiled
from nanovllm.backends.cpu.kernels import pointwise
from nanovllm.backends.cpu.kernels.attention import AttentionWork, attend
from nanovllm.backends.cpu.kernels.layer_tables import (
    LAYER,
    NO_STATES,
    OUTPUT_NORMS,
    PRODUCTS,
    LayerKernels,
    States,
    Step,
)
from nanovllm.backends.cpu.kernels.parallel import address_for, follow_torch, in_parts, parts_for
from nanovllm.backends.cpu.kernels.primitives import DTYPE_EXAMPLE
from nanovllm.backends.cpu.kernels.product import compute, pointers
from nanovllm.models.batch import ForwardBatch
from nanovllm.models.qwen3 import Qwen3

if TYPE_CHECKING:
    from nanovllm.backends.cpu.attention import NumbaAttention

# Steps of more tokens are computed layer by layer, between which the number of threads may change.
FEW_TOKENS = 64


@compiled()
def project(kernels, step, weight, x_ptr, out_ptr, inputs, outputs):
    compute(kernels.product, x_ptr, weight.values, weight.scale, weight.bias, out_ptr, step.rows,
            inputs, outputs, step.work, step.example, step.parts)


@compiled()
def norm(kernels, step, weight_ptr, residual_ptr):
    arguments = (step.x, residual_ptr, weight_ptr, step.rows, step.size, step.eps, step.example,
                 step.weight_example)
    in_parts(kernels.norm, arguments, step.rows, parts_for(step.rows * step.size, step.parts))


@compiled()
def linear_attention(kernels, step, layer, states):
    """Compute `mixed` from the normed x, through `projected`. The states change in place."""
    key_heads, value_heads = states.key_heads, states.value_heads
    width = 2 * (key_heads * states.key_dim + value_heads * states.value_dim + value_heads)
    project(kernels, step, layer.projection, step.x, step.projected, step.size, width)
    arguments = (step.projected, layer.conv1d, layer.a_log, layer.dt_bias, layer.norm,
                 states.conv + layer.state * states.conv_bytes,
                 states.rule + layer.state * states.rule_bytes, states.segments, step.mixed,
                 step.rows, width, states.num_states, key_heads, value_heads, states.key_dim,
                 states.value_dim, step.eps, step.example)
    in_parts(states.advance_heads, arguments, step.rows * key_heads, step.parts)


@compiled()
def attention(kernels, step, layer, states):
    """Compute the same for a layer of attention. A hybrid model's gate follows the values."""
    num_blocks, num_kv_heads, block_size, dim = step.shape
    width = step.row_heads * dim
    project(kernels, step, layer.projection, step.x, step.projected, step.size, width)
    rope = layer.rope * step.rope_bytes
    store = (step.projected, layer.q_norm, layer.k_norm, step.cos + rope, step.sin + rope,
             layer.k_cache, layer.v_cache, step.attention.slot_mapping, num_blocks, num_kv_heads,
             block_size, dim, step.num_heads, step.row_heads, step.eps, step.example,
             step.weight_example, step.cache_example, layer.k_scale, layer.v_scale)
    in_parts(kernels.store, store, step.rows, parts_for(step.rows * width, step.parts))
    attend(step.projected, step.rows, step.row_heads, step.mixed, step.num_heads, layer.k_cache,
           layer.v_cache, step.shape, step.attention, layer.window, layer.v_scale, step.example,
           step.cache_example, kernels.attend_groups, step.parts)
    if states.gate != 0:
        size = step.num_heads * dim
        gate = step.projected + (width - size) * states.itemsize
        arguments = step.mixed, gate, step.rows, size, width, step.example
        in_parts(states.gate, arguments, step.rows, step.parts)


@compiled()
def feed_forward(kernels, step, layer):
    """Compute the second half of a layer."""
    size = step.size
    wide = step.intermediate_size
    norm(kernels, step, layer.post_attention_norm, step.residual)
    project(kernels, step, layer.gate_up, step.x, step.gate_up, size, 2 * wide)
    activation = (step.gate_up, step.activated, step.rows, wide, step.example)
    in_parts(kernels.activation, activation, step.rows, parts_for(step.rows * wide, step.parts))
    project(kernels, step, layer.down, step.activated, step.x, wide, size)
    if layer.mlp_output_norm != 0:
        norm(kernels, step, layer.mlp_output_norm, 0)


@compiled()
def compute_layers(kernels, step, layers, states):
    """Compute layers of a step, an array of LAYER, as the DecoderLayer of a model does.

    x, residual and the states change in place: the sum of the first two is the embedding at first
    and the input of the final norm at the end.
    """
    for i in range(len(layers)):
        layer = layers[i]
        norm(kernels, step, layer.input_norm, step.residual)
        if layer.conv1d != 0:
            mixed_size = states.value_heads * states.value_dim
            linear_attention(kernels, step, layer, states)
        else:
            mixed_size = step.num_heads * step.shape[3]
            attention(kernels, step, layer, states)
        project(kernels, step, layer.output, step.mixed, step.x, mixed_size, step.size)
        if layer.attention_output_norm != 0:
            norm(kernels, step, layer.attention_output_norm, 0)
        feed_forward(kernels, step, layer)


class FusedLayers:
    """Computes the layers of a model from the addresses of its weights."""

    def __init__(self, model: Qwen3, attention: NumbaAttention) -> None:
        self.model = model
        self.config = model.config
        products = [module.weight.product for layer in model.layers for module in layer.linears()]
        dtype = model.backend.dtype
        cache_dtype = attention.cache.dtype
        self.shape = attention.shape
        self.examples = [DTYPE_EXAMPLE[d] for d in (dtype, model.norm.dtype, cache_dtype)]
        activation = getattr(pointwise, f"{model.layers[0].mlp.activation}_rows")
        self.kernels = LayerKernels(
            norm=address_for(pointwise.add_rms_norm_rows, dtype, dtype, model.norm.dtype),
            store=address_for(
                pointwise.norm_rope_store_rows, dtype, cache_dtype, model.norm.dtype
            ),
            attend_groups=attention.attend_groups,
            activation=address_for(activation, dtype, dtype),
            product=max(products, key=lambda product: product.prepare),
        )
        self.layers = np.zeros(len(model.layers), LAYER)
        for layer, record in zip(model.layers, self.layers, strict=True):
            self.describe(layer, attention, record)
        self.layers["rope"] = model.rope_of_layer
        self.buffers: list[Tensor] = []

    @property
    def row_heads(self) -> int:
        return self.config.num_heads + 2 * self.config.num_kv_heads

    def buffer_sizes(self) -> tuple[int, int]:
        """Return the numbers per row of the buffers `projected` and `mixed` of a step."""
        return self.row_heads * self.config.head_dim, self.config.num_heads * self.config.head_dim

    def describe(self, layer: Any, attention: NumbaAttention, record: Any) -> None:
        """Set the LAYER of a layer, which is zeros."""
        record["input_norm"] = layer.input_layernorm.data_ptr()
        record["post_attention_norm"] = layer.post_attention_layernorm.data_ptr()
        for name, weight in zip(OUTPUT_NORMS, layer.output_norms, strict=False):
            record[name] = weight.data_ptr()
        for name, module in zip(PRODUCTS, layer.linears(), strict=True):
            record[name] = pointers(module)
        self.describe_attention(layer.self_attn, attention, record)

    def describe_attention(self, attn: Any, attention: NumbaAttention, record: Any) -> None:
        if attn.norms is not None:
            record["q_norm"], record["k_norm"] = (weight.data_ptr() for weight in attn.norms)
        record["k_cache"], record["v_cache"] = attention.kv_addresses[attn.layer]
        record["k_scale"], record["v_scale"] = attention.scales[attn.layer]
        record["window"] = attention.windows[attn.layer]

    def forward(self, batch: ForwardBatch, attention: NumbaAttention) -> Tensor:
        """Compute Qwen3.forward."""
        model = self.model
        x = model.embed(batch.input_ids)
        inputs = x, torch.zeros_like(x), *model.rotary.at(batch.positions)[0]
        step = self.make_step(inputs, batch.attention_metadata)
        states = self.states(batch)
        if len(x) <= FEW_TOKENS:
            compute_layers(self.kernels, step, self.layers, states)
        else:
            for i in range(len(self.layers)):
                model.backend.before_layer()
                follow_torch()
                step = step._replace(parts=numba.get_num_threads())
                compute_layers(self.kernels, step, self.layers[i : i + 1], states)
        return pointwise.add_rms_norm(x, inputs[1], model.norm, self.config.rms_norm_eps)[0]

    def make_step(self, inputs: tuple[Tensor, ...], work: AttentionWork) -> Step:
        """Return a step with addresses of `inputs`, and of buffers that later steps use again.

        inputs are x, residual [T, E], cos and sin [T, D] of the first rope; the others follow them.
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
        tensors = zip(Step._fields, (*inputs, *self.buffers), strict=False)
        addresses: Any = {name: tensor.data_ptr() for name, tensor in tensors}
        example, weight_example, cache_example = self.examples
        return Step(
            **addresses,
            rows=rows,
            rope_bytes=rows * config.head_dim * x.itemsize,
            size=size,
            intermediate_size=wide,
            num_heads=config.num_heads,
            row_heads=self.row_heads,
            eps=config.rms_norm_eps,
            shape=self.shape,
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
