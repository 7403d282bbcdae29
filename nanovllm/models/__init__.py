"""The model and its parts in plain torch, for any device: the reference for all kernels."""
