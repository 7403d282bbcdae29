"""The stubs that `nanovllm lessons build NAME` copies. Nothing imports them."""
