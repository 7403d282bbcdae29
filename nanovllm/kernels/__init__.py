"""Triton's kernels for a GPU, and in cpu.py Numba's for a CPU.

Each has its plain-torch reference beside it, or in nanovllm.layers or nanovllm.runner where that one
runs by itself too: a formula stands in one place. Tests run both on the same input.
"""
