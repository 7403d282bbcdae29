"""Computes the layers of a decode step in one call, which on a GPU is the task of a CUDA graph.

Between two calls from Python only one thread works and the memory is idle. A product with few rows
takes as long as reading its weights, and the kernels of blocks read them faster than oneDNN does.
With AMX and 16 sequences at Qwen3-0.6B's shape a step took 88 ms layer by layer and 72 ms in one
call. Weights are in the dtype of the model (float32, or bfloat16 with AMX or AVX512-BF16), in int8
or in int4. The rules and shapes are in backends/cpu/kernels/pointwise.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numba
import numpy as np
import torch
from torch import Tensor

from nanovllm.backends.cpu.jit import compiled
from nanovllm.backends.cpu.kernels import pointwise
from nanovllm.backends.cpu.kernels.attention import attend
from nanovllm.backends.cpu.kernels.blocks import blocks_product
from nanovllm.backends.cpu.kernels.few_queries import AttentionWork, QueryGroups
from nanovllm.backends.cpu.kernels.parallel import address_for, in_parts, parts_for
from nanovllm.backends.cpu.kernels.primitives import DTYPE_EXAMPLE
from nanovllm.backends.cpu.kernels.product import Product, multiply, pointers, product
from nanovllm.backends.cpu.linear import PACKED_FOR, address, is_packed_by, repacked
from nanovllm.backends.cpu.linear import linear as linear_by_torch
from nanovllm.models.batch import ForwardBatch
from nanovllm.models.layers import Linear
from nanovllm.models.qwen3 import MLP, DecoderLayer, Qwen3, SelfAttention

if TYPE_CHECKING:
    from nanovllm.backends.cpu.attention import NumbaAttention

# Returns the addresses of the weight, the scale and the bias of a Linear; 0 for what it lacks.
Pointers = Callable[[Linear], tuple[int, int, int]]
# The columns of decode_layers' addresses; 0 means that the layer has no such weight. A product has
# three columns: weight, scale and bias. The last five are of linear attention: LAYER counts only
# its layers, and CONV1D is 0 in the others.
INPUT_NORM, POST_ATTENTION_NORM, Q_NORM, K_NORM, K_CACHE, V_CACHE = range(6)
PROJECTION, OUTPUT, GATE_UP, DOWN = range(6, 18, 3)
LAYER, CONV1D, A_LOG, DT_BIAS, NORM = range(18, 23)


class Code(NamedTuple):
    """The addresses of the kernels of a layer; see backends/cpu/kernels/parallel.py."""

    norm: int  # pointwise.add_rms_norm_rows
    store: int  # pointwise.norm_rope_store_rows
    attend_groups: int  # attention.attend_groups
    activation: int  # pointwise.silu_and_mul_rows
    product: Product


class Step(NamedTuple):
    """Arguments that all layers of a decode step share. The first nine are addresses."""

    x: int  # [rows, size], the input and the output of each part of a layer
    residual: int  # [rows, size]
    cos: int  # [rows, D]
    sin: int
    projected: int  # [rows, row_heads D], the queries, keys and values
    mixed: int  # [rows, H D], the result of attention
    gate_up: int  # [rows, 2F]
    activated: int  # [rows, F]
    work: int  # quantized rows
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
    parts: int


class States(NamedTuple):
    """The states of linear attention of all layers, and its sizes; zeros for other models."""

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
    gate: int  # the address of delta_layers.gate_rows, or 0 if attention has no gate


NO_STATES = States(0, 0, np.empty((0, 3), np.int64), *[0] * 10)


def example_step(example: Any, weight_example: Any) -> Step:
    """Return a step with the types of every step of these dtypes."""
    none = np.empty((0, 0), np.int64)
    groups = QueryGroups(none, none, none.astype(np.int32))
    work = AttentionWork(groups, groups, none.astype(np.float32))
    values = 0.0, (1,) * 4, none.ravel(), work, example, weight_example, 1
    return Step._make((*[0] * 14, *values))


@compiled()
def linear(code, step, at, column, x_ptr, out_ptr, inputs, outputs):
    product(code.product, x_ptr, at[column], at[column + 1], at[column + 2], out_ptr, step.rows,
            inputs, outputs, step.work, step.example, step.parts)


@compiled()
def norm(code, step, weight_ptr):
    arguments = (step.x, step.residual, weight_ptr, step.rows, step.size, step.eps, step.example,
                 step.weight_example)
    in_parts(code.norm, arguments, step.rows, parts_for(step.rows * step.size, step.parts))


@compiled()
def linear_attention(code, step, at, states):
    """Compute `mixed` from the normed x, through `projected`. The states change in place."""
    key_heads, value_heads = states.key_heads, states.value_heads
    width = 2 * (key_heads * states.key_dim + value_heads * states.value_dim + value_heads)
    linear(code, step, at, PROJECTION, step.x, step.projected, step.size, width)
    arguments = (step.projected, at[CONV1D], at[A_LOG], at[DT_BIAS], at[NORM],
                 states.conv + at[LAYER] * states.conv_bytes,
                 states.rule + at[LAYER] * states.rule_bytes, states.segments, step.mixed,
                 step.rows, width, states.num_states, key_heads, value_heads, states.key_dim,
                 states.value_dim, step.eps, step.example)
    in_parts(states.advance_heads, arguments, step.rows * key_heads, step.parts)


@compiled()
def attention(code, step, at, states):
    """Compute the same for a layer of attention. A hybrid model's gate follows the values."""
    num_blocks, num_kv_heads, block_size, dim = step.shape
    linear(code, step, at, PROJECTION, step.x, step.projected, step.size, step.row_heads * dim)
    store = (step.projected, at[Q_NORM], at[K_NORM], step.cos, step.sin, at[K_CACHE], at[V_CACHE],
             step.slot_mapping, num_blocks, num_kv_heads, block_size, dim, step.num_heads,
             step.row_heads, step.eps, step.example, step.weight_example, step.example, 1.0, 1.0)
    elements = step.rows * step.row_heads * dim
    in_parts(code.store, store, step.rows, parts_for(elements, step.parts))
    attend(step.projected, step.rows, step.row_heads, step.mixed, step.num_heads, at[K_CACHE],
           at[V_CACHE], step.shape, step.attention, step.example, step.example, code.attend_groups,
           step.parts)
    if states.gate != 0:
        size, stride = step.num_heads * dim, step.row_heads * dim
        gate = step.projected + (stride - size) * states.itemsize
        arguments = step.mixed, gate, step.rows, size, stride, step.example
        in_parts(states.gate, arguments, step.rows, step.parts)


