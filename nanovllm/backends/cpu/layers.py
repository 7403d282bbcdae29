"""The layers of a decode step in one call: on a CPU, what a CUDA graph is on a GPU.

Between two calls from Python only one thread works and the memory is idle. A product with few rows
takes as long as reading its weights, and cpu/amx.py and cpu/avx512.py read them faster than oneDNN
does. With AMX and 16 sequences at Qwen3-0.6B's shape a step took 88 ms layer by layer and 72 ms in
one call.
"""

import numba
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from nanovllm.backends.cpu import decode, kernels, packs
from nanovllm.backends.cpu.attention import NumbaAttention
from nanovllm.backends.cpu.kernels import add_rms_norm
from nanovllm.backends.cpu.linear import PACKED_FOR, address, is_packed_by
from nanovllm.backends.cpu.parallel import in_parts
from nanovllm.models.batch import ForwardBatch
from nanovllm.models.qwen3 import DecoderLayer, Qwen3


class FusedLayers:
    """It has the model's `forward` and `logits`, and owns the addresses of its weights."""

    def __init__(self, model: Qwen3, attention: NumbaAttention) -> None:
        self.model, unit = model, attention.unit
        self.code = decode.Code(
            norm=attention.code[kernels.add_rms_norm_rows],
            store=attention.code[kernels.norm_rope_store_rows],
            packs=attention.code[unit.attend_packs],
            linear=attention.code[unit.linear_blocks],
            width=unit.WIDTH,
            activation=attention.code[kernels.silu_and_mul_rows],
        )
        layers = zip(model.layers, attention.kv_addresses, strict=True)
        self.addresses = np.array([(*addresses(layer), *kv) for layer, kv in layers], np.int64)
        head = model.lm_head.weight
        self.head = address(head) if is_packed_by(unit.WIDTH, head) else 0

    def forward(self, batch: ForwardBatch, attention: NumbaAttention) -> Tensor:
        """Same as Qwen3.forward, which runs large steps and those that need torch's attention."""
        step, model, config = batch.attention, self.model, self.model.config
        by_torch = step.prompts or step.chunks or step.prefixes
        if by_torch or len(batch.input_ids) > PACKED_FOR:
            return model.forward(batch, attention)
        x = F.embedding(batch.input_ids, model.embed_tokens)
        residual = torch.zeros_like(x)
        cos, sin = model.rotary.at(batch.positions)
        eps, threads = config.rms_norm_eps, numba.get_num_threads()
        tensors = (x.data_ptr(), residual.data_ptr(), *x.shape, cos.data_ptr(), sin.data_ptr())
        sizes = (config.intermediate_size, config.num_heads, eps, attention.shape)
        work = (step.slot_mapping, step.work, threads)
        decode.decode_layers(self.code, self.addresses, *tensors, *sizes, *work)
        return add_rms_norm(x, residual, model.norm, eps)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, E] -> logits [R, V]."""
        if len(hidden) > PACKED_FOR or not self.head:
            return self.model.logits(hidden)
        vocab_size = self.model.config.vocab_size
        logits = hidden.new_empty((len(hidden), vocab_size))
        pointers = (hidden.data_ptr(), self.head, 0, logits.data_ptr())
        arguments, blocks = (*pointers, *hidden.shape, vocab_size), vocab_size // self.code.width
        in_parts(self.code.linear, arguments, blocks, numba.get_num_threads())
        return logits


def fuse_layers(model: Qwen3, attention: NumbaAttention) -> FusedLayers | None:
    """Return None if the processor lacks the instructions or a weight does not have the layout."""
    if attention.unit is packs:
        return None
    weights = {m.weight.shape: m.weight for layer in model.layers for m in layer.linears()}
    fits = all(is_packed_by(attention.unit.WIDTH, weight) for weight in weights.values())
    return FusedLayers(model, attention) if fits else None


def addresses(layer: DecoderLayer) -> list[int]:
    """The first ten addresses of a layer for decode.decode_layers; 0 without a weight."""
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
