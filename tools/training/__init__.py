"""Trains and grades the embedded model, qwen3-nano."""
