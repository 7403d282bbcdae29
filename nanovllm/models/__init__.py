"""The model and what it needs on any device, in plain torch: the reference of all kernels."""
