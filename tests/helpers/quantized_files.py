"""Quantized checkpoints, written from the formats' descriptions.

A reference makes random integers and scales, packs them number by number, and returns the weight
for which they stand.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

Tensors = dict[str, torch.Tensor]


def packed_rows(x: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Pack each row of [N, M] into int32, the first number in the lowest bits.

    With an order, position i of each word holds number order[i] of its numbers.
    """
    each = 32 // bits
    words = functional.pad(x.long(), (0, -x.shape[1] % each)).unflatten(1, (-1, each))
    if order is not None:
        words = words[:, :, list(order)]
    total = (words * torch.tensor([1 << (bits * i) for i in range(each)])).sum(2)
    return torch.where(total >= 1 << 31, total - (1 << 32), total).int()


def pack_ones(bits: int) -> int:
    """The word whose numbers are all 1. GPTQ's first version subtracts it from words of zeros."""
    return int(sum(1 << shift for shift in range(0, 32, bits)))


def block_ranges(weight: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, ...]:
    """The least and the largest number of each block, at most and at least 0."""
    outputs, inputs = weight.shape
    padded = functional.pad(weight, (0, -inputs % columns, 0, -outputs % rows))
    blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    return blocks.amin((1, 3)).clamp(max=-1e-6), blocks.amax((1, 3)).clamp(min=1e-6)


