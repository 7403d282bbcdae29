"""Triton kernels. Their plain torch references are in models/ or tests/helpers/references.py."""
