"""Compares kernels with plain torch.

comparisons  one kernel, on small random inputs
at_start     the kernels and graphs of an engine, when it is made
"""
