"""Compares kernels with plain torch: at the start of an engine, and in `nanovllm check`."""
