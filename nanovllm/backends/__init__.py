"""Optional kernels for a GPU and for a CPU. Plain torch runs without them."""
