"""Qwen3.5-MoE: Qwen3.5 with a mixture of experts in every layer."""

from nanovllm.features.models.hybrid.model import Qwen3_5
from nanovllm.features.models.hybrid_moe.hybrid_moe_config import HybridMoeConfig
from nanovllm.features.models.moe.model import make_mlp
from nanovllm.models.qwen3 import MLP


class Qwen3_5Moe(Qwen3_5):
    config: HybridMoeConfig

    def make_mlp(self, layer: int) -> MLP:
        return make_mlp(self.config, layer, self.backend)
