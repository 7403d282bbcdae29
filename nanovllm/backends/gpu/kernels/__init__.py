"""Triton kernels. The plain torch reference of each is in models/ or tests/references.py."""
