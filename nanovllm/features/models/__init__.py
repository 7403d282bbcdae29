"""Models other than Qwen3 and Llama.

hybrid  layers of linear attention, with a state for each sequence: Qwen3.5
moe     mixtures of experts: Qwen3-MoE; hybrid uses them for Qwen3.5-MoE
"""
