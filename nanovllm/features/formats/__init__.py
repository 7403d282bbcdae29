"""Formats of checkpoints: GGUF, quantized safetensors, and overrides of config.json."""
