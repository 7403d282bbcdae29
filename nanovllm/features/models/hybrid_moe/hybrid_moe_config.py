"""HybridMoeConfig: the fields of the config.json of Qwen3.5-MoE."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from nanovllm.features.models.hybrid.hybrid_config import HybridConfig
from nanovllm.features.models.moe.moe_config import Experts, UnstackedFile

if TYPE_CHECKING:
    from nanovllm.features.models.hybrid_moe.model import Qwen3_5Moe


@dataclass(frozen=True)
class HybridMoeConfig(HybridConfig):
    """A HybridConfig of a model with mixtures of experts."""

    feature: ClassVar[str] = "hybrid_moe"
    experts: Experts | None = field(default=None, kw_only=True)

    @classmethod
    def from_json(cls, raw: dict[str, Any], path: Path) -> HybridMoeConfig:
        base = super().from_json(raw | {"intermediate_size": 1}, path)  # no layer has such an MLP
        assert isinstance(base, HybridMoeConfig)
        experts = Experts.from_json(raw, path, normalized=True, shared=True)
        return replace(base, experts=experts)

    def model_class(self) -> type[Qwen3_5Moe]:
        from nanovllm.features.models.hybrid_moe.model import Qwen3_5Moe

        return Qwen3_5Moe

    @property
    def weights_note(self) -> str:
        return f" ({self.experts})"

    def select_tensors(self, files: dict[Path, Any]) -> dict[Path, Any]:
        files = super().select_tensors(files)
        return {path: UnstackedFile(file) for path, file in files.items()}
