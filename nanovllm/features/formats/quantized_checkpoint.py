"""Quantized checkpoints: FP8, compressed-tensors, AWQ and GPTQ, decoded while they are loaded.

All formats store a weight W [O, I] as small numbers, with a scale for each block of them, and in
some formats a zero point for each block:

    W[o, i] = (values[o, i] - zeros[b, g]) * scales[b, g]     b = o // rows, g = groups[i]

The formats differ in the names, layouts and packing of these tensors. `WeightFormat.decoded` gives
a view of open safetensors files in which W has the name of an unquantized weight, such as
"model.layers.0.mlp.up_proj.weight". W is computed when it is read, one weight at a time. Layers
that the checkpoint leaves unquantized stay as they are. Activations are not quantized. A weight
of 4 bits can also be read as it is stored, for backends/int4.py.

Formats: https://github.com/vllm-project/compressed-tensors, WQLinear_GEMM of AutoAWQ, QuantLinear
of AutoGPTQ, and `weight_scale_inv` of DeepSeek-V3 (arXiv:2412.19437, section 3.3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

# The suffixes of the tensors of a weight: numbers, scales, and others.
VALUES = ("weight", "weight_packed", "qweight")
SCALES = ("weight_scale", "weight_scale_inv", "scales")
ZEROS = ("weight_zero_point", "qzeros")
OTHERS = (
    "weight_g_idx",
    "g_idx",
    "weight_shape",
    "input_scale",
    "input_zero_point",
    "input_scale_ub",
)
DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
}
METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors", "awq", "gptq", "auto-round")
# The packing formats of AutoRound, and the methods whose tensors are the same.
AUTO_ROUND = {
    "auto_round:auto_gptq": "gptq",
    "auto_round:auto_awq": "awq",
}
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the position of output 0, 1, 2, ... of each eight


@dataclass(frozen=True)
class QuantizedWeight:
    """The tensors of one weight [O, I], in the same layout for all formats."""

    values: Tensor  # [O, I], integers or float8_e4m3fn
    scales: Tensor  # [O / rows, G]
    zeros: Tensor | int  # as `scales`
    rows: int  # consecutive outputs that share a scale
    groups: Tensor  # [I] int64, the column of `scales` for each input

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def dequantized(self) -> Tensor:
        """Return the weight [O, I] in the dtype of the scales, rounded once."""
        zeros = self.zeros if isinstance(self.zeros, int) else self._expand(self.zeros)
        weight = (self.values.float() - zeros) * self._expand(self.scales)
        return weight.to(self.scales.dtype).contiguous()  # AWQ stores the transpose

    def __getitem__(self, index: Tensor | tuple[slice, ...]) -> QuantizedWeight:
        """Return rows, and columns if there are two slices, of a weight with rows = 1."""
        rows, columns = (*index, slice(None))[:2] if isinstance(index, tuple) else (index, ...)
        zeros = self.zeros if isinstance(self.zeros, int) else self.zeros[rows]
        values, groups = self.values[rows, columns], self.groups[columns]
        return QuantizedWeight(values, self.scales[rows], zeros, self.rows, groups)

    def int4_groups(self) -> tuple[Tensor, Tensor] | None:
        """Return values [O, I / 32, 32] int8 from -8 to 7 and scales [O, I / 32] float16.

        Returns None if the weight has zero points, groups that are no multiples of 32 consecutive
        inputs, or scales that float16 does not represent. Then it has to be quantized again.
        """
        scales = self.scales.half()
        is_symmetric = bool((torch.as_tensor(self.zeros) == 8).all())
        if len(self.groups) % 32 or not is_symmetric or not torch.equal(scales, self.scales):
            return None
        groups = self.groups.unflatten(0, (-1, 32))
        if (groups != groups[:, :1]).any():
            return None
        values = (self.values.to(torch.int8) - 8).unflatten(1, (-1, 32))
        return values, scales[:, groups[:, 0]]

    def _expand(self, blocks: Tensor) -> Tensor:
        """Repeat the numbers of blocks [O / rows, G] -> [O, I] float32."""
        rows = blocks.float().repeat_interleave(self.rows, dim=0)[: len(self.values)]
        return rows[:, self.groups]


@dataclass(frozen=True)
class WeightFormat:
    """The format of the quantized weights of a checkpoint, from its quantization_config."""

    method: str
    bits: int
    block: tuple[int, int]  # (outputs, inputs) that share a scale; 0 means all
    has_order: bool = False  # whether a g_idx must say which inputs form a group
    zero_offset: int = 0  # GPTQ subtracts 1 from each of the packed zero points

    @classmethod
    def from_config(cls, config: Mapping[str, Any], path: Path) -> WeightFormat:
        """Return the format that the quantization_config of the config.json at `path` names.

        Raises ValueError, with the supported values, for a format that is not supported.
        """

        def choose(fields: Mapping[str, Any], name: str, *choices: Any, default: Any = None) -> Any:
            value = default if fields.get(name) is None else fields[name]
            if value not in choices:
                raise ValueError(
                    f"{path}: quantization_config with {name}={value!r:.80} is not supported; "
                    f"{name} can be {', '.join(map(repr, choices))}"
                )
            return value

        def size(fields: Mapping[str, Any], name: str) -> int:
            """Return a number of inputs that share a scale; -1 means all inputs."""
            value = fields.get(name)
            if not isinstance(value, int) or (value < 1 and value != -1):
                raise ValueError(
                    f"{path}: {name}={value!r:.80} in quantization_config must be a whole number "
                    "of inputs, or -1 for all"
                )
            return max(value, 0)

        method = config.get("quant_method")
        if method not in METHODS:
            is_mlx = method is None and {"group_size", "bits"} <= config.keys()
            named = "in the format of MLX" if is_mlx else f"with quant_method={method!r:.80}"
            raise ValueError(
                f"{path}: quantization_config {named} is not supported; quant_method can be "
                f"{', '.join(map(repr, METHODS))}. Load the checkpoint from which this one was "
                "quantized, with quantization='int8' or 'int4' to quantize it while loading"
            )
        if method == "auto-round":
            config, method = _auto_round(config, path, choose)
        if method == "awq":
            choose(config, "version", "gemm", "GEMM", default="gemm")
            return cls(method, choose(config, "bits", 4), (1, size(config, "group_size")))
        if method == "gptq":
            bits, block = choose(config, "bits", 4, 8), (1, size(config, "group_size"))
            if any(not str(rule).startswith("-:") for rule in config.get("dynamic") or {}):
                raise ValueError(
                    f"{path}: quantization_config with dynamic={config['dynamic']!r:.200} is not "
                    "supported; its rules can only leave out layers, and begin with '-:'"
                )
            layout = choose(config, "checkpoint_format", "gptq", "gptq_v2", default="gptq")
            return cls(method, bits, block, bool(config.get("desc_act")), int(layout == "gptq"))
        if method == "compressed-tensors":
            return cls(method, *_scheme(config, path, choose, size))
        choose(config, "fmt", "e4m3", "float8_e4m3fn", default="e4m3")
        sizes = config.get("weight_block_size")
        if sizes is None:
            return cls(method, 8, (0, 0) if method == "fp8" else (1, 0))
        if not isinstance(sizes, list) or len(sizes) != 2:
            raise ValueError(f"{path}: weight_block_size must be two numbers, not {sizes!r:.80}")
        rows, columns = ({"weight_block_size": value} for value in sizes)
        return cls(method, 8, (size(rows, *rows), size(columns, *columns)))

    def decoded(self, files: Mapping[Path, Any]) -> dict[Path, DecodedFile]:
        """Return views of open safetensors files, in which no weight is quantized.

        Raises ValueError if there is no quantized weight, or a scale without a weight.
        """
        where = {name: file for file in files.values() for name in file.keys()}  # noqa: SIM118
        views = {path: DecodedFile(self, file, where) for path, file in files.items()}
        stems = {stem for view in views.values() for stem in view.quantized.values()}
        directory = next(iter(files)).parent
        if not stems:
            raise ValueError(
                f"{directory} has no quantized weights, and its config.json has a "
                f"quantization_config for {self.method!r}; remove quantization_config"
            )
        for stem, _, suffix in (name.rpartition(".") for name in where):
            if suffix in SCALES and stem not in stems:
                raise ValueError(
                    f"{directory} has {stem}.{suffix} without the quantized weight; fetch the "
                    "checkpoint again"
                )
        return views

    def read(self, name: str, get: Callable[[str], Tensor | None]) -> QuantizedWeight:
        """Return the weight `name`. `get` returns the tensor with a suffix, if there is one.

        Raises ValueError if a tensor is missing, or if their shapes do not fit together.
        """

        def need(*suffixes: str) -> Tensor:
            for suffix in suffixes:
                if (tensor := get(suffix)) is not None:
                    return tensor
            raise ValueError(
                f"{name} has no {' or '.join(suffixes)}, which quant_method={self.method!r} needs; "
                "fetch the checkpoint again"
            )

        zeros: Tensor | int = 0
        order = get("g_idx")
        if self.method in ("awq", "gptq"):
            values, scales = need("qweight"), need("scales").T
            ones = {4: 0x11111111, 8: 0x01010101}[self.bits]  # added to words, so that they borrow
            zeros = unpack(need("qzeros") + self.zero_offset * ones, self.bits)  # [G, O]
            if self.method == "awq":  # [I, O / 8]
                values = _from_awq_order(unpack(values, self.bits)).T
                zeros = _from_awq_order(zeros)
            else:  # [I * bits / 32, O]
                values = unpack(values.T.contiguous(), self.bits)
            zeros = zeros.T
        elif (packed := get("weight_packed")) is not None:
            outputs, inputs = need("weight_shape").tolist()
            values = unpack(packed, self.bits)[:outputs, :inputs]
            scales, zeros = need("weight_scale"), 1 << (self.bits - 1)
            if (stored := get("weight_zero_point")) is not None:
                zeros = unpack(stored.T.contiguous(), self.bits).T[:outputs]
            order = get("weight_g_idx")
        else:
            values, scales = need("weight"), need("weight_scale", "weight_scale_inv")
            if (stored := get("weight_zero_point")) is not None:
                zeros = stored
        if self.has_order and order is None:
            raise ValueError(
                f"{name} has no g_idx, which the activation order (desc_act, actorder) of "
                "quantization_config needs; fetch the checkpoint again"
            )
        return self._checked(name, values, scales, zeros, order)

    def _checked(
        self, name: str, values: Tensor, scales: Tensor, zeros: Tensor | int, order: Tensor | None
    ) -> QuantizedWeight:
        outputs, inputs = values.shape
        rows, columns = self.block[0] or outputs, self.block[1] or inputs
        shape = (-(-outputs // rows), -(-inputs // columns))
        if shape[1] == 1 and scales.numel() == shape[0]:  # of any number of dimensions
            scales = scales.reshape(shape)
            zeros = zeros if isinstance(zeros, int) else zeros.reshape(shape)
        if scales.shape != shape or (not isinstance(zeros, int) and zeros.shape != shape):
            zero_shape = "" if isinstance(zeros, int) else f" and zeros of {list(zeros.shape)}"
            raise ValueError(
                f"{name} of shape {list(values.shape)} in blocks of {rows} x {columns} needs "
                f"scales of shape {list(shape)}, not {list(scales.shape)}{zero_shape}; the "
                "quantization_config of config.json is not the one of these weights"
            )
        groups = torch.arange(inputs) // columns
        if order is not None and not (order == -1).any():  # compressed-tensors: -1 is no order
            groups = order.long()
        if groups.shape != (inputs,) or not 0 <= int(groups.min()) <= int(groups.max()) < shape[1]:
            raise ValueError(
                f"the g_idx of {name} must have a group from 0 to {shape[1] - 1} for each of "
                f"{inputs} inputs; fetch the checkpoint again"
            )
        return QuantizedWeight(values, scales, zeros, rows, groups)


class Header(NamedTuple):
    """The header of a decoded tensor, with the methods of safetensors."""

    shape: list[int]
    dtype: str

    def get_shape(self) -> list[int]:
        return self.shape

    def get_dtype(self) -> str:
        return self.dtype


class DecodedFile:
    """A view of an open safetensors file, with the methods that loading uses."""

    def __init__(self, weight_format: WeightFormat, file: Any, where: Mapping[str, Any]) -> None:
        """`where` maps the names of all tensors of the checkpoint to their files."""
        self.format, self.file, self.where = weight_format, file, where
        self.quantized: dict[str, str] = {}  # name of a decoded weight -> prefix of its tensors
        self.others: list[str] = []  # names of tensors that stay as they are
        for name in file.keys():  # noqa: SIM118 (not a dict)
            stem, _, suffix = name.rpartition(".")
            is_plain = suffix == "weight" and file.get_slice(name).get_dtype()[:2] not in (
                "F8",
                "I8",
            )
            if suffix in VALUES and not is_plain:
                self.quantized[f"{stem}.weight"] = stem
            elif (
                suffix == "bias" and f"{stem}.qweight" in where and not file.get_tensor(name).any()
            ):
                pass  # AutoGPTQ adds zeros to layers without a bias
            elif suffix not in SCALES + ZEROS + OTHERS:
                self.others.append(name)

    def keys(self) -> list[str]:
        return [*self.quantized, *self.others]

    def get_slice(self, name: str) -> Any:
        """Return an object with the methods get_shape and get_dtype."""
        if name not in self.quantized:
            return self.file.get_slice(name)
        weight = self.read(name, header_only=True)
        dtype = next(n for n, dtype in DTYPES.items() if dtype == weight.scales.dtype)
        return Header(list(weight.values.shape), dtype)

    def get_tensor(self, name: str) -> Tensor:
        """Return a tensor, in the dtype of its scales if it is decoded."""
        if name not in self.quantized:
            tensor: Tensor = self.file.get_tensor(name)
            return tensor
        return self.read(name).dequantized()

    def get_int4(self, name: str) -> QuantizedWeight | None:
        """Return a weight of 4 bits without decoding it, or None for other tensors."""
        return self.read(name) if name in self.quantized and self.format.bits == 4 else None

    def read(self, name: str, header_only: bool = False) -> QuantizedWeight:
        """Return a quantized weight, or the shapes of its large tensors (on the meta device)."""

        def get(suffix: str) -> Tensor | None:
            part = f"{self.quantized[name]}.{suffix}"
            if (file := self.where.get(part)) is None:
                return None
            header = file.get_slice(part)
            if header_only and suffix in VALUES + SCALES + ZEROS:
                if (dtype := DTYPES.get(header.get_dtype())) is None:
                    raise ValueError(
                        f"{part} has the dtype {header.get_dtype()}, which is not supported; its "
                        f"dtype can be {', '.join(DTYPES)}"
                    )
                return torch.empty(header.get_shape(), dtype=dtype, device="meta")
            tensor: Tensor = file.get_tensor(part)
            return tensor

        return self.format.read(name, get)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Unpack int32 [N, M] -> uint8 [N, M * 32 / bits]. The lowest bits are the first number."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)
    return (packed[:, :, None] >> shifts & (1 << bits) - 1).to(torch.uint8).flatten(1)


def _from_awq_order(x: Tensor) -> Tensor:
    """Sort the columns of unpacked numbers [N, M], which AWQ interleaves in each eight."""
    return x.unflatten(1, (-1, 8))[:, :, AWQ_ORDER].flatten(1)


def _auto_round(
    config: Mapping[str, Any], path: Path, choose: Callable[..., Any]
) -> tuple[dict[str, Any], str]:
    """Return the quantization_config of AutoGPTQ or AutoAWQ for the tensors of AutoRound.

    Layers whose extra_config has 16 or more bits are not quantized.
    """
    choose(config, "data_type", "int", default="int")
    packing = choose(config, "packing_format", *AUTO_ROUND, default="auto_round:auto_gptq")
    for name, fields in (config.get("extra_config") or {}).items():
        for field in ("bits", "group_size"):
            value = fields.get(field, config.get(field))
            if fields.get("bits", 0) < 16 and value != config.get(field):
                raise ValueError(
                    f"{path}: quantization_config with {field}={value!r} for {name} and "
                    f"{config.get(field)!r} for other layers is not supported; all quantized "
                    "layers must have the same"
                )
    method = AUTO_ROUND[packing]
    return {"bits": config.get("bits"), "group_size": config.get("group_size")}, method


def _scheme(
    config: Mapping[str, Any], path: Path, choose: Callable[..., Any], size: Callable[..., int]
) -> tuple[int, tuple[int, int], bool]:
    """Return bits, block and has_order of a compressed-tensors checkpoint."""
    sparsity = config.get("sparsity_config") or {}
    if sparsity.get("format") not in (None, "dense"):
        raise ValueError(
            f"{path}: the weights are stored as sparse tensors (sparsity_config with the format "
            f"{sparsity['format']!r:.80}), which is not supported; use a checkpoint without "
            "sparsity_config, such as the model from which this one was made"
        )
    layouts = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")
    layout = choose(config, "format", *layouts)
    choose(config, "transform_config", {}, default={})
    groups = (config.get("config_groups") or {}).values()
    names = ("num_bits", "type", "strategy", "group_size", "block_structure", "actorder")
    schemes = [{n: (group.get("weights") or {}).get(n) for n in names} for group in groups]
    if not schemes or any(scheme != schemes[0] for scheme in schemes):
        raise ValueError(
            f"{path}: the config_groups of quantization_config must have one scheme for all "
            f"layers, not {schemes!r:.200}"
        )
    scheme = schemes[0]
    bits = choose(scheme, "num_bits", *((4, 8) if layout == "pack-quantized" else (8,)))
    match choose(scheme, "strategy", "tensor", "channel", "group", "block"):
        case "tensor":
            block = 0, 0
        case "channel":
            block = 1, 0
        case "group":
            block = 1, size(scheme, "group_size")
        case _:
            rows, columns = scheme["block_structure"] or (128, 128)
            block = size({"rows": rows}, "rows"), size({"columns": columns}, "columns")
    order = choose(scheme, "actorder", None, "group", "dynamic", "weight", "static", True, False)
    return bits, block, order in ("group", "dynamic", True)
