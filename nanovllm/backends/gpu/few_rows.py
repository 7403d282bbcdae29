"""The layers of a decode step with 1, 2 or 4 rows in five launches each, instead of ten.

The kernels and their rules are in backends/gpu/kernels/few_rows.py. They compute Qwen3's layer in
half precision, with weights in the dtype of the model or in int8, if registers hold them: of models
as large as Qwen3-0.6B. The products of larger models take much longer than what is between them.
All other models and steps are computed by models/qwen3.py.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nanovllm.backends.gpu.attention import TritonAttention
from nanovllm.backends.gpu.kernels import few_rows
from nanovllm.backends.gpu.kernels.few_rows import Target
from nanovllm.backends.int8 import Int8Weight
from nanovllm.models.batch import ForwardBatch
from nanovllm.models.layers import Linear, Rope
from nanovllm.models.qwen3 import DecoderLayer, Qwen3

SIZES = 1, 2, 4  # rows; DecodeGraphs captures these sizes
MIN_CAPABILITY = (8, 0)


class FusedLayers:
    """Computes `forward` and `logits` of a model."""

    def __init__(self, model: Qwen3, target: Target) -> None:
        self.model, self.target = model, target
        self.logits = model.logits

    def forward(self, batch: ForwardBatch, attention: TritonAttention) -> Tensor:
        """Compute Qwen3.forward. It computes steps with chunks or other numbers of rows itself."""
        model, rows = self.model, len(batch.input_ids)
        if rows not in SIZES or rows != batch.num_decodes:
            return model.forward(batch, attention)
        x, rope = model.embed_tokens[batch.input_ids], model.rotary.at(batch.positions)
        for i, layer in enumerate(model.layers):
            self.decode_layer(x, i, layer, rope, batch, attention)
        eps = model.config.rms_norm_eps
        return model.backend.add_rms_norm(x, None, model.norm, eps)[0]

    def decode_layer(
        self, x: Tensor, i: int, layer: DecoderLayer, rope: Rope, batch: ForwardBatch,
        attention: TritonAttention,
    ) -> None:  # fmt: skip
        """Change the hidden states x [T, E] as the layer does."""
        attn, mlp, eps, target = layer.self_attn, layer.mlp, layer.eps, self.target
        assert attn.norms is not None

        def empty(module: Linear, parts: int = 1) -> Tensor:
            return x.new_empty((len(x), module.weight.shape[0] // parts))

        qkv = few_rows.linear(
            x, attn.qkv_proj.weight, empty(attn.qkv_proj), target, layer.input_layernorm, eps
        )
        splits = few_rows.attend(
            qkv, *attn.norms, eps, *rope, batch.slot_mapping, batch.context_lens,
            batch.block_tables, *attention.layers[i], attention.decode_tile, target,
            *attention.scales[i],
        )  # fmt: skip
        few_rows.linear(splits, attn.o_proj.weight, x, target, add=True)
        norm, out = layer.post_attention_layernorm, empty(mlp.gate_up_proj, 2)
        few_rows.linear(x, mlp.gate_up_proj.weight, out, target, norm, eps, silu=True)
        few_rows.linear(out, mlp.down_proj.weight, x, target, add=True)


def padding_batch(size: int, device: torch.device) -> ForwardBatch:
    """Return a decode step of `size` padding rows: token 0 at slot 0 of the null block."""
    zeros = torch.zeros(size, dtype=torch.int64, device=device)
    starts = torch.arange(size + 1, dtype=torch.int32, device=device)
    tables = torch.zeros((size, 1), dtype=torch.int32, device=device)
    lens = np.ones(size, np.int64)
    tokens = zeros, zeros, zeros
    return ForwardBatch(*tokens, starts, zeros + 1, tables, zeros, lens, num_decodes=size)


def fuse_layers(model: Qwen3, attention: TritonAttention) -> FusedLayers | None:
    """Return None if the model or the GPU is not one that the kernels serve."""
    config, device = model.config, model.backend.device
    is_nvidia = device.type == "cuda" and not torch.version.hip
    if (
        type(model) is not Qwen3
        or model.backend.dtype == torch.float32
        or not config.qk_norm
        or config.head_dim & (config.head_dim - 1)
        or not all(is_served(layer) for layer in model.layers)
        or (is_nvidia and torch.cuda.get_device_capability(device) < MIN_CAPABILITY)
    ):
        return None
    fused = FusedLayers(model, Target.of(device))
    if device.type == "cuda":  # compile the kernels before requests are served
        for size in SIZES:
            fused.forward(padding_batch(size, device), attention)
    return fused


def is_served(layer: DecoderLayer) -> bool:
    """Whether the kernel can compute the products of a layer."""
    for module in layer.linears():
        outputs, inputs = module.weight.shape
        is_known = isinstance(module.weight, (Tensor, Int8Weight))
        if not is_known or module.bias is not None or outputs % 32 or inputs % 16:
            return False
    qkv, o, gate_up, down = (module.weight for module in layer.linears())
    fits = few_rows.fits
    return fits(qkv, has_norm=True) and fits(o) and fits(gate_up, silu=True) and fits(down)
