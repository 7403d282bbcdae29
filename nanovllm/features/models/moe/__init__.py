"""Models whose MLPs are mixtures of experts: Qwen3-MoE. Qwen3.5-MoE in hybrid/ uses them."""