def exact(q: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """(q - zero) * scale, rounded once to the dtype of the scales."""
    return ((q.double() - zeros.double()) * scales.double()).to(scales.dtype)


def awq(weight: torch.Tensor, group: int = 32) -> tuple[Tensors, torch.Tensor]:
    low, high = block_ranges(weight, 1, group)
    scales = ((high - low) / 15).half()  # [O, G]
    zeros = (-low / scales).round().clamp(0, 15).long()
    full = scales.repeat_interleave(group, 1), zeros.repeat_interleave(group, 1)
    q = (weight / full[0] + full[1]).round().clamp(0, 15).long()
    interleaved = (0, 2, 4, 6, 1, 3, 5, 7)  # AutoAWQ's order_map
    tensors = {
        "qweight": packed_rows(q.T, 4, interleaved),
        "qzeros": packed_rows(zeros.T, 4, interleaved),
        "scales": scales.T.contiguous(),
    }
    return tensors, exact(q, full[1], full[0])


def gptq(
    weight: torch.Tensor,
    bits: int = 4,
    group: int = 32,
    ordered: bool = False,
    v2: bool = False,
    symmetric: bool = False,
) -> tuple[Tensors, torch.Tensor]:
    inputs = weight.shape[1]
    size = inputs if group == -1 else group
    g_idx = torch.arange(inputs) // size
    if ordered:
        g_idx = g_idx[torch.randperm(inputs)]
    low, high = block_ranges(weight[:, g_idx.argsort(stable=True)], 1, size)
    scales = ((high - low) / ((1 << bits) - 1)).half()
    zeros = (-low / scales).round().clamp(0, (1 << bits) - 1).long()
    zeros[::3] = 0  # the words below borrow from the next number
    if symmetric:
        zeros[:] = 1 << (bits - 1)
    q = (weight / scales[:, g_idx] + zeros[:, g_idx]).round().clamp(0, (1 << bits) - 1).long()
    tensors = {
        "qweight": packed_rows(q, bits).T.contiguous(),
        "qzeros": packed_rows(zeros.T, bits) - (0 if v2 else pack_ones(bits)),
        "scales": scales.T.contiguous(),
        "g_idx": g_idx.int(),
    }
    return tensors, exact(q, zeros[:, g_idx], scales[:, g_idx])


def packed(
    weight: torch.Tensor,
    bits: int = 4,
    group: int = 32,
    symmetric: bool = True,
    ordered: bool = False,
) -> tuple[Tensors, torch.Tensor]:
    """pack-quantized of compressed-tensors: signed integers are stored plus half of their range."""
    outputs, inputs = weight.shape
    half = 1 << (bits - 1)
    g_idx = torch.arange(inputs) // group
    if ordered:
        g_idx = g_idx[torch.randperm(inputs)]
    low, high = block_ranges(weight[:, g_idx.argsort(stable=True)], 1, group)
    scales = (torch.maximum(high, -low) / (half - 1)).bfloat16()
    zeros = torch.zeros(scales.shape, dtype=torch.long)
    if not symmetric:
        scales = ((high - low) / (2 * half - 1)).bfloat16()
        zeros = (-half - low / scales.float()).round().clamp(-half, half - 1).long()
    full = scales[:, g_idx], zeros[:, g_idx]
    q = (weight / full[0].float() + full[1]).round().clamp(-half, half - 1).long()
    tensors = {
        "weight_packed": packed_rows(q + half, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor([outputs, inputs]),
    }
    if not symmetric:
        tensors["weight_zero_point"] = packed_rows((zeros + half).T, bits).T.contiguous()
    if ordered:
        tensors["weight_g_idx"] = g_idx.int()
    return tensors, exact(q, full[1], full[0])


def int8(weight: torch.Tensor, symmetric: bool = True) -> tuple[Tensors, torch.Tensor]:
    """int-quantized of compressed-tensors, one scale for each output."""
    scales = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    zeros = torch.randint(-9, 9, scales.shape) * (not symmetric)
    q = (weight / scales.float() + zeros).round().clamp(-128, 127)
    tensors = {"weight": q.to(torch.int8), "weight_scale": scales}
    if not symmetric:
        tensors["weight_zero_point"] = zeros.to(torch.int8)
    return tensors, exact(q, zeros, scales)


def fp8(
    weight: torch.Tensor,
    block: tuple[int, int],
    name: str = "weight_scale_inv",
    dtype: torch.dtype = torch.float32,
    scalar: bool = False,
) -> tuple[Tensors, torch.Tensor]:
    outputs, inputs = weight.shape
    rows, columns = block
    low, high = block_ranges(weight, rows, columns)
    scales = (torch.maximum(high, -low) / 448).to(dtype)
    full = scales.repeat_interleave(rows, 0)[:outputs].repeat_interleave(columns, 1)[:, :inputs]
    q = (weight / full.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    tensors = {"weight": q, name: scales.reshape(()) if scalar else scales}
    for scale in ("input_scale", "activation_scale"):  # activations are not quantized here
        tensors[scale] = torch.tensor(1.0)
    return tensors, exact(q, torch.zeros(()), full)


def plain(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """A layer that is not quantized."""
    return {"weight": weight}, weight


def scheme(layout: str, bits: int = 8, kind: str = "int", **weights: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "symmetric": True, "observer": "minmax"} | weights
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}


W4 = {"strategy": "group", "group_size": 32}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
AUTO_ROUND = {
    "quant_method": "auto-round",
    "bits": 4,
    "group_size": 32,
    "data_type": "int",
    "packing_format": "auto_round:auto_gptq",
    "extra_config": {"model.layers.0.mlp.gate": {"bits": 16, "data_type": "float"}},
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [32, 16], "activation_scheme": "dynamic"}
FORMATS: dict[str, tuple[dict[str, Any], Callable[..., tuple[Tensors, torch.Tensor]]]] = {
    "fp8 blocks": (FP8_BLOCKS, lambda w: fp8(w, (32, 16))),
    "fp8 bfloat16 scales": (FP8_BLOCKS, lambda w: fp8(w, (32, 16), dtype=torch.bfloat16)),
    "fp8 ragged blocks": (FP8_BLOCKS | {"weight_block_size": [40, 28]}, lambda w: fp8(w, (40, 28))),
    "fp8 tensor": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        lambda w: fp8(w, tuple(w.shape), "weight_scale", scalar=True),
    ),
    "fp8 of Ministral 3": (
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        lambda w: fp8(w, tuple(w.shape), dtype=torch.bfloat16, scalar=True),
    ),
    "modelopt tensor": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 8}},
        lambda w: fp8(w, tuple(w.shape), "weight_scale", scalar=True),
    ),
    "modelopt channel": (
        {"quantization": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "exclude_modules": []}},
        lambda w: fp8(w, (1, w.shape[1]), "weight_scale"),
    ),
    "fbgemm fp8": (
        {"quant_method": "fbgemm_fp8"},
        lambda w: fp8(w, (1, w.shape[1]), "weight_scale"),
    ),
    "compressed fp8": (
        scheme("float-quantized", kind="float", strategy="channel"),
        lambda w: fp8(w, (1, w.shape[1]), "weight_scale", torch.bfloat16),
    ),
    "compressed W8A8": (scheme("int-quantized", strategy="channel"), int8),
    "compressed W8A8 asymmetric": (
        scheme("int-quantized", strategy="channel", symmetric=False),
        lambda w: int8(w, symmetric=False),
    ),
    "compressed W8A16": (scheme("pack-quantized", 8, **W4), lambda w: packed(w, bits=8)),
    "compressed W4A16": (scheme("pack-quantized", 4, **W4), packed),
    "compressed W4A16 asymmetric": (
        scheme("pack-quantized", 4, symmetric=False, **W4),
        lambda w: packed(w, symmetric=False),
    ),
    "compressed W4A16 ordered": (
        scheme("pack-quantized", 4, actorder="group", **W4),
        lambda w: packed(w, ordered=True),
    ),
    "awq": (AWQ, awq),
    "gptq": (GPTQ, gptq),
    "gptq desc_act": (GPTQ | {"desc_act": True}, lambda w: gptq(w, ordered=True)),
    "gptq 8 bits": (GPTQ | {"bits": 8, "group_size": -1}, lambda w: gptq(w, bits=8, group=-1)),
    "gptq symmetric": (GPTQ | {"sym": True}, lambda w: gptq(w, symmetric=True)),
    "gptq dynamic": (
        GPTQ | {"dynamic": {"-:.*self_attn.*": {}, "-:.*head": {}}},
        lambda w: gptq(w) if w.shape[1] == 96 else plain(w),
    ),
    "auto-round gptq": (AUTO_ROUND, lambda w: gptq(w, symmetric=True)),
    "auto-round awq": (AUTO_ROUND | {"packing_format": "auto_round:auto_awq"}, awq),
    "gptq_v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, lambda w: gptq(w, v2=True)),
}


