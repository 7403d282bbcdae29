"""Models whose MLPs are mixtures of experts: Qwen3-MoE. Qwen3.5-MoE in hybrid uses them.

moe_config  the fields of config.json, and the tensors of the experts
qwen3_moe   the model
experts     products with the weights of experts in plain torch
"""
