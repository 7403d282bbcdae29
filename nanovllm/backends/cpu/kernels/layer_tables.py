"""What the kernels of fused_layers.py read: addresses of a layer's weights, and sizes of a step."""

from typing import Any, NamedTuple

import numpy as np

from nanovllm.backends.cpu.kernels.attention import AttentionWork
from nanovllm.backends.cpu.kernels.product import Product

PRODUCTS = "projection", "output", "gate_up", "down"  # in the order of DecoderLayer.linears
# A weight and a layer: the addresses of their tensors, or 0 for those that they lack.
WEIGHT = np.dtype([(name, np.int64) for name in ("values", "scale", "bias")])
ADDRESSES = "input_norm", "post_attention_norm", "q_norm", "k_norm", "k_cache", "v_cache"
OUTPUT_NORMS = "attention_output_norm", "mlp_output_norm"
LINEAR_ATTENTION = "conv1d", "a_log", "dt_bias", "norm"
LAYER = np.dtype(
    [
        *((name, np.int64) for name in (*ADDRESSES, *OUTPUT_NORMS, *LINEAR_ATTENTION)),
        *((name, WEIGHT) for name in PRODUCTS),
        ("k_scale", np.float64),
        ("v_scale", np.float64),
        ("window", np.int64),  # of attention in tokens, or 0
        ("rope", np.int64),  # which of the step's cos and sin
        ("state", np.int64),  # the number of the layer among those of linear attention
    ]
)


class LayerKernels(NamedTuple):
    """The addresses of the kernels of a layer; see backends/cpu/kernels/parallel.py."""

    norm: int  # pointwise.add_rms_norm_rows
    store: int  # pointwise.norm_rope_store_rows
    attend_groups: int  # attention.attend_groups
    activation: int  # pointwise.silu_and_mul_rows or gelu_and_mul_rows
    product: Product


class Step(NamedTuple):
    """Arguments that all layers of a step share. The first nine are addresses."""

    x: int  # [rows, size], the input and the output of each part of a layer
    residual: int  # [rows, size]
    cos: int  # [ropes, rows, D]
    sin: int
    projected: int  # [rows, row_heads D], the queries, keys and values
    mixed: int  # [rows, H D], the result of attention
    gate_up: int  # [rows, 2F]
    activated: int  # [rows, F]
    work: int  # rows that products prepare
    rows: int
    rope_bytes: int  # of the cos of one rope
    size: int
    intermediate_size: int
    num_heads: int
    row_heads: int  # H + 2K or more
    eps: float
    shape: tuple[int, int, int, int]  # of the K cache
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
