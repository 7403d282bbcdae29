"""Models other than Qwen3 and Llama.

families     which class reads the config of a family; Phi-3 and Phi-4, SmolLM3, Granite 3
text_config  models for images, of which the text is computed: Qwen3-VL, Ministral 3, Qwen3.5
gemma3       Gemma 3: windows, norms of 1 + w (norms.py), GELU
hybrid       layers of linear attention, with a state for each sequence: Qwen3.5
moe          mixtures of experts: Qwen3-MoE; hybrid uses them for Qwen3.5-MoE
"""
