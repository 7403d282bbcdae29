"""Computes the layers of a decode step in one call, which on a GPU is the task of a CUDA graph.

Between two calls from Python only one thread works and the memory is idle. A product with few rows
takes as long as reading its weights, and the units read them faster than oneDNN does. With AMX and
16 sequences at Qwen3-0.6B's shape a step took 88 ms layer by layer and 72 ms in one call. All is in
the dtype of the model: float32, or bfloat16 with AMX or AVX512-BF16. The rules and shapes are in
backends/cpu/kernels/pointwise.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numba
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from nanovllm.backends.cpu.jit import compiled
from nanovllm.backends.cpu.kernels import pointwise
from nanovllm.backends.cpu.kernels.parallel import address_for, in_parts
from nanovllm.backends.cpu.kernels.primitives import DTYPE_EXAMPLE
from nanovllm.backends.cpu.kernels.units.any import AttentionWork, QueryGroups, Unit, attend
from nanovllm.backends.cpu.linear import PACKED_FOR, address, is_packed_by, repacked
from nanovllm.backends.cpu.linear import linear as linear_by_torch
from nanovllm.models.batch import ForwardBatch
from nanovllm.models.layers import Linear
from nanovllm.models.qwen3 import DecoderLayer, Qwen3

if TYPE_CHECKING:
    from nanovllm.backends.cpu.attention import NumbaAttention

# The columns of decode_layers' addresses; 0 means that the layer has no such weight.
(INPUT_NORM, QKV, QKV_BIAS, Q_NORM, K_NORM, OUTPUT, OUTPUT_BIAS, POST_ATTENTION_NORM, GATE_UP,
 DOWN, K_CACHE, V_CACHE) = range(12)


class Code(NamedTuple):
    """The addresses of the kernels of a layer; see backends/cpu/kernels/parallel.py."""

    norm: int  # pointwise.add_rms_norm_rows
    store: int  # pointwise.norm_rope_store_rows
    attend_groups: int  # of the unit
    linear: int  # linear_blocks of the unit
    width: int  # the outputs of a block of `linear`
    activation: int  # pointwise.silu_and_mul_rows


class Step(NamedTuple):
    """Arguments that all layers of a decode step share. The first four are addresses."""

    x: int  # [rows, size], the input and the output of each part of a layer
    residual: int  # [rows, size]
    cos: int  # [rows, D]
    sin: int
    rows: int
    size: int
    intermediate_size: int
    num_heads: int
    eps: float
    shape: tuple[int, int, int, int]  # of the K cache
    slot_mapping: np.ndarray  # [rows] int64
    work: AttentionWork
    example: Any  # of the dtype
    weight_example: Any  # of the dtype of the norms' weights
    parts: int


def example_step(example: Any, weight_example: Any) -> Step:
    """Return a step with the types of every step of these dtypes."""
    none = np.empty((0, 0), np.int64)
    groups = QueryGroups(none, none, none.astype(np.int32))
    work = AttentionWork(groups, groups, none.astype(np.float32))
    values = 0.0, (1,) * 4, none.ravel(), work, example, weight_example, 1
    return Step._make((*[0] * 8, *values))


@compiled()
def linear(code, x_ptr, weight_ptr, bias_ptr, out_ptr, rows, inputs, outputs, parts):
    arguments = (x_ptr, weight_ptr, bias_ptr, out_ptr, rows, inputs, outputs)
    in_parts(code.linear, arguments, outputs // code.width, parts)


@compiled()
def norm(code, step, weight_ptr):
    arguments = (step.x, step.residual, weight_ptr, step.rows, step.size, step.eps, step.example,
                 step.weight_example)
    in_parts(code.norm, arguments, step.rows, step.parts)


@compiled()
def attention(code, step, at, qkv_ptr, attn_ptr):
    """Compute attn [rows, H D] from the normed x, through qkv [rows, (H + 2K) D]."""
    num_blocks, num_kv_heads, block_size, dim = step.shape
    qkv_size = (step.num_heads + 2 * num_kv_heads) * dim
    linear(code, step.x, at[QKV], at[QKV_BIAS], qkv_ptr, step.rows, step.size, qkv_size,
           step.parts)
    store = (qkv_ptr, at[Q_NORM], at[K_NORM], step.cos, step.sin, at[K_CACHE], at[V_CACHE],
             step.slot_mapping, num_blocks, num_kv_heads, block_size, dim, step.num_heads,
             step.eps, step.example, step.weight_example, step.example, 1.0, 1.0)
    in_parts(code.store, store, step.rows, step.parts)
    attend(qkv_ptr, step.rows, attn_ptr, step.num_heads, at[K_CACHE], at[V_CACHE], step.shape,
           step.work, step.example, step.example, code.attend_groups, step.parts)


@compiled()
def feed_forward(code, step, at, gate_up_ptr, activated_ptr):
    """Compute the second half of a layer, through gate_up [rows, 2F] and activated [rows, F]."""
    rows, size, wide, no_bias = step.rows, step.size, step.intermediate_size, np.int64(0)
    norm(code, step, at[POST_ATTENTION_NORM])
    linear(code, step.x, at[GATE_UP], no_bias, gate_up_ptr, rows, size, 2 * wide, step.parts)
    activation = (gate_up_ptr, activated_ptr, rows, wide, step.example)
    in_parts(code.activation, activation, rows, step.parts)
    linear(code, activated_ptr, at[DOWN], no_bias, step.x, rows, wide, size, step.parts)


@compiled()
def decode_layers(code, step, addresses):
    """Compute all layers of a decode step as models.qwen3.DecoderLayer does, in one dtype.

    addresses [layers, 12]. x and residual change in place: their sum is the embedding at first and
    the input of the final norm at the end.
    """
    rows, dim = step.rows, step.shape[3]
    attn_size = step.num_heads * dim
    qkv = np.full((rows, attn_size + 2 * step.shape[1] * dim), step.example)
    attn = np.full((rows, attn_size), step.example)
    gate_up = np.full((rows, 2 * step.intermediate_size), step.example)
    activated = np.full((rows, step.intermediate_size), step.example)
    for i in range(len(addresses)):
        at = addresses[i]
        # The addresses are read in the loop (see primitives.array). Without the cast from unsigned,
        # Numba would compile every kernel again for a second type of address.
        qkv_ptr, attn_ptr = np.int64(qkv.ctypes.data), np.int64(attn.ctypes.data)
        gate_up_ptr, activated_ptr = np.int64(gate_up.ctypes.data), np.int64(activated.ctypes.data)
        norm(code, step, at[INPUT_NORM])
        attention(code, step, at, qkv_ptr, attn_ptr)
        linear(code, attn_ptr, at[OUTPUT], at[OUTPUT_BIAS], step.x, rows, attn_size, step.size,
               step.parts)
        feed_forward(code, step, at, gate_up_ptr, activated_ptr)


class FusedLayers:
    """Computes the layers of a model from the addresses of its weights."""

    def __init__(self, model: Qwen3, attention: NumbaAttention) -> None:
        self.model, self.config = model, model.config
        unit, dtype = attention.unit, model.backend.dtype
        dtypes, self.example = (dtype, dtype), DTYPE_EXAMPLE[dtype]
        self.weight_example = DTYPE_EXAMPLE[model.norm.dtype]
        self.code = Code(
            norm=address_for(pointwise.add_rms_norm_rows, *dtypes, model.norm.dtype),
            store=address_for(pointwise.norm_rope_store_rows, *dtypes, model.norm.dtype),
            attend_groups=attention.attend_groups,
            linear=address_for(unit.linear_blocks, *dtypes),
            width=unit.width,
            activation=address_for(pointwise.silu_and_mul_rows, *dtypes),
        )
        self.addresses = self.all_addresses(attention)
        self.compile()

    @staticmethod
    def is_whole(layer: DecoderLayer, width: int) -> bool:
        """Return whether the outputs of the products are whole blocks of `width`."""
        return all(len(module.weight) % width == 0 for module in layer.linears())

    def compile(self) -> None:
        """Compile the kernels that backends/cpu/compile.py does not compile for every model."""

    def all_addresses(self, attention: NumbaAttention) -> np.ndarray:
        layers = zip(self.model.layers, attention.kv_addresses, strict=True)
        return np.array([(*addresses(layer), *kv) for layer, kv in layers], np.int64)

    def forward(self, batch: ForwardBatch, attention: NumbaAttention) -> Tensor:
        """Compute Qwen3.forward. Large steps and steps with torch's attention are left to it."""
        plan = batch.attention_metadata
        model, config = self.model, self.config
        by_torch = plan.chunks or plan.prefixes
        if by_torch or len(batch.input_ids) > PACKED_FOR:
            return model.forward(batch, attention)
        x = F.embedding(batch.input_ids, model.embed_tokens)
        residual = torch.zeros_like(x)
        cos, sin = model.rotary.at(batch.positions)
        tensors = (tensor.data_ptr() for tensor in (x, residual, cos, sin))
        sizes = *x.shape, config.intermediate_size, config.num_heads
        examples = self.example, self.weight_example
        step = (*tensors, *sizes, config.rms_norm_eps, attention.shape, plan.slot_mapping,
                plan.work, *examples, numba.get_num_threads())
        self.decode(Step._make(step), batch)
        return pointwise.add_rms_norm(x, residual, model.norm, config.rms_norm_eps)[0]

    def decode(self, step: Step, batch: ForwardBatch) -> None:
        decode_layers(self.code, step, self.addresses)

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden [R, E] to logits [R, V]."""
        return self.model.logits(hidden)


class UnitLinear:
    """Linear layers by the kernel of a unit, which reads the weights faster than oneDNN does."""

    def __init__(self, model: Qwen3, unit: Unit) -> None:
        self.code = address_for(unit.linear_blocks, unit.linear_dtype, unit.linear_dtype)
        self.width = unit.width
        fits: dict[Any, bool] = {}  # by shape, because confirming a layout takes a product
        # The keys are ids of modules. Modules as keys would form a cycle of references, which keeps
        # the weights in memory: they refer to the backend, and the backend to this object.
        self.addresses: dict[int, int] = {}
        for module in model.linears():
            # A bias is not padded.
            whole = module.bias is None or len(module.weight) % unit.width == 0
            if not isinstance(module.weight, Tensor) or not whole:
                continue
            for pack in (None, repacked):
                weight = pack(module.weight) if pack else module.weight
                key = weight.shape, pack
                if key not in fits:
                    fits[key] = is_packed_by(unit.width, weight)
                if fits[key]:
                    module.weight = weight
                    self.addresses[id(module)] = address(weight)
                    break

    def __call__(self, x: Tensor, module: Linear) -> Tensor:
        weight = self.addresses.get(id(module))
        if weight is None or len(x) > PACKED_FOR:
            return linear_by_torch(x, module)
        x, bias = x.contiguous(), 0 if module.bias is None else module.bias.data_ptr()
        outputs = len(module.weight)
        blocks = -(-outputs // self.width)
        out = x.new_empty((len(x), blocks * self.width))
        arguments = x.data_ptr(), weight, bias, out.data_ptr(), *x.shape, out.shape[1]
        in_parts(self.code, arguments, blocks, numba.get_num_threads())
        return out[:, :outputs].contiguous()  # a copy if the last block is padded


def fuse_layers(
    model: Qwen3, attention: NumbaAttention, layers: type[FusedLayers] | None
) -> FusedLayers | None:
    """Return `layers` of the model, or None if they do not read one of its weights.

    Outside fused layers, the unit computes all products of few rows whose weights it reads.
    """
    unit, dtype = attention.unit, model.backend.dtype
    if unit.linear_dtype is not dtype:
        return None
    model.backend.linear = linear = UnitLinear(model, unit)
    if layers is None or attention.cache.dtype is not dtype:
        return None
    fits = all(id(m) in linear.addresses for layer in model.layers for m in layer.linears())
    fits = fits and all(layers.is_whole(layer, unit.width) for layer in model.layers)
    return layers(model, attention) if fits else None


def pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def addresses(layer: DecoderLayer) -> list[int]:
    """Return the first ten addresses of a layer for decode_layers, with 0 for a missing weight."""
    attn = layer.self_attn
    return [
        pointer(layer.input_layernorm),
        address(attn.qkv_proj.weight),
        pointer(attn.qkv_proj.bias),
        *(pointer(weight) for weight in attn.norms or (None, None)),
        address(attn.o_proj.weight),
        pointer(attn.o_proj.bias),
        *second_half(layer),
    ]


def second_half(layer: DecoderLayer) -> list[int]:
    """Return the addresses for `feed_forward`."""
    mlp = layer.mlp
    return [
        pointer(layer.post_attention_layernorm),
        address(mlp.gate_up_proj.weight),
        address(mlp.down_proj.weight),
    ]
