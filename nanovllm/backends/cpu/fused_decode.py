"""Computes the layers of a decode step in one call, which on a GPU is the task of a CUDA graph.

Between two calls from Python only one thread works and the memory is idle. A product with few rows
takes as long as reading its weights, and the units read them faster than oneDNN does. With AMX and
16 sequences at Qwen3-0.6B's shape a step took 88 ms layer by layer and 72 ms in one call. All is in
the dtype of the model: float32, or bfloat16 with AMX or AVX512-BF16. The rules and shapes are in
backends/cpu/pointwise.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numba
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from nanovllm.backends.cpu import pointwise
from nanovllm.backends.cpu.jit import compiled
from nanovllm.backends.cpu.linear import PACKED_FOR, address, is_packed_by
from nanovllm.backends.cpu.linear import linear as linear_by_torch
from nanovllm.backends.cpu.parallel import address_for, in_parts
from nanovllm.backends.cpu.primitives import DTYPE_EXAMPLE
from nanovllm.backends.cpu.units.any import Unit, attend
from nanovllm.models.batch import ForwardBatch
from nanovllm.models.layers import Linear
from nanovllm.models.qwen3 import DecoderLayer, Qwen3

if TYPE_CHECKING:
    from nanovllm.backends.cpu.attention import NumbaAttention

# The columns of decode_layers' addresses; 0 means that the layer has no such weight.
(INPUT_NORM, QKV, QKV_BIAS, Q_NORM, K_NORM, OUTPUT, OUTPUT_BIAS, POST_ATTENTION_NORM, GATE_UP,
 DOWN, K_CACHE, V_CACHE) = range(12)


class Code(NamedTuple):
    """The addresses of the kernels of a layer; see backends/cpu/parallel.py."""

    norm: int  # pointwise.add_rms_norm_rows
    store: int  # pointwise.norm_rope_store_rows
    attend_groups: int  # of the unit
    linear: int  # linear_blocks of the unit
    width: int  # the outputs of a block of `linear`
    activation: int  # pointwise.silu_and_mul_rows


@compiled()
def linear(code, x_ptr, weight_ptr, bias_ptr, out_ptr, rows, inputs, outputs, parts):
    arguments = (x_ptr, weight_ptr, bias_ptr, out_ptr, rows, inputs, outputs)
    in_parts(code.linear, arguments, outputs // code.width, parts)


@compiled()
def decode_layers(code, addresses, x_ptr, residual_ptr, rows, size, cos_ptr, sin_ptr,
                  intermediate_size, num_heads, eps, shape, slot_mapping, work, example, parts):
    """Compute all layers of a decode step as models.qwen3.DecoderLayer does, in one dtype.

    addresses [layers, 12]; cos, sin [rows, D]. x and residual [rows, size] change in place: their
    sum is the embedding at first and the input of the final norm at the end.
    """
    num_blocks, num_kv_heads, block_size, dim = shape
    qkv_size, attn_size = (num_heads + 2 * num_kv_heads) * dim, num_heads * dim
    qkv, attn = np.full((rows, qkv_size), example), np.full((rows, attn_size), example)
    gate_up = np.full((rows, 2 * intermediate_size), example)
    activated, no_bias = np.full((rows, intermediate_size), example), np.int64(0)
    for i in range(len(addresses)):
        at = addresses[i]
        # The addresses are read in the loop (see primitives.array). Without the cast from unsigned,
        # Numba would compile every kernel again for a second type of address.
        qkv_ptr, attn_ptr = np.int64(qkv.ctypes.data), np.int64(attn.ctypes.data)
        gate_up_ptr, activated_ptr = np.int64(gate_up.ctypes.data), np.int64(activated.ctypes.data)
        norm = (x_ptr, residual_ptr, at[INPUT_NORM], rows, size, eps, example, example)
        in_parts(code.norm, norm, rows, parts)
        linear(code, x_ptr, at[QKV], at[QKV_BIAS], qkv_ptr, rows, size, qkv_size, parts)
        store = (qkv_ptr, at[Q_NORM], at[K_NORM], cos_ptr, sin_ptr, at[K_CACHE], at[V_CACHE],
                 slot_mapping, num_blocks, num_kv_heads, block_size, dim, num_heads, eps, example,
                 example, example, 1.0, 1.0)
        in_parts(code.store, store, rows, parts)
        attend(qkv_ptr, rows, attn_ptr, num_heads, at[K_CACHE], at[V_CACHE], shape, work, example,
               example, code.attend_groups, parts)
        linear(code, attn_ptr, at[OUTPUT], at[OUTPUT_BIAS], x_ptr, rows, attn_size, size, parts)
        norm = (x_ptr, residual_ptr, at[POST_ATTENTION_NORM], rows, size, eps, example, example)
        in_parts(code.norm, norm, rows, parts)
        linear(code, x_ptr, at[GATE_UP], no_bias, gate_up_ptr, rows, size, 2 * intermediate_size,
               parts)
        activation = (gate_up_ptr, activated_ptr, rows, intermediate_size, example)
        in_parts(code.activation, activation, rows, parts)
        linear(code, activated_ptr, at[DOWN], no_bias, x_ptr, rows, intermediate_size, size, parts)


class FusedLayers:
    """Computes the layers of a model from the addresses of its weights."""

    def __init__(self, model: Qwen3, attention: NumbaAttention) -> None:
        self.model = model
        unit, dtype = attention.unit, model.backend.dtype
        dtypes, self.example = (dtype, dtype), DTYPE_EXAMPLE[dtype]
        self.code = Code(
            norm=address_for(pointwise.add_rms_norm_rows, *dtypes),
            store=address_for(pointwise.norm_rope_store_rows, *dtypes),
            attend_groups=attention.attend_groups,
            linear=address_for(unit.linear_blocks, *dtypes),
            width=unit.width,
            activation=address_for(pointwise.silu_and_mul_rows, *dtypes),
        )
        layers = zip(model.layers, attention.kv_addresses, strict=True)
        self.addresses = np.array([(*addresses(layer), *kv) for layer, kv in layers], np.int64)

    def forward(self, batch: ForwardBatch, attention: NumbaAttention) -> Tensor:
        """Compute Qwen3.forward. Large steps and steps with torch's attention are left to it."""
        step = batch.attention_metadata
        model, config = self.model, self.model.config
        by_torch = step.chunks or step.prefixes
        if by_torch or len(batch.input_ids) > PACKED_FOR:
            return model.forward(batch, attention)
        x = F.embedding(batch.input_ids, model.embed_tokens)
        residual = torch.zeros_like(x)
        cos, sin = model.rotary.at(batch.positions)
        decode_layers(self.code, self.addresses, x.data_ptr(), residual.data_ptr(), *x.shape,
                      cos.data_ptr(), sin.data_ptr(), config.intermediate_size, config.num_heads,
                      config.rms_norm_eps, attention.shape, step.slot_mapping, step.work,
                      self.example, numba.get_num_threads())
        return pointwise.add_rms_norm(x, residual, model.norm, config.rms_norm_eps)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden [R, E] to logits [R, V]."""
        return self.model.logits(hidden)


class UnitLinear:
    """Linear layers by the kernel of a unit, which reads the weights faster than oneDNN does."""

    def __init__(self, model: Qwen3, unit: Unit) -> None:
        self.code = address_for(unit.linear_blocks, unit.linear_dtype, unit.linear_dtype)
        self.width = unit.width
        fits: dict[torch.Size, bool] = {}  # by shape, because confirming a layout takes a product
        self.addresses = {}
        for module in model.linears():
            weight = module.weight
            if isinstance(weight, Tensor):
                if weight.shape not in fits:
                    fits[weight.shape] = is_packed_by(unit.width, weight)
                if fits[weight.shape]:
                    self.addresses[module] = address(weight)

    def __call__(self, x: Tensor, module: Linear) -> Tensor:
        weight = self.addresses.get(module)
        if weight is None or len(x) > PACKED_FOR:
            return linear_by_torch(x, module)
        x, bias = x.contiguous(), 0 if module.bias is None else module.bias.data_ptr()
        outputs = module.weight.shape[0]
        out = x.new_empty((len(x), outputs))
        arguments = x.data_ptr(), weight, bias, out.data_ptr(), *x.shape, outputs
        in_parts(self.code, arguments, outputs // self.width, numba.get_num_threads())
        return out


def fuse_layers(model: Qwen3, attention: NumbaAttention) -> FusedLayers | None:
    """Return None if a layer is not Qwen3's, or if the unit does not read one of its weights.

    Outside fused layers, the unit computes all products of few rows whose weights it reads.
    """
    unit, dtype = attention.unit, model.backend.dtype
    if unit.linear_dtype is not dtype:
        return None
    model.backend.linear = linear = UnitLinear(model, unit)
    if type(model) is not Qwen3 or attention.cache.dtype is not dtype:
        return None
    fits = all(m in linear.addresses for layer in model.layers for m in layer.linears())
    return FusedLayers(model, attention) if fits else None


def addresses(layer: DecoderLayer) -> list[int]:
    """Return the first ten addresses of a layer for decode_layers, with 0 for a missing weight."""
    attn, mlp = layer.self_attn, layer.mlp

    def pointer(tensor: Tensor | None) -> int:
        return 0 if tensor is None else tensor.data_ptr()

    return [
        pointer(layer.input_layernorm),
        address(attn.qkv_proj.weight),
        pointer(attn.qkv_proj.bias),
        *(pointer(weight) for weight in attn.norms or (None, None)),
        address(attn.o_proj.weight),
        pointer(attn.o_proj.bias),
        pointer(layer.post_attention_layernorm),
        address(mlp.gate_up_proj.weight),
        address(mlp.down_proj.weight),
    ]