@compiled()
def feed_forward(code, step, at):
    """Compute the second half of a layer."""
    size, wide = step.size, step.intermediate_size
    norm(code, step, at[POST_ATTENTION_NORM])
    linear(code, step, at, GATE_UP, step.x, step.gate_up, size, 2 * wide)
    activation = (step.gate_up, step.activated, step.rows, wide, step.example)
    in_parts(code.activation, activation, step.rows, parts_for(step.rows * wide, step.parts))
    linear(code, step, at, DOWN, step.activated, step.x, wide, size)


@compiled()
def decode_layers(code, step, addresses, states):
    """Compute all layers of a decode step as the DecoderLayer of a model does, in one dtype.

    addresses [layers, 23]. x, residual and the states change in place: the sum of the first two is
    the embedding at first and the input of the final norm at the end.
    """
    for i in range(len(addresses)):
        at = addresses[i]
        norm(code, step, at[INPUT_NORM])
        if at[CONV1D] != 0:
            mixed_size = states.value_heads * states.value_dim
            linear_attention(code, step, at, states)
        else:
            mixed_size = step.num_heads * step.shape[3]
            attention(code, step, at, states)
        linear(code, step, at, OUTPUT, step.mixed, step.x, mixed_size, step.size)
        feed_forward(code, step, at)