def quantize_checkpoint(path: Path, name: str, shards: int = 1) -> Tensors:
    """Quantize a checkpoint in one of FORMATS. Returns the decoded weights."""
    return quantize_layers(path, *FORMATS[name], shards)


def quantize_layers(
    path: Path,
    config: dict[str, Any],
    encode: Callable[..., tuple[Tensors, torch.Tensor]],
    shards: int = 1,
    suffixes: tuple[str, ...] = ("_proj.weight",),
) -> Tensors:
    """Quantize the tensors with these names. Returns the decoded weights."""
    torch.manual_seed(1)
    stored: Tensors = {}
    decoded: Tensors = {}
    files = sorted(path.glob("*.safetensors"))
    for key, tensor in [item for file in files for item in load_file(file).items()]:
        if key.endswith(suffixes):
            parts, decoded[key] = encode(tensor.float())
            stored |= {f"{key.removesuffix('weight')}{part}": x for part, x in parts.items()}
        else:
            stored[key] = decoded[key] = tensor
    for file in [*files, *path.glob("*.index.json")]:
        file.unlink()
    names = sorted(stored, key=lambda key: key[::-1])  # the tensors of a weight in several shards
    for i in range(shards):
        part = {key: stored[key] for key in names[i::shards]}
        save_file(part, path / f"model-{i + 1:05}-of-{shards:05}.safetensors")
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))
    return decoded
