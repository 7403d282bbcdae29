"""Models whose MLPs are mixtures of experts: Qwen3-MoE. hybrid_moe/ has Qwen3.5-MoE."""
