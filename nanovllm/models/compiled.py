"""The layers of a decode step, in one call: on a CPU what a CUDA graph is to a GPU.

Owns: the addresses of the weights. Given: the model, once packed, and the CPU's attention backend.
Mutates: the KV cache.

Between two calls from Python all threads but one wait, and so does the memory. And a product of few rows
takes as long as its weights take to read: kernels/cpu.py reads them faster than oneDNN, in whose tiles
they lie.
"""

import numba
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from nanovllm.attention.numba import NumbaAttention
from nanovllm.kernels import cpu
from nanovllm.layers.linear import TOKENS, address, lies_in_tiles
from nanovllm.models.qwen3 import Layer, Qwen3
from nanovllm.runner.batch import ForwardBatch


class CompiledLayers:
    """Made by `compile_layers`."""

    def __init__(self, model: Qwen3, attention: NumbaAttention) -> None:
        self.model = model
        rows = [
            (*addresses(layer), *cache)
            for layer, cache in zip(model.layers, attention.at, strict=True)
        ]
        self.addresses = np.array(rows, np.int64)
        self.head = address(model.head) if lies_in_tiles(model.head) else 0

    def forward(self, batch: ForwardBatch, attention: NumbaAttention) -> Tensor:
        """What model.forward gives; and by it, if there are many rows, or torch has attention to do."""
        step, model, config = batch.attention, self.model, self.model.config
        if step.groups or step.prefixes or len(batch.input_ids) > TOKENS:
            return model.forward(batch, attention)
        x = F.embedding(batch.input_ids, model.embedding)
        residual = torch.zeros_like(x)
        cos, sin = model.rotary.at(batch.positions)
        cpu.layers(
            self.addresses, x.data_ptr(), residual.data_ptr(), *x.shape, cos.data_ptr(),
            sin.data_ptr(), config.intermediate_size, config.num_heads, config.rms_norm_eps,
            attention.shape, step.slots, step.reads, attention.in_tiles, numba.get_num_threads(),
        )  # fmt: skip
        return cpu.add_rms_norm(x, residual, model.norm, config.rms_norm_eps)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, E] -> logits [R, V]."""
        if len(hidden) > TOKENS or not self.head:
            return self.model.logits(hidden)
        rows, size = hidden.shape
        logits = torch.empty((rows, len(self.model.head)), dtype=hidden.dtype)
        cpu.linear(
            hidden.data_ptr(), self.head, 0, logits.data_ptr(), rows, size, logits.shape[1],
            numba.get_num_threads(),
        )  # fmt: skip
        return logits


def compile_layers(model: Qwen3, attention: NumbaAttention) -> CompiledLayers | None:
    """None: the processor has no matrix units, or something does not fit them."""
    weights = {p.weight.shape: p.weight for layer in model.layers for p in layer.products()}
    fits = attention.in_tiles and all(lies_in_tiles(weight) for weight in weights.values())
    return CompiledLayers(model, attention) if fits else None


def addresses(layer: Layer) -> list[int]:
    """As kernels.cpu.layers wants them, but for the cache's."""
    a, mlp = layer.attention, layer.mlp
    return [
        at(layer.attention_norm), address(a.qkv.weight), at(a.qkv.bias), at(a.q_norm), at(a.k_norm),
        address(a.out.weight), at(a.out.bias), at(layer.mlp_norm), address(mlp.gate_up.weight),
        address(mlp.down.weight),
    ]  # fmt: skip


def at(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
