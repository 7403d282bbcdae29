"""Models besides Qwen3 and Llama: mixture of experts, and linear attention (Qwen3.5)."""
