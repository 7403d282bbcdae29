"""Triton kernels. The plain torch reference of each is in models/ or tests/helpers/references.py."""
