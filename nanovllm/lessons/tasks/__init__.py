"""The stubs that `python -m nanovllm.lessons build NAME` copies. Nothing imports them."""
