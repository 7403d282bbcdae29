"""Triton kernels. Each has its plain-torch reference beside it; tests run both on the same input.

Where a CPU runs the plain version anyway, that one is the reference, and it stands in
nanovllm.layers or nanovllm.runner: a formula stands in one place.
"""
