"""Lessons, the ladder and exercises, which `nanovllm lessons` runs. No other place imports them."""