class FusedLayers:
    """Computes the layers of a model from the addresses of its weights."""

    def __init__(
        self, model: Qwen3, attention: NumbaAttention, product: Product, find: Pointers
    ) -> None:
        self.model, self.config, self.find = model, model.config, find
        dtype = model.backend.dtype
        dtypes, self.example = (dtype, dtype), DTYPE_EXAMPLE[dtype]
        self.weight_example = DTYPE_EXAMPLE[model.norm.dtype]
        self.code = Code(
            norm=address_for(pointwise.add_rms_norm_rows, *dtypes, model.norm.dtype),
            store=address_for(pointwise.norm_rope_store_rows, *dtypes, model.norm.dtype),
            attend_groups=attention.attend_groups,
            activation=address_for(pointwise.silu_and_mul_rows, *dtypes),
            product=product,
        )
        layers = [self.layer_addresses(layer, attention, find) for layer in model.layers]
        self.addresses = np.array(layers, np.int64)

    @property
    def head(self) -> tuple[Product, int, int, int]:
        """The product of the head, and the addresses of its weight, scale and bias."""
        head = self.model.lm_head
        is_plain = isinstance(head.weight, Tensor)
        return self.code.product if is_plain else head.weight.product(), *self.find(head)

    @property
    def row_heads(self) -> int:
        return self.config.num_heads + 2 * self.config.num_kv_heads

    def buffer_sizes(self) -> tuple[int, int]:
        """Return the numbers per row of the buffers `projected` and `mixed` of a step."""
        return self.row_heads * self.config.head_dim, self.config.num_heads * self.config.head_dim

    def layer_addresses(self, layer: Any, attention: NumbaAttention, find: Pointers) -> list[int]:
        """Return the addresses of a layer for decode_layers."""
        attn = layer.self_attn
        norms = layer.input_layernorm, layer.post_attention_layernorm, *(attn.norms or (None, None))
        addresses = [0 if weight is None else weight.data_ptr() for weight in norms]
        addresses += attention.kv_addresses[attn.layer]
        for module in layer.linears():
            addresses += find(module)
        return addresses + [0] * 5

    def forward(self, batch: ForwardBatch, attention: NumbaAttention) -> Tensor:
        """Compute Qwen3.forward. Large steps are left to it."""
        plan, model, config = batch.attention_metadata, self.model, self.config
        if len(batch.input_ids) > PACKED_FOR:
            return model.forward(batch, attention)
        x = model.embed_tokens[batch.input_ids]
        inputs = x, torch.zeros_like(x), *model.rotary.at(batch.positions)
        step, _buffers = self.make_step(inputs, plan.slot_mapping, plan.work, attention.shape)
        decode_layers(self.code, step, self.addresses, self.states(batch))
        return pointwise.add_rms_norm(x, inputs[1], model.norm, config.rms_norm_eps)[0]

    def make_step(
        self,
        inputs: tuple[Tensor, ...],
        slot_mapping: np.ndarray,
        work: AttentionWork,
        shape: tuple[int, ...],
    ) -> tuple[Step, list[Tensor]]:
        """Return a step, and the buffers that it has addresses of.

        inputs are x, residual [T, E], cos and sin [T, D]; `shape` is of the K cache.
        """
        x, config = inputs[0], self.config
        (rows, size), wide = x.shape, config.intermediate_size
        projected, mixed = self.buffer_sizes()
        row_bytes = self.code.product.row_bytes(max(size, mixed, wide))
        buffers = [x.new_empty(rows, number) for number in (projected, mixed, 2 * wide, wide)]
        buffers.append(x.new_empty(rows * row_bytes, dtype=torch.uint8))
        sizes = rows, size, wide, config.num_heads, self.row_heads
        values = (
            *(tensor.data_ptr() for tensor in (*inputs, *buffers)),
            *(*sizes, config.rms_norm_eps, shape, slot_mapping, work),
            *(self.example, self.weight_example, numba.get_num_threads()),
        )
        return Step._make(values), buffers

    def states(self, batch: ForwardBatch) -> States:
        """Return the states of the rows of a batch."""
        return NO_STATES

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden [R, E] to logits [R, V]."""
        return self.model.logits(hidden)


class BlocksLinear:
    """Linear layers by `linear_blocks`, which reads the weights faster than oneDNN does."""

    def __init__(self, model: Qwen3, product: Product) -> None:
        self.product = product
        fits: dict[Any, bool] = {}  # by shape, because confirming a layout takes a product
        # The keys are ids of modules. Modules as keys would form a cycle of references, which keeps
        # the weights in memory: they refer to the backend, and the backend to this object.
        self.addresses: dict[int, tuple[int, int, int]] = {}
        for module in model.linears():
            if not isinstance(module.weight, Tensor):
                continue
            for pack in (None, repacked):
                weight = pack(module.weight) if pack else module.weight
                key = weight.shape, pack
                if key not in fits:
                    fits[key] = is_packed_by(product.width, weight)
                if fits[key]:
                    module.weight = weight
                    bias = 0 if module.bias is None else module.bias.data_ptr()
                    self.addresses[id(module)] = address(weight), 0, bias
                    break

    def pointers(self, module: Linear) -> tuple[int, int, int]:
        return self.addresses[id(module)]

    def __call__(self, x: Tensor, module: Linear) -> Tensor:
        found = self.addresses.get(id(module))
        if found is None or len(x) > PACKED_FOR:
            return linear_by_torch(x, module)
        return multiply(self.product, x, found, len(module.weight))


def fuse_layers(
    model: Qwen3, attention: NumbaAttention, hybrid: type[FusedLayers]
) -> FusedLayers | None:
    """Return the layers of the model in one call, or None if it has other layers or weights.

    `hybrid` is for layers of linear attention and attention with a gate.

    Outside fused layers, `linear_blocks` computes all products of few rows whose weights it reads.
    """
    dtype = model.backend.dtype
    modules = [module for layer in model.layers for module in layer.linears()]
    find: Pointers = pointers
    if not isinstance(modules[0].weight, Tensor) and hasattr(modules[0].weight, "product"):
        product = modules[0].weight.product()
    elif blocks := blocks_product(dtype):
        model.backend.linear = linear = BlocksLinear(model, blocks)
        if any(id(module) not in linear.addresses for module in modules):
            return None
        product, find = linear.product, linear.pointers
    else:
        return None
    kinds = {(type(layer).__call__, type(layer.mlp).__call__) for layer in model.layers}
    attns: list[Any] = [layer.self_attn for layer in model.layers]
    is_plain = all(type(attn).__call__ is SelfAttention.__call__ for attn in attns)
    is_hybrid = all(hasattr(attn, "conv1d") or hasattr(attn, "qkv_gate_proj") for attn in attns)
    inherits = type(model).forward is Qwen3.forward
    inherits &= kinds == {(DecoderLayer.__call__, MLP.__call__)}
    if not inherits or attention.cache.dtype is not dtype:
        return None
    kind = FusedLayers if is_plain else hybrid if is_hybrid else None
    return kind and kind(model, attention, product, find)
