"""HybridConfig: the fields of the config.json of Qwen3.5 and Qwen3.5-MoE, and their tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.config import EngineConfig
from nanovllm.features.models.moe.moe_config import Experts
from nanovllm.features.models.text_config import TextConfig
from nanovllm.models.model_config import FULL
from nanovllm.utils.json_files import Fields, check_field

if TYPE_CHECKING:
    from nanovllm.features.models.hybrid.qwen3_5 import Qwen3_5

LINEAR = "linear_attention"
SIZES: Fields = {
    f"linear_{name}": (int, (1, 2**20))
    for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
}
KERNEL_SIZE = 4  # tokens that the convolution reads


@dataclass(frozen=True)
class HybridConfig(TextConfig):
    """A ModelConfig with layers of linear attention.

    A full layer attends to a KV cache, as in other models. A linear layer reads and writes a state
    of fixed size: Hk key heads of Dk numbers, and Hv value heads of Dv numbers.
    """

    layer_types: tuple[str, ...] = ()  # LINEAR or FULL, for each layer
    linear_num_key_heads: int = 0  # Hk
    linear_num_value_heads: int = 0  # Hv
    linear_key_head_dim: int = 0  # Dk
    linear_value_head_dim: int = 0  # Dv
    experts: Experts | None = None  # of Qwen3.5-MoE, in every layer

    @classmethod
    def from_json(cls, raw: dict[str, Any], path: Path) -> HybridConfig:
        """Create a HybridConfig. Raises ValueError for missing or unsupported fields."""
        fields = raw | dict.fromkeys(("layer_types", "use_sliding_window"))
        experts = None
        if any("Moe" in str(name) for name in raw.get("architectures") or []):
            experts = Experts.from_json(raw, path, normalized=True, shared=True)
            fields["intermediate_size"] = 1  # no layer has such an MLP
        base = super().from_json(fields, path)
        assert isinstance(base, HybridConfig)
        sizes = {}
        for name, (kind, limits) in SIZES.items():
            if raw.get(name) is None:
                raise ValueError(f"{path} has no {name!r}")
            sizes[name] = check_field(path, name, raw[name], kind, limits)
        config = replace(
            base,
            layer_types=_layer_types(raw, base.num_layers, path),
            experts=experts,
            **sizes,
        )
        if (size := raw.get("linear_conv_kernel_dim", KERNEL_SIZE)) != KERNEL_SIZE:
            raise ValueError(
                f"{path}: linear_conv_kernel_dim {size!r} is not supported; only {KERNEL_SIZE} is, "
                "the number of all released models"
            )
        if (dim := config.linear_key_head_dim) % 4:
            raise ValueError(f"{path}: linear_key_head_dim {dim} is no multiple of 4")
        return config

    def check_options(self, config: EngineConfig) -> None:
        one_device = "are kept on one device only"
        for value, option, reason in (
            (config.tensor_parallel_size > 1, "tensor_parallel_size", one_device),
            (config.swap_space, "swap_space", one_device),
            (config.max_drafts, "speculative_config", "cannot be taken back to an earlier token"),
        ):
            if value:
                raise ValueError(
                    f"{self.architecture} does not support {option}, because the states of its "
                    f"linear attention {reason}; leave {option} out"
                )

    def model_class(self) -> type[Qwen3_5]:
        from nanovllm.features.models.hybrid.qwen3_5 import Qwen3_5

        return Qwen3_5

    @property
    def kv_layers(self) -> list[int]:
        """The indices of the layers with a KV cache."""
        return [i for i, kind in enumerate(self.layer_types) if kind == FULL]

    @property
    def num_linear_layers(self) -> int:
        return self.num_layers - len(self.kv_layers)

    @property
    def value_size(self) -> int:
        """Hv * Dv, the size of the output of linear attention."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_size(self) -> int:
        """C = 2 * Hk * Dk + Hv * Dv, the channels of the convolution: q, k and v."""
        return 2 * self.linear_num_key_heads * self.linear_key_head_dim + self.value_size

    def state_bytes(self, itemsize: int) -> int:
        """Return the bytes of a sequence's state. The convolution has `itemsize` bytes a number."""
        rule = self.value_size * self.linear_key_head_dim * 4
        conv = self.conv_size * (KERNEL_SIZE - 1) * itemsize
        return self.num_linear_layers * (rule + conv)


def _layer_types(raw: dict[str, Any], num_layers: int, path: Path) -> tuple[str, ...]:
    """Return the type of each layer: layer_types, or every fourth layer is full."""
    types = raw.get("layer_types")
    if types is None:
        interval = raw.get("full_attention_interval", 4)
        interval = check_field(path, "full_attention_interval", interval, int, (1, 10_000))
        types = [LINEAR if (i + 1) % interval else FULL for i in range(num_layers)]
    unknown = [kind for kind in types if kind not in (LINEAR, FULL)]
    if unknown or len(types) != num_layers:
        raise ValueError(
            f"{path}: layer_types must have {num_layers} entries {LINEAR!r} or {FULL!r}, and has "
            f"{len(types)} entries, with {', '.join(map(repr, unknown)) or 'no others'}"
        )
    return tuple(types)
