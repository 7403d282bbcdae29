"""Quantized checkpoints: FP8, compressed-tensors, AWQ and GPTQ, decoded while they are loaded.

All formats store a weight W [O, I] as small numbers, with a scale and maybe a zero point for each
block of them, as quantized_weight.py describes. The formats differ in the names, layouts and
packing of these tensors. `WeightFormat.decoded` gives a view of open safetensors files in which W
has the name of an unquantized weight, such as "model.layers.0.mlp.up_proj.weight". W is computed
when it is read, one weight at a time. A weight of 4 bits can also be read as it is stored, for
backends/int4.py. The shapes of its tensors say how many bits a weight has, and which of the block
sizes in quantization_config. Both may differ between layers. Activations are not quantized.

Formats: https://github.com/vllm-project/compressed-tensors, WQLinear_GEMM of AutoAWQ, QuantLinear
of AutoGPTQ, and `weight_scale_inv` of DeepSeek-V3 (arXiv:2412.19437, section 3.3).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanovllm.features.formats.quantized_weight import (
    ONES,
    QuantizedWeight,
    bits_per_number,
    from_awq_order,
    unpack,
)
from nanovllm.features.formats.tensor_view import DTYPES, TensorView, ViewedTensor, viewed
from nanovllm.utils.json_files import check_field

# The suffixes of the tensors of a weight: numbers, scales, and others.
VALUES = ("weight", "weight_packed", "qweight")
SCALES = ("weight_scale", "weight_scale_inv", "scales")
OTHERS = ("weight_zero_point", "qzeros", "weight_g_idx", "g_idx", "weight_shape")
UNUSED = ("input_scale", "input_zero_point", "input_scale_ub", "activation_scale")
# The supported values of quantization_config for each quant_method, the default first.
CHOICES: dict[str, dict[str, tuple[Any, ...]]] = {
    "fp8": {},
    "fbgemm_fp8": {},
    "modelopt": {"quant_algo": ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")},
    "compressed-tensors": {
        "format": ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
        "transform_config": ({},),
    },
    "awq": {"version": ("gemm", "GEMM")},
    "gptq": {"checkpoint_format": ("gptq", "gptq_v2")},
    "auto-round": {
        "packing_format": ("auto_round:auto_gptq", "auto_round:auto_awq"),
        "data_type": ("int",),
    },
}


@dataclass(frozen=True)
class WeightFormat:
    """The format of the quantized weights of a checkpoint, from its quantization_config."""

    method: str
    blocks: tuple[tuple[int, int], ...]  # (outputs, inputs) that can share a scale; 0 means all
    zero_offset: int  # GPTQ subtracts 1 from each of the packed zero points
    is_ordered: bool = False  # GPTQ's desc_act: the groups of inputs are in g_idx

    @classmethod
    def from_config(cls, config: Mapping[str, Any], path: Path) -> WeightFormat | None:
        """Return the format that the quantization_config of the config.json at `path` names.

        None means that only the KV cache is quantized. Raises ValueError, with the supported
        values, for a format that is not supported.
        """
        inner = check_field(path, "quantization", config.get("quantization") or {}, dict, ())
        config = {**config, **inner}  # ModelOpt's fields are in `quantization`, or beside it
        method = config.get("quant_method") or ("modelopt" if config.get("quant_algo") else None)
        has_weights = config.get("config_groups") or config.get("quant_algo")
        if not has_weights and (method == "modelopt" or config.get("kv_cache_scheme")):
            return None
        if method not in CHOICES:
            raise ValueError(
                f"{path}: quantization_config with quant_method={method!r:.80} is not supported; "
                f"quant_method can be {', '.join(map(repr, CHOICES))}. Load the checkpoint from "
                "which this one was quantized, with quantization='int8' or 'int4'"
            )
        for name, choices in CHOICES[method].items():
            if (value := config.get(name) or choices[0]) not in choices:
                raise ValueError(
                    f"{path}: quantization_config with {name}={value!r:.80} is not supported; "
                    f"{name} can be {', '.join(map(repr, choices))}"
                )
        if method == "auto-round":  # its tensors are the same
            method = "awq" if config.get("packing_format") == "auto_round:auto_awq" else "gptq"
        method = method.replace("modelopt", "fp8")
        groups = (config.get("config_groups") or {}).values()
        schemes = [config, *(group.get("weights") or {} for group in groups)]
        for name in ("dynamic", "extra_config"):  # GPTQ's and AutoRound's exceptions for layers
            schemes += (config.get(name) or {}).values()
        blocks = [(0, 0), (1, 0)]
        for scheme in schemes:
            if block := scheme.get("weight_block_size") or scheme.get("block_structure"):
                blocks.append(tuple(block))
            if size := scheme.get("group_size"):
                blocks.append((1, max(size, 0)))  # -1 means all inputs
        is_first_version = method == "gptq" and config.get("checkpoint_format") != "gptq_v2"
        is_ordered = method == "gptq" and bool(config.get("desc_act"))
        return cls(method, tuple(blocks), int(is_first_version), is_ordered)

    def decoded(self, files: Mapping[Path, Any]) -> dict[Path, Any]:
        """Return views of open safetensors files, in which no weight is quantized."""
        where = {name: file for file in files.values() for name in file.keys()}  # noqa: SIM118
        return {path: TensorView(self._decoded(file, where)) for path, file in files.items()}

    def _decoded(self, file: Any, where: Mapping[str, Any]) -> Iterator[tuple[str, ViewedTensor]]:
        """Yield the tensors of a view. `where` has the file of each tensor of the checkpoint."""
        for name in file.keys():  # noqa: SIM118 (not a dict)
            stem, _, suffix = name.rpartition(".")
            weight = f"{stem}.weight"
            if suffix == "weight" and has_eight_bits(file, name):
                yield weight, self._viewed(weight, where)
            elif suffix in ("weight_packed", "qweight"):
                yield weight, self._viewed(weight, where, is_packed=True)
            elif suffix == "bias" and f"{stem}.qweight" in where:
                if file.get_tensor(name).any():  # AutoGPTQ adds zeros to layers without a bias
                    yield name, viewed(file, name)
            # The scales of a weight that is not quantized are refused by their names.
            elif suffix not in SCALES + OTHERS + UNUSED or (
                suffix in SCALES and weight in where and not has_eight_bits(where[weight], weight)
            ):
                yield name, viewed(file, name)

    def _viewed(self, name: str, where: Mapping[str, Any], is_packed: bool = False) -> ViewedTensor:
        """Return a quantized weight, which has the dtype of its scales."""

        def read(header_only: bool = False) -> QuantizedWeight:
            return self.read(name, read_parts(name, where, header_only))

        header = read(header_only=True)
        dtype = DTYPES.get(header.scales.dtype, str(header.scales.dtype))
        tensor = ViewedTensor([*header.values.shape], dtype, lambda: read().dequantized())
        return tensor._replace(read_packed=read) if is_packed else tensor

    def read(self, name: str, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        """Return the weight `name` that is stored as `tensors` (suffix -> tensor).

        Raises ValueError if a tensor is missing, or if their shapes do not fit together.
        """

        def need(*suffixes: str) -> Tensor:
            for suffix in suffixes:
                if suffix in tensors:
                    return tensors[suffix]
            raise ValueError(
                f"{name} has no {' or '.join(suffixes)}, which quant_method={self.method!r} needs; "
                "fetch the checkpoint again"
            )

        zeros: Tensor | int
        if "qweight" in tensors:
            values, scales, zeros = tensors["qweight"], need("scales").T, need("qzeros")
            bits = bits_per_number(name, zeros.shape[1], len(scales))
            zeros = unpack(zeros + self.zero_offset * ONES[bits], bits)  # [G, O]
            if self.method == "awq":  # [I, O / 8]
                values = from_awq_order(unpack(values, bits)).T
                zeros = from_awq_order(zeros)
            else:  # [I * bits / 32, O]
                values = unpack(values.T.contiguous(), bits)
            zeros = zeros.T
        elif "weight_packed" in tensors:
            values, scales = tensors["weight_packed"], need("weight_scale")
            outputs, inputs = need("weight_shape").tolist()
            bits = bits_per_number(name, values.shape[1], inputs)
            values = unpack(values, bits)[:outputs, :inputs]
            zeros = 1 << (bits - 1)
            if "weight_zero_point" in tensors:
                zeros = unpack(tensors["weight_zero_point"].T.contiguous(), bits).T[:outputs]
        else:
            values, scales = tensors["weight"], need("weight_scale", "weight_scale_inv")
            zeros = tensors.get("weight_zero_point", 0)
        outputs, inputs = values.shape
        parts = [x for x in (scales, zeros) if isinstance(x, Tensor)]
        for block in self.blocks:
            rows, columns = block[0] or outputs, block[1] or inputs
            shape = -(-outputs // rows), -(-inputs // columns)
            if all(x.shape == shape or (shape[1] == 1 and x.numel() == shape[0]) for x in parts):
                break
        else:
            shapes = " and zeros of ".join(str(list(x.shape)) for x in parts)
            raise ValueError(
                f"{name} {list(values.shape)} has scales of shape {shapes}, which fit no block of "
                f"quantization_config: {', '.join(map(str, self.blocks))} (0 means all)"
            )
        groups = torch.arange(inputs) // columns
        order = need("g_idx") if self.is_ordered else tensors.get("g_idx")
        order = tensors.get("weight_g_idx", order)
        if order is not None and not (order == -1).any():  # compressed-tensors: -1 is no order
            groups = order.long()
        zeros = zeros if isinstance(zeros, int) else zeros.reshape(shape)
        return QuantizedWeight(values, scales.reshape(shape), zeros, rows, groups)


def read_parts(name: str, where: Mapping[str, Any], header_only: bool) -> dict[str, Tensor]:
    """Return the tensors of a quantized weight, by suffix.

    With `header_only`, the tensor of its values is on the meta device.
    """
    tensors = {}
    for suffix in (*VALUES, *SCALES, *OTHERS):
        part = f"{name.removesuffix('weight')}{suffix}"
        if (file := where.get(part)) is None:
            continue
        if header_only and suffix in VALUES:
            shape = file.get_slice(part).get_shape()
            tensors[suffix] = torch.empty(shape, dtype=torch.int32, device="meta")
        else:
            tensors[suffix] = file.get_tensor(part)
    return tensors


def has_eight_bits(file: Any, name: str) -> bool:
    """Return whether a tensor of an open file has numbers of 8 bits."""
    return file.get_slice(name).get_dtype()[:2] in ("F8", "I8")
