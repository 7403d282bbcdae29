"""Models with linear attention and mixtures of experts: Qwen3.5-MoE."""
